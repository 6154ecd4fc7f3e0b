"""How a language model decides which tokens run in a pass over a whole text: as in training, or each token alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from mmod import Routing, is_routed, routed_blocks, trace
from mmod.methods.recursion_choices import choosing_together, cycle_of, deciding
from mmod.model import deciding_by, routing_config

__all__ = ["alone", "decides_alone", "decides_both_ways", "decision_names", "decisions", "together"]


def decides_both_ways(model: nn.Module) -> bool:
    """Return whether a model takes the top-k in training and decides each token alone in evaluation.

    Args:
        model: A language model.
    """
    cycle = cycle_of(model)
    if cycle is not None:
        return cycle.mod_state.config.sampling is not None
    return is_routed(model) and routing_config(model).language.inference_threshold is not None


def decides_alone(model: nn.Module) -> bool:
    """Return whether a model in evaluation decides each token from those before it, as generation must.

    Args:
        model: A language model; a dense one does.
    """
    cycle = cycle_of(model)
    if cycle is not None:
        return cycle.mod_state.config.sampling is not None or cycle.mod_state.config.choice == "tokens"
    if not is_routed(model):
        return True
    config = routing_config(model)
    return decides_both_ways(model) or (config.select != "topk" and config.router.learns)


def together(model: nn.Module) -> AbstractContextManager[None]:
    """Let a model that decides each token alone take the top-k among all tokens, as in training.

    Args:
        model: A model for which `decides_both_ways`.
    """
    cycle = cycle_of(model)
    if cycle is not None:
        return choosing_together(cycle)
    language = {"inference_threshold": None, "predictor": False}
    return deciding_by(model, lambda config: config.replace(language=language))


def decision_names(model: nn.Module) -> list[str]:
    """Return the names of what decides in a model: routed blocks, or recursions after the first, which takes all.

    Args:
        model: A language model.
    """
    cycle = cycle_of(model)
    if cycle is not None:
        name = next(name for name, module in model.named_modules() if module is cycle)
        return [f"{name}.recursion{number + 1}" for number in range(1, cycle.mod_state.config.recursions)]
    return list(routed_blocks(model)) if is_routed(model) else []


@contextmanager
def decisions(model: nn.Module) -> Iterator[dict[str, Routing]]:
    """Record the decisions of a pass by name; they are there when the context ends.

    Args:
        model: A language model.
    """
    found: dict[str, Routing] = {}
    cycle = cycle_of(model)
    if cycle is not None:
        with deciding(cycle) as made:
            yield found
        found.update(zip(decision_names(model), made[1:]))
    elif is_routed(model):
        with trace(model) as traced:
            yield found
        found.update(traced)
    else:
        yield found


def alone(model: nn.Module, routings: Mapping[str, Routing]) -> dict[str, Tensor]:
    """Return which tokens would run where each is decided alone, given the states that the top-k led to (B, N).

    Args:
        model: A model for which `decides_both_ways`.
        routings: Its decisions by top-k.
    """
    logits = {
        name: routing.score_BN if routing.predicted_BN is None else routing.predicted_BN
        for name, routing in routings.items()
    }
    if cycle_of(model) is not None:
        # Only what ran before may run again.
        before = [None, *(routing.keep_BN for routing in routings.values())]
        return {
            name: logit_BN >= 0 if before_BN is None else (logit_BN >= 0) & before_BN
            for (name, logit_BN), before_BN in zip(logits.items(), before)
        }
    found = {}
    for name, block in routed_blocks(model).items():
        config = block.router.config
        assert config.language.inference_threshold is not None
        found[name] = config.router.squashed(logits[name]) >= config.language.inference_threshold
    return found
