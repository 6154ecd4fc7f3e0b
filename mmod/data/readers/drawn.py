"""Images of embedded sets, drawn when they are read: most runs read a part of a set."""

from __future__ import annotations

import functools

from PIL import Image

from mmod.data.embedded import SETS
from mmod.data.readers.images import Target, decode_image
from mmod.data.readers.shards import LabelMember
from mmod.data.synthetic.handwriting import DrawnSamples


class DrawnSource:
    """The samples of a split of an embedded set, as its shards would hold them.

    Args:
        part: `NAME:DIFFICULTY/SPLIT`.
        target: The label member.
    """

    def __init__(self, part: str, target: LabelMember) -> None:
        self.part = part
        self.target = target
        self.count = len(_scenes(part))

    def __len__(self) -> int:
        return self.count

    def read(self, index: int, mode: str) -> tuple[Image.Image, Target]:
        """Read one sample; see `ImageSource.read`."""
        members = _members(self.part, index)
        # Through the bytes of a shard, so that both ways refuse the same.
        return decode_image(members["png"], mode), self.target.parse(members[self.target.extension])

    def place(self, index: int) -> tuple[str, str]:
        """Return where a sample is; see `ImageSource.place`."""
        return self.part, str(index)

    def labels(self) -> list[int]:
        """Return the class of each sample; see `ShardSource.labels`."""
        return list(_labels(self.part, self.count, self.target))


@functools.lru_cache(maxsize=8)
def _scenes(part: str) -> DrawnSamples[object]:
    return SETS[part.partition(":")[0]].draw(part)


# A study reads the same samples for each model, at several sizes; they take 20 MB.
@functools.lru_cache(maxsize=1 << 14)
def _members(part: str, index: int) -> dict[str, bytes]:
    name, _, _ = part.partition(":")
    return SETS[name].encode(str(index), _scenes(part)[index])


@functools.lru_cache(maxsize=8)
def _labels(part: str, count: int, target: LabelMember) -> tuple[int, ...]:
    labels = [target.parse(_members(part, index)[target.extension]) for index in range(count)]
    return tuple(label if isinstance(label, int) else -1 for label in labels)
