"""Tiles in which an attention map is computed, so that memory grows linearly with N.

Axes: B images, H heads, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

Tile = tuple[slice, slice, slice]

# Elements of a tile. 1 MB of fp32 fits in a core's second cache, and is one image of ViT-S at 224: its heads are a view
# of the host's projection, those of several images a copy. Attention with importance over plain attention (one CPU
# thread, ViT-S): at batch 8 and N = 197 1.17 with 1 MB, 1.35 with 4 MB; at N = 785 1.26 and 1.22. A GPU needs larger
# tiles to be busy.
CHUNK_ELEMENTS = 1 << 18
GPU_CHUNK_ELEMENTS = 1 << 25
# Queries of a causal tile: fewer waste less work above the diagonal, more make larger matrix products.
CAUSAL_QUERIES = 128


class TileSize(NamedTuple):
    """How many images, heads and queries a tile has at most."""

    images: int
    heads: int
    queries: int


def tile_size(heads: int, queries: int, keys: int, elements: int, is_causal: bool = False) -> TileSize:
    """Return the size of a tile: full images where `elements` hold them, else heads, else queries.

    The queries of a causal tile are at most `CAUSAL_QUERIES`.
    """
    rows = queries
    if is_causal:
        rows = min(queries, CAUSAL_QUERIES)
    sizes = (heads * rows * keys, rows * keys, keys)
    # As many of each as fit; images only if one fits whole, since a tile is a slice of each axis.
    together = [max(1, elements // max(1, size)) for size in sizes]
    return TileSize(together[0], min(heads, together[1]), max(1, min(rows, together[2])))


def cut_map(images: int, heads: int, queries: int, keys: int, elements: int, is_causal: bool = False) -> Iterator[Tile]:
    """Yield slices of images, heads and queries, see `tile_size`."""
    size = tile_size(heads, queries, keys, elements, is_causal)
    for image in range(0, images, size.images):
        for head in range(0, heads, size.heads):
            for query in range(0, queries, size.queries):
                # Indexing clips slices that end past the end.
                leading = slice(image, image + size.images), slice(head, head + size.heads)
                yield *leading, slice(query, min(query + size.queries, queries))


def hide_later(score: Tensor) -> None:
    """Mask the keys after each query, in place; the last key and the last query are the same token."""
    queries = score.shape[-2]
    later = torch.ones(queries, queries, dtype=torch.bool, device=score.device).triu(1)
    score[..., -queries:].masked_fill_(later, -torch.inf)
