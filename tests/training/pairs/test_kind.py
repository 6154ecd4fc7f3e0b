"""What training on pairs does to weights: accumulation, processes, interruption, teachers and starting weights."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor

import mmod
from mmod.data.corrupt import CorruptDataError
from mmod.training.engine.kind import load
from mmod.training.engine.start import create_models, sketch
from mmod.training.pairs.config import TrainConfig
from mmod.training.pairs.kind import PairsKind, create_transforms
from tests.kit.engine_worker import weights
from tests.kit.pair_files import png, write_tar
from tests.kit.pairs_worker import clip_config, run, write_model

ROOT = Path(__file__).parents[3]
ROUTED = {"image": {"router": "linear", "capacity": 0.5, "losses": {"membership": 0.1}}, "text": {"capacity": 0.5}}
WORDS = ("red", "green", "blue", "black", "white", "yellow", "pink", "grey")


def members(key: int) -> dict[str, bytes]:
    caption = f"{WORDS[key % 8]} {WORDS[key // 8 % 8]} thing"
    return {f"{key:06d}.png": png(key, side=16), f"{key:06d}.txt": caption.encode(), f"{key:06d}.json": b"{}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, first in (("train-0", 0), ("train-1", 24), ("val-0", 8)):
        write_tar(tmp_path / f"{name}.tar", {k: v for key in range(first, first + 24) for k, v in members(key).items()})
    return tmp_path


def assert_close(one: Path, other: Path) -> None:
    left, right = weights(one / "model"), weights(other / "model")
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-5, msg=name)


def siglip(folder: Path) -> dict[str, Any]:
    return {"model": write_model(folder, "test-sigmoid", init_logit_bias=-3.0), "loss": "siglip"}


@pytest.mark.parametrize("kind", ["clip", "siglip", "routed", "distilled"])
def test_accumulated_batches_are_one_batch_with_all_its_negatives(folder: Path, kind: str) -> None:
    changes: dict[str, Any] = {"siglip": siglip(folder), "routed": {"routing": ROUTED}}.get(kind, {})
    if kind == "distilled":
        run(clip_config(folder, "dense", seed=5))
        changes = {"model": {"checkpoint": str(folder / "dense")}, "distill": {"teacher": "dense"}, "seed": 1}
    large = run(clip_config(folder, "large", data={"batch_size": 24}, **changes))
    small = run(clip_config(folder, "small", data={"batch_size": 6}, accumulate=4, **changes))
    assert large.steps == small.steps == 2
    assert_close(folder / "large", folder / "small")
    assert small.history[0]["train_contrastive"] == pytest.approx(large.history[0]["train_contrastive"], rel=1e-4)


def test_towers_routed_in_training_alone_are_left_dense(folder: Path) -> None:
    routing = {tower: {"router": "random", "training_only": True} for tower in ("image", "text")}
    result = run(clip_config(folder, "routed", routing=routing, grad_checkpointing=True))
    run(clip_config(folder, "dense"))
    assert result.evaluation.kept == {}
    routed, dense = (weights(folder / name / "model") for name in ("routed", "dense"))
    assert routed.keys() == dense.keys()
    assert any(not torch.equal(value, dense[name]) for name, value in routed.items())
    model = open_clip.create_model(f"local-dir:{folder / 'routed' / 'model'}")
    assert mmod.methods.methods_of(model) == ()


def test_bf16_with_augmentation_learns_the_training_pairs(folder: Path) -> None:
    optim = {"opt": "adamw", "lr": 3e-3}
    result = run(clip_config(folder, "run", epochs=8, precision="bf16", augment={"scale": [0.9, 1.0]}, optim=optim))
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"] - 0.3
    assert all(value.dtype == torch.float32 for value in weights(folder / "run/model").values())


class TestStartingWeights:
    def state(self, config: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
        model, teacher = create_models(PairsKind(TrainConfig.from_dict(config)))
        return model.state_dict(), teacher

    def test_open_clips_own_files_start_a_run(self, folder: Path) -> None:
        fields = clip_config(folder, "x")
        dense = open_clip.create_model("ViT-B-32", **_model_cfg(folder))
        state = dense.state_dict()
        torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, folder / "epoch_1.pt")
        state_dict, _ = self.state(fields | {"model": fields["model"] | {"checkpoint": str(folder / "epoch_1.pt")}})
        assert all(torch.equal(value, state_dict[name]) for name, value in state.items())

    def test_dense_and_routed_runs_start_others(self, folder: Path) -> None:
        run(clip_config(folder, "dense"))
        start = {"model": {"checkpoint": str(folder / "dense")}}
        state_dict, teacher = self.state(clip_config(folder, "x", routing=ROUTED, **start))
        assert not mmod.is_routed(teacher)
        for name, value in weights(folder / "dense/model").items():
            assert torch.equal(value, state_dict[name])
            assert torch.equal(value, teacher.state_dict()[name])
        result = run(clip_config(folder, "routed", routing=ROUTED, **start))
        assert result.history[0]["train_distillation"] > 0
        state_dict, _ = self.state(
            clip_config(folder, "x", routing=ROUTED, model={"checkpoint": str(folder / "routed")})
        )
        for name, value in weights(folder / "routed/model").items():
            assert torch.equal(value, state_dict[name])
        other = {"image": {"router": "linear", "capacity": 0.5, "blocks": [0]}}
        with pytest.raises(ValueError, match="was routed in another way"):
            self.state(clip_config(folder, "x", routing=other, model={"checkpoint": str(folder / "routed")}))

    def test_exports_are_read_by_open_clip_and_by_mmod(self, folder: Path) -> None:
        run(clip_config(folder, "dense"))
        model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}/dense/model")
        for name, value in weights(folder / "dense/model").items():
            assert torch.equal(value, model.state_dict()[name])
        # A folder brings its weights, which a further run, an evaluation and a study start from.
        again = PairsKind(
            TrainConfig.from_dict(clip_config(folder, "x") | {"model": {"name": f"local-dir:{folder}/dense/model"}})
        )
        assert again.config.model.has_weights
        loaded, drawn = load(again).state_dict(), again.prepare(weights=False).state_dict()
        for name, value in weights(folder / "dense/model").items():
            assert torch.equal(value, loaded[name])
        assert not torch.equal(drawn["visual.conv1.weight"], loaded["visual.conv1.weight"])
        assert next(sketch(again).parameters()).is_meta
        run(clip_config(folder, "routed", routing=ROUTED))
        routed = mmod.load_pretrained(folder / "routed/model")
        assert mmod.is_routed(routed)

    def test_checkpoints_that_do_not_fit(self, folder: Path) -> None:
        run(clip_config(folder, "dense"))
        wide = write_model(folder, "test-wide", embed_dim=24)
        with pytest.raises(ValueError, match="does not fit the model"):
            self.state(clip_config(folder, "x", model={**wide, "checkpoint": str(folder / "dense")}))
        with pytest.raises(FileNotFoundError, match="no checkpoint at"):
            self.state(clip_config(folder, "x", model={"checkpoint": str(folder / "nowhere")}))


def _model_cfg(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "test-clip.json").read_text()))


def test_corrupt_pairs_stop_a_run_or_are_reported_by_it(folder: Path) -> None:
    broken = members(3) | {"000003.png": b"no image"}
    good = {k: v for key in (0, 1, 2, 4, 5, 6, 7, 8) for k, v in members(key).items()}
    bad = write_tar(folder / "train-2.tar", good | broken)
    with pytest.raises(CorruptDataError, match="it is damaged or of none of the formats"):
        run(clip_config(folder, "stops", epochs=2))
    result = run(clip_config(folder, "goes on", epochs=2, data={"on_corrupt": "skip"}))
    assert result.skipped == {"train": {str(bad): 1}, "val": {}}
    assert result.steps == 14


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "siglip"}, "needs a model with a logit bias"),
        ({"loss": "coca"}, "'coca' is for CoCa models alone"),
        ({"augment": {"scales": 1}}, "unknown field of augment scales; near ones: scale; valid ones are scale, ratio"),
        ({"data": {"train": "none-*.tar"}}, "no shard matches 'none-"),
        ({"data": {"batch_size": 49}}, "fewer than one batch"),
        ({"model": {"name": "ViT-B-33", "config": None}}, "open_clip knows no model 'ViT-B-33'; near ones: ViT-B-32"),
    ],
)
def test_wrong_configs_fail_before_the_first_step(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(clip_config(folder, "run", **changes))


CONFIGS = sorted((ROOT / "configs/clip").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_builds_its_model_and_says_what_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = TrainConfig.load(path)
    assert config.output == f"runs/clip/{path.stem}"
    assert f"mmod train pairs {path.relative_to(ROOT)}" in path.read_text()
    start = config.model.__class__(config.model.name, config.model.config)
    with torch.device("meta"):
        model, _ = create_models(PairsKind(TrainConfig.from_dict({**config.to_dict(), "model": vars(start)})))
    assert mmod.is_routed(model) == (config.routing is not None)
    create_transforms(model, config.model.name, config.augment)


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What libraries log during a test."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger().addHandler(handler)
    yield text
    logging.getLogger().removeHandler(handler)


def test_random_weights_are_reported_only_where_none_follow(folder: Path, logged: io.StringIO) -> None:
    finished = run(clip_config(folder, "base"))
    assert "initialized randomly" in logged.getvalue()
    logged.seek(0)
    logged.truncate()
    for start in ("checkpoint", "image_checkpoint"):
        run(clip_config(folder, start, model={start: f"{finished.folder}/model"}))
    base = TrainConfig.from_dict(clip_config(folder, "base"))
    load(PairsKind(base.finished(finished.folder)))
    assert "initialized randomly" not in logged.getvalue()
    assert not logging.getLogger().filters
