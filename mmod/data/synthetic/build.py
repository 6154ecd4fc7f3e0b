"""Embedded data sets as folders of shards: either whole and as asked for, or not there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mmod.data.synthetic.handwriting import SPLITS
from mmod.io.claim import check_same, read_claim
from mmod.io.files import open_shard, parse_json, replacing
from mmod.io.locks import locked
from mmod.io.progress import progress_bar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MANIFEST = "manifest.json"
SIZES = "sizes.json"

Config = TypeVar("Config", bound="DataclassInstance")


@dataclass(frozen=True)
class SyntheticSet(Generic[Config]):
    """A data set that is made from parameters, and found again where it was made before.

    Args:
        name: What it is called in configs.
        title: What it is called in messages and, with dashes, in the name of its folder.
        format: Number that changes whenever the same parameters would give other bytes: an older build is then
            refused, not mixed.
        difficulties: Named parameters, "default" among them.
        compose: From parameters and a split to its samples: `__key__` and the bytes of each member by its extension.
        counts: The field of the parameters that gives the number of samples of each split; what they are called.
        digits: Digits in the number of a shard.
        added: Fields that builds of this format once lacked: at their defaults they stay out of the manifest.
        sizes: Also write `sizes.json`, in which open_clip's training program looks for the number of samples.
    """

    name: str
    title: str
    format: int
    difficulties: Mapping[str, Config]
    compose: Callable[[Config, str], Iterator[dict[str, Any]]]
    counts: str
    digits: int = 6
    added: tuple[str, ...] = ()
    sizes: bool = False

    def config(self, difficulty: str) -> Config:
        """Return named parameters.

        Raises:
            ValueError: If there are none of that name.
        """
        if difficulty not in self.difficulties:
            valid = ", ".join(self.difficulties)
            raise ValueError(f"difficulty {difficulty!r} of {self.title} is unknown; valid: {valid}")
        return self.difficulties[difficulty]

    def locate(self, source: str, root: str | Path | None = None, progress: bool = True) -> str:
        """Return the pattern of a split's shards, built where they are not there.

        Args:
            source: `NAME:DIFFICULTY/SPLIT`.
            root: Folder of the build; by default one in `runs/data`, named after title and difficulty.
            progress: Show a progress bar.

        Raises:
            ValueError: If the difficulty or the split is unknown.
            FileExistsError: As `build` does.
        """
        difficulty, _, split = source.removeprefix(f"{self.name}:").partition("/")
        config = self.config(difficulty)
        if split not in SPLITS:
            raise ValueError(f"{source!r} must be {self.name}:DIFFICULTY/SPLIT with a split of {', '.join(SPLITS)}")
        folder = Path(root or f"runs/data/{self.title.replace(' ', '-')}-{difficulty}")
        self.build(folder, config, progress)
        return f"{folder}/{split}-*.tar"

    def build(self, root: str | Path, config: Config | str = "default", progress: bool = False) -> dict[str, Any]:
        """Write the shards of a build, or find them already written.

        The folder appears once it is complete, so an interrupted build leaves nothing that could be taken for one.
        Processes that ask for the same build at once wait for the first.

        Args:
            root: Folder of the build. It must not exist, be empty, or hold a build with the same parameters.
            config: Parameters, or the name of a difficulty.
            progress: Show a progress bar.

        Returns:
            The manifest: `format`, `parameters` and, for each shard, its `samples` and `sha256`.

        Raises:
            FileExistsError: If `root` holds another build or files that are no build.
            ValueError: If `root` holds the right build but a shard of it is damaged.
        """
        config = self.config(config) if isinstance(config, str) else config
        root = Path(root)
        defaults = asdict(type(config)())
        late = {name: defaults[name] for name in self.added}
        with locked(root, wait=True):
            found = read_claim(root, MANIFEST)
            if found is not None:
                return self._check(root, found, config, late)
            parameters = {name: value for name, value in asdict(config).items() if late.get(name, ...) != value}
            manifest: dict[str, Any] = {"format": self.format, "parameters": parameters}
            with replacing(root) as partial:
                partial.mkdir()
                manifest["shards"] = self._write(partial, config, progress)
                (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
                if self.sizes:
                    sizes = {name: shard["samples"] for name, shard in manifest["shards"].items()}
                    (partial / SIZES).write_text(json.dumps(sizes, indent=2) + "\n")
        written: dict[str, Any] = parse_json((root / MANIFEST).read_bytes(), str(root / MANIFEST))
        return written

    def _write(self, folder: Path, config: Config, progress: bool) -> dict[str, dict[str, Any]]:
        shards: dict[str, dict[str, Any]] = {}
        counts, size = getattr(config, self.counts), config.shard_size  # type: ignore[attr-defined]
        with progress_bar(desc="build", total=sum(counts.values()), unit=self.counts, shown=progress) as bar:
            for split in SPLITS:
                samples = self.compose(config, split)
                for first in range(0, counts[split], size):
                    path = folder / f"{split}-{first // size:0{self.digits}d}.tar"
                    count = min(size, counts[split] - first)
                    with open_shard(path) as writer:
                        for sample in islice(samples, count):
                            writer.write(sample)
                    shards[path.name] = {"samples": count, "sha256": _sha256(path)}
                    bar.update(count)
        return dict(sorted(shards.items()))

    def _check(self, root: Path, found: dict[str, Any], config: Config, late: dict[str, Any]) -> dict[str, Any]:
        """Return a manifest if it is that of the build asked for and its shards are as it says."""
        if not all(isinstance(found.get(key), dict) for key in ("parameters", "shards")):
            raise ValueError(f"{root / MANIFEST} is no manifest; delete {root} to build it again")
        there = {**late, **found["parameters"], "format": found.get("format")}
        check_same(root, there, {**asdict(config), "format": self.format}, kind=f"a build of {self.title}")
        for name, shard in found["shards"].items():
            if not (root / name).is_file() or _sha256(root / name) != shard["sha256"]:
                raise ValueError(
                    f"{root / name} is missing or differs from its checksum; delete {root} to build it again"
                )
        return found


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
