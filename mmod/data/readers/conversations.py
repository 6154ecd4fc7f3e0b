"""Image conversations in LLaVA's format: read from JSON files or webdataset shards, checked before the first step.

When a source is opened, every record is checked and every image file found; images are decoded when a conversation is
read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from PIL import Image

from mmod.data.corrupt import CorruptDataError, CorruptReport, Fault, OnCorrupt
from mmod.data.readers.image_files import ImageFiles, read_image
from mmod.data.readers.images import IMAGE_EXTENSIONS, decode_image
from mmod.data.readers.shards import Members, expand_pattern, read_at, read_samples
from mmod.data.records import IMAGE, Message, check_record, image_names, read_records
from mmod.data.synthetic.question_files import QUESTIONS
from mmod.io.files import parse_json
from mmod.io.progress import progress_bar
from mmod.values import check_fields

Protected = Literal["question", "conversation"]
"""Which text is protected in training: all but the answers, or all."""


class ChatSample(NamedTuple):
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
    """Config of a data set of conversations.

    Args:
        train: Conversations to train on: a `.json` or `.jsonl` file in LLaVA's format, webdataset shards by brace range
            or glob (`.tar`), or `questions:DIFFICULTY/SPLIT`, the embedded set, built where it is not there.
        val: Conversations to evaluate on, given alike; their last questions are asked. None for no evaluation.
        images: Folder that the image paths of a JSON file are relative to; by default the one the file lies in.
        follow_links: Also read image files outside of that folder to which symbolic links in it lead.
        root: Folder of the embedded set (`runs/data/cluttered-questions-DIFFICULTY` by default).
        max_length: Longest sequence in tokens, image tokens included; what a conversation says beyond is cut off. None
            for no limit.
        packed: Put the conversations of a training batch into one row instead of padding them to the longest.
        protected: Masked routing learning: text that no routed layer may skip in training. "question" is all text but
            the answers, what the template writes around it included; "conversation" is all text; None lets the router
            choose among the whole sequence. It needs a language model routed with `tokens: all`.
        on_corrupt: "raise" stops at a record or shard with a fault, or a missing image file, when the source is opened;
            "skip" counts it and goes on without. An image that cannot be decoded later always stops.

    Raises:
        ValueError: If a value is out of range.
    """

    train: str = "questions:default/train"
    val: str | None = "questions:default/val"
    images: str | None = None
    follow_links: bool = False
    root: str | None = None
    max_length: int | None = None
    packed: bool = False
    protected: Protected | None = None
    on_corrupt: OnCorrupt = "raise"

    def __post_init__(self) -> None:
        check_fields(self, "data", max_length="[2, inf)")


class ChatDataset:
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

    def __getitem__(self, index: int) -> ChatSample:
        """Read one conversation and decode its images.

        Raises:
            CorruptDataError: If an image cannot be decoded; `scripts/convert_conversations.py` finds all such.
        """
        row = self.record(index)
        images = tuple(_open_image(place, row["key"]) for place in row["images"])
        return ChatSample(row["key"], tuple(Message(*said) for said in row["messages"]), images, tuple(row["kinds"]))

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


def open_conversations(source: str, config: ConversationsConfig | None = None, progress: bool = False) -> ChatDataset:
    """Open a source, check every record of it and find every image file.

    Args:
        source: What `ConversationsConfig.train` may be.
        config: Where images are and what is done with faults.
        progress: Show a progress bar.

    Returns:
        The conversations.

    Raises:
        FileNotFoundError: If a file is not there.
        ValueError: If the source is of no known kind or holds no conversation.
        CorruptDataError: If a record or shard has a fault, or an image file is missing, unless `config.on_corrupt` is
            "skip".

    Example:
        >>> import tempfile
        >>> found = open_conversations("questions:tiny/test", ConversationsConfig(root=tempfile.mkdtemp()))
        >>> found[0].kind, found[0].messages[1].role, found[0].images[0].size
        ('count', 'assistant', (32, 32))
    """
    config = config or ConversationsConfig()
    report = CorruptReport(config.on_corrupt)
    if source.startswith("questions:"):
        source = QUESTIONS.locate(source, config.root, progress)
    if source.endswith(".tar"):
        rows = _read_shards(source, report, progress)
    elif source.endswith((".json", ".jsonl")):
        files = ImageFiles(config.images or Path(source).parent, config.follow_links)
        rows = _read_file(Path(source), files, report, progress)
    else:
        raise ValueError(f"{source!r} must end in .json, .jsonl or .tar, or be questions:DIFFICULTY/SPLIT")
    return ChatDataset(rows, report)


def _read_file(path: Path, files: ImageFiles, report: CorruptReport, progress: bool) -> Iterator[dict[str, Any]]:
    for place, record in enumerate(progress_bar(read_records(path), desc="check", unit="record", shown=progress)):
        try:
            messages = check_record(record)
            images = [files.locate(name) for name in image_names(record)]
        except ValueError as error:
            report.add([Fault(str(path), str(place), str(error))])
            continue
        yield _row(record, messages, images, place)


def _read_shards(pattern: str, report: CorruptReport, progress: bool) -> Iterator[dict[str, Any]]:
    for shard in progress_bar(expand_pattern(pattern), desc="index", unit="shard", shown=progress):
        with open(shard, "rb") as file:
            for row in read_samples(shard, partial(_shard_row, file)):
                if isinstance(row, Fault):
                    report.add([row])
                else:
                    yield row


def _shard_row(file: BinaryIO, key: str, members: Members) -> dict[str, Any]:
    """Make the row of a sample: its `.json`, and its images by name in order of their extensions' numbers."""
    texts = members.get("json", [])
    if len(texts) != 1:
        raise ValueError(f"needs one .json member, has {len(texts)}")
    text = read_at(file, texts[0].offset_data, texts[0].size)
    record = parse_json(text, "the .json member")
    images = {name: found for name, found in members.items() if name.rsplit(".", 1)[-1] in IMAGE_EXTENSIONS}
    if any(len(found) != 1 for found in images.values()):
        raise ValueError("two images of one name")
    ordered = sorted(images, key=lambda name: int(name.split(".")[0]) if name.split(".")[0].isdecimal() else 0)
    messages = check_record(record, len(images))
    places = [[file.name, images[name][0].offset_data, images[name][0].size] for name in ordered]
    return _row(record, messages, places, key)


def _row(record: Mapping[str, Any], messages: tuple[Message, ...], images: list[Any], place: object) -> dict[str, Any]:
    key = str(record.get("id", place))
    return {"key": key, "messages": messages, "images": images, "kinds": record.get("kinds") or []}


def _open_image(place: str | list[Any], key: str) -> Image.Image:
    name = place if isinstance(place, str) else str(place[0])
    try:
        if isinstance(place, str):
            return decode_image(read_image(place), "RGB")
        with open(name, "rb") as file:
            return decode_image(read_at(file, place[1], place[2]), "RGB")
    except (OSError, ValueError) as error:
        raise CorruptDataError(f"{Fault(name, key, str(error))}") from error
