"""Models that methods can change, and methods that change them."""

from __future__ import annotations

from mmod.methods import Exit, Merge, Method, Prune

# Class token or none, registers, mean, attention and distilled pooling, rotary positions, norms behind.
MODELS = [
    "test_vit",
    "vit_base_patch16_siglip_224",
    "vit_medium_patch16_gap_240",
    "vit_little_patch16_reg4_gap_256",
    "vit_intern300m_patch14_448",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch16_rpn_224",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "eva02_tiny_patch14_224",
    "vit_small_patch16_dinov3",
    "vit_small_patch16_rope_mixed_224",
    "naflexvit_base_patch16_gap",
]
# A method that leaves fewer tokens, and the same with nothing to do.
REDUCING: list[tuple[Method, Method]] = [
    (Prune(0.6, (0, 2), fuse=True), Prune(1.0, (0, 2), fuse=True)),
    (Prune(0.6, (1, 3), fuse=False, by="mean"), Prune(1.0, (1, 3), fuse=False, by="mean")),
    (Merge(3), Merge(0)),
    (Exit(0.2, (0, 2)), Exit(2.0, (0, 2))),
]
