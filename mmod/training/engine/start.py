"""The model that a run of the loop starts from: dense weights, methods, those of a checkpoint, and a teacher."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmod.adapters import image_facts
from mmod.data.files import check_files
from mmod.data.labels import Classes
from mmod.io.tensors import told_keys
from mmod.methods import Method, methods_of
from mmod.methods.read import is_added
from mmod.model import change_, freeze_dense_
from mmod.opening.weights import load_weights
from mmod.plain import without
from mmod.random_state import Unfilled
from mmod.training.engine.distributed import Process
from mmod.training.engine.kind import Kind, LoopKind, Streams, seed_draws
from mmod.training.engine.run_folder import check_recorded

Adapt = Callable[[nn.Module, dict[str, Tensor]], Mapping[str, Tensor]]
"""From a dense model and the dense weights of a checkpoint to weights by the model's names and in its shapes."""


def create(kind: LoopKind) -> nn.Module:
    """Create the model that a run starts from; see `mmod.training.engine.kind.create`."""
    return create_models(kind, copied=False)[0]


def create_models(kind: LoopKind, copied: bool = True) -> tuple[nn.Module, nn.Module | None]:
    """Create the model to train, on the CPU, and its frozen teacher in evaluation mode, if any.

    Args:
        copied: Return a teacher that is a copy of the dense model too. Others draw random numbers, and are created
            anyway, so that the model is the same.

    Raises:
        ValueError: The host library does not know the model, or the checkpoint does not fit it.
        FileNotFoundError: The checkpoint is missing.
    """
    config = kind.config
    checkpoint = config.model.checkpoint
    model = kind.prepare()
    changed = ", ".join(method.kind for method in methods_of(model))
    if changed and config.applied:
        raise ValueError(
            f"the model that the config names was changed by {changed}: name the dense model, or train it as it is, "
            "with `routing: null` and no methods"
        )
    # What methods added is set aside, and loaded once the methods have made its modules.
    added = {}
    if checkpoint is not None:
        added = kind.load(model, checkpoint, config.applied)
    # Copied before methods are applied: a dense teacher is the starting model itself.
    teacher = _create_teacher(kind, model, copied)
    # What methods add is what the model does not have yet.
    names = set(model.state_dict())
    # Loading has applied those that replace dense weights already.
    for method in config.applied[len(methods_of(model)) :]:
        change_(model, method)
    if added:
        expected = set(model.state_dict()) - names
        if expected != set(added):
            differing = told_keys(expected - set(added), set(added) - expected)
            raise ValueError(f"checkpoint {checkpoint!r} was routed in another way: {differing}")
        # All weights once more: added ones are checked for names and shapes like the others.
        load_weights(model, {**model.state_dict(), **added}, checkpoint)
    if config.grad_checkpointing:
        _checkpoint_gradients(model)
    if config.trained is not None:
        freeze_dense_(model)
    return model, teacher


def sketch(kind: Kind) -> nn.Module:
    """Create the model that a run starts from on the meta device, from names and sizes alone, in evaluation mode.

    A ValueError if methods do not fit it.
    """
    with torch.device("meta"), Unfilled():
        model = kind.prepare(weights=False)
        for method in kind.config.applied:
            change_(model, method)
    return model.eval()


def begin(
    kind: LoopKind, process: Process, streams: Streams | None = None
) -> tuple[nn.Module, nn.Module | None, Streams]:
    """Create the model, the teacher and the batches that a run begins with, after the checks that need neither."""
    # Before the model is made, which may take minutes.
    kind.config.check_schedule(process.world)
    if streams is None:
        check_files(kind.config.data)
    # As rank 0 in all processes, so that all draw the same new weights.
    seed_draws(kind.config.seed, 0, 0)
    model, teacher = create_models(kind)
    if streams is None:
        train = kind.data(model, process, kind.config.seed)
        return model, teacher, (train, kind.data(model, process, classes=train.classes))
    # Streams of a caller may name no classes; those of a kind compare them themselves.
    classes: Classes | None = getattr(streams[0], "classes", None)
    if classes is not None:
        check_recorded(Path(kind.config.output), classes.numbers)
    return model, teacher, streams


def load_dense(
    model: nn.Module,
    state: dict[str, Tensor],
    checkpoint: str,
    methods: Sequence[Method] | None,
    adapt: Adapt | None = None,
) -> dict[str, Tensor]:
    """Load the dense part of a checkpoint's weights into a dense model; see `LoopKind.load`.

    Methods whose weights replace dense ones in the checkpoint are applied first.
    """
    methods = methods or ()
    replacing = [number for number, method in enumerate(methods) if method.replaced_in(state)]
    # A method that replaces dense weights comes before loading: the checkpoint's names have no place without it.
    for method in methods[: max(replacing, default=-1) + 1]:
        change_(model, method)
    names = set(model.state_dict())
    added = {name: value for name, value in state.items() if name not in names and is_added(name)}
    dense: Mapping[str, Tensor] = without(state, added)
    if adapt is not None:
        dense = adapt(model, dict(dense))
    load_weights(model, dense, checkpoint)
    return added


def create_teacher(kind: LoopKind, name: str, model: nn.Module) -> nn.Module:
    """Create the dense teacher of a kind by its name: a checkpoint of the model's architecture, or another."""
    named = kind.config.named_teacher(name)
    if named is not None:
        teacher = dataclasses.replace(kind, config=named).prepare()
    else:
        teacher = kind.prepare(weights=False)
        if kind.load(teacher, name, None):
            raise ValueError(f"teacher {name!r} is routed; distill from a dense model")
    classes, expected = (image_facts(one).classes for one in (teacher, model))
    if classes != expected:
        raise ValueError(f"teacher {name!r} has {classes} classes and the model {expected}")
    return teacher


def _create_teacher(kind: LoopKind, model: nn.Module, copied: bool) -> nn.Module | None:
    config = kind.config
    name = config.teacher()
    if name == "dense" and methods_of(model):
        # The teacher "auto" is left out where the start is not dense; one that was asked for by name is refused.
        if config.distill.teacher == "dense":
            raise ValueError(
                f"checkpoint {config.model.checkpoint!r} holds no dense model that distill.teacher='dense' could be"
            )
        name = None
    if name is None or (name == "dense" and not copied):
        return None
    if name == "dense":
        teacher = copy.deepcopy(model)
    else:
        teacher = create_teacher(kind, name, model)
    return teacher.eval().requires_grad_(False)


def _checkpoint_gradients(model: Any) -> None:
    """Make a model recompute activations in the backward pass."""
    if hasattr(model, "gradient_checkpointing_enable"):
        # The reentrant form loses the gradients of a block none of whose inputs needs one.
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.set_grad_checkpointing(True)


def task_options(kind: LoopKind, teacher: nn.Module | None) -> dict[str, object]:
    """Return the arguments that all tasks share; see `mmod.training.engine.task.Task`."""
    config = kind.config
    return {
        "teacher": teacher,
        "distill_weight": config.distill.weight,
        "auxiliary": any(method.has_loss for method in config.applied),
        "precision": config.precision,
    }
