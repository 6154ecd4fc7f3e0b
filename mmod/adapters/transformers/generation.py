"""What a running `generate` knows and a model's layers do not: the image tokens of the prompt, and where it ends.

Axes: B samples, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mmod.threads import PerThread


class Prompt:
    """The prompt of a running call of `generate`.

    Args:
        tokens: Number of its tokens, cached ones included; 0 for a draft, whose prompts grow from call to call.
        image_BN: True, or a modality's number, at its image tokens (B, N); None if they are not marked.
        layout: Arguments of `generate` that describe the frames of images and videos.
        samples: Number of samples B.
    """

    def __init__(self, tokens: int, image_BN: Tensor | None, layout: Mapping[str, Any], samples: int) -> None:
        self.tokens = tokens
        self.image_BN = image_BN
        self.layout = layout
        self.samples = samples
        self._start: int | None = None

    def image_tokens(self, past: int, samples: int, tokens: int) -> Tensor | None:
        """Return the mask of image tokens for the next tokens (B, N), with `past` cached ones before; None if unknown.

        Beams and several sequences of one prompt are consecutive samples.
        """
        if self.image_BN is None:
            return None
        if self._start is None:
            # A mask of only the new tokens begins behind cached ones, as behind a prefix that peft tuned.
            self._start = past if self.image_BN.shape[1] <= tokens else 0
        begin = past - self._start
        image_BN = self.image_BN[:, begin : begin + tokens]
        image_BN = F.pad(image_BN, (0, tokens - image_BN.shape[1]))
        return image_BN.repeat_interleave(samples // image_BN.shape[0], dim=0)


class Generations:
    """The prompts that a model generates from, one in each thread."""

    def __init__(self) -> None:
        self._running: PerThread[Prompt | None] = PerThread(type(None))

    @property
    def prompt(self) -> Prompt | None:
        """The prompt of this thread's call of `generate`, or None outside one."""
        return self._running.value

    @contextmanager
    def of(self, prompt: Prompt) -> Iterator[None]:
        """Context of a call of `generate`; that of a draft runs inside another."""
        outer = self._running.value
        self._running.value = prompt
        try:
            yield
        finally:
            self._running.value = outer
