"""Names that are imported when they are first used, and modules that have another name than they had."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import Any

from mmod.extras import name_missing_extra

__all__ = ["lazy_names", "moved_module"]


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make the `__getattr__`, `__dir__` and `__all__` of a package that imports its names for type checkers only.

    The one list of names is the package's block of imports below `if TYPE_CHECKING:`, read off its source.

    Args:
        package: Name of the package, which is being imported.

    Returns:
        The three. `__getattr__` imports the module that a name comes from, or a module of the package.

    Example:
        >>> lazy_names("mmod.data")[2][:2]
        ['AugmentConfig', 'BatchStream']
    """
    module = sys.modules[package]
    spec = module.__spec__
    assert spec is not None
    source = spec.loader.get_source(package)  # type: ignore[union-attr]  # of files and of zip archives
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    home_of = {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name in home_of:
            with name_missing_extra():
                value = getattr(importlib.import_module(home_of[name]), name)
            # A name that was found once is an attribute like any other.
            setattr(module, name, value)
            return value
        if name[0] != "_" and importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(module), *home_of})

    return get, names, sorted(home_of)


def moved_module(old: str, new: str) -> None:
    """Let a module be imported, or run by `python -m`, under its old name for one more version.

    Args:
        old: `__name__` of the module that stands under the old name.
        new: The module's name.
    """
    warnings.warn(f"this module is {new}; its old name goes with the next version", DeprecationWarning, stacklevel=3)
    if old == "__main__":
        import runpy

        runpy.run_module(f"{new}.__main__", run_name="__main__", alter_sys=True)
    else:
        sys.modules[old] = importlib.import_module(new)
