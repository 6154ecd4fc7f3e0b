"""Folders that belong to one config, which is recorded inside; another config is refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mmod.io.files import check_place, make_folder, read_json_object, write_json
from mmod.names import similar

# No result in the store, which another version of mmod does not read: the same question goes on with any.
QUESTION = "question.json"
"""The file of a folder that says what its results answer, of a study or of advice."""


class FolderTakenError(FileExistsError, ValueError):
    """A folder holds results of another config, or unrelated files."""


def record_config(
    folder: str | Path, record: Mapping[str, object], *, file: str, kind: str, free_keys: Collection[str] = ()
) -> bool:
    """Record a config as JSON in a free folder, or check the folder's record; return whether there was one."""
    existing = read_record(folder, file)
    if existing is not None:
        check_same(folder, existing, record, kind=kind, free_keys=free_keys)
        return True
    write_json(make_folder(folder) / file, record)
    return False


def read_record(folder: str | Path, file: str) -> dict[str, Any] | None:
    """Read the record of a folder; None if it holds only hidden files and empty folders, as a failed start leaves."""
    folder = Path(folder)
    if (folder / file).is_file():
        return read_json_object(folder / file)
    check_unused(folder, file)
    return None


def check_unused(folder: Path, file: str) -> None:
    """Raise a FolderTakenError for a folder that holds more than hidden files and empty folders, and not its record."""
    check_place(folder)
    if not folder.exists():
        return
    for path in folder.iterdir():
        holds_file = not path.is_dir() or any(not child.is_dir() for child in path.rglob("*"))
        if holds_file and not path.name.startswith("."):
            raise FolderTakenError(f"{str(folder)!r} holds files but no {file}: choose a new or empty folder")


def answered_by(folder: str | Path) -> dict[str, object] | None:
    """Return the question that the results in a folder answer; None if it is not known."""
    path = Path(folder) / QUESTION
    if not path.is_file():
        return None
    return read_json_object(path)


def check_same(
    path: str | Path,
    existing: Mapping[str, object],
    record: Mapping[str, object],
    *,
    kind: str,
    free_keys: Collection[str] = (),
    advice: str = "choose another folder",
) -> None:
    """Raise a FolderTakenError with the keys and both values unless two records agree; see `differences`."""
    changes = differences(existing, record, free_keys)
    if changes:
        raise FolderTakenError(f"{str(path)!r} holds {kind} with another config; {advice}. Differing keys: {changes}")


def differences(existing: Mapping[str, object], record: Mapping[str, object], free_keys: Collection[str] = ()) -> str:
    """Return the dotted keys with different values in two records, with both values, as a text; empty if none differ.

    A missing key counts as None, and so do an empty list and mapping.

    Example:
        >>> differences({"optim": {"lr": 0.1}}, {"optim": {"lr": 0.2}, "limit": None, "methods": []})
        'optim.lr: 0.1 there, 0.2 now'
        >>> differences({"args": {"depth": 4}}, {"args": {"depth": 4, "deph": 6}})
        'args.deph: not set there, 6 now (is args.depth meant?)'
    """
    before = flatten(_plain(existing))
    now = flatten(_plain(record))
    changes = []
    for key in sorted({*before, *now} - set(free_keys)):
        old = before.get(key)
        new = now.get(key)
        # A key that a newer version writes with an empty value is no difference.
        both_empty = old in (None, [], {}) and new in (None, [], {})
        if old != new and not both_empty:
            both = f"{_shown(key, before)} there, {_shown(key, now)} now"
            changes.append(f"{key}: {both}{_near(key, before, now)}")
    return "; ".join(changes)


def _shown(key: str, values: Mapping[str, object]) -> str:
    if key not in values:
        return "not set"
    return repr(values[key])


def _near(key: str, before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return a question for a key of one record that looks like a misspelt one of both."""
    if key in before and key in now:
        return ""
    near = similar(key, before.keys() & now.keys(), cutoff=0.9)
    if not near:
        return ""
    return f" (is {near[0]} meant?)"


def flatten(tree: Mapping[str, object]) -> dict[str, object]:
    """Return the leaves of nested mappings by their dotted keys.

    Example:
        >>> flatten({"optim": {"lr": 0.1, "betas": [0.9, 0.99]}, "args": {}})
        {'optim.lr': 0.1, 'optim.betas': [0.9, 0.99], 'args': {}}
    """
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= {f"{key}.{subkey}": leaf for subkey, leaf in flatten(value).items()}
        else:
            leaves[str(key)] = value
    return leaves


def _plain(record: Mapping[str, object]) -> dict[str, object]:
    # A round trip through JSON: tuples must equal the lists of a file.
    return json.loads(json.dumps(dict(record), default=str))
