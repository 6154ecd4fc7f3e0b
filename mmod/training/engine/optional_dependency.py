"""Tools whose packages are optional say what to install."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["EXTRAS", "extra"]

EXTRAS = {"clip": ("open_clip",), "vlm": ("transformers", "peft", "accelerate")}
"""Extra of mmod's installation to the packages it brings."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """End the program with an instruction when an import inside needs an extra that is not installed.

    Args:
        name: The extra, one of `EXTRAS`.

    Raises:
        SystemExit: A package of the extra is missing.

    Example:
        >>> with extra("vlm"):
        ...     raise ModuleNotFoundError("No module named 'peft'", name="peft")
        Traceback (most recent call last):
        SystemExit: error: this needs the package peft, which is not installed: pip install -e ".[vlm]"
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS[name]:
            raise
        instruction = f'pip install -e ".[{name}]"'
        sys.exit(f"error: this needs the package {package}, which is not installed: {instruction}")
