"""Folders of shards made from parameters: either whole and as asked for, or not there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from mmod.io.files import open_shard, parse_json
from mmod.io.locks import locked

MANIFEST = "manifest.json"
SIZES = "sizes.json"

Config = TypeVar("Config")


@dataclass(frozen=True)
class ShardSet:
    """What a folder of shards is to hold.

    Args:
        name: What the set is called in messages.
        format: Number that changes whenever the same parameters would give other bytes: an older build is then
            refused, not mixed.
        parameters: JSON values that decide the content.
        samples: Name of each split to its number of samples.
        shard_size: Samples in one shard.
        digits: Digits in the number of a shard.
        compose: From a split to its samples: `__key__` and the bytes of each member by its extension.
        sizes: Also write `sizes.json`, in which open_clip's training program looks for the number of samples.
    """

    name: str
    format: int
    parameters: dict[str, Any]
    samples: dict[str, int]
    shard_size: int
    digits: int
    compose: Callable[[str], Iterator[dict[str, Any]]]
    sizes: bool = False


def find_level(levels: Mapping[str, Config], level: str, name: str) -> Config:
    """Look up a named parameter set.

    Args:
        levels: All of them.
        level: The one wanted.
        name: What the set is called in messages.

    Raises:
        ValueError: If there is no such level.

    Example:
        >>> find_level({"default": 32, "64": 64}, "64", "digits")
        64
    """
    if level not in levels:
        raise ValueError(f"{name} level {level!r} is unknown; valid: {', '.join(levels)}")
    return levels[level]


def build_shards(root: str | Path, wanted: ShardSet, progress: bool = False) -> dict[str, Any]:
    """Write the shards of a build, or find them already written.

    The shards are written to a temporary folder beside `root` which takes the place of `root` once complete, so an
    interrupted build leaves nothing that could be taken for one. Processes that ask for the same build at
    once wait for the first.

    Args:
        root: Folder of the build. It must not exist, be empty, or hold a build with the same parameters.
        wanted: What to build.
        progress: Show a progress bar.

    Returns:
        The manifest: `format`, `parameters` and, for each shard, its `samples` and `sha256`.

    Raises:
        FileExistsError: If `root` holds another build or files that are no build.
        ValueError: If `root` holds the right build but a shard of it is damaged.
    """
    root = Path(root)
    with locked(root, wait=True):
        if root.is_dir() and any(root.iterdir()):
            return _check(root, wanted)
        partial = root.parent / f".{root.name}.partial"
        # Only the holder of the lock writes here, so what is left over belongs to a build that was killed.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            manifest = _write(partial, wanted, progress)
            os.rename(partial, root)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return manifest


def _plain(parameters: dict[str, Any]) -> dict[str, Any]:
    # Through JSON, so that tuples compare equal to the lists that a manifest holds.
    plain: dict[str, Any] = json.loads(json.dumps(parameters))
    return plain


def _check(root: Path, wanted: ShardSet) -> dict[str, Any]:
    if not (root / MANIFEST).is_file():
        raise FileExistsError(f"{root} is not empty and holds no build of {wanted.name}; choose another folder")
    manifest = parse_json((root / MANIFEST).read_bytes(), str(root / MANIFEST))
    if not isinstance(manifest, dict) or not all(
        isinstance(manifest.get(key), dict) for key in ("parameters", "shards")
    ):
        raise ValueError(f"{root / MANIFEST} is no manifest; delete {root} to build it again")
    found, asked = manifest["parameters"], _plain(wanted.parameters)
    found, asked = {**found, "format": manifest.get("format")}, {**asked, "format": wanted.format}
    differing = sorted(key for key in {*found, *asked} if found.get(key) != asked.get(key))
    if differing:
        changes = "; ".join(f"{key}: {found.get(key)} there, {asked.get(key)} asked for" for key in differing)
        raise FileExistsError(f"{root} holds another build ({changes}); choose another folder or delete it")
    for name, entry in manifest["shards"].items():
        if not (root / name).is_file() or _sha256(root / name) != entry["sha256"]:
            raise ValueError(f"{root / name} is missing or differs from its checksum; delete {root} to build it again")
    return manifest


def _write(folder: Path, wanted: ShardSet, progress: bool) -> dict[str, Any]:
    from tqdm import tqdm

    shards: dict[str, dict[str, Any]] = {}
    with tqdm(total=sum(wanted.samples.values()), unit="scene", disable=not progress) as bar:
        for split, count in wanted.samples.items():
            scenes = wanted.compose(split)
            for first in range(0, count, wanted.shard_size):
                path = folder / f"{split}-{first // wanted.shard_size:0{wanted.digits}d}.tar"
                samples = min(wanted.shard_size, count - first)
                with open_shard(path) as writer:
                    for sample in islice(scenes, samples):
                        writer.write(sample)
                shards[path.name] = {"samples": samples, "sha256": _sha256(path)}
                bar.update(samples)
    manifest = {
        "format": wanted.format,
        "parameters": _plain(wanted.parameters),
        "shards": dict(sorted(shards.items())),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    if wanted.sizes:
        sizes = {name: entry["samples"] for name, entry in sorted(shards.items())}
        (folder / SIZES).write_text(json.dumps(sizes, indent=2) + "\n")
    return manifest


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
