"""Scores: one raw fp32 number per token. Every module of this folder registers its own.

Axes: B images, N tokens, D channels.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
