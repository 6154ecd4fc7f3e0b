"""The former form of a routing config, in which the options of all parts stood side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmod.config.parts import Threshold
from mmod.config.reading import PARTS, read_parts, revise, score

# Each option to the part that has it.
FLAT = {
    **dict.fromkeys(("normalize", "bias", "init_std", "seed"), "router"),
    **dict.fromkeys(("threshold", "min_tokens", "max_tokens"), "select"),
    **dict.fromkeys(("gate_scale", "reweight_skipped"), "gate"),
    **dict.fromkeys(
        ("tokens", "frames", "shared", "predictor", "inference_threshold", "gate_on", "positions"), "language"
    ),
}


def regroup(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a routing config with every option in its part.

    Args:
        values: Fields of `RoutingConfig`, and options beside them.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: A value outside its range, or `min_tokens` or `max_tokens` of top-k.

    Example:
        >>> regroup({"router": "random", "seed": 1, "select": "threshold", "threshold": 0.9})["select"].threshold
        0.9
    """
    options: dict[str, dict[str, Any]] = {}
    for name in values.keys() & FLAT:
        options.setdefault(FLAT[name], {})[name.removeprefix("gate_") if FLAT[name] == "gate" else name] = values[name]
    grouped = {name: value for name, value in values.items() if name not in FLAT}
    if not options:
        return grouped
    parts = read_parts(grouped)
    if options.get("router", {}).get("normalize") == "block":
        options["router"]["normalize"] = False
        options.setdefault("language", {})["scored"] = "norm"
    # Options of what was not chosen had no effect; they are checked, and left out.
    for name in options.get("router", {}).keys() - vars(parts["router"]).keys():
        score("random" if name == "seed" else "linear", **{name: options["router"].pop(name)})
    if parts["select"] == "topk":
        unused = Threshold(**options.pop("select", {}))
        if unused.min_tokens or unused.max_tokens is not None:
            raise ValueError("min_tokens and max_tokens belong to select='threshold'; 'topk' is set by capacity")
    return {**grouped, **{name: revise(name, parts[name], options.get(name, {})) for name in PARTS if name in options}}
