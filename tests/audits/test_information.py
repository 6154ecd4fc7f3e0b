"""What kinds of tokens say of decisions: exact where it is known, without bias, whatever the batches."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

import mmod
from mmod.audits import LabelledBatch
from mmod.audits.information import Information, count_kinds, information_in, information_of
from mmod.audits.result import Audit
from tests.kit.decisions import decided
from tests.kit.planted import FAVOURED, TOKENS, position
from tests.kit.zoo import make_images, make_model

NAME = "vit_tiny_patch16_224"


def counted(kind_BN: Tensor, keep_BN: Tensor) -> Information:
    counts = count_kinds([(kind_BN, keep_BN, torch.ones_like(keep_BN), range(len(keep_BN)))])
    information = information_in(counts)
    assert information is not None
    return information


def plain(kind_BN: Tensor, keep_BN: Tensor) -> float:
    """Return the mutual information in bits that counts show, by its definition."""
    kind, keep = kind_BN.flatten().numpy(), keep_BN.flatten().numpy()
    bits = 0.0
    for k in np.unique(kind):
        for kept in (False, True):
            both = float(np.mean((kind == k) & (keep == kept)))
            if both:
                bits += both * np.log2(both / (np.mean(kind == k) * np.mean(keep == kept)))
    return bits


def test_position_says_all_of_a_fixed_choice_and_nothing_of_chance() -> None:
    fixed = torch.arange(10).expand(4000, -1) < 3
    chance = torch.rand(4000, 10).argsort(1) < 3
    free = torch.ones_like(fixed)
    information = information_of(decided({"a": fixed, "b": chance}, free, sizes=(4000,)))
    assert information["a"]["position"].share.value == pytest.approx(1)
    entropy = -(0.3 * np.log2(0.3) + 0.7 * np.log2(0.7))
    assert information["a"]["position"].bits.value == pytest.approx(entropy)
    assert information["b"]["position"].share.value == pytest.approx(0, abs=0.001)
    assert information["b"]["position"].kept == {}


def test_many_images_come_near_the_definition_and_few_have_no_bias() -> None:
    rng = torch.Generator().manual_seed(0)
    kinds, odds = torch.randint(4, (3000, 20), generator=rng), torch.tensor([0.1, 0.2, 0.3, 0.6])
    keeps = torch.rand(kinds.shape, generator=rng) < odds[kinds]
    truth = counted(kinds, keeps)
    assert truth.bits.value == pytest.approx(plain(kinds, keeps), rel=0.01)
    covered, corrected, counts = 0, [], []
    for part in range(150):
        sample = kinds[20 * part : 20 * part + 20], keeps[20 * part : 20 * part + 20]
        information = counted(*sample)
        corrected.append(information.bits.value)
        counts.append(plain(*sample))
        covered += information.bits.low <= truth.bits.value <= information.bits.high
    assert covered >= 130
    assert abs(np.mean(corrected) - truth.bits.value) < 0.25 * abs(np.mean(counts) - truth.bits.value)


def test_chance_says_nothing_where_tokens_of_an_image_hang_together() -> None:
    """The baseline of chance is that of kinds dealt out to other images."""
    rng = torch.Generator().manual_seed(0)
    within, estimates, biased = 0, [], []
    for _ in range(100):
        # Whole images are kept or not, and each has one kind, so that there are few draws and many tokens.
        kinds = torch.randint(3, (60, 1), generator=rng).expand(-1, 16)
        keeps = (torch.rand(60, 1, generator=rng) < 0.5).expand(-1, 16)
        estimate = counted(kinds, keeps)
        within += estimate.bits.low <= 0 <= estimate.bits.high
        estimates.append(estimate.bits.value)
        biased.append(plain(kinds, keeps))
    assert within >= 85
    assert abs(np.mean(estimates)) < 0.2 * np.mean(biased)


def test_batches_do_not_matter_and_names_are_those_of_kinds() -> None:
    kinds = np.random.default_rng(0).choice(["object", "background"], size=(30, 12), p=[0.3, 0.7])
    keep = torch.from_numpy(kinds == "object") ^ (torch.rand(30, 12) < 0.1)
    free = torch.ones_like(keep)
    free[:, 0] = False
    results = []
    for sizes in ((30,), (7, 7, 7, 7, 2)):
        tables = decided({"a": keep}, free, sizes, {"region": kinds, "same": kinds != "none"})
        results.append(information_of(tables)["a"])
    assert results[0] == results[1]
    # What is the same of all tokens tells nothing.
    assert set(results[0]) == {"position", "region"}
    region = results[0]["region"]
    for name, share in region.kept.items():
        chosen = torch.from_numpy(kinds == name) & free
        assert share == pytest.approx(float((keep & chosen).sum() / chosen.sum()))
    assert region.share.low > 0.2


def test_planted_routers_are_told_apart_by_what_is_known_of_tokens() -> None:
    def kinds(batch: tuple[Tensor, Tensor]) -> dict[str, np.ndarray]:
        names = np.array(["class token", *("favoured" if place in FAVOURED else "other" for place in range(TOKENS))])
        return {"place": np.tile(names, (len(batch[0]), 1))}

    batches = [(make_images(NAME, 60), torch.arange(60) % 7)]
    config = mmod.AuditConfig(["random"], draws=1, resamples=100)
    labelled = [LabelledBatch(batch, token_kinds=kinds(batch)) for batch in batches]
    models = {
        name: mmod.route_(make_model(NAME), mmod.RoutingConfig(router=router, gate="identity", capacity=0.25))
        for name, router in (("position", position), ("random", "random"))
    }
    audits = {name: mmod.audit(model, labelled, config) for name, model in models.items()}
    for known in audits["position"].across.information.values():
        # The class token takes one of four places.
        assert known["place"].kept == {"favoured": 0.75, "other": 0.0}
        assert known["position"].share.value == pytest.approx(1)
        assert 0.5 < known["place"].share.value < 1
    for known in audits["random"].across.information.values():
        assert known["place"].share.low < 0.02
    page = str(audits["position"])
    assert "kept of favoured | kept of other |" in page
    assert Audit.from_dict(json.loads(json.dumps(audits["random"].to_dict()))) == audits["random"]
    with pytest.raises(
        ValueError, match=r"token_kinds give 'place' of \(60, 3\) tokens, and decisions are on \(60, 17"
    ):
        mmod.audit(models["random"], [LabelledBatch(batches[0], token_kinds={"place": np.full((60, 3), "a")})], config)
