"""The study of vision-language models: answers by kind of question against prefill, decoding and cache."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mmod import is_routed
from mmod.analysis.prefill import prefill_flops
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from mmod.data.synthetic.questions import prior_of
from mmod.studies.chat_pictures import draw_answers, draw_kept
from mmod.studies.config import ChatStudyConfig
from mmod.studies.entrants import DENSE, Entrant, create_rivals
from mmod.studies.jobs import Job
from mmod.studies.results import Column, table_of
from mmod.studies.study import Costs, Scores, Study, latencies
from mmod.training.chat.config import TrainConfig
from mmod.training.chat.evaluate import EvalResult, generate, mean_over_kinds
from mmod.training.chat.recipe import ChatRecipe, read_prompts
from mmod.training.engine.distributed import choose_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ChatStudy"]

_RIGHT = "right/"
# A rival may cost so much more in FLOPs and still count as cheap as a model.
_AS_CHEAP = 1.1


class ChatStudy(Study[TrainConfig, EvalResult]):
    """A study of LLaVA-style models of transformers; see `Study`."""

    config: ChatStudyConfig
    recipe: ClassVar[type[ChatRecipe]] = ChatRecipe
    run_config = TrainConfig
    found = EvalResult
    score = "right"
    measure = "right answers"
    columns: ClassVar = {
        "name": ("model", ""),
        "image_share": ("image FLOPs", ".3f"),
        "flops_share": ("FLOPs", ".3f"),
        "prefill_ms": ("prefill ms", ".2f"),
        "prefill_speedup": ("speed-up", ".2f"),
        "decode_per_s": ("decode tok/s", ".0f"),
        "cache_bytes": ("cache bytes", ","),
        "right": ("right %", "±.1f"),
        "to_dense": ("to dense", ""),
        "to_control": ("to control", ""),
        "to_rival": ("to the best as cheap", ""),
        "rival": ("which", ""),
        "before": ("before tuning", "±.1f"),
    }
    data: ConversationsConfig
    series: Mapping[str, str]

    def routing(self, fields: dict[str, Any], capacity: float | None) -> dict[str, Any]:
        """Return the routing of the part that is routed."""
        return {self.config.part: super().routing(fields, capacity)}

    def figures(self, found: EvalResult) -> dict[str, float]:
        """Return right answers in percent, overall and by kind, and the share kept of tokens that may be skipped."""
        return {**found.columns(), "kept": found.mean_kept}

    def entrants(self, dense: TrainConfig, tuned: TrainConfig) -> list[Entrant]:
        """Return what is compared, after checking that there is something to ask."""
        if dense.data.val is None or tuned.data.val is None:
            raise ValueError(f"{self.config.dense!r} has no data.val, so there is nothing to ask")
        self.data = tuned.data
        smaller = create_rivals(self.config.rivals, self.config.controls, epochs=0, is_trained=self.config.tune)
        entrants = [*super().entrants(dense, tuned), *smaller]
        self.series = {entrant.name: entrant.series for entrant in entrants}
        return entrants

    def examine(self, job: Job[TrainConfig], found: EvalResult) -> dict[str, float]:
        """Count what reading a prompt of mean length costs and holds, and draw which image tokens are kept."""
        model: Any = self.load(job)
        prompts, text, image = self._prompts(job.config)
        # Shares are of the dense model's prompts, whose images a rival's may be smaller than.
        full = self._prompts(
            dataclasses.replace(job.config, model=dataclasses.replace(job.config.model, image_size=None))
        )
        routed = prefill_flops(model, text, image, found.kept if is_routed(model) else None).routed
        dense, alone = (prefill_flops(model, text, images, 0.0).dense for images in (full[2], 0))
        with torch.inference_mode():
            cache = read_prompts(model, prompts)
        if self.config.maps and is_routed(model):
            folder = Path(self.config.output)
            folder.mkdir(parents=True, exist_ok=True)
            recipe = self.recipe(job.config)
            figure = draw_kept(model, recipe.collator, recipe.talks(self.config.maps))
            if figure is not None:
                figure.savefig(folder / f"maps-{job.name}.png", dpi=150, bbox_inches="tight")
        return {
            "gflops": routed / 1e9,
            "flops_share": routed / dense,
            "image_share": (routed - alone) / (dense - alone),
            "cache_bytes": sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in cache.layers)
            // len(prompts["input_ids"]),
        }

    def to_rivals(self, scores: Scores, costs: Costs) -> dict[str, dict[str, Any]]:
        """Return each model's difference to the best of another series that costs about as little, and its name."""
        best: dict[str, str | None] = {}
        for name in scores:
            limit, own = _AS_CHEAP * costs[name]["flops_share"], self.series[name]
            others = [one for one in scores if self.series[one] != own and costs[one]["flops_share"] <= limit]
            best[name] = max(others, key=lambda one: mean(scores[one].values()), default=None)
        gaps = self.compare(scores, best)
        return {name: {"to_rival": gaps[name], "rival": best[name]} for name in scores}

    def time(self, jobs: Mapping[str, Job[TrainConfig]]) -> dict[str, dict[str, float]]:
        """Measure reading a prompt within a batch, and decoding after it."""
        models: dict[str, Any] = {name: self.load(job) for name, job in jobs.items()}
        collators = {name: self.recipe(job.config).collator for name, job in jobs.items()}
        prompts = {name: self._prompts(job.config)[0] for name, job in jobs.items()}
        count, rounds = len(prompts[DENSE]["input_ids"]), self.config.timed_rounds
        reads = {name: functools.partial(read_prompts, model, prompts[name]) for name, model in models.items()}
        costs: dict[str, dict[str, float]] = {}
        for name, (own, ratio) in latencies(reads, count, rounds, choose_device()).items():
            taken = []
            for _ in range(rounds):
                started = time.perf_counter()
                generate(models[name], collators[name], prompts[name], self.config.timed_tokens, exactly=True)
                taken.append(time.perf_counter() - started)
            # The first token comes from reading the prompt.
            seconds = max(median(taken) - own * count / 1e3, 1e-9)
            rate = count * max(1, self.config.timed_tokens - 1) / seconds
            costs[name] = {"prefill_ms": own, "prefill_speedup": ratio, "decode_per_s": rate}
        return costs

    @property
    def costs(self) -> dict[str, str]:
        """FLOPs and latency of reading a prompt."""
        return {"gflops": "GFLOPs per prompt", "prefill_ms": f"ms per prompt, batch {self.config.timed_prompts}"}

    def pictures(self, rows: Sequence[dict[str, Any]]) -> dict[str, Figure]:
        """Draw right answers against the cost of prefill, and by kind of question."""
        right = {
            row["name"]: {"all": row["right"], **{kind: row[_RIGHT + kind] for kind in self.prior}} for row in rows
        }
        answers = draw_answers(right, {row["name"]: row["flops_share"] for row in rows})
        return {**super().pictures(rows), "answers": answers}

    def table(self, rows: Sequence[dict[str, Any]]) -> str:
        """Return the points as a Markdown table, with the prior in its last row."""
        kinds: dict[str, Column] = {_RIGHT + kind: (kind, "±.1f") for kind in self.prior}
        prior = {_RIGHT + kind: share for kind, share in self.prior.items()}
        last = {"name": "language-only prior", "right": mean_over_kinds(self.prior), **prior}
        return table_of({**self.columns, **kinds}, [*rows, last])

    def facts(self) -> dict[str, Any]:
        """Return the language-only prior."""
        return {"prior": self.prior}

    @functools.cached_property
    def prior(self) -> dict[str, float]:
        """Percent of right answers that each question's most frequent answer in training gives, by kind."""
        train, val = (open_conversations(str(name), self.data) for name in (self.data.train, self.data.val))
        return {kind: 100 * share for kind, share in prior_of(train.turns(), val.turns()).items()}

    def _prompts(self, config: TrainConfig) -> tuple[dict[str, Tensor], int, int]:
        """Return the prompts that are timed, as a run encodes them, and text and image tokens of one on average."""
        return self.recipe(config).prompts(self.config.timed_prompts)
