"""Collapsed routers: how the figures of logged steps show it, and what to change in the config."""

from __future__ import annotations

from collections.abc import Mapping

from mmod.config import RoutingConfig, Threshold

# A single batch may look like a collapse, and routers start with equal scores.
_PATIENCE = 3
# Below this share of their size, scores differ by rounding alone.
_CONSTANT = 1e-5
_SAME, _ALL, _NOTHING = 0.95, 0.95, 0.01
_CONTENT = "'attention', 'norm' or 'linear'"


class Collapse:
    """Reports collapsed routers: once per block and reason, after three logged steps in a row that show it."""

    def __init__(self, configs: Mapping[str, RoutingConfig]) -> None:
        self._configs = configs
        self._since: dict[tuple[str, str], list[int]] = {}

    def messages(self, block: str, figures: Mapping[str, float | None], step: int) -> list[str]:
        """Return the messages about a block after a logged step; `figures` are those of `Figures` in `health.py`."""
        config, reason = self._configs[block], _reason(self._configs[block], figures)
        for key in [key for key in self._since if key[0] == block and key[1] != reason]:
            # A complete list stays: it was reported.
            if len(self._since[key]) < _PATIENCE:
                del self._since[key]
        if reason is None:
            return []
        steps = self._since.setdefault((block, reason), [])
        if len(steps) >= _PATIENCE:
            return []
        steps.append(step)
        if len(steps) < _PATIENCE:
            return []
        return [
            f"the router of {block} has collapsed: since step {steps[0]} {_SAYS[reason]}. {_advice(reason, config)}"
        ]


_SAYS = {
    "scores": "its scores are the same for all tokens, so that places decide",
    "places": "it keeps the same places in every image of a batch, as a fixed pattern would",
    "all": "it keeps nearly all tokens that it may skip, so that little is saved",
    "nothing": "it keeps hardly any of the tokens that it may skip",
    "gradient": "no score has a gradient, so that it does not learn",
}


def _reason(config: RoutingConfig, figures: Mapping[str, float | None]) -> str | None:
    """Return the reason of a collapse, None for a healthy block; the first that applies explains the others."""
    load, spread, same = figures["load"], figures["spread"], figures["same_places"]
    reads = not config.router.positional
    if config.router.learns and load and figures["gradient"] == 0:
        return "gradient"
    if reads and spread is not None and spread <= _CONSTANT * (figures["level"] or 0.0):
        return "scores"
    if isinstance(config.select, Threshold) and load is not None and not _NOTHING < load < _ALL:
        return "all" if load >= _ALL else "nothing"
    return "places" if reads and same is not None and same >= _SAME else None


def _advice(reason: str, config: RoutingConfig) -> str:
    threshold = config.select.threshold if isinstance(config.select, Threshold) else None
    if reason == "all":
        # MoDification (arXiv 2410.14268) ends there with its loss on the load alone.
        pull = f"losses={{'capacity': 1.0}} pulls the share to capacity={config.capacity}"
        pull = f"the loss 'load' alone may leave it there, and {pull}" if "load" in config.losses else pull
        return f"Raise select.threshold above {threshold:g}" + (f"; {pull}." if config.router.learns else ".")
    if reason == "nothing":
        loss = " and, for a score that learns, losses={'capacity': 1.0}" if config.router.learns else ""
        return f"Lower select.threshold below {threshold:g}; select.min_tokens keeps a few in any case{loss}."
    if reason == "gradient":
        if config.gate.name != "identity" and config.gate.scale:
            # As in a last block of which only the class token is read, which has no gate.
            why = "Nothing reads what its gate weighs: leave the block out of blocks"
        else:
            gate = f"gate={config.gate.name!r} of scale {config.gate.scale:g}"
            why = f"{gate} sends none: set 'tanh', 'sigmoid' or 'linear'"
        return f"{why}, or set losses such as {{'importance': 1.0}}."
    if not config.router.learns:
        return f"router={config.router.name!r} does not tell these tokens apart: try another of {_CONTENT}."
    kept = ""
    if "membership" in config.losses:
        kept = f" losses.membership={config.losses['membership']:g} makes firm what is kept already: lower it."
    return (
        "losses={'importance': 1.0} teaches it what attention finds; router='attention' needs no training, and "
        f"router='stride' keeps fixed places at no cost.{kept}"
    )
