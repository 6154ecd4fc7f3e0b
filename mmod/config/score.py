"""The base class of scores, which a config's `router` names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mmod.config.parts import Gate, spelled
from mmod.values import check_fields

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

IMPORTANCE = ("per_viewer", "mean", "class_token", "last_token", "vision_tower")


@dataclass(frozen=True)
class Placement:
    """Where a score is used.

    Args:
        dim: Channels D of a token.
        block: Index of the block in its model.
        prefix: Leading tokens that are always kept.
        dtype: Type of the parameters; scores are fp32.
    """

    dim: int
    block: int
    gate: Gate
    prefix: int = 0
    device: torch.device | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Score:
    """How tokens are scored: a frozen dataclass whose fields are the options of the score.

    `mmod.register_score` registers a subclass by the name that configs use.

    Attributes:
        name: What configs call it; set when it is registered.
        learns: The score may carry a gradient. It is then gated by "tanh" by default.
        shared: Consecutive routed blocks read one score, so that they keep the same tokens at equal capacity. The
            first of them computes it, unless it is importance.
        reads_importance: The score is the importance of the tokens in the dense block before.
        relative: A threshold is compared with the score over its mean in the image, so that 1 means average.
        compares: The score multiplies all pairs of tokens, of `compared_channels` channels.
        positional: The score depends on the position of a token in its sequence. Where only some tokens may be
            skipped, it depends on their rank among these.
    """

    name: ClassVar[str]
    learns: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    reads_importance: ClassVar[bool] = False
    relative: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    positional: ClassVar[bool] = False

    @property
    def whole(self) -> bool:
        """Whether all tokens of an image have one score, so that the image is kept or skipped as a whole."""
        return False

    @property
    def tied(self) -> bool:
        """Whether all routed layers score with one weight, stored once."""
        return False

    @property
    def draws(self) -> bool:
        """Whether the first of consecutive routed blocks computes the score that they share."""
        return self.shared and not self.reads_importance

    def make(self, place: Placement) -> nn.Module | None:
        """Return the module that scores, or None where importance itself is the score.

        The module is called with tokens (B, N, D), with a mask that is False where a token does not count (B, N), or
        None, and with importance (B, N) where the score reads it. It returns raw fp32 scores (B, N).
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what scores tokens")

    @property
    def compared_channels(self) -> int | None:
        """Sums of channels by which tokens are compared where some join others; None compares all channels."""
        return None

    def squashed(self, score_BN: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the values that a threshold is compared with (B, N), from raw scores.

        A score that learns passes through a sigmoid; see also `relative`. `valid_BN` is False where a token does not
        count.
        """
        if self.learns:
            return score_BN.sigmoid()
        if not self.relative:
            return score_BN
        if valid_BN is None:
            return score_BN / score_BN.mean(dim=1, keepdim=True)
        total_B1 = (score_BN * valid_BN).sum(dim=1, keepdim=True)
        return score_BN * valid_BN.sum(dim=1, keepdim=True) / total_B1

    def to_dict(self) -> str | dict[str, Any]:
        """Return the score as plain values: its name, with the options that differ from their defaults."""
        values: str | dict[str, Any] = spelled(self)
        return values


@dataclass(frozen=True, kw_only=True)
class WithImportance(Score):
    """A score that reads importance, or that the loss "importance" teaches.

    Args:
        importance: Which queries count in the attention that a token receives. "per_viewer" averages over the queries
            that can see the token. Each is weighed by the number of keys that it sees, so that causal attention does
            not rank tokens by position. "mean" counts all queries alike (A-MoD); the two differ only where queries see
            different keys. "class_token" reads the query of the class token alone (EViT). "last_token", for language
            models, reads the last query of each prompt (FastV, arXiv 2403.06764). "vision_tower", for a LLaVA, reads
            the attention that each patch receives in the vision tower, from the class token where there is one
            (VisionZip, arXiv 2412.04467); no layer of the language model has to stay dense then.
    """

    importance: str = IMPORTANCE[0]

    def __post_init__(self) -> None:
        check_fields(self, "router", importance=IMPORTANCE)
