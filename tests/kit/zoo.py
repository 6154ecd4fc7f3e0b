"""Small versions of every kind of timm model that can be routed, with weights that hide nothing."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn

from tests.kit.made import made_once

_SMALL = {"depth": 4, "embed_dim": 64, "num_heads": 4, "num_classes": 7}
_BY_64 = {**_SMALL, "img_size": 64}
_BY_56 = {**_SMALL, "img_size": 56}

ZOO: dict[str, dict[str, object]] = {
    "test_vit": {"img_size": 96, "num_classes": 7},
    "test_vit2": {"img_size": 96, "num_classes": 7, "depth": 4},
    "test_vit3": {"img_size": 96, "num_classes": 7, "depth": 4},
    "vit_tiny_patch16_224": _BY_64,
    "vit_base_patch32_clip_224": {**_SMALL, "img_size": 128},
    "vit_base_patch16_siglip_224": _BY_64,
    "vit_base_patch16_siglip_gap_224": _BY_64,
    "vit_medium_patch16_gap_240": _BY_64,
    "vit_little_patch16_reg4_gap_256": _BY_64,
    "vit_so150m_patch16_reg4_gap_256": _BY_64,
    "vit_intern300m_patch14_448": _BY_56,
    "vit_giant_patch14_224": _BY_56,
    # The hybrid with the smallest stem: what makes the tokens is the same module in the others.
    "vit_tiny_r_s16_p8_224": _BY_64,
    "flexivit_small": _BY_64,
    "vit_small_patch14_dinov2": _BY_56,
    "vit_small_patch14_reg4_dinov2": _BY_56,
    "aimv2_large_patch14_224": _BY_56,
    "vit_base_patch16_rpn_224": _BY_64,
    "vit_small_patch16_18x2_224": _BY_64,
    "vit_base_patch16_xp_224": _BY_64,
    "vit_dlittle_patch16_reg1_gap_256": _BY_64,
    "deit_tiny_patch16_224": _BY_64,
    "deit_tiny_distilled_patch16_224": _BY_64,
    "deit3_small_patch16_224": _BY_64,
    "eva_giant_patch14_224": _BY_56,
    "eva02_tiny_patch14_224": _BY_56,
    "vit_small_patch16_dinov3": _BY_64,
    "vit_small_plus_patch16_dinov3": _BY_64,
    "vit_pe_core_tiny_patch16_384": _BY_64,
    "vit_small_patch16_rope_224": _BY_64,
    "vit_small_patch16_rope_mixed_224": _BY_64,
    "vit_mediumd_patch16_rope_reg1_gap_256": _BY_64,
    "naflexvit_base_patch16_gap": _SMALL,
    "naflexvit_base_patch16_par_gap": _SMALL,
    "beit_base_patch16_224": {**_BY_64, "use_rel_pos_bias": False, "use_shared_rel_pos_bias": True},
}
# Two residual branches with nothing behind them.
PLAIN = ["test_vit", "vit_tiny_patch16_224", "vit_little_patch16_reg4_gap_256", "eva02_tiny_patch14_224"]
PLAIN += ["beit_base_patch16_224", "deit3_small_patch16_224", "vit_dlittle_patch16_reg1_gap_256"]


@made_once
def make_model(name: str, seed: int = 0, **changes: object) -> nn.Module:
    """Return a small evaluated model whose every parameter matters: no LayerScale near zero, no zero bias."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **{**ZOO[name], **changes})
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("gamma") or "gamma_" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def make_images(name: str, batch: int, seed: int = 1) -> Tensor:
    size = ZOO[name].get("img_size", 64)
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def perturb_(model: Any, parts: tuple[str, ...], std: float = 0.3) -> Any:
    """Add the same noise to all parameters with one of these parts in their names, and return the model."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if any(part in name for part in parts):
            parameter.data += std * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model
