"""Figures of several audits are averaged over the runs of one name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import mean

from mmod.report.charts import rows_over_runs
from mmod.report.sources import read_sources
from tests.kit.records import write_audit


def test_audits_of_one_name_are_averaged_and_others_left_out(tmp_path: Path) -> None:
    (record,) = read_sources([write_audit(tmp_path / "norm", "norm").parent]).audits
    single = record.audit.leave_one_out
    assert single is not None
    runs, norms = [], []
    for number in range(4):
        norms.append({name: dataclasses.replace(norm, value=number / 10) for name, norm in single.norm.items()})
        conditions = list(record.audit.conditions)
        conditions[1] = dataclasses.replace(
            conditions[1], accuracy=dataclasses.replace(conditions[1].accuracy, value=10.0 * number)
        )
        norm = dataclasses.replace(single, norm=norms[-1])
        audit = dataclasses.replace(record.audit, conditions=conditions, leave_one_out=norm, strata=[])
        runs.append(dataclasses.replace(record, name=f"seed{number}/a", audit=audit))
    # Of this one, nothing is known that all others have but the choices of tokens and the other models.
    runs[-1] = dataclasses.replace(runs[-1], audit=dataclasses.replace(runs[-1].audit, leave_one_out=None))
    assert rows_over_runs([*runs[:1], dataclasses.replace(record, name="b")]) == []
    rows = {figure: (name, count, text) for name, figure, count, text in rows_over_runs(runs)}
    assert not any("rank correlation" in figure or "random," in figure for figure in rows)
    learned = record.audit.conditions[0].accuracy.value
    name, count, text = rows["points above random"]
    assert (name, count) == ("a", "4")
    assert text.startswith(f"{learned - mean(10.0 * number for number in range(4)):+.1f} [")
    rows = {figure: (name, count, text) for name, figure, count, text in rows_over_runs(runs[:3])}
    # Of 0, 0.1 and 0.2: 4.303, Student's quantile, times 0.1 over the square root of 3.
    assert rows["rank correlation of token norm and worth in blocks.0"][2] == "+0.10 [-0.15, +0.35]"
    assert any(figure.startswith("points above dense, all images") for figure in rows)
