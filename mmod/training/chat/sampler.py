"""The order of conversations in training: shuffled, with batches of similar lengths and an image in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

# Batches that are sorted by length together: enough for even batches, few enough that an epoch stays shuffled.
_WINDOW = 8


class LengthSampler(Sampler[int]):
    """Shuffles samples so that batches have similar lengths; a function of seed and epoch.

    Args:
        lengths: Length of each sample.
        batch: Samples of one step over all processes.
        seed: Seed of the order.
        images: Images of each sample, if each batch of a process needs one: processes wait for each other's gradients
            of the vision tower. None otherwise.
        share: Samples in a batch of one process.

    Example:
        >>> order = list(LengthSampler([1, 9, 1, 9], batch=2, seed=0))
        >>> sorted(order), order[0] % 2 == order[1] % 2
        ([0, 1, 2, 3], True)
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        batch: int,
        seed: int,
        images: Sequence[int] | np.ndarray | None = None,
        share: int = 1,
    ) -> None:
        self.lengths = np.asarray(lengths)
        self.batch = batch
        self.seed = seed
        self.share = share
        self.seeing = None if images is None or not np.any(images) else np.asarray(images) > 0
        self.epoch = 0
        batches = -(-len(self.lengths) // share)
        if self.seeing is not None and self.seeing.sum() < batches:
            raise ValueError(
                f"{self.seeing.sum()} conversations have an image, and {batches} batches of {share} need one each: use "
                "larger batches, or leave conversations without images out"
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        """Yield the samples of an epoch."""
        order = list(self._shuffled())
        return iter(order if self.seeing is None else _spread(order, self.seeing, self.share))

    def _shuffled(self) -> Iterator[int]:
        rng = np.random.default_rng([self.seed, self.epoch])
        order = rng.permutation(len(self.lengths))
        for start in range(0, len(order), self.batch * _WINDOW):
            window = order[start : start + self.batch * _WINDOW]
            window = window[np.argsort(self.lengths[window], kind="stable")]
            full = len(window) // self.batch * self.batch
            for place in rng.permutation(full // self.batch):
                yield from window[place * self.batch : (place + 1) * self.batch].tolist()
            yield from window[full:].tolist()


def _spread(order: list[int], seeing: np.ndarray, share: int) -> list[int]:
    """Swap the fewest samples such that every batch has one with an image."""
    batches = [order[start : start + share] for start in range(0, len(order), share)]
    donors = [batch for batch in batches if seeing[batch].sum() > 1]
    for batch in batches:
        if seeing[batch].any():
            continue
        donor = donors[-1]
        place = int(np.flatnonzero(seeing[donor])[-1])
        batch[-1], donor[place] = donor[place], batch[-1]
        if seeing[donor].sum() == 1:
            donors.pop()
    return [sample for batch in batches for sample in batch]
