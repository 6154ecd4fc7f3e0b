"""The routing config: checked when it is made, plain when it is saved."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from mmod.config.parts import (
    CHANGE,
    IMPORTANCE,
    Gate,
    LanguageRouting,
    Merged,
    Score,
    Threshold,
    WithImportance,
    plain,
    spelled,
)
from mmod.config.plan import (
    CONTEXTS,
    DEPTH,
    OPERATORS,
    PlannedBlock,
    check_blocks,
    check_context,
    table_of,
)
from mmod.config.registry import LOSSES, SCORES, check_options, read_parts, revised
from mmod.io.files import check_file, check_free, parse_json, write_json
from mmod.values import Checked, check_fields, check_value

if TYPE_CHECKING:
    from torch import Tensor
else:
    # Readers of the fields' types need a name for it without importing torch.
    Tensor = object

LAYOUTS = ("every_other", "late", "all")

ScoreFunction = Callable[["Tensor"], "Tensor"]


@dataclass(frozen=True, init=False)
class RoutingConfig(Checked):
    """How a model is routed: which blocks, which tokens they keep, at what weight, and what skipped tokens do.

    A config whose blocks are written out is a plan, which prints as a table: `resolved`, searches and schedules return
    plans.

    `router`, `select`, `gate`, `skipped` and `language` take a name where the defaults suffice, a value such as
    `mmod.Gate("tanh", scale=0.1)`, or the mapping that a file holds: `gate: {name: tanh, scale: 0.1}`. A config prints
    the fields that differ from their defaults.

    Args:
        router: The score of the tokens:
            - "attention": the attention that tokens receive in the preceding dense block, without parameters;
            - "linear": learned;
            - "random", "stride" and "norm": controls;
            - other registered scores, `mmod.score(name, ...)` with options, or a function from tokens (B, N, D) to
              scores (B, N).
        capacity: Share of tokens kept, in [0, 1], prefix tokens included; one number, or one per routed block. At 0,
            only tokens that are always kept run: prefix tokens, and text if only image tokens may be skipped. With a
            threshold it selects nothing: only losses read it, as the share that training aims at.
        select: "topk" keeps the `max(1, floor(capacity * N))` highest scores of every image. "threshold", or a
            `Threshold`, keeps every token whose score reaches a threshold. Its default of 0.5 suits a learned score;
            with importance or norms it may keep nearly all tokens.
        gate: How the score of a kept token weighs the block's update: "identity", "linear", "sigmoid", "tanh", "step",
            or a `Gate`. None means "tanh" for scores that learn and "identity" for others.
        context: What a kept token attends to: the "kept" tokens, as in MoD, or "all" tokens. With "all", keys and
            values of all tokens are computed, and cached in a language model. One, or one per routed block.
        operator: What skipped tokens miss: the "block", or its "attention" or "mlp" alone. The other branch then runs
            on all tokens, and the gate weighs the skipped branch. One, or one per routed block.
        skipped: What happens to skipped tokens. With "follow" and "merge", consecutive blocks that share a score select
            among the tokens that the previous block kept, so capacities must not rise.

            - "pass": they stay unchanged;
            - "scale": the gate multiplies them (p-MoD);
            - "follow": they get the update of the most similar kept token of their image;
            - "merge": they run as one row with that token, and the group gets the row's update, see `Merged`.
        blocks: "every_other" (1, 3, 5, ...), "late" (all after the first third), "all", or the indices of the blocks.
            Consecutive blocks share the scores of "random", and those that "attention" reads in the last dense block.
        protect_prefix: Always keep class, distillation and register tokens.
        losses: Weight of each auxiliary loss in every routed block:

            - "membership": binary cross-entropy between score and selection (MoD), of tokens that may be skipped;
            - "load": kept share times mean gate (MoDification);
            - "capacity": distance of the kept share from `capacity`;
            - "importance": binary cross-entropy between a learned score and the selection by importance;
            - the name of a registered loss.
        language: Options that only the layers of a language model have, see `LanguageRouting`.
        training_only: Route in training mode alone, by a score without weights: in evaluation the model is dense, with
            the classes, keys and outputs of its host.
        depth: Number of blocks of the model that `blocks` is for; routing checks it. None for any.

    Attributes:
        joins: Whether skipped tokens join a kept one: they follow it or merge with it.
        merges_inside: Whether skipped tokens merge between attention and MLP.

    Example:
        >>> config = RoutingConfig(router="linear", capacity=0.25, blocks=(2, 4), select=Threshold(0.3))
        >>> config
        RoutingConfig(router='linear', capacity=0.25, select={'name': 'threshold', 'threshold': 0.3}, blocks=(2, 4))
        >>> config.gate.name, RoutingConfig.from_dict(config.to_dict()) == config
        ('tanh', True)
    """

    router: Score
    capacity: Annotated[float | tuple[float, ...], "[0, 1]"]
    select: Literal["topk"] | Threshold
    gate: Gate
    context: Annotated[str | tuple[str, ...], CONTEXTS]
    operator: Annotated[str | tuple[str, ...], OPERATORS]
    skipped: Literal["pass", "scale", "follow"] | Merged
    blocks: Annotated[str | tuple[int, ...], LAYOUTS]
    protect_prefix: bool
    losses: Mapping[str, float]
    language: LanguageRouting
    training_only: bool
    depth: Annotated[int | None, DEPTH]
    # Known to type checkers alone: at run time, what a class annotates is a field, and configs would take these.
    if TYPE_CHECKING:
        joins: bool
        merges_inside: bool

    def __init__(
        self,
        *,
        router: str | Score | ScoreFunction | Mapping[str, object] = "attention",
        capacity: float | tuple[float, ...] = 0.5,
        select: str | Threshold | Mapping[str, object] = "topk",
        gate: str | Gate | Mapping[str, object] | None = None,
        context: str | tuple[str, ...] = "kept",
        operator: str | tuple[str, ...] = "block",
        skipped: str | Merged | Mapping[str, object] = "pass",
        blocks: str | Sequence[int] = "every_other",
        protect_prefix: bool = True,
        losses: Mapping[str, float] | None = None,
        language: LanguageRouting | Mapping[str, object] | None = None,
        training_only: bool = False,
        depth: int | None = None,
    ) -> None:
        parts = {"router": router, "select": select, "gate": gate, "skipped": skipped, "language": language}
        if losses is None:
            losses = {}
        check_value("losses", losses, Mapping[str, float], "(0, inf)")
        # A frozen dataclass refuses assignments.
        vars(self).update(read_parts(parts), capacity=capacity, context=context, operator=operator, blocks=blocks)
        vars(self).update(protect_prefix=protect_prefix, losses=dict(losses), training_only=training_only, depth=depth)
        # Read in every forward pass.
        vars(self)["joins"] = self.skipped not in ("pass", "scale")
        vars(self)["merges_inside"] = isinstance(self.skipped, Merged) and self.skipped.before == "mlp"
        check_fields(self)
        for name in self.losses:
            LOSSES.check(name)
        if self.router.learns and isinstance(self.select, Threshold):
            # The score passes through a sigmoid.
            threshold = self.select.threshold
            check_value("select.threshold of a learned score", threshold, float | tuple[float, ...], "[0, 1]")
        self._check_score()
        self._check_gate()
        self._check_skipped()
        self._check_language()
        if self.depth is not None:
            self._rows_at(self.depth)
        elif self.blocks and not isinstance(self.blocks, str):
            check_blocks(self.blocks, max(self.blocks) + 1)

    @property
    def importance(self) -> str:
        """What importance is that the score reads, or that a loss teaches it: "change", or which queries count."""
        return getattr(self.router, "importance", IMPORTANCE[0])

    @property
    def passes_rows(self) -> bool:
        """Whether consecutive blocks that keep the same tokens may pass on these tokens alone."""
        return self.router.shared and self.skipped != "scale" and self.context == "kept" and self.operator == "block"

    def decides_alone(self, training: bool) -> bool:
        """Return whether each token of a language model is decided by itself: by a threshold that its score meets."""
        infers = self.language.inference_threshold is not None and not training
        by_itself = self.router.learns or self.router.reads_pixels
        return by_itself and (self.select != "topk" or infers)

    def wants_importance(self, training: bool) -> bool:
        """Return whether the score, or in training a loss, reads importance."""
        return self.router.reads_importance or (training and any(LOSSES[name].reads_importance for name in self.losses))

    def reads_importance(self, training: bool) -> bool:
        """Return whether importance is computed in dense blocks before routed ones."""
        return self.importance != "vision_tower" and self.wants_importance(training)

    def reads_attention(self, training: bool) -> bool:
        """Return whether importance is computed from the attention in dense blocks before routed ones."""
        return self.importance != CHANGE and self.reads_importance(training)

    @property
    def scored_by_first(self) -> bool:
        """Whether the first of consecutive routed blocks computes the score that they share."""
        return self.router.shared and not self.reads_importance(training=False)

    def _check_score(self) -> None:
        """Raise unless the score can do what gate and losses ask of it."""
        router = self.router
        gate = self.gate
        if not router.learns:
            # A draw of 0 or 1 for a whole image needs no gradient.
            draws_images = gate.name == "step" and router.per_image
            needs = ""
            if self.losses:
                needs = f"losses {dict(self.losses)}"
            if gate.name != "identity" and not draws_images:
                needs = f"gate {gate.name!r}"
            if needs:
                raise ValueError(
                    f"{needs} needs a score that learns, such as 'linear': router {router.name!r} does not learn"
                )
        elif router.shared and (self.joins or self.wants_importance(training=True)):
            raise ValueError(
                f"router.shared of {router.name!r} needs skipped='pass' or 'scale', and no loss that reads importance: "
                "both depend on the block"
            )
        if self.training_only and router.learns:
            raise ValueError(
                f"training_only needs a score without weights, such as 'random' or 'attention': router {router.name!r} "
                "adds some, which the dense model cannot keep"
            )

    def _check_gate(self) -> None:
        """Raise unless gate, selection and the loss of loads fit together."""
        router = self.router
        gate = self.gate
        select = self.select
        if "load" in self.losses and gate.name not in ("linear", "sigmoid", "tanh"):
            raise ValueError(f"losses.load needs gate 'linear', 'sigmoid' or 'tanh', not {gate.name!r}")
        if gate.name == "step":
            # Skipped tokens run in training, so the kept ones must not attend to fewer tokens in evaluation.
            all_attend = self.context == "all" or self.operator == "mlp" or router.per_image
            if not isinstance(select, Threshold) or not all_attend:
                raise ValueError(
                    "gate 'step' needs select='threshold', and context='all', operator='mlp' or a score for the whole "
                    "sequence"
                )
        if router.per_image:
            is_bounded = not isinstance(select, Threshold) or select != Threshold(select.threshold)
            if is_bounded or self.context != "kept":
                raise ValueError(
                    f"router {router.name!r} needs context='kept', and select='threshold' without min_tokens and "
                    "max_tokens: it keeps all tokens or none"
                )

    def _check_skipped(self) -> None:
        """Raise unless what skipped tokens do and what they miss fit the other fields."""
        skips_block = self.operator == "block"
        if self.joins and not (self.context == "kept" and skips_block):
            raise ValueError(
                f"skipped={spelled(self.skipped)!r} needs context='kept' and operator='block': tokens join others for "
                "the whole block"
            )
        if self.skipped == "scale" and not (skips_block and self.gate.name in ("linear", "sigmoid", "tanh")):
            raise ValueError(
                "skipped='scale' needs operator='block' and gate 'linear', 'sigmoid' or 'tanh': the gate multiplies "
                "skipped tokens"
            )
        if self.merges_inside and not self.router.shared:
            raise ValueError(
                "skipped.before='mlp' needs a router that shares its score between blocks, got "
                f"{self.router.name!r}: or use before='block'"
            )
        if not skips_block and self.language.gate_on != "update":
            raise ValueError(
                f"operator={self.operator!r} needs language.gate_on='update': the gate weighs the branch that tokens "
                "miss"
            )
        check_context(self.operator, self.context)

    def _check_language(self) -> None:
        """Raise unless the options of language models fit the other fields."""
        language = self.language
        if language.positions == "compact" and self.context != "kept":
            raise ValueError(
                f"language.positions='compact' needs context='kept', not {self.context!r}: it counts kept tokens alone"
            )
        if language.frames is not None and self.select != "topk":
            raise ValueError(
                f"language.tokens={language.tokens!r} needs select='topk': it chooses the top-k of each frame"
            )
        if language.gate_on != "update" and self.gate.name == "identity":
            raise ValueError(f"language.gate_on={language.gate_on!r} needs a gate other than 'identity'")
        if language.inference_threshold is not None and not (self.router.learns and self.select == "topk"):
            raise ValueError(
                f"language.inference_threshold={language.inference_threshold} needs select='topk' and a score that "
                "learns, such as 'linear'"
            )
        if language.predictor and (language.inference_threshold is None or "membership" not in self.losses):
            raise ValueError(
                "language.predictor needs language.inference_threshold and the loss 'membership', which trains it: set "
                "them, as to 0.5 and to 0.01"
            )

    @property
    def rows(self) -> tuple[PlannedBlock, ...]:
        """Index, capacity, operator and context of each routed block, as named values.

        Raises:
            ValueError: The depth is not known, see `resolved`.
        """
        return self._rows_at(self._known_depth())

    @property
    def mean_capacity(self) -> float:
        """Share of all block-token pairs that are computed; raises as `rows` does."""
        depth = self._known_depth()
        return (depth - len(self.rows) + sum(row.capacity for row in self.rows)) / depth

    def _known_depth(self) -> int:
        if self.depth is None:
            raise ValueError(
                "this config is for models of any depth: call config.resolved(number of blocks), which writes its "
                "blocks out"
            )
        return self.depth

    def _rows_at(self, depth: int) -> tuple[PlannedBlock, ...]:
        """Return the rows for a model of `depth` blocks."""
        check_value("depth", depth, int, DEPTH)
        if self.depth not in (None, depth):
            raise ValueError(f"this config is for {self.depth} blocks, the model has {depth}")
        blocks = self._blocks_at(depth)
        check_blocks(blocks, depth)
        columns = []
        for name in ("capacity", "operator", "context"):
            column = getattr(self, name)
            if not isinstance(column, tuple):
                column = (column,) * len(blocks)
            if len(column) != len(blocks):
                raise ValueError(f"{len(blocks)} routed blocks need one {name} or as many, got {len(column)}")
            columns.append(column)
        if isinstance(self.select, Threshold):
            threshold = self.select.threshold
            if isinstance(threshold, tuple) and len(threshold) != len(blocks):
                raise ValueError(
                    f"select.threshold must be one number, or one for each of the {len(blocks)} routed blocks, got "
                    f"{threshold}"
                )
        rows = tuple(map(PlannedBlock, blocks, *columns))
        for row in rows:
            check_context(row.operator, row.context, row.block)
        return rows

    def _blocks_at(self, depth: int) -> tuple[int, ...]:
        if not isinstance(self.blocks, str):
            return tuple(int(block) for block in self.blocks)
        # Without a block in front the first one has no importance to read, so that only "all" names it.
        layouts = {"every_other": range(1, depth, 2), "late": range(max(1, depth // 3), depth), "all": range(depth)}
        return tuple(layouts[self.blocks])

    def at_depth(self, depth: int) -> RoutingConfig:
        """Return the config for a model of `depth` blocks; it differs only for a preset that depends on the depth."""
        check_value("depth", depth, int, DEPTH)
        return self

    def resolved(self, depth: int | None = None) -> RoutingConfig:
        """Return the config for a model of `depth` blocks, with every block and its capacity written out.

        Args:
            depth: Number of blocks; None for the config's own depth.

        Example:
            >>> plan = RoutingConfig(router="norm", capacity=(0.5, 0.5, 0.25), blocks="late").resolved(4)
            >>> plan
            RoutingConfig(router='norm', capacity=(0.5, 0.5, 0.25), blocks=(1, 2, 3), depth=4)
            >>> print(plan)
            3 of 4 blocks are routed by norm, mean capacity of all blocks 0.562
            <BLANKLINE>
            | blocks | capacity | operator | context |
            | -----: | -------: | :------- | :------ |
            |    1-2 |      0.5 | block    | kept    |
            |      3 |     0.25 | block    | kept    |
        """
        if depth is None:
            depth = self._known_depth()
        blocks, capacities, operators, contexts = zip(*self._rows_at(depth))
        return self.replace(
            blocks=blocks,
            capacity=capacities,
            operator=_shared_value(operators),
            context=_shared_value(contexts),
            depth=depth,
        )

    def replace(self, **changes: object) -> RoutingConfig:
        """Return a copy with some fields changed; a mapping for a part changes some of its options.

        If the router changes, a default gate becomes the new router's default.

        Example:
            >>> RoutingConfig(router="linear").replace(gate={"scale": 0.1}).gate
            Gate(name='tanh', scale=0.1)
            >>> RoutingConfig(router="attention").replace(router="linear").gate.name
            'tanh'
        """
        fields = {name: getattr(self, name) for name in _FIELDS}
        # A score that learns would get no gradient through the gate of one that does not.
        # Only where the gate is the default of the present score: one that was chosen stays.
        if "router" in changes and "gate" not in changes and self.gate == read_parts({"router": self.router})["gate"]:
            del fields["gate"]
        return RoutingConfig.from_dict(revised(fields, changes))

    def _differing(self) -> dict[str, object]:
        signature = {name: item.default for name, item in inspect.signature(type(self)).parameters.items()}
        default = {**signature, "losses": {}, **read_parts({"router": self.router}), "router": SCORES["attention"]()}
        return {name: getattr(self, name) for name in _FIELDS if getattr(self, name) != default[name]}

    def __repr__(self) -> str:
        """Return the call that makes the config, without fields that have their defaults."""
        arguments = [f"{name}={spelled(value)!r}" for name, value in self._differing().items()]
        return f"RoutingConfig({', '.join(arguments)})"

    def __str__(self) -> str:
        """Return the call that makes the config; where the depth is known, a sentence and a table of the blocks."""
        if self.depth is None:
            return repr(self)
        rows = self.rows
        by = self.router.name
        if isinstance(self.router, WithImportance) and self.router.reads_importance:
            by += f" ({self.router.importance})"
        mean = f"mean capacity of all blocks {self.mean_capacity:.3g}"
        return f"{len(rows)} of {self.depth} blocks are routed by {by}, {mean}\n\n{table_of(rows)}"

    def _repr_markdown_(self) -> str | None:
        # Notebooks show a table where there is one.
        return None if self.depth is None else str(self)

    def to_dict(self, complete: bool = False) -> dict[str, object]:
        """Return plain JSON values.

        Args:
            complete: Return every field with all options, for files that must not depend on this version's defaults;
                otherwise the fields that differ from their defaults.

        Raises:
            ValueError: The router is a function, which JSON cannot hold.

        Example:
            >>> RoutingConfig(router="linear", skipped=Merged(before="block"), blocks=(1, 2)).to_dict()
            {'router': 'linear', 'skipped': 'merge', 'blocks': [1, 2]}
            >>> RoutingConfig().to_dict(complete=True)["gate"]
            {'name': 'identity', 'scale': 1.0}
        """
        # A score that JSON cannot hold raises here.
        router = self.router.to_dict()
        if complete:
            return {name: plain(getattr(self, name)) for name in _FIELDS}
        values: dict[str, object] = {}
        for name, value in self._differing().items():
            short = spelled(value)
            # JSON has no tuples.
            values[name] = list(short) if isinstance(short, tuple) else short
        if "router" in values:
            values["router"] = router
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> RoutingConfig:
        """Build a config from plain values; missing fields have their defaults."""
        check_value("a routing config", values, Mapping)
        check_options(values, _FIELDS, {})
        make: Callable[..., RoutingConfig] = cls
        return make(**values)

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the config as JSON, with all fields."""
        check_free(path, overwrite)
        write_json(path, self.to_dict(complete=True))

    @classmethod
    def load(cls, path: str | Path) -> RoutingConfig:
        """Read a config that `save` wrote."""
        check_file(path)
        values = parse_json(Path(path).read_bytes(), repr(str(path)))
        try:
            return cls.from_dict(values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} holds no routing config: {error}") from error


def _shared_value(values: tuple[str, ...]) -> str | tuple[str, ...]:
    """Return the value of all blocks, or the values if blocks differ.

    Blocks that share one value may pass on the tokens that they keep.
    """
    if len(set(values)) > 1:
        return values
    return values[0]


_FIELDS = tuple(item.name for item in dataclasses.fields(RoutingConfig))
# Fields that say how to route; the depth says of which model, and is an argument of its own wherever these are options.
ROUTING_FIELDS = tuple(name for name in _FIELDS if name != "depth")
