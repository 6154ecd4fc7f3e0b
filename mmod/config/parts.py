"""The parts of a routing config: score, selection, gate, skipped tokens, and options of language models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from mmod.values import Checked, check_fields, one_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

GATES = ("identity", "linear", "sigmoid", "tanh", "step")


@dataclass(frozen=True)
class Threshold(Checked, group="select"):
    """Keep every token whose score reaches a threshold, so that images keep different numbers of tokens.

    Args:
        threshold: One number, or one per routed block. A learned score passes through a sigmoid first. Importance and
            norm are divided by their mean over the image, so 1 is average, and the default of 0.5 may keep nearly all
            tokens. Random and stride scores lie in [0, 1], redundancy in [0, 2]. See `mmod.Score.normalised`, and look
            at `kept_shares()` of `mmod.trace`.
        min_tokens: Keep at least this many tokens, the highest scores first.
        max_tokens: Keep at most this many tokens. This fixes tensor shapes, which `torch.export` needs. Without it,
            graphs of `torch.compile` and `torch.func.vmap` have room for all tokens, and save nothing.

    Example:
        >>> Threshold(0.3, min_tokens=5, max_tokens=4)
        Traceback (most recent call last):
        ValueError: select.max_tokens must be at least min_tokens (5), got 4
    """

    name: ClassVar[str] = "threshold"
    threshold: float | tuple[float, ...] = 0.5
    min_tokens: Annotated[int, "[0, inf)"] = 0
    max_tokens: Annotated[int | None, "[1, inf)"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(
                f"select.max_tokens must be at least min_tokens ({self.min_tokens}), got {self.max_tokens}"
            )

    @property
    def single(self) -> float:
        """The threshold of one block."""
        if isinstance(self.threshold, tuple):
            raise ValueError(
                f"select.threshold must be one number here, as a block has, got {self.threshold}: route a model, whose "
                "routed blocks get one each"
            )
        return self.threshold


@dataclass(frozen=True)
class Merged(Checked, group="skipped"):
    """Skipped tokens merge with the most similar kept token of their image.

    The group runs as one row, the mean of its tokens, and attention counts the row as that many tokens. Every token of
    the group then gets the row's update.

    Args:
        before: Where tokens merge: at the input of the "block", or between attention and "mlp", as in ToMe. "mlp" needs
            blocks with attention before the MLP, and a router that shares its score between blocks. The router
            "attention" then reads importance in the first routed block itself, not in a dense block before it.
        size_power: A group of n tokens weighs n ** size_power in attention: 1 counts every token, as in ToMe; 0 counts
            the row as one token.

    Example:
        >>> Merged(before="attention")
        Traceback (most recent call last):
        ValueError: skipped.before must be one of 'block', 'mlp', got 'attention'
    """

    name: ClassVar[str] = "merge"
    before: Literal["block", "mlp"] = "block"
    size_power: Annotated[float, "[0, 1]"] = 1.0


@dataclass(frozen=True, init=False)
class Gate(Checked, group="gate"):
    """How the score of a kept token weighs the block's update.

    Args:
        name: The weight of an update:

            - "identity": 1;
            - "linear": the score (Eq. 1 of the MoD paper);
            - "sigmoid": `scale * sigmoid(score)`;
            - "tanh": `1 + scale * tanh(score)`;
            - "step": 1 for kept and 0 for skipped tokens, with the gradient of the sigmoid (Router-Tuning). All tokens
              run in training, so that the router learns from skipped ones too; in evaluation, only kept tokens run.
        scale: Factor of the gate; None means 0.2 for "tanh" (p-MoD) and 1 otherwise.

    Example:
        >>> Gate("tanh").scale
        0.2
    """

    name: str
    scale: Annotated[float, "[0, inf)"]

    def __init__(self, name: str = "tanh", scale: float | None = None) -> None:
        if scale is None:
            # tanh changes an update by so much at most; the others scale it as they are.
            scale = 0.2 if name == "tanh" else 1.0
        # A frozen dataclass refuses assignments.
        vars(self).update(name=name, scale=scale)
        one_of("gate", name, GATES)
        check_fields(self, "gate")

    @property
    def weighs(self) -> bool:
        """Whether updates depend on the score, so that their gradient reaches it."""
        return self.name != "identity" and self.scale > 0


@dataclass(frozen=True, kw_only=True)
class LanguageRouting(Checked, group="language"):
    """Options that only the layers of a language model have.

    Args:
        tokens: Which tokens may be skipped, "image" or "all"; capacity is a share of them. "span" selects the top-k
            within each image or video frame (VideoLLM-MoD); a number n selects it within every n image tokens. None
            means "image" in a model that reads images, and "all" in others.
        scored: What the score reads: the "input" of a layer, or the output of the layer's first "norm" (gamma-MoD).
        predictor: In evaluation a small network decides (MoD). It learns to predict the top-k, without a gradient into
            the model, and needs the loss "membership" and `inference_threshold`.
        inference_threshold: In evaluation keep the tokens whose score, after a sigmoid, reaches this value, instead of
            the top-k. Each token is then decided by itself, which generation needs where text tokens may be skipped.
        gate_on: What the gate weighs: the layer's whole "update", its "mlp" branch, or both "branches", attention and
            MLP, separately (MoDification).
        positions: Rotary positions of kept tokens: their "original" ones, or "compact" ones, counted among kept tokens
            alone (gamma-MoD).

    Example:
        >>> LanguageRouting(tokens="text")
        Traceback (most recent call last):
        ValueError: language.tokens must be one of 'image', 'all', 'span', got 'text'
    """

    tokens: Annotated[str | int | None, "[1, inf)"] = None
    scored: Literal["input", "norm"] = "input"
    predictor: bool = False
    inference_threshold: Annotated[float | None, "[0, 1)"] = None
    gate_on: Literal["update", "mlp", "branches"] = "update"
    positions: Literal["original", "compact"] = "original"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.tokens, str):
            one_of("language.tokens", self.tokens, ("image", "all", "span"))

    @property
    def frames(self) -> str | int | None:
        """Image tokens among which the top-k is chosen: those of a "span", a number of them, or None for a sample's."""
        return None if self.tokens in ("image", "all") else self.tokens


def _options(part: Any) -> dict[str, object]:
    return {item.name: plain(getattr(part, item.name)) for item in dataclasses.fields(part)}


def plain(value: object) -> object:
    """Return a value of a config with all of its options, as plain JSON values.

    Example:
        >>> plain(Gate("sigmoid")), plain(Merged("mlp")), plain((0.5, 0.25))
        ({'name': 'sigmoid', 'scale': 1.0}, {'name': 'merge', 'before': 'mlp', 'size_power': 1.0}, [0.5, 0.25])
    """
    if dataclasses.is_dataclass(value):
        name = getattr(value, "name", None)
        options = _options(value)
        if name is not None:
            options = {"name": name, **options}
        return options
    if isinstance(value, tuple):
        return list(value)
    return value


def spelled(value: object) -> Any:
    """Return a value of a config as short as it can be written: a part as its name, its options, or both.

    Example:
        >>> spelled(Gate("sigmoid")), spelled(Gate("tanh", 0.1)), spelled(LanguageRouting(tokens="all")), spelled(0.5)
        ('sigmoid', {'name': 'tanh', 'scale': 0.1}, {'tokens': 'all'}, 0.5)
    """
    if not dataclasses.is_dataclass(value):
        return value
    default = {item.name: item.default for item in dataclasses.fields(value)}
    # The default scale depends on the gate.
    if isinstance(value, Gate):
        default = vars(Gate(value.name))
    options = {name: option for name, option in _options(value).items() if option != default[name]}
    name = getattr(value, "name", None)
    if name is None:
        return options
    if not options:
        return name
    return {"name": name, **options}


Importance = Literal["per_viewer", "mean", "class_token", "last_token", "vision_tower"]
IMPORTANCE: tuple[str, ...] = get_args(Importance)
# Importance that is no attention: how far the dense block before moved a token.
CHANGE = "change"


Grid = tuple[int, int]
"""Rows and columns of patches."""


class Patches(NamedTuple):
    """What the patch embedding tells a forward pass of the images' patches.

    Args:
        grid: Rows and columns; None where a batch has no common ones, or they are unknown.
        seen: What the score has seen of the pixels, see `Score.see`; None where it reads none, or where the patches of
            several batches wait for their passes.
    """

    grid: Grid | None = None
    seen: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class Placement:
    """Where a score is used.

    Args:
        dim: Channels D of a token.
        block: Index of the block in its model.
        prefix: Leading tokens that are always kept.
        dtype: Type of the parameters; scores are fp32.
        patches: Returns what is known of the patches of the running forward pass; None outside a model.
    """

    dim: int
    block: int
    gate: Gate
    prefix: int = 0
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    patches: Callable[[], Patches] | None = None


@dataclass(frozen=True)
class Score(Checked, group="router"):
    """How tokens are scored: a frozen dataclass whose fields are the options of the score.

    `mmod.register_score` registers a subclass by the name that configs use.

    Attributes:
        name: What configs call it; set when it is registered.
        learns: The score may carry a gradient. It is then gated by "tanh" by default.
        shared: Consecutive routed blocks read one score, so that they keep the same tokens at equal capacity. The
            first of them computes it, unless it is importance.
        reads_importance: The score is, or reads, the importance of the tokens in the dense block before: the attention
            that they receive there, or how far it moves them.
        relative: A threshold is compared with the score over its mean in the image, so that 1 means average.
        tied: All routed layers score with one weight, stored once.
        reads_grid: The score reads the grid of patches, `Placement.patches`.
        reads_pixels: The score reads what `see` returns of the patches' pixels, `Placement.patches`. In a language
            model, an image token's score is the maximum of `see`'s first tensor over its patches.
        reads_frames: The score reads which token stands at the same place one frame earlier. First frames are never
            skipped.
        images: Successive images count as frames.
        compares: The score multiplies all pairs of tokens. If skipped tokens join the most similar kept one, the
            score's module also gets the normalised tokens `unit_BNE` (B, N, E), which are then computed once.
        channels: Project tokens to this many channels before they are compared; None compares all channels.
        same_everywhere: The score is the same for every image and block.
        positional: The score depends on the position of a token in its sequence. Where only some tokens may be
            skipped, it depends on their rank among these.
    """

    name: ClassVar[str]
    learns: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    reads_importance: ClassVar[bool] = False
    relative: ClassVar[bool] = False
    tied: ClassVar[bool] = False
    reads_grid: ClassVar[bool] = False
    reads_pixels: ClassVar[bool] = False
    reads_frames: ClassVar[bool] = False
    images: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    channels: ClassVar[int | None] = None
    same_everywhere: ClassVar[bool] = False
    positional: ClassVar[bool] = False

    @property
    def per_image(self) -> bool:
        """Whether all tokens of an image have one score, so that the image is kept or skipped as a whole."""
        return False

    @property
    def shares_own_score(self) -> bool:
        """Whether consecutive routed blocks share a score that the first of them computes, and not importance."""
        return self.shared and not self.reads_importance

    def make(self, placement: Placement) -> nn.Module | None:
        """Return the module that scores, or None where importance itself is the score.

        The module is called with tokens (B, N, D), a mask (B, N) or None, and, where the score reads it, importance
        (B, N). The mask is False where a token does not count. The module returns raw fp32 scores (B, N).
        """
        raise NotImplementedError(f"{type(self).__name__} must return a scoring module from make()")

    def see(
        self, pixels_BRCHE: Tensor, std: tuple[float, ...] | None, frames: int = 1, side: int = 1
    ) -> tuple[Tensor, ...]:
        """Return what the score needs of the patches' pixels, as a few tensors (B, N) that a pass keeps.

        Args:
            pixels_BRCHE: Pixels as the patch embedding gets them: B images, R rows and C columns of patches, H channels
                of E pixels.
            std: What each channel was divided by when it was normalised; None where the model does not say.
            frames: How many consecutive images are frames of one video.
            side: Patches along a side of the square that a token stands for.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what it reads of pixels")

    def normalised(self, score_BN: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the values that a threshold is compared with (B, N), from raw scores.

        A score that learns passes through a sigmoid; see also `relative`. `valid_BN` is False where a token does not
        count.
        """
        if self.learns:
            return score_BN.sigmoid()
        if not self.relative:
            return score_BN
        if valid_BN is None:
            # In units of an image's mean score, which makes thresholds comparable between images.
            return score_BN / score_BN.mean(dim=1, keepdim=True)
        total_B1 = score_BN.masked_fill(~valid_BN, 0.0).sum(dim=1, keepdim=True)
        return score_BN * valid_BN.sum(dim=1, keepdim=True) / total_B1

    def to_dict(self) -> str | dict[str, object]:
        """Return the score as plain values: its name, with the options that differ from their defaults."""
        return spelled(self)


@dataclass(frozen=True, kw_only=True)
class WithImportance(Score):
    """A score that reads importance, or that the loss "importance" teaches.

    Args:
        importance: Which queries count in the attention that a token receives.

            - "per_viewer": those that can see the token, each weighed by the number of keys that it sees. Causal
              attention then does not rank tokens by position.
            - "mean": all queries alike (A-MoD). It differs from "per_viewer" only where queries see different keys.
            - "class_token": the class token's (EViT).
            - "last_token", for language models: the last one of each prompt (FastV, arXiv 2403.06764).
            - "vision_tower", for image tokens: those of the vision tower, or its class token's alone if it has one
              (VisionZip, arXiv 2412.04467). An image token has the mean importance of its patches, and no other token
              may stand for them. All layers of the language model can be routed then.
    """

    importance: Importance = "per_viewer"
