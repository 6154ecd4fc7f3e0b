"""What opening a model returns: the model, how its inputs are prepared, and what is known of its classes and parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from mmod.adapters import find_parts
from mmod.plain import without_none


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How a model's images are prepared.

    Args:
        fields: Arguments of timm's `create_transform`, or with `is_clip` fields of open_clip's `PreprocessCfg`.
        source: Where they are from, as in "of the run".
    """

    fields: Mapping[str, Any]
    source: str
    is_clip: bool = False

    def changed(self, **changes: object) -> Preprocessing:
        """Return it with other fields; None changes nothing."""
        given = without_none(changes)
        return dataclasses.replace(self, fields={**self.fields, **given})

    @property
    def mode(self) -> str:
        """The mode of Pillow that images are read in."""
        if not self.is_clip and self.fields["input_size"][0] == 1:
            return "L"
        return "RGB"

    def transform(self) -> Callable[[Any], Tensor]:
        """Return the transform of an image to a tensor (C, H, W)."""
        if not self.is_clip:
            from timm.data import create_transform

            return create_transform(**self.fields, is_training=False)
        from open_clip.transform import PreprocessCfg, image_transform_v2

        return image_transform_v2(PreprocessCfg(**self.fields), is_train=False)

    def __str__(self) -> str:
        if self.is_clip:
            size = self.fields["size"]
        else:
            size = self.fields["input_size"][1:]
        if isinstance(size, int):
            size = (size, size)
        height, width = size
        parts = [f"{height} x {width} px"]
        interpolation = self.fields.get("interpolation")
        if interpolation:
            parts.append(interpolation)
        if "crop_pct" in self.fields:
            parts.append(f"crop_pct {self.fields['crop_pct']:g}")
        for name in ("mean", "std"):
            values = ", ".join(f"{value:.4g}" for value in self.fields[name])
            parts.append(f"{name} ({values})")
        return f"Preprocessing {self.source}: {', '.join(parts)}."


NAME_A_FILE = "name a file of weights as the checkpoint"
"""What to do where published weights are not available."""


class Options(NamedTuple):
    """What a caller says of a model beside its name, see `mmod.open_model`."""

    checkpoint: str | Path | None = None
    pretrained: bool = True
    image_size: int | None = None
    args: Mapping[str, Any] = MappingProxyType({})
    dense: bool = False
    advice: str = NAME_A_FILE

    def refuse(self, subject: str, *names: str) -> None:
        """Raise a ValueError if one of the named options is given for a model with its own weights and image size."""
        given = [name for name in names if getattr(self, name) != self._field_defaults[name]]
        if given:
            advice = "set pretrained to true" if given[0] == "pretrained" else f"leave out {given[0]}"
            raise ValueError(f"{subject} has its own weights and size of images: {advice}")


class Opened(NamedTuple):
    """A model with what is known of it: how its images are prepared, its classes, and where its weights come from.

    Attributes:
        model: The model, in evaluation mode.
        sentence: What was opened: the model, its weights, and the methods that changed it.
        prepare: Returns `preprocessing`; processors of transformers are read when they are needed. None where the model
            does not say how its inputs are prepared.
        classes: Index of each class by name; None where the names are not known.
        is_run: Whether the classes are those of a training run: images of other class names then have no labels.
    """

    model: nn.Module
    sentence: str
    prepare: Callable[[], object] | None = None
    classes: Mapping[str, int] | None = None
    is_run: bool = False

    @property
    def preprocessing(self) -> Any:
        """The `Preprocessing` of images, or the processor of a model that reads text; a ValueError if unknown."""
        if self.prepare is None:
            raise ValueError(f"the {type(self.model).__name__} does not say how its inputs are prepared")
        return self.prepare()

    def prepared(self, source: str) -> Opened:
        """Return a copy whose preprocessing names another source, such as "of the run"."""
        return self._replace(prepare=lambda: dataclasses.replace(self.preprocessing, source=source))

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that can be changed: "image", "text", "language"."""
        return tuple(find_parts(self.model))
