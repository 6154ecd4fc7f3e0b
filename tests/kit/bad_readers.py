"""Readers of one image, sound or bad, and of a shard that continues badly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mmod.data.config import DataConfig, PairsConfig
from mmod.data.corrupt import CorruptReport
from mmod.data.loader import image_stream, pairs_stream
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from mmod.data.readers.shards import ShardSource
from mmod.data.stream import BatchStream
from tests.kit.bad_files import PNG, SAID, body, tar
from tests.kit.pair_files import transform

UNCHANGED = {"channels": 3, "crop_pct": 1.0, "mean": (0.0,) * 3, "std": (1 / 255,) * 3}
Read = tuple[torch.Tensor, CorruptReport]
"""Images (B, 3, side, side) of values up to 255, and what was left out."""


def lengths(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption)] for caption in captions])


def pixels_of(stream: BatchStream) -> Read:
    return torch.cat([images for images, _ in stream.batches(0)]), stream.report


def read_folder(data: bytes, on_corrupt: Any, side: int = 32) -> Read:
    for label, image in (("a", data), ("b", PNG)):
        Path("val", label).mkdir(parents=True, exist_ok=True)
        Path("val", label, "0.png").write_bytes(image)
    return pixels_of(image_stream(DataConfig("folder", ".", image_size=side, on_corrupt=on_corrupt, **UNCHANGED)))


def read_shard(data: bytes, on_corrupt: Any, side: int = 32) -> Read:
    Path("val-0.tar").write_bytes(tar({"0.png": data, "0.cls": b"0", "1.png": PNG, "1.cls": b"1"}))
    config = DataConfig("shards:{split}-0.tar", image_size=side, on_corrupt=on_corrupt, **UNCHANGED)
    return pixels_of(image_stream(config))


def read_pairs(data: bytes, on_corrupt: Any, side: int = 32) -> Read:
    Path("0.tar").write_bytes(tar({"0.png": data, "0.txt": b"a", "1.png": PNG, "1.txt": b"bb"}))
    config = PairsConfig(val="0.tar", on_corrupt=on_corrupt)
    return pixels_of(pairs_stream(config, lambda image: transform(image.resize((side, side))), lengths))


def read_conversation(data: bytes, on_corrupt: Any, side: int = 32) -> Read:
    Path("0.png").write_bytes(data)
    Path("t.json").write_text(json.dumps([{"image": "0.png", "conversations": SAID}]))
    chats = open_conversations("t.json", ConversationsConfig(on_corrupt=on_corrupt))
    return transform(chats[0].images[0])[None], chats.report


READERS: dict[str, Callable[..., Read]] = {
    "folder": read_folder,
    "shard": read_shard,
    "pairs": read_pairs,
}
BESIDE = {
    "shard": (".cls", b"7"),
    "pairs": (".txt", b"seven"),
    "conversations": (".json", json.dumps({"image": "7.png", "conversations": SAID}).encode()),
}


def read_archive(reader: str, appended: bytes, on_corrupt: Any) -> tuple[int, CorruptReport]:
    """Write a good sample and what follows, and return how many are read."""
    suffix, beside = BESIDE[reader]
    return read_shards(reader, body({"7.png": PNG, f"7{suffix}": beside}) + appended, on_corrupt)


def read_shards(reader: str, data: bytes, on_corrupt: Any) -> tuple[int, CorruptReport]:
    Path("0.tar").write_bytes(data)
    if reader == "conversations":
        conversations = open_conversations("0.tar", ConversationsConfig(on_corrupt=on_corrupt))
        return len(conversations), conversations.report
    if reader == "shard":
        report = CorruptReport(on_corrupt)
        return len(ShardSource("0.tar", report)), report
    stream = pairs_stream(PairsConfig(val="0.tar", on_corrupt=on_corrupt), transform, lengths)
    return sum(len(tokens) for _, tokens in stream.batches(0)), stream.report
