"""Small versions of open_clip's architectures, with weights that hide nothing and captions of every length."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import open_clip
import timm
import torch
from open_clip import coca_model
from open_clip import model as clip_models
from torch import Tensor, nn

from tests.kit.made import made_once

CONTEXT, VOCABULARY = 12, 64
# Ids of words stay clear of those that mean start, end and padding in any tokenizer.
FIRST_WORD, START, END = 5, VOCABULARY - 2, VOCABULARY - 1

# Both towers can be routed.
ZOO = (
    "ViT-B-32",
    "ViT-B-32-quickgelu",
    "ViT-M-16-alt",
    "ViT-bigG-14",
    "ViT-H-14-worldwide",
    "ViT-L-14-CLIPA",
    "ViT-B-16-SigLIP",
    "ViT-SO400M-14-SigLIP2",
    "ViT-B-16-SigLIP-i18n-256",
    "EVA01-g-14",
    "EVA02-B-16",
    "PE-Core-T-16-384",
    "MobileCLIP2-L-14",
    "vit_medium_patch16_gap_256",
    "coca_ViT-B-32",
    "coca_base",
    "custom-blocks",
)
# Only the text tower can.
TEXT_ONLY = ("RN50", "convnext_base", "MobileCLIP-S1")

_CUSTOM = {"qk_norm": True, "scale_heads": True, "scale_attn_inner": True, "scale_attn": True, "scale_fc": True}
_TRUNK = {"img_size": 56, "embed_dim": 48, "depth": 4, "num_heads": 4}
_TRUNKS = {"convnext_base": {"depths": (1, 1, 1, 1), "dims": (8, 16, 32, 48)}}


def small_config(name: str) -> dict[str, Any]:
    """Return an architecture's config with few, narrow blocks, short captions and small images."""
    config: dict[str, Any] = open_clip.get_model_config("ViT-B-32" if name == "custom-blocks" else name)
    vision, text = config["vision_cfg"], config["text_cfg"]
    config["embed_dim"] = 48
    text |= {"width": 48, "heads": 4, "layers": 4, "context_length": CONTEXT, "vocab_size": VOCABULARY}
    if "timm_model_name" not in vision:
        layers = [1, 1, 1, 1] if isinstance(vision["layers"], list) else 4
        vision |= {"width": 48, "head_width": 12, "layers": layers, "image_size": 64}
        if "patch_size" in vision:
            vision["patch_size"] = 16
    if vision.get("attentional_pool"):
        vision |= {"attn_pooler_queries": 8, "attn_pooler_heads": 4}
    if "multimodal_cfg" in config:
        config["multimodal_cfg"] |= {"width": 48, "heads": 4, "layers": 2, "context_length": CONTEXT}
    if name == "custom-blocks":
        vision |= _CUSTOM
        text |= _CUSTOM
    return config


def model_class(config: dict[str, Any]) -> type[nn.Module]:
    if "multimodal_cfg" in config:
        return coca_model.CoCa
    return clip_models.CustomTextCLIP if config.get("custom_text") else clip_models.CLIP


@contextlib.contextmanager
def small_trunks(name: str) -> Iterator[None]:
    """Shrink the timm trunks that open_clip builds, whose size its configs cannot set."""
    original = timm.create_model
    if name in ZOO or name in _TRUNKS:
        timm.create_model = functools.partial(original, **_TRUNKS.get(name, _TRUNK))
    try:
        yield
    finally:
        timm.create_model = original


@made_once
def make_clip(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Return a small evaluated model whose every parameter matters."""
    torch.manual_seed(seed)
    config = small_config(name)
    kind = model_class(config)
    config.pop("custom_text", None)
    with small_trunks(name):
        model = kind(**copy.deepcopy(config), **changes)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name == "text_decoder.text_projection":
                # open_clip leaves whatever was in memory there.
                parameter.normal_(std=0.1)
            elif parameter_name.endswith("gamma"):
                parameter.uniform_(0.5, 1.5)
            elif parameter_name not in ("logit_scale", "logit_bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def make_images(name: str, batch: int = 3, seed: int = 1) -> Tensor:
    side = 56 if "timm_model_name" in small_config(name)["vision_cfg"] else 64
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(seed))


def make_captions(name: str, lengths: tuple[int, ...] = (3, 7, CONTEXT), seed: int = 2) -> Tensor:
    """Return captions of so many tokens, start and end included, padded by zeros."""
    generator = torch.Generator().manual_seed(seed)
    text = small_config(name)["text_cfg"]
    end = text.get("eos_id", 2) if text.get("pool_type") == "eos" else END
    captions = torch.zeros(len(lengths), CONTEXT, dtype=torch.int64)
    for row, length in zip(captions, lengths):
        row[:length] = torch.randint(FIRST_WORD, START, (length,), generator=generator)
        row[0], row[length - 1] = START, end
    return captions


def embed(model: nn.Module, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalised embeddings of both towers."""
    return model.encode_image(images, normalize=True), model.encode_text(captions, normalize=True)
