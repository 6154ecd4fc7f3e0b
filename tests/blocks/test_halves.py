"""Blocks in which tokens merge between attention and MLP (`Merged("mlp")`)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod.routing.score.redundancy import RedundancyScore
from tests.kit.attention_oracle import attention_of, full_map
from tests.kit.zoo import ZOO, make_images, make_model

FALLING = {1: 0.8, 2: 0.8, 3: 0.4}
SIZE = make_images("vit_tiny_patch16_224", 1).shape[-1]
FIELDS = {"skipped": mmod.Merged("mlp"), "blocks": tuple(FALLING), "capacity": tuple(FALLING.values())}


def routed(name: str, **changes: object) -> nn.Module:
    model = make_model(name).double().eval()
    return mmod.route_(model, mmod.RoutingConfig(**{"router": "redundancy", **FIELDS, **changes}))


# Branches that are parallel, or whose residual sums stand in the block's own forward.
WHOLE = ("vit_small_patch16_18x2_224", "vit_base_patch16_xp_224")
SPLIT = [name for name in ZOO if name not in WHOLE]


@pytest.mark.parametrize("name", WHOLE)
def test_blocks_that_cannot_be_run_in_halves_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot run separately"):
        routed(name)


@pytest.mark.parametrize("name", SPLIT)
def test_rows_handed_on_batches_and_training_change_nothing(name: str) -> None:
    images = make_images(name, 2).double()
    # Models that are alike stand side by side, and take turns.
    router = ("redundancy", "random", "stride", "attention")[SPLIT.index(name) % 4]
    model = routed(name, router=router)
    with torch.no_grad():
        out, single = model(images), torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(single, out, rtol=1e-9, atol=1e-9)
    # Whoever looks between the blocks finds all tokens.
    row_counts: list[int] = []
    model.blocks[2].register_forward_hook(lambda _, args, y: row_counts.append(y.shape[1]))
    with torch.no_grad(), mmod.trace(model) as decisions:
        torch.testing.assert_close(model(images), out, rtol=1e-9, atol=1e-9)
    tokens = next(iter(decisions.values())).score_BN.shape[1]
    assert row_counts == [tokens]
    kept = [routing.kept.index_BK.shape[1] for routing in decisions.values()]
    assert kept == [max(1, int(round(tokens * share, 9))) for share in FALLING.values()]


def merged(x: Tensor, slot_of: list[int], size: list[float]) -> tuple[Tensor, list[float]]:
    """Average the rows of each slot, each counted as often as it stands for a token."""
    slots = max(slot_of) + 1
    groups = [[row for row in range(len(slot_of)) if slot_of[row] == slot] for slot in range(slots)]
    sizes = [sum(size[row] for row in group) for group in groups]
    means = [sum(size[row] * x[row] for row in group) / total for group, total in zip(groups, sizes)]
    return torch.stack(means), sizes


def joins(x: Tensor, score: Tensor, keep: int) -> tuple[list[int], list[int]]:
    """Return the kept rows, and the slot of each row: that of the kept one most like it, none of the prefix."""
    kept = sorted(sorted(range(len(x)), key=lambda row: (-float(score[row]), row))[:keep])
    unit = torch.nn.functional.normalize(x, dim=-1)
    nearest = [
        max(range(1, keep), key=lambda slot, row=row: float(unit[row] @ unit[kept[slot]])) for row in range(len(x))
    ]
    return kept, [kept.index(row) if row in kept else nearest[row] for row in range(len(x))]


def by_loop(model: nn.Module, image: Tensor, router: str) -> Tensor:
    """Return the tokens of one image after the blocks, in plain loops over images and groups."""
    recorded: list[Tensor] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda _, args: recorded.append(args[0]))
    model(image[None])
    handle.remove()
    x, size, undone, score = recorded[0][0], None, [], torch.empty(0)
    tokens = len(x)
    for index, block in enumerate(model.blocks):
        update, query, key = attention_of(block, x, 0.0 if size is None else torch.tensor(size).log().to(x))
        if index == min(FALLING):
            score = full_map(query[None], key[None])[0].mean((0, 1)).index_fill(0, torch.tensor(0), torch.inf)
        x = x + update
        keep = int(tokens * FALLING.get(index, 2))
        if keep < len(x):
            score = score if router == "attention" else RedundancyScore(1)(x[None])[0]
            kept, slot_of = joins(x, score, keep)
            rows, size = merged(x, slot_of, size or [1.0] * len(x))
            score = score[kept]
            undone.append((x, rows, slot_of))
            x = rows
        x = x + block.ls2(block.mlp(block.norm2(x)))
        if index + 1 not in FALLING and undone:
            for before, rows, slot_of in reversed(undone):
                x = before + (x - rows)[slot_of]
            size, undone = None, []
    return model.norm(x)


@pytest.mark.parametrize("router", ["redundancy", "attention"])
def test_it_is_what_a_loop_over_tokens_makes(router: str) -> None:
    dense, images = make_model("vit_tiny_patch16_224").double().eval(), make_images("vit_tiny_patch16_224", 2).double()
    with torch.no_grad():
        expected = torch.stack([by_loop(dense, image, router) for image in images])
        model = mmod.route_(dense, mmod.RoutingConfig(router=router, **FIELDS))
        torch.testing.assert_close(model.forward_features(images), expected, rtol=1e-9, atol=1e-9)


def test_the_attention_costs_more_and_the_mlp_as_much() -> None:
    cost = {at: mmod.flops(routed("vit_tiny_patch16_224", skipped=mmod.Merged(at)), SIZE) for at in ("block", "mlp")}
    assert cost["block"].routed < cost["mlp"].routed < cost["mlp"].dense
