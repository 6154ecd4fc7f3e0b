"""Audits tell planted routers apart, and do not depend on how images are dealt out in batches."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod.analysis.statistics import Estimate
from mmod.audits import Comparisons, DecisionContext, LabelledBatch, evaluate_answers, evaluate_classes
from mmod.audits.choices import default_choices
from mmod.audits.result import Audit, finding_of
from tests.kit.clip_zoo import make_captions, make_clip
from tests.kit.clip_zoo import make_images as make_clip_images
from tests.kit.planted import batches_of, content, plant
from tests.kit.vlm_zoo import IMAGE, LINEAR, make_joint, prompt
from tests.kit.zoo import make_images, make_model

SMALL = "vit_tiny_patch16_224"


def test_few_images_do_not_tell() -> None:
    for router, images in (("norm", 9), ("random", 9)):
        audit = mmod.audit(plant(router), batches_of(images, seed=0), mmod.AuditConfig(draws=1, resamples=200))
        assert audit.kind == "inconclusive"
        assert audit.verdict.startswith("Inconclusive: ")


@pytest.mark.parametrize(("low", "high", "says"), [(-9, 8, "too few"), (-9, 0.1, "no better"), (2, 9, "is worth")])
def test_a_verdict_says_what_the_interval_of_its_worth_does(low: float, high: float, says: str) -> None:
    gap = Estimate((low + high) / 2, low, high)
    _, verdict = finding_of(gap, None, None, None, is_clear=low > 0, is_none=says == "no better")
    assert says in verdict
    assert f"[{low:+.1f}, {high:+.1f}] points of accuracy over random tokens" in verdict


def test_a_random_choice_is_one_draw_for_all_blocks() -> None:
    model, kept = plant(content), []

    def evaluate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        with mmod.trace(model) as decisions:
            outcome = evaluate_classes(model, batch)
        kept.append([routing.keep_BN for routing in decisions.values()])
        return outcome

    mmod.audit(
        model, batches_of(8, seed=0), mmod.AuditConfig(conditions=["random"], draws=2, resamples=100), evaluate=evaluate
    )
    first, second = kept[-2:]
    for one, other in (first, second):
        assert torch.equal(one, other)
    assert not torch.equal(first[0], second[0])


def small_audit(size: int, **options: Any) -> mmod.audits.Audit:
    images, targets = make_images(SMALL, 9), torch.arange(9) % 7
    model = mmod.route_(make_model(SMALL), mmod.RoutingConfig(router="linear", capacity=0.4))
    return mmod.audit(
        model, list(zip(images.split(size), targets.split(size))), mmod.AuditConfig(resamples=100, draws=2), **options
    )


def test_batches_do_not_matter() -> None:
    one, other = small_audit(9), small_audit(2)
    assert one.verdict == other.verdict
    for a, b in zip(one.conditions, other.conditions):
        assert a.accuracy == b.accuracy
        assert a.loss.value == pytest.approx(b.loss.value, rel=1e-5)
    assert one.across == other.across


@pytest.mark.parametrize("towers", [("image", "text"), ("text", "image"), ("text",), ("image",)])
def test_the_towers_that_ran_are_those_that_the_audit_tells_of(towers: tuple[str, ...]) -> None:
    model = mmod.route_(make_clip("ViT-B-32"), image=LINEAR, text=LINEAR)
    inputs = {"image": make_clip_images("ViT-B-32", 3), "text": make_captions("ViT-B-32")}
    batches = [(tower, inputs[tower]) for tower in towers]

    def run(model: Any, batch: Any) -> tuple[Any, Any]:
        tower, x = batch
        feature_BD = model.encode_image(x) if tower == "image" else model.encode_text(x)
        return (feature_BD[:, 0],) * 2

    if len(towers) > 1:
        with pytest.raises(ValueError, match=r"batch 1 of 'positions' was decided by .* that run the same"):
            mmod.audit(model, batches, mmod.AuditConfig(draws=1, resamples=100), evaluate=run)
        return
    across = mmod.audit(model, batches, mmod.AuditConfig(draws=1, resamples=100), evaluate=run).across
    blocks = [name for names in across.blocks.values() for name in names]
    assert blocks == [name for name in mmod.routed_blocks(model) if name.startswith("visual") == (towers == ("image",))]


def test_findings_are_plain_values_and_a_page() -> None:
    audit = small_audit(9)
    unknown = dataclasses.replace(audit.across, returning=Estimate(math.nan), kept={"blocks.0": Estimate(0.5)})
    for one in (audit, dataclasses.replace(audit, across=unknown)):
        plain = json.loads(json.dumps(one.to_dict(), allow_nan=False))
        assert plain["conditions"][0]["name"] == "as learned"
        assert str(Audit.from_dict(plain).across) == str(one.across)
    assert [condition.name for condition in audit.conditions] == ["as learned", *default_choices(False)]
    page = str(audit)
    assert audit._repr_markdown_() == page
    assert " ".join(page.split()).startswith(audit.verdict)
    assert max(map(len, page.splitlines())) <= 120
    assert all(f"| {name}" in page for name in default_choices(False))


def test_inverted_keeps_exactly_what_was_dropped() -> None:
    model = mmod.route_(make_model(SMALL), mmod.RoutingConfig(router="norm", capacity=0.5, protect_prefix=False))
    kept = []

    def evaluate(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        with mmod.trace(model) as decisions:
            model(batch)
        kept.append(decisions["blocks.1"].keep_BN)
        return torch.zeros(len(batch)), torch.ones(len(batch))

    images = make_images(SMALL, 4)
    learned = small_learned(model, images)
    mmod.audit(
        model, [images], mmod.AuditConfig(conditions=["random", "inverted"], draws=1, resamples=100), evaluate=evaluate
    )
    tokens = learned.shape[1]
    lowest = kept[-1]
    # Of 17 tokens 8 are kept, and so of the 9 that were dropped.
    assert int(lowest.sum(1).unique()) == tokens // 2
    assert not (lowest & learned).any()


def small_learned(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(images)
    return decisions["blocks.1"].keep_BN


def test_a_choice_of_the_users_and_positions_of_another_set() -> None:
    elsewhere = batches_of(400, seed=50)
    audit = mmod.audit(
        plant("random"),
        batches_of(600, seed=1),
        mmod.AuditConfig(conditions=["random", "mean mask"], draws=2, resamples=200),
        Comparisons(positions_from=elsewhere, custom={"far from others": lambda place: content(place.x_BND)}),
    )
    condition = audit.conditions[-1]
    assert condition.name == "far from others"
    assert condition.accuracy_change is not None
    assert condition.accuracy_change.low > 10
    assert condition.accuracy_p is not None
    assert condition.accuracy_p < 0.05


def test_dense_attention_is_that_of_the_same_block_of_the_reference() -> None:
    """Beside a slow definition: the map from queries and keys, its columns averaged."""
    dense = mmod.unroute_(plant("norm"))

    def received(place: DecisionContext) -> Tensor:
        (images, _), name = next(iter(batches)), place.block
        states: dict[str, Tensor] = {}
        attention = dense.get_submodule(name).attn
        handle = attention.register_forward_pre_hook(lambda _, args: states.update(x=args[0]))
        dense(images)
        handle.remove()
        q, k, _ = attention.qkv(states["x"]).unflatten(2, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4).double()
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1).mean((1, 2))

    batches = batches_of(60, seed=3)
    audit = mmod.audit(
        plant("random"),
        batches,
        mmod.AuditConfig(conditions=["random", "dense attention"], draws=1, resamples=100),
        Comparisons(custom={"slow": received}, reference=dense),
    )
    fast, slow = audit.conditions[-2:]
    assert (fast.accuracy, fast.loss) == (slow.accuracy, slow.loss)
    assert (fast.name, fast.family) == ("dense attention", "other")


def test_modes_and_decisions_are_left_as_they_were() -> None:
    model = plant("random").train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    images = batches_of(8, seed=0)
    before = model.eval()(images[0][0])
    for module, mode in zip(model.modules(), modes):
        module.training = mode
    mmod.audit(model, images, mmod.AuditConfig(draws=1, resamples=100))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model.eval()(images[0][0]), before)


def evaluate_pairs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    image_BD, text_BD = model(*batch)[:2]
    logits = 10 * image_BD @ text_BD.T
    target = torch.arange(len(logits))
    return nn.functional.cross_entropy(logits, target, reduction="none"), (logits.argmax(1) == target).float()


def test_a_evaluate_of_ones_own_audits_both_towers_of_a_clip_model() -> None:
    model = mmod.route_(make_clip("ViT-B-32"), image=mmod.RoutingConfig(), text=mmod.RoutingConfig())
    batch = (make_clip_images("ViT-B-32", 3), make_captions("ViT-B-32"))
    across = mmod.audit(model, [batch, batch], mmod.AuditConfig(draws=1, resamples=100), evaluate=evaluate_pairs).across
    parts = {name.rpartition(".")[0] for name in across.decisions}
    assert len(parts) == 2
    assert set(across.never) == {next(name for name in across.decisions if name.startswith(part)) for part in parts}
    assert {row.count(None) for row in across.again} == {len(across.again) // 2}


@pytest.mark.parametrize("side", ["left", "right"])
def test_answers_of_a_vision_language_model_are_evaluated(side: str) -> None:
    model = mmod.route_(make_joint("llava"), language=LINEAR)
    batches = [prompt("llava", (1, 2), seed=seed, side=side) for seed in range(3)]
    for batch in batches:
        batch["labels"] = batch["input_ids"].where(batch["attention_mask"].bool() & (batch["input_ids"] < IMAGE), -100)
    audit = mmod.audit(model, batches, mmod.AuditConfig(draws=2, resamples=100), evaluate=evaluate_answers)
    losses = []
    for batch in batches:
        for row, images in enumerate((slice(0, 1), slice(1, 3))):
            sample = {name: value[images if name == "pixel_values" else [row]] for name, value in batch.items()}
            with torch.no_grad():
                losses.append(float(model(**sample).loss))
    assert audit.conditions[0].loss.value == pytest.approx(sum(losses) / 6, rel=1e-4)
    assert audit.images == 6
    # Text is always kept, and of the image tokens four of nine or nine of eighteen.
    assert all(0.4 < share.value < 0.5 for share in audit.across.kept.values())


def test_answers_of_patches_are_averaged_over_each_image() -> None:
    model, images = make_model(SMALL, global_pool=""), make_images(SMALL, 5)
    targets = torch.randint(7, (5, 16))
    logits = model(images)[:, 1:]
    loss_B, accuracy_B = evaluate_classes(model, (images, targets))
    for image in range(5):
        expected = nn.functional.cross_entropy(logits[image], targets[image])
        assert float(loss_B[image]) == pytest.approx(float(expected), rel=1e-5)
        assert float(accuracy_B[image]) == float((logits[image].argmax(1) == targets[image]).float().mean())


def with_labels(**labels: Any) -> dict[str, Any]:
    return {"batches": [LabelledBatch(batches_of(8, seed=0)[0], **labels)]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"conditions": ["stride"]}, "conditions must name 'random'"),
    ({"conditions": ["random", "middle"]}, "unknown condition middle; valid ones are random, stride"),
    ({"conditions": ["random", "dense attention"]}, "'dense attention' needs a dense model"),
    ({"conditions": ["random", "reference entropy"]}, "'reference entropy' needs a dense model"),
    (
        {"reference": nn.Sequential(nn.Flatten(), nn.Linear(256, 4)), "conditions": ["random", "dense attention"]},
        "the dense model has no dense attention of the 17 tokens in blocks.0",
    ),
    ({"custom": {"stride": content}}, "custom uses the reserved names stride"),
    ({"draws": 0}, "draws must be"),
    ({"margin": -1.0}, "margin must be"),
    ({"margin": float("nan")}, "margin must be"),
    ({"grid": (4, 5)}, r"grid=\(4, 5\) must have as many positions as tokens may be skipped, 16"),
    ({"grid": (0, 16)}, "grid must be"),
    (
        {"evaluate": lambda model, batch: (model(batch[0])[:, 0] * torch.nan,) * 2},
        "loss of sample 0 in batch 0 of 'pos",
    ),
    ({"evaluate": lambda model, batch: (torch.zeros(8), torch.zeros(8))}, "no router of the model decided"),
    ({"evaluate": lambda model, batch: (model(batch[0])[:3, 0],) * 2}, "losses of 3, accuracies of 3 images"),
    ({"reference": "vit"}, "reference must be a Module or null, got 'vit'"),
    ({"baselines": [nn.Identity()]}, "baselines must be a mapping of names to a Module, got"),
    ({"shifts": ["noise"]}, "shifts must be a mapping of names to a function, got"),
    ({"custom": content}, "custom must be a mapping of names to a function, got"),
    ({"others": ["set"]}, "others must be a mapping of names, got"),
    ({"custom": {"mine": lambda context: 3}}, r"a rank per token, \(8, 17\), got 3"),
    ({"custom": {"mine": lambda context: context.x_BND}}, r"a rank per token, \(8, 17\), got \(8, 17, "),
    ({"leave_one_out": -1}, "leave_one_out must be"),
    ({"config": {"draws": 2}}, "config must be an AuditConfig or null, got "),
    ({"batches": iter([])}, "iterated twice"),
    ({"batches": []}, "two images or more, got 0 for the positions"),
    ({"positions_from": []}, "two images or more, got 0 for the positions"),
    ({"others": {"b": []}}, "two images or more, got 0 for the audit of b"),
    ({"batches": [None]}, "a batch must be two tensors, images and their classes, got NoneType"),
    ({"batches": None}, "batches must be a list or a loader"),
    ({"batches": [], "positions_from": 3}, "positions_from must be a list or a loader"),
    ({"batches": [], "others": {"b": None}}, r"others\['b'\] must be a list or a loader"),
    (with_labels(strata=["a"] * 8), "strata of a LabelledBatch must be a mapping of names"),
    (with_labels(token_kinds=["a"] * 8), "token_kinds of a LabelledBatch must be a mapping of names"),
    (with_labels(strata={"size": [1.0]}), "strata give 1 values of 'size' for 8 images"),
    *(
        (with_labels(strata={"size": sizes}), "strata of a LabelledBatch: size must be several values, each a")
        for sizes in (3, [1.0] * 7 + [math.nan], [1] * 7 + [None], [[1.0]] * 8, ["a"] * 7 + [1.0])
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_audited_is_refused(options: dict[str, Any], message: str) -> None:
    def run() -> None:
        given = {"batches": batches_of(8, seed=0), **options}
        for name, made in {"config": mmod.AuditConfig, "comparisons": Comparisons}.items():
            fields = given.keys() & {field.name for field in dataclasses.fields(made)}
            given.setdefault(name, made(**{field: given.pop(field) for field in fields}))
        mmod.audit(plant("random"), **given)

    with pytest.raises((TypeError, ValueError), match=message):
        run()


def test_models_and_labels_that_nothing_can_be_asked_of_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing in this VisionTransformer is routed"):
        mmod.audit(make_model(SMALL), [])
    with pytest.raises(ValueError, match="each sample needs an answer"):
        evaluate_answers(make_model(SMALL), {"labels": torch.full((2, 3), -100)})
    with pytest.raises(ValueError, match="pass `evaluate`"):
        mmod.audit(plant("random"), [(make_images(SMALL, 2)[:, :1, :16, :16], torch.rand(2, 4))])


@pytest.mark.parametrize(
    "sizes", [torch.arange(8), np.arange(8), np.arange(8.0, dtype=np.float32), [*np.arange(8)]], ids=str
)
def test_strata_of_arrays_are_those_of_their_numbers(sizes: Any, tmp_path: Path) -> None:
    (batch,), config = batches_of(8, seed=0), mmod.AuditConfig(["random"], draws=1, resamples=100)
    expected = mmod.audit(plant("random"), [LabelledBatch(batch, {"size": [*range(8)]})], config)
    audit = mmod.audit(plant("random"), [LabelledBatch(batch, {"size": sizes})], config, store=tmp_path / "store")
    assert audit.strata
    assert audit.strata == expected.strata


@pytest.mark.parametrize("wrong", [-1, 4])
def test_classes_that_the_model_lacks_are_refused(wrong: int) -> None:
    images, targets = batches_of(8, seed=0)[0]
    targets[5] = wrong
    with pytest.raises(ValueError, match=rf"classes must be in \[0, 4\), as the model has 4, got {wrong}"):
        mmod.audit(plant("random"), [(images, targets)])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["batches", "positions_from", "others"])
def test_images_that_are_not_finite_are_refused(where: str, value: float) -> None:
    """Also where no token of theirs is read: an image in which one patch is NaN, which ranks last."""
    sets: dict[str, Any] = {name: batches_of(12, seed, 5) for seed, name in enumerate(("batches", "positions_from"))}
    sets["others"] = {"elsewhere": batches_of(12, 2, 5)}
    step = "elsewhere" if where == "others" else "positions"
    (sets["others"]["elsewhere"] if where == "others" else sets[where])[1][0][3, 0, 0, 0] = value
    if where == "batches":
        del sets["positions_from"]
    batches = sets.pop("batches")
    config = mmod.AuditConfig(conditions=["random"], draws=1, resamples=100)
    with pytest.raises(ValueError, match=rf"inputs of sample 3 in batch 1 of '.*{step}' must be finite, got (nan|inf)"):
        mmod.audit(plant("norm"), batches, config, Comparisons(**sets))
