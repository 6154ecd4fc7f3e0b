"""Images of embedded sets, drawn when they are read: most runs read a part of a set."""

from __future__ import annotations

from typing import Any

from PIL import Image

from mmod.data.embedded import SETS
from mmod.data.readers.images import decode_image
from mmod.data.readers.shards import LabelMember


class DrawnSource:
    """The samples of a split of an embedded set, as its shards would hold them.

    Args:
        part: `NAME:DIFFICULTY/SPLIT`.
        target: The label member.
    """

    def __init__(self, part: str, target: LabelMember) -> None:
        self.dataset = SETS[part.partition(":")[0]]
        self.part = part
        self.target = target
        self.scenes = self.dataset.draw(part)

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes may be started anew; what draws is a closure.
        return DrawnSource, (self.part, self.target)

    def __len__(self) -> int:
        return len(self.scenes)

    def read(self, index: int, mode: str) -> tuple[Image.Image, Any]:
        """Read one sample; see `ImageSource.read`."""
        members = self._members(index)
        # Through the bytes of a shard, so that both ways refuse the same.
        return decode_image(members["png"], mode), self.target.parse(members[self.target.extension])

    def place(self, index: int) -> tuple[str, str]:
        """Return where a sample is; see `ImageSource.place`."""
        return self.part, str(index)

    def labels(self) -> list[int]:
        """Return the class of each sample; see `ShardSource.labels`."""
        labels = [self.target.parse(self._members(index)[self.target.extension]) for index in range(len(self))]
        return [label if isinstance(label, int) else -1 for label in labels]

    def _members(self, index: int) -> dict[str, bytes]:
        return self.dataset.encode(str(index), self.scenes[index])
