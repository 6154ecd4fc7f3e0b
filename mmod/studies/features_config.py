"""The configuration of a study of features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mmod.io.yaml import merged
from mmod.studies.config import Evaluation, TimmStudyConfig

if TYPE_CHECKING:
    from mmod.training.engine.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class FeaturesEvaluation(Evaluation):
    """How features are evaluated; the further fields are those of `FeaturesStudyConfig`."""

    feature: Literal["head", "class", "mean", "patches"]
    neighbours: int
    strengths: Sequence[float]
    folds: int
    classifier: str

    @property
    def identity(self) -> Mapping[str, object]:
        """Features are also told apart by what is taken and what classifies it."""
        names = ("feature", "neighbours", "strengths", "folds", "classifier")
        return {**super().identity, **{name: getattr(self, name) for name in names}}


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
        classifier: "each" model has a classifier of its own features. "dense" evaluates cheaper versions of the dense
            model by its classifier, as they are used without training, so that only tested images run; models of other
            weights or images still have their own.
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
    def trains(self) -> str:
        """Features are those of image models."""
        return "image"

    @property
    def evaluation(self) -> FeaturesEvaluation:
        """How features are evaluated, timed and drawn."""
        return FeaturesEvaluation(
            **vars(super().evaluation),
            feature=self.feature,
            neighbours=self.neighbours,
            strengths=self.strengths,
            folds=self.folds,
            classifier=self.classifier,
        )

    def starts_trained(self, dense: RunConfig) -> bool:
        """Whether the features are trained; see `StudyConfig.starts_trained`."""
        # A new classifier on trained weights is not used.
        return super().starts_trained(dense) or dense.model.checkpoint is not None

    def check_runs(self, dense: RunConfig, tuned: RunConfig) -> None:
        """Refuse patches without classes, and a training split that is missing."""
        self.check_splits(dense.data, tuned.data)
        data = dense.data
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

    def fields_of_dense(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the dense model's training config, with the study's images and weights."""
        data = {"root": self.images, "val_limit": self.limit, "train_limit": self.limit}
        # Published weights would be downloaded, and replaced at once.
        model = {} if self.checkpoint is None else {"checkpoint": self.checkpoint, "pretrained": False}
        changes = {"data": {name: value for name, value in data.items() if value is not None}, "model": model}
        return merged(super().fields_of_dense(fields), changes)
