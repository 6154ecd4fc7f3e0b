"""Routed models in timm's registry: importing this package adds them, `timm.create_model` then makes them."""

# The modules are named like timm's, which files models, and whose tests pick them, by the last part of the name.

from mmod.registry.timm import deit, eva, vision_transformer
from mmod.registry.timm.entry import routed_name

__all__ = ["ROUTED_MODELS", "routed_name"]

ROUTED_MODELS = tuple(map(routed_name, (*deit.DENSE, *eva.DENSE, *vision_transformer.DENSE)))
