"""Streams of images, pairs and text, whose batches are a pure function of (seed, epoch, step).

The transforms are timm's, the loaders are not. Those draw order and augmentation from the workers' random state: a run
resumed in the middle of an epoch would see other batches.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Hashable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmod.data.config import EMBEDDED, DataConfig, PairsConfig, TextConfig
from mmod.data.corrupt import CorruptReport
from mmod.data.embedded import SETS, locate
from mmod.data.files import text_files
from mmod.data.labels import Classes, ModelClasses, read_classes
from mmod.data.readers.drawn import DrawnSource
from mmod.data.readers.folders import FolderSource, MapSource
from mmod.data.readers.hf_datasets import StreamedSource, documents, is_streamed
from mmod.data.readers.images import ImageSource, Subset
from mmod.data.readers.shards import CAPTION, CLASS, ShardSource, label_map
from mmod.data.readers.timm import TimmSource
from mmod.data.stream import BatchStream, Decoded, ImageReader, MemoryReader, ReadBatch
from mmod.data.synthetic.digits import DIGITS, DigitScene, compose_scenes
from mmod.io.files import text_bytes
from mmod.io.progress import warn_once
from mmod.random_state import spread

Transform = Callable[..., Tensor]
"""From a PIL image to a tensor (C, H, W)."""
Tokenizer = Callable[[list[str]], Tensor]
"""From captions to token ids (B, L)."""
# Mean and standard deviation of the embedded sets' grey values; approximate, for all difficulties.
_DIGITS_MEAN = 0.094
_DIGITS_STD = 0.22
# Where neither a config nor a model says it.
_CROP_PCT = 0.875


def image_stream(
    config: DataConfig,
    seed: int | None = None,
    rank: int = 0,
    world: int = 1,
    *,
    model: ModelClasses | None = None,
    in_memory: bool | None = None,
) -> BatchStream:
    """Read a data set in batches: images (B, C, H, W) and their classes (B), or those of patches (B, N).

    Args:
        seed: Of order and augmentation of the training images, the same in all processes; None reads every evaluation
            image once, in order.
        model: The classes of the model, to which those of the images are matched by name; None takes `config.classes`.
        in_memory: Decode each image once and keep it as uint8; None does so for embedded sets without augmentation.

    Raises:
        ValueError: The source is missing, too small for one batch, or does not match the config.
        CorruptDataError: A shard is damaged, unless `config.on_corrupt` is "skip".

    Example:
        >>> config = DataConfig("digits:tiny", batch_size=48)
        >>> [len(classes) for _, classes in image_stream(config).batches(epoch=0)]
        [48, 16]
        >>> images, classes = next(image_stream(config, seed=0).batches(epoch=0))
        >>> images.shape
        torch.Size([48, 1, 32, 32])
    """
    report = CorruptReport(config.on_corrupt, limit=config.max_corrupt)
    training = seed is not None
    split = config.train_split if training else config.val_split
    limit = config.train_limit if training else config.val_limit
    if model is None and config.classes is not None:
        model = ModelClasses(read_classes(config.classes), config.classes)
    # Small sets are decoded once; augmentation needs the images before their transform in each epoch.
    if in_memory is None:
        in_memory = is_embedded(config) and config.augment is None
    # Before the source: a wrong augmentation is said before a set is built or indexed.
    transform = _transform(config, training, normalise=not in_memory)

    source: ImageSource
    classes: Classes | None
    # Lanes are dealt out by the source itself, which needs seed and number of processes.
    if is_streamed(config.source):
        own = config.source.replace("{split}", split)
        train = config.source.replace("{split}", config.train_split)
        source = StreamedSource(own, config.columns, limit, seed, world, train, model)
        classes = source.classes
    else:
        complete = _create_source(config, split, report, model)
        classes = None
        if isinstance(complete, (FolderSource, TimmSource)):
            classes = complete.classes
        if rank == 0 and isinstance(complete, (FolderSource, MapSource)) and complete.left_out:
            warn_once(complete.left_out)
        source = complete
        if limit is not None:
            # Spread over the classes: the first samples of a folder are often of one class.
            source = Subset(complete, spread(complete.labels(), limit))

    if rank == 0 and (not training or config.augment is None):
        _warn_of_cropping(config, source)
    mode = "L" if config.channels == 1 else "RGB"
    # Training replaces corrupt samples, so that all processes keep the same number of full batches.
    reader: ImageReader | MemoryReader
    reader = ImageReader(source, mode, transform, replace=training)
    if in_memory:
        fields = evaluation_fields(config)
        mean, std = torch.tensor(fields["mean"]), torch.tensor(fields["std"])
        reader = MemoryReader(reader, mean, std, _shared_images(config, split, limit))

    name = f"the split {split!r} of {config.source!r}"
    return BatchStream(reader, report, config, rank, world, seed, name, classes)


def sample_images(data: DataConfig, count: int) -> Tensor:
    """Return up to `count` evaluation images, spread over the classes."""
    return image_stream(replace(data, val_limit=count, batch_size=count)).first_batch()[0]


def _shared_images(config: DataConfig, split: str, limit: int | None) -> Decoded:
    """Return where a stream keeps decoded images, which streams of the same images of an embedded set share."""
    if not is_embedded(config):
        return Decoded()
    folder = Path(config.root or "").resolve()
    as_decoded = (config.image_size, config.channels, evaluation_fields(config)["interpolation"])
    return _decoded(folder, config.label_patch, config.source, split, limit, *as_decoded)


@functools.lru_cache(maxsize=4)
def _decoded(*_: Hashable) -> Decoded:
    """Return what streams of an embedded set share that have the same folder, split, number and size of images.

    A study evaluates many models on them, one after the other.
    """
    return Decoded()


def _warn_of_cropping(config: DataConfig, source: ImageSource) -> None:
    """Warn if the first image already has the target size, because the evaluation crop would then cut its margins."""
    crop_pct = evaluation_fields(config)["crop_pct"]
    if crop_pct == 1:
        return
    try:
        size = source.read(0, "RGB")[0].size
    except (OSError, ValueError):
        # Whoever reads the sample for its sake counts the fault or raises it.
        return
    if size == (config.image_size, config.image_size):
        warn_once(
            f"images of {config.source!r} have data.image_size={config.image_size} already: "
            f"data.crop_pct={crop_pct:g} enlarges them and crops their margins; it is the model's unless a config sets "
            "it: set it to 1 to avoid that",
            about=config.root,
        )


def _create_source(
    config: DataConfig, split: str, report: CorruptReport, model: ModelClasses | None
) -> DrawnSource | ShardSource | MapSource | FolderSource | TimmSource:
    source, _, argument = config.source.partition(":")
    target = CLASS if config.label_patch is None else label_map(config.label_patch)
    if is_embedded(config):
        difficulty = argument or "default"
        side = SETS[source].config(difficulty).canvas
        if config.image_size > side:
            raise ValueError(f"image_size={config.image_size} exceeds the {side} pixels of {difficulty!r} {source}")
        part = f"{source}:{difficulty}/{split}"
        if config.root is None:
            return DrawnSource(part, target)
        return ShardSource(SETS[source].locate(part, config.root), report, target=target)
    if source == "shards":
        if "{split}" not in argument:
            raise ValueError(
                f"source={config.source!r} must contain '{{split}}', which is replaced by train_split or val_split"
            )
        shards = argument.replace("{split}", split)
        return ShardSource(shards, report, config.root, progress=True, target=target, remote=config.remote)
    if source == "maps":
        assert config.root is not None
        assert config.label_patch is not None
        return MapSource(config.root, split, int(argument), config.label_patch)
    if config.source == "folder":
        return FolderSource(config.root, split, config.train_split, model)
    return TimmSource(config.source, config.root, split, config.options, model)


def is_embedded(config: DataConfig) -> bool:
    """Return whether the images are those of an embedded set."""
    return config.source.partition(":")[0] in EMBEDDED


def scenes_of(config: DataConfig) -> list[DigitScene]:
    """Return the scenes of the embedded digits in the order of the evaluation set; empty for other sets."""
    source, _, difficulty = config.source.partition(":")
    if source != "digits":
        return []
    scenes = list(compose_scenes(DIGITS.config(difficulty or "default"), config.val_split))
    if config.val_limit is None:
        return scenes
    # As `image_stream` draws them, by the same labels.
    return [scenes[int(place)] for place in spread([scene.label for scene in scenes], config.val_limit)]


def evaluation_fields(config: DataConfig) -> dict[str, Any]:
    """Return the arguments of timm's `create_transform` that prepare images for evaluation.

    Runs fill in what their model wants, see `mmod.training.image.preparation`; what is left open is ImageNet's here.
    """
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    crop_pct = config.crop_pct or _CROP_PCT
    # Label maps are not cropped, so their images must not be cropped either.
    if is_embedded(config) or config.label_patch is not None:
        crop_pct = 1.0
    if is_embedded(config):
        mean, std = (_DIGITS_MEAN,) * config.channels, (_DIGITS_STD,) * config.channels
    elif config.channels == 3:
        mean, std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    else:
        mean, std = (0.5,), (0.5,)
    return {
        "input_size": (config.channels, config.image_size, config.image_size),
        "mean": tuple(config.mean or mean),
        "std": tuple(config.std or std),
        "crop_pct": crop_pct,
        "crop_mode": config.crop_mode or "center",
        "interpolation": config.interpolation or "bicubic",
    }


def _transform(config: DataConfig, training: bool, normalise: bool = True) -> Transform:
    from timm.data import create_transform

    fields = evaluation_fields(config)
    augment = config.augment if training else None
    chosen = {name: fields.pop(name) for name in ("crop_pct", "crop_mode", "interpolation")}
    if augment is not None:
        chosen = asdict(augment)
    try:
        return create_transform(is_training=augment is not None, normalize=normalise, **fields, **chosen)
    except (KeyError, AssertionError, ValueError) as error:
        texts = [f"{name}={value!r}" for name, value in chosen.items() if isinstance(value, str)]
        raise ValueError(
            f"timm creates no transform with {', '.join(texts)}: {type(error).__name__}: {error}"
        ) from error


def pairs_stream(
    config: PairsConfig,
    transform: Transform,
    tokenizer: Tokenizer,
    seed: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> BatchStream:
    """Create the stream of one process: images (B, C, H, W) and tokens (B, L) of their captions.

    The pairs are those of `datasets` or of webdataset shards, with one image and one `.txt` caption a sample.

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
    report = CorruptReport(config.on_corrupt, limit=config.max_corrupt)
    pattern = shards
    if isinstance(shards, str):
        pattern = locate("scenes", shards, config.root)
    # The shards of an embedded set keep their indices beside them.
    cache = config.root if pattern == shards else None
    source: ImageSource
    if is_streamed(pattern):
        source = StreamedSource(pattern, config.columns, seed=seed, world=world)
    else:
        source = ShardSource(pattern, report, cache, progress=True, target=CAPTION, remote=config.remote)
    # Training replaces corrupt samples, so that all processes keep the same number of full batches.
    reader = ImageReader(source, "RGB", transform, replace=seed is not None, collate=tokenizer)
    return BatchStream(reader, report, config, rank, world, seed, repr(shards))


def folder_stream(
    folder: str, transform: Transform, report: CorruptReport, batch_size: int, workers: int, rank: int, world: int
) -> tuple[BatchStream, list[str]]:
    """Create the stream of one process over all images in FOLDER/CLASS/, in order; also return the names of classes.

    Args:
        transform: From a PIL image to a tensor (C, H, W).
        report: Counts the images that cannot be read.
    """
    source = FolderSource(folder, "", train_split="")
    if source.left_out and rank == 0:
        warn_once(source.left_out)
    reader = ImageReader(source, "RGB", transform)
    config = PairsConfig(batch_size=batch_size, workers=workers)
    return BatchStream(reader, report, config, rank, world, name=repr(folder)), source.names


END = 0
"""The byte that ends a file."""


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
    split = config.train_split
    limit = None
    if seed is None:
        split = config.val_split
        limit = config.val_limit
    reader = TextReader(read_corpus(config.source, split), config.length, limit)
    return BatchStream(reader, CorruptReport("raise"), config, rank, world, seed, f"data.source={config.source!r}")


@functools.lru_cache(maxsize=4)
def read_corpus(source: str, split: str) -> np.ndarray:
    """Return the bytes of a split of `TextConfig.source`: all its files, each followed by `END`."""
    if is_streamed(source):
        files = list(documents(source, "text"))
    else:
        files = [text_bytes(path.read_bytes(), str(path)) for path in text_files(source)]
    # Of twenty files one is in "val" and one in "test", by a checksum.
    splits = ("val", "test", *["train"] * 18)
    # By content, not by name or order: a file stays in its split when others are added.
    in_split = [content for content in files if splits[zlib.crc32(content) % len(splits)] == split]
    if not in_split:
        raise ValueError(f"of {len(files)} files of data.source={source!r} none is in the split {split!r}")
    joined = b"".join(content + bytes([END]) for content in in_split)
    text = np.frombuffer(joined, dtype=np.uint8)
    # Cached and shared, so that nobody may write into it.
    text.setflags(write=False)
    return text


class TextReader:
    """Windows of `length` bytes of a text, with random access; with a limit, so many spread evenly over it."""

    def __init__(self, text: np.ndarray, length: int, limit: int | None = None) -> None:
        self.text = text
        self.length = length
        # Minus one: the last window needs a next byte, too.
        windows = (len(text) - 1) // length
        used = windows
        if limit is not None:
            used = min(limit, windows)
        # Integer positions spread over all windows; the first is kept, whatever the limit.
        self.starts = np.arange(used, dtype=np.int64) * windows // max(used, 1) * length

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, indices: np.ndarray, seeds: tuple[int, int]) -> ReadBatch:
        """Read one batch; see `mmod.data.stream.BatchReader.read`."""
        # One byte more than the length, since targets are the inputs shifted by one.
        start_B = self.starts[indices]
        index_BL = start_B[:, None] + np.arange(self.length + 1)
        window = torch.from_numpy(self.text[index_BL].astype(np.int64))
        return ReadBatch(window[:, :-1], window[:, 1:], [])
