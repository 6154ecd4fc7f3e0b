"""The study of patch features: how well a linear classifier of a trained model's patches segments images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmod.data.loader import BatchStream
from mmod.studies.config import SegmentationStudyConfig
from mmod.studies.entrants import Entrant
from mmod.studies.features import FeaturesStudy, Judged
from mmod.studies.probes import guess_linearly
from mmod.training.image.config import TrainConfig
from mmod.training.image.features import Features

__all__ = ["Segmented", "SegmentationStudy"]


@dataclass(frozen=True, kw_only=True)
class Segmented(Judged):
    """What a linear classifier of patches found.

    Args:
        confusion: For each tested image how many patches of a class (rows) were taken for which (columns).
    """

    confusion: list[list[list[int]]]

    @property
    def images(self) -> int:
        """Number of tested images."""
        return len(self.confusion)

    def columns(self) -> dict[str, float]:
        """Return the mean IoU and the share of patches classified rightly, in percent, and the kept share of tokens."""
        alike = np.full((1, self.images), 1 / self.images)
        return {name: float(self.weighed(name, alike)[0]) for name in ("mean_iou", "patches")} | {
            "kept": self.mean_kept
        }

    def weighed(self, measure: str, weight_SN: np.ndarray) -> np.ndarray:
        """Return a figure for several ways to weigh the images, in percent (S,); see `Judged.weighed`."""
        count_NCC = np.asarray(self.confusion, np.float64)
        classes = count_NCC.shape[1]
        count_SCC = (weight_SN @ count_NCC.reshape(len(count_NCC), -1)).reshape(-1, classes, classes)
        right_SC = np.diagonal(count_SCC, axis1=1, axis2=2)
        if measure == "patches":
            shares: np.ndarray = 100 * right_SC.sum(1) / count_SCC.sum((1, 2))
            return shares
        union_SC = count_SCC.sum(1) + count_SCC.sum(2) - right_SC
        # A class that neither is nor is guessed has no IoU.
        iou_SC = np.divide(right_SC, union_SC, out=np.full(union_SC.shape, np.nan), where=union_SC > 0)
        means: np.ndarray = 100 * np.nanmean(iou_SC, axis=1)
        return means


class SegmentationStudy(FeaturesStudy):
    """A study of the patch features of timm's models; see `Study`."""

    config: SegmentationStudyConfig
    found = Segmented
    measures: ClassVar = {"mean_iou": "mean IoU of a linear classifier of patches"}
    columns: ClassVar = {
        "name": ("model", ""),
        "gflops": ("GFLOPs", ".2f"),
        "latency_ms": ("ms / image", ".1f"),
        "speedup": ("speed-up", ".2f"),
        "peak_mb": ("peak MB", ".0f"),
        "mean_iou": ("mean IoU %", ".1f"),
        "mean_iou_to_dense": ("IoU to dense", ""),
        "to_control": ("to control", ""),
        "patches": ("patches %", ".1f"),
        "cosine": ("cosine", ".3f"),
        "kept": ("kept", ".3f"),
    }

    def entrants(self, dense: TrainConfig, tuned: TrainConfig) -> list[Entrant]:
        """Return what is compared.

        Raises:
            ValueError: Patches have no classes, or the classifier no split of its own.
        """
        data = dense.data
        if data.label_patch is None or data.train_split == data.val_split:
            raise ValueError(
                "a study of segmentation needs classes of patches, data.label_patch, and data.train_split to fit on "
                f"beside data.val_split; got {data.label_patch}, {data.train_split!r} and {data.val_split!r}"
            )
        return super().entrants(dense, tuned)

    def _classify(self, features: list[Features], blocks: list[str], streams: Mapping[str, BatchStream]) -> Segmented:
        fitted, tested = features
        per_image = len(tested.label_N) // len(tested.kept_NL)
        images = np.arange(len(fitted.label_N)) // per_image
        guesses = guess_linearly(
            fitted.x_ND.float().numpy(),
            fitted.label_N.numpy(),
            tested.x_ND.float().numpy(),
            images,
            self.config.strengths,
        )
        labels = tested.label_N.numpy()
        classes = int(max(labels.max(), guesses.max(), fitted.label_N.max())) + 1
        pairs = (labels * classes + guesses).reshape(-1, per_image)
        counts = [np.bincount(own, minlength=classes**2).reshape(classes, classes).tolist() for own in pairs]
        return Segmented(
            kept=dict(zip(blocks, tested.kept_NL.mean(0).tolist())),
            skipped=sum(len(stream.report.faults) for stream in streams.values()),
            confusion=counts,
        )
