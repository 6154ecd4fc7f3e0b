"""A batch without images, such as a rank's last one, has results of the same shapes with no images."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mmod.ops import (
    add_updates,
    attention_importance,
    attention_with_importance,
    backend,
    class_token_importance,
    find_duplicates,
    gather_norm,
    gather_rows,
    group_sizes,
    held_slots,
    inverse_rows,
    mean_rows,
    merge_rows,
    nearest_rows,
    packed_attention,
    random_scores,
    redundancy_scores,
    select_topk,
    signed_sums,
    size_groups,
    unit_rows,
)
from mmod.ops.select import select_threshold
from mmod.routing.groups import kept_by_mask

N, K, D, H = 5, 2, 4, 2


def tokens(images: int, count: int = N) -> Tensor:
    return torch.randn(images, count, D)


def index(images: int) -> Tensor:
    return torch.tensor([1, 3]).expand(images, K)


def slots(images: int) -> Tensor:
    return torch.tensor([0, 0, 1, 1, 0]).expand(images, N)


def heads(images: int) -> Tensor:
    return torch.randn(images, H, N, D)


CALLS: dict[str, Callable[[int], Any]] = {
    "gather_rows": lambda images: gather_rows(tokens(images), index(images)),
    "merge_rows": lambda images: merge_rows(
        tokens(images), index(images), tokens(images, K), tokens(images, K), torch.rand(images, K)
    ),
    "gather_norm": lambda images: gather_norm(tokens(images), index(images)),
    "inverse_rows": lambda images: inverse_rows(index(images), N),
    "select_topk": lambda images: select_topk(torch.rand(images, N), Fraction(1, 2), 1, gate="tanh"),
    "select_topk with padding": lambda images: select_topk(
        torch.rand(images, N), Fraction(1, 2), valid_BN=torch.ones(images, N, dtype=torch.bool)
    ),
    "select_threshold": lambda images: select_threshold(torch.rand(images, N), 0.5, max_tokens=K),
    "kept_by_mask": lambda images: kept_by_mask(torch.ones(images, N, dtype=torch.bool)),
    "held_slots": lambda images: held_slots(index(images), N, None),
    "group_sizes": lambda images: group_sizes(slots(images), K),
    "size_groups": lambda images: size_groups(slots(images), K),
    "mean_rows": lambda images: mean_rows(tokens(images), slots(images), torch.ones(images, K)),
    "add_updates": lambda images: add_updates(tokens(images), tokens(images, K), slots(images)),
    "signed_sums": lambda images: signed_sums(tokens(images), 3),
    "unit_rows": lambda images: unit_rows(tokens(images), 2),
    "redundancy_scores": lambda images: redundancy_scores(tokens(images), 1),
    "redundancy_scores with padding": lambda images: redundancy_scores(
        tokens(images), 1, torch.ones(images, N, dtype=torch.bool)
    ),
    "nearest_rows": lambda images: nearest_rows(tokens(images), index(images)),
    "nearest_rows with padding": lambda images: nearest_rows(
        tokens(images), index(images), 0, torch.ones(images, K, dtype=torch.bool)
    ),
    "random_scores": lambda images: random_scores(tokens(images), torch.tensor(1)),
    "find_duplicates": lambda images: find_duplicates(torch.rand(images, 4, 4, 3, 2), 0.0, 2, torch.ones(3)),
    "attention_importance": lambda images: attention_importance(heads(images), heads(images)),
    "attention_with_importance": lambda images: attention_with_importance(heads(images), heads(images), heads(images)),
    "class_token_importance": lambda images: class_token_importance(heads(images), heads(images)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_batch_without_images_has_results(name: str) -> None:
    expected, actual = ([x for x in tree_leaves(CALLS[name](images)) if isinstance(x, Tensor)] for images in (1, 0))
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    assert [tuple(x.shape) for x in actual] == [(0, *x.shape[1:]) for x in expected]


def test_no_packed_rows_attend_to_nothing() -> None:
    rows = torch.randn(0, H, D)
    assert packed_attention(rows, rows, rows, torch.zeros(1, dtype=torch.int32), 0).shape == rows.shape


def test_every_op_is_tried() -> None:
    assert set(backend.OPS) <= {*CALLS, "packed_attention"}
