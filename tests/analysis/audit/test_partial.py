"""An audit that is cut anywhere goes on and finds what it would have found; that of another one is refused."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod.analysis import judge_classes
from mmod.analysis.audit import SHIFTS
from mmod.analysis.audit import partial as partial_file
from tests.zoo import make_images, make_model

NAME = "vit_tiny_patch16_224"
Batch = tuple[Tensor, Tensor]


class Stopped(Exception):
    """What cuts an audit."""


def batches(images: int, seed: int) -> list[Batch]:
    return list(zip(make_images(NAME, images, seed).split(3), (torch.arange(images) % 7).split(3)))


def options() -> dict[str, Any]:
    """Return all that an audit can be asked for."""
    return {
        "model": mmod.route_(make_model(NAME), mmod.RoutingConfig(router="linear", capacity=0.4, blocks=(1, 2))),
        "batches": batches(8, seed=0),
        "positions_from": batches(5, seed=1),
        "reference": make_model(NAME),
        "shifts": {"noise": lambda batch, images: (SHIFTS["noise"](batch[0], images), batch[1])},
        "others": {"other": batches(5, seed=2)},
        "beside": {"random": mmod.route_(make_model(NAME), mmod.RoutingConfig(router="random"))},
        "strata": lambda batch: {"class": [str(number) for number in batch[1].tolist()]},
        "token_kinds": lambda batch: {"half": np.tile(np.repeat(["upper", "lower"], [9, 8]), (len(batch[0]), 1))},
        "leave_one_out": 1,
        "draws": 1,
        "resamples": 100,
    }


def stopping(calls: int) -> Any:
    """Return a judge that judges so many times."""
    left = itertools.count(calls, -1)

    def judge(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        if not next(left):
            raise Stopped
        return judge_classes(model, batch)

    return judge


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_file, "_EVERY", 0.0)


@pytest.mark.usefixtures("always")
def test_an_audit_that_was_cut_finds_what_it_would_have_found(tmp_path: Path) -> None:
    whole = mmod.audit(**options())
    file = tmp_path / "partial.json"
    # Within the positions, in the batch after that whose tokens are left out, and in the other set.
    for calls in (3, 60, 34):
        with pytest.raises(Stopped):
            mmod.audit(**options(), judge=stopping(calls), progress_file=file)
    done = json.loads(file.read_text())["done"]
    assert done == {"positions": 2, "audit": 3, "audit of other": 1}
    found = mmod.audit(**options(), judge=stopping(3), progress_file=file)
    assert found.to_dict() == whole.to_dict()
    # All is done, so that nothing but the first batch is judged again.
    assert mmod.audit(**options(), judge=stopping(1), progress_file=file).to_dict() == whole.to_dict()


@pytest.mark.usefixtures("always")
def test_progress_of_another_audit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "partial.json"
    with pytest.raises(Stopped):
        mmod.audit(**options(), judge=stopping(12), progress_file=file)
    for change, differing in (
        ({"draws": 2}, "draws"),
        ({"others": {}}, "batches"),
        ({"batches": [tuple(torch.cat(part) for part in zip(*batches(8, seed=0)))]}, "model and data, batches"),
        ({"model": mmod.route_(make_model(NAME, seed=1), mmod.RoutingConfig(blocks=(1, 2)))}, "model and data"),
    ):
        with pytest.raises(ValueError, match=f"belongs to another audit, which differs in {differing}: remove it"):
            mmod.audit(**{**options(), **change}, progress_file=file)
    json.loads(file.read_text())
    file.write_text("[]")
    with pytest.raises(ValueError, match="belongs to another audit"):
        mmod.audit(**options(), progress_file=file)
    file.write_text('{"of": ')
    with pytest.raises(ValueError, match="is no JSON"):
        mmod.audit(**options(), progress_file=file)


@pytest.mark.usefixtures("always")
def test_the_bar_begins_where_the_audit_was_cut(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {**options(), "leave_one_out": 0, "conditions": ["random"], "shifts": {}, "beside": {}, "others": {}}
    with pytest.raises(Stopped):
        mmod.audit(**plain, judge=stopping(7), progress_file=tmp_path / "partial.json")
    capfd.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    mmod.audit(**plain, progress_file=tmp_path / "partial.json", progress=True)
    bars = [line for line in capfd.readouterr().err.split("\r") if line.strip()]
    first = {name: next(bar for bar in bars if bar.startswith(name)) for name in ("positions", "audit")}
    assert "2/2" in first["positions"]
    assert "1/3" in first["audit"]
    assert any("3/3" in bar for bar in bars if bar.startswith("audit"))
