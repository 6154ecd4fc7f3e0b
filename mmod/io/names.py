"""Suggestions for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["near_names"]


def near_names(name: str, known: Iterable[str], listing: str) -> str:
    """Return similar names, as a hint for the error message of an unknown name.

    Args:
        name: The unknown name.
        known: The known names.
        listing: Command that lists all known names, named if none is similar.

    Example:
        >>> near_names("vit_tinny", ["resnet18", "vit_tiny"], "timm.list_models()")
        'near ones: vit_tiny'
        >>> near_names("x", ["resnet18", "vit_tiny"], "timm.list_models()")
        'timm.list_models() lists the known ones'
    """
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    return f"near ones: {', '.join(near)}" if near else f"{listing} lists the known ones"
