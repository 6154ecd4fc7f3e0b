"""An audit that is cut anywhere resumes to the same result; another audit finds nothing."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mmod
from tests.kit.interrupted_audit import NAME, Batch, Stopped, batches, labelled, options, stopping
from tests.kit.zoo import make_model

LABELLED = labelled(batches(8, seed=0))
RANDOM_ALONE = mmod.AuditConfig(["random"], draws=1, resamples=100)


def plain(**comparisons: Any) -> dict[str, Any]:
    """Return what an audit of one set, without baselines, is asked for: what happens to a file needs few conditions."""
    return {**options(**{"shifts": {}, "baselines": {}, "others": {}, **comparisons}), "config": RANDOM_ALONE}


def test_an_audit_that_was_cut_finds_what_it_would_have_found(tmp_path: Path) -> None:
    uninterrupted = mmod.audit(**options())
    file = tmp_path / "partial.json"
    # Within the positions, in the batch after that whose tokens are left out, and in the other set.
    for calls in (4, 58, 42):
        with pytest.raises(Stopped):
            mmod.audit(**options(), evaluate=stopping(calls), store=file)
    assert sets_in(file.read_bytes()) == {"positions": 2, "audit": 3, "audit of noise": 3, "audit of other": 1}
    audit = mmod.audit(**options(), evaluate=stopping(5), store=file)
    assert audit.to_dict() == uninterrupted.to_dict()
    # All is done, so that nothing but the first batch is evaluated again, by each of three models.
    assert mmod.audit(**options(), evaluate=stopping(3), store=file).to_dict() == uninterrupted.to_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"config": mmod.AuditConfig(["random"], draws=2, resamples=100)},
        {"comparisons": {"others": {"other": batches(5, seed=2)}}},
        {"batches": [tuple(torch.cat(part) for part in zip(*batches(8, seed=0)))]},
        {"batches": batches(8, seed=0)[:2]},
        {"batches": [*labelled(batches(8, seed=0))[:2], labelled(batches(8, seed=1))[2]]},
        {"batches": [batch._replace(strata={"class": ["a", "b", "a"][: len(batch.batch[1])]}) for batch in LABELLED]},
        {"comparisons": {"positions_from": batches(5, seed=3)}},
        {"model": mmod.route_(make_model(NAME, seed=1), mmod.RoutingConfig(blocks=(1, 2)))},
        {"comparisons": {"reference": make_model(NAME, seed=1)}},
        {"comparisons": {"baselines": {"random": mmod.route_(make_model(NAME, seed=1), mmod.RoutingConfig())}}},
        {"config": mmod.AuditConfig(["random"], draws=1, resamples=100, grid=(4, 4))},
        {"config": mmod.AuditConfig(["random"], leave_one_out=1, draws=1, resamples=100)},
    ],
    ids=lambda change: "-".join([*change, *change.get("comparisons", ())]),
)
def test_another_audit_takes_nothing_from_the_store_and_leaves_what_is_there(
    half_done: bytes, tmp_path: Path, change: dict[str, Any]
) -> None:
    file = tmp_path / "partial.json"
    file.write_bytes(half_done)
    comparisons = change.get("comparisons", {})
    other = {**plain(**comparisons), **{name: value for name, value in change.items() if name != "comparisons"}}
    assert mmod.audit(**other, store=file).to_dict() == mmod.audit(**other).to_dict()
    assert file.read_bytes().startswith(half_done)


def test_a_condition_of_ones_own_is_known_by_what_it_does(tmp_path: Path) -> None:
    ranks: list[Any] = [lambda there: there.reference["dense attention"], lambda there: there.order_BN]
    config = mmod.AuditConfig(["random", "dense attention"], draws=1, resamples=100)
    for rank in ranks:
        edited = {**plain(custom={"mine": rank}), "config": config}
        expected = mmod.audit(**edited).to_dict()
        assert mmod.audit(**edited, store=tmp_path / "partial.json").to_dict() == expected
        # On the first batch alone: two models, and the condition, after the decision and the dense model that it reads.
        again = mmod.audit(**edited, evaluate=stopping(2 + 3), store=tmp_path / "partial.json")
        assert again.to_dict() == expected


def test_a_set_of_unknown_length_that_has_become_shorter_is_audited_anew(tmp_path: Path) -> None:
    class Unsized:
        left = 3

        def __iter__(self) -> Iterator[Batch]:
            return iter(batches(8, seed=0)[: self.left])

    unsized = {**plain(), "batches": Unsized()}
    for Unsized.left in (3, 2, 3):
        assert mmod.audit(**unsized, store=tmp_path / "partial.json").to_dict() == mmod.audit(**unsized).to_dict()


def test_of_a_set_that_has_grown_the_further_batches_alone_are_evaluated(tmp_path: Path) -> None:
    config = plain()
    mmod.audit(**{**config, "batches": LABELLED[:2]}, store=tmp_path / "partial.json")
    # Two models on the first batch, then one batch: as learned, the dense model, rolled twice, and random tokens.
    audit = mmod.audit(**config, evaluate=stopping(2 + 5), store=tmp_path / "partial.json")
    assert audit.to_dict() == mmod.audit(**config).to_dict()


def sets_in(content: bytes) -> dict[str, int]:
    """Return of how many batches of each set a file holds the tables."""
    return Counter(json.loads(line[9:])["identity"]["set"] for line in content.splitlines()[1:])


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the file of an audit that was cut."""
    file = tmp_path_factory.mktemp("half") / "partial.json"
    with pytest.raises(Stopped):
        mmod.audit(**plain(), evaluate=stopping(10), store=file)
    content = file.read_bytes()
    assert sets_in(content) == {"positions": 2, "audit": 1}
    return content


def test_batches_that_are_done_are_passed_over_in_the_bar(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plain()
    with pytest.raises(Stopped):
        mmod.audit(**config, evaluate=stopping(10), store=tmp_path / "partial.json")
    capfd.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    mmod.audit(**config, store=tmp_path / "partial.json", progress=True)
    bars = [line for line in capfd.readouterr().err.split("\r") if line.strip()]
    for name, total in (("positions", "2/2"), ("audit", "3/3")):
        assert total in [bar for bar in bars if bar.startswith(name)][-1]
