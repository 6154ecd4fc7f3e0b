"""Routed folders opened by transformers itself: by its Auto classes, or by every class once a program asks for that.

`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` runs a small file of the folder, which asks here
for the class to open it with. Programs that do not pass that call `open_routed_folders()` first.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

# Where a config is looked for.
_SOURCE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class _Opened:
    """What an Auto class takes for a model class from the code in a routed folder."""

    auto: Any

    @classmethod
    def register_for_auto_class(cls, auto_class: object = None) -> None:
        """Register nothing: configs of routed models are of the same classes as those of dense ones."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: object, config: Any, **options: object) -> Any:
        from mmod.pretrained import load_transformers

        made = cls._class_for(config)
        return load_transformers(pretrained_model_name_or_path, *args, model_class=made, config=config, **options)

    @classmethod
    def _from_config(cls, config: Any, **options: object) -> Any:
        from mmod.pretrained import make_transformers

        made = cls._class_for(config)
        return make_transformers(config, config.name_or_path, lambda plain: made._from_config(plain, **options))

    @classmethod
    def _class_for(cls, config: object) -> Any:
        from transformers.models.auto.auto_factory import _get_model_class

        return _get_model_class(config, cls.auto._model_mapping)


def auto_class(name: str) -> type:
    """Return the class that opens routed folders for an Auto class of transformers."""
    if not name.startswith("AutoModel"):
        raise AttributeError(name)
    import transformers

    return type(name, (_Opened,), {"auto": getattr(transformers, name)})


def open_routed_folders() -> None:
    """Let `from_pretrained` of every class of transformers open folders of routed models, with their routing.

    For programs that you cannot change, which call `from_pretrained` themselves. A second call changes nothing.
    """
    import transformers

    model: Any = transformers.PreTrainedModel
    plain = model.from_pretrained.__func__
    if plain.__module__ == __name__:  # A second call changes nothing.
        return
    signature = inspect.signature(plain)

    # The name of the module stays this one, by which a second call knows the function.
    @functools.wraps(plain, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def from_pretrained(cls: object, *args: object, **options: object) -> object:
        arguments = signature.bind_partial(cls, *args, **options).arguments
        folder: Any = arguments.get("pretrained_model_name_or_path")
        # The class that loads a routed folder comes here again to read the weights.
        if "routes_itself" in vars(cls) or not _describes_routing(folder, arguments.get("config"), options):
            return plain(cls, *args, **options)
        others = {name: value for name, value in options.items() if name != "pretrained_model_name_or_path"}
        from mmod.pretrained import load_transformers

        return load_transformers(folder, *args[1:], model_class=cls, **others)

    model.from_pretrained = classmethod(from_pretrained)


def _describes_routing(folder: object, config: Any, options: dict[str, object]) -> bool:
    """Return whether the config to be loaded describes routing."""
    from transformers import PreTrainedConfig

    if isinstance(config, PreTrainedConfig):
        return isinstance(getattr(config, "mmod", None), dict)
    if config is None:
        config = folder
    try:
        source = {name: options[name] for name in _SOURCE if name in options}
        values, _ = PreTrainedConfig.get_config_dict(config, **source)
    except (OSError, TypeError):
        # No config: loading itself says so, or reads a format that has none.
        return False
    return isinstance(values.get("mmod"), dict)
