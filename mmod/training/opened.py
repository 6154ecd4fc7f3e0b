"""How `mmod.open_model` opens the runs of every kind: what is known of their images, and weights of unfinished runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from mmod.adapters import adapted_model
from mmod.data.config import PREPARATION, DataConfig
from mmod.data.loader import evaluation_fields
from mmod.io.yaml import merged
from mmod.opening.open import open_model
from mmod.opening.opened import Opened, Preprocessing
from mmod.opening.runs import RUN_CONFIG, read_run_config, run_classes
from mmod.opening.weights import load_weights, read_weights
from mmod.plain import from_plain
from mmod.training.engine.config import LoopConfig
from mmod.training.kinds import config_class, kind_of


def of_run(opened: Opened, run: Path) -> Opened:
    """Return the model of a run with its preprocessing and the names of its classes."""
    recorded = read_run_config(run)
    # A user's own config, in a run folder, may leave them out.
    data = recorded.get("data") or {}
    classes = run_classes(run)

    def prepare() -> object:
        # Earlier runs recorded null where they took these defaults.
        if "world_size" in recorded and data.get("crop_pct") is not None:
            return Preprocessing(evaluation_fields(from_plain(DataConfig, data)), "of the run")
        known = opened.preprocessing
        # Of a model that reads text it is a processor.
        if not isinstance(known, Preprocessing):
            return known
        given = {name: data.get(name) for name in PREPARATION}
        return dataclasses.replace(known.changed(**given), source="of the run")

    return opened._replace(prepare=prepare, classes=classes, is_run=classes is not None)


def open_checkpoint(run: Path, path: Path, args: Mapping[str, object]) -> Opened:
    """Open weights of a run that is not finished: the model of its config, its methods, then the weights.

    Args:
        args: Further arguments of the model, which change none of its weights.
    """
    fields = read_run_config(run)
    config = config_class(fields.get("kind", "image")).load(run / RUN_CONFIG)
    if args:
        config = type(config).from_dict(merged(config.as_written(), {"model": {"args": dict(args)}}))
    if not isinstance(config, LoopConfig):
        raise ValueError(
            f"a run of kind {config.kind!r} is opened by the model that it saved, and it has not saved any"
        )
    # Training may call a model through a wrapper.
    model = adapted_model(kind_of(config).prepare(weights=False))
    for method in config.applied:
        method.apply_(model)
    state = read_weights(path)
    load_weights(model, {name.removeprefix("inner."): value for name, value in state.items()}, path)
    return open_model(model)
