"""Command line of the benchmarks: `MODE [--config FILE] [--key value]`; `MODE --help` lists the keys.

The same command goes on where it was killed. A part of a suite that fails is named in the report, and the command ends
with an error.
"""

from __future__ import annotations

import sys

import yaml
from jsonargparse import ArgumentParser

import mmod.benchmarks
from mmod.io.yaml import STRICT, stack_configs
from mmod.training.engine.parse import make_config

# Names of a config and a function in mmod.benchmarks, which import torch, and the purpose of the mode.
MODES = {
    "models": ("BenchmarkConfig", "benchmark", "Time dense, routed and freely routed models side by side."),
    "ops": ("OpBenchmarkConfig", "benchmark", "Time each op on each backend beside its bound and its baselines."),
    "generation": ("GenerationConfig", "benchmark", "Time prefill and decoding of vision-language models."),
    "drafts": ("DraftConfig", "benchmark", "Time self-speculative decoding of a trained language model."),
    "suite": ("SuiteConfig", "benchmark_suite", "Run several benchmarks and say which thresholds are met."),
}


def main(arguments: list[str]) -> None:
    """Run a benchmark as the command line says, a mode and its options, and print its table."""
    parser = ArgumentParser(
        description="Time models, ops, generation, drafts, or a suite.", allow_abbrev=False, parser_mode=STRICT
    )
    modes = parser.add_subcommands(dest="mode")
    for mode, (config_name, _, purpose) in MODES.items():
        keys = ArgumentParser(description=purpose, allow_abbrev=False, parser_mode=STRICT)
        keys.add_argument("--config", action="config", help="YAML file with the same keys")
        if mode in arguments[:1]:
            keys.add_class_arguments(getattr(mmod.benchmarks, config_name), None)
        modes.add_subcommand(mode, keys, help=purpose)
    fields, words = stack_configs(arguments[1:]) if arguments else (None, [])
    if fields is not None:
        words = ["--config", yaml.safe_dump(fields, sort_keys=False), *words]
    options = parser.instantiate(parser.parse_args([*arguments[:1], *words]))
    config_name, function_name, _ = MODES[options.mode]
    chosen = vars(options[options.mode])
    chosen.pop("config", None)
    config = make_config(parser, getattr(mmod.benchmarks, config_name), chosen)
    try:
        report = getattr(mmod.benchmarks, function_name)(config)
    except mmod.benchmarks.SuiteFailedError as error:
        print(error.report.markdown())
        sys.exit(f"error: {error}")
    print(report.markdown())
