"""The study of image classifiers: accuracy against FLOPs, latency and memory, beside rivals of routing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import yaml
from torch import nn

from mmod.adapters import find_stack, image_facts
from mmod.analysis.memory import peak_bytes
from mmod.analysis.plots import draw_sample_maps
from mmod.analysis.redundancy import redundancy
from mmod.io.tables import Column, table_of
from mmod.io.yaml import merged
from mmod.methods.route import is_routed
from mmod.planning.candidate import DENSE, ONLY, Candidate
from mmod.planning.comparison import as_fast, unbeaten
from mmod.studies.config import ImageStudyConfig, TimmStudyConfig
from mmod.studies.costs import ByModel, Costs
from mmod.studies.jobs import Run
from mmod.studies.report import Report, Rows
from mmod.studies.results import COLUMNS, StudyScores, listed, save_picture
from mmod.studies.scorer import Scorer
from mmod.studies.study import Study
from mmod.training.engine.distributed import choose_device
from mmod.training.engine.evaluate import RoutedResult
from mmod.training.image.config import TrainConfig
from mmod.training.image.evaluate import EvalResult
from mmod.training.image.kind import ImageKind, sample_images, timed_images

# Speeds for which a model is named, as multiples of the dense model's.
_SPEEDS = (1.25, 1.5, 2.0)
# Images whose redundancy is measured.
_MEASURED = 256
_MEASURES = {"top1": "top-1 accuracy", "objects": "accuracy of patches of objects", "mean_iou": "mean IoU"}
_COLUMNS = (
    "name",
    "capacity",
    "epochs",
    "mean_iou",
    "objects",
    "top1",
    "top1_std",
    "gflops",
    "speedup",
    "latency_ms",
    "peak_mb",
    "to_dense",
    "to_control",
    "before",
    "kept",
)


class TimmCosts(Costs[TimmStudyConfig]):
    """The costs of an image in a model of timm.

    Attributes:
        caption: Source, size and redundancy of the images; empty before the dense model is counted.
        images: Number of test images.
        depth: Number of blocks of the dense model.
        chance: Points of accuracy that the choice of the test images may add to a difference between two models.
    """

    times: ClassVar = {"image": ("latency_ms", "speedup")}

    def __init__(self, config: TimmStudyConfig) -> None:
        super().__init__(config)
        self.caption: list[str] = []
        self.images = 0
        self.chance = 0.0
        self.depth = 0

    @property
    def axes(self) -> dict[str, str]:
        """FLOPs and latency of an image."""
        times = {self.time_columns("image", size)[0]: f"ms per image, batch {size}" for size in self.batch_sizes}
        return {"gflops": "GFLOPs per image", **times}

    def count(self, run: Run[TrainConfig], model: nn.Module, evaluation: RoutedResult) -> dict[str, float]:
        """Count the FLOPs of one image and the memory of a batch, and draw what a routed model keeps."""
        if run.name == DENSE:
            self.caption = [_caption(run.config, model)]
            self.depth = len(find_stack(model).blocks)
            if isinstance(evaluation, EvalResult):
                self.images = evaluation.samples
                right = evaluation.columns()[self.config.score] / 100
                # The 95 % interval of a difference between two models on other images, which pairing could only narrow.
                self.chance = 196 * math.sqrt(2 * right * (1 - right) / evaluation.samples)
        if self.config.maps and is_routed(model):
            maps = draw_sample_maps(model, sample_images(run.config, self.config.maps))
            save_picture(self.config.output, f"maps-{run.name}", maps)
        images = timed_images(run.config, self.config.latency_batch).to(choose_device(run.config.device))
        with torch.inference_mode():
            peak = peak_bytes(partial(model, images), images.device)
        gflops = ImageKind(run.config).cost(model, evaluation.kept)["image"] / 1e9
        return {"gflops": gflops, "peak_mb": peak / 1e6}

    def rivals(self, costs: ByModel, candidates: Mapping[str, Candidate]) -> dict[str, dict[str, list[str]]]:
        """Return the models without a router that are as fast as each, by batch size."""
        rivals = {}
        for size, ms in self.known_times(costs, candidates).items():
            by_model = {}
            for name in candidates:
                by_model[name] = [other for other in as_fast(ms, name) if not candidates[other].is_routed]
            rivals[f"_b{size}"] = by_model
        return rivals

    def known_times(self, costs: ByModel, names: Iterable[str]) -> dict[int, dict[str, float]]:
        """Return the time of every model by batch size, for sizes above 1; nothing before it is measured."""
        known = {}
        for size in self.batch_sizes:
            column = self.time_columns("image", size)[0]
            times = {name: costs[name].get(column, 0.0) for name in names}
            if size > 1 and all(times.values()):
                known[size] = times
        return known


class TimmReport(Report[TimmStudyConfig, TimmCosts]):
    """Tells which model to use at some speeds, with columns for every batch size."""

    def facts(self) -> dict[str, Any]:
        """Return the caption of the images."""
        return {"images": self.costs.caption}

    def text(self, scores: StudyScores, costs: ByModel) -> str:
        """Describe the images, recommend a model for each speed, and state what was not tested."""
        note = [scores.note] if scores.note else []
        times = self.costs.known_times(costs, costs)
        chance = self.costs.chance
        to_dense = scores.gaps(dict.fromkeys(costs, DENSE)).values()
        has_intervals = any(gap is not None and gap.has_interval for gap in to_dense)
        is_repeated = self.config.train_dense or self.config.tune
        if not times and (is_repeated or has_intervals):
            return "\n\n".join([*note, scores.verdict()])

        def is_better(one: str, other: str) -> bool:
            gap = scores.gap(one, other)
            if gap is None or gap.value <= 0:
                return False
            return gap.is_clear if has_intervals else gap.value > chance

        texts = [self._advice(scores, ms, size, is_better) for size, ms in times.items()]
        texts += [*note, *self.costs.caption]
        if has_intervals:
            for size, ms in times.items():
                fastest = sorted(unbeaten(ms, is_better), key=ms.__getitem__)
                texts.append(
                    f"At batch {size}, no entrant that is as fast is significantly better (95 % interval of the paired "
                    f"difference) than any of these, the fastest first: {listed(fastest)}."
                )
        limits = []
        if not has_intervals:
            limits.append(_of_chance(chance, self.costs.images))
        if not self.config.train_dense:
            limits.append("All models start from one dense model; another may rank them differently.")
        if is_repeated and not has_intervals:
            limits.append("One seed: `--seeds 5` gives confidence intervals over runs.")
        if limits:
            texts.append(" ".join(limits))
        return "\n\n".join(texts)

    def recommended(self, scores: StudyScores, costs: ByModel) -> list[str]:
        """Return the best models at some speeds, in the largest batches."""
        by_size = self.costs.known_times(costs, costs)
        if not by_size:
            return []
        best = self._best(scores, by_size[max(by_size)]).values()
        return [name for name in dict.fromkeys(best) if name is not None]

    def code(self, candidates: Sequence[Candidate]) -> str:
        """Return the lines of Python, or the keys of a training config, that apply models."""
        blocks = []
        for candidate in candidates:
            lines = candidate.code(ONLY, self.costs.depth)
            if lines and self.config.tune and candidate.is_trained:
                lines = f"model = mmod.load_pretrained({f'{self.config.output}/seed0/{candidate.name}/model'!r})"
            if lines:
                blocks.append(f"{candidate.name} in Python:\n\n```python\nimport mmod\n\n{lines}\n```")
                continue
            side = candidate.image_size
            size = {} if side is None else {"data": {"image_size": side}, "model": {"args": {"img_size": side}}}
            keys = yaml.safe_dump(merged(candidate.changes, size), default_flow_style=None, sort_keys=False).rstrip()
            blocks.append(f"{candidate.name} in a training config:\n\n```yaml\n{keys}\n```")
        return "\n\n".join(blocks)

    def _best(self, scores: StudyScores, ms: Mapping[str, float]) -> dict[float, str | None]:
        """Return the best model by speed, up to the first speed that none reaches."""
        best: dict[float, str | None] = {}
        for speed in _SPEEDS:
            fast = [name for name in ms if name != DENSE and ms[DENSE] >= speed * ms[name]]
            best[speed] = scores.best(fast)
            if not fast:
                break
        return best

    def _advice(
        self, scores: StudyScores, ms: Mapping[str, float], size: int, is_better: Callable[[str, str], bool]
    ) -> str:
        """Name the best model at some speeds, and those that may be as good."""
        lines = [f"What to use, in batches of {size}:\n"]
        for speed, best in self._best(scores, ms).items():
            if best is None:
                lines.append(f"- {speed:g} times the dense speed: nothing measured is that fast")
                continue
            fast = [name for name in ms if name != DENSE and ms[DENSE] >= speed * ms[name]]
            close = [name for name in fast if name != best and not is_better(best, name)]
            close.sort(key=scores.mean, reverse=True)
            line = f"- {speed:g} times the dense speed: {listed([best])}, "
            line += f"{scores.mean(best) - scores.mean(DENSE):+.1f} points"
            lines.append(f"{line}; no clear difference from {listed(close)}" if close else line)
        return "\n".join(lines)

    def summary(self, rows: Rows) -> str:
        """Return the columns of the table that fit a screen."""
        columns: dict[str, Column] = {name: COLUMNS[name] for name in ("name", "gflops")}
        for size in self.costs.batch_sizes:
            columns[self.costs.time_columns("image", size)[1]] = (f"speed-up b{size}", ".2f")
        columns |= {name: COLUMNS[name] for name in (self.scorer.score, "to_dense")}
        return str(table_of(columns, rows))

    def table(self, rows: Rows) -> str:
        """Return the points as a Markdown table, with a column for every batch size."""
        sizes = self.costs.batch_sizes
        columns: dict[str, Column] = {}
        gaps = [name for name in self.columns if name.endswith("to_dense")]
        for name in self.columns:
            title, form = COLUMNS[name]
            if name in ("latency_ms", "speedup"):
                for size in sizes:
                    ms, speedup = self.costs.time_columns("image", size)
                    columns[ms if name == "latency_ms" else speedup] = (f"{title} b{size}", form)
                continue
            columns[name] = (title, form)
            if name in gaps:
                rival = f"{name.removesuffix('dense')}rival"
                heading = f"{title.removesuffix('dense')}rival"
                columns |= {f"{rival}_b{size}": (f"{heading} b{size}", form) for size in sizes}
            if name == gaps[-1]:
                columns |= {f"rival_b{size}": (f"rival b{size}", "") for size in sizes}
        return str(table_of(columns, rows))


class ImageStudy(Study):
    """A study of timm's classifiers, of images or of patches; see `Study`."""

    def __init__(self, config: ImageStudyConfig) -> None:
        scorer = Scorer(config, config.score, _MEASURES[config.score])
        costs = TimmCosts(config)
        super().__init__(config, TrainConfig, scorer, costs, TimmReport(config, scorer, costs, _COLUMNS))


def _caption(config: TrainConfig, model: nn.Module) -> str:
    """Return the source, size and redundancy of the images."""
    data = config.data
    images = f"Images: {data.source}, {data.image_size} px"
    patch = image_facts(model).patch
    if patch is None:
        return images
    report = redundancy(timed_images(config, _MEASURED), patch[0])
    return f"{images}; {report}. {report.suggestion}"


def _of_chance(points: float, images: int) -> str:
    """Say which differences so many test images cannot tell, and how many images would tell one point."""
    text = f"{images:,} test images: differences below {points:.1f} points may be chance."
    if points <= 1:
        return text
    needed = images * points**2
    digits = len(str(round(needed))) - 2
    return f"{text} About {math.ceil(needed / 10**digits) * 10**digits:,} would tell one point."
