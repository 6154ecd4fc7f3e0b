"""Measure how training and its data hold up, and write the tables of docs/notebook/reliability.md.

python -m scripts.reliability                  # everything, half an hour on two cores
python -m scripts.reliability hostile steps    # some of the measurements; the page shows the last of each
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmod.data.config import AugmentConfig, DataConfig
from mmod.data.corrupt import CorruptReport
from mmod.data.loader import image_stream
from mmod.data.readers.shards import ShardSource
from mmod.data.stream import BatchStream
from mmod.io.files import write_atomically
from mmod.training import ModelConfig, TrainConfig, fit
from scripts import doc_tables, pages

RESULTS = doc_tables.DOCS / "notebook/results/reliability.json"
_MIB = 1 << 20


def table(columns: list[str], formats: list[str], rows: Iterable[list[Any]]) -> dict[str, Any]:
    """Return a table as `scripts/doc_tables.py` reads it."""
    return {"columns": columns, "formats": formats, "rows": list(rows)}


def hostile() -> dict[str, Any]:
    """Run every hostile input, and count the outcomes by group."""
    from tests.hostile import run
    from tests.hostile.cases import GROUPS

    rows = []
    for name, make in GROUPS.items():
        outcomes = [run(case) for case in make()]
        for outcome in outcomes:
            if outcome.fault:
                print(f"{name}: {outcome.case.name}: {outcome.fault}")
        documented = [outcome.case.documented for outcome in outcomes]
        counts = [documented.count(kind) for kind in ("refused", "counted", "read")]
        faults = sum(bool(outcome.fault) for outcome in outcomes)
        rows.append([name, *counts, faults, max(outcome.mebibytes for outcome in outcomes)])
    totals = [sum(column) for column in [*zip(*rows)][1:-1]]
    columns = ["input", "refused", "counted", "read", "not as documented", "largest memory, MiB"]
    return table(columns, ["{}"] * 5 + ["{:.0f}"], [*rows, ["all", *totals, max(row[-1] for row in rows)]])


def kills() -> dict[str, Any]:
    """Kill runs and studies 20 times each, and compare what the resumed ones come to."""
    from scripts.kills import WORK, count_kills

    counts = [count_kills(name) for name in WORK]
    rows = [[row["name"], row["kills"], row["saving"], [row["equal"], row["resumed"]]] for row in counts]
    columns = ["what", "kills", "while a file was written", "equal to the undisturbed"]
    return table(columns, ["{}", "{}", "{}", "{} of {}"], rows)


class Watched:
    """A stream that notes CPU time, memory and open files at each batch.

    Args:
        stream: The stream.
        steps: Number of batches in all epochs.
    """

    def __init__(self, stream: BatchStream, steps: int) -> None:
        self.stream, self.done = stream, 0
        # Allocated at once, so that the notes do not count as growth.
        self.notes = np.full((steps, 3), np.nan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of an epoch."""
        for batch in self.stream.batches(epoch, start):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            files = len(os.listdir("/proc/self/fd"))
            self.notes[self.done] = time.process_time(), pages * os.sysconf("SC_PAGE_SIZE") / _MIB, files
            self.done += 1
            yield batch


def steps(total: int = 10_000, epochs: int = 10) -> dict[str, Any]:
    """Train a small classifier for 10,000 steps, and fit lines to what it uses."""
    with tempfile.TemporaryDirectory() as folder:
        args = {"img_size": 32, "patch_size": 8, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
        data = DataConfig("digits:aligned", root=f"{folder}/digits", batch_size=5000 * epochs // total)
        config = TrainConfig(
            output=f"{folder}/run",
            model=ModelConfig("vit_tiny_patch16_224", {**args, "num_classes": 10}),
            data=data,
            epochs=epochs,
        )
        watched = Watched(image_stream(data, seed=0), total)
        fit(config, streams=(watched, image_stream(data)), progress=False)  # type: ignore[arg-type]
    times, memory, files = watched.notes.T
    seconds = np.diff(times)
    # The first epoch fills caches; evaluations and checkpoints stand between epochs.
    warm = slice(total // epochs, None)
    windows = np.array([np.median(part) for part in np.array_split(seconds[warm], 50)])
    rows = [
        ["resident memory, MiB", float(np.median(memory[warm])), _slope(memory[warm])],
        ["CPU time of a step, ms", float(1e3 * np.median(seconds[warm])), _slope(windows) * 50 / len(seconds[warm])],
        ["open files", float(np.median(files[warm])), _slope(files[warm])],
    ]
    return table(["", "median", "slope per 1,000 steps, %"], ["{}", "{:.2f}", "{:+.2f}"], rows)


def _slope(values: np.ndarray) -> float:
    """Return the slope of a line through values, per 1,000 of them and in percent of their median."""
    return float(1e5 * np.polyfit(np.arange(len(values)), values, 1)[0] / np.median(values))


def shards(count: int = 1000, samples: int = 100) -> dict[str, Any]:
    """Time the start on shards with an index, and that of an epoch that is resumed in its middle."""
    image = _jpeg(np.random.default_rng(0), 16)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            _write_shard(Path(folder, f"train-{number:06d}.tar"), [(image, 0)] * samples)
        times = []
        for _ in range(4):
            start, cpu = time.perf_counter(), sum(os.times()[:4])
            ShardSource(f"{folder}/train-*.tar", CorruptReport())
            times.append((time.perf_counter() - start, sum(os.times()[:4]) - cpu))
        config = DataConfig(f"shards:{folder}/{{split}}-*.tar", image_size=16, crop_pct=1.0, batch_size=64)
        stream = image_stream(config, seed=0)
        resumed = [_first_batch(stream, at) for at in (0, stream.steps_per_epoch // 2) for _ in range(3)]
        batches = islice(stream.batches(0), 100)
        next(batches)
        start = time.perf_counter()
        seconds = sum(1 for _ in batches) and (time.perf_counter() - start) / 99 * stream.steps_per_epoch
    rows = [
        ["first start, which indexes them in parallel processes", *times[0]],
        ["later starts, which read the indices", *(statistics.median(values) for values in zip(*times[1:]))],
        ["first batch of an epoch", statistics.median(resumed[:3]), None],
        ["first batch of an epoch that resumes in its middle", statistics.median(resumed[3:]), None],
        ["an epoch, from 100 batches", seconds, None],
    ]
    return table(["", "seconds", "CPU seconds"], ["{}", "{:.2f}", "{:.2f}"], rows)


def _first_batch(stream: BatchStream, start: int) -> float:
    before = time.perf_counter()
    next(stream.batches(1, start))
    return time.perf_counter() - before


def loader(rounds: int = 8, images: int = 512) -> dict[str, Any]:
    """Compare reading shards of JPEG images with timm's own loaders, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        _write_photos(Path(folder), images)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("mmod", "folder", "wds")}
        for turn in range(rounds):
            for name, measured in found.items():
                measured.append(_cost(_open(name, Path(folder), turn)))
    costs = {name: np.array(measured) for name, measured in found.items()}
    # Other work on the machine only adds wall time, so the quietest epoch is nearest to the truth.
    chosen = {name: np.array([cost[:, 0].min(), np.median(cost[:, 1])]) for name, cost in costs.items()}
    names = {"mmod": "mmod, shards", "folder": "timm, image folder", "wds": "timm, `wds/` shards"}
    rows = []
    for name, (wall, cpu) in chosen.items():
        walls, cpus = (None, None) if name == "mmod" else (chosen[name] / chosen["mmod"]).tolist()
        rows.append([names[name], 1 / wall, walls, 1e3 * cpu, cpus])
    columns = ["reader", "images per second", "mmod divided by it", "CPU milliseconds per image", "it divided by mmod"]
    return table(columns, ["{}", "{:.0f}", "{:.2f}", "{:.2f}", "{:.2f}"], rows)


def _open(name: str, folder: Path, seed: int) -> Iterable[Any]:
    """Return the batches of 64 images, read by 2 workers with the same augmentation."""
    if name == "mmod":
        options: dict[str, Any] = {"image_size": 224, "channels": 3, "batch_size": 64, "workers": 2}
        config = DataConfig(f"shards:{folder}/shards/{{split}}-*.tar", augment=AugmentConfig(), **options)
        return image_stream(config, seed).batches(0)
    from timm.data import create_dataset, create_loader

    source, root = ("wds/", folder / "shards") if name == "wds" else ("", folder / "folder")
    dataset = create_dataset(source, str(root), "train", is_training=True, batch_size=64, seed=seed)
    return create_loader(
        dataset,
        (3, 224, 224),
        64,
        is_training=True,
        use_prefetcher=False,
        num_workers=2,
        persistent_workers=False,
        pin_memory=False,
        color_jitter=0.4,
        interpolation="random",
    )


def padding(seeds: int = 20) -> dict[str, Any]:
    """Return the share of padding in batches of the tiny questions, shuffled and grouped by length."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    from mmod.data.readers.conversations import ConversationsConfig, open_conversations
    from mmod.training.chat.trainer import LengthSampler

    size = 16
    with tempfile.TemporaryDirectory() as root:
        chats = open_conversations("questions:tiny/train", ConversationsConfig(root=f"{root}/questions"))
        words = [sum(len(text.split()) for _, text in chats.record(index)["messages"]) for index in range(len(chats))]
    tokens = np.array(words) + 63 * chats.images
    lengths = chats.images * (1 + int(chats.letters.max())) + chats.letters

    def share(order: Iterable[int]) -> float:
        batches = np.array(list(order)).reshape(-1, size)
        return float(1 - tokens.sum() / (tokens[batches].max(1).sum() * size))

    generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    orders = {
        "shuffled": [np.random.default_rng(seed).permutation(len(tokens)) for seed in range(seeds)],
        "transformers' sampler, which draws from the global random state": [
            get_length_grouped_indices(lengths.tolist(), size, generator=draw) for draw in generators
        ],
        "mmod's, a function of seed and epoch, which resumes at any batch": [
            LengthSampler(lengths, size, seed) for seed in range(seeds)
        ],
    }
    rows = [[name, 100 * float(np.mean([*map(share, drawn)]))] for name, drawn in orders.items()]
    return table(["order", "padding, %"], ["{}", "{:.1f}"], rows)


def _cost(batches: Iterable[Any]) -> tuple[float, float]:
    """Return wall and CPU seconds per image of an epoch, with the start and the end of its workers."""
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    count = sum(len(batch[0]) for batch in batches)
    return (time.perf_counter() - wall) / count, (sum(os.times()[:4]) - cpu) / count


def _write_photos(folder: Path, count: int, shards: int = 4) -> None:
    """Write smooth noise of 256 pixels as JPEG, as shards and as an image folder."""
    random = np.random.default_rng(0)
    photos = [(_jpeg(random, 256), number % 4) for number in range(count)]
    (folder / "shards").mkdir()
    for number in range(shards):
        _write_shard(folder / f"shards/train-{number:06d}.tar", photos[number::shards])
    lengths = [len(photos[number::shards]) for number in range(shards)]
    names = [f"train-{number:06d}.tar" for number in range(shards)]
    split = {"name": "train", "filenames": names, "shard_lengths": lengths, "num_samples": count}
    (folder / "shards/_info.json").write_text(json.dumps({"splits": {"train": split}}))
    for number, (data, label) in enumerate(photos):
        path = folder / f"folder/train/{label}/{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _jpeg(random: np.random.Generator, side: int) -> bytes:
    coarse = Image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8))
    file = io.BytesIO()
    coarse.resize((side, side), Image.Resampling.BICUBIC).save(file, format="JPEG", quality=90)
    return file.getvalue()


def _write_shard(path: Path, samples: list[tuple[bytes, int]]) -> None:
    with tarfile.open(path, "w") as tar:
        for number, (image, label) in enumerate(samples):
            for suffix, data in (("jpg", image), ("cls", str(label).encode())):
                info = tarfile.TarInfo(f"{number:06d}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


MEASUREMENTS = {
    "hostile": hostile,
    "kills": kills,
    "steps": steps,
    "shards": shards,
    "loader": loader,
    "padding": padding,
}


def main() -> None:
    """Measure what the command line names, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*MEASUREMENTS, []], metavar="NAME", help=", ".join(MEASUREMENTS))
    torch.set_num_threads(1)
    for name in parser.parse_args().names or MEASUREMENTS:
        machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, torch {torch.__version__}"
        measured = {"commands": ["python -m scripts.reliability"], "machine": machine, **MEASUREMENTS[name]()}
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        write_atomically(RESULTS, json.dumps({**results, name: measured}, indent=1) + "\n")
    pages.update()


if __name__ == "__main__":
    main()
