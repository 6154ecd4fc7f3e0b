"""Parts of a routing config that have options of their own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mmod.values import check_fields, one_of

GATES = ("identity", "linear", "sigmoid", "tanh", "step")


@dataclass(frozen=True)
class Threshold:
    """Keep the tokens whose squashed score reaches a threshold, however many they are.

    Args:
        threshold: A learned score is squashed by a sigmoid; importance and norm are taken relative to the image's mean,
            so that 1 means average; random and stride scores lie in [0, 1]. See `mmod.Score.squashed`.
        min_tokens: Keep at least this many, the highest scores first.
        max_tokens: Keep at most this many. It fixes tensor shapes, so compiling without a graph break and exporting
            need it.

    Example:
        >>> Threshold(0.3, min_tokens=5, max_tokens=4)
        Traceback (most recent call last):
        ValueError: max_tokens must be at least min_tokens (5), got 4
    """

    threshold: float = 0.5
    min_tokens: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, min_tokens="[0, inf)", max_tokens="[1, inf)")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"max_tokens must be at least min_tokens ({self.min_tokens}), got {self.max_tokens}")


@dataclass(frozen=True, init=False)
class Gate:
    """How the score of a kept token weighs the block's update.

    Args:
        name: "identity" (1), "linear" (the score, Eq. 1 of the MoD paper), "sigmoid" (`scale * sigmoid`), "tanh"
            (`1 + scale * tanh`), "step" (1 where a token is kept and 0 where it is not, with the gradient of the
            squashed score, as in Router-Tuning). With "step" training runs all tokens, so that skipped ones teach the
            router too; evaluation runs those that are kept.
        scale: Factor of the gate; None means 0.2 for "tanh" (p-MoD) and 1 otherwise.
        reweight_skipped: Multiply the state of skipped tokens by the gate too (p-MoD). They are then no longer bitwise
            copies.

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
            raise ValueError("reweight_skipped needs a gate other than 'identity'")


@dataclass(frozen=True, kw_only=True)
class LanguageRouting:
    """What only the layers of a language model can do.

    Args:
        tokens: Which tokens may be skipped, "image" or "all". None means "image" in a model that sees images and "all"
            elsewhere. Capacity is the share kept of the tokens that may be skipped.
        frames: Choose the top-k within each frame (VideoLLM-MoD). A frame is a "span", an image or a frame of a video,
            or a number of image tokens. None chooses among all image tokens of a sample.
        shared: All routed layers score with one weight, stored once (gamma-MoD).
        scored: What the score reads: the "input" of a layer, or what the layer's own first "norm" returns (gamma-MoD).
        predictor: A small network of its own, which sends no gradient into the model, learns what was kept and decides
            in evaluation (MoD). It needs the loss "membership" and `inference_threshold`.
        inference_threshold: In evaluation keep tokens whose squashed score reaches this, instead of the top-k. Each
            token is then decided alone, as generating text with skippable text tokens needs.
        gate_on: What the gate weighs: the layer's whole "update", its "mlp" branch, or both "branches", attention and
            MLP, one by one (MoDification).
        positions: Kept tokens have their "original" rotary positions, or "compact" ones, counted among kept tokens
            (gamma-MoD).

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
            raise ValueError("frames choose the top-k among image tokens: they need tokens='image'")
        if self.predictor and self.inference_threshold is None:
            raise ValueError("predictor needs inference_threshold")

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that are set."""
        return tuple(item.name for item in dataclasses.fields(self) if getattr(self, item.name) != item.default)
