"""Streams of batches: the order of samples, and the readers of batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from mmod.data.config import DataConfig, PairsConfig, TextConfig
from mmod.data.corrupt import CorruptDataError, CorruptReport, Fault, original_errors
from mmod.data.labels import Classes
from mmod.data.readers.images import ImageSource, Target
from mmod.io.progress import progress_bar
from mmod.random_state import kept_random_state


class ReadBatch(NamedTuple):
    """One batch, and the faults of samples that could not be read."""

    images: Tensor  # Normalised, float32, (B, C, H, W); for text tokens, int64, (B, L).
    labels: Tensor  # Classes (B,), or (B, N) for N patches; caption or next tokens (B, L); int64.
    faults: list[Fault]


class BatchReader(Protocol):
    """Reads batches by sample indices."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray, seeds: tuple[int, int]) -> ReadBatch:
        """Read the samples with these indices, (B,); `seeds` are those of the stream and the epoch."""


@dataclass(eq=False)
class ImageReader:
    """Decodes and transforms the samples of a source, with one augmentation seed per sample.

    Args:
        transform: From a PIL image to a tensor (C, H, W); may draw from the global random states.
        replace: Replace an unreadable sample by the next readable one, instead of leaving it out.
        collate: From the classes or captions of a batch to a tensor (B, ...).
    """

    source: ImageSource
    mode: str
    transform: Callable[..., Tensor]
    replace: bool = False
    collate: Callable[[list[Any]], Tensor] = torch.tensor

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: np.ndarray, seeds: tuple[int, int] | None) -> ReadBatch:
        """Read one batch, without seeds for a transform that draws nothing; see `BatchReader.read`."""
        faults: list[Fault] = []
        images = []
        labels = []
        # Augmentation seeds the global generators, from which the training loop draws as well.
        with kept_random_state():
            for index in indices.tolist():
                sample = self.decode(index, faults)
                if sample is None:
                    continue
                image, label = sample
                if seeds is not None:
                    # By the requested index, so a replacement differs from the same sample at its regular index.
                    _seed_all(*seeds, index)
                images.append(self.transform(image))
                labels.append(label)
        if not images:
            return ReadBatch(torch.empty(0), torch.empty(0, dtype=torch.int64), faults)
        # In a worker, torch's collate stacks in shared memory, which saves a copy.
        return ReadBatch(default_collate(images), self.collate(labels), faults)

    def decode(self, index: int, faults: list[Fault]) -> tuple[Image, Target] | None:
        """Return the image of a sample and its class or caption; None if it cannot be read, with the fault added."""
        # The next samples in order stand in for an unreadable one.
        attempts = len(self) if self.replace else 1
        for attempt in range(attempts):
            # Within the epoch, for sources that have other indices in each.
            position = index % len(self)
            candidate = index - position + (position + attempt) % len(self)
            try:
                return self.source.read(candidate, self.mode)
            except CorruptDataError:
                # Of the whole source, so that no other sample stands in.
                raise
            except (OSError, ValueError) as error:
                faults.append(Fault(*self.source.place(candidate), str(error)))
        return None


@dataclass(eq=False)
class Decoded:
    """Samples in memory.

    Attributes:
        image_NCHW: uint8; None before the first is read. One tensor: many small ones among the larger ones of decoding
            would scatter over ten times their memory.
        labels: By index, of those that can be read: every stream meets the faults of the others itself.
    """

    image_NCHW: Tensor | None = None
    labels: dict[int, Target] = field(default_factory=dict)


class MemoryReader:
    """Decodes each sample when it is first read, keeps it in memory as uint8, and normalises it in each batch.

    Args:
        reader: Its transform returns uint8 and draws nothing.
        decoded: What was read so far, which readers of the same samples may share.
    """

    def __init__(self, reader: ImageReader, mean: Tensor, std: Tensor, decoded: Decoded) -> None:
        self.reader = reader
        # One multiplication and one addition, in place of dividing, subtracting and dividing again.
        self.scale = (1 / (255 * std))[:, None, None]
        self.shift = (-mean / std)[:, None, None]
        self.decoded = decoded

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, indices: np.ndarray, seeds: tuple[int, int]) -> ReadBatch:
        """Read one batch; see `BatchReader.read`."""
        faults: list[Fault] = []
        for index in indices.tolist():
            if index not in self.decoded.labels:
                self._decode(index, faults)
        labels = self.decoded.labels
        readable = [index for index in indices.tolist() if index in labels]
        if not readable:
            return ReadBatch(torch.empty(0), torch.empty(0, dtype=torch.int64), faults)
        assert self.decoded.image_NCHW is not None
        images = self.decoded.image_NCHW[readable] * self.scale + self.shift
        return ReadBatch(images, self.reader.collate([labels[index] for index in readable]), faults)

    def _decode(self, index: int, faults: list[Fault]) -> None:
        """Keep the image and the label of a sample, or add the fault of one that cannot be read."""
        sample = self.reader.decode(index, faults)
        if sample is None:
            return
        image, label = sample
        image_CHW = self.reader.transform(image)
        if self.decoded.image_NCHW is None:
            self.decoded.image_NCHW = torch.empty(len(self), *image_CHW.shape, dtype=image_CHW.dtype)
        self.decoded.image_NCHW[index] = image_CHW
        self.decoded.labels[index] = label


class BatchStream:
    """The batches of a data set; with several processes, those of one.

    In training every epoch is a new permutation, cut into full batches; the remaining samples, fewer than
    `batch_size * world`, are dropped in this epoch. The processes' batches of one step are adjacent in the permutation.
    In evaluation process `rank` reads samples `rank, rank + world, ...` in order. The last batch may be smaller, and
    the processes may differ by one batch. A batch without a readable sample is left out, so that a process may have
    fewer batches than `steps_per_epoch`, or none.

    Args:
        rank: Number of this process.
        world: Number of processes.
        seed: Seed of the training order; None reads every sample once, in order.
        name: The data, for messages.
        classes: The classes of the labels, if they have names.
    """

    def __init__(
        self,
        reader: BatchReader,
        report: CorruptReport,
        config: DataConfig | PairsConfig | TextConfig,
        rank: int = 0,
        world: int = 1,
        seed: int | None = None,
        name: str = "the source",
        classes: Classes | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self.batch_size = config.batch_size
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank={self.rank} must lie in [0, world={self.world})")
        needed = "one"
        least = 1
        if seed is not None:
            needed = f"one batch of batch_size={self.batch_size}"
            least = self.batch_size
        # Every process must have a batch; a process without one would leave the others waiting.
        if len(reader) < self.world * least:
            raise ValueError(f"{name} has {len(reader)} samples, fewer than {needed} on each of {self.world} processes")
        self.reader = reader
        self.report = report
        self.classes = classes
        # A worker would keep the decoded samples to itself, and lose them with the epoch.
        self.workers = 0 if isinstance(reader, MemoryReader) else config.workers
        # Without an accelerator there is none, and torch warns.
        self.pin_memory = config.pin_memory and torch.accelerator.is_available()
        self.seed = seed
        self.num_samples = len(reader)
        # Of streamed data: each training batch is read from one lane, in place of a permutation.
        self.lanes: int = getattr(getattr(reader, "source", None), "lanes", 0)
        # Of any epoch: all have as many full batches.
        self.steps_per_epoch = len(self._order(0))
        if not self.steps_per_epoch:
            samples = f"{len(reader)} samples in {self.lanes} lanes"
            raise ValueError(f"{name} has {samples}, fewer than a batch in each: set a smaller data.batch_size")

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the images and labels of an epoch's batches.

        Images are normalised, float32 (B, C, H, W); tokens of text are int64 (B, L). Labels are int64: classes (B,), or
        (B, N) for N patches; tokens of captions, or next tokens of text (B, L).

        `batches(e, s)` equals `batches(e)` without its first `s` batches, for any number of workers. The first batches
        are not read, and the caller's random state is neither used nor changed.
        """
        return (batch for batch in self.every_batch(epoch, start) if len(batch[1]))

    def every_batch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the same batches, and over those without a readable sample, which are empty."""
        if epoch < 0 or not 0 <= start <= self.steps_per_epoch:
            raise ValueError(f"epoch={epoch} must be >= 0 and start={start} in [0, {self.steps_per_epoch}]")
        loaded = self._load(self._order(epoch)[start:], (self.seed or 0, epoch))
        while True:
            with original_errors():
                batch = next(loaded, None)
            if batch is None:
                return
            self.report.add(batch.faults)
            if self.seed is not None and not len(batch.labels):
                # Each sample of a training batch was replaced by the next readable one of the whole set.
                raise CorruptDataError(f"no sample can be read; {self.report}")
            yield batch.images, batch.labels

    def first_batch(self) -> tuple[Tensor, Tensor]:
        """Return the first batch; a CorruptDataError if no sample can be read."""
        batch = next(self.batches(0), None)
        if batch is None:
            raise CorruptDataError(f"no sample can be read; {self.report}")
        return batch

    @property
    def is_streamed(self) -> bool:
        """Whether samples are sent as they are read, so that none is read ahead."""
        return hasattr(getattr(self.reader, "source", None), "lanes")

    def faults(self, shown: bool = False, batches: int | None = None) -> list[Fault]:
        """Read every sample of this process once, and return why some cannot be read; empty for streamed data.

        Args:
            shown: Show a progress bar.
            batches: Read only this many batches, the first of an epoch.
        """
        # They would be sent once more.
        if self.is_streamed:
            return []
        order = self._order(0)[:batches]
        loaded = self._load(order, (self.seed or 0, 0))
        bar = progress_bar(loaded, total=len(order), desc="check samples", shown=shown, leave=False)
        with original_errors():
            return list(chain.from_iterable(batch.faults for batch in bar))

    def _order(self, epoch: int) -> np.ndarray | list[np.ndarray]:
        """Return the sample indices of this process's batches: rows of a table, or a list if the last has fewer."""
        if self.seed is None:
            # Every `world`-th sample, so that processes differ by one sample at most.
            mine = np.arange(self.rank, self.num_samples, self.world)
            firsts = range(0, len(mine), self.batch_size)
            return [mine[first : first + self.batch_size] for first in firsts]
        if self.lanes:
            # Consecutive batches are from consecutive lanes.
            length = self.num_samples // self.lanes
            first_of_lane = np.arange(self.lanes) * length
            first_in_lane = np.arange(length // self.batch_size) * self.batch_size
            first_of_batch = (first_in_lane[:, None] + first_of_lane).reshape(-1, 1)
            batches = epoch * self.num_samples + first_of_batch + np.arange(self.batch_size)
            # What does not fill a batch in every process is left out, alike in all of them.
            full = batches[: len(batches) // self.world * self.world]
            return full.reshape(-1, self.world, self.batch_size)[:, self.rank]
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        # The permutation is the same in all processes, which take turns by batch.
        steps = self.num_samples // (self.batch_size * self.world)
        full = order[: steps * self.world * self.batch_size]
        return full.reshape(steps, self.world, self.batch_size)[:, self.rank]

    def _load(self, order: np.ndarray | list[np.ndarray], seeds: tuple[int, int]) -> Iterator[ReadBatch]:
        # An explicit generator, because the loader would otherwise draw from the global one.
        return iter(
            DataLoader(
                _Batches(self.reader, seeds),
                # The sampler yields whole batches of indices, so that a worker reads a batch at once.
                batch_size=None,
                sampler=order,
                # One without a batch would be started in vain.
                num_workers=min(self.workers, len(order)),
                pin_memory=self.pin_memory,
                generator=torch.Generator(),
            )
        )


@dataclass(eq=False)
class _Batches(Dataset[ReadBatch]):
    reader: BatchReader
    seeds: tuple[int, int]

    def __getitem__(self, indices: np.ndarray) -> ReadBatch:
        return self.reader.read(indices, self.seeds)


def _seed_all(*seeds: int) -> None:
    """Seed the generators that transforms draw from: Python, NumPy and torch's CPU generator."""
    python, numpy, first, second = np.random.SeedSequence(seeds).generate_state(4).tolist()
    random.seed(python)
    np.random.seed(numpy)  # noqa: NPY002 (transforms draw from the global state)
    # Not torch.manual_seed, which would also reset the generators of GPUs.
    torch.default_generator.manual_seed(first << 32 | second)
