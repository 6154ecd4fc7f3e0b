"""The configuration of a study of each kind: images, their features, image-text pairs and conversations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from mmod.data.config import DataConfig
from mmod.data.files import files_of
from mmod.io.yaml import BASE_KEY, merged
from mmod.plain import from_plain, without_none
from mmod.planning.candidate import FIT
from mmod.studies.config import RUN_FIELDS, StudyConfig
from mmod.training.engine.config import config_as
from mmod.training.image.config import TrainConfig
from mmod.values import Mistakes, check_value, one_of, refuse_unknown

if TYPE_CHECKING:
    from mmod.training.engine.config import RunConfig

_TOWERS = ("image", "text")


@dataclass(frozen=True, kw_only=True)
class TimmStudyConfig(StudyConfig):
    """A study of timm's image models.

    Args:
        isoflop: "scratch" also trains dense models with fewer blocks and about the FLOPs of the routed ones, for as
            many epochs as training and fine-tuning have together; "none" leaves them out.
        baselines: Series without a router, as in `{prune: {0.5: {kind: prune, keep: 0.5}}}`: a name, the capacity of
            the routed models to compare it with, and what makes it. That is a method's `kind` and fields, `kind:
            resolution` with an `image_size`, or `kind: smaller` with changed `args` of the model. A smaller model
            starts from its `checkpoint`; if that is a run, it needs no `args`. Baselines and series of `routers` may
            have an `image_size`; baselines take `changes` and `tune` as series do. Smaller models without weights, and
            methods that cannot use dense ones, are trained from scratch for all epochs.
        rates: Factors of the learning rate, of which every model uses the best on `rate_split` with the first seed;
            null searches none.
        rate_split: Split on which `rates` are compared, another one than that of the evaluation.
        maps: Sample images over which routing is drawn.
    """

    run_kind: ClassVar[str] = "image"
    isoflop: Literal["scratch", "none"] = "none"
    baselines: dict[str, dict[float, dict[str, object]]] = field(default_factory=dict)
    rates: Annotated[list[float] | None, "(0, inf)"] = None
    rate_split: str = "val"
    latency_batches: list[int] = field(default_factory=lambda: [1, 8])
    maps: Annotated[int, "[0, inf)"] = 6

    @property
    def trains_shallow(self) -> bool:
        """Whether models of equal FLOPs are trained from scratch; see `StudyConfig.trains_shallow`."""
        return self.isoflop == "scratch"

    @property
    def budgets_are_shares(self) -> bool:
        """Whether series name budgets, or baselines are fitted to theirs; see `StudyConfig.budgets_are_shares`."""
        baselines = itertools.chain.from_iterable(budgets.values() for budgets in self.baselines.values())
        is_fitted = any(FIT in fields.values() for fields in baselines)
        return is_fitted or any("budgets" in fields for fields in self.routers.values())

    @classmethod
    def check_dense(cls, fields: Mapping[str, object]) -> None:
        """Raise for missing images of the evaluation too; see `StudyConfig.check_dense`."""
        missing = Mistakes()
        with missing.collected():
            super().check_dense(fields)
        dense = fields.get("dense")
        # Beside a base, changes or a study's own images, the keys may be of other data.
        is_whole = not {"changes", "images"} & fields.keys()
        with missing.collected():
            if is_whole and isinstance(dense, Mapping) and BASE_KEY not in dense and "data" in dense:
                files_of(from_plain(DataConfig, dense["data"], "dense.data"), "val")
        missing.tell()

    def check_settings(self) -> None:
        """Refuse rates that leave nothing to choose; see `StudyConfig.check_settings`."""
        super().check_settings()
        if self.rates is not None and not 2 <= len(set(self.rates)) == len(self.rates):
            raise ValueError(f"rates must name two factors or more, each once, or be null, got {self.rates}")

    def check_runs(self, dense: RunConfig, tuned: RunConfig) -> None:
        """Raise a ValueError if a model would be trained on images that it or another is evaluated on."""
        super().check_runs(dense, tuned)
        data = config_as(dense, TrainConfig).data
        evaluated = [data]
        trained = []
        if self.train_dense:
            trained.append(data)
        if self.tune:
            data = config_as(tuned, TrainConfig).data
            trained.append(data)
            evaluated.append(data)
        if self.rates is not None and self.rate_split in {data.val_split for data in evaluated}:
            raise ValueError(
                "rates would be chosen on the images of the evaluation: rate_split and data.val_split are both "
                f"{self.rate_split!r}; set rate_split to another split"
            )
        images = {(data.source, data.root, data.val_split, data.val_limit) for data in evaluated}
        if self.tune == "others" and len(images) > 1:
            # Differences are paired by sample.
            raise ValueError(
                "the dense model would be evaluated on other images than the fine-tuned ones: source, root, val_split "
                "and val_limit of finetune.data must be those of dense.data, or set tune to true"
            )
        for data in trained:
            for other in evaluated:
                # Fine-tuning may have other images, whose splits have the same names.
                is_one_set = (data.source, data.root) == (other.source, other.root)
                if is_one_set and data.train_split == other.val_split:
                    raise ValueError(
                        "models would be trained on the images of the evaluation: data.train_split and data.val_split "
                        f"are both {data.train_split!r}"
                    )


@dataclass(frozen=True, kw_only=True)
class ImageStudyConfig(TimmStudyConfig):
    """A study of image classifiers: accuracy against FLOPs and latency.

    Args:
        score: Figure by which models are compared: "top1", or of patches with labels "mean_iou" or "objects" (the
            accuracy where there is something).
    """

    kind: Literal["image"] = "image"
    score: Literal["top1", "objects", "mean_iou"] = "top1"

    def check_runs(self, dense: RunConfig, tuned: RunConfig) -> None:
        """Refuse a score of patches where images have the labels."""
        super().check_runs(dense, tuned)
        if self.score != "top1" and config_as(dense, TrainConfig).data.label_patch is None:
            raise ValueError(f"score={self.score!r} is one of patches: set data.label_patch, or score to 'top1'")


@dataclass(frozen=True, kw_only=True)
class FeaturesStudyConfig(TimmStudyConfig):
    """A study of a trained image model's features: quality of classifiers on them against time.

    Without `tune` no model is trained. Classifiers are fitted on the training split of the dense model's data and
    tested on the evaluation split; where both are the same, by cross-validation. Patches all have a class
    (`data.label_patch`); their features are interpolated to the grid of the labels where theirs is another one.

    Args:
        score: The classifier by which models are compared, "linear" or "knn"; of patches "mean_iou", the mean
            intersection over union of the classes over all tested patches.
        feature: "head" for the classifier's input, "class" for the class token, "mean" for the mean over patches,
            "patches" for each patch, which segments images.
        images: Folder of the images; null takes the config's `data.root`.
        checkpoint: Weights to start from; null takes the config's `model.checkpoint` or published ones.
        limit: Images used of a split, spread evenly over the classes.
        neighbours: Neighbours that vote on an image's class.
        strengths: Values of scikit-learn's `C` among which the linear classifier chooses by cross-validation; one value
            needs no choice.
        folds: Folds of the cross-validation in a single split.
        classifier: "each" fits a classifier on the features of every model. "dense" evaluates cheaper versions of the
            dense model by the dense classifier, as they are used without training; they run on tested images only.
            Models of other weights or images still have their own.
    """

    kind: Literal["features"] = "features"
    score: Literal["linear", "knn", "mean_iou"] = "linear"
    feature: Literal["head", "class", "mean", "patches"] = "head"
    train_dense: bool = False
    tune: bool | Literal["others"] = False
    before: bool = False
    latency_batch: int = 8
    latency_batches: list[int] = field(default_factory=lambda: [1, 32])
    latency_rounds: int = 5
    images: str | None = None
    checkpoint: str | None = None
    limit: Annotated[int | None, "[1, inf)"] = None
    neighbours: Annotated[int, "[1, inf)"] = 10
    strengths: Annotated[list[float], "(0, inf)"] = field(default_factory=lambda: [0.001, 0.01, 0.1])
    folds: Annotated[int, "[2, inf)"] = 5
    classifier: Literal["each", "dense"] = "each"

    def check_settings(self) -> None:
        """Refuse what features are not compared by; see `StudyConfig.check_settings`."""
        super().check_settings()
        if self.seeds != 1 or self.train_dense or self.isoflop != "none" or not self.strengths:
            raise ValueError(
                "a study of features compares one trained model over images: seeds=1, train_dense=False, "
                "isoflop='none', and at least one value in strengths"
            )
        is_of_patches = self.feature == "patches"
        if is_of_patches != (self.score == "mean_iou") or (is_of_patches and self.tune):
            raise ValueError(
                f"score 'mean_iou' is that of feature 'patches', with tune=False: got {self.score!r} of "
                f"{self.feature!r}, tune={self.tune}"
            )
        if self.classifier == "dense" and (self.tune or self.processes > 1):
            raise ValueError(
                "classifier='dense' needs tune=False and processes=1: the dense model's features come first"
            )

    @property
    def evaluation(self) -> Mapping[str, object]:
        """Features are also told apart by what is taken and what classifies it; see `StudyConfig.evaluation`."""
        names = ("feature", "neighbours", "strengths", "folds", "classifier")
        return {**super().evaluation, **{name: getattr(self, name) for name in names}}

    def starts_trained(self, dense: RunConfig) -> bool:
        """Whether the features are trained; see `StudyConfig.starts_trained`."""
        # A new classifier on trained weights is not used.
        return super().starts_trained(dense) or dense.model.checkpoint is not None

    def check_runs(self, dense: RunConfig, tuned: RunConfig) -> None:
        """Refuse patches without classes, and a training split that is missing."""
        super().check_runs(dense, tuned)
        data = config_as(dense, TrainConfig).data
        if self.classifier == "dense" and data.train_split == data.val_split:
            raise ValueError(
                "classifier='dense' is fitted on data.train_split and tested on data.val_split: both are "
                f"{data.val_split!r}"
            )
        if self.feature == "patches" and (data.label_patch is None or data.train_split == data.val_split):
            raise ValueError(
                "a study of patches needs their classes, data.label_patch, and data.train_split to fit on beside "
                f"data.val_split; got {data.label_patch}, {data.train_split!r} and {data.val_split!r}"
            )

    def fields_of_dense(self, fields: Mapping[str, object]) -> dict[str, object]:
        """Return the fields of the dense model's training config, with the study's images and weights."""
        data = {"root": self.images, "val_limit": self.limit, "train_limit": self.limit}
        # Published weights would be downloaded, and replaced at once.
        model = {} if self.checkpoint is None else {"checkpoint": self.checkpoint, "pretrained": False}
        changes = {"data": without_none(data), "model": model}
        return merged(super().fields_of_dense(fields), changes)


@dataclass(frozen=True, kw_only=True)
class PairsStudyConfig(StudyConfig):
    """A study of image-text models: retrieval and zero-shot accuracy against FLOPs and latency of both towers.

    Args:
        routers: Names of series to the routing of their towers: `{image: {...}, text: {...}}`, with fields of
            `RoutingConfig`, or `preset: NAME` with changes; next to the towers stand `changes`, `tune` and `budgets`.
            A series is run once, as it is, if one of its towers sets `capacity`.
    """

    run_kind: ClassVar[str] = "pairs"

    kind: Literal["pairs"] = "pairs"

    @property
    def score(self) -> str:
        """The figure by which models are compared."""
        return "recall1"

    def check_settings(self) -> None:
        """Refuse series that do not say what they set of which tower; see `StudyConfig.check_settings`."""
        super().check_settings()
        # Images have one size, that of the tower.
        shared = [name for name in RUN_FIELDS if name != "image_size"]
        for series, fields in self.routers.items():
            for settings in (fields, *fields.get("budgets", {}).values()):
                refuse_unknown(f"tower in routers.{series}", settings, (*_TOWERS, *shared, "budgets"))
                for tower in _TOWERS:
                    check_value(f"routers.{series}.{tower}", settings.get(tower, {}), Mapping[str, object])

    def parts_in(self, fields: Mapping[str, Any]) -> dict[str, Mapping[str, object]]:
        """Return the routing of each tower that a series names; see `StudyConfig.parts_in`."""
        return {tower: fields[tower] for tower in fields if tower in _TOWERS}


@dataclass(frozen=True, kw_only=True)
class ChatStudyConfig(StudyConfig):
    """A study of vision-language models: answers by type of question against prefill, decoding and cache.

    Args:
        part: The part that is routed.
        baselines: Smaller images: names of series to their budgets, the capacities of the routed models that they are
            matched to, with `{kind: resolution, image_size: SIDE}`.
        maps: Evaluation questions for which kept image tokens are drawn; 0 draws none.
    """

    opens_names: ClassVar[bool] = True
    run_kind: ClassVar[str] = "chat"

    kind: Literal["chat"] = "chat"
    capacities: list[float | None] = field(default_factory=lambda: [None])
    before: bool = False
    part: Literal["language", "image"] = "language"
    baselines: dict[str, dict[float, dict[str, object]]] = field(default_factory=dict)
    maps: Annotated[int, "[0, inf)"] = 4
    latency_batch: int = 8
    latency_rounds: int = 5

    @property
    def score(self) -> str:
        """The figure by which models are compared."""
        return "right"

    def check_settings(self) -> None:
        """Refuse baselines other than smaller images; see `StudyConfig.check_settings`."""
        super().check_settings()
        for name, budgets in self.baselines.items():
            for fields in budgets.values():
                one_of(f"baselines.{name}.kind", fields.get("kind"), ["resolution"])

    def check_runs(self, dense: RunConfig, tuned: RunConfig) -> None:
        """Refuse training configs without questions."""
        # Its data's readers take a while to import, for which the help of another kind would wait.
        from mmod.training.chat.config import TrainConfig

        super().check_runs(dense, tuned)
        if any(config_as(run, TrainConfig).data.val is None for run in (dense, tuned)):
            raise ValueError(f"{self.dense!r} has no data.val, so there is nothing to ask")

    def parts_in(self, fields: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
        """Return the routing of the part that is routed; see `StudyConfig.parts_in`."""
        return {self.part: fields}


CONFIGS: dict[str, type[StudyConfig]] = {
    "image": ImageStudyConfig,
    "features": FeaturesStudyConfig,
    "pairs": PairsStudyConfig,
    "chat": ChatStudyConfig,
}
"""Configs of studies by kind, imported without torch, so that `--help` is fast; `study_kind` has the rest of a kind.

The first kind is that of a config that names none.
"""
