"""What advice says of its samples and candidates besides the figures: a sentence or two for each."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from mmod.analysis.table import DENSE, Table
from mmod.analysis.timing import ratios
from mmod.methods.resolve import resolve_routing
from mmod.planning.candidate import Candidate
from mmod.planning.choice import NOISE, reaches
from mmod.planning.early import BATCH
from mmod.planning.entrants import Entrant
from mmod.planning.untrained import BEFORE_BLOCK


def untrained(run: str | None) -> str:
    """Say that nothing was trained, and how to train what was tried where a study can make it.

    Args:
        run: The run folder of the dense model; None where no study can make the candidates.
    """
    if run is None:
        return "Nothing was trained here: fine-tuned models may lose less, and rank differently."
    command = f"mmod tradeoff my-model --dense {shlex.quote(run)} --tune true"
    return f"Nothing was trained here: `{command}` fine-tunes the same candidates, after which another may lose least."


def only_timed(table: Table, speed: float) -> list[str]:
    """Say which candidates a wanted speed leaves out once they are timed, a sentence or two for each reason."""
    times = table.times[BATCH]
    near: list[str] = []
    slow: list[str] = []
    smaller: list[str] = []
    for name, ms in times.items():
        if name in table.runs:
            continue
        spread = ratios(times[DENSE], ms)
        shown = f"{name} ({spread.shown.median:.2f})"
        if reaches(spread.shown.median, speed):
            smaller.append(shown)
        elif reaches(NOISE * spread.shown.median, speed):
            near.append(shown)
        else:
            slow.append(shown)
    sentences = []
    if near:
        sentences.append(
            f"Just below the wanted speed: {', '.join(near)}. Ask for a slightly lower one to have these evaluated."
        )
    if slow:
        sentences.append(f"Only timed, too slow: {', '.join(slow)}.")
    if smaller:
        sentences.append(f"Only timed, as a larger one of its kind is fast enough: {', '.join(smaller)}.")
    return sentences


def attending_twice(entrants: Mapping[str, Entrant]) -> str:
    """Say which candidates compute attention twice, why, and what else to do: a sentence or two, or none."""
    twice = [name for name, one in entrants.items() if one.attends_twice]
    if not twice:
        return ""
    told = (
        f"These compute attention twice, so that they save less: {', '.join(twice)}. The model's blocks compute it in "
        "their own forward: give it a module of its own"
    )
    if any((one.candidate.routing or {}).get("skipped") == BEFORE_BLOCK for one in entrants.values()):
        return f"{told}. `gradual` merges before the block here, which needs no second attention."
    return f'{told}, or merge before the block, as `mmod.preset("gradual", skipped={{"before": "block"}})` does.'


def drawn_at_random(candidates: Iterable[Candidate], depth: int) -> str:
    """Say which candidates have routers that nobody has trained: a sentence or none."""
    untrained = []
    for candidate in candidates:
        routing = candidate.routing
        if not routing:
            continue
        if "preset" in routing:
            routing = {"depth": depth, **routing}
        if resolve_routing(routing).router.learns:
            untrained.append(candidate.name)
    if not untrained:
        return ""
    return f"Routers that must be trained chose with random weights here: {', '.join(untrained)}."


def as_they_are(models: Iterable[str]) -> str:
    """Say which models are the user's, who alone knows how they were trained: a sentence or none."""
    names = ", ".join(models)
    return names and f"Compared as they are: {names}. If they are fine-tuned, so must be the dense model."
