"""Studies of a trained model's features, of images and of patches: their quality against cost."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.analysis.table import DENSE, Measured, Table, Weigh, gap, gaps, rows_once, sample_count
from mmod.data.config import DataConfig
from mmod.data.loader import BatchStream, image_stream
from mmod.io.jobs import Callback
from mmod.io.store import Store
from mmod.methods.route import is_routed, routed_blocks
from mmod.opening.timm import check_published
from mmod.plain import from_plain
from mmod.studies.image import STUDY as IMAGE_STUDY
from mmod.studies.image import describe_images, mean_iou, right_patches, tell_of
from mmod.studies.kind import Facts, Lines, Runs, Study, Told
from mmod.studies.kind_configs import FeaturesStudyConfig
from mmod.studies.measure import BEFORE, Load, Measurer, fit, identity_of
from mmod.studies.report import listed
from mmod.studies.runs import Run
from mmod.training.engine.config import RunConfig, config_as
from mmod.training.engine.evaluate import mean_share
from mmod.training.engine.kind import Kind, load
from mmod.training.image.config import TrainConfig
from mmod.training.image.evaluate import CONFUSION
from mmod.training.image.features import Features, extract, read_features
from mmod.values import IGNORED

# The images that classifiers are fitted on, and those that are tested.
_FITTED = "fitted"
_TESTED = "tested"
# Draws of the bootstrap over images.
_DRAWS = 2000
Split = tuple[np.ndarray, np.ndarray]
"""Indices of the images that a classifier is fitted on, and of those it is tested on."""
_COLUMNS = (
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
_COLUMNS_OF_PATCHES = (
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


def classify_images(features: Sequence[Features], config: FeaturesStudyConfig) -> dict[str, np.ndarray]:
    """Classify images by nearest neighbours and by a linear classifier.

    Args:
        features: Those of the tested split last.

    Returns:
        By classifier 1 for tested images that it gets right, else 0 (N,).
    """
    x_ND = torch.cat([split.x_ND for split in features]).numpy()
    labels = torch.cat([split.label_N for split in features]).numpy()
    numbers = np.arange(len(labels))
    first = len(labels) - len(features[-1].label_N)
    if first:
        splits = [(numbers[:first], numbers[first:])]
    else:
        splits = split_by_class(labels, config.folds)
    return {
        "knn": nearest_neighbours(x_ND, labels, splits, config.neighbours),
        "linear": linear_probe(x_ND, labels, splits, config.strengths),
    }


def classify_patches(features: Sequence[Features], config: FeaturesStudyConfig) -> dict[str, np.ndarray]:
    """Classify the patches of the test split by a linear classifier fitted on those of the training split.

    Returns:
        The confusion matrix of every tested image (N, classes, classes).
    """
    from sklearn.model_selection import GroupKFold

    fitted, tested = features
    per_image = len(tested.label_N) // len(tested.kept_NL)
    # Patches without a class are neither fitted nor tested.
    position_N = np.flatnonzero(fitted.label_N.numpy() != IGNORED)
    x_ND = fitted.x_ND.float().numpy()[position_N]
    label_N = fitted.label_N.numpy()[position_N]
    # All patches of an image are on the same side of the cross-validation that chooses `C`.
    folds = list(GroupKFold(3).split(x_ND, label_N, position_N // per_image))
    regression = _regression(config.strengths, folds).fit(x_ND, label_N)
    predicted = regression.predict(tested.x_ND.float().numpy())
    labels = tested.label_N.numpy()
    classes = int(max(labels.max(), predicted.max(), label_N.max())) + 1
    pairs = np.where(labels == IGNORED, -1, labels * classes + predicted).reshape(-1, per_image)
    counts = [np.bincount(image[image >= 0], minlength=classes**2) for image in pairs]
    return {CONFUSION: np.stack(counts).reshape(-1, classes, classes)}


WEIGH: dict[str, Weigh] = {
    "mean_iou": mean_iou,
    "patches": right_patches,
}
"""Figures of patches, as functions of the outcomes of images."""
_MEASURES = {
    "knn": "nearest neighbours of features",
    "linear": "linear classifier on features",
    "mean_iou": "mean IoU of a linear classifier of patches",
}


def figures_of(outcomes: Mapping[str, np.ndarray], images: int) -> dict[str, float]:
    """Return the figures of outcomes of equal weight."""
    if CONFUSION not in outcomes:
        return {name: 100 * float(np.mean(right_N)) for name, right_N in outcomes.items()}
    equal = np.full((1, images), 1 / images)
    return {name: float(WEIGH[name](outcomes, equal)[0]) for name in ("mean_iou", "patches")}


def _config_of(study: Study) -> FeaturesStudyConfig:
    assert isinstance(study.config, FeaturesStudyConfig)
    return study.config


def _figures_of(study: Study) -> list[str]:
    """Return the figures by which features are evaluated."""
    if study.config.score == "mean_iou":
        return ["mean_iou"]
    return ["knn", "linear"]


def _measure(study: Study, run: Run, callback: Callback, measurer: Measurer) -> Measured:
    """Compute a model's features and evaluate them; where it is fine-tuned, those of the fine-tuned model."""
    further: dict[str, float] = {}
    outcomes: dict[str, np.ndarray] = {}
    if run.is_trained:
        if study.config.before and run.is_tuned:
            score = study.config.score
            start = _probe(study, measurer.store, run.start)
            further[BEFORE] = start.figures[score]
            if score in start.outcomes:
                outcomes = {BEFORE: start.outcomes[score]}
        further["top1"] = fit(run.training, callback, measurer.store).result.columns()["top1"]
    classifier = _classifier_of(study, run)
    rows = _probe(study, measurer.store, run.final, measurer.load, callback, classifier)
    return rows._replace(figures={**rows.figures, **further}, outcomes={**rows.outcomes, **outcomes})


def _classifier_of(study: Study, run: Run) -> RunConfig | None:
    """Return the config of the dense model if its classifier evaluates a run, for which its features are needed."""
    dense = study.dense
    is_same = run.training.model == dense.model and run.training.data == dense.data
    if _config_of(study).classifier == "each" or run.name == DENSE or not is_same:
        return None
    folder = Path(run.training.output).with_name(DENSE)
    return dataclasses.replace(dense, output=str(folder))


def _tell(study: Study, table: Table, runs: Runs, rows: Lines, facts: Facts) -> Told:
    """Tell what is told of classifiers, of rows with all figures of features."""
    figures = _figures_of(study)
    dense = table.runs[DENSE][0]
    skipped = f" ({dense.skipped} could not be read)" if dense.skipped else ""
    columns: tuple[str, ...] = _COLUMNS
    if study.config.score == "mean_iou":
        columns = _COLUMNS_OF_PATCHES
    return tell_of(
        study,
        table,
        runs,
        _completed(study, table, runs, rows),
        facts,
        columns=columns,
        measure=_MEASURES[study.config.score],
        significance=lambda table, score, names: " ".join(_close_to_dense(table, one, names) for one in figures),
        note=f"{dense.samples} images{skipped}; 95 % intervals are of a paired bootstrap over images.",
    )


def _close_to_dense(table: Table, figure: str, names: Sequence[str]) -> str:
    """Say which models do not differ significantly from the dense one by a figure."""
    to_dense = gaps(table, figure, dict.fromkeys(names, DENSE))
    close = [name for name, value in to_dense.items() if value is not None and not value.is_clear]
    few = listed(close, most=6) or "none"
    return f"No significant difference to dense by the {_MEASURES[figure]}: {few}."


def _completed(study: Study, table: Table, runs: Runs, rows: Lines) -> Lines:
    """Add the differences of features to the dense model's and baselines', and their cosine with dense ones."""
    dense_ND = _tested_features(study, runs[DENSE])
    completed = []
    for row in rows:
        partners = {"dense": DENSE, **{column: row[column] for column in row if column.startswith("baseline_")}}
        differences = {}
        for figure in _figures_of(study):
            for column, partner in partners.items():
                differences[f"{figure}_to_{column}"] = gap(table, figure, row["name"], partner)
        x_ND = _tested_features(study, runs[row["name"]])
        cosine = None
        if x_ND.shape == dense_ND.shape:
            cosine = float(F.cosine_similarity(x_ND, dense_ND).mean())
        completed.append({**row, **differences, "cosine": cosine})
    return completed


def _probe(
    study: Study,
    store: Store,
    kind: Kind,
    load: Load = load,
    callback: Callback = lambda share: None,
    dense: RunConfig | None = None,
) -> Measured:
    """Evaluate the features of the model that a run starts from, once.

    Args:
        dense: Config of the dense model, whose classifier evaluates; None for one of its own features.
    """
    config = _config_of(study)
    features = {}
    for name in _splits(config_as(kind.config, TrainConfig).data):
        owner = kind.config
        if dense is not None and name != _TESTED:
            owner = dense
        features[name] = identity_of_features(config.feature, owner, name)
    identity = {
        "work": "rows of features",
        "features": features,
        "neighbours": config.neighbours,
        "strengths": config.strengths,
        "folds": config.folds,
    }
    measure = functools.partial(_evaluate, study, kind, load, callback, features, dense is not None)
    return rows_once(store, identity, measure)


def _evaluate(
    study: Study,
    kind: Kind,
    load: Load,
    callback: Callback,
    identities: Mapping[str, Mapping[str, object]],
    by_dense: bool,
) -> Measured:
    """Compute the features of the model that a run starts from, and evaluate them.

    Args:
        identities: What stands for the features of each split.
        by_dense: Read the features of the split to fit on, which the dense model has computed.
    """
    config = _config_of(study)
    run_config = config_as(kind.config, TrainConfig)
    streams = {name: _decoded(fields) for name, fields in _splits(run_config.data).items()}
    if len(streams) == 1:
        # Refused before a model is made.
        source = streams[_TESTED].reader.reader.source  # type: ignore[attr-defined]
        split_by_class(np.asarray(source.labels()), config.folds)
    if run_config.model.pretrained:
        check_published(run_config.model.name, run_config.model.args, "set checkpoint to a file of weights")
    model = load(kind)
    store = features_store(study.comparison.folder)
    features = []
    for name, stream in streams.items():
        identity = identities[name]
        if by_dense and name != _TESTED:
            features.append(read_features(store, identity))
            continue
        extracted = extract(
            model, stream, store, identity, config.feature, precision=run_config.precision, callback=callback
        )
        features.append(extracted)
    blocks = list(routed_blocks(model)) if is_routed(model) else []
    # Of the tested split, which comes last.
    kept_L = features[-1].kept_NL.mean(0)
    kept = dict(zip(blocks, kept_L.tolist()))
    classify = classify_patches if config.feature == "patches" else classify_images
    outcomes = classify(features, config)
    images = sample_count(outcomes)
    skipped = sum(len(stream.report.faults) for stream in streams.values())
    return Measured({**figures_of(outcomes, images), "kept": mean_share(kept)}, kept, images, skipped, outcomes)


def features_store(folder: Path) -> Store:
    """Return the store of features in a study's folder, apart from that of results, because they are large."""
    return _opened(str(folder / "features.jsonl"))


# Not read anew for each model.
_opened = functools.lru_cache(maxsize=1)(Store)


def identity_of_features(feature: str, run_config: RunConfig, split: str) -> dict[str, object]:
    """Return what stands for the features of a split by the model that a run starts from."""
    known = identity_of(run_config)
    names = ("model", "routing", "methods", "precision")
    settings = {name: known["config"][name] for name in names if name in known["config"]}
    data = json.loads(_splits(config_as(run_config, TrainConfig).data)[split])
    return {**known, "config": settings, "work": "features", "feature": feature, "data": data}


def _tested_features(study: Study, run: Run) -> Tensor:
    """Return the features of the tested images, which a run has computed (N, D)."""
    identity = identity_of_features(_config_of(study).feature, run.final.config, _TESTED)
    return read_features(features_store(study.comparison.folder), identity).x_ND.float()


def _splits(data: DataConfig) -> dict[str, str]:
    """Return configs, in JSON, of the tested images, and where they are another split, of those to fit on first."""
    tested = dataclasses.replace(data, augment=None)
    fitted = dataclasses.replace(tested, val_split=data.train_split, val_limit=data.train_limit)
    # As text, by which streams of equal images are cached.
    splits = {_FITTED: fitted, _TESTED: tested}
    if data.train_split == data.val_split:
        del splits[_FITTED]
    return {name: json.dumps(dataclasses.asdict(split)) for name, split in splits.items()}


@functools.lru_cache(maxsize=2)
def _decoded(fields: str) -> BatchStream:
    """Return the images of a data config in JSON, decoded once for all models of their size."""
    return image_stream(from_plain(DataConfig, json.loads(fields)), in_memory=True)


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


def _regression(strengths: Sequence[float], cv: object) -> Any:
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


STUDY = dataclasses.replace(IMAGE_STUDY, describe=describe_images, weigh=WEIGH, measure=_measure, tell=_tell)
"""A study of features of timm's models, which are counted, drawn and timed as classifiers are."""
