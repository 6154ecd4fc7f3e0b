"""How a model is routed, as a value: strict on the way in and plain on the way out."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mmod.config.flat import FLAT, regroup
from mmod.config.parts import Gate, LanguageRouting, Threshold
from mmod.config.plan import CONTEXTS, DEPTH, IMPORTANCE, OPERATORS, Plan
from mmod.config.reading import read_parts, revised
from mmod.config.registry import LOSSES, SCORES
from mmod.config.score import Score
from mmod.values import check_fields, check_value, refuse_unknown

if TYPE_CHECKING:
    from torch import Tensor
else:
    # What reads the types of the fields finds a name for it without importing torch.
    Tensor = Any

LAYOUTS = ("every_other", "late", "all")

ScoreFunction = Callable[["Tensor"], "Tensor"]


@dataclass(frozen=True, init=False)
class RoutingConfig:
    """How a model is routed: who is scored how, how many are kept, at what weight, what they see, and where.

    A part with options of its own is given by name where its defaults suffice, and else as a value. Plain mappings
    say the same in files.

    Args:
        router: Where the score comes from: "attention" (importance in the preceding dense block, no parameters),
            "linear" (learned), the controls "random", "stride" and "norm", another registered score, or a function
            from tokens (B, N, D) to scores (B, N). `mmod.score("linear", bias=True)` sets options.
        capacity: Share of tokens kept, in [0, 1], prefix tokens included; one number or one for each routed block. At 0
            only tokens that are always kept run: prefix tokens, or text where image tokens may be skipped.
        select: "topk" keeps `max(1, floor(capacity * N))` tokens of every image; "threshold" or a `Threshold` keeps
            those whose squashed score reaches it.
        gate: How the kept score weighs the block's update: "identity", "linear", "sigmoid", "tanh", "step", or a
            `Gate`. None means "tanh" for scores that learn and "identity" for those that do not.
        context: What a kept token attends to: the "kept" tokens of its image, as in MoD, or "all" of them, whose keys
            and values are then computed for every token; a language model caches all of them.
            One, or one for each routed block.
        operator: What tokens that are not kept miss: the whole "block", or its "attention" or "mlp" alone; the other
            branch then runs for all tokens, and the gate weighs the branch that is missed. One, or one for each
            routed block.
        skipped: What becomes of tokens that are not kept: they "pass" by unchanged; or "follow" the kept token of their
            image that is most like them and get the update of that one; or "merge" with it, averaged as one row that
            attention counts as so many tokens, and then get its update. Consecutive blocks whose router shares its
            score choose among the kept tokens of the blocks before, wherever capacity falls.
        enter_at: Where tokens that merge become one row: at the input of the "block", or before its "mlp", so that they
            attend apart once more, as in ToMe. The latter is for blocks of timm, and for routers that share a score;
            "attention" then reads the importance in the first of consecutive routed blocks, not in a dense one before.
        blocks: "every_other" (1, 3, 5, ...), "late" (all after the first third; attention routing then keeps the same
            tokens in all of them, those that the last dense block attends to, and the random control draws once for
            all of them), "all", or the indices of the blocks.
        protect_prefix: Always keep class, distillation and register tokens.
        importance: How attention received is averaged. "per_viewer" counts the queries that can see a token, each
            weighed by the number of keys it sees, so that causal attention does not rank tokens by position; "mean"
            counts all queries alike, as A-MoD does. They differ only where queries see different keys. "class_token"
            counts the query of the class token alone, as EViT does; "last_token", in language models, that of the
            last token of each prompt, as FastV does (arXiv 2403.06764). "vision_tower", in a LLaVA's language model, is
            what each patch receives in its tower instead, from the class token where there is one, as VisionZip does
            (arXiv 2412.04467); no layer of the language model has to be dense for it.
        losses: Weight of each auxiliary objective in every routed block: "membership" (binary cross-entropy between
            score and selection, MoD), "load" (kept share times mean gate, MoDification), "capacity" (distance of the
            kept share from `capacity`), "importance" (binary cross-entropy between a learned score and the selection
            that importance would make), or another registered loss.
        language: What only the layers of a language model can do.
        options: The options of the parts by their own names, such as `threshold` and `gate_scale`; deprecated.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: A value outside its range, or two that exclude each other.

    Example:
        >>> config = RoutingConfig(router="linear", capacity=0.25, blocks=(2, 4), select=Threshold(0.3))
        >>> config.gate.name, RoutingConfig.from_dict(config.to_dict()) == config
        ('tanh', True)
    """

    router: Score
    capacity: float | tuple[float, ...]
    select: Literal["topk"] | Threshold
    gate: Gate
    context: str | tuple[str, ...]
    operator: str | tuple[str, ...]
    skipped: str
    enter_at: str
    blocks: str | tuple[int, ...]
    protect_prefix: bool
    importance: str
    losses: Mapping[str, float]
    language: LanguageRouting

    def __init__(
        self,
        *,
        router: str | Score | ScoreFunction | Mapping[str, Any] = "attention",
        capacity: float | tuple[float, ...] = 0.5,
        select: str | Threshold | Mapping[str, Any] = "topk",
        gate: str | Gate | Mapping[str, Any] | None = None,
        context: str | tuple[str, ...] = "kept",
        operator: str | tuple[str, ...] = "block",
        skipped: str = "pass",
        enter_at: str = "block",
        blocks: str | tuple[int, ...] = "every_other",
        protect_prefix: bool = True,
        importance: str = "per_viewer",
        losses: Mapping[str, float] | None = None,
        language: LanguageRouting | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if options:
            refuse_unknown("routing option", options, ROUTING_FIELDS)
            moved = ", ".join(f"{name} is an option of {FLAT[name]}" for name in options)
            warnings.warn(f"{moved}, see mmod.RoutingConfig", DeprecationWarning, stacklevel=2)
        parts = {"router": router, "select": select, "gate": gate, "language": language}
        losses = {} if losses is None else losses
        check_value("losses", losses, Mapping[str, float], "(0, inf)")
        values = {
            **read_parts(regroup({**parts, **options})),
            "capacity": _frozen(capacity),
            "context": _frozen(context),
            "operator": _frozen(operator),
            "skipped": skipped,
            "enter_at": enter_at,
            "blocks": _frozen(blocks),
            "protect_prefix": protect_prefix,
            "importance": importance,
            "losses": dict(losses),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    @property
    def hands_on(self) -> bool:
        """Whether blocks that follow each other and keep the same tokens may hand them on in the place of all."""
        return self.router.shared and self.context == "kept" and self.operator == "block"

    def wants_importance(self, training: bool) -> bool:
        """Return whether the score or a loss asks for importance.

        Args:
            training: Whether the model trains.
        """
        return self.router.reads_importance or (training and any(LOSSES[name].reads_importance for name in self.losses))

    def reads_importance(self, training: bool) -> bool:
        """Return whether importance is computed in dense blocks before routed ones.

        Args:
            training: Whether the model trains.
        """
        return self.importance != "vision_tower" and self.wants_importance(training)

    @property
    def scored_by_first(self) -> bool:
        """Whether the first of consecutive routed blocks computes the score that they share."""
        return self.router.shared and not self.reads_importance(training=False)

    def _check(self) -> None:
        check_fields(
            self,
            capacity="[0, 1]",
            select=("topk",),
            context=CONTEXTS,
            operator=OPERATORS,
            skipped=("pass", "follow", "merge"),
            enter_at=("block", "mlp"),
            blocks=LAYOUTS,
            importance=IMPORTANCE,
        )
        for name in self.losses:
            LOSSES.check(name)
        router, gate, language = self.router, self.gate, self.language
        steps = gate.name == "step" and router.whole  # A draw of 0 or 1 for a whole image needs no gradient.
        if not router.learns and gate.name != "identity" and not steps:
            raise ValueError(f"gate {gate.name!r} needs a score that learns; router {router.name!r} takes 'identity'")
        if not router.learns and self.losses:
            raise ValueError(f"router {router.name!r} learns nothing, so it takes no losses, got {dict(self.losses)}")
        if "load" in self.losses and gate.name in ("identity", "step"):
            raise ValueError(f"the loss 'load' needs gate 'linear', 'sigmoid' or 'tanh', got {gate.name!r}")
        among_all, in_part = self.context != "kept", self.operator != "block"
        if self.skipped != "pass" and (self.select != "topk" or among_all or in_part or gate.reweight_skipped):
            raise ValueError(
                f"skipped={self.skipped!r} needs select='topk', context='kept', operator='block' and a gate without "
                "reweight_skipped"
            )
        if self.enter_at == "mlp" and (self.skipped != "merge" or not router.shared):
            raise ValueError(
                "enter_at='mlp' needs skipped='merge' and a router that shares its score, such as 'redundancy'; got "
                f"skipped={self.skipped!r} and router {router.name!r}"
            )
        if in_part and (gate.reweight_skipped or language.gate_on != "update"):
            raise ValueError(
                f"operator={self.operator!r} needs gate_on='update' and a gate without reweight_skipped: the gate "
                "weighs what tokens miss"
            )
        if router.learns and isinstance(self.select, Threshold):
            # The score is squashed by a sigmoid.
            check_value("the threshold of a learned score", self.select.threshold, float, "[0, 1]")
        whole_update = self.context == "all" or self.operator == "mlp" or router.whole
        if gate.name == "step" and not (isinstance(self.select, Threshold) and whole_update):
            raise ValueError(
                "gate='step' needs a threshold, and context='all', operator='mlp' or a score for the whole sequence"
            )
        if router.whole and (self.select == "topk" or self.select != Threshold(self.select.threshold) or among_all):
            raise ValueError(
                "a score for the whole sequence needs select=Threshold(...) without min_tokens or max_tokens and "
                "context='kept': all tokens of an image are kept or none"
            )
        if self.operator == "mlp" and self.context == "all":
            raise ValueError("operator='mlp' needs context='kept': attention runs on all tokens anyway")
        self._check_language()

    def _check_language(self) -> None:
        router, gate, language = self.router, self.gate, self.language
        if self.context != "kept" and language.positions == "compact":
            raise ValueError("positions='compact' counts kept tokens alone, so it needs context='kept'")
        if language.frames is not None and self.select != "topk":
            raise ValueError("frames choose the top-k among image tokens: they need select='topk'")
        if language.shared and router.name != "linear":
            raise ValueError(f"shared needs router='linear', got {router.name!r}")
        if language.gate_on != "update" and gate.name == "identity":
            raise ValueError(f"gate_on={language.gate_on!r} needs a gate other than 'identity'")
        if language.inference_threshold is not None and not (router.learns and self.select == "topk"):
            raise ValueError("inference_threshold needs a score that learns and select='topk'")
        if language.predictor and "membership" not in self.losses:
            raise ValueError("predictor needs the loss 'membership', which trains it")

    def plan(self, depth: int) -> Plan:
        """Return the plan for a model of `depth` blocks; selection, losses and language options are not part of it.

        Raises:
            TypeError: A depth that is no integer.
            ValueError: The blocks do not exist in such a model, or capacities and blocks differ in number.
        """
        check_value("depth", depth, int, DEPTH)
        if self.blocks == "every_other":
            blocks = tuple(range(1, depth, 2))
        elif self.blocks == "late":
            blocks = tuple(range(max(1, depth // 3), depth))
        elif self.blocks == "all":
            blocks = tuple(range(depth))
        else:
            blocks = tuple(sorted(int(block) for block in self.blocks))

        def each(own: Any) -> tuple[Any, ...]:
            return own if isinstance(own, tuple) else (own,) * len(blocks)

        choice = (self.router, self.importance, self.gate, self.protect_prefix)
        return Plan(blocks, each(self.capacity), depth, each(self.operator), each(self.context), *choice)

    @classmethod
    def from_plan(cls, plan: Plan, **fields: Any) -> RoutingConfig:
        """Build the config that routes by a plan.

        Args:
            plan: The blocks, each with its capacity, operator and context, and the score that chooses tokens.
            fields: Other fields. A router takes the place of the plan's, and of its importance and gate; a plan without
                one takes "stride" where every capacity is 0 or 1, since nothing is chosen there.

        Raises:
            TypeError: A field that the plan says.
            ValueError: A plan that keeps a part of the tokens, and no router.

        Example:
            >>> RoutingConfig.from_plan(Plan((2, 3), (0.0, 0.0), 4, contexts=("all", "all"))).router.name
            'stride'
            >>> RoutingConfig.from_plan(Plan((2, 3), (0.0, 0.5), 4, router="norm")).router.name
            'norm'
        """
        check_value("plan", plan, Plan)
        fields = {"protect_prefix": plan.protect_prefix, **fields}
        if plan.router is not None and "router" not in fields:
            fields = {"router": plan.router, "importance": plan.importance, "gate": plan.gate, **fields}
        if "router" not in fields:
            if not set(plan.capacities) <= {0, 1}:
                raise ValueError(
                    "this plan keeps a part of the tokens and names no router that chooses them: pass one, such as "
                    "mmod.RoutingConfig.from_plan(plan, router='attention') or mmod.Plan(..., router='attention'); "
                    f"routers are {', '.join(map(repr, sorted(SCORES)))}"
                )
            fields["router"] = "stride"
        # What all blocks have in common is said once: such blocks may hand on what they keep.
        operator, context = (each[0] if len(set(each)) == 1 else each for each in (plan.operators, plan.contexts))
        return cls(blocks=plan.blocks, capacity=plan.capacities, operator=operator, context=context, **fields)

    def replace(self, **changes: Any) -> RoutingConfig:
        """Return a copy with some fields changed.

        Args:
            changes: Fields of the config. A mapping for a part changes some of its options: `gate={"scale": 0.1}`.

        Raises:
            ValueError: An unknown field; the message names the valid ones.
        """
        return RoutingConfig.from_dict(revised({name: getattr(self, name) for name in _NAMES}, changes))

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain JSON values.

        Raises:
            ValueError: The router is a function, which JSON cannot hold.
        """
        plain = {name: getattr(self, name) for name in _NAMES}
        for name in ("capacity", "context", "operator", "blocks"):
            if isinstance(plain[name], tuple):
                plain[name] = list(plain[name])
        for name in ("select", "gate", "language"):
            if dataclasses.is_dataclass(plain[name]):
                plain[name] = dataclasses.asdict(plain[name])
        return {**plain, "router": self.router.to_dict(), "losses": dict(self.losses)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RoutingConfig:
        """Build a config from plain values, refusing keys it does not know.

        Values may have the options of all parts side by side, as files of mmod 0.1 do.

        Raises:
            ValueError: An unknown key; the message names the valid ones.
        """
        check_value("a routing config", values, Mapping)
        refuse_unknown("routing option", values, ROUTING_FIELDS)
        return cls(**regroup(values))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_NAMES = tuple(item.name for item in dataclasses.fields(RoutingConfig))
ROUTING_FIELDS = (*_NAMES, *FLAT)
