"""Importance as the class token's own attention, in every kind of timm model that has a class token first."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import mmod
from tests.kit.zoo import ZOO, make_images, make_model

CONFIG = mmod.RoutingConfig(capacity=0.5, blocks=(1, 2), router={"name": "attention", "importance": "class_token"})


class _FirstRows(TorchFunctionMode):
    """The first row of each attention map, averaged over heads, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Tensor:  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            q, k = (x.double() for x in args[:2])
            score = q[:, :, :1] @ k.mT * q.shape[-1] ** -0.5
            mask = (kwargs or {}).get("attn_mask")
            score = score if mask is None else score + mask[..., :1, :]
            self.rows.append(score.softmax(-1).mean(1)[:, 0])
        elif func in (torch.softmax, Tensor.softmax) and result.ndim == 4:
            self.rows.append(result[:, :, 0].mean(1).double())
        return result


@pytest.mark.parametrize("name", ZOO)
@torch.no_grad()
def test_importance_is_what_the_class_token_attends_to(name: str) -> None:
    model = make_model(name)
    if not any(key.endswith("cls_token") for key, _ in model.named_parameters()):
        with pytest.raises(ValueError, match=r"importance='class_token'.*do not begin with a class token"):
            mmod.route_(model, CONFIG)
        return
    x = make_images(name, 2)
    with _FirstRows() as first_rows:
        model(x)
    mmod.route_(model, CONFIG)
    with mmod.trace(model) as trace:
        model(x)
    routing = trace[next(iter(trace))]
    rows = first_rows.rows[: len(first_rows.rows) // len(model.blocks)]
    torch.testing.assert_close(routing.importance_BN.double(), torch.stack(rows).mean(0), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_heads_that_are_not_fused_and_half_precision_say_the_same() -> None:
    model = make_model("vit_tiny_patch16_224")
    x = make_images("vit_tiny_patch16_224", 2)
    mmod.route_(model, CONFIG)
    importances = []
    for fused, dtype in ((True, torch.float32), (False, torch.float32), (True, torch.bfloat16)):
        for block in model.blocks:
            block.attn.fused_attn = fused
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16), mmod.trace(model) as trace:
            model(x)
        importances.append(trace["blocks.1"].importance_BN)
    assert {importance.dtype for importance in importances} == {torch.float32}
    torch.testing.assert_close(importances[0], importances[1])
    torch.testing.assert_close(importances[0], importances[2], rtol=0.05, atol=1e-3)


def test_it_costs_one_query() -> None:
    dense = make_model("vit_tiny_patch16_224")
    cost = mmod.flops(mmod.route_(dense, CONFIG), 64).blocks[0].importance
    assert cost == 2 * 17 * 64


def test_captions_have_none() -> None:
    clip = pytest.importorskip("tests.kit.clip_zoo").make_clip("ViT-B-32")
    with pytest.raises(ValueError, match="importance='class_token'"):
        mmod.route_(clip, text=CONFIG)
    mmod.route_(clip, image=CONFIG)
