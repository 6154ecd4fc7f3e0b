"""Audits of image classifiers."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from mmod import flops, trace
from mmod.adapters import find_stack
from mmod.analysis.audit.judges import judge_classes
from mmod.analysis.plots import draw_routing_maps
from mmod.audits.config import AuditConfig
from mmod.audits.subject import Again, Sorted, Subject
from mmod.data.config import DataConfig
from mmod.data.loader import create_eval_stream
from mmod.data.subset import spread
from mmod.data.synthetic.digits import DIFFICULTIES, DigitScene, compose_scenes
from mmod.training.engine.distributed import choose_device
from mmod.training.engine.evaluate import KeptShares, RoutedResult
from mmod.training.image.config import DistillConfig
from mmod.training.image.model import create_models
from mmod.training.image.recipe import ImageRecipe, sample_images

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ImageSubject"]

_DIGITS = "digits"


class ImageSubject(Subject[AuditConfig]):
    """A timm model; see `Subject`."""

    def create(self, reference: str | None = None) -> nn.Module:
        """Make the routed model, or the dense one of another run."""
        config = dataclasses.replace(self.config, distill=DistillConfig(teacher="none"), grad_checkpointing=False)
        if reference is not None:
            config = dataclasses.replace(config, model=config.model.started_from(reference), routing=None)
        model = create_models(config)[0].to(choose_device(config.device)).eval()
        if reference is None:
            self._prefix = find_stack(model).prefix
            self._grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
        return model

    def batches(self, changes: Mapping[str, Any] = MappingProxyType({})) -> Again:
        """Return the images by the size and place of their object, and their patches by what they show."""
        data = self.data(changes)
        stream, scenes = create_eval_stream(data), _scenes(data)

        def make() -> Iterator[Sorted]:
            start = 0
            for images, targets in stream.batches(0):
                own = scenes[start : start + len(images)]
                start += len(images)
                yield Sorted((images, targets), _strata(own, targets), self._kinds(own, targets))

        return Again(make, stream.steps_per_epoch)

    def judge(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return cross entropy and correctness of each image."""
        return judge_classes(model, batch)

    def shifted(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Change the images, not their classes."""
        images, targets = batch
        return change(images), targets

    def flops(self, model: nn.Module) -> dict[str, Any]:
        """Return the FLOPs of an image."""
        data = self.config.data
        return flops(model, (data.channels, data.image_size, data.image_size)).to_dict()

    def cost(self, model: nn.Module) -> float:
        """Return the FLOPs of an image, on average where images leave early."""
        kept, found = KeptShares(model, next(model.parameters()).device), RoutedResult()
        for own in self.batches():
            with torch.inference_mode(), kept.watch():
                self.judge(model, own.batch)
        found.kept = kept.means()
        return ImageRecipe(self.config).cost(model, found)["image"]

    def maps(self, model: nn.Module, count: int) -> tuple[dict[str, Any], Figure]:
        """Return what the blocks keep of sample images."""
        images, prefix = sample_images(self.config, count), find_stack(model).prefix
        device = next(model.parameters()).device
        with torch.inference_mode(), trace(model) as decisions:
            model(images.to(device))
        patches = next(iter(decisions.values())).score_BN.shape[1] - prefix
        rows, columns = getattr(getattr(model, "patch_embed", None), "grid_size", (1, patches))
        low, high = images.amin(), images.amax()
        shown = ((images - low) / (high - low)).clamp(0, 1)
        figure = draw_routing_maps(shown, decisions, prefix, (rows, columns))
        kept = decisions.maps(prefix, (rows, columns)).flatten(2)
        blocks = {name: [row.nonzero().flatten().tolist() for row in own] for name, own in zip(decisions, kept)}
        return {"grid": [rows, columns], "blocks": blocks, "images": [_png(image) for image in shown]}, figure

    def _kinds(self, scenes: Sequence[DigitScene], targets: Tensor) -> dict[str, NDArray[np.str_]]:
        """Return what each token of a batch shows; nothing where the set does not say it."""
        if targets.ndim == 2:
            shown = np.where(targets > 0, "object", "background")
        elif scenes and self._grid is not None:
            shown = np.stack([_regions(scene, self._grid) for scene in scenes])
        else:
            return {}
        return {"region": np.pad(shown.astype(object), ((0, 0), (self._prefix, 0)), constant_values="prefix token")}


def _scenes(data: DataConfig) -> list[DigitScene]:
    """Return the scenes of the embedded digits in the order of the set; nothing of other sets."""
    kind, _, difficulty = data.source.partition(":")
    if kind != _DIGITS:
        return []
    scenes = list(compose_scenes(DIFFICULTIES[difficulty or "default"], data.val_split))
    if data.val_limit is None:
        return scenes
    return [scenes[int(place)] for place in spread([scene.label for scene in scenes], data.val_limit)]


def _strata(scenes: Sequence[DigitScene], targets: Tensor) -> dict[str, list[float]]:
    """Return size and place of the digit in each scene, and how many patches have an object where they have classes."""
    found: dict[str, list[float]] = {}
    if scenes:
        boxes = torch.tensor([scene.box for scene in scenes], dtype=torch.float64)
        middle = (boxes[:, :2] + boxes[:, 2:] - len(scenes[0].image)) / 2
        found["side of the object"] = (boxes[:, 2] - boxes[:, 0]).tolist()
        found["distance of the object from the middle"] = middle.norm(dim=1).tolist()
    if targets.ndim == 2:
        found["patches with an object"] = (targets > 0).sum(1).tolist()
    return found


def _regions(scene: DigitScene, grid: tuple[int, int]) -> NDArray[np.str_]:
    """Return of each patch whether its middle lies in the digit's box, there is ink of others, or nothing (P)."""
    pixels = torch.from_numpy(scene.image)[None].float()
    has_ink = torch.nn.functional.adaptive_max_pool2d(pixels, grid)[0] > 0
    left, top, right, bottom = scene.box
    rows, columns = ((np.arange(count) + 0.5) * len(scene.image) / count for count in grid)
    is_object = ((rows >= top) & (rows < bottom))[:, None] & ((columns >= left) & (columns < right))
    return np.where(is_object, "object", np.where(has_ink, "clutter", "background")).flatten()


def _png(image: Tensor) -> str:
    """Return an image (C, height, width) in [0, 1] as the address of a PNG that holds it."""
    pixels = (image.expand(3, -1, -1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
