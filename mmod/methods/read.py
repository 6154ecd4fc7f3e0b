"""Methods from plain values, as in configs and saved folders. Every module of this folder registers its own."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from mmod.methods.base import METHODS, Method
from mmod.plain import required_fields
from mmod.values import owner_of, refuse_unknown

for _module in pkgutil.iter_modules([str(Path(__file__).parent)]):
    importlib.import_module(f"mmod.methods.{_module.name}")


def read_method(values: Mapping[str, object]) -> Method:
    """Return the method that plain values describe: its `kind` and fields.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: An unknown kind or field, or a value out of range.

    Example:
        >>> read_method({"kind": "prune", "keep": 0.5, "blocks": [2], "fuse": False})
        Prune(keep=0.5, blocks=(2,), fuse=False, by='auto', training_only=False)
    """
    options = dict(values)
    method = METHODS[options.pop("kind", None)]
    valid = [field.name for field in fields(method)]
    elsewhere = next((owner_of(name, method) for name in options if name not in valid), "")
    refuse_unknown(f"field of method {method.kind!r}:", options, valid, elsewhere)
    missing = [name for name in required_fields(method) if name not in options]
    if missing:
        raise ValueError(f"method {method.kind!r} needs {', '.join(missing)}")
    return method(**options)


def is_added(name: str) -> bool:
    """Return whether a registered method adds a weight of this state-dict name to a dense model.

    Example:
        >>> is_added("blocks.1.router.score.weight"), is_added("blocks.1.mlp.fc1.weight")
        (True, False)
    """
    fragments: list[str] = []
    for kind in METHODS:
        fragments += METHODS[kind].added
    return any(fragment in name for fragment in fragments)
