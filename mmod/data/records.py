"""Conversations in LLaVA's JSON format: an `id`, an `image` (none, a path or several) and `conversations`.

Two other spellings are read: `images` in place of `image`; and `messages` of `role` and `content`, whose content is a
text or a list of parts, `{"type": "text", "text": ...}` and `{"type": "image"}`. What else a record may hold besides
images, such as a video, is refused by its name.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mmod.io.files import DuplicateKeyError, check_file, decode_text, open_rows, parse_json
from mmod.values import brief

IMAGE = "<image>"
"""Placeholder of an image in a text."""
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
MEDIA_EXTENSIONS = frozenset(
    ["mp4", "avi", "mov", "mkv", "webm", "m4v", "mpg", "mpeg", "flv", "wav", "mp3", "flac", "ogg", "opus", "m4a", "aac"]
)
"""Extensions of shard members that hold media which no reader of conversations reads."""
_IMAGES = ("image", "images")
_TURNS = ("conversations", "messages")
_LACKING = "no list of conversations or messages, but {}"
_PART_NAMES = ("image", "path", "url")
# Keys of records that hold media; `image_id` and the like describe an image.
_TURN_ORDER = re.compile("(system )?user assistant( user assistant)*")
_SUFFIX = r"s?(_(path|file|url|name|base64|bytes)s?)?"
_MEDIA = re.compile(rf"(video|audio|sound|speech|point_?cloud){_SUFFIX}", re.IGNORECASE)
_OTHER_IMAGES = re.compile(rf"(image|img|picture|pixel_value){_SUFFIX}", re.IGNORECASE)
# Placeholders that other processors or data sets write for images and other media.
_FOREIGN = re.compile(
    r"<\|(?:image|img|vision|video|audio)\w*\|>|<(?:image_soft_token|start_of_image|end_of_image|IMG_CONTEXT|"
    r"fake_token_around_image|global-img|image_placeholder|ImageHere|im_patch|im_start|im_end|image[ _]?\d+)>"
)
# An answer may write these as HTML; in a question they stand for a file.
_FOREIGN_IN_QUESTIONS = re.compile(r"<(?:video|audio|sound|speech)>")


class Message(NamedTuple):
    """One message of a conversation: "system", "user" or "assistant", and a text with `<image>` placeholders."""

    role: str
    text: str


def plain_answer(text: str) -> str:
    """Return an answer as it is compared with another: without case and spacing.

    Example:
        >>> plain_answer(" A red  Fox")
        'a red fox'
    """
    return " ".join(text.lower().split())


def prior_of(train: Iterable[tuple[str, str, str]], test: Iterable[tuple[str, str, str]]) -> dict[str, float]:
    """Return the accuracy, by question type, of a question's, or else its type's, most frequent training answer.

    Answers are equal but for case and spacing, as in `mmod.training.chat.evaluate`.
    """
    by_question: dict[str, Counter[str]] = defaultdict(Counter)
    by_type: dict[str, Counter[str]] = defaultdict(Counter)
    for question_type, question, answer in train:
        by_question[question][plain_answer(answer)] += 1
        by_type[question_type][plain_answer(answer)] += 1
    right = Counter[str]()
    questions = Counter[str]()
    for question_type, question, answer in test:
        # A question that training has not asked is guessed by its type.
        known = by_question.get(question) or by_type[question_type]
        questions[question_type] += 1
        if not known:
            continue
        ((guess, _),) = known.most_common(1)
        right[question_type] += guess == plain_answer(answer)
    return {question_type: right[question_type] / count for question_type, count in questions.items()}


def check_record(record: object, images: int | None = None) -> tuple[Message, ...]:
    """Check a record and return its messages, with the role names of chat templates and `<image>` for images.

    Args:
        images: Number of images that come with the record; None reads it from the record.

    Example:
        >>> content = [{"type": "image"}, {"type": "text", "text": "which digit ?"}]
        >>> record = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "7"}]}
        >>> check_record(record, images=1)[0]
        Message(role='user', text='<image>which digit ?')
    """
    if isinstance(record, ValueError):
        # What stands in its place in `read_records`.
        raise record
    if not isinstance(record, Mapping):
        raise ValueError(_LACKING.format(brief(record)))
    messages = [_check_message(index, said) for index, said in enumerate(_turns(record))]
    system = record.get("system")
    if system:
        if not isinstance(system, str) or any(message.role == "system" for message in messages):
            raise ValueError(f"`system` must be a text in place of a system message, got {brief(system)}")
        messages.insert(0, _check_message(0, {"role": "system", "content": system}))
    named = len(image_names(record))
    expected = named if images is None else images
    _check_media(record, messages, bool(expected))
    roles = [message.role for message in messages]
    if not _TURN_ORDER.fullmatch(" ".join(roles)):
        got = ", ".join(roles)[:200] or "nothing"
        raise ValueError(
            f"messages must be a system message or none, then a question first and an answer after each, got {got}"
        )
    outside = sum(message.text.count(IMAGE) for message in messages if message.role != "user")
    if outside:
        raise ValueError(f"{outside} {IMAGE} outside a question, as in an answer")
    counted = sum(message.text.count(IMAGE) for message in messages)
    if counted != expected:
        raise ValueError(
            f"{counted} {IMAGE} in the questions for {expected} images: write {IMAGE} once for each, in a question"
        )
    if named not in (0, expected):
        raise ValueError(f"{named} names of images for {expected} images")
    kinds = record.get("kinds") or []
    is_list = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    if not is_list or (kinds and len(kinds) != roles.count("user")):
        raise ValueError(f"`kinds` must be a list of one text for each question, got {brief(kinds)}")
    return tuple(messages)


def _turns(record: Mapping[str, object]) -> list[object]:
    """Return the messages of a record as they are."""
    _, messages = _only(record, _TURNS)
    if not isinstance(messages, list):
        raise ValueError(_LACKING.format(", ".join(map(str, record))))
    return messages


def _only(record: Mapping[str, object], keys: Sequence[str], empty: Sequence[object] = (None,)) -> tuple[str, object]:
    """Return which of some keys a record has, and its value, which is none of the empty ones; "" and None for none."""
    present = [key for key in keys if record.get(key) not in empty]
    if len(present) > 1:
        raise ValueError(f"has both {' and '.join(map(repr, present))}")
    if not present:
        return "", None
    key = present[0]
    return key, record[key]


def _check_message(index: int, said: object) -> Message:
    name = None
    text = None
    if isinstance(said, Mapping):
        if "from" in said:
            name, text = said["from"], said.get("value")
        else:
            name, text = said.get("role"), said.get("content")
    if isinstance(text, list):
        # Newer formats split a message into parts; joined, they are the text of older ones.
        text = "".join(_part_text(index, part) for part in text)
    if not isinstance(said, Mapping) or not isinstance(text, str):
        raise ValueError(f"message {index} is not of the form {{from, value}} or {{role, content}}, both texts")
    if not isinstance(name, str) or name not in ROLES:
        raise ValueError(f"message {index} is from {brief(name)}; valid: {', '.join(ROLES)}")
    filled = [key for key, value in said.items() if value]
    unread = [key for key in filled if key == "tool_calls" or _is_media(key, others=True)]
    if unread:
        raise ValueError(f"message {index} has {unread[0]!r}, which this reader does not read")
    if not text.strip():
        raise ValueError(f"message {index} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"message {index} has no form in UTF-8: {error}") from error
    return Message(ROLES[name], text)


def _part_text(index: int, part: object) -> str:
    """Return the text of a part of a message, `<image>` for an image."""
    fields = part if isinstance(part, Mapping) else {}
    kind = fields.get("type")
    text = fields.get("text")
    if kind == "image":
        return IMAGE
    if kind != "text" or not isinstance(text, str):
        raise ValueError(
            f"message {index} has a part of type {brief(kind)}, which this reader does not read; valid: image, and "
            "text with a text"
        )
    return text


def _is_media(key: object, others: bool) -> bool:
    """Return whether a key holds media; `others` includes other names of images."""
    if not isinstance(key, str):
        return False
    if others and _OTHER_IMAGES.fullmatch(key):
        return True
    return bool(_MEDIA.fullmatch(key))


def _check_media(record: Mapping[str, object], messages: list[Message], has_images: bool) -> None:
    """Raise a ValueError if a record holds anything to see or hear besides images, or another form of placeholder."""
    for key, value in record.items():
        # Beside `image`, the other names describe it.
        is_unread = _is_media(key, others=not has_images) or key == "tools"
        if value and is_unread and key not in _IMAGES:
            raise ValueError(f"has {key!r}, which this reader does not read; images are named by `image` or `images`")
    for index, message in enumerate(messages):
        found = _FOREIGN.search(message.text)
        if found is None and message.role == "user":
            found = _FOREIGN_IN_QUESTIONS.search(message.text)
        if found is not None:
            raise ValueError(f"message {index} holds {found[0]!r}, which this reader does not read; write {IMAGE}")


def image_names(record: Mapping[str, object]) -> list[str]:
    """Return the image paths of a record, in order; raise a ValueError if `image` or `images` holds anything else."""
    key, value = _only(record, _IMAGES, empty=(None, "", []))
    names = value
    if not key:
        names = []
    elif isinstance(value, str):
        names = [value]
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"`{key}` must be a path or a list of paths, got {brief(value)}")
    inside = [_part_name(part) for part in chain.from_iterable(map(_image_parts, _turns(record)))]
    paths = [name for name in inside if name is not None]
    # Named in messages or by the record, and then all of them.
    if paths and (names or len(paths) < len(inside)):
        raise ValueError("some images are named in their messages and others are not")
    return paths or names


def _image_parts(said: object) -> list[Mapping[str, object]]:
    if not isinstance(said, Mapping):
        return []
    content = said.get("content")
    if not isinstance(content, list):
        return []
    return [part for part in content if isinstance(part, Mapping) and part.get("type") == "image"]


def _part_name(part: Mapping[str, object]) -> str | None:
    values = [part[key] for key in _PART_NAMES if part.get(key) is not None]
    if not values:
        return None
    if len(values) > 1 or not isinstance(values[0], str) or not values[0]:
        raise ValueError(f"an image in a message must be named by one path, got {brief(dict(part))}")
    return values[0]


def read_records(path: Path) -> list[Any]:
    """Read a `.json` file with a list of records, or a `.jsonl` file; a ValueError for an empty one.

    The ValueError of a line that is no JSON, and of a record with a duplicate key, stands in its place.
    """
    if path.suffix == ".jsonl":
        with open_rows(path) as file:
            lines = [(f"line {number}", line) for number, line in enumerate(file, 1) if line.strip()]
        records = [_parse(line.encode(errors="surrogateescape"), name) for name, line in lines]
    else:
        records = _read_list(path)
    if not records:
        raise ValueError(f"{str(path)!r} holds no record")
    return records


def _read_list(path: Path) -> list[object]:
    check_file(path)
    content = decode_text(path.read_bytes(), str(path))
    try:
        records = parse_json(content, str(path))
    # Only now by record: one broken record must not cost the whole file, and parsing twice costs time.
    except DuplicateKeyError:
        records = parse_json(content, str(path), unique_keys=False)
        if isinstance(records, list):
            records = [_parse(text, "the record") for text in _split(content)]
    if not isinstance(records, list):
        raise ValueError(f"{path} holds no list of conversations")
    return records


def _split(text: str) -> Iterator[str]:
    """Yield the text of each value of a JSON list."""
    decoder = json.JSONDecoder()
    gap = re.compile(r"[\s,]*")
    end = text.index("[") + 1
    # `raw_decode` returns where a value ends, behind which the next begins.
    while text[start := gap.match(text, end).end()] != "]":  # type: ignore[union-attr]
        end = decoder.raw_decode(text, start)[1]
        yield text[start:end]


def _parse(text: str | bytes, name: str) -> object:
    try:
        return parse_json(text, name)
    except ValueError as error:
        return error
