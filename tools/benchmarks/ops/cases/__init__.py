"""Cases: the ops as they are timed. The modules of this folder register them."""

import importlib
import pkgutil

from tools.benchmarks.ops.case import CASES, OpCase, OpSize, make_case

__all__ = ["CASES", "OpCase", "OpSize", "make_case"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
