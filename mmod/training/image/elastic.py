"""One checkpoint for many budgets: several capacities in every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmod import RoutingConfig, auxiliary_loss, set_capacity_
from mmod.training.image.config import ElasticConfig
from mmod.training.image.evaluate import EvalResult
from mmod.training.image.task import ClassificationTask, answers

__all__ = ["ElasticTask", "at_capacities"]


class ElasticTask(ClassificationTask):
    """The objective at several capacities of a routed model; see `ElasticConfig`.

    Args:
        model: The routed model. Its capacity after a pass is the last one drawn.
        criterion: Logits (B, C) and targets to a scalar.
        elastic: The capacities.
        options: Those of `ClassificationTask`.
    """

    def __init__(self, model: nn.Module, criterion: nn.Module, elastic: ElasticConfig, **options: Any) -> None:
        super().__init__(model, criterion, **options)
        self.elastic = elastic

    def objective(self, images: Tensor, targets: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits at the largest capacity and the parts of the loss; see `ClassificationTask.objective`.

        Beside the parts at the largest capacity, "elastic" is the sum over the others of the divergence from it, and of
        the auxiliary objectives where there are any.
        """
        smallest, *between, largest = self.elastic.capacities
        set_capacity_(self.model, largest)
        logits, parts = super().objective(images, targets, labels)
        others = []
        for capacity in (smallest, *random.sample(between, self.elastic.samples - 2)):
            set_capacity_(self.model, capacity)
            others.append(self.divergence(answers(self.model, images, targets), logits.detach()))
            if self.auxiliary:
                others.append(auxiliary_loss(self.model))
        return logits, {**parts, "elastic": torch.stack(others).sum()}


def at_capacities(
    model: nn.Module, elastic: ElasticConfig, routing: RoutingConfig, judge: Callable[[], EvalResult]
) -> EvalResult:
    """Judge a model at several capacities, and leave it at its own.

    Args:
        model: The routed model.
        elastic: The capacities.
        routing: How the model was routed; its capacity, one of them, is the model's own.
        judge: Evaluates the model as it is.

    Returns:
        The result at its own capacity, with the accuracies at each.
    """
    found = {}
    for capacity in elastic.capacities:
        set_capacity_(model, capacity)
        found[capacity] = judge()
    own = next(capacity for capacity in elastic.capacities if capacity == routing.capacity)
    set_capacity_(model, own)
    figures = {f"{capacity:g}": each.accuracies() for capacity, each in found.items()}
    return replace(found[own], capacities=figures)
