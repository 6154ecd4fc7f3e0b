"""Byte-level text: the embedded corpus or text files, as streams of windows."""

from __future__ import annotations

import functools
import glob
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from mmod.data.config import TextConfig
from mmod.data.corrupt import CorruptReport
from mmod.data.readers.hf_datasets import documents, is_streamed
from mmod.data.stream import Batch, BatchStream

END = 0
"""The byte that ends a file."""
# Folders of the standard library with data, tests or third-party packages.
_NOT_READ = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "site-packages", "dist-packages"}


def text_stream(config: TextConfig, seed: int | None = None, rank: int = 0, world: int = 1) -> BatchStream:
    """Create the stream of one process: bytes and next bytes, both (B, L), int64.

    Args:
        seed: Shuffles the training split; None reads every window of the evaluation split once, in order.

    Example:
        >>> stream = text_stream(TextConfig(length=16, batch_size=4), seed=0)
        >>> tokens, following = next(stream.batches(epoch=0))
        >>> tokens.shape, bool((tokens[:, 1:] == following[:, :-1]).all())
        (torch.Size([4, 16]), True)
    """
    split, limit = (config.val_split, config.val_limit) if seed is None else (config.train_split, None)
    reader = TextReader(read_text(config.source, split), config.length, limit)
    return BatchStream(reader, CorruptReport("raise"), config, (rank, world), seed, f"data.source={config.source!r}")


@functools.lru_cache(maxsize=4)
def read_text(source: str, split: str) -> np.ndarray:
    """Return the bytes of a split of `TextConfig.source`: all its files, each followed by `END`."""
    files = list(documents(source, "text") if is_streamed(source) else (path.read_bytes() for path in _paths(source)))
    if not files:
        raise ValueError(f"data.source={source!r} matches no file")
    # Of twenty files one is in "val" and one in "test", by a checksum.
    splits = ("val", "test", *["train"] * 18)
    in_split = [content for content in files if splits[zlib.crc32(content) % len(splits)] == split]
    if not in_split:
        raise ValueError(f"of {len(files)} files of data.source={source!r} none is in the split {split!r}")
    text = np.frombuffer(b"".join(content + bytes([END]) for content in in_split), dtype=np.uint8)
    text.setflags(write=False)
    return text


class TextReader:
    """Windows of `length` bytes of a text, with random access; with a limit, so many spread evenly over it."""

    def __init__(self, text: np.ndarray, length: int, limit: int | None = None) -> None:
        self.text = text
        self.length = length
        # Minus one: the last window needs a next byte, too.
        windows = (len(text) - 1) // length
        used = windows if limit is None else min(limit, windows)
        self.starts = np.arange(used, dtype=np.int64) * windows // max(used, 1) * length

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, indices: np.ndarray, seeds: tuple[int, int]) -> Batch:
        """Read one batch; see `mmod.data.stream.BatchReader.read`."""
        places = self.starts[indices][:, None] + np.arange(self.length + 1)
        window = torch.from_numpy(self.text[places].astype(np.int64))
        return Batch(window[:, :-1], window[:, 1:], [])


def _paths(source: str) -> Iterator[Path]:
    if source != "python":
        yield from (path for path in map(Path, sorted(glob.glob(source, recursive=True))) if path.is_file())
        return
    root = Path(sysconfig.get_path("stdlib"))
    modules = (path for path in root.rglob("*.py") if not _NOT_READ & set(path.relative_to(root).parts))
    yield from sorted([*modules, *root.glob("LICENSE*")])
