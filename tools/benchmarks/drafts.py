"""Benchmark of self-speculative decoding: a trained language model with and without drafts of its routed layers."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from mmod.analysis.timing import Spread
from mmod.config.parse import read_config
from mmod.data.loader import TextReader, read_corpus
from mmod.io.tables import Column
from mmod.lab import full_pass
from mmod.opening.runs import RUN_CONFIG
from mmod.training.text.config import TrainConfig
from mmod.values import check_distinct
from tools.benchmarks.report import HIDDEN, Options, Row, Runs


@dataclass(frozen=True, kw_only=True)
class DraftConfig(Options):
    """Greedy generation by all tokens in all layers, with and without drafts of routed ones.

    Prompts are windows of the run's validation text, spread evenly over it, and continued one by one.

    Args:
        run: Folder of a finished run of `mmod train text` with `elastic: true`.
        draft_tokens: Tokens that are drafted before a full pass, a row of the table for each number; 0 leaves the
            choice to transformers, up to 20 and fewer where the draft is unsure.
        prompts: Number of texts that are continued.
        prompt_tokens: Tokens of a prompt.
        new_tokens: Tokens that are generated.
        rounds: How often both ways are timed for a prompt, in turns; the fastest counts.
        dtype: Type of the weights. In float64 no two logits are equal but for rounding.
    """

    run: str
    draft_tokens: Annotated[list[int], "[0, inf)"] = field(default_factory=lambda: [0, 3, 6])
    prompts: Annotated[int, "[1, inf)"] = 8
    prompt_tokens: Annotated[int, "[1, inf)"] = 64
    new_tokens: Annotated[int, "[1, inf)"] = 128
    rounds: Annotated[int, "[1, inf)"] = 3
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    out: str = "runs/benchmark_drafts"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_distinct(self, "draft_tokens")

    def runs(self) -> Runs:
        """Return a run for every number of drafted tokens; raise unless the model was trained with both passes."""
        # It brings host libraries, which other benchmarks may not need.
        from mmod.opening.open import open_model

        trained = read_config([str(Path(self.run) / RUN_CONFIG)], TrainConfig)
        if not trained.elastic:
            raise ValueError(
                f"{self.run!r} was not trained with elastic: true, by which all tokens in all layers learn to verify "
                "what the routed pass drafts"
            )
        model: Any = open_model(self.run, args={"dtype": getattr(torch, self.dtype)}).model.to(self.device)
        prompts = _prompts(self, trained)
        calls: dict[str, Callable[[], list[Row]]] = {}
        for length in self.draft_tokens:
            calls[f"{length} drafted"] = functools.partial(_run, self, model, prompts, length)
        title = f"Drafts of {self.run}, {len(prompts)} texts, {self.new_tokens} tokens each, {self.dtype}"
        return Runs(title, COLUMNS, calls, _notes)


COLUMNS: dict[str, Column] = {
    "drafted": ("drafted at a time", ""),
    "prompts": ("texts", ""),
    "identical": ("identical", ""),
    "acceptance": ("acceptance", ".3f"),
    "per_pass": ("tokens per full pass", ".2f"),
    "plain_rate": ("plain tokens/s", ".1f"),
    "rate": ("tokens/s", ".1f"),
    "speedup": ("speed-up", "[.3f"),
    "draft_tokens": HIDDEN,
    "reports": HIDDEN,
}


def summarise(draft_tokens: int, reports: Sequence[Row]) -> Row:
    """Return the row of drafts of one length, from those of several prompts; see `evaluate_drafts`."""
    totals = {name: sum(report[name] for report in reports) for name in reports[0]}
    return {
        "drafted": str(draft_tokens or "transformers' choice"),
        "draft_tokens": draft_tokens,
        "prompts": len(reports),
        "identical": totals["identical"],
        "acceptance": totals["accepted"] / max(totals["drafted"], 1),
        "per_pass": totals["new_tokens"] / totals["passes"],
        "plain_rate": totals["new_tokens"] / totals["plain_seconds"],
        "rate": totals["new_tokens"] / totals["draft_seconds"],
        "speedup": Spread.of([report["plain_seconds"] / report["draft_seconds"] for report in reports]),
        "reports": list(reports),
    }


@torch.no_grad()
def evaluate_drafts(model: Any, input_ids: Tensor, new_tokens: int, rounds: int, draft_tokens: int) -> Row:
    """Generate greedily with the full pass of a routed model, with and without its drafts; return what it took.

    "accepted" counts drafted tokens that the full pass accepted, and "passes" its own, prefill included. Times are the
    fastest of the rounds.

    Args:
        input_ids: A prompt (1, N); transformers drafts for one sample.
        draft_tokens: Drafted tokens for each full pass; 0 follows transformers, at most 20.
    """
    full = full_pass(model)
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    modes: dict[str, dict[str, Any]] = {"plain": {}, "draft": {"assistant_model": model}}
    seconds = dict.fromkeys(modes, float("inf"))
    tokens = {}
    before = copy.deepcopy(model.generation_config)
    if draft_tokens:
        # No draft ends early.
        fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
        model.generation_config.update(num_assistant_tokens=draft_tokens, **fixed)
    try:
        # A first run is counted and not timed; it warms up as well.
        with _counted(full) as full_passes, _counted(model) as drafts:
            full.generate(**inputs, **options, assistant_model=model)
        for _ in range(rounds):
            for name, mode_options in modes.items():
                start = time.perf_counter()
                tokens[name] = full.generate(**inputs, **options, **mode_options)
                if input_ids.is_cuda:
                    torch.cuda.synchronize(input_ids.device)
                # The fastest of some rounds: noise only ever adds time.
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    finally:
        # Drafting changes it too.
        model.generation_config = before
    return {
        "new_tokens": new_tokens,
        "drafted": len(drafts),
        # Every full pass also generates one token itself.
        "accepted": new_tokens - len(full_passes),
        "passes": len(full_passes),
        "plain_seconds": seconds["plain"],
        "draft_seconds": seconds["draft"],
        "identical": bool(torch.equal(tokens["plain"], tokens["draft"])),
    }


@contextmanager
def _counted(model: nn.Module) -> Iterator[list[None]]:
    """Context in which a list gets an entry for every forward pass of a model."""
    passes: list[None] = []
    handle = model.register_forward_hook(lambda *_: passes.append(None))
    try:
        yield passes
    finally:
        handle.remove()


def _prompts(config: DraftConfig, trained: TrainConfig) -> list[Tensor]:
    text = read_corpus(trained.data.source, trained.data.val_split)
    reader = TextReader(text, config.prompt_tokens, config.prompts)
    tokens, *_ = reader.read(np.arange(len(reader)), (0, 0))
    return list(tokens.to(config.device).split(1))


def _run(config: DraftConfig, model: Any, prompts: Sequence[Tensor], length: int) -> list[Row]:
    reports = [evaluate_drafts(model, prompt, config.new_tokens, config.rounds, length) for prompt in prompts]
    return [summarise(length, reports)]


def _notes(rows: Sequence[Row]) -> list[str]:
    if any(row["identical"] < row["prompts"] for row in rows):
        return ["Texts differ where two logits are equal but for rounding: --dtype float64 tells."]
    return []
