"""Methods make a model cheaper: `mmod.apply_` applies one, `mmod.undo_` removes it.

Routing is one of them. Pruning, merging, smaller images and early exit are baselines. Studies train, count and time all
of them in the same way, and those of `mmod.lab`.
"""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

# For type checkers; at run time, lazy_names imports the same names on first use.
# ruff: noqa: F401
if TYPE_CHECKING:
    from mmod.methods.base import METHODS, Method, methods_of, register_method, undo_
    from mmod.methods.exit import Exit
    from mmod.methods.merge import Merge
    from mmod.methods.prune import Prune
    from mmod.methods.read import read_method
    from mmod.methods.resize import Resize
    from mmod.methods.route import Route

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "mmod.methods.base": ["METHODS", "Method", "methods_of", "register_method", "undo_"],
        "mmod.methods.exit": ["Exit"],
        "mmod.methods.merge": ["Merge"],
        "mmod.methods.prune": ["Prune"],
        "mmod.methods.read": ["read_method"],
        "mmod.methods.resize": ["Resize"],
        "mmod.methods.route": ["Route"],
    },
)
