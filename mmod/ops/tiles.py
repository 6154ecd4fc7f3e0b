"""Pieces in which an attention map is computed, so that memory grows with N and not with its square.

Axes: B images, H heads, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

Tile = tuple[slice, slice, slice]

# Probabilities held at once, in elements. 4 MB of fp32 stay within a core's cache: two CPU threads, ViT-S, map shared
# with the output: a block costs 1.015 of the plain one at N = 197 and batch 32, 1.06 to 1.07 at N = 1025; with 1 MB
# 1.013 and 1.09 to 1.12, with 16 MB 1.03 and 1.07 to 1.08. A GPU is filled by larger pieces only.
CHUNK_ELEMENTS = 1 << 20
GPU_CHUNK_ELEMENTS = 1 << 25
# Queries taken at once where they see earlier keys only: fewer waste less above the diagonal, more keep products large.
CAUSAL_QUERIES = 128


def cut_map(images: int, heads: int, tokens: int, elements: int, is_causal: bool) -> Iterator[Tile]:
    """Cut the rows of a map into pieces: whole images where they fit, else heads of one, else queries of one.

    Args:
        images: B.
        heads: H.
        tokens: N.
        elements: Probabilities held at once.
        is_causal: A query sees keys up to its own position.

    Yields:
        Slices of images, heads and queries.
    """
    rows = min(tokens, CAUSAL_QUERIES) if is_causal else tokens
    steps = [max(1, elements // max(1, size)) for size in (heads * rows * tokens, rows * tokens, tokens)]
    rows = min(rows, steps[2])
    for image in range(0, images, steps[0]):
        for head in range(0, heads, steps[1]):
            for query in range(0, tokens, max(1, rows)):
                # Slices that end past the end are cut off by indexing.
                whole = slice(image, image + steps[0]), slice(head, head + steps[1])
                yield *whole, slice(query, min(query + rows, tokens))


def hide_later(score: Tensor) -> None:
    """Hide the keys behind each query from it, in place, where the last key is the last query's own.

    Args:
        score: Products of queries and keys (..., queries, keys).
    """
    queries = score.shape[-2]
    later = torch.ones(queries, queries, dtype=torch.bool, device=score.device).triu(1)
    score[..., -queries:].masked_fill_(later, -torch.inf)
