"""What a study compares: rules that make a training config of the dense model's."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = ["DENSE", "Dense", "Entrant", "Routed"]

DENSE = "dense"
"""Name of the entrant that all others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Entrant(ABC):
    """A model of a study, made from the dense one by its training config.

    Args:
        name: Its name in the study, and of its run folders.
        series: Entrants of one series are joined in the picture.
        capacity: Capacity of its routed blocks; None where its routing says more than one number.
        control: Name of the entrant that it is compared with besides the dense one.
        share: Its time in training as a share of the dense model's.
        is_trained: It is trained; otherwise it is evaluated as it is made.

    Attributes:
        is_tuned: It starts from the trained dense model; otherwise from scratch.
    """

    name: str
    series: str
    capacity: float | None = 1.0
    control: str | None = None
    share: float = 1.0
    is_trained: bool = True
    is_tuned: ClassVar[bool] = True

    @abstractmethod
    def configure(self, dense: Any, tuned: Any) -> Any:
        """Return the config of its run; the study sets the folder.

        Args:
            dense: Config that trains the dense model.
            tuned: Config that fine-tunes the trained dense model.
        """


@dataclass(frozen=True, kw_only=True)
class Dense(Entrant):
    """The dense model, fine-tuned like the others."""

    name: str = DENSE
    series: str = DENSE

    def configure(self, dense: Any, tuned: Any) -> Any:
        """Return the config that fine-tunes the dense model."""
        return tuned


@dataclass(frozen=True, kw_only=True)
class Routed(Entrant):
    """The dense model with routed blocks.

    Args:
        routing: The training config's `routing`.
    """

    routing: Any

    def configure(self, dense: Any, tuned: Any) -> Any:
        """Return the config that fine-tunes the routed model."""
        return dataclasses.replace(tuned, routing=self.routing)
