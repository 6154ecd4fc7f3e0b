"""What is asked of a picture, in LLaVA's format, and what the picture shows where."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PICTURES = "pictures"
"""Folder of the pictures in that of the questions."""
_TRAINING = "train"
_THINGS = "things"


@dataclass(frozen=True)
class Question:
    """A question of a kind, with its short answer."""

    kind: str
    text: str
    answer: str


@dataclass(frozen=True)
class Thing:
    """What a picture shows in a square of it: its left upper corner and side, as shares of the picture's side."""

    file: str
    name: str
    corner: tuple[float, float]
    side: float


def conversation(file: str, questions: Sequence[Question]) -> dict[str, Any]:
    """Return a conversation about one picture, each of whose questions is to be answered by itself."""
    turns = list[dict[str, str]]()
    for number, question in enumerate(questions):
        # The template writes the picture in front of the first question.
        turns.append({"from": "human", "value": question.text if number else f"<image>{question.text}"})
        turns.append({"from": "gpt", "value": question.answer})
    kinds = [question.kind for question in questions]
    return {"id": Path(file).stem, "image": file, "conversations": turns, "kinds": kinds}


def write(
    target: Path,
    training: Sequence[dict[str, Any]],
    things: Sequence[Thing],
    held_out: Mapping[str, Sequence[dict[str, Any]]],
) -> None:
    """Write conversations and what the training pictures show.

    Args:
        target: Folder of the questions, which holds the pictures.
        training: Conversations of training.
        things: What each training picture shows.
        held_out: Conversations of one question, by name of the file.
    """
    for name, chats in {_TRAINING: training, **held_out}.items():
        (target / f"{name}.json").write_text(json.dumps(chats, indent=1))
    (target / f"{_THINGS}.json").write_text(json.dumps([dataclasses.asdict(thing) for thing in things]))


def things_in(folder: Path) -> list[Thing]:
    """Return what the training pictures show."""
    return [Thing(**fields) for fields in json.loads((folder / f"{_THINGS}.json").read_text())]


def held_out_in(folder: Path) -> list[str]:
    """Return the names of the files whose questions are evaluated."""
    return sorted({file.stem for file in folder.glob("*.json")} - {_TRAINING, _THINGS})
