"""Labels for every patch: what a model answers, what it is trained on, and how it is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.metrics import accuracy_score, jaccard_score
from torch import Tensor, nn

import mmod
from mmod.analysis.evaluations import evaluate_classes
from mmod.data.config import DataConfig
from mmod.data.loader import image_stream
from mmod.opening.opened import Opened
from mmod.studies.features import classify_patches
from mmod.training import (
    ClassificationTask,
    DistillConfig,
    EmaConfig,
    LossConfig,
    ModelConfig,
    TrainConfig,
    evaluate,
    fit,
)
from mmod.training.engine.start import create_models
from mmod.training.image.evaluate import CONFUSION, image_outcomes
from mmod.training.image.features import Features
from mmod.training.image.kind import ImageKind
from mmod.training.image.preflight import check_input
from mmod.training.image.task import answers, create_criterion
from mmod.values import IGNORED
from tests.kit.zoo import make_model

ARGS = {"img_size": 32, "patch_size": 8, "in_chans": 1, "embed_dim": 16, "depth": 4, "num_heads": 2}
ARGS |= {"num_classes": 11, "class_token": False, "global_pool": ""}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return DataConfig("crowds:tiny", root=str(tmp_path_factory.mktemp("crowds") / "set"), label_patch=8)


def config_of(output: Path, data: DataConfig, **changes: Any) -> TrainConfig:
    model = ModelConfig("vit_tiny_patch16_224", {**ARGS, **changes.pop("args", {})}, **changes.pop("start", {}))
    return TrainConfig(output=str(output), model=model, data=data, **{"epochs": 1, "device": "cpu", **changes})


@pytest.fixture(scope="module")
def dense(data: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of a dense model."""
    folder = tmp_path_factory.mktemp("dense") / "run"
    fit(config_of(folder, data), progress=False)
    return folder


@pytest.mark.parametrize("patches", [9, 40_000])
def test_the_confusion_of_an_image_counts_all_of_its_patches(patches: int) -> None:
    target_BN = torch.zeros(2, patches, dtype=torch.int16)
    confusion = image_outcomes({"target": target_BN, "guess": target_BN})[CONFUSION]
    assert confusion.tolist() == [[[patches]]] * 2


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "vit_little_patch16_reg4_gap_256",
        "vit_small_patch14_reg4_dinov2",
        "eva02_tiny_patch14_224",
    ],
)
def test_patches_answer_and_prefix_tokens_do_not(name: str) -> None:
    model = make_model(name, global_pool="")
    size = model.patch_embed.img_size  # type: ignore[union-attr]
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        every = model.forward_head(model.forward_features(images))  # type: ignore[operator]
        patches: int = model.patch_embed.num_patches  # type: ignore[union-attr,assignment]
        targets = torch.zeros(2, patches, dtype=torch.int64)
        assert torch.equal(answers(model, images, targets), every[:, -patches:].flatten(0, 1))
        mmod.route_(model, mmod.RoutingConfig(router="attention", capacity=0.3, blocks="late"))
        assert answers(model, images, targets).shape == (2 * patches, 7)


class Table(nn.Module):
    """Answers images that are numbers of rows by those rows of a table."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.num_classes = table.shape[-1]

    def forward(self, images: Tensor) -> Tensor:
        return self.table[images.flatten().long()]


class Labels:
    """A stream of numbered images, with labels of patches."""

    def __init__(self, targets: Tensor, batch_size: int) -> None:
        self.targets, self.batch_size = targets, batch_size
        self.steps_per_epoch = -(-len(targets) // batch_size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for numbers in torch.arange(len(self.targets)).split(self.batch_size):
            yield numbers.float().reshape(-1, 1, 1, 1), self.targets[numbers]


@pytest.mark.parametrize(("side", "asked"), [(2, 4), (3, 5), (6, 3), (1, 3)])
def test_another_grid_is_interpolated(side: int, asked: int) -> None:
    # Two images with the same answer everywhere, and one whose answers rise from row to row.
    rows = torch.arange(side, dtype=torch.float32).repeat_interleave(side)
    table = torch.stack([torch.zeros(side**2), torch.full((side**2,), 3.0), rows])[..., None].expand(-1, -1, 2)
    logits = answers(Table(table), torch.arange(3).float().reshape(-1, 1, 1, 1), torch.zeros(3, asked**2).long())
    flat, same, rising = logits.reshape(3, asked, asked, 2).detach()
    assert torch.equal(flat, torch.zeros_like(flat))
    assert torch.equal(same, torch.full_like(same, 3.0))
    assert torch.equal(rising, rising[:, :1].expand_as(rising))
    assert side == 1 or (rising.diff(dim=0) >= 0).all()
    with pytest.raises(ValueError, match=f"{side**2} outputs for {asked**2 + 1} patches: grids that differ must both"):
        answers(Table(table), torch.zeros(1, 1, 1, 1), torch.zeros(1, asked**2 + 1).long())


@torch.no_grad()
def test_patches_that_are_not_square_keep_their_grid() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **{**ARGS, "patch_size": (4, 16), "dynamic_img_size": True})
    images = torch.randn(2, 1, 32, 32)
    # As many patches as 4 x 4 squares.
    logits_BCHW = model(images).transpose(1, 2).unflatten(2, (8, 2))
    expected = F.interpolate(logits_BCHW, size=(8, 8), mode="bilinear").flatten(2).transpose(1, 2).flatten(0, 1)
    assert torch.equal(answers(model.eval(), images, torch.zeros(2, 64).long()), expected)
    model.patch_embed.dynamic_feat_size = lambda size: (3, 2)
    with pytest.raises(ValueError, match="16 outputs are no grid of 3 x 2 patches"):
        answers(model, images, torch.zeros(2, 64).long())


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), images=st.integers(1, 4), patches=st.integers(1, 6))
def test_a_patch_counts_as_an_image_does(seed: int, images: int, patches: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, other = torch.randn(2, images, patches, 5, generator=generator)
    targets = torch.randint(0, 5, (images, patches), generator=generator)

    def parts(shape: tuple[int, ...]) -> dict[str, Tensor]:
        rows = targets.reshape(shape)
        models = [Table(logits.reshape(*shape, 5)) for logits in (student, other)]
        task = ClassificationTask(models[0], nn.CrossEntropyLoss(), teacher=models[1])
        return task(torch.arange(len(rows)).float().reshape(-1, 1, 1, 1), rows)

    one, patchwise = parts((images, patches)), parts((images * patches,))
    assert one.keys() == patchwise.keys() == {"loss", "task", "distillation", "top1"}
    for name, value in one.items():
        assert torch.equal(value, patchwise[name])


@pytest.mark.parametrize(
    "changes",
    [
        {"routing": {"preset": "a-mod", "blocks": "late", "capacity": 0.25}},
        {"routing": {"router": "linear", "select": "threshold", "losses": {"membership": 0.1}}},
        {"methods": [{"kind": "merge", "r": 3}]},
    ],
    ids=str,
)
def test_a_cheaper_run_from_a_dense_one(changes: dict[str, Any], data: DataConfig, dense: Path, tmp_path: Path) -> None:
    start = {"checkpoint": str(dense)}
    distill = DistillConfig(features=0.5)
    config = config_of(tmp_path / "tuned", data, start=start, ema=EmaConfig(0.5), distill=distill, **changes)
    done = fit(config, progress=False)
    assert {"train_distillation", "train_features"} <= done.history[0].keys()
    assert done.average is not None
    for evaluation in (done.evaluation, done.average):
        assert evaluation.accuracies().keys() >= {"objects", "mean_iou"}
        assert evaluation.mean_kept < 1
    assert fit(config, progress=False).best == done.best
    # The run's moving average in a model of its own is evaluated alike.
    resumed = replace(config, model=replace(config.model, checkpoint=str(tmp_path / "tuned")))
    assert evaluate(create_models(ImageKind(resumed))[0], image_stream(data)) == done.best


def test_a_router_that_keeps_all_changes_no_answer(data: DataConfig, tmp_path: Path) -> None:
    dense, _ = create_models(ImageKind(config_of(tmp_path, data)))
    routed, _ = create_models(
        ImageKind(config_of(tmp_path, data, routing={"router": "norm", "gate": "identity", "capacity": 1}))
    )
    routed.load_state_dict(dense.state_dict())
    stream = image_stream(data)
    assert replace(evaluate(routed, stream), kept={}) == evaluate(dense, stream)


@pytest.mark.parametrize(
    ("args", "changes", "message"),
    [
        ({"global_pool": "avg"}, {}, r"label_patch is 8 and the model's global_pool 'avg'"),
        ({}, {"label_patch": None, "source": "digits"}, r"label_patch is None and the model's global_pool ''"),
    ],
)
def test_models_that_answer_something_else(
    args: dict[str, Any], changes: dict[str, Any], message: str, data: DataConfig, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        create_models(ImageKind(config_of(tmp_path, replace(data, **changes), args=args)))


@pytest.mark.parametrize(
    "change", [lambda logits: logits.masked_fill(logits == logits.max(), torch.nan), lambda logits: logits / 0]
)
def test_outputs_that_no_figure_can_be_made_of_are_refused(change: Any) -> None:
    logits = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    model = Table(logits)
    model.forward = lambda images: change(logits[images.flatten().long()])  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="loss of an evaluation must be"):
        evaluate(model, Labels(torch.ones(4, 3, dtype=torch.int64), 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("label", [-1, -99, 5, 900])
def test_labels_that_no_class_has_are_refused(label: int) -> None:
    model, targets = Table(torch.randn(4, 3, 5)), torch.ones(4, 3, dtype=torch.int64)
    # As with a model that does not say how many classes it knows.
    del model.num_classes
    targets[3, 2] = label
    advice = "number classes from 0" if label < 0 else f"train it with model.args.num_classes={label + 1} or more"
    with pytest.raises(ValueError, match=rf"labels run from .*{label}.* the model has 5 classes.*: {advice}; patch"):
        evaluate(model, Labels(targets, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_strict", [True, False])
def test_images_that_patches_do_not_divide_are_refused(is_strict: bool) -> None:
    model = make_model("vit_tiny_patch16_224", img_size=32)
    model.patch_embed.strict_img_size = is_strict  # type: ignore[union-attr]
    # Not by a size of the model's, which would be refused next.
    message = "image_size is 30, which the model's patches of 16 pixels do not divide: take a multiple, such as 32$"
    with pytest.raises(ValueError, match=message):
        check_input(
            Opened(model, "of a test"),
            DataConfig(source="folder", root="r", image_size=30, channels=3),
            pretrained=False,
        )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), images=st.integers(1, 5), batch=st.integers(1, 3), share=st.floats(0.0, 0.9))
def test_figures_are_those_of_all_patches_with_a_class_at_once(
    seed: int, images: int, batch: int, share: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(images, 6, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 4, (images, 6), generator=generator)
    targets[:, 0] = 1
    targets[:, 1:][torch.rand(images, 5, generator=generator) < share] = IGNORED
    has_class = targets != IGNORED
    background = evaluate(Table(logits), Labels(targets.clamp(max=0), batch))  # type: ignore[arg-type]
    assert background.objects is None
    evaluation = evaluate(Table(logits), Labels(targets, batch))  # type: ignore[arg-type]
    assert evaluation.samples == images
    assert {"objects", "mean_iou"} <= evaluation.columns().keys()
    true, guess = targets[has_class].numpy(), logits.argmax(-1)[has_class].numpy()
    assert evaluation.top1 == pytest.approx(100 * accuracy_score(true, guess))
    assert evaluation.objects == pytest.approx(100 * accuracy_score(true[true > 0], guess[true > 0]))
    labels = np.union1d(true, guess)
    assert evaluation.mean_iou == pytest.approx(100 * jaccard_score(true, guess, labels=labels, average="macro"))
    expected = F.cross_entropy(logits[has_class], targets[has_class])
    assert evaluation.loss == pytest.approx(expected.item(), rel=1e-5)
    # The logits of such patches change no loss and no figure of any criterion, nor an audit's evaluation.
    numbers = torch.arange(images).float().reshape(-1, 1, 1, 1)
    changed = torch.where(has_class[..., None], logits, logits + 5)
    for loss in (LossConfig(), LossConfig(smoothing=0.1), LossConfig("bce")):
        one, other = (
            ClassificationTask(Table(table.float()), create_criterion(loss, mixed=False))(numbers, targets)
            for table in (logits, changed)
        )
        assert torch.equal(one["task"], other["task"])
        assert torch.equal(one["top1"], other["top1"])
    with torch.no_grad():
        evaluated, again = (evaluate_classes(Table(table), (numbers, targets)) for table in (logits, changed))
    assert all(torch.equal(*pair) for pair in zip(evaluated, again))
    for place in range(images):
        row, known = logits[place][has_class[place]].float(), targets[place][has_class[place]]
        assert evaluated[0][place] == pytest.approx(F.cross_entropy(row, known).item(), rel=1e-5)
        assert evaluated[1][place] == pytest.approx((row.argmax(-1) == known).float().mean().item())


def test_a_run_on_maps_with_255_trains_and_names_the_classes_that_are_there(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for folder in ("images", "labels"):
            (tmp_path / folder / split).mkdir(parents=True)
        for number in range(4):
            labels = np.arange(16, dtype=np.uint8).reshape(4, 4).repeat(8, 0).repeat(8, 1) % 3
            labels[:12] = 255
            Image.fromarray(labels).save(tmp_path / "labels" / split / f"{number}.png")
            Image.fromarray(labels * 60).save(tmp_path / "images" / split / f"{number}.png")
    data = DataConfig("maps:32", root=str(tmp_path), label_patch=8, batch_size=2)
    result = fit(config_of(tmp_path / "run", data, args={"num_classes": 3}), progress=False)
    assert result.evaluation.samples == 4
    with pytest.raises(ValueError, match="labels run from 0 to 2 and the model has 2 classes"):
        fit(config_of(tmp_path / "few", data, args={"num_classes": 2}), progress=False)


def test_a_linear_classifier_of_patches_sees_no_patch_without_a_class() -> None:
    draw = np.random.default_rng(0)
    labels = np.where(draw.random((8, 9)) < 0.3, IGNORED, draw.integers(0, 3, (8, 9)))
    labels[:, :3] = [0, 1, 2]
    x = np.eye(3)[labels.clip(0)] + 0.01 * draw.standard_normal((8, 9, 3))

    def features(values: np.ndarray) -> Features:
        kept = torch.ones(len(labels), 1)
        return Features(torch.from_numpy(values).float().flatten(0, 1), torch.from_numpy(labels).flatten(), kept)

    study = SimpleNamespace(strengths=[1.0])
    moved = np.where((labels == IGNORED)[..., None], 1e3, x)
    confusion, other = (
        classify_patches([features(v), features(v)], study)["confusion"]  # type: ignore[arg-type]
        for v in (x, moved)
    )
    assert (confusion == other).all()
    assert confusion.shape == (8, 3, 3)
    assert confusion.sum((1, 2)).tolist() == (labels != IGNORED).sum(1).tolist()
