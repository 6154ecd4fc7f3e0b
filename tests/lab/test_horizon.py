"""The information horizon: the divergence of plans without image tokens from a layer on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmod
from mmod.lab.image_horizon import Horizon, horizon
from mmod.planning.divergence import kl_divergence, outputs
from tests.kit.vlm_zoo import IMAGE, PAD, make_joint, make_language, merged_embeddings, prompt

DEPTH = 4
CURVE = Horizon(("a", "b", "c", "d"), (2.0, 0.5, 0.09, 0.01), (0.1, 0.7, 1.0, 1.0), 20)


def without_images(model: Any, batch: dict[str, Any], layer: int) -> Tensor:
    """Run a Llama by hand: from a layer on, the text alone goes on, sample by sample, in float64."""
    language = model.model.language_model
    x_BND = merged_embeddings(model, batch)
    logits = []
    for sample, ids in enumerate(batch["input_ids"]):
        real = ids != PAD
        x = x_BND[sample, real][None]
        places = torch.arange(x.shape[1])[None]
        for number, block in enumerate(language.layers):
            if number == layer:
                is_text = ids[real] != IMAGE
                x = x[:, is_text]
                places = places[:, is_text]
            mask = torch.full((x.shape[1],) * 2, -torch.inf, dtype=x.dtype).triu(1)[None, None]
            rope = language.rotary_emb(x, places)
            x = block(x, attention_mask=mask, position_embeddings=rope)
        x = x if layer < DEPTH else x[:, ids[real] != IMAGE]
        logits.append(model.lm_head(language.norm(x))[0])
    return torch.cat(logits)


def test_the_curve_is_that_of_texts_that_go_on_alone() -> None:
    model = make_joint("llava").double()
    batches = [prompt("llava", (1, 2), seed=seed) for seed in (1, 2)]
    for batch in batches:
        batch["pixel_values"] = batch["pixel_values"].double()
    found = horizon(model, batches)
    for layer in range(DEPTH):
        rows = []
        equal = []
        for batch in batches:
            with torch.no_grad():
                dense_RF = without_images(model, batch, DEPTH)
                changed_RF = without_images(model, batch, layer)
            rows.append(kl_divergence(dense_RF, changed_RF))
            equal.append(dense_RF.argmax(-1) == changed_RF.argmax(-1))
        assert found.divergences[layer] == pytest.approx(float(torch.cat(rows).mean()), rel=1e-4)
        assert found.agreements[layer] == pytest.approx(float(torch.cat(equal).double().mean()))
    texts = [(batch["input_ids"] != PAD) & (batch["input_ids"] != IMAGE) for batch in batches]
    assert found.rows == sum(int(text.sum()) for text in texts)


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_the_curve_is_the_divergence_of_plans_and_the_model_stays(name: str) -> None:
    model = make_joint(name).train()
    batch = prompt(name, (1, 2))
    labels = batch["input_ids"].clone()
    labels[:, :-2] = -100
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = horizon(model, [{**batch, "labels": labels}])
    assert model.training
    assert not mmod.is_routed(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.eval()
    for layer in range(DEPTH):
        plan = mmod.RoutingConfig(blocks=tuple(range(layer, DEPTH)), capacity=0.0, router="stride")
        expected = mmod.plan_divergence(model, [{**batch, "labels": labels}], plan, part="language")
        assert found.divergences[layer] == expected
    assert found.rows == 4


def test_the_horizon_is_behind_the_last_layer_that_needs_images() -> None:
    assert [CURVE.layer(tolerance) for tolerance in (0.0, 0.01, 0.05, 0.5, 1.0)] == [4, 3, 2, 1, 0]
    rising = Horizon(CURVE.names, (2.0, 0.1, 1.5, 0.1), CURVE.agreements, 20)
    assert rising.layer(0.1) == 3
    assert CURVE.plan().blocks == (2, 3)
    plan = CURVE.plan(capacity=0.25, router="norm")
    assert (plan.blocks, plan.capacity, plan.router.name) == ((1, 2, 3), (0.25, 0.0, 0.0), "norm")
    with pytest.raises(ValueError, match="image tokens matter in all 4 layers at tolerance 0: allow a larger"):
        CURVE.plan(0.0)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in str(CURVE).splitlines()[2:6]]
    assert cells == [["a", "2", "10.0"], ["b", "0.5", "70.0"], ["c", "0.09", "100.0"], ["d", "0.01", "100.0"]]


def test_a_plan_of_the_horizon_routes_and_its_picture_is_drawn(tmp_path: Path) -> None:
    model = make_joint("llava")
    batch = prompt("llava", (1, 1))
    found = horizon(model, [batch])
    plan = found.plan(1.0)
    expected = mmod.plan_divergence(model, [batch], plan, part="language")
    assert expected == pytest.approx(found.divergences[1], rel=1e-4)
    dense = outputs(model, batch, "language")
    mmod.route_(model, language=found.plan(1.0, capacity=0.5))
    assert outputs(model, batch, "language").shape == dense.shape
    found.plot(tmp_path / "horizon.png")
    assert (tmp_path / "horizon.png").stat().st_size


def test_what_has_no_horizon_is_refused() -> None:
    batch = prompt("llava", (1,))
    with pytest.raises(ValueError, match="reads text alone: a horizon is that of image tokens"):
        horizon(make_language("llama"), [batch])
    with pytest.raises(TypeError, match="put it into a list"):
        horizon(make_joint("llava"), batch)
    routed = mmod.route_(make_joint("llava"), language=CURVE.plan())
    with pytest.raises(ValueError, match="is routed already"):
        horizon(routed, [batch])
    with pytest.raises(ValueError, match="no calibration samples"):
        horizon(make_joint("llava"), [])
