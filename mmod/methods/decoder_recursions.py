"""Mixture-of-Recursions on decoder layers of transformers: causal choices, and a place in the cache for each recursion.

Axes: B samples, N tokens, K slots of a sample, D channels, R recursions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.adapters.transformers.context import OtherLayer
from mmod.adapters.transformers.language import valid_tokens
from mmod.adapters.transformers.saving import describe_method
from mmod.methods.recursions import GATE, Cycle, Recursions
from mmod.ops.gate import apply_gate
from mmod.routing import Routing
from mmod.routing.decoder import Predictor
from mmod.routing.groups import slots_of

__all__ = ["DecoderCycle", "describe_method", "release"]


class DecoderCycle(Cycle):
    """Shared decoder layers, whose r-th application caches keys and values where the r-th copy of them would.

    Args:
        config: How it works.
        stack: The layers of the model.
        shared: Those that are shared.
        others: Those that were left out.

    Attributes:
        predictors: One for each recursion but the first, where predictors decide in evaluation.
    """

    def __init__(self, config: Recursions, stack: BlockStack, shared: list[nn.Module], others: list[nn.Module]) -> None:
        super().__init__(config, stack, shared, others)
        weight = next(shared[0].parameters())
        if config.sampling == "predictor":
            given: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
            self.predictors = nn.ModuleList(Predictor(stack.dim, **given) for _ in range(config.recursions - 1))

    def _valid(self, arguments: Mapping[str, Any], x_BND: Tensor) -> Tensor | None:
        cache, seen = arguments.get("past_key_values"), 0
        if cache is not None:
            seen = cache.get_seq_length(self.mod_state.calls[0].index)
        if self.mod_state.config.choice == "recursions" and not self._alone(x_BND) and int(seen):
            raise ValueError(
                "text cannot be generated where recursions choose among tokens to come, as they do in training and "
                "without `sampling`: change the model with sampling='score' or 'predictor', or choice='tokens'"
            )
        mask = arguments.get("attention_mask")
        return None if mask is None else valid_tokens(mask, x_BND, seen)

    def _alone(self, x_BND: Tensor) -> bool:
        """Whether each token is decided by itself. Costs, which are counted on meta, are those of training."""
        return self.mod_state.config.sampling is not None and not self.training and not x_BND.is_meta

    def _choose(self, x_BND: Tensor, before_BN: Tensor | None, valid_BN: Tensor | None, recursion: int) -> Routing:
        predicted_BN = None
        if recursion and self.mod_state.config.sampling == "predictor":
            predicted_BN = self.predictors[recursion - 1](x_BND)
        if not recursion or not self._alone(x_BND):
            return super()._choose(x_BND, before_BN, valid_BN, recursion)._replace(predicted_BN=predicted_BN)
        score_BN = self.routers[recursion](x_BND)
        keep_BN = (score_BN if predicted_BN is None else predicted_BN) >= 0
        keep_BN = keep_BN if before_BN is None else keep_BN & before_BN
        index_BK, valid_BK, total = slots_of(keep_BN, keep_BN.sum(1).tolist())
        gate_BN = apply_gate(score_BN, "sigmoid", GATE)
        assert gate_BN is not None
        return Routing(
            score_BN, index_BK, gate_BN.gather(1, index_BK), valid_BK, total=total, predicted_BN=predicted_BN
        )

    def _run(
        self, number: int, recursion: int, arguments: Mapping[str, Any], x_BND: Tensor, y: Tensor, routing: Routing,
        keys: list[tuple[Tensor, Tensor]],
    ) -> Tensor:  # fmt: skip
        if self.mod_state.config.keys == "first":
            return super()._run(number, recursion, arguments, x_BND, y, routing, keys)
        block, call = self.shared[number], self.mod_state.calls[number]
        if not recursion:
            return cast(Tensor, block(y, **arguments))
        # Each recursion has a place of its own in the cache: that of the layer it takes the place of.
        call = replace(call, index=call.index + recursion * len(self.shared))
        call.open_cache(arguments)
        selected = dict(call.select_tokens(arguments, x_BND, routing)) if y.shape[1] else {}
        call.begin_update(arguments, x_BND, routing)
        if not y.shape[1]:
            return y
        cache = arguments.get("past_key_values")
        if cache is not None:
            selected["past_key_values"] = OtherLayer(cache, call.index)
        return cast(Tensor, block(y, **selected))


def release(model: nn.Module) -> None:
    """Give layers without weights, as in a loaded model, new ones.

    Args:
        model: The model, with its shared layers.
    """
    initialise: Any = model._init_weights
    for cycle in [module for module in model.modules() if isinstance(module, DecoderCycle)]:
        weight = next(cycle.shared.parameters())
        for block in cycle.mod_state.others:
            if next(block.parameters()).is_meta and not weight.is_meta:
                block.to_empty(device=weight.device).apply(initialise)
