"""One checkpoint for many budgets: several capacities in every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmod import RoutingConfig, auxiliary_loss, set_capacity_
from mmod.training.engine.task import divergence
from mmod.training.image.config import ElasticConfig
from mmod.training.image.evaluate import EvalResult
from mmod.training.image.task import ClassificationTask, answers


class ElasticTask(ClassificationTask):
    """The objective at several capacities of a routed model; see `ElasticConfig`."""

    def __init__(self, model: nn.Module, criterion: nn.Module, elastic: ElasticConfig, **options: Any) -> None:
        super().__init__(model, criterion, **options)
        self.elastic = elastic

    def objective(self, images: Tensor, targets: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits and terms at the largest capacity; "elastic" sums the divergence of the others from them."""
        smallest, *between, largest = self.elastic.capacities
        set_capacity_(self.model, largest)
        logits, parts = super().objective(images, targets, labels)
        others = []
        for capacity in (smallest, *random.sample(between, self.elastic.samples - 2)):
            set_capacity_(self.model, capacity)
            others.append(divergence(answers(self.model, images, targets), logits.detach(), self.temperature))
            if self.auxiliary:
                others.append(auxiliary_loss(self.model))
        return logits, {**parts, "elastic": torch.stack(others).sum()}


def at_capacities(
    model: nn.Module, elastic: ElasticConfig, routing: RoutingConfig, judge: Callable[[], EvalResult]
) -> EvalResult:
    """Evaluate a model at several capacities; return the result at that of its routing, with the accuracies at each."""
    results = {}
    for capacity in elastic.capacities:
        set_capacity_(model, capacity)
        results[capacity] = judge()
    chosen = next(capacity for capacity in elastic.capacities if capacity == routing.capacity)
    set_capacity_(model, chosen)
    figures = {f"{capacity:g}": result.accuracies() for capacity, result in results.items()}
    return replace(results[chosen], capacities=figures)
