"""The configurations of studies of timm's image models, and of those of classifiers, the first kind."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mmod.studies.config import Evaluation, StudyConfig

if TYPE_CHECKING:
    from mmod.data.config import DataConfig
    from mmod.training.engine.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class TimmStudyConfig(StudyConfig):
    """A study of timm's image models.

    Args:
        isoflop: "scratch" also trains dense models with fewer blocks and about the FLOPs of the routed ones, for as
            many epochs as training and fine-tuning have together; "none" leaves them out.
        baselines: Names of series to their budgets, the capacities of the routed models that they are matched to, with
            a training config's `method`, `kind: resolution`, or `kind: smaller` with changed `args` of the model.
            A smaller model starts from its `checkpoint`, beside which a run needs no `args`. Baselines and series of
            `routers` may have an `image_size`; baselines take `changes` and `tune` as series do. Smaller models without
            weights, and methods that cannot use dense ones, are trained from scratch for all epochs.
        rates: Factors of the learning rate, of which every model uses the best on `rate_split` with the first seed;
            null searches none.
        rate_split: Split on which `rates` are compared, another one than that of the evaluation.
        maps: Sample images over which routing is drawn.
        score: Figure by which models are compared.
    """

    isoflop: Literal["scratch", "none"] = "none"
    baselines: dict[str, dict[float, dict[str, Any]]] = field(default_factory=dict)
    rates: Annotated[list[float] | None, "(0, inf)"] = None
    rate_split: str = "val"
    latency_batches: list[int] = field(default_factory=lambda: [1, 8])
    maps: Annotated[int, "[0, inf)"] = 6
    score: str

    @property
    def evaluation(self) -> Evaluation:
        """How its models are evaluated, timed and drawn, and at which learning rates they are trained."""
        shared = self.evaluated_by(self.score)
        return dataclasses.replace(shared, maps=self.maps, rates=self.rates, rate_split=self.rate_split)

    def check_settings(self) -> None:
        """Refuse rates that leave nothing to choose; see `StudyConfig.check_settings`."""
        super().check_settings()
        if self.rates is not None and not 2 <= len(set(self.rates)) == len(self.rates):
            raise ValueError(f"rates must name two factors or more, each once, or be null, got {self.rates}")

    def check_splits(self, dense: DataConfig, tuned: DataConfig) -> None:
        """Raise a ValueError if a model would be trained on images that it or another is evaluated on.

        Args:
            dense: Data of the dense model.
            tuned: Data of fine-tuning it.
        """
        trained = [dense] if self.train_dense else []
        evaluated = [dense]
        if self.tune:
            trained.append(tuned)
            evaluated.append(tuned)
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
        """Refuse a score of patches where images have the labels, and training on the images of the evaluation."""
        self.check_splits(dense.data, tuned.data)
        if self.score != "top1" and dense.data.label_patch is None:
            raise ValueError(f"score={self.score!r} is one of patches: set data.label_patch, or score to 'top1'")
