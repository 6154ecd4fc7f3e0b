"""The config files that come with mmod, by path or by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmod.io.names import near_names

__all__ = ["config_names", "existing_config", "find_config", "main", "shipped_config"]

_PACKAGE = Path(__file__).parents[1]


def config_names() -> list[str]:
    """Return the names of mmod's own configs, as `tradeoff/digits`."""
    folder = _folder()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def find_config(path: str | Path) -> Path:
    """Return the file that a path or a name stands for; a path that stands for none is returned as it is.

    Args:
        path: A file; or one of mmod's own, as `configs/tradeoff/digits.yaml`, `tradeoff/digits`, or `digits` where no
            other has that name.

    Raises:
        ValueError: Several of mmod's own configs have that name.

    Example:
        >>> find_config("digits-smallest").name
        'digits-smallest.yaml'
    """
    path = Path(path)
    return path if path.exists() else shipped_config(path) or path


def shipped_config(path: str | Path) -> Path | None:
    """Return the file of one of mmod's own configs by path or name, see `find_config`; None where there is none.

    Args:
        path: A path or a name.

    Raises:
        ValueError: Several of mmod's own configs have that name.
    """
    path, folder = Path(path), _folder()
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    if path.is_absolute() or not parts:
        return None
    if folder.joinpath(*parts).is_file():
        return folder.joinpath(*parts)
    found = [name for name in config_names() if tuple(name.split("/"))[-len(parts) :] == parts]
    if len(found) > 1:
        raise ValueError(f"{str(path)!r} is the name of several configs: {', '.join(found)}")
    return folder / f"{found[0]}.yaml" if found else None


def existing_config(path: str | Path) -> Path:
    """Return the file that a path or a name stands for, see `find_config`.

    Args:
        path: A path or a name.

    Raises:
        FileNotFoundError: It stands for none; names that are near are named.
    """
    found = find_config(path)
    if not found.is_file():
        own = found.parts[:1] == ("configs",)
        name = Path(*found.parts[own:]).as_posix().removesuffix(".yaml")
        known = [full if "/" in name else full.rpartition("/")[2] for full in config_names()]
        hint = "" if found.suffix == ".yaml" and not own else f"; {near_names(name, known, '`mmod configs`')}"
        raise FileNotFoundError(f"no config file at {str(found)!r}{hint}")
    return found


def main(arguments: Sequence[str]) -> None:
    """Print the names of mmod's own configs, or the config that the command line names."""
    if not arguments:
        print("\n".join(config_names()))
        return
    print(existing_config(arguments[0]).read_text(encoding="utf-8").rstrip())


def _folder() -> Path:
    """Return where the configs lie: inside an installed package, beside it in a repository."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"
