"""Image conversations in LLaVA's format: read from JSON files or webdataset shards, checked before the first step.

A record has an `id`, an `image` (a path, a list of several, or none), and `conversations`: what "human" and "gpt" say
in turn, with `<image>` where each image stands. Every record is checked when a source is opened; images are decoded
when a conversation is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from PIL import Image

from mmod.config import one_of
from mmod.data.build import find_level
from mmod.data.corrupt import CorruptDataError, CorruptReport, Fault, OnCorrupt
from mmod.data.images import IMAGE_EXTENSIONS, decode_image
from mmod.data.question_files import build_questions
from mmod.data.questions import IMAGE, LEVELS
from mmod.data.shards import expand_pattern, group_members, read_at, shard_members

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
EMBEDDED = "questions:"
Protected = Literal["question", "conversation"]
"""Which text is protected in training: all but the answers, or all."""


class Message(NamedTuple):
    """What one side says.

    Attributes:
        role: "system", "user" or "assistant".
        text: Its words, with `<image>` where an image stands.
    """

    role: str
    text: str


class Talk(NamedTuple):
    """One conversation, ready to be encoded.

    Attributes:
        key: Its `id`.
        messages: What is said, from the first question to the last answer.
        images: The decoded images, in the order in which they are spoken of.
        kinds: Kind of each question; empty where the data names none.
    """

    key: str
    messages: tuple[Message, ...]
    images: tuple[Image.Image, ...]
    kinds: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Kind of the last question, or "all" where the data names none."""
        return self.kinds[-1] if self.kinds else "all"

    @property
    def answer(self) -> str:
        """The last answer."""
        return self.messages[-1].text


@dataclass
class ConversationsConfig:
    """Which conversations to read.

    Args:
        train: Conversations to train on: a `.json` or `.jsonl` file in LLaVA's format, webdataset shards by brace range
            or glob (`.tar`), or `questions:LEVEL/SPLIT`, the embedded set, built where it is not there.
        val: Conversations to evaluate on, given alike; their last questions are asked. None for no evaluation.
        images: Folder that the image paths of a JSON file are relative to; by default the one the file lies in.
        root: Folder of the embedded set (`runs/data/cluttered-questions-LEVEL` by default).
        max_length: Longest sequence in tokens, image tokens included; what a conversation says beyond is cut off. None
            for no limit.
        packed: Put the conversations of a training batch into one row instead of padding them to the longest.
        protected: Masked routing learning: text that no routed layer may skip in training. "question" is all text but
            the answers, what the template writes around it included; "conversation" is all text; None lets the router
            choose among the whole sequence. It needs a language model routed with `tokens: all`.
        on_corrupt: "raise" stops at a record or shard with a fault when the source is opened; "skip" counts it and goes
            on without. An image that cannot be decoded later always stops.

    Raises:
        ValueError: If a value is out of range.
    """

    train: str = "questions:default/train"
    val: str | None = "questions:default/val"
    images: str | None = None
    root: str | None = None
    max_length: int | None = None
    packed: bool = False
    protected: Protected | None = None
    on_corrupt: OnCorrupt = "raise"

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length={self.max_length} must be >= 2 or null")
        if self.protected is not None:
            one_of("protected", self.protected, get_args(Protected))
        if self.on_corrupt not in ("raise", "skip"):
            raise ValueError(f"on_corrupt={self.on_corrupt!r} is unknown; valid: 'raise', 'skip'")


def check_record(record: Any, images: int | None = None) -> tuple[Message, ...]:
    """Check a record in LLaVA's format.

    Args:
        record: The JSON value.
        images: How many images it has, where the record itself does not say.

    Returns:
        What is said, by chat templates' names of the roles.

    Raises:
        ValueError: If it has no conversation, an unknown role, roles out of turn, an empty or endless message, or
            another number of `<image>` than of images.

    Example:
        >>> said = [{"from": "human", "value": "<image>\\nWhat?"}, {"from": "gpt", "value": "A cat."}]
        >>> check_record({"id": "1", "image": "1.jpg", "conversations": said})[0].role
        'user'
    """
    if not isinstance(record, Mapping) or not isinstance(record.get("conversations"), list):
        raise ValueError("no list of conversations")
    messages = []
    for place, said in enumerate(record["conversations"]):
        if not isinstance(said, Mapping) or not isinstance(said.get("value"), str):
            raise ValueError(f"message {place} is not of the form {{from, value}}")
        if said.get("from") not in ROLES:
            raise ValueError(f"message {place} is from {said.get('from')!r}; valid: {', '.join(ROLES)}")
        if not said["value"].strip():
            raise ValueError(f"message {place} is empty")
        messages.append(Message(ROLES[said["from"]], said["value"]))
    _check_turns(messages)
    counted = sum(message.text.count(IMAGE) for message in messages)
    expected = len(image_names(record)) if images is None else images
    if counted != expected:
        raise ValueError(f"{counted} {IMAGE} for {expected} images")
    if any(IMAGE in message.text for message in messages if message.role != "user"):
        raise ValueError(f"{IMAGE} outside a question")
    kinds = record.get("kinds", [])
    if kinds and len(kinds) != sum(message.role == "user" for message in messages):
        raise ValueError(f"{len(kinds)} kinds for another number of questions")
    return tuple(messages)


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
    """Return the image paths that a record names.

    Args:
        record: A record in LLaVA's format.

    Raises:
        ValueError: If `image` is neither a path nor a list of paths.
    """
    names = record.get("image") or []
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"`image` must be a path or a list of paths, got {names!r}")
    return names


class Conversations:
    """Checked conversations by number, in any order and from any process.

    Args:
        rows: For each conversation: `key`, `messages`, `kinds`, and `images` as a path or as shard, offset and size.
        report: What was left out.

    Raises:
        ValueError: If there is none.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], report: CorruptReport) -> None:
        lines, counts = [], []
        for row in rows:
            lines.append(json.dumps(row).encode())
            counts.append((len(row["images"]), sum(len(text) for _, text in row["messages"])))
        if not lines:
            raise ValueError("no conversation is left")
        self.report = report
        self.images, self.letters = np.array(counts, np.int64).T
        # One block of bytes, because worker processes share its memory; a list would be copied by reference counts.
        self._ends = np.cumsum([0, *map(len, lines)])
        self._lines = np.frombuffer(b"".join(lines), np.uint8)

    def __len__(self) -> int:
        """Return the number of conversations."""
        return len(self.images)

    def __getitem__(self, index: int) -> Talk:
        """Read one conversation and decode its images.

        Raises:
            CorruptDataError: If an image cannot be decoded; `datasets/convert_conversations.py` finds all such.
        """
        row = self.record(index)
        images = tuple(_open_image(place, row["key"]) for place in row["images"])
        return Talk(row["key"], tuple(Message(*said) for said in row["messages"]), images, tuple(row["kinds"]))

    def record(self, index: int) -> dict[str, Any]:
        """Return one conversation as JSON values, its images not decoded."""
        if not 0 <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        record: dict[str, Any] = json.loads(self._lines[self._ends[index] : self._ends[index + 1]].tobytes())
        return record

    def turns(self) -> Iterator[tuple[str, str, str]]:
        """Yield kind, question without its images, and answer of every turn."""
        for index in range(len(self)):
            row = self.record(index)
            said = [" ".join(text.replace(IMAGE, " ").split()) for role, text in row["messages"] if role != "system"]
            kinds = row["kinds"] or ["all"] * (len(said) // 2)
            yield from zip(kinds, said[::2], said[1::2])


def open_conversations(source: str, config: ConversationsConfig | None = None, progress: bool = False) -> Conversations:
    """Open a source and check every record of it.

    Args:
        source: What `ConversationsConfig.train` may be.
        config: Where images are and what is done with faults.
        progress: Show a progress bar.

    Returns:
        The conversations.

    Raises:
        FileNotFoundError: If a file is not there.
        ValueError: If the source is of no known kind or holds no conversation.
        CorruptDataError: If a record or shard has a fault, unless `config.on_corrupt` is "skip".

    Example:
        >>> import tempfile
        >>> found = open_conversations("questions:tiny/test", ConversationsConfig(root=tempfile.mkdtemp()))
        >>> found[0].kind, found[0].messages[1].role, found[0].images[0].size
        ('count', 'assistant', (32, 32))
    """
    config = config or ConversationsConfig()
    report = CorruptReport(config.on_corrupt)
    if source.startswith(EMBEDDED):
        source = _build_embedded(source, config.root, progress)
    if source.endswith(".tar"):
        rows = _read_shards(source, report, progress)
    elif source.endswith((".json", ".jsonl")):
        rows = _read_file(Path(source), Path(config.images or Path(source).parent), report)
    else:
        raise ValueError(f"{source!r} must end in .json, .jsonl or .tar, or be {EMBEDDED}LEVEL/SPLIT")
    return Conversations(rows, report)


def _build_embedded(source: str, root: str | None, progress: bool) -> str:
    level, _, split = source.removeprefix(EMBEDDED).partition("/")
    config = find_level(LEVELS, level, "cluttered questions")
    if split not in config.conversations:
        raise ValueError(f"{source!r} must be {EMBEDDED}LEVEL/SPLIT with a split of {', '.join(config.conversations)}")
    folder = Path(root or f"runs/data/cluttered-questions-{level}")
    build_questions(folder, config, progress)
    return f"{folder}/{split}-*.tar"


def read_records(path: Path) -> list[Any]:
    """Read the records of a `.json` file, which holds a list, or of a `.jsonl` file, which holds one a line.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If it is not there.
        ValueError: If it is no JSON, or no list.
    """
    if path.suffix == ".jsonl":
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    records = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(records, list):
        raise ValueError(f"{path} holds no list of conversations")
    return records


def _read_file(path: Path, folder: Path, report: CorruptReport) -> Iterator[dict[str, Any]]:
    for place, record in enumerate(read_records(path)):
        try:
            messages = check_record(record)
        except ValueError as error:
            report.add([Fault(str(path), str(place), str(error))])
            continue
        yield _row(record, messages, [str(folder / name) for name in image_names(record)], place)


def _read_shards(pattern: str, report: CorruptReport, progress: bool) -> Iterator[dict[str, Any]]:
    from tqdm import tqdm

    for shard in tqdm(expand_pattern(pattern), "index", unit="shard", disable=not progress):
        ends: list[Fault] = []

        def named(shard: str = shard, ends: list[Fault] = ends) -> Iterator[tuple[str, Any]]:
            for member in shard_members(shard):
                if isinstance(member, Fault):
                    ends.append(member)
                else:
                    yield member.name, member

        with open(shard, "rb") as file:
            for key, members in group_members(named()):
                try:
                    yield _shard_row(shard, key, members, lambda at, size: read_at(file, at, size))
                except ValueError as error:
                    # A last sample cut short by the shard's end is no second fault.
                    report.add([] if ends else [Fault(shard, key, str(error))])
        report.add(ends)


def _shard_row(
    shard: str, key: str, members: Mapping[str, list[Any]], read: Callable[[int, int], bytes]
) -> dict[str, Any]:
    """Make the row of a sample: its `.json`, and its images by name in order of their extensions' numbers."""
    texts = members.get("json", [])
    if len(texts) != 1:
        raise ValueError(f"needs one .json member, has {len(texts)}")
    record = json.loads(read(texts[0].offset_data, texts[0].size))
    images = {name: found for name, found in members.items() if name.rsplit(".", 1)[-1] in IMAGE_EXTENSIONS}
    if any(len(found) != 1 for found in images.values()):
        raise ValueError("two images of one name")
    ordered = sorted(images, key=lambda name: int(name.split(".")[0]) if name.split(".")[0].isdecimal() else 0)
    messages = check_record(record, len(images))
    places = [[shard, images[name][0].offset_data, images[name][0].size] for name in ordered]
    return _row(record, messages, places, key)


def _row(record: Mapping[str, Any], messages: tuple[Message, ...], images: list[Any], place: object) -> dict[str, Any]:
    key = str(record.get("id", place))
    return {"key": key, "messages": messages, "images": images, "kinds": record.get("kinds", [])}


def _open_image(place: str | list[Any], key: str) -> Image.Image:
    name = place if isinstance(place, str) else str(place[0])
    try:
        if isinstance(place, str):
            return decode_image(Path(place).read_bytes(), "RGB")
        with open(name, "rb") as file:
            return decode_image(read_at(file, place[1], place[2]), "RGB")
    except (OSError, ValueError) as error:
        raise CorruptDataError(f"{Fault(name, key, str(error))}") from error
