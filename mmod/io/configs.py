"""The config files shipped with mmod, by path or by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, takewhile
from pathlib import Path

from mmod.io.files import read_text
from mmod.names import first_names, prefixed, say_near, similar

_PACKAGE = Path(__file__).parents[1]
# What the configs of each folder are for, in the order in which they are listed.
GROUPS = {
    "tradeoff": "studies: mmod tradeoff NAME",
    "isoflop": "studies of equal training FLOPs: mmod isoflop NAME",
    "digits": "scenes of drawn digits, made on demand: mmod train image NAME",
    "patches": "the same, a label for each patch: mmod train image NAME",
    "fashion": "Fashion-MNIST: mmod train image NAME",
    "cifar": "CIFAR-10: mmod train image NAME",
    "imagenet": "ImageNet-1k: mmod train image NAME",
    "photos": "models of photographs that studies take",
    "clip": "image-text pairs: mmod train pairs NAME",
    "vlm": "conversations about images: mmod train chat NAME",
    "text": "text: mmod train text NAME",
    "parts": "what several studies share; not to be run",
    "benchmark": "timings of this repository: python tools/benchmark.py suite --config configs/NAME.yaml",
}
# Columns of the longest name.
_WIDTH = 36


def config_names() -> list[str]:
    """Return the names of the shipped configs, such as `tradeoff/digits`."""
    folder = _folder()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def config_summary(name: str) -> str:
    """Return what a shipped config is: the first sentence of the comment at its head.

    Example:
        >>> config_summary("digits/mod")
        'MoD on cluttered digits.'
    """
    text = read_text(_folder() / f"{name}.yaml")
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines).removeprefix("What: ")
    sentence, *_ = re.split(r"(?<=[.?]) ", comment, maxsplit=1)
    return sentence


def listing() -> str:
    """Return the shipped configs by folder, each with what it is."""
    order = list(GROUPS)
    names = sorted(config_names(), key=lambda name: (order.index(name.partition("/")[0]), name))
    blocks = []
    for group, members in groupby(names, lambda name: name.partition("/")[0]):
        lines = [f"  {name:<{_WIDTH}} {config_summary(name)}" for name in members]
        blocks.append("\n".join([f"{group}: {GROUPS[group]}", *lines]))
    return "\n\n".join([*blocks, "mmod configs NAME prints one."])


def find_config(path: str | Path) -> Path:
    """Return the config file for a path or a name, such as `tradeoff/digits`, or `digits` where only one has that name.

    An unknown path is returned unchanged. A folder is no config, so one of a config's name hides nothing.
    """
    path = Path(path)
    if path.is_file():
        return path
    return shipped_config(path) or path


def shipped_config(path: str | Path) -> Path | None:
    """Return a shipped config by path or name; None if there is none, a ValueError if there are several."""
    path = Path(path)
    folder = _folder()
    parts = path.parts
    if parts[:1] == ("configs",):
        # The documents call a config by its path in the repository, which an installed package does not have.
        parts = parts[1:]
    if path.is_absolute() or not parts:
        return None
    if folder.joinpath(*parts).is_file():
        return folder.joinpath(*parts)
    ending = "/".join(("", *parts))
    matches = [name for name in config_names() if f"/{name}".endswith(ending)]
    if len(matches) > 1:
        raise ValueError(f"{str(path)!r} is the name of several configs: {', '.join(matches)}")
    if not matches:
        return None
    return folder / f"{matches[0]}.yaml"


def existing_config(path: str | Path, noun: str = "config file") -> Path:
    """Return the config file for a path or a name.

    A FileNotFoundError suggests similar names, a ValueError for a file of Python what to call there.

    Args:
        noun: What else the path may be, for the message.
    """
    file = find_config(path)
    if not file.is_file():
        if file.is_dir():
            hint = f": it is a folder{_in_folder(file)}"
        else:
            hint = prefixed("; ", _near(file))
        raise FileNotFoundError(f"no {noun} at {str(file)!r}{hint}")
    if file.suffix == ".py":
        raise ValueError(
            f"{str(file)!r} is a file of Python, and no {noun}: a model of your own is compared in Python, by "
            "mmod.advise(model, loader), see docs/before_you_commit.md"
        )
    return file


def _near(file: Path) -> str:
    """Return what may be meant by a path that does not exist: files and folders beside it, or shipped configs."""
    # By their names alone: a folder that all share would make them alike.
    neighbours = similar(file.name, [path.name for path in file.parent.glob("[!.]*")])
    near = [str(file.parent / name) for name in neighbours]
    is_shipped = file.parts[:1] == ("configs",)
    # The path of a YAML file elsewhere is no misspelt name.
    if is_shipped or file.suffix != ".yaml":
        name = file.as_posix().removeprefix("configs/").removesuffix(".yaml")
        known = config_names()
        # A bare name is compared with bare names: a folder in front would make all of them unlike.
        if "/" not in name:
            known = sorted({full.rpartition("/")[2] for full in known})
        near = [*similar(name, known), *near]
        if not near:
            return "`mmod configs` lists the known ones"
    return say_near(near[:3])


def _in_folder(folder: Path) -> str:
    """Return what may be meant by a folder that is no config: configs in it, or else the folders of runs below it."""
    runs = [*folder.glob("*/config.yaml"), *folder.glob("*/*/config.yaml")]
    meant = list(folder.glob("*.yaml")) or [file.parent for file in runs]
    if not meant:
        return " without a config or a run; `mmod configs` lists the configs that come with mmod"
    return f", of which {first_names(sorted(map(str, meant)))} may be meant"


def main(arguments: Sequence[str]) -> None:
    """Print the shipped configs, each with what it is, or the config named on the command line."""
    if {"-h", "--help"} & set(arguments):
        print(
            "usage: mmod configs [NAME]\n\nList the configs that come with mmod, or print the one called NAME, as "
            "my-model, the smallest study of your own model and images."
        )
        return
    if not arguments:
        print(listing())
        return
    print(read_text(existing_config(arguments[0])).rstrip())


def _folder() -> Path:
    """Return the folder of the configs: inside an installed package, or next to it in a repository."""
    inside = _PACKAGE / "configs"
    if inside.is_dir():
        return inside
    return _PACKAGE.parent / "configs"
