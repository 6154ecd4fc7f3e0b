"""What to route and how, as values: `RoutingConfig` and `Plan`, strict on the way in and plain on the way out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from mmod.config.plan import Plan
from mmod.config.registry import LOSSES, SCORES
from mmod.config.score import Score
from mmod.values import check_fields, check_value, one_of, refuse_unknown

if TYPE_CHECKING:
    from torch import Tensor
else:
    # What reads the types of the fields finds a name for it without importing torch.
    Tensor = Any

SELECTIONS = ("topk", "threshold")
GATES = ("identity", "linear", "sigmoid", "tanh")
LAYOUTS = ("every_other", "late", "all")
CONTEXTS = ("kept", "all")
SKIPPABLE = ("image", "all")
GATED = ("update", "mlp", "branches")
POSITIONS = ("original", "compact")
IMPORTANCES = ("per_viewer", "mean")
# What only a language model's layers can do, and so what every other stack of blocks refuses.
LANGUAGE_OPTIONS = ("tokens", "frames", "shared", "predictor", "inference_threshold", "gate_on", "positions")

ScoreFunction = Callable[["Tensor"], "Tensor"]


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How a model is routed: who is scored how, who is selected, how the update is gated, and where.

    Args:
        router: Where the score comes from: "attention" (importance in the preceding dense block, no parameters),
            "linear" (learned), the controls "random", "stride" and "norm", or a function from tokens (B, N, D) to
            scores (B, N).
        capacity: Share of tokens kept, in (0, 1], prefix tokens included; one number or one for each routed block.
        blocks: "every_other" (1, 3, 5, ...), "late" (all after the first third; attention routing then keeps the same
            tokens in all of them, those that the last dense block attends to, and the random control draws once for
            all of them), "all", or the indices of the blocks.
        select: "topk" keeps `max(1, floor(capacity * N))` tokens of every image; "threshold" keeps those whose
            squashed score reaches `threshold`.
        context: What a kept token attends to: the "kept" tokens of its image, as in MoD, or "all" of them, whose keys
            and values are then computed for every token.
        threshold: For "threshold". A learned score is squashed by a sigmoid; importance and norm are taken relative
            to the image's mean, so that 1 means average; random and stride scores lie in [0, 1).
        min_tokens: For "threshold": keep at least this many, the highest scores first.
        max_tokens: For "threshold": keep at most this many. It fixes tensor shapes, so compiling without a graph
            break and exporting need it.
        gate: How the kept score weighs the block's update: "identity" (1), "linear" (the score, Eq. 1 of the MoD
            paper), "sigmoid" (`gate_scale * sigmoid`), "tanh" (`1 + gate_scale * tanh`). None means "tanh" for
            scores that learn and "identity" for those that do not.
        gate_scale: Factor of the gate; None means 0.2 for "tanh" (p-MoD) and 1 otherwise.
        reweight_skipped: Multiply the state of skipped tokens by the gate too (p-MoD). They are then no longer
            bitwise copies.
        normalize: Divide the linear score's input by its root mean square; "block", in language models, scores what
            the block's own first norm returns (gamma-MoD).
        bias: Give the linear score a bias.
        init_std: Standard deviation of the linear score's initial weight. None chooses one at which every gate starts
            within a percent of the dense model's.
        importance: How attention received is averaged. "per_viewer" counts the queries that can see a token, each
            weighed by the number of keys it sees, so that causal attention does not rank tokens by position; "mean"
            counts all queries alike, as A-MoD does. They differ only where queries see different keys.
        protect_prefix: Always keep class, distillation and register tokens.
        losses: Weight of each auxiliary objective in every routed block: "membership" (binary cross-entropy between
            score and selection, MoD), "load" (kept share times mean gate, MoDification), "capacity" (distance of the
            kept share from `capacity`), "importance" (binary cross-entropy between a learned score and the selection
            that importance would make).
        seed: Seed of the random router.
        tokens: Language models: which tokens may be skipped, "image" or "all". None means "image" in a model that
            sees images and "all" elsewhere. Capacity is the share kept of the tokens that may be skipped.
        frames: Language models: choose the top-k within each frame (VideoLLM-MoD). A frame is a "span", an image or a
            frame of a video, or a number of image tokens. None chooses among all image tokens of a sample.
        shared: Language models: all routed layers score with one weight, stored once (gamma-MoD).
        predictor: Language models: a small network of its own, which sends no gradient into the model, learns what
            was kept and decides in evaluation (MoD). It needs the loss "membership" and `inference_threshold`.
        inference_threshold: Language models: in evaluation keep tokens whose squashed score reaches this, instead of
            the top-k. Each token is then decided alone, as generating text with skippable text tokens needs.
        gate_on: Language models: what the gate weighs, the block's whole "update", its "mlp" branch, or both
            "branches", attention and MLP, one by one (MoDification).
        positions: Language models: kept tokens have their "original" rotary positions, or "compact" ones, counted
            among kept tokens (gamma-MoD).

    Raises:
        TypeError: A value of the wrong type.
        ValueError: A value outside its range, or two that exclude each other.

    Example:
        >>> config = RoutingConfig(router="linear", capacity=0.25, blocks=(2, 4))
        >>> config.gate, RoutingConfig.from_dict(config.to_dict()) == config
        ('tanh', True)
    """

    score: ClassVar[Score]
    router: str | ScoreFunction = "attention"
    capacity: float | tuple[float, ...] = 0.5
    blocks: str | tuple[int, ...] = "every_other"
    select: str = "topk"
    context: str = "kept"
    threshold: float = 0.5
    min_tokens: int = 0
    max_tokens: int | None = None
    gate: str | None = None
    gate_scale: float | None = None
    reweight_skipped: bool = False
    normalize: bool | str = True
    bias: bool = False
    init_std: float | None = None
    importance: str = "per_viewer"
    protect_prefix: bool = True
    losses: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    tokens: str | None = None
    frames: str | int | None = None
    shared: bool = False
    predictor: bool = False
    inference_threshold: float | None = None
    gate_on: str = "update"
    positions: str = "original"

    def __post_init__(self) -> None:
        for name in ("capacity", "blocks"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check_value("losses", self.losses, Mapping[str, float], "(0, inf)")
        object.__setattr__(self, "losses", dict(self.losses))
        self._check_values()
        object.__setattr__(self, "score", self._make_score())
        if self.gate is None:
            object.__setattr__(self, "gate", "tanh" if self.learns else "identity")
        if self.gate_scale is None:
            object.__setattr__(self, "gate_scale", 0.2 if self.gate == "tanh" else 1.0)
        self._check_combinations()

    @property
    def language_options(self) -> tuple[str, ...]:
        """Names of the options set here that only language models have."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        own = [name for name in LANGUAGE_OPTIONS if getattr(self, name) != defaults[name]]
        return (*own, "normalize") if self.normalize == "block" else tuple(own)

    @property
    def learns(self) -> bool:
        """Whether the score may carry a gradient."""
        return self.score.learns

    def reads_importance(self, training: bool) -> bool:
        """Return whether importance is computed, for the score or for a loss.

        Args:
            training: Whether the model trains.
        """
        return self.score.reads_importance or (training and any(LOSSES[name].reads_importance for name in self.losses))

    def _make_score(self) -> Score:
        if callable(self.router):
            return SCORES["function"](self.router)  # type: ignore[call-arg]
        kind = SCORES[self.router]
        names = {item.name for item in dataclasses.fields(kind)}
        options = {name: getattr(self, name) for name in names & set(self._fields())}
        if self.normalize == "block":
            options["normalize"] = False
        return kind(**options)

    def _check_values(self) -> None:
        check_fields(
            self,
            blocks=LAYOUTS,
            select=SELECTIONS,
            context=CONTEXTS,
            gate=GATES,
            gate_on=GATED,
            positions=POSITIONS,
            importance=IMPORTANCES,
            tokens=SKIPPABLE,
            normalize=("block",),
            capacity="(0, 1]",
            min_tokens="[0, inf)",
            max_tokens="[1, inf)",
            gate_scale="[0, inf)",
            init_std="[0, inf)",
            losses="(0, inf)",
            frames="[1, inf)",
            inference_threshold="[0, 1)",
        )
        if isinstance(self.frames, str):
            one_of("frames", self.frames, ("span",))
        for name in self.losses:
            LOSSES.check(name)
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"max_tokens must be at least min_tokens ({self.min_tokens}), got {self.max_tokens}")

    def _check_combinations(self) -> None:
        if not self.learns and self.gate != "identity":
            raise ValueError(f"gate {self.gate!r} needs a score that learns; router {self.router!r} takes 'identity'")
        if not self.learns and self.losses:
            raise ValueError(f"router {self.router!r} learns nothing, so it takes no losses, got {dict(self.losses)}")
        if self.reweight_skipped and self.gate == "identity":
            raise ValueError("reweight_skipped needs a gate other than 'identity'")
        if self.select == "topk" and (self.min_tokens or self.max_tokens is not None):
            raise ValueError("min_tokens and max_tokens belong to select='threshold'; 'topk' is set by capacity")
        self._check_language()

    def _check_language(self) -> None:
        if self.frames is not None and (self.tokens == "all" or self.select != "topk"):
            raise ValueError("frames choose the top-k among image tokens: they need tokens='image' and select='topk'")
        if self.shared and self.router != "linear":
            raise ValueError(f"shared needs router='linear', got {self.router!r}")
        if self.gate_on != "update" and self.gate == "identity":
            raise ValueError(f"gate_on={self.gate_on!r} needs a gate other than 'identity'")
        if self.inference_threshold is not None and not (self.learns and self.select == "topk"):
            raise ValueError("inference_threshold needs a score that learns and select='topk'")
        if self.predictor and (self.inference_threshold is None or "membership" not in self.losses):
            raise ValueError("predictor needs inference_threshold and the loss 'membership', which trains it")

    def plan(self, depth: int) -> Plan:
        """Return the plan for a model of `depth` blocks.

        Raises:
            ValueError: The blocks do not exist in such a model, or capacities and blocks differ in number.
        """
        if self.blocks == "every_other":
            blocks = tuple(range(1, depth, 2))
        elif self.blocks == "late":
            blocks = tuple(range(max(1, depth // 3), depth))
        elif self.blocks == "all":
            blocks = tuple(range(depth))
        else:
            blocks = tuple(sorted(int(block) for block in self.blocks))
        capacities = self.capacity if isinstance(self.capacity, tuple) else (self.capacity,) * len(blocks)
        return Plan(blocks=blocks, capacities=capacities, depth=depth)

    def replace(self, **changes: Any) -> RoutingConfig:
        """Return a copy with some fields changed; an unknown field raises a ValueError naming the valid ones."""
        return RoutingConfig.from_dict({**self._fields(), **changes})

    def _fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain JSON values.

        Raises:
            ValueError: The router is a function, which JSON cannot hold.
        """
        if callable(self.router):
            raise ValueError("a config whose router is a function cannot be saved; name one of " + ", ".join(SCORES))
        plain = self._fields()
        for name in ("capacity", "blocks"):
            if isinstance(plain[name], tuple):
                plain[name] = list(plain[name])
        plain["losses"] = dict(self.losses)
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RoutingConfig:
        """Build a config from plain values, refusing keys it does not know.

        Raises:
            ValueError: An unknown key; the message names the valid ones.
        """
        refuse_unknown("routing option", values, [f.name for f in dataclasses.fields(cls)])
        return cls(**values)
