"""How a language model decides what runs in a pass over a whole text: as in training, or for each token alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from mmod import is_routed, routed_blocks, trace
from mmod.methods.mixture_choices import choosing_together as experts_together
from mmod.methods.mixture_choices import deciding as experts_deciding
from mmod.methods.mixture_choices import mixtures_of
from mmod.methods.recursion_choices import choosing_together, cycle_of, deciding
from mmod.model import deciding_by, routing_config

__all__ = ["Decided", "Ways"]


class Decided(NamedTuple):
    """What was decided in one place.

    Args:
        keep_BN: Which tokens ran there (B, N).
        alone_BN: Which would run if each were decided alone, given the same states; None where there is one way.
    """

    keep_BN: Tensor
    alone_BN: Tensor | None


class Ways:
    """The places in a model that decide which tokens run there: routed blocks, recursions, experts.

    Experts inside a routed block share its tokens, and are not listed.

    Args:
        model: A language model; a dense one has none.

    Attributes:
        names: Names of those places.
        both: Some take the best of a text in training and decide each token alone in evaluation.
        alone: In evaluation all decide each token from those before it, as generation must.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [place for kind in (_RoutedBlocks, _Recursions, _Experts) for place in kind.found(model)]
        self.names = [name for place in self._places for name in place.names]
        self.both = any(place.both for place in self._places)
        self.alone = all(place.alone for place in self._places)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let what decides each token alone take the best among all tokens, as in training."""
        with ExitStack() as stack:
            for place in self._places:
                if place.both:
                    stack.enter_context(place.together())
            yield

    @contextmanager
    def deciding(self) -> Iterator[dict[str, Decided]]:
        """Record the decisions of a pass by name; they are there when the context ends."""
        found: dict[str, Decided] = {}
        with ExitStack() as stack:
            for place in self._places:
                stack.enter_context(place.deciding(found))
            yield found


class _Places(ABC):
    """Places of one kind, with the attributes of `Ways`."""

    names: list[str]
    both: bool
    alone: bool

    @classmethod
    @abstractmethod
    def found(cls, model: nn.Module) -> list[_Places]:
        """Return those of a model: none or one."""

    @abstractmethod
    def together(self) -> AbstractContextManager[None]:
        """Let them take the best of a text."""

    @abstractmethod
    def deciding(self, found: dict[str, Decided]) -> AbstractContextManager[None]:
        """Add what they decide to a dict when the context ends."""


class _RoutedBlocks(_Places):
    def __init__(self, model: nn.Module) -> None:
        config = routing_config(model)
        self.model, self.names = model, list(routed_blocks(model))
        self.threshold = config.language.inference_threshold
        self.both = self.threshold is not None
        self.alone = self.both or (config.select != "topk" and config.router.learns)

    @classmethod
    def found(cls, model: nn.Module) -> list[_Places]:
        return [cls(model)] if is_routed(model) else []

    def together(self) -> AbstractContextManager[None]:
        language = {"inference_threshold": None, "predictor": False}
        return deciding_by(self.model, lambda config: config.replace(language=language))

    @contextmanager
    def deciding(self, found: dict[str, Decided]) -> Iterator[None]:
        with trace(self.model) as routings:
            yield
        for name, block in routed_blocks(self.model).items():
            routing, alone_BN = routings[name], None
            if self.threshold is not None:
                logit_BN = routing.score_BN if routing.predicted_BN is None else routing.predicted_BN
                alone_BN = block.router.config.router.squashed(logit_BN) >= self.threshold
            found[name] = Decided(routing.keep_BN, alone_BN)


class _Recursions(_Places):
    """Recursions after the first, which takes all tokens."""

    def __init__(self, model: nn.Module) -> None:
        cycle = cycle_of(model)
        assert cycle is not None
        self.cycle, config = cycle, cycle.mod_state.config
        place = next(name for name, module in model.named_modules() if module is cycle)
        self.names = [f"{place}.recursion{number + 1}" for number in range(1, config.recursions)]
        self.both = config.sampling is not None
        self.alone = self.both or config.choice == "tokens"

    @classmethod
    def found(cls, model: nn.Module) -> list[_Places]:
        return [] if cycle_of(model) is None else [cls(model)]

    def together(self) -> AbstractContextManager[None]:
        return choosing_together(self.cycle)

    @contextmanager
    def deciding(self, found: dict[str, Decided]) -> Iterator[None]:
        with deciding(self.cycle) as made:
            yield
        before_BN = None
        for name, routing in zip(self.names, made[1:]):
            logit_BN = routing.score_BN if routing.predicted_BN is None else routing.predicted_BN
            # Only what ran before may run again.
            alone_BN = logit_BN >= 0 if before_BN is None else (logit_BN >= 0) & before_BN
            before_BN = routing.keep_BN
            found[name] = Decided(before_BN, alone_BN if self.both else None)


class _Experts(_Places):
    def __init__(self, model: nn.Module) -> None:
        routed = list(routed_blocks(model)) if is_routed(model) else []
        self.mixtures = mixtures_of(model)
        config = next(iter(self.mixtures.values())).mod_state.config
        self.listed = {
            name: [f"{name}.expert{number + 1}" for number in range(config.experts)]
            for name in self.mixtures
            if not any(name.startswith(f"{block}.") for block in routed)
        }
        self.names = [expert for names in self.listed.values() for expert in names]
        self.both, self.alone = config.sampling is not None, not config.chooses_together(training=False)

    @classmethod
    def found(cls, model: nn.Module) -> list[_Places]:
        return [cls(model)] if mixtures_of(model) else []

    def together(self) -> AbstractContextManager[None]:
        return experts_together(self.mixtures)

    @contextmanager
    def deciding(self, found: dict[str, Decided]) -> Iterator[None]:
        with experts_deciding({name: self.mixtures[name] for name in self.listed}) as made:
            yield
        for name, decision in made.items():
            for number, expert in enumerate(self.listed[name]):
                logit_EBN = decision.logit_EBN
                alone_BN = None if logit_EBN is None else logit_EBN[number] >= 0
                found[expert] = Decided(decision.keep_EBN[number], alone_BN)
