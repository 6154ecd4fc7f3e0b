"""Audits of image classifiers."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from mmod import flops, trace
from mmod.adapters import find_stack
from mmod.analysis.audit.judges import judge_classes
from mmod.analysis.plots import draw_routing_maps
from mmod.data.loader import create_eval_stream
from mmod.training.audits.config import AuditConfig
from mmod.training.audits.subject import Again, Sorted, Subject
from mmod.training.engine.distributed import choose_device
from mmod.training.engine.evaluate import RoutedResult
from mmod.training.image.config import DistillConfig
from mmod.training.image.model import create_models
from mmod.training.studies.image import image_flops, sample_images

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
        return create_models(config)[0].to(choose_device(config.device)).eval()

    def batches(self, split: str | None = None) -> Again:
        """Return the images by the size and place of their object, where the set says them."""
        data = self.config.data if split is None else dataclasses.replace(self.config.data, val_split=split)
        stream, objects = create_eval_stream(data), self._objects(split)

        def make() -> Iterator[Sorted]:
            start = 0
            for images, targets in stream.batches(0):
                own = {name: values[start : start + len(images)] for name, values in objects.items()}
                if targets.ndim == 2:
                    own["patches with an object"] = (targets > 0).sum(1).tolist()
                start += len(images)
                yield Sorted((images, targets), own)

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

    def cost(self, model: nn.Module, kept: Mapping[str, float]) -> float:
        """Return the FLOPs of an image, on average where images leave early."""
        found = RoutedResult()
        found.kept = dict(kept)
        return image_flops(model, self.config, found)

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

    def _objects(self, split: str | None) -> dict[str, list[float]]:
        """Return size and place of the digit in each scene of the embedded set, in order; nothing of other sets."""
        from mmod.data.subset import spread
        from mmod.data.synthetic.digits import DIFFICULTIES, compose_scenes

        data = self.config.data
        kind, _, difficulty = data.source.partition(":")
        if kind != _DIGITS:
            return {}
        made = DIFFICULTIES[difficulty or "default"]
        scenes = list(compose_scenes(made, split or data.val_split))
        if data.val_limit is not None:
            labels = [scene.label for scene in scenes]
            scenes = [scenes[int(place)] for place in spread(labels, data.val_limit)]
        boxes = torch.tensor([scene.box for scene in scenes], dtype=torch.float64)
        middle = (boxes[:, :2] + boxes[:, 2:] - made.canvas) / 2
        return {
            "side of the object": (boxes[:, 2] - boxes[:, 0]).tolist(),
            "distance of the object from the middle": middle.norm(dim=1).tolist(),
        }


def _png(image: Tensor) -> str:
    """Return an image (C, height, width) in [0, 1] as the address of a PNG that holds it."""
    pixels = (image.expand(3, -1, -1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
