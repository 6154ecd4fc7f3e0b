"""What a saved folder may say of its model: how it is built, never where else to read or what to fetch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Saving:
    """How models of a library are described in a saved folder, and built again.

    Args:
        package: Name of the library's distribution.
        keys: What a description holds.
        describe: Returns the description of a model, given the architecture where the model does not know it.
        check: Raises a ValueError where a description of unknown origin names anything outside its folder.
        build: Makes the dense model of a description, with fresh weights.
        told: The caller says what the architecture is, so that a model must be compared with what is built of it.
    """

    package: str
    keys: tuple[str, ...]
    describe: Callable[[nn.Module, str | Mapping[str, Any] | None], dict[str, Any]]
    check: Callable[[Mapping[str, Any]], None]
    build: Callable[[Mapping[str, Any]], nn.Module]
    told: bool = False

    def check_description(self, description: Any) -> None:
        """Raise unless a description of a model names nothing outside the folder that holds it.

        Args:
            description: What was described, read from a file of unknown origin.

        Raises:
            ValueError: A key that may not stand there, or a value that is no value of the key.
        """
        if not isinstance(description, Mapping) or set(description) != set(self.keys):
            found = sorted(map(str, description)) if isinstance(description, Mapping) else repr(description)
            raise ValueError(f"a saved {self.package} model is described by {', '.join(self.keys)}, got {found}")
        self.check(description)


def check_keys(group: str, values: Any, allowed: Iterable[str]) -> None:
    """Raise unless a part of a description is a mapping of allowed keys."""
    if not isinstance(values, Mapping):
        raise ValueError(f"a saved folder gives {group} as a mapping, got {values!r}")
    foreign = sorted(set(values) - set(allowed))
    if foreign:
        raise ValueError(f"a saved folder may not state {', '.join(foreign)} in {group}: that is no part of a model")


def parameters(kind: type) -> set[str]:
    """Return the names of the arguments that a class takes."""
    taken = inspect.signature(kind).parameters.values()
    return {one.name for one in taken if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
