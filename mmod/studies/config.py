"""The configuration of a study, for each kind of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mmod.config import rational
from mmod.values import check_fields, one_of, refuse_unknown

__all__ = [
    "BESIDE",
    "ChatStudyConfig",
    "FeaturesStudyConfig",
    "ImageStudyConfig",
    "PairsStudyConfig",
    "PlanOptions",
    "SegmentationStudyConfig",
    "StudyConfig",
    "refuse_set_by_study",
]


BESIDE = ("image_size", "changes", "tune")
"""What a series of routed models may say of its runs beside how they are routed."""


@dataclass(frozen=True)
class PlanOptions:
    """How a plan is searched, see `mmod.search_plan`.

    Args:
        budget: Share of the dense model's cost that the plan may have, or milliseconds.
        batches: Calibration batches, spread evenly over the training data.
        batch_size: Samples in each.
        part: The part that is planned; null for the image tower of image and pairs, the language model of chat and
            text.
        cost: What the budget is of: "flops", "milliseconds" of a pass over a batch, or in a language model "cache" or
            "image_flops", those that image tokens add.
        router: Which tokens a capacity above 0 keeps; a name, or a mapping with options such as `importance`.
        options: Capacity, operator and context of each option; null for all that the blocks can do.
        divergence: "kl" or "cosine"; null chooses by the model.
        rounds: How often choices are scored again beside those of the plan so far.
    """

    budget: float = 0.5
    batches: int = 4
    batch_size: int = 16
    part: Literal["image", "text", "language"] | None = None
    cost: str = "flops"
    router: str | dict[str, Any] = "stride"
    options: list[tuple[float, str, str]] | None = None
    divergence: str | None = None
    rounds: int = 0

    def __post_init__(self) -> None:
        check_fields(
            self, "plan", budget="(0, inf)" if self.cost == "milliseconds" else "(0, 1)", batches="[1, inf)",
            batch_size="[1, inf)", cost=("flops", "image_flops", "cache", "milliseconds"), divergence=("kl", "cosine"),
            options="[0, 1]", rounds="[0, inf)",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """What every study is told.

    Args:
        output: The study's folder; its runs, table and pictures go there. A study goes on where it stopped.
        dense: Training config of the dense model, a YAML file; the study sets its `output`, `seed` and `routing`.
        routers: Name of each series to its routing: fields of `RoutingConfig`, or `preset: NAME` with changes, or
            `plan: FILE` with other fields; or `search` with fields of `PlanOptions`, which searches a plan for each
            seed's dense model. Each is run at every capacity, which is the budget of what is searched. Beside them a
            series may have `changes`, fields of the training config that differ in its runs, and `tune: false`, which
            evaluates it as routing leaves it.
        changes: Fields of the training config to set differently in all runs, nested as in the file.
        finetune: Fields to set differently again when a model is fine-tuned from the dense one.
        capacities: Capacities of the routed blocks; null takes a series as it is, like one that sets `capacity` itself.
        train_dense: Train the dense model first; False takes it as the config's `model` gives it (pretrained or a
            checkpoint).
        tune: Fine-tune; False evaluates routed models as routing leaves them, beside the dense one.
        tune_dense: Fine-tune the dense model like the routed ones, so that none is ahead by mere training.
        before: Also evaluate models before they are fine-tuned.
        seeds: Number of seeds; everything is repeated for each.
        processes: Runs done side by side, each in a process of one thread; 1 does one after another in this process.
        bases: Folder of another study of the same dense model and as many seeds, whose models to start from are taken
            and, where they are missing, trained.
        controls: Name of a series to the series that is its control, null for none; "random" is that of all other
            series of `routers`.
    """

    output: str
    dense: str
    routers: dict[str, dict[str, Any]] = field(default_factory=dict)
    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    finetune: dict[str, Any] = field(default_factory=dict)
    capacities: list[float | None] = field(default_factory=lambda: [0.5])
    train_dense: bool = True
    tune: bool = True
    tune_dense: bool = True
    before: bool = True
    seeds: int = 1
    processes: int = 1
    bases: str | None = None
    controls: dict[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.series or not self.capacities:
            raise ValueError("a study needs at least one entry in routers or rivals, and in capacities")
        for capacity in self.capacities:
            if capacity is not None:
                rational(capacity)
        if self.tune_dense and not self.tune:
            raise ValueError("tune=False leaves nothing to fine-tune: set tune_dense to False too")
        refuse_unknown("series in controls", [*self.controls, *filter(None, self.controls.values())], self.series)
        for name in self.routers:
            self.search_of(name, None)
        refuse_set_by_study("changes", self.changes)
        refuse_set_by_study("finetune", self.finetune)
        check_fields(self, seeds="[1, inf)", processes="[1, inf)")

    @property
    def series(self) -> list[str]:
        """Names of all series apart from the dense model's."""
        return list(self.routers)

    def is_one(self, series: str) -> bool:
        """Whether a series says its own capacity or budget, so that it is run once.

        Args:
            series: A name in `routers`.
        """
        fields = self.routers.get(series, {})
        return "capacity" in fields or "budget" in fields.get("search", {})

    def search_of(self, series: str, capacity: float | None) -> PlanOptions | None:
        """Return how the plan of a series is searched; None where its routing is given.

        Args:
            series: A name in `routers`.
            capacity: The budget; None takes that of the fields.

        Raises:
            ValueError: Fields of the search that do not fit, or fields of a routing beside it.
        """
        from mmod.training.engine.parse import config_from

        fields = self.routers.get(series, {})
        if "search" not in fields:
            return None
        refuse_unknown(f"field beside routers.{series}.search", fields, ("search", *BESIDE))
        budget = {} if capacity is None else {"budget": capacity}
        return config_from({**fields["search"], **budget}, PlanOptions)


@dataclass(frozen=True, kw_only=True)
class ImageStudyConfig(StudyConfig):
    """A study of image classifiers: accuracy against FLOPs and latency.

    Args:
        kind: The kind of study.
        score: Figure by which models are compared: "top1", and where patches have the labels "mean_iou" or "objects",
            the accuracy where there is something (see `mmod.training.image.evaluate.EvalResult`).
        isoflop: "scratch" also trains dense models with fewer blocks, as near in FLOPs to the routed ones as can be,
            for as many epochs as training and fine-tuning have together; "none" leaves them out.
        rivals: Name of each series to its budgets, the capacities of the routed models that they are matched to, and
            what each is: a training config's `method`, or `kind: resolution`, or `kind: smaller` with `args` of the
            model that differ. Rivals and series of `routers` may have an `image_size`, their own side of an image, and
            rivals `changes` too. What is `smaller`, and methods to which dense weights are of no use, are trained from
            scratch for as many epochs as training and fine-tuning have together.
        rates: Factors by which the learning rate of each model is multiplied to find its best one, on `rate_split`
            with the first seed; its runs then have that rate. None searches nothing.
        rate_split: Split that the search evaluates on.
        latency_batch: Images in the batch whose latency is drawn and whose memory is measured.
        latency_batches: Further sizes of batches whose latency is measured.
        latency_rounds: Interleaved rounds of the measurement.
        maps: Sample images over which routing is drawn.
    """

    kind: Literal["image"] = "image"
    score: Literal["top1", "objects", "mean_iou"] = "top1"
    isoflop: Literal["scratch", "none"] = "scratch"
    rivals: dict[str, dict[float, dict[str, Any]]] = field(default_factory=dict)
    rates: list[float] | None = None
    rate_split: str = "val"
    latency_batch: int = 32
    latency_batches: list[int] = field(default_factory=lambda: [1, 8])
    latency_rounds: int = 15
    maps: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = dict.fromkeys(("latency_batch", "latency_batches", "latency_rounds"), "[1, inf)")
        check_fields(self, **whole, rates="(0, inf)", maps="[0, inf)")
        if self.rates is not None and len(set(self.rates)) < 2:
            raise ValueError(f"rates must name two factors or more to choose from, or be null, got {self.rates}")

    @property
    def series(self) -> list[str]:
        """Names of all series apart from the dense model's."""
        return [*super().series, *self.rivals]


@dataclass(frozen=True, kw_only=True)
class FeaturesStudyConfig(ImageStudyConfig):
    """A study of what a trained image model's features are worth: accuracy of classifiers on them against time.

    Unless it is told to fine-tune, no model is trained. Where training and evaluation split of the dense model's data
    differ, classifiers are fitted on the one and tested on the other; otherwise every image is tested by classifiers
    fitted on the others.

    Args:
        kind: The kind of study.
        images: Folder of the images, in the place of the config's `data.root`.
        checkpoint: Weights to start from, in the place of the config's `model.checkpoint` or published ones.
        limit: Images of each split that are used, spread evenly over the classes.
        score: The classifier by which models are compared with rivals and controls: "linear" or "knn".
        feature: What a feature is: "head" for what the classifier would read, "class" for the class token, "mean" for
            the mean over patches.
        neighbours: Neighbours that vote on an image's class.
        strengths: Values of scikit-learn's `C` from which the linear classifier chooses on the images it is fitted on.
        folds: Parts into which the images of a single split are dealt.
        draws: Draws of the bootstrap over images.
    """

    # Values of its own for keys that it shares.
    kind: Literal["features"] = "features"  # type: ignore[assignment]
    score: Literal["linear", "knn"] = "linear"  # type: ignore[assignment]
    train_dense: bool = False
    tune: bool = False
    tune_dense: bool = False
    before: bool = False
    isoflop: Literal["scratch", "none"] = "none"
    latency_batch: int = 8
    latency_batches: list[int] = field(default_factory=lambda: [1, 32])
    latency_rounds: int = 5
    images: str | None = None
    checkpoint: str | None = None
    limit: int | None = None
    feature: Literal["head", "class", "mean"] = "head"
    neighbours: int = 10
    strengths: list[float] = field(default_factory=lambda: [0.001, 0.01, 0.1])
    folds: int = 5
    draws: int = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            limit="[1, inf)",
            neighbours="[1, inf)",
            strengths="(0, inf)",
            folds="[2, inf)",
            draws="[100, inf)",
        )
        if self.seeds != 1 or self.train_dense:
            raise ValueError("a study of features compares one trained model over images: seeds=1, train_dense=False")
        if self.isoflop != "none" or not self.strengths:
            raise ValueError("a study of features needs isoflop='none' and at least one value in strengths")


@dataclass(frozen=True, kw_only=True)
class SegmentationStudyConfig(FeaturesStudyConfig):
    """A study of what a trained image model's patch features are worth: how well a linear classifier segments images.

    The classifier is fitted on the training split's patches and tested on the evaluation split's, all of which have a
    class (`data.label_patch`). Features of another grid, as of smaller images, are interpolated to that of the labels.

    Args:
        kind: The kind of study.
        score: "mean_iou", the mean intersection over union of the classes over all tested patches.
        feature: "patches".
        strengths: As for features; one value is taken as it is.
    """

    kind: Literal["segmentation"] = "segmentation"  # type: ignore[assignment]
    score: Literal["mean_iou"] = "mean_iou"  # type: ignore[assignment]
    feature: Literal["patches"] = "patches"  # type: ignore[assignment]
    strengths: list[float] = field(default_factory=lambda: [0.01])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tune:
            raise ValueError("a study of segmentation judges features as they are: tune=False")


@dataclass(frozen=True, kw_only=True)
class PairsStudyConfig(StudyConfig):
    """A study of image-text models: retrieval and zero-shot accuracy against FLOPs and latency of both towers.

    Args:
        kind: The kind of study.
        routers: Name of each series to the routing of its towers: `{image: {...}, text: {...}}`, each with fields of
            `RoutingConfig`, or `preset: NAME` with changes. Each is run at every capacity.
        latency_batch: Images and captions in a batch whose latency is measured.
        latency_rounds: Interleaved rounds of the measurement.
    """

    kind: Literal["pairs"] = "pairs"
    latency_batch: int = 32
    latency_rounds: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, latency_batch="[1, inf)", latency_rounds="[1, inf)")
        for name, towers in self.routers.items():
            refuse_unknown(f"tower in routers.{name}", towers, ("image", "text"))


@dataclass(frozen=True, kw_only=True)
class ChatStudyConfig(StudyConfig):
    """A study of vision-language models: answers by kind of question against prefill, decoding and cache.

    Args:
        kind: The kind of study.
        part: The part that is routed.
        rivals: Smaller images: name of each series to its budgets, the capacities of the routed models that they are
            matched to, and `{kind: resolution, image_size: SIDE}`.
        maps: Evaluation questions for which kept image tokens are drawn; 0 draws none.
        timed_prompts: Prompts that are read at once when time is measured.
        timed_tokens: Tokens that are decoded for each of them.
        timed_rounds: Interleaved rounds of the measurement.
    """

    kind: Literal["chat"] = "chat"
    capacities: list[float | None] = field(default_factory=lambda: [None])
    before: bool = False
    part: Literal["language", "vision"] = "language"
    rivals: dict[str, dict[float, dict[str, Any]]] = field(default_factory=dict)
    maps: int = 4
    timed_prompts: int = 8
    timed_tokens: int = 16
    timed_rounds: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, maps="[0, inf)", timed_prompts="[1, inf)", timed_tokens="[1, inf)", timed_rounds="[1, inf)")
        for name, budgets in self.rivals.items():
            for fields in budgets.values():
                one_of(f"rivals.{name}.kind", fields.get("kind"), ["resolution"])

    @property
    def series(self) -> list[str]:
        """Names of all series apart from the dense model's."""
        return [*super().series, *self.rivals]


def refuse_set_by_study(what: str, changes: Mapping[str, Any]) -> None:
    """Raise a ValueError where changes of a training config name what a study sets itself.

    Args:
        what: What the changes are, for the error.
        changes: The changes.
    """
    taken = sorted({"output", "seed", "routing"} & set(changes))
    if taken:
        raise ValueError(f"{what} must not set {', '.join(taken)}: the study sets them")
