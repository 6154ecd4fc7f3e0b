"""Small vision models of transformers, none of which mmod knows by name, with weights that hide nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import mmod
from tests.kit.made import made_once

SIDE, PATCH, DIM = 64, 8, 32
_SMALL: dict[str, Any] = {
    "hidden_size": DIM,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": SIDE,
    "patch_size": PATCH,
}
_PACKED = {name: value for name, value in _SMALL.items() if name != "image_size"}
_VIDEO = {"image_size": 32, "num_frames": 4}
_VJEPA = {
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "mlp_ratio": 2,
    "crop_size": 32,
    "patch_size": PATCH,
    "frames_per_clip": 4,
    "pred_hidden_size": 24,
    "pred_num_attention_heads": 2,
    "pred_num_hidden_layers": 2,
    "num_pooler_layers": 1,
}


def _make(name: str, config: str, **changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        values = {**_SMALL, **changes}
        return getattr(transformers, name)(getattr(transformers, config)(**values))

    return make


def _make_dpt() -> Any:
    backbone = transformers.Dinov2Config(**_SMALL, out_indices=[2, 3, 4, 5], reshape_hidden_states=False)
    sizes = {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "head_in_index": -1}
    return transformers.DPTForDepthEstimation(transformers.DPTConfig(backbone_config=backbone, **sizes))


VISION_ZOO: dict[str, Callable[[], Any]] = {
    "vit": _make("ViTForImageClassification", "ViTConfig", num_labels=7),
    "deit": _make("DeiTForImageClassification", "DeiTConfig", num_labels=7),
    "dinov2": _make("Dinov2ForImageClassification", "Dinov2Config", num_labels=7),
    "dinov2 with registers": _make("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", num_register_tokens=2),
    "dinov2 backbone": _make("Dinov2Backbone", "Dinov2Config", out_indices=[2, 5]),
    "dinov3": _make("DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=2),
    "msn": _make("ViTMSNModel", "ViTMSNConfig"),
    "ijepa": _make("IJepaModel", "IJepaConfig"),
    "aimv2": _make("Aimv2VisionModel", "Aimv2VisionConfig"),
    "clip": _make("CLIPVisionModel", "CLIPVisionConfig"),
    "siglip": _make("SiglipVisionModel", "SiglipVisionConfig"),
    "siglip2": lambda: transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**_PACKED, num_patches=64)),
    "metaclip2": _make("MetaClip2VisionModel", "MetaClip2VisionConfig"),
    "mlcd": _make("MLCDVisionModel", "MLCDVisionConfig"),
    "videomae": _make("VideoMAEForVideoClassification", "VideoMAEConfig", **_VIDEO, tubelet_size=2, num_labels=7),
    "vjepa2": lambda: transformers.VJEPA2Model(transformers.VJEPA2Config(**_VJEPA)),
    "mae": _make("ViTMAEModel", "ViTMAEConfig", decoder_num_attention_heads=2, decoder_hidden_size=16),
    "yolos": _make("YolosModel", "YolosConfig", image_size=[SIDE, SIDE], num_detection_tokens=5),
    "dpt on dinov2": _make_dpt,
    "vivit": _make("VivitModel", "VivitConfig", **_VIDEO, tubelet_size=[2, 8, 8]),
}


@made_once
def make_vision(name: str, seed: int = 0) -> Any:
    """Return a small evaluated model whose every parameter matters: no layer scale near zero, no zero bias."""
    torch.manual_seed(seed)
    model = VISION_ZOO[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            if parameter.ndim == 1:
                parameter.add_(0.2)
    return model.eval()


def make_pixels(name: str, batch: int, seed: int = 1) -> dict[str, Any]:
    """Return the arguments of a model for a batch of images or videos."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator)

    if name == "siglip2":
        shapes = torch.tensor([[8, 8]] * batch)
        mask = torch.ones(batch, 64, dtype=torch.long)
        return {"pixel_values": draw(64, 3 * PATCH**2), "spatial_shapes": shapes, "pixel_attention_mask": mask}
    if name in ("videomae", "vivit"):
        return {"pixel_values": draw(4, 3, 32, 32)}
    if name == "vjepa2":
        return {"pixel_values_videos": draw(4, 3, 32, 32), "skip_predictor": True}
    if name == "mae":
        noise = torch.rand(batch, 64, generator=generator)
        return {"pixel_values": draw(3, SIDE, SIDE), "noise": noise}
    return {"pixel_values": draw(3, SIDE, SIDE)}


def only(inputs: dict[str, Any], image: int) -> dict[str, Any]:
    """Return the arguments for one image of a batch."""
    return {key: value[image : image + 1] if isinstance(value, Tensor) else value for key, value in inputs.items()}


def output_of(outputs: Any) -> Tensor:
    """Return what a model says of its images, one row for each."""
    for name in ("logits", "last_hidden_state", "predicted_depth", "feature_maps"):
        value = outputs.get(name)
        if isinstance(value, tuple):
            return torch.cat([features.flatten(1) for features in value], dim=1)
        if value is not None:
            return value.flatten(1)
    raise AssertionError(f"no output in {list(outputs)}")


def table() -> str:
    """Return the table of `docs/your_model.md`: what a trial showed of each model."""
    rows = ["| model | tokens that are no patches | halves | different numbers of tokens |", "|---|---|---|---|"]
    for name in VISION_ZOO:
        stack = next(iter(mmod.adapters.find_stacks(make_vision(name)).values()))
        proof = stack.proof
        special = f"{proof.prefix}" + (f" in front, {proof.suffix} behind" if proof.suffix else "")
        packs = proof.fused and not proof.rope_prefix and not proof.index_argument
        rows.append(f"| {name} | {special} | {'yes' if proof.halves else 'no'} | {'packed' if packs else 'padded'} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
