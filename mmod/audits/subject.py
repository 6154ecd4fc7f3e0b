"""What an audit needs to know of a kind of training."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from numpy.typing import ArrayLike
from torch import Tensor, nn

from mmod.analysis.audit.choices import default_choices
from mmod.analysis.audit.shifts import SHIFTS
from mmod.audits.config import AuditOptions
from mmod.values import refuse_unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mmod.analysis.audit.auditor import Shift
    from mmod.analysis.audit.generation import Generation
    from mmod.data.stream import BatchStream

__all__ = ["Again", "Sorted", "Subject", "unsorted"]

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


def unsorted(stream: BatchStream) -> Again:
    """Return the batches of an evaluation set whose samples are sorted by nothing.

    Args:
        stream: The set.
    """
    return Again(lambda: (Sorted(batch) for batch in stream.batches(0)), stream.steps_per_epoch)


class Subject(ABC, Generic[Config]):
    """A trained model and the set that it is judged on; a subclass for each kind of training.

    Args:
        config: Says which.

    Attributes:
        split: The key of `data` that names what is evaluated on.
        unasked: Conditions that are made only where they are named.
    """

    split: ClassVar[str] = "val_split"
    unasked: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: Config) -> None:
        self.config = config

    def conditions(self, options: AuditOptions) -> list[str]:
        """Return the names of the choices of tokens that are compared.

        Args:
            options: How to audit.
        """
        if options.conditions is not None:
            return options.conditions
        return [name for name in default_choices(options.reference is not None) if name not in self.unasked]

    @abstractmethod
    def create(self, reference: str | None = None) -> nn.Module:
        """Make the model, in evaluation mode and on its device.

        Args:
            reference: Folder of a dense run whose model is made instead.
        """

    @abstractmethod
    def batches(self, changes: Mapping[str, Any] = MappingProxyType({})) -> Iterable[Sorted]:
        """Return the evaluation set.

        Args:
            changes: Keys of `data` in which another set differs.

        Raises:
            ValueError: A key that there is not.
        """

    def data(self, changes: Mapping[str, Any]) -> Any:
        """Return the config of another set.

        Args:
            changes: As for `batches`.
        """
        config: Any = self.config
        refuse_unknown("key of data", changes, [field.name for field in dataclasses.fields(config.data)])
        return dataclasses.replace(config.data, **changes)

    @abstractmethod
    def judge(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return loss and accuracy of each sample; see `mmod.analysis.audit.judges`."""

    @abstractmethod
    def shifted(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Return a batch whose images (B, C, H, W) are changed."""

    def flops(self, model: nn.Module) -> dict[str, Any] | None:
        """Return the FLOPs of a sample by part, None where they are not counted."""
        return None

    def cost(self, model: nn.Module) -> float | None:
        """Return the FLOPs of a sample of the set in a model of another run, None where they are not counted.

        Args:
            model: The model.
        """
        return None

    def generation(self, model: nn.Module) -> Generation | None:
        """Return how the model decides while it writes long texts; None where that is not asked for."""
        return None

    def maps(self, model: nn.Module, count: int) -> tuple[dict[str, Any], Figure] | None:
        """Return what is kept of some samples, as plain values and drawn; None where it is not drawn."""
        return None

    def shifts(self, options: AuditOptions) -> dict[str, Shift]:
        """Return the shifts that are asked for, as functions of batches.

        Args:
            options: How to audit.

        Raises:
            ValueError: One that there is not.
        """
        refuse_unknown("shift of audit.shifts", options.shifts, list(SHIFTS))

        def shift_of(name: str) -> Shift:
            def shift(own: Sorted, images: range) -> Sorted:
                return own._replace(batch=self.shifted(own.batch, lambda x_BCHW: SHIFTS[name](x_BCHW, images)))

            return shift

        return {name: shift_of(name) for name in options.shifts}
