"""Studies of a trained model's features, of images and of patches: their quality against cost."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from mmod import is_routed, routed_blocks
from mmod.analysis.statistics import Estimate, Resampling
from mmod.data.config import DataConfig
from mmod.data.loader import BatchStream, image_stream
from mmod.io.claim import claim_folder
from mmod.io.jobs import Tick
from mmod.io.yaml import merged
from mmod.studies.config import FeaturesStudyConfig
from mmod.studies.entrants import DENSE, Entrant
from mmod.studies.image import TimmStudy
from mmod.studies.jobs import Run
from mmod.studies.study import Costs, Outcome, Scores, evaluate_once
from mmod.training.engine.evaluate import RoutedResult
from mmod.training.engine.run_folder import portable
from mmod.training.image.config import TrainConfig
from mmod.training.image.features import Features, extract, read_features
from mmod.training.image.model import check_published
from mmod.values import from_plain

# The folder of the images that are tested.
_TESTED = "tested"
Split = tuple[np.ndarray, np.ndarray]
"""Indices of the images that a classifier is fitted on, and of those it is tested on."""


@dataclass(frozen=True, kw_only=True)
class Judged(RoutedResult):
    """An evaluation of a model's features.

    Attributes:
        measures: Figures by which features are judged, and their titles.
        table: Names of the study's columns, see `COLUMNS`.
    """

    measures: ClassVar[Mapping[str, str]]
    table: ClassVar[Sequence[str]]
    kept: dict[str, float]  # Routed block to its mean kept share of tokens, in [0, 1].
    skipped: int  # Images that could not be read.

    @staticmethod
    def classify(features: Sequence[Features], study: FeaturesStudyConfig) -> dict[str, Any]:
        """Return the results of classifiers of features, those of the tested split last, as fields of this class."""
        raise NotImplementedError

    @property
    def images(self) -> int:
        """Number of tested images."""
        raise NotImplementedError

    def weighed(self, measure: str, weight_SN: np.ndarray) -> np.ndarray:
        """Return a figure in percent (S,) for S weightings of the images (S, images), each with sum 1."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Probed(Judged):
    """The results of both classifiers: 1 for tested images that they get right, else 0."""

    measures = {"knn": "nearest neighbours of features", "linear": "linear classifier on features"}  # noqa: RUF012
    table = (
        "name", "gflops", "latency_ms", "speedup", "peak_mb", "knn", "knn_to_dense", "linear", "linear_to_dense",
        "to_control", "cosine", "before", "top1", "kept",
    )  # fmt: skip
    knn: list[int]
    linear: list[int]

    @staticmethod
    def classify(features: Sequence[Features], study: FeaturesStudyConfig) -> dict[str, Any]:
        """Classify images by nearest neighbours and by a linear classifier."""
        x_ND = torch.cat([split.x_ND for split in features]).numpy()
        labels = torch.cat([split.label_N for split in features]).numpy()
        numbers = np.arange(len(labels))
        first = len(labels) - len(features[-1].label_N)
        splits = [(numbers[:first], numbers[first:])] if first else split_by_class(labels, study.folds)
        return {
            "knn": nearest_neighbours(x_ND, labels, splits, study.neighbours).tolist(),
            "linear": linear_probe(x_ND, labels, splits, study.strengths).tolist(),
        }

    @property
    def images(self) -> int:
        """Number of tested images."""
        return len(self.linear)

    def columns(self) -> dict[str, float]:
        """Return the accuracies in percent, and the kept share of tokens."""
        return {name: 100 * float(np.mean(getattr(self, name))) for name in ("knn", "linear")} | super().columns()

    def weighed(self, measure: str, weight_SN: np.ndarray) -> np.ndarray:
        """Return a share of right answers."""
        return 100 * (weight_SN @ np.asarray(getattr(self, measure), np.float32))


@dataclass(frozen=True, kw_only=True)
class Segmented(Judged):
    """The results of a linear classifier of patches."""

    measures = {"mean_iou": "mean IoU of a linear classifier of patches"}  # noqa: RUF012
    table = (
        "name", "gflops", "latency_ms", "speedup", "peak_mb", "mean_iou", "mean_iou_to_dense", "to_control", "patches",
        "cosine", "kept",
    )  # fmt: skip
    # Of every tested image, patches by class (rows) and predicted class (columns).
    confusion: list[list[list[int]]]

    @staticmethod
    def classify(features: Sequence[Features], study: FeaturesStudyConfig) -> dict[str, Any]:
        """Classify the tested patches by a linear classifier that is fitted on those of the other split."""
        from sklearn.model_selection import GroupKFold

        fitted, tested = features
        per_image = len(tested.label_N) // len(tested.kept_NL)
        x_ND, label_N = fitted.x_ND.float().numpy(), fitted.label_N.numpy()
        # All patches of an image are on the same side of the cross-validation that chooses `C`.
        folds = list(GroupKFold(3).split(x_ND, label_N, np.arange(len(label_N)) // per_image))
        regression = _regression(study.strengths, folds).fit(x_ND, label_N)
        predicted = regression.predict(tested.x_ND.float().numpy())
        labels = tested.label_N.numpy()
        classes = int(max(labels.max(), predicted.max(), label_N.max())) + 1
        pairs = (labels * classes + predicted).reshape(-1, per_image)
        return {
            "confusion": [np.bincount(image, minlength=classes**2).reshape(classes, -1).tolist() for image in pairs]
        }

    @property
    def images(self) -> int:
        """Number of tested images."""
        return len(self.confusion)

    def columns(self) -> dict[str, float]:
        """Return mean IoU and accuracy of patches in percent, and the kept share of tokens."""
        equal = np.full((1, self.images), 1 / self.images)
        return {name: float(self.weighed(name, equal)[0]) for name in ("mean_iou", "patches")} | super().columns()

    def weighed(self, measure: str, weight_SN: np.ndarray) -> np.ndarray:
        """Return mean IoU or the share of right patches."""
        count_NCC = np.asarray(self.confusion, np.float64)
        classes = count_NCC.shape[1]
        count_SCC = (weight_SN @ count_NCC.reshape(len(count_NCC), -1)).reshape(-1, classes, classes)
        right_SC = np.diagonal(count_SCC, axis1=1, axis2=2)
        if measure == "patches":
            return 100 * right_SC.sum(1) / count_SCC.sum((1, 2))
        union_SC = count_SCC.sum(1) + count_SCC.sum(2) - right_SC
        # A class that is neither there nor predicted has no IoU.
        iou_SC = np.divide(right_SC, union_SC, out=np.full(union_SC.shape, np.nan), where=union_SC > 0)
        return 100 * np.nanmean(iou_SC, axis=1)


class FeaturesStudy(TimmStudy[Judged]):
    """A study of the features of timm's models; see `Study`."""

    config: FeaturesStudyConfig

    def __init__(self, config: FeaturesStudyConfig) -> None:
        data = {"root": config.images, "val_limit": config.limit, "train_limit": config.limit}
        changes = {
            "data": {name: value for name, value in data.items() if value is not None},
            "model": {} if config.checkpoint is None else {"checkpoint": config.checkpoint, "pretrained": False},
        }
        super().__init__(dataclasses.replace(config, changes=merged(config.changes, changes)))
        self.judged: type[Judged] = Segmented if config.feature == "patches" else Probed
        self.columns = self.judged.table
        self.score, self.measure = config.score, self.judged.measures[config.score]
        self.evaluations: dict[str, Judged] = {}
        self.folders: dict[str, Path] = {}

    def entrants(self, dense: TrainConfig, tuned: TrainConfig) -> list[Entrant]:
        """Return what is compared; refuse patches without classes or without a training split."""
        data = dense.data
        if self.config.feature == "patches" and (data.label_patch is None or data.train_split == data.val_split):
            raise ValueError(
                "a study of patches needs their classes, data.label_patch, and data.train_split to fit on beside "
                f"data.val_split; got {data.label_patch}, {data.train_split!r} and {data.val_split!r}"
            )
        return super().entrants(dense, tuned)

    def do(self, job: Run[TrainConfig], tick: Tick) -> Outcome:
        """Compute a model's features and judge them; where it is fine-tuned, those of the fine-tuned model."""
        job = self.ready(job)
        config, further = job.config, dict[str, float]()
        if job.is_trained:
            if self.config.before:
                further["before"] = self.probe(config, Path(f"{config.output}.features")).columns()[self.score]
            recipe = self.recipe(config)
            further["top1"] = recipe.train(tick).top1
            config = recipe.started_from(config.output)
        evaluation = self.probe(config, _folder(job), tick)
        return Outcome(evaluation, {**evaluation.columns(), **further})

    def probe(self, config: TrainConfig, folder: Path, tick: Tick = lambda share: None) -> Judged:
        """Judge the features of the model that a run starts from, or return the evaluation of an earlier call."""
        study = self.config
        plain = portable({**config.to_dict(), "output": str(folder)})
        names = ("model", "data", "routing", "methods", "precision")
        record = {"feature": study.feature, **{name: plain[name] for name in names if name in plain}}
        if not folder.exists():
            # Faults are reported before the folder is claimed: a corrected command may use it.
            streams = _streams(config.data)
            if len(streams) == 1:
                split_by_class(streams[_TESTED].reader.labels.numpy(), study.folds)  # type: ignore[attr-defined]
            check_published(config.model)
        claim_folder(folder, record, file="config.json", kind="features")
        settings = {"neighbours": study.neighbours, "strengths": study.strengths, "folds": study.folds}
        evaluate = functools.partial(self._judge, config, folder, tick)
        return self.judged(**evaluate_once(folder / "evaluations.jsonl", settings, evaluate))

    def _judge(self, config: TrainConfig, folder: Path, tick: Tick) -> Judged:
        """Compute the features of the model that a run starts from, and judge them."""
        streams = _streams(config.data)
        model = self.recipe(config).load()
        features = [
            extract(model, stream, folder / name, self.config.feature, precision=config.precision, tick=tick)
            for name, stream in streams.items()
        ]
        blocks = list(routed_blocks(model)) if is_routed(model) else []
        return self.judged(
            kept=dict(zip(blocks, features[-1].kept_NL.mean(0).tolist())),
            skipped=sum(len(stream.report.faults) for stream in streams.values()),
            **self.judged.classify(features, self.config),
        )

    def examine(self, job: Run[TrainConfig], evaluation: Judged) -> dict[str, float]:
        """Count a model's costs, and keep its evaluation image by image."""
        self.evaluations[job.name] = evaluation
        self.folders[job.name] = _folder(job) / _TESTED
        return super().examine(job, evaluation)

    def compare(self, scores: Scores, partners: Mapping[str, str | None]) -> dict[str, Estimate | None]:
        """Return the difference of every model to its partner, paired by image."""
        return {name: self._gap(name, partners.get(name), self.score) for name in scores}

    def verdict(self, scores: Scores) -> str:
        """Say which models do not differ significantly from the dense one."""
        sentences = []
        for probe, title in self.judged.measures.items():
            gaps = {name: self._gap(name, DENSE, probe) for name in scores}
            close = [name for name, gap in gaps.items() if gap is not None and not gap.is_clear]
            sentences.append(f"No significant difference to dense by the {title}: {', '.join(close) or 'none'}.")
        return " ".join(sentences)

    def ranking(self, scores: Scores, costs: Costs) -> str:
        """Say how many images there are and which models are significantly better."""
        dense = self.evaluations[DENSE]
        skipped = f" ({dense.skipped} could not be read)" if dense.skipped else ""
        intro = f"{dense.images} images{skipped}; 95 % intervals are of a paired bootstrap over images."
        return f"{intro}\n\n{super().ranking(scores, costs)}"

    def complete(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add the differences of features to the dense model's and rivals', and their cosine with dense ones."""
        completed, dense_ND = [], read_features(self.folders[DENSE]).x_ND.float()
        for row in rows:
            partners = {"dense": DENSE, **{column: row[column] for column in row if column.startswith("rival_")}}
            gaps = {
                f"{probe}_to_{column}": self._gap(row["name"], partner, probe)
                for probe in self.judged.measures
                for column, partner in partners.items()
            }
            x_ND = read_features(self.folders[row["name"]]).x_ND.float()
            cosine = float(F.cosine_similarity(x_ND, dense_ND).mean()) if x_ND.shape == dense_ND.shape else None
            completed.append({**row, **gaps, "cosine": cosine})
        return completed

    def _gap(self, name: str, partner: str | None, probe: str) -> Estimate | None:
        if partner is None or partner == name or partner not in self.evaluations:
            return None
        one, other = self.evaluations[name], self.evaluations[partner]
        resampling = _resampling(one.images, self.config.draws)
        return resampling.of(lambda weight_SN: one.weighed(probe, weight_SN) - other.weighed(probe, weight_SN))


_resampling = functools.lru_cache(maxsize=1)(Resampling)


def _folder(job: Run[TrainConfig]) -> Path:
    output = job.config.output
    return Path(output) / "features" if job.is_trained else Path(f"{output}.features")


def _streams(config: DataConfig) -> dict[str, BatchStream]:
    """Return the tested images, and where they are another split, those that classifiers are fitted on."""
    tested = dataclasses.replace(config, augment=None, in_memory=True)
    fitted = dataclasses.replace(tested, val_split=config.train_split, val_limit=config.train_limit)
    splits = {_TESTED: tested} if config.train_split == config.val_split else {"fitted": fitted, _TESTED: tested}
    return {name: _decoded(json.dumps(dataclasses.asdict(data))) for name, data in splits.items()}


@functools.lru_cache(maxsize=2)
def _decoded(fields: str) -> BatchStream:
    """Return the images of a data config in JSON, decoded once for all models of their size."""
    return image_stream(from_plain(DataConfig, json.loads(fields)))


def split_by_class(labels: np.ndarray, count: int) -> list[Split]:
    """Return `count` splits in which every image is tested once, by a classifier fitted on the others."""
    from sklearn.model_selection import StratifiedKFold

    numbers, counts = np.unique(labels, return_counts=True)
    if counts.min() < count:
        raise ValueError(
            f"folds={count} needs as many images of every class, class {numbers[counts.argmin()]} has {counts.min()}"
        )
    return list(StratifiedKFold(count, shuffle=True, random_state=0).split(labels, labels))


def nearest_neighbours(features: np.ndarray, labels: np.ndarray, splits: Sequence[Split], k: int) -> np.ndarray:
    """Return 1 for tested images that their k nearest neighbours by cosine, weighted by distance, get right, else 0."""
    from sklearn.neighbors import KNeighborsClassifier

    return _tested(KNeighborsClassifier(k, metric="cosine", weights="distance"), features, labels, splits)


def linear_probe(
    features: np.ndarray, labels: np.ndarray, splits: Sequence[Split], strengths: Sequence[float]
) -> np.ndarray:
    """Return 1 for tested images that a logistic regression gets right, else 0; its `C` is cross-validated."""
    return _tested(_regression(strengths, 3), features, labels, splits)


def _regression(strengths: Sequence[float], cv: Any) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if len(strengths) == 1:
        return make_pipeline(StandardScaler(), LogisticRegression(C=strengths[0], max_iter=1000, tol=1e-3))
    regression = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, tol=1e-3))
    return GridSearchCV(regression, {"logisticregression__C": list(strengths)}, cv=cv)


def _tested(classifier: Any, features: np.ndarray, labels: np.ndarray, splits: Sequence[Split]) -> np.ndarray:
    right = np.full(len(labels), -1)
    for fitted, tested in splits:
        predicted = classifier.fit(features[fitted], labels[fitted]).predict(features[tested])
        right[tested] = predicted == labels[tested]
    return right[right >= 0]
