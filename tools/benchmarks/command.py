"""Command line of the benchmarks: `MODE [CONFIG] [--key value]`; `MODE --help` lists the keys.

The same command goes on where it was killed. A part of a suite that fails is named in the report, and the command ends
with an error.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mmod.config.parse import parse_config
from mmod.values import one_of

if TYPE_CHECKING:
    from tools.benchmarks.report import Options
    from tools.benchmarks.suite import SuiteConfig


class Mode(NamedTuple):
    """A kind of benchmark: the names of its module, which imports torch, and of its config there, and what it does."""

    module: str
    config: str
    purpose: str


MODES = {
    "models": Mode("models.benchmark", "BenchmarkConfig", "Time dense, routed and freely routed models side by side."),
    "ops": Mode("ops.benchmark", "OpBenchmarkConfig", "Time ops on each backend beside their bounds and baselines."),
    "generation": Mode("generation", "GenerationConfig", "Time prefill and decoding of vision-language models."),
    "drafts": Mode("drafts", "DraftConfig", "Time self-speculative decoding of a trained language model."),
    "suite": Mode("suite", "SuiteConfig", "Run several benchmarks and say which thresholds are met."),
}


def config_class(mode: str) -> type[Any]:
    """Return the config of a mode, `Options` or `SuiteConfig`."""
    module = importlib.import_module(f"{__package__}.{MODES[mode].module}")
    kind: type[Any] = getattr(module, MODES[mode].config)
    return kind


def main(arguments: Sequence[str]) -> None:
    """Run a benchmark as the command line says, a mode and its options, and print its table."""
    mode, *options = arguments or ["--help"]
    if mode in ("-h", "--help"):
        print("\n".join(f"{name:12}{known.purpose}" for name, known in MODES.items()))
        return
    one_of("the mode of a benchmark", mode, list(MODES))
    config: Options | SuiteConfig = parse_config(options, config_class(mode))
    from tools.benchmarks import report, suite

    try:
        if isinstance(config, suite.SuiteConfig):
            result = suite.benchmark_suite(config)
        else:
            result = report.benchmark(config)
    except suite.SuiteFailedError as error:
        print(error.report.markdown())
        sys.exit(f"error: {error}")
    print(result.markdown())
