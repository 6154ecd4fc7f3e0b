"""Benchmark of prefill and decoding: a routed vision-language model beside the dense one."""

from __future__ import annotations

import functools
import itertools

import torch

from mmod.analysis.timing import Spread, interleave, ratios
from mmod.benchmarks.generation.config import GenerationConfig, GenerationRow
from mmod.benchmarks.generation.models import GenerationModels
from mmod.benchmarks.report import BenchmarkReport
from mmod.benchmarks.resume import run_all


def benchmark_generation(config: GenerationConfig, progress: bool = True) -> BenchmarkReport:
    """Check and time prefill and decoding of dense and routed models side by side, and write the results.

    Args:
        config: What to time.
        progress: Show a progress bar on stderr.

    Returns:
        The rows, with the environment they were measured in.

    Raises:
        FileExistsError: The output folder holds a benchmark already.
        ValueError: The output folder holds an unfinished benchmark with other options or of another machine.
        WrongOutputError: A path computes something wrong, or caches other bytes than it should; it is not timed then.
    """
    runs = {
        f"{tokens} image tokens, batch {batch}": functools.partial(_run, config, tokens, batch)
        for tokens, batch in itertools.product(config.image_tokens, config.batch_sizes)
    }
    title = f"LLaVA, {config.layers} layers of width {config.hidden}, {config.attention}, {config.dtype}"
    return run_all(config, title, GenerationRow, runs, progress)


@torch.no_grad()
def _run(config: GenerationConfig, image_tokens: int, batch_size: int) -> list[GenerationRow]:
    models = GenerationModels(config, image_tokens, batch_size)
    models.check()
    models.to(getattr(torch, config.dtype))
    time = functools.partial(
        interleave, seconds=config.seconds, rounds=config.rounds, device=torch.device(config.device), seed=config.seed
    )
    prefill = time({name: functools.partial(models.prefill, name) for name in (None, *config.presets)})
    train = time({name: functools.partial(models.train_step, name) for name in prefill}) if config.train else None
    rows = []
    for name in config.presets:
        found = models.cached(name)
        # A step takes a fraction of a prefill, so that many more of them fit into the same time.
        steps = time({dense: models.decoder(name, dense) for dense in (True, False)})
        row = GenerationRow(
            name, image_tokens, batch_size, len(prefill[name]),
            Spread.of(prefill[None]), Spread.of(prefill[name]), ratios(prefill[None], prefill[name]),
            found.flop_speedup, found.slots, found.share,
            Spread.of(steps[True]), Spread.of(steps[False]), ratios(steps[True], steps[False]),
            None if train is None else ratios(train[None], train[name]),
            None if train is None else models.train_flop_speedup(name),
        )  # fmt: skip
        rows.append(row)
    return rows
