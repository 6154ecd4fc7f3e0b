"""The embedded questions as files: webdataset shards, or JSON in LLaVA's format beside its images."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from itertools import starmap
from pathlib import Path
from typing import Any

from mmod.data.synthetic.build import ShardSet, build_shards
from mmod.data.synthetic.digits import SPLITS, encode_png
from mmod.data.synthetic.questions import IMAGE, LEVELS, Conversation, QuestionsConfig, compose_conversations

# Raise this whenever the same parameters would give other bytes: an older build is then refused, not mixed.
FORMAT = 2


def build_questions(root: str | Path, config: QuestionsConfig | None = None, progress: bool = False) -> dict[str, Any]:
    """Write the shards of a build, or find them already written; see `mmod.data.synthetic.build.build_shards`.

    Shards hold `KEY.json`, a conversation in LLaVA's format with the kind of each question under `kinds`, and its
    images as `KEY.0.png`, `KEY.1.png`.

    Args:
        root: Folder of the build. It must not exist, be empty, or hold a build with the same parameters.
        config: Parameters; `LEVELS["default"]` when not given.
        progress: Show a progress bar.

    Returns:
        The manifest: `format`, `parameters` and, for each shard, its `samples` and `sha256`.

    Raises:
        FileExistsError: If `root` holds another build or files that are no build.
        ValueError: If `root` holds the right build but a shard of it is damaged.

    Example:
        >>> import tempfile
        >>> manifest = build_questions(tempfile.mkdtemp(), LEVELS["tiny"])
        >>> sorted(manifest["shards"])[:2]
        ['test-000000.tar', 'train-000000.tar']
    """
    config = config or LEVELS["default"]

    def compose(split: str) -> Iterator[dict[str, Any]]:
        return starmap(_members, enumerate(compose_conversations(config, split)))

    counts = {split: config.conversations[split] for split in SPLITS}
    wanted = ShardSet("cluttered questions", FORMAT, asdict(config), counts, config.shard_size, 6, compose)
    return build_shards(root, wanted, progress)


def _members(index: int, talk: Conversation) -> dict[str, Any]:
    key = f"{index:06d}"
    images = {f"{number}.png": encode_png(scene.image) for number, scene in enumerate(talk.scenes)}
    names = [f"{key}.{name}" for name in images]
    return {"__key__": key, "json": json.dumps(to_record(key, talk, names)).encode(), **images}


def to_record(key: str, talk: Conversation, images: list[str]) -> dict[str, Any]:
    """Write a conversation in LLaVA's format.

    Args:
        key: Its `id`.
        talk: The conversation.
        images: File name of each of its images.

    Returns:
        JSON values: `id`, `image` (a name, or a list of several; absent without images), `conversations`, and `kinds`.

    Example:
        >>> talk = next(compose_conversations(LEVELS["tiny"], "test"))
        >>> to_record("7", talk, ["7.png"])["conversations"][1]["from"]
        'gpt'
    """
    record: dict[str, Any] = {"id": key, "kinds": [turn.kind for turn in talk.turns]}
    if images:
        record["image"] = images[0] if len(images) == 1 else images
    said: list[dict[str, str]] = []
    for number, turn in enumerate(talk.turns):
        prefix = f"{IMAGE}\n" * len(images) if number == 0 else ""
        said += [{"from": "human", "value": prefix + turn.question}, {"from": "gpt", "value": turn.answer}]
    record["conversations"] = said
    return record


def export_questions(root: str | Path, config: QuestionsConfig | None = None, progress: bool = False) -> dict[str, Any]:
    """Write a build as LLaVA's own files: `SPLIT.json` and a folder `images`.

    Args:
        root: Folder to make; it must not exist or be empty.
        config: Parameters; `LEVELS["default"]` when not given.
        progress: Show a progress bar.

    Returns:
        `files`: name of each JSON file to its `samples` and `sha256`.

    Raises:
        FileExistsError: If `root` holds anything.
    """
    from tqdm import tqdm

    config, root = config or LEVELS["default"], Path(root)
    if root.exists() and any(root.iterdir()):
        raise FileExistsError(f"{root} is not empty; choose another folder")
    partial = root.parent / f".{root.name}.partial-{os.getpid()}"
    (partial / "images").mkdir(parents=True)
    files = {}
    try:
        for split, count in config.conversations.items():
            records = []
            talks = compose_conversations(config, split)
            for index, talk in enumerate(tqdm(talks, split, count, disable=not progress)):
                names = [f"images/{split}-{index:06d}.{number}.png" for number in range(len(talk.scenes))]
                for name, scene in zip(names, talk.scenes):
                    (partial / name).write_bytes(encode_png(scene.image))
                records.append(to_record(f"{split}-{index:06d}", talk, names))
            text = json.dumps(records, indent=1) + "\n"
            (partial / f"{split}.json").write_text(text)
            files[f"{split}.json"] = {"samples": len(records), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        os.replace(partial, root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {"files": files}
