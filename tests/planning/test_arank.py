"""Ranks of attention maps against maps written out, and the plans made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import mmod
from mmod.planning import LayerRanks, attention_ranks
from tests.kit.vlm_zoo import make_joint, prompt


def rank_of(attention: Tensor, tolerance: float | None) -> float:
    return float(torch.linalg.matrix_rank(attention - torch.diag_embed(attention.diagonal()), rtol=tolerance))


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tolerance", [None, 0.1])
def test_ranks_of_a_joint_model_are_those_of_its_maps(attention: str, tolerance: float | None) -> None:
    batches = [prompt("llava", (1, 2), seed=seed) for seed in (1, 2)]
    written: Any = make_joint("llava", attention="eager")
    expected = [0.0] * 4
    for batch in batches:
        for layer, maps in enumerate(written(**batch, output_attentions=True).attentions):
            for row, real in enumerate(batch["attention_mask"].bool()):
                heads = [rank_of(head_map[real][:, real], tolerance) for head_map in maps[row]]
                expected[layer] += sum(heads) / len(heads) / 4
    model = make_joint("llava", attention=attention)
    ranks = attention_ranks(model, batches, part="language", tolerance=tolerance)
    assert ranks.ranks == pytest.approx(expected, abs=0.26 if tolerance is None else 1e-6)
    assert ranks.samples == 4
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_plan_routes_the_layers_of_lowest_rank(tmp_path: Path) -> None:
    ranks = LayerRanks(("a", "b", "c", "d", "e"), (9.0, 2.0, 5.0, 1.0, 8.0), 10.0, 3, 0.01)
    assert ranks.plan(0.5, below=5.5).blocks == (1, 2, 3)
    plan = ranks.plan(0.5, budget=0.8)
    assert plan.blocks == (1, 3)
    assert plan.mean_capacity == pytest.approx(0.8)
    assert ranks.plan(0.25, budget=0.55).mean_capacity == pytest.approx(0.55)
    table = str(ranks).splitlines()
    assert [line.split()[1] for line in table[2:7]] == ["d", "b", "c", "e", "a"]
    assert "0.01" in table[-1]
    ranks.plot(tmp_path / "ranks.png")
    with pytest.raises(FileExistsError, match="pass overwrite=True to replace it"):
        ranks.plot(tmp_path / "ranks.png")
    ranks.plot(tmp_path / "ranks.png", overwrite=True)
    for wrong in ({}, {"below": 1, "budget": 0.5}, {"below": 0.5}, {"budget": 0.4}, {"budget": 1.0}):
        with pytest.raises(ValueError, match=r"below|budget|rank|mean capacity"):
            ranks.plan(0.5, **wrong)


def test_a_plan_of_ranks_routes_a_model() -> None:
    model = timm.create_model("test_vit").eval()
    images = torch.randn(2, 3, 160, 160)
    plan = attention_ranks(model, [images], tolerance=0.01).plan(0.5, budget=0.8)
    config = mmod.RoutingConfig(router="linear", blocks=plan.blocks, capacity=plan.capacity)
    assert len(mmod.routed_blocks(mmod.route_(model, config))) == len(plan.blocks)
