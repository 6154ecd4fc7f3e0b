"""Audits of runs on image-text pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from mmod.audits.result import Audit
from mmod.studies import commands
from mmod.training.pairs.evaluate import evaluate_batch
from tests.kit.pair_files import png, write_tar
from tests.kit.pairs_worker import clip_config, run

WORDS = ("red", "green", "blue", "black")
QUICK = ["--audit.draws", "1", "--audit.resamples", "100"]


def members(key: int) -> dict[str, bytes]:
    caption = f"{WORDS[key % 4]} {WORDS[key // 4 % 4]} thing"
    return {f"{key:06d}.png": png(key, side=16), f"{key:06d}.txt": caption.encode(), f"{key:06d}.json": b"{}"}


def test_a_run_on_pairs_is_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, first in (("train-0", 0), ("val-0", 0)):
        write_tar(tmp_path / f"{name}.tar", {k: v for key in range(first, first + 16) for k, v in members(key).items()})
    dense = clip_config(tmp_path, "dense", epochs=1)
    run(dense)
    routing = {"image": {"router": "linear", "capacity": 0.5}, "text": {"router": "norm", "capacity": 0.5}}
    run(clip_config(tmp_path, "routed", routing=routing, model={"checkpoint": str(tmp_path / "dense")}))
    options = ["--audit.shifts", "[noise]", "--audit.reference", str(tmp_path / "dense")]
    commands.audit([str(tmp_path / "routed"), *QUICK, *options])
    folder = tmp_path / "routed/audit"
    record = json.loads((folder / "audit.json").read_text())
    audit = Audit.from_dict(record["audit"])
    assert audit.images == 16
    assert capsys.readouterr().out.startswith(str(audit))
    # Both towers decide.
    assert {name.split(".")[0] for name in audit.across.decisions} == {"transformer", "visual"}
    assert {stratum.group for stratum in audit.strata} == {"loss of the dense model", "shift"}
    assert record["flops"]["routed"] < record["flops"]["dense"]
    assert not list(folder.glob("maps*"))


def test_pairs_are_evaluated_as_clip_loses_on_them() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, images: torch.Tensor, texts: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"image_features": images, "text_features": texts.float(), "logit_scale": self.scale}

    images, texts = torch.randn(6, 4), torch.randint(99, (6, 4))
    with torch.no_grad():
        rows = evaluate_batch(Model(), (images, texts))
        loss_B, right_B = rows["loss"], rows["outcome"]
    logits = 3 * images @ texts.float().T
    both = [
        nn.functional.cross_entropy(direction, torch.arange(6), reduction="none") for direction in (logits, logits.T)
    ]
    torch.testing.assert_close(loss_B, sum(both) / 2)
    rights = [direction.argmax(1) == torch.arange(6) for direction in (logits, logits.T)]
    assert right_B.tolist() == ((rights[0].float() + rights[1].float()) / 2).tolist()
    # Of two pairs with one caption, either's image is right.
    texts[1] = texts[0]
    outcome = evaluate_batch(Model(), (images, texts))["loss"]
    assert outcome[0] < loss_B[0] or outcome[1] < loss_B[1]
