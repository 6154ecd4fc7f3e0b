"""Command line of the benchmarks: `models`, `ops`, `generation`, `drafts`, a `suite` of them, or `gpu`.

`models --batch_sizes "[1, 8]" --execution "[eager]" --threads 2` times dense, routed and freely routed models side by
side, `ops` each op on each backend beside its bound and other implementations, `generation` prefill and decoding of a
routed LLaVA beside the dense one, `drafts --run runs/text/elastic` a language model that verifies drafts of its own,
and `suite --config configs/benchmark/h200.yaml` runs several of the first three and says which thresholds are met.
`gpu --minutes 9` is the first half hour on a GPU, in calls of a few minutes: tests, speed, memory and training.
`--config FILE` reads the same keys from YAML and `MODE --help` lists them. The table goes to stdout and, with its
environment, to `benchmark.md` and `benchmark.json` in the folder `out`; the same command goes on where it was killed. A
part of a suite that fails is named in the report, the others run, and the command ends with an error.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import yaml
from jsonargparse import ArgumentParser

import mmod.benchmarks
from mmod.io.yaml import STRICT, stack_configs
from mmod.training.engine.parse import make_config


class Mode(NamedTuple):
    """A benchmark: the names of its config and its function in `mmod.benchmarks`, and what it does."""

    config: str
    function: str
    purpose: str


MODES = {
    "models": Mode("BenchmarkConfig", "benchmark", "Time dense, routed and freely routed models side by side."),
    "ops": Mode(
        "OpBenchmarkConfig", "benchmark_ops", "Time each op on each backend beside its bound and its baselines."
    ),
    "generation": Mode(
        "GenerationConfig", "benchmark_generation", "Time prefill and decoding of vision-language models."
    ),
    "drafts": Mode("DraftConfig", "benchmark_drafts", "Time self-speculative decoding of a trained language model."),
    "suite": Mode("SuiteConfig", "benchmark_suite", "Run several benchmarks and say which thresholds are met."),
    "gpu": Mode("GpuConfig", "benchmark_gpu", "Test and time everything that matters on a GPU, within a time budget."),
}


def main(arguments: list[str]) -> None:
    """Run a benchmark as the command line says and print its table.

    Args:
        arguments: Name of a mode, then its options.

    Raises:
        SystemExit: With code 2 where an option is refused, 1 where a part of a suite failed.
        FileExistsError: The output folder holds a finished benchmark.
    """
    parser = ArgumentParser(
        description="Time models, ops, generation, drafts, a suite, or a GPU.", allow_abbrev=False, parser_mode=STRICT
    )
    modes = parser.add_subcommands(dest="mode")
    for name, mode in MODES.items():
        keys = ArgumentParser(description=mode.purpose, allow_abbrev=False, parser_mode=STRICT)
        keys.add_argument("--config", action="config", help="YAML file with the same keys")
        # The config of a mode imports torch, which the list of modes does not need.
        if name in arguments[:1]:
            keys.add_class_arguments(getattr(mmod.benchmarks, mode.config), None)
        modes.add_subcommand(name, keys, help=mode.purpose)
    fields, rest = stack_configs(arguments[1:]) if arguments else (None, [])
    if fields is not None:
        rest = ["--config", yaml.safe_dump(fields, sort_keys=False), *rest]
    options = parser.instantiate(parser.parse_args([*arguments[:1], *rest]))
    mode = MODES[options.mode]
    chosen = vars(options[options.mode])
    chosen.pop("config", None)
    config = make_config(parser, getattr(mmod.benchmarks, mode.config), chosen)
    try:
        report = getattr(mmod.benchmarks, mode.function)(config)
    except mmod.benchmarks.SuiteFailedError as error:
        print(error.report.markdown())
        sys.exit(f"error: {error}")
    print(report.markdown())
