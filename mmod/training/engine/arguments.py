"""Command lines that name a run: a config of any kind, a run folder or weights in one, or the folder of a model."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmod.config.parse import named_kind, parse_config
from mmod.opening.runs import RUN_CONFIG, find_run, is_described
from mmod.training.engine.config import RunConfig
from mmod.values import one_of


def parse_run(arguments: Sequence[str], configs: Mapping[str, type[RunConfig]]) -> Any:
    """Return the config of a command line as `RunConfig.parse` does, of the kind that it names.

    In place of the config, a run folder stands for its final model, and its `model`, `last` or a checkpoint, or a file
    in these, for the weights there; see `finished_run`. The folder of a saved model stands for that model, and options
    name its data.

    Args:
        configs: The class of the config by kind.
    """
    if arguments and find_run(arguments[0]) is None and is_described(arguments[0]):
        folder, *options = arguments
        if (Path(folder) / "mmod.json").is_file():
            # Imports torch, which `--help` of a config leaves alone.
            from mmod.pretrained import refuse_own

            refuse_own(folder)
        kind = named_kind(options) or "image"
        one_of("kind", kind, tuple(configs))
        model = configs[kind].model_in(folder)
        return configs[kind].parse(options, {"output": folder, "model": model})
    run = find_run(arguments[0]) if arguments else None
    if run is None:
        return _parse_config(arguments, configs)
    file = str(run / RUN_CONFIG)
    named = named_kind([file, *arguments[1:]])
    # The run's own config first, whatever the words change of it besides its kind.
    config = _parse_config([file] if named is None else [file, "--kind", named], configs)
    finished = finished_run(config, run, arguments[0])
    # The words once more, now on top of what the run's final model is.
    return type(finished).parse(arguments[1:], finished.to_dict())


def _parse_config(arguments: Sequence[str], configs: Mapping[str, type[RunConfig]]) -> RunConfig:
    # What cannot be read is refused here, and once.
    named = named_kind(arguments)
    try:
        return parse_config(arguments, configs)
    except SystemExit as end:
        # The exit already printed the error; this adds what may explain it.
        if end.code and named is None:
            first, *_ = configs
            print(f"without a key `kind`, a config is read as {first}; valid are {', '.join(configs)}", file=sys.stderr)
        raise


def finished_run(config: RunConfig, run: Path, weights: str | Path) -> RunConfig:
    """Return the config in a run folder, changed to start from the weights there."""
    return dataclasses.replace(config, output=str(run)).finished(str(weights))
