"""The embedded questions as files: webdataset shards, or JSON in LLaVA's format beside its images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmod.data.records import IMAGE
from mmod.data.synthetic.build import SyntheticSet
from mmod.data.synthetic.handwriting import SPLITS, encode_png
from mmod.data.synthetic.questions import DIFFICULTIES, QuestionsConfig, SyntheticChat, compose_chats
from mmod.io.files import replacing
from mmod.io.progress import progress_bar


def to_record(key: str, chat: SyntheticChat, images: list[str]) -> dict[str, Any]:
    """Write a conversation in LLaVA's format.

    Args:
        key: Its `id`.
        chat: The conversation.
        images: File name of each of its images.

    Returns:
        JSON values: `id`, `image` (a name, or a list of several; absent without images), `conversations`, and `kinds`.

    Example:
        >>> chat = next(compose_chats(DIFFICULTIES["tiny"], "test"))
        >>> to_record("7", chat, ["7.png"])["conversations"][1]["from"]
        'gpt'
    """
    record: dict[str, Any] = {"id": key, "kinds": [turn.kind for turn in chat.turns]}
    if images:
        record["image"] = images[0] if len(images) == 1 else images
    said: list[dict[str, str]] = []
    for number, turn in enumerate(chat.turns):
        prefix = f"{IMAGE}\n" * len(images) if number == 0 else ""
        said += [{"from": "human", "value": prefix + turn.question}, {"from": "gpt", "value": turn.answer}]
    record["conversations"] = said
    return record


def _samples(config: QuestionsConfig, split: str) -> Iterator[dict[str, Any]]:
    for index, chat in enumerate(compose_chats(config, split)):
        key = f"{index:06d}"
        images = {f"{number}.png": encode_png(scene.image) for number, scene in enumerate(chat.scenes)}
        names = [f"{key}.{name}" for name in images]
        yield {"__key__": key, "json": json.dumps(to_record(key, chat, names)).encode(), **images}


QUESTIONS = SyntheticSet("questions", "cluttered questions", 2, DIFFICULTIES, _samples, "conversations")
"""The set: shards of `KEY.json`, a conversation in LLaVA's format with the kind of each question under `kinds`, and its
images as `KEY.0.png`, `KEY.1.png`."""


def export_questions(
    root: str | Path, config: QuestionsConfig | str = "default", progress: bool = False
) -> dict[str, dict[str, Any]]:
    """Write a build as LLaVA's own files: `SPLIT.json` and a folder `images`.

    Args:
        root: Folder to make; it must not exist or be empty.
        config: Parameters, or the name of a difficulty.
        progress: Show a progress bar.

    Returns:
        Name of each JSON file to its `samples` and `sha256`.

    Raises:
        FileExistsError: If `root` holds anything.
    """
    config = QUESTIONS.config(config) if isinstance(config, str) else config
    files = {}
    # Not durable: there are too many small files to wait for each.
    with replacing(root, shared=True, durable=False) as partial:
        (partial / "images").mkdir(parents=True)
        for split in SPLITS:
            records = []
            chats = compose_chats(config, split)
            for index, chat in enumerate(
                progress_bar(chats, desc=split, total=config.conversations[split], shown=progress)
            ):
                names = [f"images/{split}-{index:06d}.{number}.png" for number in range(len(chat.scenes))]
                for name, scene in zip(names, chat.scenes):
                    (partial / name).write_bytes(encode_png(scene.image))
                records.append(to_record(f"{split}-{index:06d}", chat, names))
            text = json.dumps(records, indent=1) + "\n"
            (partial / f"{split}.json").write_text(text)
            files[f"{split}.json"] = {"samples": len(records), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return files
