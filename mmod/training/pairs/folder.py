"""Image-text models in folders of transformers, called as models of open_clip are.

Axes: B images or captions, C channels, L token ids, D features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.nn.functional as F
from open_clip.transform import PreprocessCfg
from torch import Tensor, nn

from mmod.adapters import Wrapper
from mmod.blocks import host_class
from mmod.opening.language import open_processor
from mmod.opening.opened import Opened

# Their text towers need no mask of padding: causal ones read the end of a caption, SigLIP's was trained with padding.
MODELS = ("clip", "metaclip_2", "siglip")
_CHANNELS = "RGB"


class TwoTowers(Wrapper):
    """A CLIP or SigLIP of transformers with the interface of a model of open_clip.

    Args:
        inner: The model.
        preprocess_cfg: How its images are prepared: fields of open_clip's `PreprocessCfg`.
    """

    def __init__(self, inner: nn.Module, preprocess_cfg: dict[str, object]) -> None:
        super().__init__(inner)
        self.preprocess_cfg = preprocess_cfg

    @property
    def visual(self) -> TwoTowers:
        """What says how images are prepared."""
        return self

    @property
    def logit_scale(self) -> nn.Parameter:
        """Logarithm of the scale of similarities."""
        return self.inner.get_parameter("logit_scale")

    @property
    def logit_bias(self) -> nn.Parameter | None:
        """Bias of similarities; None for a model trained without one."""
        return getattr(self.inner, "logit_bias", None)

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Return the features (B, D) of images (B, C, H, W)."""
        return _features(self.inner.get_image_features(pixel_values=image), normalize)

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Return the features (B, D) of captions (B, L)."""
        return _features(self.inner.get_text_features(input_ids=text), normalize)

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> dict[str, Tensor]:
        """Return the normalised features of images and captions, and the scale and bias of their similarities."""
        # SigLIP has them as vectors of one number.
        output = {"logit_scale": self.logit_scale.exp().reshape(())}
        if self.logit_bias is not None:
            output["logit_bias"] = self.logit_bias.reshape(())
        if image is not None:
            output["image_features"] = self.encode_image(image, normalize=True)
        if text is not None:
            output["text_features"] = self.encode_text(text, normalize=True)
        return output

    def lock_image_tower(self) -> None:
        """Freeze the image tower."""
        for name, parameter in self.inner.named_parameters():
            if name.startswith(("vision_model.", "visual_projection.")):
                parameter.requires_grad_(False)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute activations in the backward pass, or no more."""
        if enable:
            self.inner.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.inner.gradient_checkpointing_disable()


def _features(output: Any, normalize: bool) -> Tensor:
    features: Tensor = output.pooler_output
    if normalize:
        features = F.normalize(features, dim=-1)
    return features


def wrap(opened: Opened, name: str) -> TwoTowers:
    """Return the model of a folder of transformers with the interface of open_clip's, in training mode.

    Args:
        name: The folder.
    """
    inner: Any = opened.model
    kind = inner.config.model_type
    if kind not in MODELS or not hasattr(inner, "get_text_features"):
        raise ValueError(
            f"{name!r} holds a {host_class(inner).__name__} of the type {kind!r}; models of image-text pairs in "
            f"folders of transformers read both, and are of the types {', '.join(MODELS)}"
        )
    return TwoTowers(inner, _preprocessing(opened.preprocessing.fields, name)).train()


def _preprocessing(fields: Mapping[str, Any], name: str) -> dict[str, object]:
    """Return arguments of timm's `create_transform` as fields of open_clip's `PreprocessCfg`."""
    if fields["crop_pct"] != 1 or fields["input_size"][0] != len(_CHANNELS):
        raise ValueError(
            f"the processor in {name!r} must make {_CHANNELS} images and cut off no more of them than makes them "
            f"square, got {fields}"
        )
    resize_mode: Literal["squash", "shortest"] = "shortest"
    if fields.get("crop_mode") == "squash":
        resize_mode = "squash"
    preprocessing = PreprocessCfg(
        size=fields["input_size"][1:],
        mean=fields["mean"],
        std=fields["std"],
        interpolation=fields["interpolation"],
        resize_mode=resize_mode,
    )
    return dataclasses.asdict(preprocessing)


@dataclass(frozen=True)
class Captions:
    """Calls a tokeniser of transformers as one of open_clip is called.

    Args:
        tokenizer: The tokeniser.
        length: Number of ids that captions are padded or cut to.
    """

    tokenizer: Any
    length: int

    def __call__(self, texts: str | Sequence[str]) -> Tensor:
        """Return token ids (B, L)."""
        listed = [texts] if isinstance(texts, str) else list(texts)
        encoded = self.tokenizer(
            listed, padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        )
        return encoded["input_ids"]


def save_model(model: TwoTowers, source: str, target: Path) -> None:
    """Write a folder that transformers and `mmod.open_model` read.

    Args:
        source: The folder of the starting model, whose processor and tokeniser are written too.
    """
    model.inner.save_pretrained(target)
    open_processor(source).save_pretrained(target)
