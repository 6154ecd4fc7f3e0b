"""Conversations in LLaVA's JSON format: an `id`, an `image` (none, a path or several) and `conversations`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mmod.io.files import DuplicateKeyError, check_regular, parse_json
from mmod.values import brief

IMAGE = "<image>"
"""Placeholder of an image in a text."""
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class Message(NamedTuple):
    """One message of a conversation: "system", "user" or "assistant", and a text with `<image>` placeholders."""

    role: str
    text: str


@dataclass(frozen=True)
class BrokenLine:
    """A line of a `.jsonl` file that is no JSON, or a record with a duplicate key."""

    reason: str


def check_record(record: Any, images: int | None = None) -> tuple[Message, ...]:
    """Check a record and return its messages, with the role names of chat templates.

    Args:
        images: Number of images; None reads it from the record.
    """
    if isinstance(record, BrokenLine):
        raise ValueError(record.reason)
    if not isinstance(record, Mapping) or not isinstance(record.get("conversations"), list):
        raise ValueError("no list of conversations")
    messages = [_check_message(place, said) for place, said in enumerate(record["conversations"])]
    _check_turns(messages)
    counted = sum(message.text.count(IMAGE) for message in messages)
    expected = len(image_names(record)) if images is None else images
    if counted != expected:
        raise ValueError(f"{counted} {IMAGE} for {expected} images")
    if any(IMAGE in message.text for message in messages if message.role != "user"):
        raise ValueError(f"{IMAGE} outside a question")
    kinds = record.get("kinds") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"`kinds` must be a list of strings, got {brief(kinds)}")
    if kinds and len(kinds) != sum(message.role == "user" for message in messages):
        raise ValueError(f"`kinds` has {len(kinds)} entries, which must be one per question")
    return tuple(messages)


def _check_message(place: int, said: Any) -> Message:
    if not isinstance(said, Mapping) or not isinstance(said.get("value"), str):
        raise ValueError(f"message {place} is not of the form {{from, value}}")
    if not isinstance(said.get("from"), str) or said["from"] not in ROLES:
        raise ValueError(f"message {place} is from {brief(said.get('from'))}; valid: {', '.join(ROLES)}")
    if not said["value"].strip():
        raise ValueError(f"message {place} is empty")
    try:
        said["value"].encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"message {place} has no form in UTF-8: {error}") from error
    return Message(ROLES[said["from"]], said["value"])


def _check_turns(messages: list[Message]) -> None:
    spoken = [message.role for message in messages if message.role != "system"]
    if not spoken:
        raise ValueError("nothing is said")
    if any(message.role == "system" for message in messages[1:]):
        raise ValueError("a system message that is not the first")
    for place, role in enumerate(spoken):
        if role != ("user", "assistant")[place % 2]:
            raise ValueError(f"turn {place} is the {role}'s: a question must come first and an answer after each")
    if spoken[-1] != "assistant":
        raise ValueError("the last question has no answer")


def image_names(record: Mapping[str, Any]) -> list[str]:
    """Return the image paths of a record; raise a ValueError if `image` holds anything else."""
    names = record.get("image")
    if names is None or isinstance(names, str):
        names = [names] if names else []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"`image` must be a path or a list of paths, got {brief(names)}")
    return names


def read_records(path: Path) -> list[Any]:
    """Read a `.json` file with a list of records, or a `.jsonl` file; a line that is no JSON becomes a `BrokenLine`."""
    check_regular(path)
    if path.suffix == ".jsonl":
        with open(path, "rb") as file:
            return [_parse(line, f"line {number}") for number, line in enumerate(file, 1) if line.strip()]
    content = path.read_bytes()
    try:
        records = parse_json(content, str(path))
    except DuplicateKeyError:
        records = parse_json(content, str(path), unique_keys=False)
        if isinstance(records, list):
            records = [_parse(text, "the record") for text in _split(content.decode(json.detect_encoding(content)))]
    if not isinstance(records, list):
        raise ValueError(f"{path} holds no list of conversations")
    return records


def _split(text: str) -> Iterator[str]:
    """Yield the text of each value of a JSON list."""
    decoder, gap = json.JSONDecoder(), re.compile(r"[\s,]*")
    end = text.index("[") + 1
    while text[start := gap.match(text, end).end()] != "]":  # type: ignore[union-attr]
        end = decoder.raw_decode(text, start)[1]
        yield text[start:end]


def _parse(text: str | bytes, name: str) -> Any:
    try:
        return parse_json(text, name)
    except ValueError as error:
        return BrokenLine(str(error))
