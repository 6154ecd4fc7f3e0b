"""Importance as the attention of the last token of a prompt, in language models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmod
from tests.kit.vlm_zoo import make_joint, make_language, prompt, words
from tests.kit.zoo import make_model

CONFIG = mmod.RoutingConfig(router={"name": "attention", "importance": "last_token"}, capacity=0.5, blocks=(2, 3))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llava", "llava-qwen2", "llava-mistral-window"])
@torch.no_grad()
def test_it_is_what_the_last_token_attends_to(name: str, side: str, attention: str) -> None:
    batch = prompt(name, (1, 2), side=side)
    dense = make_joint(name, attention="eager")
    attention_map = dense(**batch, output_attentions=True).attentions[1].double()
    real = batch["attention_mask"].bool()
    last = (real * torch.arange(real.shape[1])).amax(1)
    rows = torch.stack([attention_map[sample, :, place].mean(0) for sample, place in enumerate(last.tolist())])
    model = mmod.route_(make_joint(name, attention=attention), language=CONFIG)
    with mmod.trace(model) as trace:
        model(**batch)
    importance_BN = next(iter(trace.values())).importance_BN.double()
    torch.testing.assert_close(importance_BN[real], rows[real], rtol=1e-4, atol=1e-6)
    assert torch.equal(*(routing.keep_BN for routing in trace.values()))


@torch.no_grad()
def test_a_batch_generates_what_its_samples_do() -> None:
    model = mmod.route_(make_joint("llava"), language=CONFIG)
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    batch = prompt("llava", (1, 1))
    together = model.generate(**batch, **options)[:, -4:]
    for sample in range(2):
        real = batch["attention_mask"][sample].bool()
        alone = {"input_ids": batch["input_ids"][sample : sample + 1, real], "attention_mask": real[real].long()[None]}
        pixels = batch["pixel_values"][sample : sample + 1]
        assert torch.equal(model.generate(**alone, pixel_values=pixels, **options)[0, -4:], together[sample])


def test_it_costs_one_query_and_is_for_language_models() -> None:
    costs = []
    for importance in ("last_token", "mean"):
        model = mmod.route_(make_joint("llava"), language=CONFIG.replace(router={"importance": importance}))
        costs.append(mmod.flops(model, mmod.Prompt(5, 9)).importance)
    assert costs[0] * 14 == costs[1]
    with pytest.raises(ValueError, match="importance='last_token' is for language models"):
        mmod.route_(make_model("test_vit"), CONFIG)
    packed = mmod.route_(make_language("llama"), CONFIG.replace(select="threshold"))
    ids = words(1, 12)["input_ids"]
    positions = torch.tensor([[*range(6), *range(6)]])
    with pytest.raises(ValueError, match="rows are packed with several samples"):
        packed(input_ids=ids, position_ids=positions)
