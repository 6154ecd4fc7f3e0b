"""A kind of training in a file of one's own, and one row in a table: all that is a function over a kind has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import mmod
from mmod.analysis.table import DENSE, Table, compare, gap
from mmod.io.jobs import Runner
from mmod.io.store import Store
from mmod.planning.candidate import Candidate, PlanOptions
from mmod.studies.assess import assess
from mmod.studies.audit.config import Audited
from mmod.studies.audit.run import audit_run
from mmod.studies.measure import Measurer, measure_run, search_for
from mmod.studies.runs import Comparison
from mmod.training.engine.kind import Kind, LoopKind
from mmod.training.kinds import KINDS, Row, estimate, extended, fit, kind_of
from tests.kit.engine_worker import weights
from tests.kit.fifth_kind import TrainConfig
from tests.kit.sets import SETS

ROW = Row("tests.kit.fifth_kind:TrainConfig", "tests.kit.fifth_kind:MiddleKind", "find the middle of images", "")
ROOT = Path(__file__).parents[2]
ROUTING = {"router": "linear", "blocks": "late", "capacity": 0.5}


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "middle", ROW)


def config(output: Path, **changes: Any) -> TrainConfig:
    data = {"source": "digits:tiny", "root": str(SETS / "digits"), "batch_size": 32}
    fields = {"kind": "middle", "output": str(output), "data": data, "epochs": 2, "epoch_steps": 3, "device": "cpu"}
    return TrainConfig.from_dict({**fields, **changes})


def test_a_kind_has_ten_members_and_the_guide_names_them() -> None:
    members = {name for protocol in (Kind, LoopKind) for name in vars(protocol) if not name.startswith("_")}
    assert len(members) == 10
    guide = (ROOT / "ARCHITECTURE.md").read_text()
    rows = guide.partition("**A kind of training**")[2].partition("## ")[0]
    cells = [line.split("|")[1] for line in rows.splitlines() if line.startswith("| `")]
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == members


def test_a_fifth_kind_trains_resumes_and_is_evaluated_opened_planned_compared_and_audited(tmp_path: Path) -> None:
    whole, cut = (config(tmp_path / name, checkpoint_every=2) for name in ("whole", "cut"))
    result = fit(whole, progress=False)
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
    assert estimate(whole).steps == result.steps

    def die(step: Any) -> None:
        if step.done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(cut, progress=False, after_step=die)
    # An unfinished run opens by its last checkpoint.
    assert "which is not finished" in mmod.open_model(tmp_path / "cut").sentence
    assert fit(cut, progress=False).evaluation == result.evaluation
    left, right = (weights(tmp_path / name / "model") for name in ("whole", "cut"))
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert fit(cut, progress=False).reused

    done = config(tmp_path / "done").started_from(str(tmp_path / "whole"))
    table = assess(done, progress=False)
    assert table.figures(DENSE) == {0: result.evaluation.columns()}
    assert {name for name, _ in table.times} == {"image"}

    (search,) = search_for(kind_of(done), [PlanOptions(budget=0.9, batches=2, batch_size=4)], tmp_path / "plan")
    assert search.share(search.plan) <= 0.9

    candidates = [Candidate(DENSE), Candidate("routed", routing=ROUTING, is_trained=True)]
    comparison = Comparison(candidates=candidates, dense=done, train=done)
    compared = Table()
    (tmp_path / "done").mkdir()
    measurer = Measurer(lambda *run: measure_run(*run, by_sample=True), Store())
    names = [run.name for run in compare(compared, [comparison.checked_runs()], measurer, Runner(progress=False))]
    assert names == [DENSE, "routed"]
    assert compared.runs["routed"][0].kept
    assert gap(compared, "loss", "routed", DENSE) is not None

    routed = config(tmp_path / "audited", routing=ROUTING).started_from(str(tmp_path / "whole"))
    # As `AUDITS` has it of kinds that are there when it is imported.
    audited = extended(Audited)["middle"].from_dict({**routed.to_dict(), "audit": {"draws": 2, "maps": 2}})
    assert {row.name for row in audit_run(audited, progress=False).conditions} >= {"random"}
    assert (tmp_path / "audited/audit/maps.png").exists()
