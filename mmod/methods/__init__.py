"""Methods: the ways to make a model cheaper, each applied by `mmod.apply_` and taken back by `mmod.undo_`.

Routing is one of them. Pruning, merging, smaller images and early exit are its rivals; experts, channels of ResNets and
shared blocks are its relatives. Studies train, count and time all of them alike.
"""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

# The one list of this package's names, see lazy_names.
# ruff: noqa: F401
if TYPE_CHECKING:
    from mmod.methods.base import METHODS, Method, methods_of, register_method, undo_
    from mmod.methods.channels import Channels
    from mmod.methods.exit import Exit
    from mmod.methods.experts import Experts
    from mmod.methods.merge import Merge
    from mmod.methods.prune import Prune
    from mmod.methods.read import read_method
    from mmod.methods.recursions import Recursions
    from mmod.methods.resize import Resize
    from mmod.methods.route import Route

__getattr__, __dir__, __all__ = lazy_names(__name__)
