"""How fast pairs are read, beside open_clip's own reader on the same shards in the same run."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import open_clip
from tqdm import tqdm

from mmod.data.config import PairsConfig
from mmod.data.readers.pairs import create_train_pairs
from mmod.data.readers.shards import expand_pattern
from mmod.training.pairs.open_clip_program import readable_shards

__all__ = ["PairsBenchmark", "benchmark_pairs"]


@dataclass(frozen=True)
class PairsBenchmark:
    """Throughput of readers in pairs per second.

    Args:
        rates: Name of each reader to its rate in each round; entry i of each list comes from round i.
    """

    rates: dict[str, list[float]]

    def ratio(self, name: str) -> float:
        """Return a reader's rate over that of open_clip's, median of the rounds.

        Args:
            name: The reader.
        """
        return median(own / theirs for own, theirs in zip(self.rates[name], self.rates["open_clip"]))

    def table(self) -> str:
        """Return the rates as a Markdown table."""
        lines = ["| reader | pairs / s | of open_clip's |", "|---|---|---|"]
        lines += [f"| {name} | {median(found):.0f} | {self.ratio(name):.3f} |" for name, found in self.rates.items()]
        return "\n".join(lines)


def benchmark_pairs(
    shards: str,
    *,
    model: str = "ViT-B-32",
    image_size: int | None = None,
    samples: int = 10000,
    batch_size: int = 64,
    workers: int = 1,
    rounds: int = 5,
    progress: bool = True,
) -> PairsBenchmark:
    """Time one epoch of each reader in turn, from the start of its workers to its last batch.

    All read the same shards with the same transform, tokeniser, batch size and number of workers: open_clip's reader
    with a shuffled epoch, and this library's exact and resampled streams.

    Args:
        shards: Shards of pairs, as `PairsConfig.train`.
        model: Name of an open_clip model, whose tokeniser and training transform are used.
        image_size: Side of the images, in pixels; by default the model's.
        samples: Samples of an epoch; an exact one has those of the shards.
        batch_size: Pairs in a batch.
        workers: Worker processes; at most as many as there are shards.
        rounds: Rounds; each times every reader once.
        progress: Show a bar.

    Returns:
        The rates.

    Raises:
        ValueError: No shard matches, or there are fewer shards than workers.
        ModuleNotFoundError: If pandas is not installed, which open_clip's reader needs.
    """
    found = expand_pattern(shards)
    if not 1 <= workers <= len(found):
        raise ValueError(f"workers={workers} must lie in [1, {len(found)}], the number of shards")
    size = image_size or open_clip.get_model_config(model)["vision_cfg"]["image_size"]
    transform, tokenizer = open_clip.image_transform(size, is_train=True), open_clip.get_tokenizer(model)
    common: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "on_corrupt": "skip"}
    exact = create_train_pairs(PairsConfig(found, **common), transform, tokenizer, seed=0)
    resampled_config = PairsConfig(found, sampling="resampled", samples=samples, **common)
    resampled = create_train_pairs(resampled_config, transform, tokenizer, seed=0)
    readers: dict[str, Callable[[int], Iterable[Any]]] = {
        "open_clip": lambda epoch: _open_clip_reader(found, transform, tokenizer, samples, common, epoch),
        "exact": exact.batches,
        "resampled": resampled.batches,
    }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    with readable_shards(), tqdm(total=rounds * len(readers), unit="epoch", disable=not progress) as bar:
        for number in range(rounds):
            for name, reader in readers.items():
                started, count = time.perf_counter(), 0
                for images, _ in reader(number):
                    count += len(images)
                rates[name].append(count / (time.perf_counter() - started))
                bar.update()
    return PairsBenchmark(rates)


def _open_clip_reader(
    shards: list[str], transform: Any, tokenizer: Any, samples: int, common: dict[str, Any], epoch: int
) -> Iterable[Any]:
    from open_clip_train.data import get_wds_dataset

    arguments = Namespace(
        train_data="::".join(shards),
        train_num_samples=samples,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        seed=0,
        batch_size=common["batch_size"],
        workers=common["workers"],
        world_size=1,
    )
    loader: Iterable[Any] = get_wds_dataset(arguments, transform, True, epoch, tokenizer=tokenizer).dataloader
    return loader
