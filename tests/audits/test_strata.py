"""Strata and shifts: planted routers are told apart where they differ, and batches do not matter."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

import mmod
from mmod.analysis.statistics import Resampling, simultaneous
from mmod.audits import SHIFTS, Comparisons, LabelledBatch
from mmod.audits.result import Audit
from mmod.audits.strata import check_labels, members_of, say_gaps
from tests.kit.planted import FAVOURED, PATCH, PLANTED, SIDE, batches_of, plant
from tests.kit.zoo import make_images, make_model

Batch = tuple[Tensor, Tensor]


def place_of(batch: Batch) -> dict[str, list[str]]:
    """Return whether the object of each image, its loudest patch, is where objects are more often."""
    patches = batch[0].reshape(-1, SIDE, PATCH, SIDE, PATCH).transpose(2, 3).flatten(1, 2).flatten(2)
    places = patches.norm(dim=2).argmax(1).tolist()
    return {"place": ["favoured" if place in FAVOURED else "elsewhere" for place in places]}


@pytest.mark.parametrize("kind", ["position", "content"])
def test_a_fixed_position_is_worth_something_where_objects_are_favoured_alone(kind: str) -> None:
    batches = [LabelledBatch(batch, place_of(batch)) for batch in batches_of(800, seed=3)]
    audit = mmod.audit(plant(PLANTED[kind]), batches, mmod.AuditConfig(conditions=["random"], draws=2, resamples=500))
    strata = {stratum.name: stratum for stratum in audit.strata}
    assert sum(stratum.images for stratum in audit.strata) == audit.images
    assert strata["favoured"].gap.low > 0
    assert strata["favoured"].accuracy_p < 0.01
    assert (strata["elsewhere"].gap.low > 0) == (kind == "content")
    (sentence,) = say_gaps(audit.strata)
    most, least = sorted(strata.values(), key=lambda stratum: -stratum.gap.value)
    assert kind == "content" or most.name == "favoured"
    assert sentence.startswith(f"By place, the learned choice is worth most in {most.name!r}")
    assert sentence.endswith("apart." if most.gap.low > least.gap.high else "overlap.")
    total = sum(stratum.images * stratum.gap.value for stratum in audit.strata) / audit.images
    assert total == pytest.approx(audit.gap.value)


def labelled(size: int) -> list[LabelledBatch]:
    return [LabelledBatch(batch, place_of(batch)) for batch in batches_of(60, 1, size)]


def test_batches_do_not_matter_and_findings_are_read_again() -> None:
    config = mmod.AuditConfig(["random"], draws=1, resamples=200)
    audits = [
        mmod.audit(
            plant("norm"),
            labelled(size),
            config,
            Comparisons(reference=plant("norm", capacity=1), shifts={"noise": SHIFTS["noise"]}),
        )
        for size in (60, 17)
    ]
    assert [(stratum.group, stratum.name, stratum.images) for stratum in audits[0].strata[2:]] == [
        ("loss of the dense model", "lowest third", 20),
        ("loss of the dense model", "middle third", 20),
        ("loss of the dense model", "highest third", 20),
        ("shift", "none", 60),
        ("shift", "noise", 60),
    ]
    for one, other in zip(*(stratum.strata for stratum in audits)):
        assert one.accuracy == other.accuracy
        assert one.loss_gap.value == pytest.approx(other.loss_gap.value, rel=1e-4, abs=1e-6)
    all_images = audits[0].strata[5]
    assert all_images.accuracy.value == audits[0].conditions[0].accuracy.value
    assert all_images.gap.value == pytest.approx(audits[0].gap.value)
    assert Audit.from_dict(json.loads(json.dumps(audits[0].to_dict()))) == audits[0]
    assert "| noise | 60 |" in " ".join(str(audits[0]).split())
    assert max(map(len, str(audits[0]).splitlines())) <= 120


def test_another_set_is_evaluated_as_if_it_were_the_only_one() -> None:
    name = "vit_tiny_patch16_224"
    sets = {key: list(zip(make_images(name, 9, key).split(4), (torch.arange(9) % 7).split(4))) for key in range(2)}
    model = mmod.route_(make_model(name), mmod.RoutingConfig(router="linear", capacity=0.4))
    config = mmod.AuditConfig(["random", "shuffled"], draws=2, resamples=100)
    one, other = (mmod.audit(model, key, config) for key in sets.values())
    both = mmod.audit(model, sets[0], config, Comparisons(others={"other": sets[1]}))
    assert both.conditions == one.conditions
    rows = {key.name: key for key in both.strata}
    for key, alone in (("none", one), ("other", other)):
        assert (rows[key].group, rows[key].images) == ("shift", 9)
        assert rows[key].accuracy.value == alone.conditions[0].accuracy.value
        assert rows[key].random.value == alone.conditions[1].accuracy.value
        assert rows[key].gap.value == pytest.approx(alone.gap.value)


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 33, 20)])
def test_shifts_change_each_image_by_its_number_alone(name: str, shape: tuple[int, ...]) -> None:
    images = torch.randn(5, *shape)
    moved = SHIFTS[name](images.clone(), range(10, 15))
    assert moved.shape == images.shape
    assert moved.isfinite().all()
    assert (moved != images).flatten(1).any(1).all()
    for image in range(5):
        alone = SHIFTS[name](images[image : image + 1], range(10 + image, 11 + image))
        torch.testing.assert_close(alone[0], moved[image], rtol=1e-5, atol=1e-6)
    flat = torch.full((2, *shape), 3.0)
    torch.testing.assert_close(SHIFTS[name](flat, range(2)), flat)


def test_numbers_are_sorted_in_thirds() -> None:
    numbers = torch.randperm(90)
    members = members_of([{"size": part.tolist(), "colour": ["grey"] * len(part)} for part in numbers.split(40)])
    # What is the same of all tells nothing.
    assert {group for group, _ in members} == {"size"}
    assert [int(third.sum()) for third in members.values()] == [30, 30, 30]
    highest = [int(numbers[third].max()) for third in members.values()]
    assert highest == sorted(highest)


def test_intervals_hold_together() -> None:
    rng = np.random.default_rng(0)
    together = 0
    for seed in range(100):
        values = rng.normal(size=(80, 8))
        intervals = simultaneous(values.mean(0), Resampling(len(values), 300, seed).means(values))
        together += all(interval.low <= 0 <= interval.high for interval in intervals)
    assert 87 <= together <= 100


def test_strata_of_other_names_than_before_are_refused() -> None:
    with pytest.raises(ValueError, match="strata name kind and named size before"):
        check_labels({"kind": ["a"]}, 1, {"size": [1.0]})


def test_a_model_is_compared_with_others_in_the_same_strata() -> None:
    routed, batches = plant("norm"), batches_of(60, seed=0)
    dense = mmod.unroute_(plant("norm")).train()
    config = mmod.AuditConfig(["random"], draws=1, resamples=100)
    compared = Comparisons(reference=dense, baselines={"itself": plant("norm"), "dense": dense})
    audit = mmod.audit(routed, batches, config, compared)
    assert dense.training
    groups = {
        name: [comparison for comparison in audit.baselines if comparison.group == name] for name in ("itself", "dense")
    }
    thirds = [f"loss of the dense model: {third} third" for third in ("lowest", "middle", "highest")]
    for rows in groups.values():
        assert [comparison.name for comparison in rows] == ["all images", *thirds]
        assert sum(comparison.images for comparison in rows[1:]) == rows[0].images == 60
    assert all(
        comparison.gap.value == comparison.loss_gap.value == 0 and comparison.accuracy_p == 1
        for comparison in groups["itself"]
    )
    images, targets = (torch.cat(part) for part in zip(*batches))
    with torch.no_grad():
        right = {name: model.eval()(images).argmax(1) == targets for name, model in (("own", routed), ("other", dense))}
    all_images = groups["dense"][0]
    assert all_images.accuracy.value == audit.conditions[0].accuracy.value
    assert all_images.random.value == pytest.approx(100 * float(right["other"].float().mean()))
    assert all_images.gap.value == pytest.approx(100 * float((right["own"].float() - right["other"].float()).mean()))
    assert Audit.from_dict(json.loads(json.dumps(audit.to_dict()))) == audit
    page = str(audit)
    assert "Beside itself, the model is at +0.0 points, no significant difference; " in page
    assert "Beside dense, " in page
