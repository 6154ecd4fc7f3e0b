"""Image-text pairs in batches, from webdataset shards as open_clip and LAION-style tools write them.

Every sample has one image and one `.txt` caption; other members are ignored. Batches are a pure function of
(seed, epoch, step).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mmod.data.config import PairsConfig
from mmod.data.corrupt import CorruptReport
from mmod.data.readers.shards import CAPTION, ShardSource
from mmod.data.stream import BatchStream, ImageReader
from mmod.data.synthetic.scenes import SCENES

Transform = Callable[..., Tensor]
Tokenizer = Callable[[list[str]], Tensor]


def create_train_pairs(
    config: PairsConfig, transform: Transform, tokenizer: Tokenizer, seed: int, rank: int = 0, world: int = 1
) -> BatchStream:
    """Create the stream of shuffled training batches of one process: images (B, C, H, W) and tokens (B, L).

    Args:
        config: The data set.
        transform: From a PIL image to a tensor (C, H, W), as `open_clip.image_transform` makes it.
        tokenizer: From captions to tokens (B, L), as `open_clip.get_tokenizer` makes it.
        seed: Seed of order and augmentation, the same in all processes.
        rank: Index of this process.
        world: Number of processes.

    Raises:
        ValueError: A pattern matches no shard, or an epoch has no batch.
        CorruptDataError: A shard is damaged, unless `config.on_corrupt` is "skip".

    Example:
        >>> import tempfile, torch
        >>> config = PairsConfig("scenes:tiny/train", root=tempfile.mkdtemp(), batch_size=16)
        >>> lengths = lambda captions: torch.tensor([[len(caption)] for caption in captions])
        >>> stream = create_train_pairs(config, lambda image: torch.zeros(3, *image.size), lengths, seed=0)
        >>> images, tokens = next(stream.batches(epoch=0))
        >>> images.shape, tokens.shape, stream.steps_per_epoch
        (torch.Size([16, 3, 48, 48]), torch.Size([16, 1]), 16)
    """
    return _create_stream(config, config.train, transform, tokenizer, (rank, world), seed)


def create_eval_pairs(
    config: PairsConfig, transform: Transform, tokenizer: Tokenizer, rank: int = 0, world: int = 1
) -> BatchStream:
    """Create the stream of evaluation batches of one process: every sample once, in order."""
    return _create_stream(config, config.val, transform, tokenizer, (rank, world))


def _create_stream(
    config: PairsConfig,
    shards: str | list[str],
    transform: Transform,
    tokenizer: Tokenizer,
    place: tuple[int, int],
    seed: int | None = None,
) -> BatchStream:
    report, cache, pattern = CorruptReport(config.on_corrupt, limit=config.max_corrupt), config.root, shards
    if isinstance(pattern, str) and pattern.startswith("scenes:"):
        pattern, cache = SCENES.locate(pattern, config.root), None
    source = ShardSource(pattern, report, cache, progress=True, target=CAPTION, remote=config.remote)
    # Training replaces corrupt samples, so that all processes keep the same number of full batches.
    reader = ImageReader(source, "RGB", transform, replace=seed is not None, collate=tokenizer)
    return BatchStream(reader, report, config, place, seed, name=repr(shards))
