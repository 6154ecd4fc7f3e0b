"""The embedded questions as files: webdataset shards, or LLaVA's JSON format with image files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mmod.data.records import IMAGE
from mmod.data.synthetic.build import SyntheticSet
from mmod.data.synthetic.handwriting import SPLITS, encode_png
from mmod.data.synthetic.questions import DIFFICULTIES, QuestionsConfig, SyntheticChat, compose_chats
from mmod.io.files import replacing
from mmod.io.progress import progress_bar


def to_record(key: str, chat: SyntheticChat, images: list[str]) -> dict[str, Any]:
    """Return a conversation about these image files as a LLaVA record, with the question types as `kinds`."""
    record: dict[str, Any] = {"id": key, "kinds": [turn.question_type for turn in chat.turns]}
    if images:
        record["image"] = images[0] if len(images) == 1 else images
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(chat.turns):
        prefix = f"{IMAGE}\n" * len(images) if number == 0 else ""
        messages += [{"from": "human", "value": prefix + turn.question}, {"from": "gpt", "value": turn.answer}]
    record["conversations"] = messages
    return record


def _encode(key: str, chat: SyntheticChat) -> dict[str, bytes]:
    images = {f"{number}.png": encode_png(scene.image) for number, scene in enumerate(chat.scenes)}
    names = [f"{key}.{name}" for name in images]
    return {"json": json.dumps(to_record(key, chat, names)).encode(), **images}


QUESTIONS = SyntheticSet("questions", "cluttered questions", 2, DIFFICULTIES, compose_chats, _encode, "conversations")
"""The set: shards of `KEY.json`, a conversation in LLaVA's format with the question types under `kinds`, and its
images as `KEY.0.png`, `KEY.1.png`."""


def export_questions(
    root: str | Path, config: QuestionsConfig | str = "default", progress: bool = False
) -> dict[str, dict[str, Any]]:
    """Write LLaVA's files, `SPLIT.json` and a folder `images`; return `samples` and `sha256` of each JSON file.

    Raises:
        FileExistsError: `root` is not empty.
    """
    config = QUESTIONS.config(config) if isinstance(config, str) else config
    files = {}
    # Not durable: flushing many small files one by one would take minutes.
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
