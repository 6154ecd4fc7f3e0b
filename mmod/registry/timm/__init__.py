"""Routed models in timm's registry: importing this package adds them, `timm.create_model` then makes them."""

# The modules are named like timm's, which files models, and whose tests pick them, by the last part of the name.

from mmod.registry.timm import deit, eva, vision_transformer
from mmod.registry.timm.entry import routed_name

__all__ = ["ROUTED_MODELS", "routed_name"]

ROUTED_MODELS = tuple(routed_name(name) for module in (deit, eva, vision_transformer) for name in module.DENSE)
