"""Other ways than routing tokens to spend less on timm models, each undone by one call.

Pruning, merging, smaller images and early exit are rivals of routing; experts, channels of ResNets and shared blocks
are relatives, which do not route tokens around blocks. Studies train, count and time all of them as they do routed
models.
"""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

# The one list of this package's names, see lazy_names.
# ruff: noqa: F401
if TYPE_CHECKING:
    from mmod.methods.base import Method, method_of, undo_
    from mmod.methods.channels import Channels, channels_
    from mmod.methods.exit import Exit, exit_
    from mmod.methods.experts import Experts, experts_
    from mmod.methods.merge import Merge, merge_
    from mmod.methods.prune import Prune, prune_
    from mmod.methods.read import read_method
    from mmod.methods.recursions import Recursions, recursions_
    from mmod.methods.resize import Resize, resize_

__getattr__, __dir__, __all__ = lazy_names(__name__)
