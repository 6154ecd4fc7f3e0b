"""Random numbers that an image's own tokens decide: the same image draws the same numbers in any batch.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmod.ops import reference
from mmod.ops.backend import FLOAT, Backend, Version, choose, register


def random_scores(x_BND: Tensor, salt: int, valid_BN: Tensor | None = None) -> Tensor:
    """Return a random number for every token, uniform in [0, 1).

    It is a hash of the salt, the position, and a coarse fingerprint of the image: the means of eight channels, in steps
    of at most a quarter of what such a mean varies by. A step is a power of two, so that it does not change with the
    last bits, in which batch sizes, compilers and devices differ.

    Args:
        x_BND: Tokens (B, N, D); they get no gradient.
        salt: Chooses the draw; 32 bits.
        valid_BN: False where a token is padding (B, N), which leaves no fingerprint, or None.

    Returns:
        The numbers (B, N), fp32.

    Example:
        >>> x = torch.randn(2, 6, 4)
        >>> torch.equal(random_scores(x, 1)[1:], random_scores(x[1:], 1))
        True
    """
    with torch.no_grad():
        score_BN: Tensor = choose("random_scores", x_BND, tokens=x_BND.shape[1]).run(x_BND.detach(), salt, valid_BN)
        return score_BN


def _by_kernel(x_BND: Tensor, salt: int, valid_BN: Tensor | None) -> Tensor:
    from mmod.ops.triton import hashing

    score_BN: Tensor = hashing.random_scores(x_BND, salt, valid_BN)
    return score_BN


register(
    "random_scores",
    Version(
        _by_kernel, "a kernel", Backend.TRITON, FLOAT, why="not yet measured; reason: one launch instead of about 40"
    ),
    Version(reference.random_scores, "the definition, in torch operations"),
)
