"""Routed DINOv3, which timm builds from EVA's blocks."""

from timm.models import eva

from mmod.registry.timm.entry import register_routed, routed_cfgs

DENSE = (
    "vit_small_patch16_dinov3",
    "vit_base_patch16_dinov3",
    "vit_large_patch16_dinov3",
)

default_cfgs = routed_cfgs(DENSE)
register_routed(__name__, eva, DENSE)
