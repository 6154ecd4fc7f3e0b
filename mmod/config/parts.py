"""The parts of a routing config that have options of their own: which tokens are kept, at what weight, what becomes of
the others, and what only language models can do."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from mmod.values import check_fields, one_of

GATES = ("identity", "linear", "sigmoid", "tanh", "step")


@dataclass(frozen=True)
class Threshold:
    """Keep every token whose score reaches a threshold, so that images keep different numbers of tokens.

    Args:
        threshold: What the score is compared with. A learned score passes through a sigmoid first. Importance and norm
            are divided by their mean over the image, so 1 is average. Random and stride scores lie in [0, 1]. See
            `mmod.Score.squashed`.
        min_tokens: Keep at least this many tokens, the highest scores first.
        max_tokens: Keep at most this many tokens. It fixes tensor shapes: `torch.compile` without a graph break and
            `torch.export` need it.

    Example:
        >>> Threshold(0.3, min_tokens=5, max_tokens=4)
        Traceback (most recent call last):
        ValueError: select.max_tokens must be at least min_tokens (5), got 4
    """

    name: ClassVar[str] = "threshold"
    threshold: float = 0.5
    min_tokens: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "select", min_tokens="[0, inf)", max_tokens="[1, inf)")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(
                f"select.max_tokens must be at least min_tokens ({self.min_tokens}), got {self.max_tokens}"
            )


@dataclass(frozen=True)
class Merged:
    """Skipped tokens merge with the kept token of their image that is most like them.

    The group runs as one row, the mean of its tokens, and attention counts the row as that many tokens. Every token of
    the group then gets the row's update.

    Args:
        before: Where tokens merge: at the input of the "block", or before its "mlp", so that they attend apart once
            more, as in ToMe. "mlp" needs blocks of timm and a router that shares its score between blocks. The router
            "attention" then reads importance in the first block of a span, and needs no dense block in front.

    Example:
        >>> Merged(before="attention")
        Traceback (most recent call last):
        ValueError: skipped.before must be one of 'block', 'mlp', got 'attention'
    """

    name: ClassVar[str] = "merge"
    before: str = "block"

    def __post_init__(self) -> None:
        check_fields(self, "skipped", before=("block", "mlp"))


@dataclass(frozen=True, init=False)
class Gate:
    """How the score of a kept token weighs the block's update.

    Args:
        name: "identity" weighs by 1. "linear" weighs by the score (Eq. 1 of the MoD paper), "sigmoid" by
            `scale * sigmoid(score)`, "tanh" by `1 + scale * tanh(score)`. "step" weighs by 1 or 0, kept or not, and
            passes the gradient of the sigmoid on (Router-Tuning): all tokens run in training, so that skipped tokens
            teach the router too, and only kept tokens run in evaluation.
        scale: Factor of the gate; None means 0.2 for "tanh" (p-MoD) and 1 otherwise.
        reweight_skipped: Multiply skipped tokens by the gate too (p-MoD). They are then no longer bitwise copies.

    Example:
        >>> Gate("tanh").scale
        0.2
    """

    name: str
    scale: float
    reweight_skipped: bool

    def __init__(self, name: str = "tanh", scale: float | None = None, reweight_skipped: bool = False) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "scale", (0.2 if name == "tanh" else 1.0) if scale is None else scale)
        object.__setattr__(self, "reweight_skipped", reweight_skipped)
        one_of("gate", name, GATES)
        check_fields(self, "gate", scale="[0, inf)")
        if reweight_skipped and name == "identity":
            raise ValueError(
                "gate.reweight_skipped needs a gate that reads the score, and gate.name is 'identity': use 'linear', "
                "'sigmoid' or 'tanh'"
            )


@dataclass(frozen=True, kw_only=True)
class LanguageRouting:
    """Options that only the layers of a language model have.

    Args:
        tokens: Which tokens may be skipped, "image" or "all"; capacity is a share of them. None means "image" in a
            model that sees images and "all" in others.
        frames: Choose the top-k within each frame (VideoLLM-MoD). A frame is a "span", which is one image or one frame
            of a video, or a number of image tokens. None chooses among all image tokens of a sample.
        shared: All routed layers score with one weight, stored once (gamma-MoD).
        scored: What the score reads: the "input" of a layer, or the output of the layer's first "norm" (gamma-MoD).
        predictor: In evaluation a small network decides, which learns to predict the top-k and sends no gradient into
            the model (MoD). It needs the loss "membership" and `inference_threshold`.
        inference_threshold: In evaluation keep the tokens whose score, after a sigmoid, reaches this value, instead of
            the top-k. Each token is then decided by itself, which generation needs where text tokens may be skipped.
        gate_on: What the gate weighs: the layer's whole "update", its "mlp" branch, or both "branches", attention and
            MLP, separately (MoDification).
        positions: Rotary positions of kept tokens: their "original" ones, or "compact" ones, counted among kept tokens
            alone (gamma-MoD).

    Example:
        >>> LanguageRouting(tokens="text")
        Traceback (most recent call last):
        ValueError: language.tokens must be one of 'image', 'all' or null, got 'text'
    """

    tokens: str | None = None
    frames: str | int | None = None
    shared: bool = False
    scored: str = "input"
    predictor: bool = False
    inference_threshold: float | None = None
    gate_on: str = "update"
    positions: str = "original"

    def __post_init__(self) -> None:
        check_fields(
            self,
            "language",
            tokens=("image", "all"),
            frames="[1, inf)",
            scored=("input", "norm"),
            inference_threshold="[0, 1)",
            gate_on=("update", "mlp", "branches"),
            positions=("original", "compact"),
        )
        if isinstance(self.frames, str):
            one_of("language.frames", self.frames, ("span",))
        if self.frames is not None and self.tokens == "all":
            raise ValueError(
                f"language.frames={self.frames!r} chooses among image tokens, and language.tokens is 'all': use 'image'"
            )
        if self.predictor and self.inference_threshold is None:
            raise ValueError("language.predictor needs language.inference_threshold: set it, as to 0.5")


def differing(part: Any) -> dict[str, Any]:
    """Return the options of a part that differ from the defaults, as plain values.

    Args:
        part: A dataclass; the defaults of a `Gate` are those of its name.

    Example:
        >>> differing(Gate("tanh", 0.1)), differing(LanguageRouting())
        ({'scale': 0.1}, {})
    """
    default = Gate(part.name) if isinstance(part, Gate) else None
    options = {}
    for item in dataclasses.fields(part):
        value = getattr(part, item.name)
        if value != (item.default if default is None else getattr(default, item.name)):
            options[item.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
    return options


def spelled(value: Any) -> Any:
    """Return a value of a config as short as it can be written: a part as its name, its options, or both.

    Args:
        value: A part, or a value that is plain already.

    Example:
        >>> spelled(Gate("sigmoid")), spelled(Threshold(0.3)), spelled(LanguageRouting(tokens="all")), spelled(0.5)
        ('sigmoid', {'name': 'threshold', 'threshold': 0.3}, {'tokens': 'all'}, 0.5)
    """
    if not dataclasses.is_dataclass(value):
        return value
    options, name = differing(value), getattr(value, "name", None)
    if name is None:
        return options
    return {"name": name, **options} if options else name
