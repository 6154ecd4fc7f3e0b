"""An audit that is cut anywhere resumes to the same result; progress of another audit is refused."""

from __future__ import annotations

import functools
import itertools
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod.analysis import SHIFTS, LabelledBatch, judge_classes
from mmod.analysis.audit import progress as progress_module
from tests.kit.zoo import make_images, make_model

NAME = "vit_tiny_patch16_224"
Batch = tuple[Tensor, Tensor]
RANDOM_ALONE = mmod.AuditConfig(["random"], draws=1, resamples=100)


class Stopped(Exception):
    """What cuts an audit."""


def batches(images: int, seed: int) -> list[Batch]:
    return list(zip(make_images(NAME, images, seed).split(3), (torch.arange(images) % 7).split(3)))


def labelled(batches: list[Batch]) -> list[LabelledBatch]:
    """Return batches with their classes as strata, and two kinds of tokens."""
    half = np.repeat(["upper", "lower"], [9, 8])
    return [
        LabelledBatch(
            batch, {"class": [str(n) for n in batch[1].tolist()]}, {"half": np.tile(half, (len(batch[0]), 1))}
        )
        for batch in batches
    ]


def options() -> dict[str, Any]:
    """Return all that an audit can be asked for."""
    return {
        "model": mmod.route_(make_model(NAME), mmod.RoutingConfig(router="linear", capacity=0.4, blocks=(1, 2))),
        "batches": labelled(batches(8, seed=0)),
        "positions_from": batches(5, seed=1),
        "reference": make_model(NAME),
        "shifts": {"noise": lambda batch, images: (SHIFTS["noise"](batch[0], images), batch[1])},
        "others": {"other": batches(5, seed=2)},
        "beside": {"random": mmod.route_(make_model(NAME), mmod.RoutingConfig(router="random"))},
        "config": mmod.AuditConfig(leave_one_out=1, draws=1, resamples=100),
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
    monkeypatch.setattr(progress_module, "_EVERY", 0.0)


@pytest.mark.usefixtures("always")
def test_an_audit_that_was_cut_finds_what_it_would_have_found(tmp_path: Path) -> None:
    whole = mmod.audit(**options())
    file = tmp_path / "partial.json"
    # Within the positions, in the batch after that whose tokens are left out, and in the other set.
    for calls in (4, 58, 40):
        with pytest.raises(Stopped):
            mmod.audit(**options(), judge=stopping(calls), progress_file=file)
    done = kept_in(file.read_bytes())["done"]
    assert done == {"positions": 2, "audit": 3, "audit of other": 1}
    found = mmod.audit(**options(), judge=stopping(5), progress_file=file)
    assert found.to_dict() == whole.to_dict()
    # All is done, so that nothing but the first batch is judged again, by each of three models.
    assert mmod.audit(**options(), judge=stopping(3), progress_file=file).to_dict() == whole.to_dict()


@pytest.mark.usefixtures("always")
def test_progress_of_another_audit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "partial.json"
    with pytest.raises(Stopped):
        mmod.audit(**options(), judge=stopping(12), progress_file=file)
    for change, differing in (
        ({"config": mmod.AuditConfig(leave_one_out=1, draws=2, resamples=100)}, "draws: 1 there, 2 now"),
        ({"others": {}}, "batches.audit of other: 2 there, None now"),
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


def first_array(value: Any) -> dict[str, str]:
    """Return the first array of a file's plain values."""
    if isinstance(value, dict) and set(value) == {"array"}:
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(first_array, items)), {})


def kept_in(content: bytes) -> Any:
    """Return the plain values of a file."""
    return json.loads(content.splitlines()[1][9:])


def changed(change: Callable[[Any], object], *, is_forged: bool = False) -> Callable[[bytes], bytes]:
    """Return what changes the plain values of a file, and the checksum of a forged one."""

    def write(content: bytes) -> bytes:
        identity, line = content.splitlines()
        fields = json.loads(line[9:])
        change(fields)
        text = json.dumps(fields).encode()
        check = b"%08x" % zlib.crc32(text) if is_forged else line[:8]
        return b"%b\n%b %b\n" % (identity, check, text)

    return write


forged = functools.partial(changed, is_forged=True)
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "binary": lambda _: bytes(range(256)),
    "a list": lambda _: b"[]\n",
    "text of another file": lambda _: b'{"of": {}, "done": {}, "state": {}}\n',
    "no checksum": lambda content: content.splitlines()[0][9:] + b"\n",
    "more batches than there are": changed(lambda own: own["done"].update(audit=999)),
    "a count is a text": changed(lambda own: own["done"].update(audit="two")),
    "images are NaN": changed(lambda own: own["counts"]["images"].update({"": float("nan")})),
    "strata are short": changed(lambda own: own["counts"]["strata"]["values"]["class"].pop()),
    "an array is another": changed(
        lambda own: first_array(own["counts"]).update(array=first_array(own["counts"]["outcomes"])["array"])
    ),
    "no counts": forged(lambda own: own.pop("counts")),
    "no count of batches": forged(lambda own: own.pop("done")),
    "counts are a list": forged(lambda own: own.update(counts=[])),
    "a part is missing": forged(lambda own: own["counts"].pop("across")),
    "a part is null": forged(lambda own: own["counts"].update(across=None)),
    "an array is text": forged(lambda own: first_array(own["counts"]).update(array="no array")),
    "an array is cut": forged(lambda own: first_array(own["counts"]).update(array=first_array(own)["array"][:40])),
}


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
