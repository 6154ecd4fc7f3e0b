"""Lazy imports: a package imports its public names on first use, and names the extra that is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def lazy_names(
    package: str, names_in: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose names are imported on first use.

    `__getattr__` also imports submodules. Type checkers read the names below `if TYPE_CHECKING:` in the package.

    Args:
        package: Name of the package.
        names_in: Public names by the module that defines them.

    Example:
        >>> lazy_names("mmod", {"mmod.config": ["score", "Gate"], "mmod.routing": ["Routing"]})[2]
        ['Gate', 'Routing', 'score']
    """
    module = sys.modules[package]
    home_of: dict[str, str] = {}
    for home, names in names_in.items():
        home_of |= dict.fromkeys(names, home)

    def get(name: str) -> object:
        if name in home_of:
            with name_missing_extra():
                value = getattr(importlib.import_module(home_of[name]), name)
            # Cache the name, so that the next access finds it as a plain attribute.
            setattr(module, name, value)
            return value
        if name[0] != "_" and importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    public = sorted(home_of)
    return get, lambda: public, public


def import_path(path: str) -> Any:
    """Return what a path `module:name` names.

    Example:
        >>> import_path("mmod.values:one_of").__name__
        'one_of'
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


EXTRAS = {
    "train": (
        "PIL",
        "docstring_parser",
        "filelock",
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
    "parquet": ("pyarrow",),
    "remote": ("fsspec",),
}
"""Imported packages by extra."""
# Packages of no extra, which single commands and options need.
_OTHERS = ("pandas", "tensorboard")


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
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
        is_known = extra is not None or package in _OTHERS
        if not is_known or not (isinstance(error, ModuleNotFoundError) or _is_folder(package)):
            raise
        instruction = f"pip install {package}"
        if extra is not None:
            instruction = f'pip install "mmod[{extra}]"'
        message = f"this needs the package {package}, which is not installed: {instruction}"
        raise ModuleNotFoundError(message, name=error.name) from None


def _is_folder(package: str) -> bool:
    """Return whether a package is a folder of the same name without code, such as `datasets` of a clone."""
    module = sys.modules.get(package)
    return module is not None and getattr(module, "__file__", None) is None
