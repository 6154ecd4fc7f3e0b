"""What an audit needs to know of a kind of training."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from mmod.analysis.audit.choices import default_choices
from mmod.analysis.audit.shifts import SHIFTS
from mmod.audits.config import AuditOptions
from mmod.data.stream import BatchStream
from mmod.training.engine.distributed import Process
from mmod.training.engine.evaluate import KeptShares, RoutedResult
from mmod.training.kinds import recipe_of
from mmod.values import refuse_unknown

if TYPE_CHECKING:
    from mmod.analysis.audit.auditor import Shift
    from mmod.analysis.audit.generation import Generation
    from mmod.analysis.plots import RoutingMaps

Config = TypeVar("Config")


class Sorted(NamedTuple):
    """A batch, what its samples are sorted by, and what is known of its tokens; see `mmod.audit`."""

    batch: Any
    strata: Mapping[str, Sequence[str] | Sequence[float]] = MappingProxyType({})
    kinds: Mapping[str, ArrayLike] = MappingProxyType({})


class Again:
    """Batches that can be passed as often as is asked for.

    Args:
        make: Yields them.
        count: How many there are.
    """

    def __init__(self, make: Callable[[], Iterator[Sorted]], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sorted]:
        return self._make()


class Subject(ABC, Generic[Config]):
    """A trained model and the set that it is judged on; a subclass for each kind of training.

    Args:
        config: Says which.

    Attributes:
        split: The key of `data` that names what is evaluated on.
        unasked: Conditions that are made only where they are named.
        recipe: The kind of training, which makes, judges and counts the model.
        model: The routed model, once it was made.
    """

    split: ClassVar[str] = "val_split"
    unasked: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: Config) -> None:
        self.config = config
        self.recipe: Any = recipe_of(config)

    def conditions(self, options: AuditOptions) -> list[str]:
        """Return the names of the choices of tokens that are compared."""
        if options.conditions is not None:
            return options.conditions
        return [name for name in default_choices(options.reference is not None) if name not in self.unasked]

    def create(self, reference: str | None = None) -> nn.Module:
        """Make the model, in evaluation mode and on its device."""
        kind = type(self.recipe)
        plain = kind(self.recipe.plain())
        if reference is not None:
            return kind(dataclasses.replace(plain.finished(reference), routing=None)).load()
        self.model = plain.load()
        return self.model

    @abstractmethod
    def batches(self, changes: Mapping[str, Any] = MappingProxyType({})) -> Iterable[Sorted]:
        """Return the evaluation set."""

    def data(self, changes: Mapping[str, Any]) -> Any:
        """Return the config of another set."""
        config: Any = self.config
        refuse_unknown("key of data", changes, [field.name for field in dataclasses.fields(config.data)])
        return dataclasses.replace(config.data, **changes)

    def stream(self, changes: Mapping[str, Any]) -> BatchStream:
        """Return the batches of another set as the model reads them."""
        config: Any = self.config
        other = type(self.recipe)(dataclasses.replace(config, data=self.data(changes)))
        stream: BatchStream = other.create_eval_stream(Process(0, 1, other.device), self.model)
        return stream

    def judge(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return loss and accuracy of each sample; see `mmod.analysis.audit.judges`."""
        judged: tuple[Tensor, Tensor] = self.recipe.judge(model, batch)
        return judged

    def shifted(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Return a batch whose images (B, C, H, W) are changed, and not what is said of them."""
        images, labels = batch
        return change(images), labels

    def flops(self, model: nn.Module) -> dict[str, Any] | None:
        """Return the FLOPs of a sample by part, None where they are not counted."""
        report = self.recipe.report(model)
        return None if report is None else dict(report.to_dict())

    def cost(self, model: nn.Module) -> float:
        """Return the FLOPs of a sample of the set in a model of another run, on average where these follow from it."""
        kept, found = KeptShares(model, next(model.parameters()).device), RoutedResult()
        for own in self.batches():
            with torch.inference_mode(), kept.watch():
                self.judge(model, own.batch)
        found.kept = kept.means()
        return float(sum(self.recipe.cost(model, found).values()))

    def generation(self, model: nn.Module) -> Generation | None:
        """Return how the model decides while it writes long texts; None where that is not asked for."""
        return None

    def maps(self, model: nn.Module, count: int) -> RoutingMaps | None:
        """Return what is kept of some samples; None where it is not drawn."""
        return None

    def shifts(self, options: AuditOptions) -> dict[str, Shift]:
        """Return the shifts that are asked for, as functions of batches."""
        refuse_unknown("shift of audit.shifts", options.shifts, list(SHIFTS))

        def shift_of(name: str) -> Shift:
            def shift(own: Sorted, images: range) -> Sorted:
                return own._replace(batch=self.shifted(own.batch, lambda x_BCHW: SHIFTS[name](x_BCHW, images)))

            return shift

        return {name: shift_of(name) for name in options.shifts}
