"""How a dense entry of timm's registry becomes a routed one."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, get_arch_pretrained_cfgs, register_model
from torch import Tensor, nn

from mmod.config import ROUTING_FIELDS, RoutingConfig, preset
from mmod.model import route_
from mmod.registry.routers import keep_new_routers


def routed_name(dense: str) -> str:
    """Return the name of the routed entry: `_mod` after the patch size, so that the family comes first.

    Example:
        >>> routed_name("deit_small_patch16_224")
        'deit_small_patch16_mod_224'
    """
    named, matches = re.subn(r"_patch\d+", r"\g<0>_mod", dense, count=1)
    if not matches:
        # Names such as `test_vit` have no patch size.
        return f"{dense}_mod"
    return named


def routed_cfgs(dense: Iterable[str]) -> dict[str, object]:
    """Return the pretrained configs of dense entries, tags included, under the names of the routed ones."""
    routed: dict[str, Any] = {}
    for entry in dense:
        for name, cfg in get_arch_pretrained_cfgs(entry).items():
            routed[name.replace(entry, routed_name(entry), 1)] = cfg
    return dict(generate_default_cfgs(routed))


def register_routed(module: str, host: ModuleType, dense: Iterable[str]) -> None:
    """Register a routed entry for every dense one; `module` names the one that holds `default_cfgs` for timm."""
    for name in dense:
        entry = _routed_entry(getattr(host, name), routed_name(name), module)
        setattr(sys.modules[module], entry.__name__, entry)
        register_model(entry)


def create_routed(dense: Callable[..., nn.Module], name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Build a dense model, route it, and only then load weights and pick features, as timm does it.

    Args:
        pretrained: Load the dense model's published weights, or those of a routed model named by `pretrained_cfg`.
        kwargs: Fields of `RoutingConfig`, or `preset` with fields to change; all else goes to the dense entry.
    """
    options = {option: kwargs.pop(option) for option in ROUTING_FIELDS if option in kwargs}
    method = kwargs.pop("preset", None)

    def build(**arguments: object) -> nn.Module:
        model = dense(**arguments)
        model.dense_entry = dense.__name__  # type: ignore[assignment]  # what mmod.save_pretrained builds again
        if method is None:
            return route_(model, RoutingConfig.from_dict(options))
        return route_(model, preset(method, **options))

    # timm looks up the filter of a dense model by its module, which a routed one is not in.
    host_filter = getattr(sys.modules[dense.__module__], "checkpoint_filter_fn")  # noqa: B009

    def complete(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        return keep_new_routers(model, host_filter(state, model))

    # Features as timm's own entries of these families make them: of the last three blocks, by a getter.
    return build_model_with_cfg(
        build,
        name,
        pretrained,
        pretrained_filter_fn=complete,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        **kwargs,
    )


def _routed_entry(dense: Callable[..., nn.Module], name: str, module: str) -> Callable[..., nn.Module]:
    def entry(pretrained: bool = False, **kwargs: object) -> nn.Module:
        return create_routed(dense, name, pretrained, **kwargs)

    entry.__name__ = entry.__qualname__ = name
    entry.__module__ = module
    entry.__doc__ = (
        f"Make a routed {dense.__name__}; `kwargs` may hold fields of `mmod.RoutingConfig` and `preset` beside the "
        "model's own arguments."
    )
    return entry
