"""Suggestions for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near_names(name: str, known: Iterable[str], listing: str) -> str:
    """Return similar names as a hint for an error message, or the command that lists all.

    Example:
        >>> near_names("vit_tinny", ["resnet18", "vit_tiny"], "timm.list_models()")
        'near ones: vit_tiny'
        >>> near_names("x", ["resnet18", "vit_tiny"], "timm.list_models()")
        'timm.list_models() lists the known ones'
    """
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    return f"near ones: {', '.join(near)}" if near else f"{listing} lists the known ones"
