"""Image-text pairs in batches, from `datasets` or webdataset shards: one image and one `.txt` caption a sample."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mmod.data.config import PairsConfig
from mmod.data.corrupt import CorruptReport
from mmod.data.readers.hf_datasets import StreamedSource, is_streamed
from mmod.data.readers.images import ImageSource
from mmod.data.readers.shards import CAPTION, ShardSource
from mmod.data.stream import BatchStream, ImageReader
from mmod.data.synthetic.scenes import SCENES

Transform = Callable[..., Tensor]
Tokenizer = Callable[[list[str]], Tensor]


def pairs_stream(
    config: PairsConfig,
    transform: Transform,
    tokenizer: Tokenizer,
    seed: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> BatchStream:
    """Create the stream of one process: images (B, C, H, W) and tokens (B, L).

    Args:
        transform: From a PIL image to a tensor (C, H, W), as `open_clip.image_transform` makes it.
        seed: Of order and augmentation of the training pairs; None reads every evaluation pair once, in order.

    Example:
        >>> import tempfile, torch
        >>> config = PairsConfig("scenes:tiny/train", root=tempfile.mkdtemp(), batch_size=16)
        >>> lengths = lambda captions: torch.tensor([[len(caption)] for caption in captions])
        >>> stream = pairs_stream(config, lambda image: torch.zeros(3, *image.size), lengths, seed=0)
        >>> images, tokens = next(stream.batches(epoch=0))
        >>> images.shape, tokens.shape, stream.steps_per_epoch
        (torch.Size([16, 3, 48, 48]), torch.Size([16, 1]), 16)
    """
    shards = config.val if seed is None else config.train
    report, cache, pattern = CorruptReport(config.on_corrupt, limit=config.max_corrupt), config.root, shards
    if isinstance(pattern, str) and pattern.startswith("scenes:"):
        pattern, cache = SCENES.locate(pattern, config.root), None
    source: ImageSource
    lanes = 0
    if is_streamed(pattern):
        source = StreamedSource(pattern, config.columns, seed=seed, world=world)
        lanes = source.lanes
    else:
        source = ShardSource(pattern, report, cache, progress=True, target=CAPTION, remote=config.remote)
    # Training replaces corrupt samples, so that all processes keep the same number of full batches.
    reader = ImageReader(source, "RGB", transform, replace=seed is not None, collate=tokenizer)
    return BatchStream(reader, report, config, (rank, world), seed, repr(shards), lanes)
