"""Answers, costs and times of the rows, and their comparison."""

import copy
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoProcessor, LlavaForConditionalGeneration

from mmod.analysis.statistics import Estimate, estimate_of, resampled_means
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from mmod.io.progress import progress_bar
from mmod.training.chat.evaluate import generate
from mmod.training.chat.kind import fill_cache
from scripts.real_halves.rows import Row

LONGEST_ANSWER = 7
_DRAWS = 4000


def loaded(folder: Path) -> tuple[Any, Any]:
    """Return the trained model and its processor."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoProcessor.from_pretrained(folder)


def halve(model: nn.Module) -> None:
    """Keep the weights of products in half precision, to which autocast would convert them for every token."""
    for module in model.modules():
        # The embeddings, which the last product shares, stay exact.
        if isinstance(module, nn.Linear) and module is not model.get_submodule("lm_head"):
            module.to(torch.bfloat16)


def asked(model: Any, collator: ChatCollator, file: Path, batch: int, limit: int) -> list[dict[str, Any]]:
    """Return kind, picture and right or wrong of every question of a file."""
    talks = open_conversations(str(file), ConversationsConfig(images=str(file.parent)))
    found = list[dict[str, Any]]()
    count = min(len(talks), limit)
    for start in progress_bar(range(0, count, batch), desc=file.stem, leave=False):
        chosen = talks.read(range(start, min(start + batch, count)))
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            answers = generate(model, collator, collator.prompts(chosen), LONGEST_ANSWER)
        for talk, answer in zip(chosen, answers):
            right = answer.strip().lower() == talk.answer.lower()
            found.append({"kind": talk.question_type, "picture": talk.key, "right": right, "said": answer.strip()})
    return found


def answered(model: Any, collator: ChatCollator, questions: Path, limit: int) -> dict[str, list[dict[str, Any]]]:
    """Return what was asked, see `asked`, by file of questions."""
    found = {file: asked(model, collator, questions / f"{file}.json", 10, limit) for file in ("naming", "places")}
    shares = {file: f"{sum(one['right'] for one in answers) / len(answers):.3f}" for file, answers in found.items()}
    print(f"right: {shares}", flush=True)
    return found


def evaluate(
    folder: Path, questions: Path, rows: Mapping[str, Row], journal: Path, patches: int, limit: int = 500
) -> None:
    """Answer the questions with every row that the journal lacks; several processes may share a journal."""
    for name, row in rows.items():
        lines = journal.read_text().splitlines() if journal.exists() else []
        if name in {json.loads(line)["name"] for line in lines}:
            continue
        print(name, end=" ", flush=True)
        started = time.process_time()
        model, processor = loaded(folder)
        row.apply(model, processor, patches)
        halve(model)
        answers = answered(model, ChatCollator(processor), questions, limit)
        record = {"name": name, "seconds": time.process_time() - started, "answers": answers}
        with journal.open("a") as file:
            file.write(json.dumps(record) + "\n")


def by_picture(journal: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return right answers and questions (pictures, 2) of every row, by file of questions."""
    table: dict[str, dict[str, np.ndarray]] = {}
    for line in journal.read_text().splitlines():
        record = json.loads(line)
        for file, found in record["answers"].items():
            pictures = list(dict.fromkeys(one["picture"] for one in found))
            sums = np.zeros((len(pictures), 2))
            for one in found:
                sums[pictures.index(one["picture"])] += (one["right"], 1)
            table.setdefault(record["name"], {})[file] = sums
    return table


def gap(one: np.ndarray, other: np.ndarray) -> Estimate:
    """Return the difference of two shares of right answers in points, with its interval over pictures."""
    columns = np.stack([one[:, 0] - other[:, 0], one[:, 1]], 1)
    drawn = resampled_means(columns, _DRAWS, 0)
    value = 100 * columns[:, 0].sum() / columns[:, 1].sum()
    return dataclasses.replace(estimate_of(value, 100 * drawn[:, 0] / drawn[:, 1]), seeds=len(one))


def prefill_times(
    folder: Path, questions: Path, rows: Mapping[str, Row], patches: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Return CPU milliseconds of reading a prompt in float32, rows interleaved, and bytes of its cache."""
    dense, processor = loaded(folder)
    talks = open_conversations(str(questions / "places.json"), ConversationsConfig(images=str(questions)))
    shared = {id(value): value for value in (*dense.parameters(), *dense.buffers())}
    prepared = {}
    for name, row in rows.items():
        own = copy.deepcopy(processor)
        # The rows share weights, which fill the memory otherwise.
        model = copy.deepcopy(dense, dict(shared))
        row.apply(model, own, patches)
        prepared[name] = model, ChatCollator(own).prompts(talks.read([0]))
    taken: dict[str, list[float]] = {name: [] for name in rows}
    cached = {}
    with torch.inference_mode():
        for number in range(rounds + 1):
            for name, (model, prompt) in prepared.items():
                started = time.process_time()
                cache = fill_cache(model, prompt)
                # The first round warms up.
                if number:
                    taken[name].append(1000 * (time.process_time() - started))
                cached[name] = sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in cache.layers)
    return {name: {"ms": float(np.median(times)), "cache": cached[name]} for name, times in taken.items()}
