"""Records of conversations, and how tests write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image


def said(*texts: str, roles: tuple[str, str] = ("human", "gpt")) -> list[dict[str, str]]:
    return [{"from": roles[place % 2], "value": text} for place, text in enumerate(texts)]


SOUND: dict[str, Any] = {"id": "0", "image": "a.png", "conversations": said("<image>\nwhich is the 7 ?", "3")}


def write_own(folder: Path, count: int = 24) -> None:
    """Write conversations, questions and pictures as the guide to fine-tuning names them."""
    pictures = folder / "data" / "pictures"
    pictures.mkdir(parents=True)
    for name in ("conversations", "questions"):
        records = []
        for number in range(count):
            colour = ("red", "blue", "green")[number % 3]
            Image.new("RGB", (40, 30), colour).save(pictures / f"{name}-{number}.png")
            turns = said("<image>\nWhich colour is this?", f"It's {colour}, naïvely.")
            records.append({"image": f"{name}-{number}.png", "conversations": turns})
        write(folder / "data", records, f"{name}.json")


def write(folder: Path, records: list[Any], name: str = "all.json") -> str:
    (folder / name).write_text(json.dumps(records))
    return str(folder / name)
