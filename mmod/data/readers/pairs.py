"""Image-text pairs in batches, from webdataset shards as open_clip and LAION-style tools write them.

Every sample has one image, one `.txt` caption and whatever else; images go through open_clip's transforms and captions
through its tokenisers. A stream is a pure function of (seed, epoch, step) over samples read by number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from mmod.data.config import PairsConfig
from mmod.data.corrupt import CorruptReport
from mmod.data.loader import BatchStream
from mmod.data.readers.shards import CAPTION, ShardSource
from mmod.data.stream import ImageReader, SampleStream
from mmod.data.synthetic.build import find_level
from mmod.data.synthetic.scenes import LEVELS, build_scenes

Transform = Callable[..., Tensor]
Tokenizer = Callable[[list[str]], Tensor]


def create_train_pairs(
    config: PairsConfig, transform: Transform, tokenizer: Tokenizer, seed: int, rank: int = 0, world: int = 1
) -> BatchStream:
    """Make the stream of shuffled training batches of one process.

    Full batches only: the fewer than `batch_size * world` samples at the end of an epoch's order wait for another
    epoch. The processes' batches of one step are neighbours in the order.

    Args:
        config: What to read.
        transform: From a PIL image to a tensor (C, H, W), as `open_clip.image_transform` makes it.
        tokenizer: From captions to tokens (B, L), as `open_clip.get_tokenizer` makes it.
        seed: Seed of order and augmentation, the same in all processes.
        rank: Number of this process.
        world: Number of processes.

    Returns:
        The stream, of images (B, C, H, W) and tokens (B, L).

    Raises:
        ValueError: If a pattern matches no shard, or an epoch has no batch.
        CorruptDataError: If a shard is damaged, unless `config.on_corrupt` is "skip".

    Example:
        >>> import tempfile, torch
        >>> config = PairsConfig("scenes:tiny/train", root=tempfile.mkdtemp(), batch_size=16)
        >>> lengths = lambda captions: torch.tensor([[len(caption)] for caption in captions])
        >>> stream = create_train_pairs(config, lambda image: torch.zeros(3, *image.size), lengths, seed=0)
        >>> images, tokens = next(stream.batches(epoch=0))
        >>> images.shape, tokens.shape, stream.steps_per_epoch
        (torch.Size([16, 3, 48, 48]), torch.Size([16, 1]), 16)
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} must lie in [0, world={world})")
    report = CorruptReport(config.on_corrupt)
    pattern, root = _locate(config.train, config.root)
    count = config.batch_size * world
    reader = _create_reader(pattern, root, report, transform, tokenizer, training=True)
    if len(reader) < count:
        raise ValueError(f"{config.train!r} has {len(reader)} samples, fewer than one batch of {count} over {world}")
    return SampleStream(reader, report, config.batch_size, config.workers, config.pin_memory, rank, world, seed)


def create_eval_pairs(
    config: PairsConfig, transform: Transform, tokenizer: Tokenizer, rank: int = 0, world: int = 1
) -> BatchStream:
    """Make the stream of evaluation batches of one process: every sample once, in order.

    Process `rank` reads samples `rank, rank + world, ...`; the last batch may be smaller, and the processes may
    differ by one in their number of batches.

    Args:
        config: What to read.
        transform: From a PIL image to a tensor (C, H, W).
        tokenizer: From captions to tokens (B, L).
        rank: Number of this process.
        world: Number of processes.

    Returns:
        The stream, of images (B, C, H, W) and tokens (B, L).

    Raises:
        ValueError: If a pattern matches no shard, or there are fewer samples than processes.
        CorruptDataError: If a shard is damaged, unless `config.on_corrupt` is "skip".
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} must lie in [0, world={world})")
    report = CorruptReport(config.on_corrupt)
    pattern, root = _locate(config.val, config.root)
    reader = _create_reader(pattern, root, report, transform, tokenizer, training=False)
    if len(reader) < world:
        raise ValueError(f"{config.val!r} has {len(reader)} samples for {world} processes")
    return SampleStream(reader, report, config.batch_size, config.workers, config.pin_memory, rank, world)


def _locate(pattern: str | list[str], root: str | None) -> tuple[str | list[str], str | None]:
    """Return the pattern with the embedded set's name replaced by its shards, and the folder for copies."""
    if not isinstance(pattern, str) or not pattern.startswith("scenes:"):
        return pattern, root
    level, _, split = pattern.removeprefix("scenes:").partition("/")
    config = find_level(LEVELS, level, "captioned scenes")
    if split not in config.scenes:
        raise ValueError(f"{pattern!r} must be scenes:LEVEL/SPLIT with a split of {', '.join(config.scenes)}")
    folder = Path(root or f"runs/data/captioned-scenes-{level}")
    build_scenes(folder, config, progress=True)
    return f"{folder}/{split}-*.tar", None


def _create_reader(
    pattern: str | list[str],
    root: str | None,
    report: CorruptReport,
    transform: Transform,
    tokenizer: Any,
    training: bool,
) -> ImageReader:
    source = ShardSource(pattern, report, cache=root, progress=True, target=CAPTION)
    # A corrupt training sample is replaced, so that every process keeps its number of full batches.
    return ImageReader(source, "RGB", transform, replace=training, collate=tokenizer)
