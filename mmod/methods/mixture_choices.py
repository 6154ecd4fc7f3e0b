"""What the experts of a model chose, and how they choose in evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from mmod.methods.experts import Decision, ExpertMlp


def mixtures_of(model: nn.Module) -> dict[str, ExpertMlp]:
    """Return the mixtures of experts of a model by name.

    Args:
        model: Any model.
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, ExpertMlp)}


@contextmanager
def choosing_together(mixtures: Mapping[str, ExpertMlp]) -> Iterator[None]:
    """Let experts choose among the tokens of whole texts, as in training, for as long as the context lasts.

    The logits that decide of each token alone are recorded by `deciding` as before.

    Args:
        mixtures: The mixtures.
    """
    states = [mixture.mod_state for mixture in mixtures.values()]
    for state in states:
        state.together = True
    try:
        yield
    finally:
        for state in states:
            state.together = False


@contextmanager
def deciding(mixtures: Mapping[str, ExpertMlp]) -> Iterator[dict[str, Decision]]:
    """Record what experts compute, in the last pass that this thread makes in the context.

    Args:
        mixtures: The mixtures.

    Yields:
        The decisions by name, there when the context ends.
    """
    records = {name: mixture.mod_state.records.own for name, mixture in mixtures.items()}
    found: dict[str, Decision] = {}
    for record in records.values():
        record.asked, record.decision = True, None
    try:
        yield found
        found.update((name, record.decision) for name, record in records.items() if record.decision is not None)
    finally:
        for record in records.values():
            record.asked, record.decision = False, None
