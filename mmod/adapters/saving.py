"""How a changed model is described in a saved folder, by plain values of an untrusted file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from mmod.blocks import Arguments

FORMAT_VERSION = 4
"""Version of what a saved model says of its methods."""
KEY = "mmod"
"""Where a transformers config, or the header of a file of weights, says how a model was changed."""


@dataclass(frozen=True)
class Saving:
    """How models of a library are described in a saved folder, and rebuilt.

    A description says how to build a model, never what to read or download elsewhere.

    Args:
        package: Name of the library's distribution.
        describe: Returns the description of a model, from the architecture if the model does not know it.
        check: Raises a ValueError if an untrusted description refers to anything outside its folder.
        build: Returns the dense model of a description, with new weights.
    """

    package: str
    keys: tuple[str, ...]
    describe: Callable[[nn.Module, str | Mapping[str, object] | None], dict[str, object]]
    check: Callable[[Arguments], None]
    build: Callable[[Arguments], nn.Module]

    def check_description(self, description: object) -> None:
        """Check a description from an untrusted file."""
        if not isinstance(description, Mapping) or set(description) != set(self.keys):
            got = repr(description)
            if isinstance(description, Mapping):
                got = str(sorted(map(str, description)))
            raise ValueError(f"a saved {self.package} model is described by {', '.join(self.keys)}, got {got}")
        self.check(description)


def check_keys(group: str, values: object, allowed: Iterable[str]) -> None:
    """Raise a ValueError unless a section of a description is a mapping with allowed keys."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{group} in a saved folder must be a mapping, got {values!r}")
    unknown = sorted(set(values) - set(allowed))
    if unknown:
        raise ValueError(f"{group} in a saved folder may not have {', '.join(unknown)}: models have no such option")


def parameters(model_class: type) -> set[str]:
    """Return the names of the arguments of a class's constructor."""
    values = inspect.signature(model_class).parameters.values()
    return {value.name for value in values if value.kind not in (value.VAR_POSITIONAL, value.VAR_KEYWORD)}
