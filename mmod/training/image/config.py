"""The configuration of training an image classifier."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Self

from mmod.config import RoutingConfig
from mmod.data.config import DataConfig
from mmod.training.engine import config as engine
from mmod.values import check_fields, check_value

if TYPE_CHECKING:
    # By way of the package, which what reads the types of fields imports without torch.
    from mmod import methods

__all__ = [
    "CapacityScheduleConfig",
    "DistillConfig",
    "ElasticConfig",
    "InTrainingConfig",
    "LearnCapacityConfig",
    "LossConfig",
    "MixupConfig",
    "ModelConfig",
    "TrainConfig",
]


# Fields that configs once lacked, left out of what run folders keep where they are None.
_UNNAMED = ("method", "elastic", "learn_capacity", "in_training", "trained")


@dataclass(frozen=True)
class ModelConfig(engine.StartConfig):
    """Which model is trained and from which weights.

    Args:
        name: A name of timm's registry.
        args: Further arguments of `timm.create_model`, such as `num_classes` or `img_size`.
        checkpoint: Starting weights, dense or routed: a `.safetensors` or PyTorch file, a run folder, or a
            folder written by `mmod.save_pretrained`. None starts from `pretrained` or from scratch. A checkpoint of
            another form that timm can convert (another image size, DINOv2's own names) is converted as timm does it.
        head: "fresh" leaves out the checkpoint's classifier, which may be missing or of other classes, and starts
            with a new one; None takes all weights from the checkpoint.
        pretrained: Start from timm's published weights.
    """

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    head: Literal["fresh"] | None = field(default=None, kw_only=True)
    pretrained: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None and self.checkpoint is None:
            raise ValueError(
                f"model.head={self.head!r} concerns the classifier of a checkpoint: set model.checkpoint; published "
                "weights get a new classifier wherever model.args.num_classes asks for one"
            )

    @property
    def has_weights(self) -> bool:
        """Whether training starts from a trained model, its classifier included."""
        return super().has_weights and self.head is None

    def started_from(self, checkpoint: str) -> Self:
        """Return the same model with all weights of a checkpoint, the classifier's too."""
        return dataclasses.replace(super().started_from(checkpoint), head=None)


@dataclass(frozen=True)
class LossConfig:
    """The task's criterion.

    Args:
        kind: "ce" for cross entropy, "bce" for one binary cross entropy per class.
        smoothing: Label smoothing, in [0, 1).
    """

    kind: Literal["ce", "bce"] = "ce"
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "loss", smoothing="[0, 1)")


@dataclass(frozen=True)
class MixupConfig:
    """Mixing of images in a batch: arguments of `timm.data.Mixup`.

    Args:
        mixup_alpha: Alpha of mixup; 0 switches it off.
        cutmix_alpha: Alpha of cutmix; 0 switches it off.
        prob: Probability of mixing a batch or element.
        switch_prob: Probability of cutmix when both are on.
        mode: What shares one draw: the batch, a pair of images, or each image its own.
    """

    mixup_alpha: float = 0.8
    cutmix_alpha: float = 1.0
    prob: float = 1.0
    switch_prob: float = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"

    def __post_init__(self) -> None:
        check_fields(
            self,
            "mixup",
            mixup_alpha="[0, inf)",
            cutmix_alpha="[0, inf)",
            prob="[0, 1]",
            switch_prob="[0, 1]",
        )
        if self.mixup_alpha <= 0 and self.cutmix_alpha <= 0:
            raise ValueError("mixup needs mixup_alpha or cutmix_alpha above 0; use `mixup: null` for none")


@dataclass(frozen=True)
class DistillConfig(engine.TeacherConfig):
    """Distillation of logits: `weight * temperature^2 * KL(teacher || student)` is added to the task's loss.

    Args:
        weight: Weight of the term.
        temperature: Divisor of both logits.
        features: Weight of a second term, the mean over final tokens of one minus the cosine between the teacher's and
            the student's; None leaves it out.
    """

    weight: float = 0.5
    temperature: float = 1.0
    features: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "distill", weight="(0, inf)", temperature="(0, inf)", features="(0, inf)")


@dataclass(frozen=True)
class CapacityScheduleConfig:
    """A capacity that falls linearly, once an epoch, from `start` to the one of the routing config.

    Args:
        start: Capacity of the first epoch, in (0, 1].
        epochs: The epoch (from 0) at which the final capacity is reached.
    """

    start: float = 1.0
    epochs: int = 5

    def __post_init__(self) -> None:
        check_fields(self, "capacity_schedule", start="(0, 1]", epochs="[1, inf)")


@dataclass(frozen=True)
class ElasticConfig:
    """One checkpoint for many budgets: a step trains the largest capacity, the smallest, and some drawn between.

    The largest learns the task. The others learn what it says, without its labels.

    Args:
        capacities: Capacities of all routed blocks, ascending; that of the routing config is one of them. The model is
            evaluated at each.
        samples: Capacities of a step.

    Source: the sandwich rule and inplace distillation, Yu and Huang, arXiv 1903.05134.
    """

    capacities: list[float]
    samples: int = 4

    def __post_init__(self) -> None:
        check_fields(self, "elastic", capacities="(0, 1]", samples="[2, inf)")
        if self.capacities != sorted(set(self.capacities)) or not self.samples <= len(self.capacities):
            raise ValueError(
                f"elastic.capacities={self.capacities} must ascend and be at least as many as elastic.samples="
                f"{self.samples}"
            )


@dataclass(frozen=True)
class LearnCapacityConfig:
    """A capacity for each routed block, learned in the first epochs; see `mmod.learn_capacity_`.

    Args:
        budget: Share of the dense model's FLOPs, or milliseconds of a pass over a batch of `data.batch_size`.
        epochs: Epochs in which capacities are learned; those that follow train at the plan that they became.
        cost: What the budget is of, "flops" or "milliseconds".
        rate: How much faster than weights the offsets of capacities learn.
    """

    budget: float
    epochs: int
    cost: Literal["flops", "milliseconds"] = "flops"
    rate: float = 100.0

    def __post_init__(self) -> None:
        check_fields(self, "learn_capacity", budget="(0, inf)", epochs="[1, inf)", rate="(0, inf)")


@dataclass(frozen=True)
class InTrainingConfig:
    """What makes steps cheaper in training alone: the model is evaluated and kept dense.

    Args:
        routing: Fields of `mmod.RoutingConfig`, or `preset: NAME` with the fields to change, of a router that does
            not learn, such as "random".
        method: In its place, a method without weights of its own: `kind: prune`, `merge` or `resize` with the fields
            of that class in `mmod.methods`.
        epochs: Epochs that are trained so, before those that are not; None for all.

    Source: tokens that jump blocks in training, TREAD, Krause et al., arXiv 2501.04765.
    """

    routing: dict[str, Any] | None = None
    method: dict[str, Any] | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "in_training", epochs="[1, inf)")
        if (self.routing is None) == (self.method is None):
            raise ValueError("in_training needs one of routing and method")
        router = None if self.routing is None else engine.resolve_routing(self.routing).router
        if router is not None and router.learns:
            raise ValueError(f"in_training.routing has the router {router.name!r}, which the dense model cannot keep")
        method = engine.resolve_method(self.method)
        if method is not None and method.adds_weights:
            raise ValueError(f"in_training.method adds weights as {method.kind!r}, which the dense model cannot keep")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(engine.LoopConfig):
    """Everything that decides the outcome of training an image classifier.

    Args:
        model: The model and its starting weights.
        data: Where images come from and how they are augmented. With `data.label_patch` the model answers each patch
            and must not pool: `model.args.global_pool: ''`.
        routing: None trains the dense model. Otherwise the fields of `mmod.RoutingConfig`, or
            `preset: NAME` with the fields to change.
        method: Another way to spend less, in the place of routing: `kind: prune`, `merge`, `resize`, `exit`, `experts`,
            `channels` or `recursions` with the fields of that class in `mmod.methods`. None for none. A model with
            experts may be routed, too.
        loss: The task's criterion.
        mixup: Mixup and cutmix; None for neither.
        distill: The teacher, if any.
        capacity_schedule: Approach the capacity over some epochs; None starts at it.
        elastic: Train one checkpoint for several capacities; None for that of `routing` alone.
        learn_capacity: Learn the capacity of each routed block, in the place of that of `routing`; None for not.
        in_training: Routing or a method in training alone, of a model that is dense otherwise; None for neither.
        trained: "routers" trains routers alone (Router-Tuning); None trains the whole model.
    """

    model: ModelConfig
    data: DataConfig
    routing: dict[str, Any] | None = None
    method: dict[str, Any] | None = None
    loss: LossConfig = field(default_factory=LossConfig)
    mixup: MixupConfig | None = None
    distill: DistillConfig = field(default_factory=DistillConfig)
    capacity_schedule: CapacityScheduleConfig | None = None
    elastic: ElasticConfig | None = None
    learn_capacity: LearnCapacityConfig | None = None
    in_training: InTrainingConfig | None = None
    trained: Literal["routers"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_elastic()
        self._check_learn_capacity()
        if self.distill.features is not None and self.teacher() is None:
            raise ValueError(f"distill.features={self.distill.features:g} needs a teacher: set distill.teacher")
        if self.in_training is not None:
            taken = [name for name in ("routing", "method", "compile") if getattr(self, name)]
            if taken:
                raise ValueError(f"in_training cannot be combined with {', '.join(taken)}")
            check_value("in_training.epochs", self.in_training.epochs, int | None, f"[1, {self.epochs}]")
        if self.trained is not None and (self.routing is None or not self.model.has_weights):
            raise ValueError("trained='routers' needs routing, and trained weights to be frozen: set model.checkpoint")
        if self.mixup is not None and self.data.batch_size % 2:
            raise ValueError(f"mixup needs an even data.batch_size, got {self.data.batch_size}")
        if self.mixup is not None and self.data.label_patch is not None:
            raise ValueError(
                "mixup mixes labels of images: data.label_patch, which gives each patch one, needs mixup: null"
            )
        method = self.method_config()
        if method is not None and self.routing is not None and not method.precedes("routing"):
            raise ValueError("a model is routed or changed by a method: set routing or method to null")
        if self.grad_checkpointing and (method or (self.in_training and self.in_training.method)):
            raise ValueError("a model that a method changed cannot be trained with grad_checkpointing")
        if self.capacity_schedule is not None:
            if self.routing is None:
                raise ValueError("capacity_schedule needs a routing config")
            if self.capacity_schedule.epochs >= self.epochs:
                raise ValueError(
                    f"capacity_schedule.epochs={self.capacity_schedule.epochs} must be below epochs={self.epochs}, "
                    "so that the last epoch trains at the final capacity"
                )

    def _check_elastic(self) -> None:
        elastic, routing = self.elastic, self.routing_config()
        if elastic is None:
            return
        if routing is None or routing.capacity not in elastic.capacities:
            raise ValueError(
                f"elastic needs a routing config whose capacity is one of elastic.capacities={elastic.capacities}, got "
                f"{None if routing is None else routing.capacity}"
            )
        # Blocks that are run again in the backward pass would run at the capacity of the last sample.
        taken = [name for name in ("capacity_schedule", "grad_checkpointing") if getattr(self, name)]
        if taken:
            raise ValueError(f"elastic cannot be combined with {', '.join(taken)}")

    def at_size(self, side: int) -> TrainConfig:
        """Return the same run on images of another size; weights are the same, position embeddings resampled.

        Args:
            side: Side of the images in pixels.
        """
        model = dataclasses.replace(self.model, args={**self.model.args, "img_size": side})
        return dataclasses.replace(self, model=model, data=dataclasses.replace(self.data, image_size=side))

    def _check_learn_capacity(self) -> None:
        learned = self.learn_capacity
        if learned is None:
            return
        if self.routing is None:
            raise ValueError("learn_capacity needs a routing config")
        taken = [
            name for name in ("elastic", "capacity_schedule", "grad_checkpointing", "compile") if getattr(self, name)
        ]
        if taken:
            raise ValueError(f"learn_capacity cannot be combined with {', '.join(taken)}")
        if learned.epochs >= self.epochs:
            raise ValueError(
                f"learn_capacity.epochs={learned.epochs} must be below epochs={self.epochs}, so that the last epoch "
                "trains at the plan"
            )

    def routing_config(self) -> RoutingConfig | None:
        """Return the routing this run asks for, presets resolved; None for a dense model."""
        return None if self.routing is None else engine.resolve_routing(self.routing)

    def routing_configs(self) -> dict[str, RoutingConfig]:
        """Return the arguments of `mmod.route_`; empty for a dense model."""
        routing = self.routing_config()
        return {} if routing is None else {"config": routing}

    def method_config(self) -> methods.Method | None:
        """Return the method that this run trains; None for none."""
        return engine.resolve_method(self.method)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values only, with presets and defaults resolved, as the run folder keeps them."""
        routing, method = self.routing_config(), self.method_config()
        plain = {**super().to_dict(), "routing": None if routing is None else routing.to_dict()}
        # Folders of runs without one do not name it.
        plain = {name: value for name, value in plain.items() if value is not None or name not in _UNNAMED}
        return plain if method is None else {**plain, "method": method.to_dict()}
