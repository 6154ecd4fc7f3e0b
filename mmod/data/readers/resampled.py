"""Pairs from shards that are read in one direction and drawn with replacement, as open_clip's `--dataset-resampled`.

What is read follows from (seed, epoch, process, lane): each worker process is one lane, with its own draw of shards,
its own shuffle buffer and its own share of the batches. A stream that goes on in the middle of an epoch reads the
epoch's beginning again and drops it, so that it continues with the same batches.
"""

from __future__ import annotations

import random
import tarfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mmod.data.corrupt import CorruptDataError, CorruptReport, Fault
from mmod.data.readers.images import decode_image
from mmod.data.readers.shards import CAPTION, DAMAGE, choose_members, group_members, plain_members
from mmod.data.stream import Batch, checked, kept_random_state, seed_all, unchanged

# Faults within one batch after which nothing good is to be expected of the shards.
_MOST_FAULTS = 100_000
# Reads behind a shard's end after which it is taken as cut short.
_MOST_EMPTY = 100
# Samples held before the first is given away; from then on the buffer grows by every second one until it is full.
_FIRST = 1000


def stream_shard(url: str) -> Iterator[tuple[str, bytes, bytes] | Fault]:
    """Read a shard from its first byte to its last.

    Args:
        url: What `webdataset.gopen` can open: a path, `pipe:`, `https://`, `s3://` and others; compressed or not.

    Yields:
        Key, image bytes and caption bytes of each sample; and a `Fault` for each incomplete one and for a damaged
        shard, of which the rest is lost.
    """
    damage: list[str] = []
    count = 0
    for key, members in group_members(_read_members(url, damage)):
        chosen = choose_members(url, key, members, CAPTION)
        count += 1
        if not isinstance(chosen, Fault):
            yield key, *chosen
        elif not damage:
            # A last sample cut short by the shard's end is no second fault.
            yield chosen
    if damage:
        yield Fault(url, "", f"damaged after {count} samples: {damage[0]}; what follows is lost")
    elif not count:
        yield Fault(url, "", "holds no sample")


class _StrictTarInfo(tarfile.TarInfo):
    """Raises at headers at which `tarfile` would quietly take the archive as ended."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> _StrictTarInfo:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the mark of a proper end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"no valid header at byte {tar.offset}: {error}") from error


class _EndingStream:
    """Raises when it is read on behind its end, as `tarfile` does to pass by a size that a header only claims."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._empty = 0

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes."""
        data: bytes = self._stream.read(size)
        self._empty = 0 if data else self._empty + 1
        if self._empty > _MOST_EMPTY:
            raise EOFError("the shard ends within a member")
        return data


def _read_members(url: str, damage: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of a shard's members, and append to `damage` what ended it early if something did."""
    from webdataset.gopen import gopen

    try:
        with gopen(url) as stream:
            ending: Any = _EndingStream(stream)
            with tarfile.open(fileobj=ending, mode="r|*", tarinfo=_StrictTarInfo) as tar:
                for member in plain_members(tar):
                    # Otherwise the archive remembers every member it has passed.
                    tar.members = []  # type: ignore[attr-defined]
                    file = tar.extractfile(member)
                    assert file is not None
                    yield member.name, file.read()
            # A pipe whose end is not read breaks, and its command's own exit status would stay unknown.
            while stream.read(1 << 20):
                pass
    except DAMAGE as error:
        damage.append(str(error))


class ResampledStream:
    """A `mmod.data.loader.BatchStream` of pairs from shards that are drawn with replacement.

    Args:
        urls: The shards.
        transform: From a PIL image to a tensor (C, H, W), drawing from the global random states if at all.
        tokenizer: From captions to tokens (B, L).
        report: Where faults are counted.
        batch_size: Pairs in a batch of one process.
        steps_per_epoch: Batches in an epoch.
        shuffle: Samples a lane holds for shuffling.
        workers: Worker processes and so lanes; 0 reads in this one, which is then the only lane.
        pin_memory: Return pinned tensors.
        place: Number of this process and number of processes.
        seed: Seed of everything drawn.
    """

    def __init__(
        self,
        urls: Sequence[str],
        transform: Callable[..., Tensor],
        tokenizer: Callable[[list[str]], Tensor],
        report: CorruptReport,
        *,
        batch_size: int,
        steps_per_epoch: int,
        shuffle: int = 5000,
        workers: int = 0,
        pin_memory: bool = False,
        place: tuple[int, int] = (0, 1),
        seed: int = 0,
    ):
        self.urls = list(urls)
        self.transform = transform
        self.tokenizer = tokenizer
        self.report = report
        self.batch_size = batch_size
        self.steps_per_epoch = steps_per_epoch
        self.shuffle = shuffle
        self.workers = workers
        self.pin_memory = pin_memory
        self.rank, world = place
        self.seed = seed
        self.num_samples = steps_per_epoch * batch_size * world

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the batches of an epoch; see `mmod.data.loader.BatchStream.batches`.

        Args:
            epoch: Number of the epoch, from 0.
            start: First batch; those before it are read and dropped.

        Yields:
            Images and tokens.

        Raises:
            ValueError: If the epoch is negative or has no batch `start`.
            CorruptDataError: At a fault, unless the report says "skip", or if no shard holds a sample that can be read.
        """
        if epoch < 0 or not 0 <= start <= self.steps_per_epoch:
            raise ValueError(f"epoch={epoch} must be >= 0 and start={start} in [0, {self.steps_per_epoch}]")
        loader = DataLoader(
            _Lanes(self, epoch, start),
            batch_size=None,
            num_workers=self.workers,
            collate_fn=unchanged,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),
        )
        return checked(iter(loader), self.report)

    def read_lane(self, epoch: int, lane: int) -> Iterator[Batch]:
        """Yield the batches of one lane without end, and before them the faults as they are met.

        Args:
            epoch: Number of the epoch.
            lane: Number of the lane.
        """
        rng = random.Random(f"{self.seed}/{epoch}/{self.rank}/{lane}")
        images: list[Any] = []
        captions: list[str] = []
        faults: list[Fault] = []
        batches = 0
        for raw in self._shuffled(rng):
            found = raw if isinstance(raw, Fault) else self._decode(*raw)
            if isinstance(found, Fault):
                faults.append(found)
                if len(faults) > _MOST_FAULTS:
                    raise CorruptDataError(f"{len(faults)} faults while one batch was read, the last: {found}")
                if self.report.on_corrupt == "raise":
                    yield Batch(torch.empty(0), torch.empty(0), faults)
                continue
            images.append(found[0])
            captions.append(found[1])
            if len(images) == self.batch_size:
                seeds = self.seed, epoch, self.rank, lane, batches
                yield Batch(self._transform(images, seeds), self.tokenizer(captions), faults)
                images, captions, faults = [], [], []
                batches += 1

    def _transform(self, images: list[Any], seeds: tuple[int, ...]) -> Tensor:
        with kept_random_state():
            seed_all(*seeds)
            return torch.stack([self.transform(image) for image in images])

    def _shuffled(self, rng: random.Random) -> Iterator[tuple[str, str, bytes, bytes] | Fault]:
        """Yield samples from a buffer in random order, and faults at once."""
        held: list[tuple[str, str, bytes, bytes]] = []
        barren = count = 0
        while True:
            url = rng.choice(self.urls)
            barren += 1
            for found in stream_shard(url):
                if isinstance(found, Fault):
                    yield found
                    continue
                barren = 0
                held.append((url, *found))
                count += 1
                if len(held) >= self.shuffle or (len(held) >= _FIRST and count % 2):
                    place = rng.randrange(len(held))
                    held[place], held[-1] = held[-1], held[place]
                    yield held.pop()
            if barren > 2 * len(self.urls) + 8:
                raise CorruptDataError(f"{barren} shards in a row gave no sample, the last of them {url!r}")

    def _decode(self, url: str, key: str, image: bytes, caption: bytes) -> tuple[Any, str] | Fault:
        try:
            return decode_image(image, "RGB"), CAPTION.parse(caption)
        except ValueError as error:
            return Fault(url, key, str(error))


class _Lanes(IterableDataset):
    """The part of an epoch that a worker process reads: one lane, from the batch that is its first."""

    def __init__(self, stream: ResampledStream, epoch: int, start: int):
        self.stream = stream
        self.epoch = epoch
        self.start = start

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, lanes = (info.id, info.num_workers) if info else (0, 1)
        # The loader asks its workers in turn, beginning with the first; batch i belongs to lane i % lanes.
        lane = (self.start + worker) % lanes
        steps = range(lane, self.stream.steps_per_epoch, lanes)
        skipped = sum(step < self.start for step in steps)
        yield from islice(self.stream.read_lane(self.epoch, lane), skipped, len(steps))
