"""Readers of one bad file, and of a shard that continues badly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mmod.data.config import DataConfig, PairsConfig
from mmod.data.corrupt import CorruptReport
from mmod.data.loader import image_stream, pairs_stream
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from mmod.data.readers.shards import ShardSource
from tests.kit.bad_files import (
    PNG,
    SAID,
    body,
    tar,
)


def lengths(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption)] for caption in captions])


def zeros(image: Any) -> torch.Tensor:
    return torch.zeros(3, 1, 1)


def read_folder(data: bytes, on_corrupt: Any) -> tuple[int, CorruptReport]:
    for label, image in (("a", data), ("b", PNG)):
        Path("val", label).mkdir(parents=True, exist_ok=True)
        Path("val", label, "0.png").write_bytes(image)
    stream = image_stream(DataConfig("folder", ".", channels=3, on_corrupt=on_corrupt))
    return sum(len(classes) for _, classes in stream.batches(0)), stream.report


def read_shard(data: bytes, on_corrupt: Any) -> tuple[int, CorruptReport]:
    Path("val-0.tar").write_bytes(tar({"0.png": data, "0.cls": b"0", "1.png": PNG, "1.cls": b"1"}))
    stream = image_stream(DataConfig("shards:{split}-0.tar", channels=3, on_corrupt=on_corrupt))
    return sum(len(classes) for _, classes in stream.batches(0)), stream.report


def read_pairs(data: bytes, on_corrupt: Any) -> tuple[int, CorruptReport]:
    Path("0.tar").write_bytes(tar({"0.png": data, "0.txt": b"a", "1.png": PNG, "1.txt": b"bb"}))
    stream = pairs_stream(PairsConfig(val="0.tar", on_corrupt=on_corrupt), zeros, lengths)
    return sum(len(tokens) for _, tokens in stream.batches(0)), stream.report


READERS = {"folder": read_folder, "shard": read_shard, "pairs": read_pairs}
BESIDE = {
    "shard": (".cls", b"7"),
    "pairs": (".txt", b"seven"),
    "conversations": (".json", json.dumps({"image": "7.png", "conversations": SAID}).encode()),
}


def read_archive(reader: str, appended: bytes, on_corrupt: Any) -> tuple[int, CorruptReport]:
    """Write a good sample and what follows, and return how many are read."""
    suffix, beside = BESIDE[reader]
    Path("0.tar").write_bytes(body({"7.png": PNG, f"7{suffix}": beside}) + appended)
    if reader == "conversations":
        conversations = open_conversations("0.tar", ConversationsConfig(on_corrupt=on_corrupt))
        return len(conversations), conversations.report
    if reader == "shard":
        report = CorruptReport(on_corrupt)
        return len(ShardSource("0.tar", report)), report
    stream = pairs_stream(PairsConfig(val="0.tar", on_corrupt=on_corrupt), zeros, lengths)
    return sum(len(tokens) for _, tokens in stream.batches(0)), stream.report
