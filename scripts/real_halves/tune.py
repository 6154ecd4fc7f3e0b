"""A short fine-tuning of the trained model by several ways to spend less, each alike, over seeds."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import mmod
from mmod import RoutingConfig
from mmod.analysis.statistics import difference
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ChatSample, ConversationsConfig, open_conversations
from mmod.planning import ratio_decay
from mmod.training.chat.start import router_parameters
from scripts.real_halves.compare import ends
from scripts.real_halves.evaluate import answered, halve, loaded
from scripts.real_halves.learn import scheduled
from scripts.real_halves.rows import SPREAD, ImageShare, Row, families, fitted

ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_STEPS = 24
_BATCH = 8
_RATE = 2e-4
# Routers start at random, or at nothing.
_ROUTER_RATE = 1e-3
_BUDGET = 0.5
_TEXT = 18
_DENSE = "dense"
_POOLED = "pooled tokens"
_ALL = "all"
GAMMA = "gamma-MoD"


def rows(folder: Path, patches: int) -> dict[str, Row]:
    """Return the tuned rows at one budget, the dense model first."""
    dense, _ = loaded(folder / "model")
    depth = len(dense.model.language_model.layers)
    dense.to("meta")
    share = ImageShare(dense, _TEXT, patches**2)

    def p_mod(value: float) -> RoutingConfig:
        plan = ratio_decay(depth, shift=value)
        return mmod.preset("p-mod", blocks=plan.blocks, capacity=plan.capacity)

    side = int((_BUDGET * patches**2) ** 0.5)
    found = {
        "p-MoD": p_mod,
        GAMMA: gamma_mod,
        f"{GAMMA}, a router for each layer": partial(gamma_mod, tied=False),
        SPREAD: families(depth)[SPREAD],
    }
    return {
        _DENSE: Row(),
        **{name: Row(fitted(share, family, _BUDGET)) for name, family in found.items()},
        _POOLED: Row(tokens=side),
        "fewer pixels": Row(patches=side),
    }


def gamma_mod(capacity: float, tied: bool = True) -> RoutingConfig:
    """Return gamma-MoD of image tokens with a capacity in (0, 1).

    Args:
        tied: All layers have one router.
    """
    return mmod.preset(
        "gamma-mod",
        capacity=max(capacity, 1e-3),
        router={"tied": tied},
        # By the best scores, as with tokens above a threshold the budget would be met by chance.
        language={"tokens": "image", "inference_threshold": None},
    )


def tuned(folder: Path, row: Row, seed: int, patches: int) -> tuple[Any, Any]:
    """Return the model of a row after fine-tuning, and its processor."""
    torch.manual_seed(seed)
    model, processor = loaded(folder / "model")
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    inject_adapter_in_model(LoraConfig(r=16, lora_alpha=32, target_modules=ADAPTED), model.model.language_model)
    for name, weight in model.model.language_model.named_parameters():
        weight.requires_grad_("lora" in name)
    row.apply(model, processor, patches)
    routers = list(router_parameters(model).values())
    for weight in routers:
        weight.requires_grad_(True)
    halve(model)
    _fit(model, routers, _talks(folder, seed), ChatCollator(processor))
    return model.eval(), processor


def _talks(folder: Path, seed: int) -> Iterator[list[ChatSample]]:
    questions = folder / "questions"
    chats = open_conversations(str(questions / "train.json"), ConversationsConfig(images=str(questions)))
    order = torch.randperm(len(chats), generator=torch.Generator().manual_seed(seed)).tolist()
    for start in range(0, _STEPS * _BATCH, _BATCH):
        yield [chat._replace(messages=chat.messages[:2]) for chat in chats.read(order[start : start + _BATCH])]


def _fit(
    model: Any, routers: Sequence[nn.Parameter], chats: Iterator[list[ChatSample]], collator: ChatCollator
) -> None:
    router_ids = {id(weight) for weight in routers}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in trained if id(weight) not in router_ids], "peak": _RATE}
    ]
    if routers:
        groups.append({"params": list(routers), "peak": _ROUTER_RATE})
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    model.train()
    for step, chosen in enumerate(chats):
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * scheduled(step / _STEPS)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**collator(chosen)).loss
        if routers:
            loss = loss + mmod.auxiliary_loss(model)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()


def tune(folder: Path, patches: int, seeds: int, limit: int, names: Sequence[str] | None = None) -> None:
    """Fine-tune and evaluate every row, or those of some names, with every seed that the journal lacks."""
    journal = journal_of(folder, patches)
    found = rows(folder, patches)
    for seed in range(seeds):
        for name in names or found:
            row = found[name]
            # Another process may have added it.
            if any((record["name"], record["seed"]) == (name, seed) for record in _records(journal)):
                continue
            started = time.process_time()
            model, processor = tuned(folder, row, seed, patches)
            answers = answered(model, ChatCollator(processor), folder / "questions", limit)
            record = {"name": name, "seed": seed, "seconds": time.process_time() - started, "answers": answers}
            with journal.open("a") as file:
                file.write(json.dumps(record) + "\n")


def journal_of(folder: Path, patches: int) -> Path:
    """Return the file that holds the answers of tuned rows."""
    return folder / f"tuned-{patches}.jsonl"


def _records(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


def _gap(found: Mapping[str, Mapping[str, dict[int, float]]], name: str, other: str, file: str) -> list[float] | None:
    """Return the difference of a row to another in a file; None to itself, or to one that was not tuned."""
    if name == other or other not in found:
        return None
    return ends(difference(found[name][file], found[other][file]))


def tuned_table(folder: Path, patches: int) -> dict[str, Any]:
    """Return the table of the tuned rows, as `scripts.doc_tables` writes it.

    Differences are paired by seed; none is shown to a row that was not tuned.
    """
    found: dict[str, dict[str, dict[int, float]]] = {}
    for record in _records(journal_of(folder, patches)):
        asked = {**record["answers"], _ALL: [one for answers in record["answers"].values() for one in answers]}
        for file, answers in asked.items():
            right = 100 * sum(one["right"] for one in answers) / len(answers)
            found.setdefault(record["name"], {}).setdefault(file, {})[record["seed"]] = right
    dense, _ = loaded(folder / "model")
    dense.to("meta")
    share = ImageShare(dense, _TEXT, patches**2)
    lines = list[list[Any]]()
    for name, row in rows(folder, patches).items():
        if name not in found:
            continue
        image = (row.tokens or row.patches or patches) ** 2
        line = [name, share(row.language, image)]
        for file in ("naming", "places"):
            line.append(float(np.mean([*found[name][file].values()])))
            line.append(_gap(found, name, _DENSE, file))
        line.append(None if name == _DENSE else _gap(found, name, _POOLED, _ALL))
        lines.append(line)
    gap = "{:+.1f} [{:+.1f}, {:+.1f}]"
    return {
        "commands": ["python -m scripts.real_halves tune FOLDER"],
        "columns": ["", "image FLOPs", "naming %", "to dense", "places %", "to dense", f"all, to {_POOLED}"],
        "formats": ["{}", "{:.2f}", "{:.1f}", gap, "{:.1f}", gap, gap],
        "rows": lines,
    }
