"""Records of conversations, and how tests write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def said(*texts: str, roles: tuple[str, str] = ("human", "gpt")) -> list[dict[str, str]]:
    return [{"from": roles[place % 2], "value": text} for place, text in enumerate(texts)]


SOUND: dict[str, Any] = {"id": "0", "image": "a.png", "conversations": said("<image>\nwhich is the 7 ?", "3")}


def write(folder: Path, records: list[Any], name: str = "all.json") -> str:
    (folder / name).write_text(json.dumps(records))
    return str(folder / name)
