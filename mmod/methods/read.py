"""Methods from plain values, as configs hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mmod.methods.base import Method
from mmod.methods.channels import Channels
from mmod.methods.exit import Exit
from mmod.methods.experts import Experts
from mmod.methods.merge import Merge
from mmod.methods.prune import Prune
from mmod.methods.recursions import Recursions
from mmod.methods.resize import Resize
from mmod.values import one_of, refuse_unknown

KINDS: dict[str, type[Method]] = {
    method.kind: method for method in (Prune, Merge, Resize, Exit, Experts, Channels, Recursions)
}


def read_method(values: Mapping[str, Any]) -> Method:
    """Return the method that plain values describe.

    Args:
        values: `kind`, and fields of that method.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: An unknown kind or field, or a value out of range.

    Example:
        >>> read_method({"kind": "prune", "keep": 0.5, "blocks": [2], "fuse": False})
        Prune(keep=0.5, blocks=(2,), fuse=False, by='auto')
    """
    own = dict(values)
    one_of("method.kind", own.get("kind"), list(KINDS))
    kind = KINDS[own.pop("kind")]
    refuse_unknown(f"field of method {kind.kind}", own, [field.name for field in fields(kind)])
    return kind(**own)
