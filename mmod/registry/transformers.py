"""Routed folders in transformers: once mmod is imported, every `from_pretrained` gives the model that was saved.

`AutoModelForCausalLM.from_pretrained(folder)` and `LlamaForCausalLM.from_pretrained(folder)` alike give the routed
model where the folder's config.json describes routing, and go on as ever everywhere else. Arguments (`dtype`,
`device_map`, `quantization_config`, ...) mean what they always do.

Transformers lets other packages change how a folder is loaded by `quantization_config` alone. That place is taken where
weights are quantized, and is empty in folders that were saved before; so the method itself is wrapped, as soon as
transformers is imported and not before.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ["watch_loads"]

_MODULE = "transformers.modeling_utils"
# Where a config is looked for.
_PLACE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def watch_loads() -> None:
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
    def from_pretrained(cls: Any, folder: Any, *args: Any, **options: Any) -> Any:
        if not _holds_routing(module, cls, folder, options):
            return plain(cls, folder, *args, **options)
        from mmod.adapters.transformers.saving import load
        from mmod.pretrained import route_again

        return load(folder, route_again, *args, model_class=cls, **options)

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _holds_routing(module: Any, cls: Any, folder: Any, options: dict[str, Any]) -> bool:
    """Return whether a folder's config describes routing that the class to be made does not bring itself."""
    if "routes_itself" in vars(cls):
        return False
    config = options.get("config")
    if not isinstance(config, module.PreTrainedConfig):
        try:
            place = {name: options[name] for name in _PLACE if name in options}
            values, _ = module.PreTrainedConfig.get_config_dict(folder if config is None else config, **place)
        except (OSError, TypeError):
            # No config: loading itself says so, or reads a format that has none.
            return False
        return isinstance(values.get("mmod"), dict)
    return isinstance(getattr(config, "mmod", None), dict)
