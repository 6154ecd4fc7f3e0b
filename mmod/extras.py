"""Extras of mmod's installation, their packages, and the error message if one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {
    "train": (
        "PIL",
        "adjustText",
        "docstring_parser",
        "filelock",
        "jsonargparse",
        "matplotlib",
        "scipy",
        "sklearn",
        "timm",
        "torchvision",
        "webdataset",
        "yaml",
    ),
    "clip": ("open_clip",),
    "vlm": ("accelerate", "peft", "transformers"),
    "datasets": ("datasets",),
}
"""Imported packages by extra."""


@contextmanager
def name_missing_extra() -> Iterator[None]:
    """Context manager in which a failing import names the extra to install.

    Example:
        >>> with name_missing_extra():
        ...     raise ModuleNotFoundError("No module named 'peft'", name="peft")
        Traceback (most recent call last):
        ModuleNotFoundError: this needs the package peft, which is not installed: pip install "mmod[vlm]"
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        instruction = f'pip install "mmod[{extra}]"'
        message = f"this needs the package {package}, which is not installed: {instruction}"
        raise ModuleNotFoundError(message, name=error.name) from None
