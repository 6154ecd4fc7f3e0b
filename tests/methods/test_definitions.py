"""Pruning, merging and early exit against slow definitions, one image and one token at a time."""

from __future__ import annotations

import copy
import math
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mmod.blocks import Reduced, Remaining
from mmod.methods import Exit, Merge
from mmod.methods.merge import merge_tokens
from mmod.methods.prune import prune_tokens
from mmod.ops import capture_importance, capture_inputs
from tests.kit.zoo import make_images, make_model


class Drawn(NamedTuple):
    """Queries and keys (B, H, N, E)."""

    query: Tensor
    key: Tensor

    def read(self, by_class_token: bool = True) -> Any:
        """Return what reads an attention, after it."""
        with capture_inputs() if by_class_token else capture_importance() as captured:
            torch.nn.functional.scaled_dot_product_attention(self.query, self.key, self.key)
        return captured


def draw(seed: int) -> tuple[Tensor, Tensor, Drawn, int]:
    torch.manual_seed(seed)
    numbers = random.Random(seed)
    images, heads, tokens, prefix = (numbers.randint(*ends) for ends in ((1, 3), (1, 3), (12, 40), (0, 5)))
    query, key = torch.randn(2, images, heads, tokens, 6, dtype=torch.float64)
    x = torch.randn(images, tokens, 5, dtype=torch.float64)
    size = torch.randint(1, 4, (images, tokens)).double()
    return x, size, Drawn(query, key), prefix


def take(step: Reduced | None, x: Tensor) -> Remaining:
    """Return the rows that remain of all tokens."""
    assert step is not None
    rows = Remaining(restores=True)
    rows.take(step, x)
    return rows


def attention(inputs: Drawn, image: int) -> Tensor:
    """Return the attention of every query, averaged over heads."""
    maps = [(q @ k.T / math.sqrt(len(q[0]))).softmax(dim=-1) for q, k in zip(inputs.query[image], inputs.key[image])]
    return torch.stack(maps).mean(dim=0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("by_class_token", [True, False])
def test_pruning(seed: int, by_class_token: bool) -> None:
    x_BND, _, inputs, prefix = draw(seed)
    keep = random.Random(seed).uniform(0.2, 0.8)
    step = prune_tokens(keep, True, prefix, x_BND, None, inputs.read(by_class_token))
    rows = take(step, x_BND)
    left = step.z_BKD
    restored = rows.restore(left + 1)
    assert rows.size_BK is None
    for image, x in enumerate(x_BND):
        map_NN = attention(inputs, image)
        score = map_NN[0] if by_class_token else map_NN.mean(dim=0)
        ranked = sorted(range(prefix, len(x)), key=lambda token: -score[token])
        count = math.ceil(keep * (len(x) - prefix))
        kept, pruned = [*range(prefix), *sorted(ranked[:count])], ranked[count:]
        assert rows.token_BK[image].tolist() == [*kept, pruned[0]]
        assert torch.equal(left[image, :-1], x[kept])
        torch.testing.assert_close(left[image, -1], sum(score[token] * x[token] for token in pruned))
        back = restored[image]
        assert torch.equal(back[kept], x[kept] + 1)
        assert torch.equal(back[pruned], x[pruned])


@pytest.mark.parametrize("seed", range(6))
def test_merging(seed: int) -> None:
    x_BND, size_BN, inputs, prefix = draw(seed)
    count = random.Random(seed).randint(1, 12)
    step = merge_tokens(count, prefix, x_BND, size_BN, inputs.read())
    rows = take(step, x_BND)
    left = step.z_BKD
    restored = rows.restore(left)
    tokens = x_BND.shape[1]
    for image, x in enumerate(x_BND):
        keys = inputs.key[image].mean(dim=0)
        first, second = ([token for token in range(start, tokens, 2) if token >= prefix] for start in (0, 1))
        like = {a: {b: torch.cosine_similarity(keys[a], keys[b], dim=0).item() for b in second} for a in first}
        partner = {a: max(alike, key=alike.__getitem__) for a, alike in like.items()}
        ranked = sorted(first, key=lambda a: -like[a][partner[a]])
        merged, left_over = ranked[: min(count, (tokens - prefix) // 2)], ranked[min(count, (tokens - prefix) // 2) :]
        group = {token: token for token in range(tokens)} | {a: partner[a] for a in merged}
        kept = [*range(prefix), *(sorted(left_over) if prefix else left_over), *second]
        assert rows.token_BK[image].tolist() == kept
        back = restored[image]
        for slot, token in enumerate(kept):
            members = [other for other, into in group.items() if into == token]
            weight = size_BN[image, members]
            assert rows.size_BK[image, slot] == weight.sum()
            torch.testing.assert_close(left[image, slot], (weight[:, None] * x[members]).sum(0) / weight.sum())
            assert torch.equal(back[members], left[image, slot].expand(len(members), -1))


def test_a_merged_token_attracts_as_much_attention_as_those_it_stands_for() -> None:
    """Patches in equal pairs are merged into one of each: nothing but the number of tokens changes."""
    model = make_model("test_vit", img_size=32, global_pool="avg", class_token=False, pos_embed="none").double()
    patch = model.patch_embed.patch_size[0]
    side = 32 // patch
    image = torch.randn(1, 3, side, side // 2, patch, patch, dtype=torch.float64)
    image = image.repeat_interleave(2, dim=3).permute(0, 1, 2, 4, 3, 5).reshape(1, 3, 32, 32)
    with torch.no_grad():
        dense = model(image)
        Merge((side * side // 2, *[0] * 5)).apply_(model)
        torch.testing.assert_close(model(image), dense, rtol=0, atol=1e-10)


def test_images_leave_where_they_are_sure() -> None:
    dense, images, blocks = make_model("test_vit").double(), make_images("test_vit", 6).double(), (0, 2, 4)
    model = Exit(0.5, blocks).apply_(copy.deepcopy(dense))
    with torch.no_grad():
        for index in blocks:
            model.blocks[index].exit.head.weight.mul_(3)
    ends = []
    with torch.no_grad():
        for image, answer in zip(images, model(images)):
            x = dense.norm_pre(dense._pos_embed(dense.patch_embed(image[None])))
            for index, block in enumerate(dense.blocks):
                x = block(x)
                head = model.blocks[index].exit if index in blocks else dense
                logits = (
                    dense.forward_head(dense.norm(x)) if head is dense else head.head(head.fc_norm(head.norm(x)[:, 0]))
                )
                if (index in blocks and logits.softmax(dim=-1).max() >= 0.5) or index == len(dense.blocks) - 1:
                    break
            ends.append(index)
            torch.testing.assert_close(answer, logits[0], rtol=0, atol=1e-12)
    assert len(set(ends)) > 1


def test_training_deals_a_batch_out_among_exits() -> None:
    model, images = make_model("test_vit").double().train(), make_images("test_vit", 7).double()
    blocks = (1, 3)
    Exit(0.5, blocks).apply_(model)
    count = dict.fromkeys(blocks, 0)
    for index in blocks:
        head = model.blocks[index].exit
        head.register_forward_hook(lambda _, args, out, index=index: count.update({index: len(out)}))
    assert model(images).shape == (7, 7)
    assert count == {1: 3, 3: 2}
