"""Names that are imported when they are first used, and modules that have another name than they had."""

from __future__ import annotations

import importlib
import runpy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmod.extras import name_missing_extra

__all__ = ["lazy_names", "moved_module"]


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and `__dir__` of a package whose names live in its modules.

    Args:
        package: Name of the package.
        homes: Each of its modules, named within it, to the names that the package takes from there.

    Returns:
        The two functions. The first imports a name's module, or a module named in `homes` itself.

    Example:
        >>> get, _ = lazy_names("mmod", {"config": ("Plan",)})
        >>> get("Plan").__name__
        'Plan'
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name in home_of:
            with name_missing_extra():
                value = getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)
            # A name that was found once is an attribute like any other.
            setattr(sys.modules[package], name, value)
            return value
        if name in homes:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return get, names


def moved_module(old: str, new: str) -> None:
    """Let a module be imported, or run by `python -m`, under its old name for one more version.

    Args:
        old: `__name__` of the module that stands under the old name.
        new: The module's name.
    """
    warnings.warn(f"this module is {new}; its old name goes with the next version", DeprecationWarning, stacklevel=3)
    if old == "__main__":
        runpy.run_module(f"{new}.__main__", run_name="__main__", alter_sys=True)
    else:
        sys.modules[old] = importlib.import_module(new)
