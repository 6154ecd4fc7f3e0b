"""Warn where transformers' own `from_pretrained` makes a dense model of a folder that holds a routed one.

It reads routing as any unknown key of config.json and leaves routers out, so nothing else would tell.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from typing import Any

_MODULE = "transformers.modeling_utils"


def watch_dense_loads() -> None:
    """Watch transformers' `from_pretrained` from when it is imported, without importing it."""
    if _MODULE in sys.modules:
        _watch(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for one module to be imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the module's own spec, with what comes after its execution."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute: Any = spec.loader.exec_module

        def then_watch(module: Any) -> None:
            execute(module)
            _watch(module)

        spec.loader.exec_module = then_watch  # type: ignore[method-assign]
        return spec


def _watch(module: Any) -> None:
    plain: Any = module.PreTrainedModel.from_pretrained.__func__

    @functools.wraps(plain)
    def from_pretrained(cls: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = plain(cls, folder, *args, **kwargs)
        # With output_loading_info=True it comes with a report.
        _warn_if_dense(loaded[0] if isinstance(loaded, tuple) else loaded, folder)
        return loaded

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _warn_if_dense(model: Any, folder: Any) -> None:
    from mmod.model import is_routed

    if isinstance(getattr(model.config, "mmod", None), dict) and not is_routed(model):
        warnings.warn(
            f"{str(folder)!r} holds a routed model, and from_pretrained has made a dense one of it, without its "
            "routers: load it with mmod.load_pretrained",
            stacklevel=3,
        )
