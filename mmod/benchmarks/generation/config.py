"""Config and rows of the benchmark of generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mmod.analysis.timing import Spread
from mmod.benchmarks.options import TimedOptions
from mmod.benchmarks.report import ReportRow, number_cell, spread_cell
from mmod.config import PRESETS
from mmod.values import check_distinct, check_fields


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(TimedOptions):
    """A LLaVA of random weights, dense and routed by each preset, interleaved.

    The language model is a Llama with heads of 64 channels. Its prefill takes `input_ids` and image features that are
    computed already, puts them together and returns the logits of the last token; no vision tower runs. Other options
    are those of `TimedOptions`.

    Args:
        presets: Names of `mmod.preset`. What skips tokens by a threshold gets the one at which its capacity is kept.
        image_tokens: Image tokens of a prompt.
        text_tokens: Text tokens of a prompt, before and behind the image.
        batch_sizes: Prompts per call.
        hidden: Channels of a token.
        intermediate: Channels of the MLP; None means 11/4 of `hidden`.
        layers: Decoder layers.
        vocabulary: Tokens the model knows.
        attention: transformers' attention implementation.
        train: Time a training step on the same prompts, too.
        dtype: Type of weights and features. Outputs are checked in float32.

    Raises:
        ValueError: Nothing to time, an unknown preset, or a width that heads of 64 channels do not divide.
    """

    presets: list[str] = field(default_factory=lambda: ["p-mod", "gamma-mod", "a-mod"])
    image_tokens: list[int] = field(default_factory=lambda: [576, 2880])
    text_tokens: int = 48
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4])
    hidden: int = 256
    intermediate: int | None = None
    layers: int = 8
    vocabulary: int = 1000
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    train: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    out: str = "runs/benchmark_generation"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_distinct(self, "presets", "image_tokens", "batch_sizes")
        for name in self.presets:
            PRESETS.check(name)
        check_fields(self, image_tokens="[1, inf)", text_tokens="[1, inf)", batch_sizes="[1, inf)")
        if self.hidden < 64 or self.hidden % 64:
            raise ValueError(f"hidden must be a multiple of 64, the channels of a head, got {self.hidden}")


@dataclass(frozen=True)
class GenerationRow(ReportRow):
    """One routed model in one run; ratios are taken round by round.

    Args:
        preset: Its preset.
        image_tokens: Image tokens of a prompt.
        batch_size: Prompts per call.
        rounds: Rounds of the prefill that were timed.
        dense_ms: Milliseconds of the dense model's prefill.
        routed_ms: Milliseconds of this model's.
        speedup: The first over the second.
        flop_speedup: FLOPs of the dense prefill over those of this one, see `prefill_flops`.
        slots: Tokens that a layer caches of the longest prompt, mean over layers.
        cache_share: Bytes of this model's cache over those of the dense one's.
        dense_step_ms: Milliseconds in which the dense model decodes a token with that many cached in every layer.
        step_ms: Milliseconds in which this model does.
        decode: The first over the second: decoding speed against dense at equal cache length.
        train: Time of the dense model's training step over that of this one's; None where it was not asked for.
        train_flop_speedup: FLOPs of the former over those of the latter: in training others may be kept.
    """

    HEADER = (
        "image tokens", "batch", "preset", "dense prefill ms", "prefill ms", "speed-up", "FLOP speed-up",
        "speed-up / FLOP speed-up", "cached per layer", "cache share", "dense tokens/s", "tokens/s",
        "decoding / dense speed", "training speed-up", "training speed-up / FLOP speed-up",
    )  # fmt: skip

    preset: str
    image_tokens: int
    batch_size: int
    rounds: int
    dense_ms: Spread
    routed_ms: Spread
    speedup: Spread
    flop_speedup: float
    slots: float
    cache_share: float
    dense_step_ms: Spread
    step_ms: Spread
    decode: Spread
    train: Spread | None = None
    train_flop_speedup: float | None = None

    @property
    def of_flops(self) -> float:
        """Measured speed-up as a share of what FLOPs promise."""
        return self.speedup.median / self.flop_speedup

    @property
    def train_of_flops(self) -> float | None:
        """The same of a training step."""
        return None if self.train is None else self.train.median / (self.train_flop_speedup or 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values, with the ratios that follow from them."""
        return {**super().to_dict(), "of_flops": self.of_flops, "train_of_flops": self.train_of_flops}

    def cells(self) -> tuple[str, ...]:
        """Return the line as text."""
        dense_rate, rate = (1e3 * self.batch_size / step.median for step in (self.dense_step_ms, self.step_ms))
        return (
            str(self.image_tokens), str(self.batch_size), self.preset, f"{self.dense_ms.median:.1f}",
            f"{self.routed_ms.median:.1f}", spread_cell(self.speedup), f"{self.flop_speedup:.3f}",
            f"{self.of_flops:.3f}", f"{self.slots:.1f}", f"{self.cache_share:.4f}", f"{dense_rate:.1f}",
            f"{rate:.1f}", spread_cell(self.decode), spread_cell(self.train),
            number_cell(self.train_of_flops),
        )  # fmt: skip
