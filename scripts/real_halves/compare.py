"""The rows that are evaluated, with plans searched in the trained model, and the table of their answers and costs."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mmod
from mmod import Option, RoutingConfig
from mmod.analysis.statistics import Estimate
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from mmod.io.store import STORE
from mmod.lab import horizon
from mmod.planning import search_plan
from scripts.real_halves.evaluate import by_picture, costs, gap, halve, loaded
from scripts.real_halves.photographs import PATCHES as TRAINED
from scripts.real_halves.rows import FASTV, LAST_TOKEN, SPREAD, ImageShare, Row, families, fitted

BUDGETS = (0.5, 0.25)
DENSE = "dense"
BOTH = "fewer pixels and evenly spread"
AT_LENGTH = "pixels of the trained length, evenly spread"
# Text tokens of a prompt, about as many as questions have.
_TEXT = 18
_SEARCHED_ON = 16
_BATCH = 8
_TOLERANCE = 0.05
_OPTIONS = [Option(0.0), Option(0.25), Option(0.0, context="all"), Option(0.25, context="all")]
_ROUTERS: dict[str, Any] = {"evenly spread": "stride", "by the last token's attention": LAST_TOKEN}
_ROUNDS = 7
_BASELINES = (SPREAD, "pooled tokens", "fewer pixels")
_COMMANDS = ["python -m scripts.real_halves evaluate FOLDER", "python -m scripts.real_halves table FOLDER"]


def rows(folder: Path, patches: int, plans: bool = True) -> dict[str, Row]:
    """Return the rows by name for images of so many patches a side, the dense model first.

    Args:
        folder: Holds the trained model.
        patches: Side of the images in patches.
        plans: Whether plans are searched, where they are not known yet.
    """
    dense, _ = loaded(folder / "model")
    dense.to("meta")
    # As fast as rows that keep half of the tokens, or a quarter.
    found = {DENSE: Row(), **{f"fewer pixels, {share}": Row(patches=fewer(patches, share)) for share in (0.4, 0.32)}}
    for budget in BUDGETS:
        found |= {f"{name}, {budget}": row for name, row in _within(dense, patches, budget).items()}
        for name, plan in planned(folder, patches, budget).items() if plans else ():
            found[f"{name}, {budget}"] = Row(language=plan)
    gradual = mmod.preset("gradual")
    found["gradual merging in the tower"] = Row(image=gradual)
    for name in (f"{FASTV}, {BUDGETS[0]}", f"{SPREAD}, {BUDGETS[0]}"):
        found[f"gradual merging in the tower; {name}"] = Row(found[name].language, gradual)
    return found


def _within(dense: Any, patches: int, budget: float) -> dict[str, Row]:
    """Return the rows that are not searched, at a budget."""
    depth = len(dense.model.language_model.layers)
    side = fewer(patches, budget)
    found = {"pooled tokens": Row(tokens=side), "fewer pixels": Row(patches=side)}
    share = ImageShare(dense, _TEXT, patches**2)
    for name, family in families(depth).items():
        config = fitted(share, family, budget)
        # PyramidDrop's first quarter of layers is dense, which alone costs more than a small budget.
        if share(config) <= budget:
            found[name] = Row(language=config)
    # Fewer pixels and fewer tokens save about as much each, or pixels as much as brings pictures to the trained length.
    for name, seen in ((BOTH, fewer(patches, budget**0.5)), (AT_LENGTH, TRAINED)):
        if seen < patches and (seen / patches) ** 2 > budget:
            of_fewer = partial(share, image=seen**2)
            found[name] = Row(fitted(of_fewer, families(depth)[SPREAD], budget), patches=seen)
    return found


def fewer(patches: int, budget: float) -> int:
    """Return the side of the largest grid with at most this share of the patches."""
    return int((budget * patches**2) ** 0.5 + 1e-6)


def planned(folder: Path, patches: int, budget: float) -> dict[str, RoutingConfig]:
    """Return plans found in the trained model on training questions; they are kept in a file."""
    file = folder / f"plans-{patches}.json"
    if not file.exists():
        file.write_text(json.dumps(_search(folder, patches), indent=1))
    return {name: RoutingConfig.from_dict(fields) for name, fields in json.loads(file.read_text())[str(budget)].items()}


def _search(folder: Path, patches: int) -> dict[str, dict[str, Any]]:
    model, processor = loaded(folder / "model")
    Row().apply(model, processor, patches)
    halve(model)
    questions = folder / "questions"
    chats = open_conversations(str(questions / "train.json"), ConversationsConfig(images=str(questions)))
    chosen = chats.read(range(_SEARCHED_ON))
    # One question a picture, as in the evaluation.
    chosen = [chat._replace(messages=chat.messages[:2]) for chat in chosen]
    collator = ChatCollator(processor)
    batches = [collator(chosen[start : start + _BATCH]) for start in range(0, len(chosen), _BATCH)]
    with torch.autocast("cpu", torch.bfloat16):
        curve = horizon(model, batches)
        print(curve, flush=True)
        searches = {
            name: search_plan(
                model,
                batches,
                BUDGETS[0],
                part="language",
                options=_OPTIONS,
                router=router,
                cost="image_flops",
                store=folder / STORE,
            )
            for name, router in _ROUTERS.items()
        }
    curve.plot(folder / f"horizon-{patches}.png", overwrite=True)
    model.to("meta")
    share = ImageShare(model, _TEXT, patches**2)
    found: dict[str, dict[str, Any]] = {}
    for budget in BUDGETS:
        plans = {f"searched plan, {name}": search.plan_for(budget) for name, search in searches.items()}
        last = curve.layer(_TOLERANCE)
        for name, router in _ROUTERS.items():
            front = _in_front(curve, last, router)
            if share(front(0.02)) <= budget:
                plans[f"up to the horizon, {name}"] = fitted(share, front, budget)
        found[str(budget)] = {name: plan.to_dict() for name, plan in plans.items()}
    return found


def _in_front(curve: Any, last: int, router: Any) -> Callable[[float], RoutingConfig]:
    """Return the plans without image tokens behind the horizon, by the share of them in front of it."""

    def plan(capacity: float) -> RoutingConfig:
        return curve.plan(_TOLERANCE, capacity=min(capacity, 0.999), after=2, router=router)

    return plan


def table(folder: Path, patches: int) -> dict[str, Any]:
    """Return the table of the rows that were evaluated, as `scripts.doc_tables` writes it.

    Differences are in points, paired by picture.
    """
    answered = by_picture(folder / f"answers-{patches}.jsonl")
    is_searched = (folder / f"plans-{patches}.json").exists()
    evaluated = {name: row for name, row in rows(folder, patches, is_searched).items() if name in answered}
    spent = costs(folder / "model", folder / "questions", evaluated, patches, _ROUNDS)
    dense, _ = loaded(folder / "model")
    dense.to("meta")
    share = ImageShare(dense, _TEXT, patches**2)
    lines = list[list[Any]]()
    for name, row in evaluated.items():
        image = (row.tokens or row.patches or patches) ** 2
        cache = spent[name].cache / spent[DENSE].cache
        line = [name, share(row.language, image), spent[name].prefill, cache]
        for file, sums in answered[name].items():
            line.append(100 * sums[:, 0].sum() / sums[:, 1].sum())
            line.append(None if name == DENSE else ends(gap(sums, answered[DENSE][file])))
        budget = name.rpartition(", ")[2]
        # Comparisons of other models find that these are hard to beat.
        for baseline in _BASELINES:
            other = answered.get(f"{baseline}, {budget}")
            is_compared = other is not None and name != f"{baseline}, {budget}"
            line.append(ends(gap(together(answered[name]), together(other))) if is_compared and other else None)
        lines.append(line)
    titles = ["", "image FLOPs", "prefill, ms", "cache", "naming %", "to dense", "places %", "to dense"]
    difference = "{:+.1f} [{:+.1f}, {:+.1f}]"
    formats = ["{}", "{:.2f}", "{:.0f}", "{:.2f}", *["{:.1f}", difference] * 2, *[difference] * len(_BASELINES)]
    columns = [*titles, *(f"all, to {baseline}" for baseline in _BASELINES)]
    return {"commands": _COMMANDS, "columns": columns, "formats": formats, "rows": lines}


def ends(estimate: Estimate) -> list[float]:
    """Return a difference and the ends of its interval."""
    return [round(value, 2) for value in (estimate.value, estimate.low, estimate.high)]


def together(answers: dict[str, np.ndarray]) -> np.ndarray:
    """Return right answers and questions of all pictures (pictures, 2)."""
    return np.concatenate(list(answers.values()))
