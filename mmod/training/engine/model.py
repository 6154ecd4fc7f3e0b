"""From starting weights to the model that trains: dense weights, teacher, routing, routers, in this order."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from mmod import route_
from mmod.methods import methods_of
from mmod.training.engine.config import LoopConfig

__all__ = ["Load", "classifier_names", "converted", "load_weights", "prepare_models"]

Load = Callable[[Any, str], dict[str, Tensor]]
"""Loads the dense part of a checkpoint into a model and returns what else the checkpoint holds."""


def prepare_models(
    config: LoopConfig, model: Any, load: Load, create_teacher: Callable[[str], nn.Module]
) -> tuple[nn.Module, nn.Module | None]:
    """Load, route and copy a model as a config says.

    A dense checkpoint is loaded before routing, so the dense teacher is what the model was when routing began. The
    routers of a routed checkpoint are loaded after routing. A checkpoint in which a method's weights replace dense ones
    has no dense teacher.

    Args:
        config: The run's config.
        model: The dense model, changed in place.
        load: Reads the config's checkpoint.
        create_teacher: From the name of a teacher other than "dense" to its model.

    Returns:
        The model, and the frozen teacher in eval mode or None.

    Raises:
        ValueError: If the checkpoint does not fit the model.
        FileNotFoundError: If the checkpoint is not there.
    """
    dense, checkpoint, name = set(model.state_dict()), config.model.checkpoint, config.teacher()
    routers = {} if checkpoint is None else load(model, checkpoint)
    if name == "dense" and methods_of(model):
        if config.distill.teacher == "dense":
            raise ValueError(f"checkpoint {checkpoint!r} holds no dense model that distill.teacher='dense' could be")
        name = None
    teacher = copy.deepcopy(model) if name == "dense" else None if name is None else create_teacher(name)
    if teacher is not None:
        teacher.eval().requires_grad_(False)
    routing, method = config.routing_configs(), config.method_config()
    if method is not None and not methods_of(model):
        method.apply_(model)
    if routing:
        route_(model, **routing)
    if routers:
        own = set(model.state_dict()) - dense
        if own != set(routers):
            raise ValueError(
                f"checkpoint {checkpoint!r} was routed in another way: it lacks {_some(own - set(routers))} and has "
                f"{_some(set(routers) - own)} that the model does not know"
            )
        load_weights(model, {**model.state_dict(), **routers}, checkpoint)
    if config.grad_checkpointing:
        model.set_grad_checkpointing(True)
    return model, teacher


def load_weights(model: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Load a state dict strictly, with messages that say what does not fit.

    Args:
        model: The model to fill.
        state: Names to tensors.
        source: Where the state came from, for the messages.

    Raises:
        ValueError: If names or shapes differ; a different number of classes is named as such.
    """
    own = model.state_dict()
    missing, unknown = set(own) - set(state), set(state) - set(own)
    if missing or unknown:
        raise ValueError(
            f"checkpoint {str(source)!r} does not fit the model: "
            f"it lacks {_some(missing)} and has {_some(unknown)} that the model does not know"
        )
    for name, value in state.items():
        if value.shape != own[name].shape:
            classes = getattr(model, "num_classes", None)
            head = value.shape[:1] != own[name].shape[:1] and own[name].shape[:1] == (classes,)
            what = f"it has {value.shape[0]} classes, the model {classes}: " if head else ""
            raise ValueError(
                f"checkpoint {str(source)!r} does not fit the model: {what}{name} has shape "
                f"{tuple(value.shape)}, the model's is {tuple(own[name].shape)}"
            )
    model.load_state_dict(state)


def converted(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return weights in the form of a timm model, converted as timm does published ones where they are of another.

    Args:
        state: Names to tensors: of another image or patch size, or of the names that a source uses.
        model: The model.
    """
    own = {name: value.shape for name, value in model.state_dict().items()}
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None or own == {name: value.shape for name, value in state.items()}:
        return dict(state)
    found: dict[str, Tensor] = convert(dict(state), model)
    return found


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """Return what the names of a timm model's classifier begin with.

    Example:
        >>> import timm
        >>> classifier_names(timm.create_model("test_vit"))
        ('head.',)
    """
    named: str | tuple[str, ...] = getattr(model, "pretrained_cfg", {}).get("classifier") or "head"
    return tuple(f"{name}." for name in ([named] if isinstance(named, str) else named))


def _some(names: Iterable[str]) -> str:
    """Name the first few keys of a state dict and how many there are."""
    found = sorted(names)
    if not found:
        return "no key"
    return f"{len(found)} keys ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})"
