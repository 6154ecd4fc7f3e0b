"""Embedded data sets as folders of shards, built atomically, split by split, and checked on reuse."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Generic, TypedDict, TypeVar

import numpy as np
from PIL import Image

from mmod.data.synthetic.handwriting import SPLITS, DrawnConfig, DrawnSamples
from mmod.io.files import SIZES, locked, open_shard, read_json_object, replacing, sha256, write_json
from mmod.io.progress import progress_bar
from mmod.io.records import check_same, read_record

MANIFEST = "manifest.json"
# Images per row of a picture, and rows.
_COLUMNS, _ROWS = 8, 4

Config = TypeVar("Config", bound=DrawnConfig)
Scene = TypeVar("Scene")


class BuiltFile(TypedDict):
    """A file of a built set: its number of samples and its checksum."""

    samples: int
    sha256: str


@dataclass(frozen=True)
class SyntheticSet(Generic[Config, Scene]):
    """A data set generated from parameters, and reused if it was built before.

    Args:
        title: Name in messages and, with dashes, of the folder.
        format: Version of the generator: builds of another one, whose bytes may differ, are refused.
        difficulties: Named parameters, including "default".
        compose: From parameters and a split to its samples.
        encode: From a key and a scene to the members of its sample, bytes by extension.
        sizes: Also write `sizes.json`, from which open_clip's training program reads the number of samples.
    """

    name: str
    title: str
    format: int
    difficulties: Mapping[str, Config]
    compose: Callable[[Config, str], DrawnSamples[Scene]]
    encode: Callable[[str, Scene], dict[str, bytes]]
    shard_digits: int = 6
    key_digits: int = 6
    sizes: bool = False

    def config(self, difficulty: str) -> Config:
        """Return the parameters of a difficulty; raise a ValueError for an unknown one."""
        if difficulty not in self.difficulties:
            valid = ", ".join(self.difficulties)
            raise ValueError(f"difficulty {difficulty!r} of {self.title} is unknown; valid: {valid}")
        return self.difficulties[difficulty]

    def locate(self, source: str, root: str | Path | None = None, progress: bool = True) -> str:
        """Return the glob pattern of a split's shards, built into `root` or `runs/data/TITLE-DIFFICULTY` if missing.

        No other split is drawn: that for training takes the longest, and an evaluation does not read it.
        """
        difficulty, split = self._parse(source)
        config = self.config(difficulty)
        folder = Path(root or f"runs/data/{self.title.replace(' ', '-')}-{difficulty}")
        self.build(folder, config, progress, splits=(split,))
        return f"{folder}/{split}-*.tar"

    def draw(self, source: str) -> DrawnSamples[Scene]:
        """Return the samples of a split, each drawn when it is read, without a folder."""
        difficulty, split = self._parse(source)
        return self.compose(self.config(difficulty), split)

    def _parse(self, source: str) -> tuple[str, str]:
        """Return difficulty and split of `NAME:DIFFICULTY/SPLIT`."""
        difficulty, _, split = source.removeprefix(f"{self.name}:").partition("/")
        if split not in SPLITS:
            raise ValueError(f"{source!r} must be {self.name}:DIFFICULTY/SPLIT with a split of {', '.join(SPLITS)}")
        return difficulty, split

    def build(
        self,
        root: str | Path,
        config: Config | str = "default",
        progress: bool = False,
        *,
        splits: Sequence[str] = SPLITS,
    ) -> dict[str, BuiltFile]:
        """Write the shards of some splits, unless they are there with the same parameters; return all by name."""
        if isinstance(config, str):
            config = self.config(config)
        root = Path(root)
        counts = getattr(config, config.counts)
        # Concurrent processes wait for the first one. The folder appears only when its first splits are complete.
        with locked(root, wait=True):
            manifest = read_record(root, MANIFEST)
            if manifest is None:
                with replacing(root) as partial:
                    partial.mkdir()
                    self._add(partial, {}, config, splits, progress)
            else:
                shards = self._check(root, manifest, config)
                built = {name.partition("-")[0] for name in shards}
                missing = [split for split in splits if split not in built and counts[split]]
                if missing:
                    self._add(root, shards, config, missing, progress)
        # Read back, so that a new build and a reused one return the same types.
        return read_json_object(root / MANIFEST)["shards"]

    def _add(
        self, folder: Path, built: Mapping[str, BuiltFile], config: Config, splits: Sequence[str], progress: bool
    ) -> None:
        """Write the shards of splits, and then the manifest that names all, so that a killed build leaves no half."""
        shards = {**built, **self._write(folder, config, splits, progress)}
        shards = dict(sorted(shards.items()))
        if self.sizes:
            sizes = {name: shard["samples"] for name, shard in shards.items()}
            write_json(folder / SIZES, sizes)
        write_json(folder / MANIFEST, {"format": self.format, "parameters": asdict(config), "shards": shards})

    def _write(self, folder: Path, config: Config, splits: Sequence[str], progress: bool) -> dict[str, BuiltFile]:
        shards: dict[str, BuiltFile] = {}
        counts = getattr(config, config.counts)
        size = config.shard_size
        total = sum(counts[split] for split in splits)
        with progress_bar(desc="build", total=total, unit=config.counts, shown=progress) as bar:
            for split in splits:
                scenes = self.compose(config, split)
                for first in range(0, counts[split], size):
                    path = folder / f"{split}-{first // size:0{self.shard_digits}d}.tar"
                    count = min(size, counts[split] - first)
                    with open_shard(path) as writer:
                        for index in range(first, first + count):
                            key = f"{index:0{self.key_digits}d}"
                            writer.write({"__key__": key, **self.encode(key, scenes[index])})
                    shards[path.name] = {"samples": count, "sha256": sha256(path)}
                    bar.update(count)
        return shards

    def _check(self, root: Path, manifest: Mapping[str, object], config: Config) -> dict[str, BuiltFile]:
        """Return the shards of an existing build, after checking its parameters and checksums."""
        parameters = manifest.get("parameters")
        shards = manifest.get("shards")
        if not isinstance(parameters, dict) or not isinstance(shards, dict):
            raise ValueError(f"{root / MANIFEST} is no manifest; delete {root} to build it again")
        recorded = {**parameters, "format": manifest.get("format")}
        wanted = {**asdict(config), "format": self.format}
        check_same(root, recorded, wanted, kind=f"a build of {self.title}")
        for name, shard in shards.items():
            path = root / name
            if not path.is_file() or sha256(path) != shard["sha256"]:
                raise ValueError(f"{path} is missing or differs from its checksum; delete {root} to build it again")
        return shards


def save_montage(path: str | Path, dataset: SyntheticSet[Config, Scene], config: Config) -> None:
    """Write a new PNG file with the first test images of a set, each followed by its label map if there is one."""
    scale = max(1, 96 // config.canvas)
    gap = 4
    cell = config.canvas * scale + gap
    sheet = np.full((_ROWS * cell + gap, _COLUMNS * cell + gap), 255, np.uint8)
    members = chain.from_iterable(dataset.encode("0", scene).items() for scene in dataset.compose(config, "test"))
    images = (content for name, content in members if name.endswith("png"))
    for index, image in zip(range(_ROWS * _COLUMNS), images):
        row, column = divmod(index, _COLUMNS)
        top = gap + row * cell
        left = gap + column * cell
        opened = Image.open(io.BytesIO(image))
        grey = np.asarray(opened.convert("L"))
        large = grey.repeat(scale, axis=0).repeat(scale, axis=1)
        sheet[top : top + len(large), left : left + len(large)] = large
    # Refuses an existing file: a picture of the user's may have the name.
    with open(path, "xb") as file:
        Image.fromarray(sheet).save(file, format="PNG", optimize=True)
