"""Routed ViT, DINOv2, and a tiny one for tests."""

from timm.models import vision_transformer

from mmod.registry.timm.entry import register_routed, routed_cfgs

DENSE = (
    "test_vit",
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "vit_large_patch16_224",
    "vit_small_patch14_dinov2",
    "vit_base_patch14_dinov2",
    "vit_large_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch14_reg4_dinov2",
    "vit_large_patch14_reg4_dinov2",
)

default_cfgs = routed_cfgs(DENSE)
register_routed(__name__, vision_transformer, DENSE)
