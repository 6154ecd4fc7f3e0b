"""The study of features: what a trained model's features are worth at which cost, before any training and after it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmod import is_routed, routed_blocks
from mmod.analysis.statistics import Estimate, Resampling
from mmod.data.config import DataConfig
from mmod.data.loader import BatchStream, create_eval_stream
from mmod.io.claim import check_same, claim_folder, read_claim
from mmod.io.files import parse_json, write_atomically
from mmod.io.yaml import merged
from mmod.studies.config import FeaturesStudyConfig
from mmod.studies.entrants import DENSE
from mmod.studies.image import TimmStudy
from mmod.studies.jobs import Job, Tick
from mmod.studies.probes import linear_probe, nearest_neighbours, split_by_class
from mmod.studies.study import Costs, Outcome, Scores
from mmod.training.engine.distributed import choose_device
from mmod.training.engine.evaluate import RoutedResult
from mmod.training.engine.loop import seed_draws
from mmod.training.engine.run_folder import portable
from mmod.training.image.config import TrainConfig
from mmod.training.image.features import Features, extract, read_features
from mmod.training.image.model import check_published

__all__ = ["FeaturesStudy", "Judged", "Probed"]

# The folder of the images that are tested.
_TESTED = "tested"


@dataclass(frozen=True, kw_only=True)
class Judged(RoutedResult):
    """How good a model's features were found to be.

    Args:
        kept: Name of each routed block to its mean kept share of tokens, in [0, 1].
        skipped: Images that could not be read.
    """

    kept: dict[str, float]
    skipped: int

    @property
    def images(self) -> int:
        """Number of tested images."""
        raise NotImplementedError

    def weighed(self, measure: str, weight_SN: np.ndarray) -> np.ndarray:
        """Return a figure for several ways to weigh the images, in percent (S,).

        Args:
            measure: Name of the figure.
            weight_SN: Weight of each image (S, images); those of a way sum to 1.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Probed(Judged):
    """What classifiers on a model's features found.

    Args:
        knn: 1 for each tested image that its nearest neighbours classify rightly, else 0.
        linear: The same of the linear classifier.
    """

    knn: list[int]
    linear: list[int]

    @property
    def images(self) -> int:
        """Number of tested images."""
        return len(self.linear)

    def columns(self) -> dict[str, float]:
        """Return the share of images classified rightly, in percent, and the kept share of tokens."""
        shares = {name: 100 * float(np.mean(getattr(self, name))) for name in ("knn", "linear")}
        return shares | {"kept": self.mean_kept}

    def weighed(self, measure: str, weight_SN: np.ndarray) -> np.ndarray:
        """Return a figure for several ways to weigh the images, in percent (S,); see `Judged.weighed`."""
        right: np.ndarray = 100 * (weight_SN @ np.asarray(getattr(self, measure), np.float32))
        return right


class FeaturesStudy(TimmStudy[Judged]):
    """A study of the features of timm's models; see `Study`."""

    config: FeaturesStudyConfig
    found: ClassVar[type[Judged]] = Probed
    # Figures by which features are judged, and what they are.
    measures: ClassVar = {"knn": "nearest neighbours of features", "linear": "linear classifier on features"}
    columns: ClassVar = {
        "name": ("model", ""),
        "gflops": ("GFLOPs", ".2f"),
        "latency_ms": ("ms / image", ".1f"),
        "speedup": ("speed-up", ".2f"),
        "peak_mb": ("peak MB", ".0f"),
        "knn": ("k-NN %", ".1f"),
        "knn_to_dense": ("k-NN to dense", ""),
        "linear": ("linear %", ".1f"),
        "linear_to_dense": ("linear to dense", ""),
        "to_control": ("to control", ""),
        "cosine": ("cosine", ".3f"),
        "before": ("before tuning", ".1f"),
        "top1": ("top-1 %", ".1f"),
        "kept": ("kept", ".3f"),
    }

    def __init__(self, config: FeaturesStudyConfig) -> None:
        data = {"root": config.images, "val_limit": config.limit, "train_limit": config.limit}
        changes = {
            "data": {name: value for name, value in data.items() if value is not None},
            "model": {} if config.checkpoint is None else {"checkpoint": config.checkpoint, "pretrained": False},
        }
        super().__init__(dataclasses.replace(config, changes=merged(config.changes, changes)))
        self.score, self.measure = config.score, self.measures[config.score]
        self.found_by: dict[str, Judged] = {}
        self.folders: dict[str, Path] = {}

    def do(self, job: Job[TrainConfig], tick: Tick) -> Outcome:
        """Compute a model's features and judge them; where it is fine-tuned, those of the model that comes out."""
        job = self.ready(job)
        if not job.is_trained:
            found = self.probe(job.config, _folder(job), tick)
            return Outcome(found, self.figures(found))
        figures = {"before": self.figures(self.evaluate(job.config))[self.score]} if self.config.before else {}
        trained: Any = self.train(job.config, tick)
        found = self.probe(self.start_from(job.config, job.config.output), _folder(job), tick)
        return Outcome(found, {**self.figures(found), **figures, "top1": trained.top1})

    def evaluate(self, config: TrainConfig) -> Judged:
        """Judge the features of the model that a run starts from."""
        return self.probe(config, Path(f"{config.output}.features"), lambda share: None)

    def figures(self, found: Judged) -> dict[str, float]:
        """Return how good features are, and the kept share."""
        return found.columns()

    def probe(self, config: TrainConfig, folder: Path, tick: Tick) -> Judged:
        """Judge the features of the model that a run starts from; what was done before is read.

        Args:
            config: The run.
            folder: Where features and what was found are kept.
            tick: Told the share that is done.

        Raises:
            ValueError: If the folder holds features of another model or other images.
        """
        own = self.config
        plain = portable({**config.to_dict(), "output": str(folder)})
        parts = ("model", "data", "routing", "method", "precision")
        record = {"feature": own.feature, **{part: plain[part] for part in parts if part in plain}}
        kept_record = read_claim(folder, "config.json")
        if kept_record is None:
            claim_folder(folder, record, file="config.json", kind="features")
        else:
            check_same(folder, kept_record, record, kind="features")
        settings = {"neighbours": own.neighbours, "strengths": own.strengths, "folds": own.folds}
        path = folder / "found.json"
        kept = parse_json(path.read_bytes(), str(path)) if path.exists() else {}
        if kept.get("settings") == settings:
            return self.found(**kept["found"])
        # What is missing is said before weights are fetched or features computed.
        check_published(config.model)
        parts_of = _streams(config.data)
        self._check(parts_of)
        seed_draws(config.seed, 0, 0)
        model = self.create(config).to(choose_device(config.device))
        features = [
            extract(model, stream, folder / name, own.feature, precision=config.precision, tick=tick)
            for name, stream in parts_of.items()
        ]
        blocks = list(routed_blocks(model)) if is_routed(model) else []
        found = self._classify(features, blocks, parts_of)
        write_atomically(path, json.dumps({"settings": settings, "found": dataclasses.asdict(found)}) + "\n")
        return found

    def _check(self, streams: Mapping[str, BatchStream]) -> None:
        """Raise where classes have too few images for the classifiers."""
        if len(streams) == 1:
            split_by_class(streams[_TESTED].reader.labels.numpy(), self.config.folds)  # type: ignore[attr-defined]

    def _classify(self, features: list[Features], blocks: list[str], streams: Mapping[str, BatchStream]) -> Judged:
        own, tested = self.config, features[-1]
        x = torch.cat([part.x_ND for part in features]).numpy()
        labels = torch.cat([part.label_N for part in features]).numpy()
        numbers = np.arange(len(labels))
        first = len(labels) - len(tested.label_N)
        splits = [(numbers[:first], numbers[first:])] if first else split_by_class(labels, own.folds)
        return Probed(
            knn=nearest_neighbours(x, labels, splits, own.neighbours).tolist(),
            linear=linear_probe(x, labels, splits, own.strengths).tolist(),
            kept=dict(zip(blocks, tested.kept_NL.mean(0).tolist())),
            skipped=sum(len(stream.report.faults) for stream in streams.values()),
        )

    def examine(self, job: Job[TrainConfig], found: Judged) -> dict[str, float]:
        """Count what a model costs, and keep what was found of each image."""
        self.found_by[job.name] = found
        self.folders[job.name] = _folder(job) / _TESTED
        return super().examine(job, found)

    def compare(self, scores: Scores, partners: Mapping[str, str | None]) -> dict[str, Estimate | None]:
        """Return each model's difference to its partner, paired by image."""
        return {name: self._gap(name, partners.get(name), self.score) for name in scores}

    def verdict(self, scores: Scores) -> str:
        """Say which models are not told from the dense one."""
        told = []
        for probe, title in self.measures.items():
            gaps = {name: self._gap(name, DENSE, probe) for name in scores}
            close = [name for name, gap in gaps.items() if gap is not None and not gap.is_clear]
            told.append(f"Not told from dense by the {title}: {', '.join(close) or 'none'}.")
        return " ".join(told)

    def ranking(self, scores: Scores, costs: Costs) -> str:
        """Say how many images there are and which models may be called better."""
        found = self.found_by[DENSE]
        skipped = f" ({found.skipped} could not be read)" if found.skipped else ""
        intro = f"{found.images} images{skipped}; 95 % intervals are of a bootstrap over images, paired."
        return f"{intro}\n\n{super().ranking(scores, costs)}"

    def complete(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add how features do against the dense model's and rivals', and what they share with dense ones."""
        completed, dense_ND = [], read_features(self.folders[DENSE]).x_ND.float()
        for row in rows:
            own = row["name"]
            others = {"dense": DENSE, **{column: row[column] for column in row if column.startswith("rival_")}}
            gaps = {
                f"{probe}_to_{column}": self._gap(own, other, probe)
                for probe in self.measures
                for column, other in others.items()
            }
            completed.append({**row, **gaps, "cosine": self._cosine(own, dense_ND)})
        return completed

    def _gap(self, own: str, other: str | None, probe: str) -> Estimate | None:
        if other is None or other == own or other not in self.found_by:
            return None
        one, two = self.found_by[own], self.found_by[other]
        resampling = _resampling(one.images, self.config.draws)
        return resampling.of(lambda weight_SN: one.weighed(probe, weight_SN) - two.weighed(probe, weight_SN))

    def _cosine(self, own: str, dense_ND: Tensor) -> float | None:
        x_ND = read_features(self.folders[own]).x_ND.float()
        return float(F.cosine_similarity(x_ND, dense_ND).mean()) if x_ND.shape == dense_ND.shape else None


_resampling = lru_cache(maxsize=1)(Resampling)


def _folder(job: Job[TrainConfig]) -> Path:
    """Return where the features of a run's final model are kept."""
    output = job.config.output
    return Path(output) / "features" if job.is_trained else Path(f"{output}.features")


@dataclass(frozen=True)
class _Data:
    """A data config that caches can hash."""

    text: str
    config: DataConfig = dataclasses.field(compare=False)


def _streams(config: DataConfig) -> dict[str, BatchStream]:
    """Return the images that classifiers are fitted on, where they are a split of their own, and the tested ones."""
    tested = dataclasses.replace(config, augment=None, in_memory=True)
    fitted = dataclasses.replace(tested, val_split=config.train_split, val_limit=config.train_limit)
    parts = {_TESTED: tested} if config.train_split == config.val_split else {"fitted": fitted, _TESTED: tested}
    return {name: _decoded(_Data(repr(data), data)) for name, data in parts.items()}


@lru_cache(maxsize=2)
def _decoded(data: _Data) -> BatchStream:
    """Return images that were decoded once for all models of their size."""
    return create_eval_stream(data.config)
