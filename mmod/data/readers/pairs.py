"""Image-text pairs in batches, from webdataset shards: one image and one `.txt` caption a sample, others ignored."""

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
        transform: From a PIL image to a tensor (C, H, W), as `open_clip.image_transform` makes it.

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
