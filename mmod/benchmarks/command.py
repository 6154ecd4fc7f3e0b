"""Command line of the benchmarks: `MODE [CONFIG] [--key value]`; `MODE --help` lists the keys.

The same command goes on where it was killed. A part of a suite that fails is named in the report, and the command ends
with an error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import mmod.benchmarks
from mmod.training.engine.parse import parse_config
from mmod.values import one_of

# Names of a config and a function in mmod.benchmarks, which import torch, and the purpose of the mode.
MODES = {
    "models": ("BenchmarkConfig", "benchmark", "Time dense, routed and freely routed models side by side."),
    "ops": ("OpBenchmarkConfig", "benchmark", "Time each op on each backend beside its bound and its baselines."),
    "generation": ("GenerationConfig", "benchmark", "Time prefill and decoding of vision-language models."),
    "drafts": ("DraftConfig", "benchmark", "Time self-speculative decoding of a trained language model."),
    "suite": ("SuiteConfig", "benchmark_suite", "Run several benchmarks and say which thresholds are met."),
}


def main(arguments: Sequence[str]) -> None:
    """Run a benchmark as the command line says, a mode and its options, and print its table."""
    mode, *options = arguments or ["--help"]
    if mode in ("-h", "--help"):
        print("\n".join(f"{name:12}{purpose}" for name, (*_, purpose) in MODES.items()))
        return
    one_of("the mode of a benchmark", mode, list(MODES))
    config_name, function_name, _ = MODES[mode]
    config = parse_config(options, getattr(mmod.benchmarks, config_name))
    try:
        report = getattr(mmod.benchmarks, function_name)(config)
    except mmod.benchmarks.SuiteFailedError as error:
        print(error.report.markdown())
        sys.exit(f"error: {error}")
    print(report.markdown())
