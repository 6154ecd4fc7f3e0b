"""Other ways than routing to spend less on timm models, each undone by one call.

They are here to be compared with: studies train, count and time them as they do routed models.
"""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

# The one list of this package's names, see lazy_names.
# ruff: noqa: F401
if TYPE_CHECKING:
    from mmod.rivals.base import Rival, rival_of, undo_
    from mmod.rivals.channels import Channels, channels_
    from mmod.rivals.exit import Exit, exit_
    from mmod.rivals.experts import Experts, experts_
    from mmod.rivals.merge import Merge, merge_
    from mmod.rivals.prune import Prune, prune_
    from mmod.rivals.read import read_rival
    from mmod.rivals.recursions import Recursions, recursions_

__getattr__, __dir__, __all__ = lazy_names(__name__)
