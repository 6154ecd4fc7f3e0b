"""Studies of vision-language models: answers by kind of question against prefill, decoding and cache."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmod.adapters import watch_grid
from mmod.analysis.counting import needed_shares
from mmod.analysis.flop_count import flops
from mmod.analysis.prefill import Prompt
from mmod.analysis.style import FAINT, INK, new_figure
from mmod.analysis.table import Measured, Table
from mmod.analysis.timing import Reading
from mmod.analysis.tracing import trace
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ChatSample, open_conversations
from mmod.data.records import IMAGE, prior_of
from mmod.studies.kind import Facts, Lines, Runs, Study, StudyKind, Told
from mmod.studies.report import named_columns, significance
from mmod.studies.runs import Run
from mmod.training.chat.config import TrainConfig
from mmod.training.chat.evaluate import RIGHT, generate, mean_over_kinds, right_answers
from mmod.training.chat.kind import ChatKind, fill_cache, prompt_flops
from mmod.training.engine.config import RunConfig, config_as
from mmod.training.engine.kind import Kind, readings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RIGHT = "right/"
# A baseline counts as cheap as a model up to this factor in FLOPs.
_AS_CHEAP = 1.1
# Characters in a line of the question beside its picture.
_LINE = 18
# Tokens decoded after a prompt whose time is measured.
_TIMED_TOKENS = 16
# Input of the pass that reads a prompt and decodes these.
_ANSWER = "answer"
_COLUMNS = (
    "name",
    "image_share",
    "flops_share",
    "prefill_ms",
    "prefill_speedup",
    "decode_per_s",
    "cache_bytes",
    "right",
    "to_dense",
    "to_control",
    "to_baseline",
    "baseline",
    "before",
)


def _describe(dense: RunConfig, tuned: RunConfig) -> Facts:
    """Return percent right for the answer that is most frequent in training, by type of question."""
    data = config_as(tuned, TrainConfig).data
    train = open_conversations(str(data.train), data)
    val = open_conversations(str(data.val), data)
    prior = prior_of(train.turns(), val.turns(last=True))
    return {"prior": {kind: 100 * share for kind, share in prior.items()}}


def _of_chat(kind: Kind) -> ChatKind:
    assert isinstance(kind, ChatKind)
    return kind


def _count(study: Study, run: Run, model: nn.Module, rows: Measured) -> dict[str, float]:
    """Count FLOPs and cache of reading a prompt of mean length, vision tower included."""
    kind = _of_chat(run.start)
    prompts, text, image = kind.prompts(study.config.latency_batch)
    routed = dense = prompt_flops(model, prompts, text, image, rows.kept)
    if kind.config.model.image_size is not None:
        # Shares refer to the dense model's prompts; this baseline's images are smaller, and it takes no others.
        model_config = dataclasses.replace(kind.config.model, image_size=None)
        full = ChatKind(dataclasses.replace(kind.config, model=model_config))
        full_prompts, _, full_image = full.prompts(study.config.latency_batch)
        dense = prompt_flops(full.prepare(weights=False), full_prompts, text, full_image, rows.kept)
    # What image tokens add to the language model is compared with what they add in the dense one.
    text_alone = flops(model, Prompt(text), needed_shares(model, rows.kept)).dense
    added = routed.routed - routed.vision - text_alone
    dense_added = dense.dense - dense.dense_vision - text_alone
    with torch.inference_mode():
        cache = fill_cache(model, prompts)
    cache_bytes = sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in cache.layers)
    return {
        "gflops": routed.routed / 1e9,
        "flops_share": routed.routed / dense.dense,
        "image_share": added / dense_added,
        "cache_bytes": cache_bytes // len(prompts["input_ids"]),
    }


def _draw(study: Study, run: Run, model: nn.Module) -> Figure | None:
    """Draw which image tokens are kept."""
    kind = _of_chat(run.start)
    return draw_kept(model, kind.collator, kind.chats(study.config.maps))


def _readings(kind: Kind, model: nn.Module, size: int, batches: int) -> Mapping[str, Reading]:
    """Return the prefill of a batch of prompts, and their prefill with some decoded tokens."""
    prefill = readings(kind, model, size, batches)["prompt"]
    chat = _of_chat(kind)
    prompts = chat.prompts(size)[0]
    answer = partial(generate, model, chat.collator, prompts, _TIMED_TOKENS, exactly=True)
    return {"prompt": prefill, _ANSWER: Reading([answer], prefill.samples)}


def _rate_of_decoding(columns: Mapping[str, float]) -> dict[str, float]:
    """Return the rate of decoding within a batch."""
    # The first token comes from the prefill, which noise may make longer than the whole.
    ms = max(columns["answer_ms"] - columns["prefill_ms"], 1e-6)
    return {"decode_per_s": (_TIMED_TOKENS - 1) / (ms / 1e3)}


def _baselines(study: Study, table: Table, runs: Runs) -> dict[str, dict[str, list[str]]]:
    """Return the models of other series that are about as cheap as each."""
    share = {name: table.costs[name]["flops_share"] for name in runs}

    def is_baseline(other: str, name: str) -> bool:
        is_other = runs[other].candidate.series != runs[name].candidate.series
        return is_other and share[other] <= _AS_CHEAP * share[name]

    baselines = {}
    for name in share:
        baselines[name] = [other for other in share if is_baseline(other, name)]
    return {"": baselines}


def _tell(study: Study, table: Table, runs: Runs, rows: Lines, facts: Facts) -> Told:
    """Say which models are significantly better, and draw right answers by type of question."""
    prior = facts["prior"]
    shares = {_RIGHT + kind: share for kind, share in prior.items()}
    right = {}
    for row in rows:
        right[row["name"]] = {"all": row["right"], **{kind: row[_RIGHT + kind] for kind in prior}}
    return Told(
        rows=rows,
        measure="right answers",
        columns=named_columns(_COLUMNS) | {_RIGHT + kind: (kind, "±.1f") for kind in prior},
        axes={"gflops": "GFLOPs per prompt", "prefill_ms": f"ms per prompt, batch {study.config.latency_batch}"},
        parts=[significance(table, study.config.score, list(runs))],
        last_rows=[{"name": "language-only prior", "right": mean_over_kinds(prior), **shares}],
        pictures={"answers": draw_answers(right, {row["name"]: row["flops_share"] for row in rows})},
    )


def draw_kept(model: Any, collator: ChatCollator, chats: Sequence[ChatSample]) -> Figure | None:
    """Draw the image tokens that routed layers kept of questions; None where they are not one image's patches."""
    prompts = collator.prompts(chats)
    pixels = prompts.get("pixel_values")
    image_BN = prompts["input_ids"] == collator.processor.image_token_id
    if pixels is None or pixels.ndim != 4:
        return None
    questions = [chat.messages[-2].text.replace(IMAGE, "").strip() for chat in chats]
    labels = [textwrap.fill(question, _LINE) for question in questions]
    with torch.inference_mode(), trace(model) as decisions, watch_grid(model) as seen:
        model(**{key: value.to(model.device) for key, value in prompts.items()}, logits_to_keep=1)
    if seen.grid is None or len(pixels) != len(chats):
        return None
    patches = len(pixels) * math.prod(seen.grid)
    if int(image_BN.sum()) != patches:
        return None
    return decisions.plot(pixels, labels, prefix=0, grid=seen.grid, image_BN=image_BN)


def draw_answers(right: Mapping[str, Mapping[str, float]], shares: Mapping[str, float]) -> Figure:
    """Draw right answers in percent by type of question: the first model's, and differences of the others to it.

    `shares` are FLOPs of the models as a share of the first one's.
    """
    names = list(right)
    base = right[names[0]]
    kinds = list(base)
    changes = [[right[name][kind] - base[kind] for kind in kinds] for name in names]
    # Changes of less than 5 points stay pale.
    limit = max(5.0, *map(abs, chain.from_iterable(changes)))
    figure = new_figure(1.0 * len(kinds) + 2.4, 0.36 * len(names) + 0.7)
    axis = figure.subplots()
    axis.imshow(changes, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    for row, differences in enumerate(changes):
        for column, change in enumerate(differences):
            text = f"{change:+.1f}"
            if row == 0:
                text = f"{base[kinds[column]]:.1f} %"
            colour = INK
            if abs(change) > 0.6 * limit:
                colour = "white"
            axis.text(column, row, text, ha="center", va="center", color=colour)
    axis.set_xticks(range(len(kinds)), kinds)
    axis.set_yticks(range(len(names)), [f"{name}  {shares[name]:.2f}" for name in names])
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.set_xlabel(
        f"right answers: {names[0]}, then points more or less · beside the names: share of FLOPs", color=FAINT
    )
    axis.spines[:].set_visible(False)
    return figure


STUDY = StudyKind(
    times={"prompt": ("prefill_ms", "prefill_speedup"), _ANSWER: ("answer_ms", "answer_speedup")},
    count=_count,
    tell=_tell,
    weigh={RIGHT: right_answers},
    describe=_describe,
    draw=_draw,
    readings=_readings,
    derive=_rate_of_decoding,
    baselines=_baselines,
)
"""A study of LLaVA-style models of transformers."""
