"""Image conversations in LLaVA's format, from JSON files or webdataset shards; images are decoded when read."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal, NamedTuple, TypedDict

import numpy as np
from PIL import Image

from mmod.data.config import SourceConfig
from mmod.data.corrupt import CorruptDataError, CorruptReport, Fault
from mmod.data.embedded import locate
from mmod.data.readers.images import IMAGE_EXTENSIONS, ImageFiles, decode_image, read_image
from mmod.data.readers.shard_files import ShardFiles, read_at
from mmod.data.readers.shards import Members, expand_pattern, read_samples
from mmod.data.records import IMAGE, MEDIA_EXTENSIONS, Message, check_record, image_names, read_records
from mmod.io.files import parse_json
from mmod.io.progress import progress_bar
from mmod.io.remote import RemoteError
from mmod.names import prefixed

Protected = Literal["question", "conversation"]
"""Text that is protected in training: all but the answers, or all."""
StoredImage = str | tuple[str, int, int]
"""Where the picture of a conversation is: its path, or its shard, its offset there and its size in bytes."""


class StoredChat(TypedDict):
    """One conversation as JSON values, before its images are decoded; see `ChatSample`."""

    key: str
    messages: Sequence[tuple[str, str]]
    images: Sequence[StoredImage]
    kinds: Sequence[str]


class ChatSample(NamedTuple):
    """One conversation, ready to be encoded.

    Args:
        key: Name of the conversation in its file.
        messages: Its turns, in order.
        images: Its pictures, in the order of their placeholders.
        kinds: Type of each question; empty if the data names none.
        faults: Faults of the unreadable conversations that this one was drawn to replace.
    """

    key: str
    messages: tuple[Message, ...]
    images: tuple[Image.Image, ...]
    kinds: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def question_type(self) -> str:
        """Type of the last question; "all" if the data names none."""
        return self.kinds[-1] if self.kinds else "all"

    @property
    def answer(self) -> str:
        """The last answer."""
        return self.messages[-1].text


@dataclass
class ConversationsConfig(SourceConfig):
    """Config of a data set of conversations, all of which are checked, and remote shards copied, before training.

    An image that cannot be decoded later is a fault, too: training replaces its conversation by the next readable one
    with an image, evaluation leaves it out.

    Args:
        train: Training conversations: a `.json` or `.jsonl` file in LLaVA's format, or with `messages` of
            `role` and `content`; webdataset shards (`.tar`) by brace range or glob; or `questions:DIFFICULTY/SPLIT`,
            the embedded set, built on demand.
        val: Evaluation conversations, in the same form; the model answers the last question. None for no evaluation.
        images: Folder that image paths of a JSON file are relative to; by default the folder of the file.
        follow_links: Also read images outside that folder that symbolic links in it point to.
        root: Folder of the embedded set (default `runs/data/cluttered-questions-DIFFICULTY`), or of copies of remote
            shards.
        max_length: Maximum sequence length in tokens, image tokens included; longer conversations are truncated, and
            those that would lose an image or all answers are faults. None for no limit.
        packed: Pack the conversations of a training batch into one row, instead of padding them.
        protected: Masked routing learning: text that no routed layer skips in training. "question" is all text but the
            answers, including the template's; "conversation" is all text; None protects nothing. Needs a language model
            routed with `tokens: all`.
    """

    train: str = "questions:default/train"
    val: str | None = None
    images: str | None = None
    follow_links: bool = False
    root: str | None = None
    max_length: Annotated[int | None, "[2, inf)"] = None
    packed: bool = False
    protected: Protected | None = None
    # How a user sets two of them, for messages.
    skip_option: ClassVar[str] = CorruptReport.skip
    images_option: ClassVar[str] = "`images`"


class ChatDataset:
    """Checked conversations, with random access from any process.

    Args:
        rows: The conversations.
    """

    def __init__(self, rows: Iterable[StoredChat], report: CorruptReport) -> None:
        lines = []
        counts = []
        for row in rows:
            lines.append(json.dumps(row).encode())
            letters = sum(len(text) for _, text in row["messages"])
            counts.append((len(row["images"]), letters))
        if not lines:
            raise ValueError(f"no conversation is left{prefixed('; of the first: ', next(iter(report.faults), None))}")
        self.report = report
        self.images, self.letters = np.array(counts, np.int64).T
        # One array: worker processes share its memory, while reference counting would copy a list to each.
        self._ends = np.cumsum([0, *map(len, lines)])
        self._lines = np.frombuffer(b"".join(lines), np.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> ChatSample:
        """Read one conversation for training; one that cannot be decoded is replaced, see `ConversationsConfig`.

        So all processes have the same number of batches, and as many with images. Whoever reads the batches must count
        the `faults`. Unless `on_corrupt` is "skip", a fault raises.
        """
        faults: list[Fault] = []
        # The next ones in order stand in for it.
        others = ((index + step) % len(self) for step in range(1, len(self)))
        for candidate in (index, *others):
            # A conversation without an image was readable from the start, but would leave a batch without one.
            if faults and not self.images[candidate]:
                continue
            sample = self._decoded(candidate)
            if not isinstance(sample, Fault):
                return sample._replace(faults=tuple(faults))
            if self.report.on_corrupt == "raise":
                raise CorruptDataError(f"{sample} ({self.report.advice})")
            faults.append(sample)
        raise CorruptDataError(f"no conversation with an image can be read; the last: {faults[-1]}")

    def _decoded(self, index: int) -> ChatSample | Fault:
        """Return one conversation, or the fault of the first image that cannot be decoded."""
        row = self.record(index)
        images = []
        for stored in row["images"]:
            image = _open_image(stored, row["key"])
            if isinstance(image, Fault):
                return image
            images.append(image)
        messages = tuple(Message(*message) for message in row["messages"])
        return ChatSample(row["key"], messages, tuple(images), tuple(row["kinds"]))

    def read(self, indices: Iterable[int]) -> list[ChatSample]:
        """Read conversations for an evaluation: those that cannot be read are counted and left out, or raise."""
        samples = []
        for index in indices:
            sample = self._decoded(int(index))
            if isinstance(sample, Fault):
                self.report.add([sample])
            else:
                samples.append(sample)
        return samples

    def record(self, index: int) -> StoredChat:
        """Return one conversation as JSON values, without decoding images."""
        if not 0 <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        line = self._lines[self._ends[index] : self._ends[index + 1]]
        return json.loads(line.tobytes())

    def without(self, indices: Collection[int]) -> ChatDataset:
        """Return a data set without the conversations at some indices; it shares the report of faults."""
        remaining = (self.record(index) for index in range(len(self)) if index not in indices)
        return ChatDataset(remaining, self.report)

    def content(self) -> memoryview:
        """Return all conversations as bytes, with the paths of their images."""
        return self._lines.data

    def turns(self, last: bool = False) -> Iterator[tuple[str, str, str]]:
        """Yield type, question without image placeholders, and answer of every turn, or of each conversation's last."""
        for index in range(len(self)):
            row = self.record(index)
            said = [text for role, text in row["messages"] if role != "system"]
            texts = [" ".join(text.replace(IMAGE, " ").split()) for text in said]
            kinds = row["kinds"] or ["all"] * (len(texts) // 2)
            turns = list(zip(kinds, texts[::2], texts[1::2]))
            if last:
                turns = turns[-1:]
            yield from turns


def open_conversations(source: str, config: ConversationsConfig | None = None, progress: bool = False) -> ChatDataset:
    """Open a source, and check every record and the existence of every image file.

    Example:
        >>> import tempfile
        >>> chats = open_conversations("questions:tiny/test", ConversationsConfig(root=tempfile.mkdtemp()))
        >>> chats[0].question_type, chats[0].messages[1].role, chats[0].images[0].size
        ('count', 'assistant', (32, 32))
    """
    config = config or ConversationsConfig()
    report = CorruptReport(config.on_corrupt, limit=config.max_corrupt, skip=config.skip_option)
    source = locate("questions", source, config.root, progress)
    if source.endswith(".tar"):
        shards = ShardFiles(expand_pattern(source), config.root, report, config.remote)
        rows = _read_shards(shards, report, progress)
    elif source.endswith((".json", ".jsonl")):
        files = ImageFiles(config.images or Path(source).parent, config.follow_links)
        rows = _read_file(Path(source), files, report, progress, config.images_option)
    else:
        raise ValueError(f"{source!r} must end in .json, .jsonl or .tar, or be questions:DIFFICULTY/SPLIT")
    return ChatDataset(rows, report)


def _read_file(
    path: Path, files: ImageFiles, report: CorruptReport, progress: bool, option: str
) -> Iterator[StoredChat]:
    records = read_records(path)
    faults = []
    for number, record in enumerate(progress_bar(records, desc="check", unit="records", shown=progress)):
        try:
            messages = check_record(record)
            images = [files.locate(name) for name in image_names(record)]
        except ValueError as error:
            faults.append(Fault(str(path), str(number), str(error)))
            continue
        yield _row(record, messages, images, number)
    report.add(faults, files.hint([fault.reason for fault in faults], len(records), option))


def _read_shards(files: ShardFiles, report: CorruptReport, progress: bool) -> Iterator[StoredChat]:
    for number in progress_bar(range(len(files.urls)), desc="index", unit="shards", shown=progress):
        try:
            # A copy, because every record is checked.
            shard = files.fetch(number)
        except RemoteError as error:
            report.add([Fault(files.urls[number], "", str(error))])
            continue
        with open(shard, "rb") as file:
            for row in read_samples(file, shard, partial(_shard_row, file)):
                if not isinstance(row, Fault):
                    yield row
                    continue
                report.add([row])


def _shard_row(file: BinaryIO, key: str, members: Members) -> StoredChat:
    """Return the row of a sample: its `.json` member, and its images in order of the numbers in their extensions."""
    texts = members.get("json", [])
    if len(texts) != 1:
        raise ValueError(f"needs one .json member, has {len(texts)}")
    text = read_at(file, texts[0].offset_data, texts[0].size)
    record = parse_json(text, "the .json member")
    unread = [name for name in members if name.rsplit(".", 1)[-1] in MEDIA_EXTENSIONS]
    if unread:
        raise ValueError(f"has a .{unread[0]} member, which this reader does not read")
    images = {}
    for name, entries in members.items():
        if name.rsplit(".", 1)[-1] not in IMAGE_EXTENSIONS:
            continue
        if len(entries) != 1:
            raise ValueError("two images have the same name")
        images[name] = entries[0]
    # By number: "10.png" comes behind "2.png".
    ordered = sorted(images, key=_image_number)
    messages = check_record(record, len(images))
    stored = [(file.name, images[name].offset_data, images[name].size) for name in ordered]
    return _row(record, messages, stored, key)


def _image_number(extension: str) -> int:
    """Return the number in an extension such as "1.png"; 0 without one."""
    number = extension.partition(".")[0]
    if not number.isdecimal():
        return 0
    return int(number)


def _row(
    record: Mapping[str, Any], messages: tuple[Message, ...], images: Sequence[StoredImage], default: object
) -> StoredChat:
    key = str(record.get("id", default))
    return {"key": key, "messages": messages, "images": images, "kinds": record.get("kinds") or []}


def file_of_image(stored: StoredImage) -> str:
    """Return the file of a picture, which may be a shard."""
    return stored if isinstance(stored, str) else stored[0]


def _open_image(stored: StoredImage, key: str) -> Image.Image | Fault:
    name = file_of_image(stored)
    try:
        if isinstance(stored, str):
            return decode_image(read_image(stored), "RGB")
        with open(name, "rb") as file:
            return decode_image(read_at(file, stored[1], stored[2]), "RGB")
    except (OSError, ValueError) as error:
        return Fault(name, key, str(error))
