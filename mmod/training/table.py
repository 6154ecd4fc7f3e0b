"""The table of the kinds of training, which the command line reads without importing any of them."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A kind of training.

    Attributes:
        config: Import path of the config, a subclass of `RunConfig`, which is imported without torch.
        kind: Import path of the `Kind`, which imports the libraries that it needs.
        purpose: What `mmod train KIND` does.
        example: A config that comes with mmod.
    """

    config: str
    kind: str
    purpose: str
    example: str


def _row(name: str, kind: str, purpose: str, example: str) -> Row:
    return Row(f"mmod.training.{name}.config:TrainConfig", f"mmod.training.{name}.kind:{kind}", purpose, example)


KINDS = {
    "image": _row("image", "ImageKind", "train an image classifier", "digits/dense"),
    "pairs": _row("pairs", "PairsKind", "train a CLIP model on image-text pairs", "clip/scenes"),
    "chat": _row("chat", "ChatKind", "fine-tune a vision-language model on conversations", "vlm/tiny-llava"),
    "text": _row("text", "TextKind", "train a causal language model on text, byte by byte", "text/mod"),
}
"""The kinds by name."""
