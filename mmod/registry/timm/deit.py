"""Routed DeiT and DeiT III."""

from timm.models import deit

from mmod.registry.timm.entry import register_routed, routed_cfgs

DENSE = (
    "deit_tiny_patch16_224",
    "deit_small_patch16_224",
    "deit_base_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "deit_small_distilled_patch16_224",
    "deit_base_distilled_patch16_224",
    "deit3_small_patch16_224",
    "deit3_base_patch16_224",
)

default_cfgs = routed_cfgs(DENSE)
register_routed(__name__, deit, DENSE)
