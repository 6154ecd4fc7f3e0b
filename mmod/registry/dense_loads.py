"""Warn where a class of transformers makes a dense model of a folder that holds a routed one.

A plain `LlamaForCausalLM.from_pretrained(folder)` reads routing as any unknown key of config.json and leaves routers
out, so nothing else would tell. No registry stands in the way of such a call, which is why its method is wrapped.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

_MODULE = "transformers.modeling_utils"


def watch_dense_loads() -> None:
    """Wrap transformers' `from_pretrained` once it is imported, without importing it."""
    if _MODULE in sys.modules:
        _watch(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _watch(module, execute)  # type: ignore[method-assign]
        return spec


def _watch(module: Any, execute: Any = None) -> None:
    if execute is not None:
        execute(module)
    plain: Any = module.PreTrainedModel.from_pretrained.__func__

    @functools.wraps(plain)
    def from_pretrained(cls: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = plain(cls, folder, *args, **kwargs)
        _warn_if_dense(loaded[0] if kwargs.get("output_loading_info") else loaded, folder)
        return loaded

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _warn_if_dense(model: Any, folder: Any) -> None:
    from mmod.model import is_routed

    if isinstance(getattr(model.config, "mmod", None), dict) and not is_routed(model):
        warnings.warn(
            f"{str(folder)!r} holds a routed model, and from_pretrained has made a dense one of it, without its "
            "routers: load it with mmod.load_pretrained, or import mmod.registry.transformers and use an Auto class",
            stacklevel=3,
        )
