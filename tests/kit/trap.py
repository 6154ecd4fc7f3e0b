"""A pickle that leaves a trace when it is read as code."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Trap:
    """Touches a file when an unrestricted unpickler reads it.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)
