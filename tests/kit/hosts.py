"""Small models of every library as hosts of a change: made, run on any of their samples, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import mmod
from tests.kit import clip_zoo, conditioned_zoo, own_vits, vision_zoo, vlm_types, vlm_zoo
from tests.kit.zoo import make_images, make_model

# One image, prompt, or pair of image and caption: arguments without a batch axis, or with one of length 1.
Sample = dict[str, Any]


@dataclass(frozen=True)
class Host:
    """A small model and inputs for it.

    Args:
        make: Makes the dense model.
        samples: Makes so many samples.
        outputs: From a model and samples to one output for each.
        parts: Names of the parts that can be routed, with the number of blocks of each.
        architecture: What `mmod.save_pretrained` must be told, if anything.
        name: Of the architecture.
        tokens: What a user says of the model's tokens.
        is_own: The model's class is nobody's but the user's, who makes the dense model to load into.
    """

    make: Callable[[], nn.Module]
    samples: Callable[[int], list[Sample]]
    outputs: Callable[[nn.Module, Sequence[Sample]], list[Tensor]]
    parts: dict[str, int]
    architecture: Any = None
    name: str = ""
    tokens: mmod.Tokens | None = None
    is_own: bool = False

    def apply(self, model: Any, change: Any) -> Any:
        """Change a model; captions are not grouped."""
        is_routing = isinstance(change, mmod.RoutingConfig)
        if is_routing and "text" in self.parts and change.joins:
            return mmod.route_(model, image=change)
        if is_routing and "language" in self.parts:
            # Without images, all tokens are chosen among.
            asked = {} if "image" in self.parts else {"tokens": "all"}
            return mmod.route_(model, language=change.replace(language=asked))
        return mmod.apply_(model, change, tokens=self.tokens)

    def reload(self, model: Any, folder: Path) -> Any:
        """Save a changed model, and return the loaded one in the same mode."""
        if not self.is_own and isinstance(model, transformers.PreTrainedModel):
            model.save_pretrained(folder)
            return mmod.load_pretrained(folder).train(model.training)
        with clip_zoo.small_trunks(self.name):
            mmod.save_pretrained(model, folder, architecture=self.architecture)
            dense = {"model": self.make().to(_floating(model))} if self.is_own else {}
            return mmod.load_pretrained(folder, **dense).train(model.training)


def _floating(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def of_timm(name: str, depth: int = 4, **changes: Any) -> Host:
    side = changes.get("img_size")

    def samples(number: int) -> list[Sample]:
        images = make_images(name, number)
        return [{"image": image if side is None else image[:, :side, :side]} for image in images]

    def outputs(model: nn.Module, batch: Sequence[Sample]) -> list[Tensor]:
        images = torch.stack([sample["image"] for sample in batch]).to(_floating(model))
        return list(model(images))

    return Host(lambda: make_model(name, **changes), samples, outputs, {"image": depth})


def of_tower(kind: str, config: str, **changes: Any) -> Host:
    options = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        **changes,
    }

    def make() -> nn.Module:
        torch.manual_seed(0)
        made = getattr(transformers, kind)(getattr(transformers, config)(**options))
        model: nn.Module = vlm_zoo.lively(made)
        return model

    def samples(number: int) -> list[Sample]:
        images = torch.randn(number, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        return [{"image": image} for image in images]

    def outputs(model: nn.Module, batch: Sequence[Sample]) -> list[Tensor]:
        pixels = torch.stack([sample["image"] for sample in batch]).to(_floating(model))
        return list(model(pixel_values=pixels).last_hidden_state)

    return Host(make, samples, outputs, {"image": 4})


def of_clip(name: str) -> Host:
    lengths = (3, 7, clip_zoo.CONTEXT, 2, 9)

    def samples(number: int) -> list[Sample]:
        images, captions = clip_zoo.make_images(name, number), clip_zoo.make_captions(name, lengths[:number])
        return [{"image": image, "text": caption} for image, caption in zip(images, captions)]

    def outputs(model: nn.Module, batch: Sequence[Sample]) -> list[Tensor]:
        images, captions = (torch.stack([sample[key] for sample in batch]) for key in ("image", "text"))
        both = clip_zoo.embed(model, images.to(_floating(model)), captions)
        return list(torch.cat(both, dim=1))

    make = lambda: clip_zoo.make_clip(name)  # noqa: E731
    return Host(make, samples, outputs, {"image": 4, "text": 4}, clip_zoo.small_config(name), name)


def of_language(name: str, lengths: Sequence[int] = (20, 9, 14, 1, 17)) -> Host:
    def samples(number: int) -> list[Sample]:
        generator = torch.Generator().manual_seed(1)
        rows = [torch.randint(3, vlm_zoo.IMAGE, (1, length), generator=generator) for length in lengths[:number]]
        return [{"input_ids": row} for row in rows]

    return Host(lambda: vlm_zoo.make_language(name), samples, _logits_of(None), {"language": 4})


def of_joint(name: str) -> Host:
    kind, _ = vlm_zoo.type_of(name)
    images = (1, 2, 1, 0, 1)

    def samples(number: int) -> list[Sample]:
        batch = vlm_zoo.prompt(name, images[:number])
        return [vlm_zoo.sample_of(batch, row, images[:number]) for row in range(number)]

    pictures = vlm_types.FAMILIES[kind].pictures
    return Host(lambda: vlm_zoo.make_joint(name), samples, _logits_of(pictures), {"language": 4, "image": 4})


def _logits_of(pictures: vlm_types.Pictures | None) -> Callable[[nn.Module, Sequence[Sample]], list[Tensor]]:
    """Return what pads samples, joins their pictures and returns the logits of each."""

    def outputs(model: nn.Module, batch: Sequence[Sample]) -> list[Tensor]:
        inputs: dict[str, Any] = vlm_zoo.pad([sample["input_ids"][0].tolist() for sample in batch])
        mask = inputs["attention_mask"].bool()
        shown = [sample for sample in batch if pictures is not None and pictures.name in sample]
        marks = pictures.kinds if pictures is not None else None
        for name in shown[0].keys() - {"input_ids", "attention_mask", marks and marks[0]} if shown else ():
            values = torch.cat([sample[name] for sample in shown], dim=int(pictures.together))
            inputs[name] = values.to(_floating(model)) if values.is_floating_point() else values
        if marks is not None:
            argument, at_text, at_image = marks
            inputs[argument] = torch.where(inputs["input_ids"] == vlm_zoo.IMAGE, at_image, at_text)
        logits = model(**inputs, use_cache=False).logits
        return [row[real] for row, real in zip(logits, mask)]

    return outputs


def _by_arguments(
    make: Callable[[], nn.Module],
    inputs: Callable[[int], dict[str, Any]],
    read: Callable[[Any], Tensor],
    part: str,
    **fields: Any,
) -> Host:
    """Return a host from arguments for a batch, and what reads outputs."""

    def samples(number: int) -> list[Sample]:
        batch = inputs(number)
        return [vision_zoo.only(batch, place) for place in range(number)]

    def outputs(model: nn.Module, batch: Sequence[Sample]) -> list[Tensor]:
        joined = {}
        for name, value in batch[0].items():
            joined[name] = torch.cat([sample[name] for sample in batch]) if isinstance(value, Tensor) else value
            if isinstance(value, Tensor) and value.is_floating_point():
                joined[name] = joined[name].to(_floating(model))
        return list(read(model(**joined)))

    return Host(make, samples, outputs, {part: 5}, **fields)


def of_vision(name: str) -> Host:
    """Return a vision model of transformers that mmod knows by a trial."""
    inputs = lambda number: vision_zoo.make_pixels(name, number)  # noqa: E731
    return _by_arguments(lambda: vision_zoo.make_vision(name), inputs, vision_zoo.output_of, "image")


def of_own(name: str) -> Host:
    """Return a model of a user's own class."""
    inputs = lambda number: {"images": own_vits.make_own_images(number)}  # noqa: E731
    return _by_arguments(lambda: own_vits.make_own(name), inputs, lambda output: output, "image", is_own=True)


def of_conditioned(name: str) -> Host:
    """Return a model whose blocks take more than tokens."""
    return _by_arguments(
        lambda: conditioned_zoo.make_conditioned(name),
        conditioned_zoo.CONDITIONED[name].inputs,
        lambda output: (output if isinstance(output, Tensor) else output.sample).flatten(1),
        "image",
        tokens=conditioned_zoo.tokens_of(name),
        is_own=True,
    )
