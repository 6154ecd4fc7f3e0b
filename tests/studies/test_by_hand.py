"""The figures of a study, its report and advice are those of a few lines of timm and torch that know no routing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mmod
from mmod.analysis import timing
from mmod.config.parse import read_config
from mmod.data.loader import image_stream
from mmod.opening.weights import find_weights
from mmod.planning.candidate import Candidate
from mmod.report.page import write_report
from mmod.studies.candidates import training_configs
from mmod.studies.kind_configs import ImageStudyConfig
from mmod.studies.study import run_study

IMAGES = 200
DENSE = "mmod:digits-dense"
SHARE = 0.57
NAME = "attended"


def dense_model() -> Any:
    size: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 4,
        "in_chans": 1,
        "embed_dim": 128,
        "depth": 6,
        "num_heads": 4,
    }
    model = timm.create_model("vit_tiny_patch16_224", **size, global_pool="avg", num_classes=10)
    model.load_state_dict(load_file(find_weights(DENSE)))
    return model.eval()


def attention_received(block: Any, x_BND: Tensor) -> Tensor:
    """Mean attention that a token receives from all tokens in all heads (B, N)."""
    qkv = block.attn.qkv(block.norm1(x_BND)).unflatten(2, (3, block.attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    attention_BHNN = (qkv[0] @ qkv[1].mT * block.attn.scale).softmax(-1)
    return attention_BHNN.mean((1, 2))


def a_mod(model: Any, image_BCHW: Tensor) -> Tensor:
    """Late A-MoD: the last four of six blocks run on the tokens that receive most attention in the second block."""
    x_BND = model._pos_embed(model.patch_embed(image_BCHW))
    x_BND = model.blocks[0](x_BND)
    importance_BN = attention_received(model.blocks[1], x_BND)
    # The class token always runs.
    importance_BN[:, 0] = 1.0
    x_BND = model.blocks[1](x_BND)
    kept_BK = importance_BN.topk(int(SHARE * x_BND.shape[1])).indices
    kept_BKD = kept_BK[..., None].expand(-1, -1, x_BND.shape[2])
    for block in model.blocks[2:]:
        x_BND = x_BND.scatter(1, kept_BKD, block(x_BND.gather(1, kept_BKD)))
    logits: Tensor = model.forward_head(model.norm(x_BND))
    return logits


def flops_of(run: Callable[[Tensor], Tensor]) -> int:
    # The fused kernel of the CPU is no operation that torch counts.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(torch.zeros(1, 1, 32, 32))
    return counter.get_total_flops()


@torch.no_grad()
def test_study_report_and_advice_agree_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Times are no figure that a script finds again.
    monkeypatch.setattr(timing, "interleave", lambda calls, **_: {name: [1.0, 1.0] for name in calls})
    digits = read_config(["digits", "--budgets", "[0.7]", "--latency_rounds", "1", "--maps", "0"], ImageStudyConfig)
    config = dataclasses.replace(
        digits,
        output=str(tmp_path / "study"),
        changes={**digits.changes, "data": {"val_limit": IMAGES}},
        routers={NAME: {"preset": "a-mod", "blocks": "late", "budgets": {0.7: {"capacity": SHARE}}}},
        baselines={},
        controls={NAME: False},
        then=None,
    )
    result = run_study(config, progress=False)
    points: Any = result.points

    model = dense_model()
    dense_run: Any = training_configs(config)[0]
    batches = list(image_stream(dense_run.data).batches(0))
    right_dense = torch.cat([model(image_BCHW).argmax(1) == label_B for image_BCHW, label_B in batches])
    right_routed = torch.cat([a_mod(model, image_BCHW).argmax(1) == label_B for image_BCHW, label_B in batches])
    assert len(right_dense) == IMAGES
    top1 = [100 * float(right.double().mean()) for right in (right_dense, right_routed)]
    assert top1[0] != top1[1]
    assert [point.figures[0]["top1"] for point in points] == pytest.approx(top1)
    # The script projects the tokens of the second block twice, once for the attention that they receive.
    twice = 2 * 65 * 128 * 3 * 128
    flops = [flops_of(model), flops_of(lambda image_BCHW: a_mod(model, image_BCHW)) - twice]
    assert [point.cost["gflops"] for point in points] == pytest.approx([count / 1e9 for count in flops])

    cells = {f"{flops[1] / 1e9:.4f}", f"{top1[1]:.2f}"}
    (row,) = (line for line in result.summary.splitlines() if line.startswith(f"| {NAME}-0.7 "))
    assert cells <= set(row.replace("|", " ").split())
    report = write_report([tmp_path / "study"]).read_text()
    assert all(f"<td>{cell}</td>" in report for cell in cells)

    candidate = Candidate(NAME, routing={"preset": "a-mod", "blocks": "late", "capacity": SHARE})
    advice = mmod.advise(dense_model(), batches, candidates=[candidate], images=IMAGES, progress=False)
    (advised,) = advice.rows
    change: Any = advised.accuracy
    assert 100 * (advice.accuracy or 0.0) == pytest.approx(top1[0])
    assert 100 * change.value == pytest.approx(top1[1] - top1[0])
