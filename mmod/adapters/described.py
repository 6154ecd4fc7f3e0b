"""What a saved folder may say of its model: how it is built, never where else to read or what to fetch."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["check_description"]

_KEYS = {
    "timm": ("architecture", "arguments", "pretrained_cfg"),
    "open_clip": ("architecture", "class", "config", "norms_in_fp32", "output_dict", "preprocess"),
}
# Where timm looks for published weights.
_SOURCES = {"url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source"}
_TOWERS = {"vision_cfg": "timm_model", "text_cfg": "hf_model"}


def check_description(library: str, description: Any) -> None:
    """Raise unless a description of a model names nothing outside the folder that holds it.

    Args:
        library: "timm" or "open_clip".
        description: What the library's adapter described, read from a file of unknown origin.

    Raises:
        ValueError: A key that may not stand there, or a value that is no value of the key.
    """
    if not isinstance(description, Mapping) or set(description) != set(_KEYS[library]):
        found = sorted(map(str, description)) if isinstance(description, Mapping) else repr(description)
        raise ValueError(f"a saved {library} model is described by {', '.join(_KEYS[library])}, got {found}")
    if library == "timm":
        _check_text("architecture", description["architecture"])
        _check_keys("arguments", description["arguments"], _timm_arguments())
        _check_keys("pretrained_cfg", description["pretrained_cfg"], _pretrained_fields())
    else:
        _check_clip(description["config"])


def _check_clip(config: Any) -> None:
    import open_clip

    known = (open_clip.get_model_config(name) or {} for name in open_clip.list_models())
    texts = {config.get("text_cfg", {}).get("hf_model_name") for config in known} - {None}
    models = [open_clip.CLIP, open_clip.CustomTextCLIP, open_clip.CoCa]
    _check_keys("config", config, {name for model in models for name in _parameters(model)})
    for tower, key in _TOWERS.items():
        fields = config.get(tower)
        if not isinstance(fields, Mapping):
            raise ValueError(f"a saved folder gives {tower} as a mapping, got {fields!r}")
        if fields.get(f"{key}_pretrained", False) is not False:
            raise ValueError(f"a saved folder may not fetch weights: {tower} states {key}_pretrained")
        name = fields.get(f"{key}_name")
        if name is not None and not (name in texts if key == "hf_model" else _is_timm_model(name)):
            raise ValueError(f"a saved folder may not name a model elsewhere: {tower} states {key}_name {name!r}")


def _is_timm_model(name: Any) -> bool:
    import timm

    return isinstance(name, str) and bool(timm.is_model(name))


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"a saved folder gives {name} as a text, got {value!r}")


def _check_keys(group: str, values: Any, allowed: Iterable[str]) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"a saved folder gives {group} as a mapping, got {values!r}")
    foreign = sorted(set(values) - set(allowed))
    if foreign:
        raise ValueError(f"a saved folder may not state {', '.join(foreign)} in {group}: that is no part of a model")


@functools.cache
def _timm_arguments() -> frozenset[str]:
    """Return the arguments of the classes of timm that can be routed."""
    from timm.models import beit, deit, eva, naflexvit, vision_transformer

    classes = (
        vision_transformer.VisionTransformer,
        deit.VisionTransformerDistilled,
        eva.Eva,
        beit.Beit,
        naflexvit.NaFlexVit,
    )
    fields = {field.name for field in dataclasses.fields(naflexvit.NaFlexVitCfg)}
    return frozenset(fields | {name for kind in classes for name in _parameters(kind)})


@functools.cache
def _pretrained_fields() -> frozenset[str]:
    from timm.models import PretrainedCfg

    return frozenset({field.name for field in dataclasses.fields(PretrainedCfg)} - _SOURCES)


def _parameters(kind: type) -> set[str]:
    taken = inspect.signature(kind).parameters.values()
    return {one.name for one in taken if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
