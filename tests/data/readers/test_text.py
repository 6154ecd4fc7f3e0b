"""Windows of a text: they hold it whole and in order, and no file is in two splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmod.data.config import TextConfig
from mmod.data.loader import TextReader, read_corpus, text_stream


@given(size=st.integers(2, 200), length=st.integers(1, 40), limit=st.integers(1, 50))
def test_windows_follow_each_other_and_know_what_comes_next(size: int, length: int, limit: int) -> None:
    text = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    reader = TextReader(text, length)
    assert len(reader) == (size - 1) // length
    tokens, following, _ = reader.read(np.arange(len(reader)), (0, 0))
    assert np.array_equal(tokens.flatten(), text[: tokens.numel()])
    assert np.array_equal(following.flatten(), text[1 : 1 + tokens.numel()])
    limited = TextReader(text, length, limit).starts
    assert len(limited) == min(limit, len(reader)) == len(set(limited.tolist()))
    assert set(limited.tolist()) <= set(reader.starts.tolist())


def test_the_embedded_text_is_dealt_file_by_file() -> None:
    splits = {
        split: set(read_corpus("python", split).tobytes().split(b"\0")) - {b""} for split in ("train", "val", "test")
    }
    assert all(splits.values())
    assert not splits["train"] & splits["val"] | splits["train"] & splits["test"] | splits["val"] & splits["test"]
    assert sum(map(len, splits["train"])) > 5 * sum(map(len, splits["val"] | splits["test"]))


def test_files_of_ones_own_are_found_by_a_pattern(tmp_path: Path) -> None:
    for number in range(80):
        (tmp_path / f"{number}.txt").write_bytes(b"%d " % number * 20)
        (tmp_path / f"copy-{number}.txt").write_bytes(b"%d " % number * 20)
    (tmp_path / "other.bin").write_bytes(b"not read")
    pattern = str(tmp_path / "*.txt")
    contents_of_splits = [read_corpus(pattern, split).tobytes().split(b"\0")[:-1] for split in ("train", "val", "test")]
    assert sum(map(len, contents_of_splits)) == 160
    assert all(texts.count(content) == 2 for texts in contents_of_splits for content in texts)
    with pytest.raises(ValueError, match="matches no file"):
        read_corpus(str(tmp_path / "*.md"), "train")
    with pytest.raises(ValueError, match=r"of 1 files .* none is in the split"):
        [read_corpus(str(tmp_path / "other.bin"), split) for split in ("train", "val", "test")]


def test_batches_follow_from_seed_epoch_and_place() -> None:
    config = TextConfig(length=32, batch_size=8, val_split="test", val_limit=21)
    stream, twin = (text_stream(config, seed=3) for _ in range(2))
    first, other, following = stream.batches(1), twin.batches(1, start=2), stream.batches(2)
    skipped = [next(first) for _ in range(2)]
    assert torch.equal(next(first)[0], next(other)[0])
    assert not torch.equal(skipped[0][0], next(following)[0])
    halves = [text_stream(config, 3, rank, world=2) for rank in range(2)]
    assert not torch.equal(*(next(half.batches(1))[0] for half in halves))
    evaluated = [text_stream(config, None, rank, 2) for rank in range(2)]
    windows = torch.cat([tokens for stream in evaluated for tokens, _ in stream.batches(0)])
    assert len(windows) == 21
    all_tokens = torch.cat([tokens for tokens, _ in text_stream(config).batches(0)])
    assert sorted(windows.tolist()) == sorted(all_tokens.tolist())
