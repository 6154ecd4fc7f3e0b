"""An audit that is cut anywhere resumes to the same result; progress of another audit is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mmod
from mmod.analysis.audit import progress as progress_module
from tests.kit.interrupted_audit import DAMAGES, NAME, Batch, Stopped, batches, options, stopping
from tests.kit.zoo import make_model

RANDOM_ALONE = mmod.AuditConfig(["random"], draws=1, resamples=100)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_EVERY", 0.0)


@pytest.mark.usefixtures("always")
def test_an_audit_that_was_cut_finds_what_it_would_have_found(tmp_path: Path) -> None:
    uninterrupted = mmod.audit(**options())
    file = tmp_path / "partial.json"
    # Within the positions, in the batch after that whose tokens are left out, and in the other set.
    for calls in (4, 58, 40):
        with pytest.raises(Stopped):
            mmod.audit(**options(), judge=stopping(calls), progress_file=file)
    done = kept_in(file.read_bytes())["done"]
    assert done == {"positions": 2, "audit": 3, "audit of other": 1}
    audit = mmod.audit(**options(), judge=stopping(5), progress_file=file)
    assert audit.to_dict() == uninterrupted.to_dict()
    # All is done, so that nothing but the first batch is judged again, by each of three models.
    assert mmod.audit(**options(), judge=stopping(3), progress_file=file).to_dict() == uninterrupted.to_dict()


@pytest.mark.usefixtures("always")
def test_progress_of_another_audit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "partial.json"
    with pytest.raises(Stopped):
        mmod.audit(**options(), judge=stopping(12), progress_file=file)
    for change, differing in (
        ({"config": mmod.AuditConfig(leave_one_out=1, draws=2, resamples=100)}, "draws: 1 there, 2 now"),
        ({"others": {}}, "batches.audit of other: 2 there, not set now"),
        (
            {"batches": [tuple(torch.cat(part) for part in zip(*batches(8, seed=0)))]},
            "batches.audit: 3 there, 1 now; beside.random: .*; model and data: .*; reference: .*",
        ),
        ({"model": mmod.route_(make_model(NAME, seed=1), mmod.RoutingConfig(blocks=(1, 2)))}, "model and data"),
        ({"reference": make_model(NAME, seed=1)}, "reference"),
        ({"beside": {"random": mmod.route_(make_model(NAME, seed=1), mmod.RoutingConfig())}}, "beside"),
        ({"config": mmod.AuditConfig(leave_one_out=1, draws=1, resamples=100, grid=(4, 4))}, "grid"),
    ):
        with pytest.raises(ValueError, match=f"belongs to another audit: {differing}.*Delete it"):
            mmod.audit(**{**options(), **change}, progress_file=file)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("at", [1, 2])
def test_progress_on_other_batches_is_refused(tmp_path: Path, at: int) -> None:
    """Also where the first of them is the same, or where there are fewer than were done."""
    file = tmp_path / "partial.json"
    mmod.audit(**options(), progress_file=file)
    images, targets = batches(8, seed=0)[at]
    other = batches(8, seed=0)
    other[at] = (images.flip(3), targets)
    with pytest.raises(ValueError, match=r"its first 3 batches of 'audit' are others\. Delete it"):
        mmod.audit(**{**options(), "batches": other}, progress_file=file)

    class Unsized:
        def __iter__(self) -> Iterator[Batch]:
            return iter(batches(8, seed=0)[:left])

    left, unsized = 3, {**options(), "batches": Unsized()}
    file.unlink()
    mmod.audit(**unsized, progress_file=file)
    left = at
    with pytest.raises(ValueError, match=f"it did 3 batches of 'audit', and there are {at}"):
        mmod.audit(**unsized, progress_file=file)


def kept_in(content: bytes) -> Any:
    """Return the plain values of a file."""
    return json.loads(content.splitlines()[1][9:])


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the file of an audit that was cut."""
    file = tmp_path_factory.mktemp("half") / "partial.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress_module, "_EVERY", 0.0)
        with pytest.raises(Stopped):
            mmod.audit(**options(), judge=stopping(58), progress_file=file)
    return file.read_bytes()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_progress_is_refused_by_name(half_done: bytes, damage: str, tmp_path: Path) -> None:
    file = tmp_path / "partial.json"
    damaged = DAMAGES[damage](half_done)
    assert damaged != half_done
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"partial\.json' is .*\. Delete it or choose another file$"):
        mmod.audit(**options(), progress_file=file)
    assert file.read_bytes() == damaged


def test_progress_that_was_not_written_whole_is_dropped(half_done: bytes, tmp_path: Path) -> None:
    file = tmp_path / "partial.json"
    file.write_bytes(half_done[: len(half_done) // 2])
    plain = {**options(), "config": RANDOM_ALONE}
    with pytest.raises(ValueError, match="belongs to another audit: conditions: "):
        mmod.audit(**plain, progress_file=file)
    file.write_bytes(half_done[:10])
    assert mmod.audit(**plain, progress_file=file).to_dict() == mmod.audit(**plain).to_dict()


def test_progress_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no regular file\. Delete it"):
        mmod.audit(**options(), progress_file=tmp_path)


@pytest.mark.usefixtures("always")
def test_the_bar_begins_where_the_audit_was_cut(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {**options(), "config": RANDOM_ALONE, "shifts": {}, "beside": {}, "others": {}}
    with pytest.raises(Stopped):
        mmod.audit(**plain, judge=stopping(10), progress_file=tmp_path / "partial.json")
    capfd.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    mmod.audit(**plain, progress_file=tmp_path / "partial.json", progress=True)
    bars = [line for line in capfd.readouterr().err.split("\r") if line.strip()]
    first = {name: next(bar for bar in bars if bar.startswith(name)) for name in ("positions", "audit")}
    assert "2/2" in first["positions"]
    assert "1/3" in first["audit"]
    assert any("3/3" in bar for bar in bars if bar.startswith("audit"))
