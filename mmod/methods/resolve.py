"""The methods that a config names, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mmod.config import RoutingConfig, read_routing
from mmod.plain import without_none
from mmod.values import check_value

if TYPE_CHECKING:
    from mmod.methods.base import Method


def resolve_routing(fields: Mapping[str, object]) -> RoutingConfig:
    """Create a routing config.

    Args:
        fields: Fields of `RoutingConfig`; or `preset: NAME` with its arguments, `depth` only where no model tells it;
            or `plan: FILE`, which `RoutingConfig.save` wrote, with the fields to change.
    """
    check_value("a routing", fields, Mapping[str, object])
    fields = dict(fields)
    plan = fields.pop("plan", None)
    if plan is None:
        return read_routing(fields)
    name = fields.pop("preset", None)
    if name is not None:
        raise ValueError(f"routing takes a preset or a plan, got {name!r} and {plan!r}")
    return RoutingConfig.load(str(plan)).replace(**fields)


def resolve_methods(
    listed: Sequence[Mapping[str, object]],
    routing: Mapping[str, object],
    depths: Mapping[str, int] | None = None,
) -> tuple[Method, ...]:
    """Create the methods of a config, in the order in which they are applied.

    Args:
        listed: The config's `methods`: the `kind` and fields of each.
        routing: The config's `routing`, a routing of the parts that it names, applied last; None leaves a part dense.
        depths: Number of blocks by part, where it is known before the model is.
    """
    short = without_none(routing)
    entries = list(listed)
    if short:
        entries.append({"kind": "routing", "parts": short})
    if not entries:
        return ()

    def resolved(name: str, fields: Mapping[str, object]) -> RoutingConfig:
        if "preset" in fields and depths and name in depths:
            # A depth that the preset names itself wins.
            fields = {"depth": depths[name], **fields}
        return resolve_routing(fields)

    for place, entry in enumerate(entries):
        parts = entry.get("parts")
        if entry.get("kind") == "routing" and isinstance(parts, Mapping):
            entries[place] = {**entry, "parts": {name: resolved(name, fields) for name, fields in parts.items()}}
    # Imported here, because `--help` runs without torch, as does the refusal of a preset that nobody knows.
    from mmod.methods import read_method

    created: list[Method] = []
    for entry in entries:
        method = read_method(entry)
        refused = [earlier.kind for earlier in created if not earlier.precedes(method.kind)]
        if refused:
            raise ValueError(f"methods: {method.kind!r} cannot follow {', '.join(map(repr, refused))}: remove one")
        created.append(method)
    return tuple(created)
