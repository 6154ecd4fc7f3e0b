"""Answers, costs and times of the rows, and their comparison."""

import copy
import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoProcessor, LlavaForConditionalGeneration

from mmod.analysis.memory import peak_bytes
from mmod.analysis.statistics import Estimate, Resampling, estimate_of
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from mmod.io.progress import progress_bar
from mmod.training.chat.evaluate import generate
from mmod.training.chat.kind import fill_cache
from scripts.real_halves.questions import held_out_in
from scripts.real_halves.rows import Row

LONGEST_ANSWER = 7
_DRAWS = 4000
# Tokens after the first, of which decoding is timed.
_DECODED = 8


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
    chats = open_conversations(str(file), ConversationsConfig(images=str(file.parent)))
    found = list[dict[str, Any]]()
    count = min(len(chats), limit)
    for start in progress_bar(range(0, count, batch), desc=file.stem, leave=False):
        chosen = chats.read(range(start, min(start + batch, count)))
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            answers = generate(model, collator, collator.prompts(chosen), LONGEST_ANSWER)
        for chat, answer in zip(chosen, answers):
            right = answer.strip().lower() == chat.answer.lower()
            found.append({"kind": chat.question_type, "picture": chat.key, "right": right, "said": answer.strip()})
    return found


def answered(model: Any, collator: ChatCollator, questions: Path, limit: int) -> dict[str, list[dict[str, Any]]]:
    """Return what was asked, see `asked`, by file of questions."""
    found = {file: asked(model, collator, questions / f"{file}.json", 10, limit) for file in held_out_in(questions)}
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
    drawn = Resampling(len(columns), _DRAWS).means(columns)
    value = 100 * columns[:, 0].sum() / columns[:, 1].sum()
    return dataclasses.replace(estimate_of(value, 100 * drawn[:, 0] / drawn[:, 1]), seeds=len(one))


@dataclass(frozen=True)
class Cost:
    """What prompts cost in float32, the mean over them.

    Args:
        prefill: CPU milliseconds of reading a prompt, its picture included.
        decoding: CPU milliseconds of each further token.
        tokens: Tokens of the prompt in the cache, mean over layers.
        cache: Bytes of the cache.
        peak: Most bytes that reading it holds beyond the weights.
    """

    prefill: float
    decoding: float
    tokens: float
    cache: float
    peak: float


def costs(
    folder: Path, questions: Path, rows: Mapping[str, Row], patches: int, rounds: int, prompts: int = 1
) -> dict[str, Cost]:
    """Return what some prompts of the last file cost: medians of rounds in which the rows take turns."""
    dense, processor = loaded(folder)
    file = questions / f"{held_out_in(questions)[-1]}.json"
    chats = open_conversations(str(file), ConversationsConfig(images=str(questions)))
    # Neighbours are about the same picture.
    chosen = chats.read(range(0, len(chats), len(chats) // prompts)[:prompts])
    shared = {id(value): value for value in (*dense.parameters(), *dense.buffers())}
    prepared = {}
    for name, row in rows.items():
        own = copy.deepcopy(processor)
        # The rows share weights, which fill the memory otherwise.
        model = copy.deepcopy(dense, dict(shared))
        row.apply(model, own, patches)
        collator = ChatCollator(own)
        prepared[name] = model, collator, [collator.prompts([chat]) for chat in chosen]
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    held = {}
    with torch.inference_mode():
        for name, (model, _, asked_of) in prepared.items():
            held[name] = np.mean([_held(model, prompt) for prompt in asked_of], axis=0)
        for _ in range(rounds):
            for name, (model, collator, asked_of) in prepared.items():
                spent[name] += [_milliseconds(model, collator, prompt) for prompt in asked_of]
    found = {}
    for name, taken in spent.items():
        prefill, decoding = np.median(np.reshape(taken, (rounds, prompts, 2)), axis=0).mean(axis=0)
        tokens, cache, peak = held[name]
        found[name] = Cost(float(prefill), float(decoding), float(tokens), float(cache), float(peak))
    return found


def _held(model: Any, prompt: Mapping[str, Tensor]) -> tuple[float, int, int]:
    """Return the tokens in a prompt's cache, mean over layers, its bytes, and the peak of reading the prompt."""
    caches = list[Any]()
    peak = peak_bytes(lambda: caches.append(fill_cache(model, prompt)), torch.device("cpu"))
    layers = caches[0].layers
    tokens = float(np.mean([layer.keys.shape[2] for layer in layers]))
    return tokens, sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in layers), peak


def _milliseconds(model: Any, collator: ChatCollator, prompt: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the time of reading a prompt, and of each token that follows the first."""
    started = time.process_time()
    fill_cache(model, prompt)
    read = time.process_time()
    generate(model, collator, prompt, 1 + _DECODED, exactly=True)
    prefill = 1000 * (read - started)
    return prefill, (1000 * (time.process_time() - read) - prefill) / _DECODED
