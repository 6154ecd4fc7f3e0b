"""Studies of a trained model's features, of images and of patches: their quality against cost."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmod import is_routed, routed_blocks
from mmod.analysis.statistics import Estimate, Resampling
from mmod.data.config import DataConfig
from mmod.data.labels import IGNORED
from mmod.data.loader import BatchStream, image_stream
from mmod.io.jobs import Tick
from mmod.io.store import Store
from mmod.planning.candidate import DENSE
from mmod.studies.config import FeaturesStudyConfig
from mmod.studies.image import TimmCosts, TimmReport
from mmod.studies.jobs import Run
from mmod.studies.results import StudyScores, listed
from mmod.studies.scorer import Findings, Outcome, Scorer, identity_of, train
from mmod.studies.study import Study
from mmod.training.engine.evaluate import RoutedResult
from mmod.training.image.config import TrainConfig
from mmod.training.image.features import Features, extract, read_features
from mmod.training.image.kind import ImageKind
from mmod.training.image.model import check_published
from mmod.values import from_plain

# The images that classifiers are fitted on, and those that are tested.
_FITTED = "fitted"
_TESTED = "tested"
# Draws of the bootstrap over images.
_DRAWS = 2000
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
        "name",
        "gflops",
        "latency_ms",
        "speedup",
        "peak_mb",
        "knn",
        "knn_to_dense",
        "linear",
        "linear_to_dense",
        "to_control",
        "cosine",
        "before",
        "top1",
        "kept",
    )
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
        "name",
        "gflops",
        "latency_ms",
        "speedup",
        "peak_mb",
        "mean_iou",
        "mean_iou_to_dense",
        "to_control",
        "patches",
        "cosine",
        "kept",
    )
    # Of every tested image, patches by class (rows) and predicted class (columns).
    confusion: list[list[list[int]]]

    @staticmethod
    def classify(features: Sequence[Features], study: FeaturesStudyConfig) -> dict[str, Any]:
        """Classify the tested patches by a linear classifier that is fitted on those of the other split."""
        from sklearn.model_selection import GroupKFold

        fitted, tested = features
        per_image = len(tested.label_N) // len(tested.kept_NL)
        # Patches without a class are neither fitted nor tested.
        place_N = np.flatnonzero(fitted.label_N.numpy() != IGNORED)
        x_ND = fitted.x_ND.float().numpy()[place_N]
        label_N = fitted.label_N.numpy()[place_N]
        # All patches of an image are on the same side of the cross-validation that chooses `C`.
        folds = list(GroupKFold(3).split(x_ND, label_N, place_N // per_image))
        regression = _regression(study.strengths, folds).fit(x_ND, label_N)
        predicted = regression.predict(tested.x_ND.float().numpy())
        labels = tested.label_N.numpy()
        classes = int(max(labels.max(), predicted.max(), label_N.max())) + 1
        pairs = np.where(labels == IGNORED, -1, labels * classes + predicted).reshape(-1, per_image)
        counts = [np.bincount(image[image >= 0], minlength=classes**2) for image in pairs]
        return {"confusion": [count.reshape(classes, -1).tolist() for count in counts]}

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


class FeatureScores(StudyScores):
    """Scores of features, paired by image.

    Args:
        score: The figure of an evaluation by which models are compared.
        evaluations: The evaluation of every model.
    """

    def __init__(self, score: str, evaluations: Mapping[str, Judged]) -> None:
        self.score = score
        self.evaluations = evaluations
        dense = evaluations[DENSE]
        skipped = f" ({dense.skipped} could not be read)" if dense.skipped else ""
        self.note = f"{dense.images} images{skipped}; 95 % intervals are of a paired bootstrap over images."

    def mean(self, name: str) -> float:
        """Return the score over all images."""
        return self.evaluations[name].columns()[self.score]

    def gap(self, name: str, other: str) -> Estimate | None:
        """Return the difference of a model's score to another's; None where the other is not evaluated yet."""
        return self.gap_in(self.score, name, other)

    def gap_in(self, figure: str, name: str, other: str | None) -> Estimate | None:
        """Return the difference of a figure; None for none, or to itself."""
        if other is None or other == name or other not in self.evaluations:
            return None
        one = self.evaluations[name]
        two = self.evaluations[other]
        resampling = _resampling(one.images, _DRAWS)
        return resampling.of(lambda weight_SN: one.weighed(figure, weight_SN) - two.weighed(figure, weight_SN))

    def verdict(self) -> str:
        """Say which models do not differ significantly from the dense one."""
        sentences = []
        for figure, title in self.evaluations[DENSE].measures.items():
            gaps = {name: self.gap_in(figure, name, DENSE) for name in self.evaluations}
            close = [name for name, gap in gaps.items() if gap is not None and not gap.is_clear]
            names = listed(close, most=6) or "none"
            sentences.append(f"No significant difference to dense by the {title}: {names}.")
        return " ".join(sentences)


class FeatureScorer(Scorer[FeaturesStudyConfig]):
    """Scores models of timm by classifiers of their features."""

    def __init__(self, config: FeaturesStudyConfig) -> None:
        self.judged: type[Judged] = Segmented if config.feature == "patches" else Probed
        super().__init__(config, config.score, self.judged.measures[config.score])
        # Apart from the results, because they are large.
        self.features = Store(Path(config.output) / "features.jsonl")

    def evaluate(self, run: Run[TrainConfig], tick: Tick) -> Outcome:
        """Compute a model's features and judge them; where it is fine-tuned, those of the fine-tuned model."""
        config = run.config
        further: dict[str, float] = {}
        if run.is_trained:
            if self.config.before:
                further["before"] = self._probe(config).columns()[self.score]
            further["top1"] = train(config, tick).top1
            config = config.started_from(config.output)
        evaluation = self._probe(config, tick, self._dense(run))
        return Outcome(evaluation, {**evaluation.columns(), **further})

    def _dense(self, run: Run[TrainConfig]) -> TrainConfig | None:
        """Return the config of the dense model if its classifier judges a run, for which its features are needed."""
        dense = TrainConfig.from_dict(self.config.dense_fields)
        is_cheaper = run.name != DENSE and (run.config.model, run.config.data) == (dense.model, dense.data)
        if self.config.classifier == "each" or not is_cheaper:
            return None
        return dataclasses.replace(dense, output=str(Path(run.config.output).with_name(DENSE)))

    def scores(self, names: Iterable[str], findings: Findings) -> FeatureScores:
        """Return the scores of models, to be compared image by image."""
        evaluations = {name: findings.evaluations[name] for name in names}
        return FeatureScores(self.score, evaluations)

    def complete(self, rows: Sequence[dict[str, Any]], findings: Findings) -> list[dict[str, Any]]:
        """Add the differences of features to the dense model's and rivals', and their cosine with dense ones."""
        scores = self.scores([row["name"] for row in rows], findings)
        dense_ND = self._tested(findings.runs[DENSE])
        completed = []
        for row in rows:
            partners = {"dense": DENSE, **{column: row[column] for column in row if column.startswith("rival_")}}
            gaps = {}
            for figure in self.judged.measures:
                for column, partner in partners.items():
                    gaps[f"{figure}_to_{column}"] = scores.gap_in(figure, row["name"], partner)
            x_ND = self._tested(findings.runs[row["name"]])
            cosine = None
            if x_ND.shape == dense_ND.shape:
                cosine = float(F.cosine_similarity(x_ND, dense_ND).mean())
            completed.append({**row, **gaps, "cosine": cosine})
        return completed

    def _probe(self, config: TrainConfig, tick: Tick = lambda share: None, dense: TrainConfig | None = None) -> Judged:
        """Judge the features of the model that a run starts from, once.

        Args:
            dense: Config of the dense model, whose classifier judges; None for one of its own features.
        """
        study = self.config
        features = {}
        for name in _splits(config.data):
            features[name] = self._identity(self._model_of(name, config, dense), name)
        identity = {
            "work": "judgement of features",
            "features": features,
            "neighbours": study.neighbours,
            "strengths": study.strengths,
            "folds": study.folds,
        }
        return self.judged(**self.store.once(identity, functools.partial(self._judge, config, tick, dense)))

    def _judge(self, config: TrainConfig, tick: Tick, dense: TrainConfig | None) -> Judged:
        """Compute the features of the model that a run starts from, and judge them."""
        streams = {name: _decoded(fields) for name, fields in _splits(config.data).items()}
        if len(streams) == 1:
            # Refused before a model is made.
            split_by_class(streams[_TESTED].reader.labels.numpy(), self.config.folds)  # type: ignore[attr-defined]
        check_published(config.model, "set checkpoint to a file of weights")
        model = ImageKind(config).load()
        features = []
        for name, stream in streams.items():
            owner = self._model_of(name, config, dense)
            identity = self._identity(owner, name)
            if owner is config:
                kind = self.config.feature
                extracted = extract(model, stream, self.features, identity, kind, precision=config.precision, tick=tick)
                features.append(extracted)
            else:
                features.append(read_features(self.features, identity))
        blocks = list(routed_blocks(model)) if is_routed(model) else []
        return self.judged(
            kept=dict(zip(blocks, features[-1].kept_NL.mean(0).tolist())),
            skipped=sum(len(stream.report.faults) for stream in streams.values()),
            **self.judged.classify(features, self.config),
        )

    def _model_of(self, split: str, config: TrainConfig, dense: TrainConfig | None) -> TrainConfig:
        """Return the config of the model that computes the features of a split."""
        return config if dense is None or split == _TESTED else dense

    def _identity(self, config: TrainConfig, split: str) -> dict[str, Any]:
        """Return what stands for the features of a split by the model that a run starts from."""
        known = identity_of(config)
        names = ("model", "routing", "methods", "precision")
        settings = {name: known["config"][name] for name in names if name in known["config"]}
        data = json.loads(_splits(config.data)[split])
        return {**known, "config": settings, "work": "features", "feature": self.config.feature, "data": data}

    def _tested(self, run: Run[TrainConfig]) -> Tensor:
        """Return the features of the tested images, which a run has computed (N, D)."""
        config = run.config
        if run.is_trained:
            config = config.started_from(config.output)
        return read_features(self.features, self._identity(config, _TESTED)).x_ND.float()


class FeaturesStudy(Study):
    """A study of the features of timm's models; see `Study`."""

    def __init__(self, config: FeaturesStudyConfig) -> None:
        scorer = FeatureScorer(config)
        costs = TimmCosts(config)
        super().__init__(config, TrainConfig, scorer, costs, TimmReport(config, scorer, costs, scorer.judged.table))


_resampling = functools.lru_cache(maxsize=1)(Resampling)


def _splits(config: DataConfig) -> dict[str, str]:
    """Return configs, in JSON, of the tested images, and where they are another split, of those to fit on first."""
    tested = dataclasses.replace(config, augment=None, in_memory=True)
    fitted = dataclasses.replace(tested, val_split=config.train_split, val_limit=config.train_limit)
    splits = {_FITTED: fitted, _TESTED: tested}
    if config.train_split == config.val_split:
        del splits[_FITTED]
    return {name: json.dumps(dataclasses.asdict(data)) for name, data in splits.items()}


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
