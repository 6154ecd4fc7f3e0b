"""A score by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from mmod.config import Placement, WithImportance, register_score


@register_score("function")
@dataclass(frozen=True)
class Function(WithImportance):
    """A function of the user's, which may learn; configs that hold one cannot be saved.

    Args:
        function: Maps tokens (B, N, D) to scores (B, N).
        importance: Where the loss "importance" teaches the score: which queries count, as for "attention".
    """

    learns: ClassVar[bool] = True
    function: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.function):
            raise ValueError(f"router 'function' is given as the function itself, got {self.function!r}")

    def make(self, placement: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        assert self.function is not None
        return FunctionScore(self.function)

    def to_dict(self) -> str | dict[str, object]:
        """Refuse, since JSON cannot hold a function."""
        raise ValueError(
            "a config whose router is a function cannot be saved: register a score by mmod.register_score and name it"
        )


class FunctionScore(nn.Module):
    """Score tokens by a function from tokens (B, N, D) to scores (B, N)."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        # A module given as the function is registered, so that its parameters train and are saved.
        self.function = function

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) of tokens (B, N, D)."""
        score = self.function(x_BND)
        if score.shape != x_BND.shape[:2]:
            raise ValueError(
                f"the router function must return scores of shape {tuple(x_BND.shape[:2])} (images, tokens), "
                f"got {tuple(score.shape)}"
            )
        return score.float()
