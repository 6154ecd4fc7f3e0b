"""What runs and studies read again and again, read once: texts of configs, and synthetic conversations."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Iterable
from typing import Any

from mmod.io import yaml
from tests.kit.sets import SETS

_ROWS: dict[tuple[str, ...], list[dict[str, object]]] = {}


def read_once() -> None:
    """Let this process, and those that are forked from it, take apart each text of a config and each set once."""
    parse = yaml.parse_yaml

    @functools.cache
    def parsed(text: str, source: str) -> bytes:
        return pickle.dumps(parse(text, source))

    # Whoever reads a config may change its values.
    yaml.parse_yaml = lambda text, source="the value": pickle.loads(parsed(text, source))
    # Where no test reads conversations, the module and what it needs are not imported.
    conversations: Any = sys.modules.get("mmod.data.readers.conversations")
    if conversations is None:
        return
    read_shards = conversations._read_shards

    def rows_of(files: Any, *others: Any) -> Iterable[dict[str, object]]:
        urls = tuple(files.urls)
        if not urls[0].startswith(str(SETS)):
            return read_shards(files, *others)
        if urls not in _ROWS:
            _ROWS[urls] = list(read_shards(files, *others))
        return _ROWS[urls]

    conversations._read_shards = rows_of
