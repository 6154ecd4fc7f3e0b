"""What the loop does to weights, and how it fails."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.data import resolve_model_data_config
from torch import Tensor

import mmod
from mmod.data.loader import evaluation_fields
from mmod.training import DistillConfig, EmaConfig, Step, evaluate
from mmod.training.engine.kind import seed_draws
from mmod.training.engine.start import create_models, sketch
from mmod.training.image.kind import ImageKind
from tests.kit.engine_worker import TensorStream, run, tiny_config, weights

ROUTED = {"router": "linear", "capacity": 0.5, "losses": {"membership": 0.1}}


def assert_close(one: Path, other: Path) -> None:
    left, right = weights(one / "model"), weights(other / "model")
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-5, msg=name)


def test_accumulated_batches_equal_the_large_batch(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "optim": {"opt": "sgd", "lr": 0.1}, "grad_clip": 0.5}
    large = run(tiny_config(output=tmp_path / "large", batch_size=24, **options))
    small = run(tiny_config(output=tmp_path / "small", batch_size=6, accumulate=4, **options))
    assert large.steps == small.steps == 2
    assert_close(tmp_path / "large", tmp_path / "small")


def test_an_epoch_may_end_before_its_data(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "accumulate": 2, "epoch_steps": 2}
    result = run(tiny_config(output=tmp_path / "run", **options))
    assert [row["step"] for row in result.history] == [2, 4]
    uninterrupted = run(tiny_config(output=tmp_path / "whole", **{**options, "epoch_steps": 99}))
    assert [row["step"] for row in uninterrupted.history] == [3, 6]


def test_a_function_is_called_after_each_step(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=2, accumulate=2, epoch_steps=2, ema=EmaConfig(0.5))
    steps: list[Step] = []
    run(config, after_step=steps.append)
    assert [(step.done, step.total) for step in steps] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    last = steps[-1]
    assert {step.model for step in steps} == {last.model}
    assert last.average is not None
    # The final model of a run is the average, and `last` the model itself.
    for model, folder in ((last.average, "model"), (last.model, "last")):
        saved = weights(tmp_path / "run" / folder)
        assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_bf16_learns_alike_in_a_whole_model_and_in_shards(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 3, "precision": "bf16", "routing": ROUTED, "optim": {"lr": 3e-3}}
    one = run(tiny_config(output=tmp_path / "one", **options))
    shards = run(tiny_config(output=tmp_path / "shards", distributed={"kind": "fsdp"}, **options))
    assert one.history[-1]["train_loss"] < 0.9 * one.history[0]["train_loss"]
    assert shards.history[-1]["train_loss"] == pytest.approx(one.history[-1]["train_loss"], abs=0.01)
    for name in ("one", "shards"):
        assert all(value.dtype == torch.float32 for value in weights(tmp_path / name / "model").values())


def test_fp16_without_a_gpu_says_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'fp16' needs a CUDA device, got cpu; use 'bf16' or 'fp32'"):
        run(tiny_config(output=tmp_path / "run", precision="fp16"))
    assert not (tmp_path / "run").exists()


def test_routed_checkpoint_is_distilled_from_the_dense_model_unless_told_otherwise(tmp_path: Path) -> None:
    run(tiny_config(output=tmp_path / "dense", epochs=1))
    options: dict[str, Any] = {"epochs": 1, "model": {"checkpoint": str(tmp_path / "dense")}}
    options |= {"routing": {"capacity": 0.5}}
    auto = run(tiny_config(output=tmp_path / "auto", **options))
    none = run(tiny_config(output=tmp_path / "none", distill=DistillConfig("none"), **options))
    assert auto.history[-1]["train_distillation"] > 0
    assert "train_distillation" not in none.history[-1]


def test_evaluation_counts_what_a_loop_counts(tmp_path: Path) -> None:
    seed_draws(0, 0, 0)
    model, _ = create_models(ImageKind(tiny_config(output=tmp_path, routing={"capacity": 0.5})))
    stream = TensorStream(8, seed=None)
    result = evaluate(model, stream)
    assert model.training
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(images) for images, _ in stream.batches(0)])
    right = (logits.argmax(1) == stream.targets).double().mean().item()
    assert result.top1 == pytest.approx(100 * right)
    assert result.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, stream.targets).item(), rel=1e-5)
    assert result.top5 is None, "two classes"
    assert result.kept == pytest.approx({"blocks.1": 8 / 17, "blocks.3": 8 / 17})


def test_draws_depend_on_seed_step_and_process_only() -> None:
    def draw(*place: int) -> tuple[float, float]:
        seed_draws(*place)
        return torch.rand(()).item(), random.random()

    assert draw(0, 1, 0) == draw(0, 1, 0)
    assert len({draw(0, 1, 0), draw(1, 1, 0), draw(0, 2, 0), draw(0, 1, 1)}) == 4


def seven_classes() -> dict[str, Tensor]:
    model, _ = create_models(ImageKind(tiny_config(output="unused", args={"num_classes": 7})))
    return model.state_dict()


class TestStartingWeights:
    @pytest.mark.parametrize(
        ("write", "changes", "message"),
        [
            (None, {"name": "deit_smal_patch16_224"}, "knows no model 'deit_smal_patch16_224'.*deit_small_patch16_224"),
            (seven_classes, {}, r"has 7 classes, the model 4: head\..*; set model\.args\.num_classes to 7$"),
            (
                lambda: {"model": {"conv.weight": torch.zeros(1)}},
                {},
                r"missing: \d+ keys .*; not in the model: 1 key .conv",
            ),
            (lambda: {"model": TensorStream(8, seed=0)}, {}, "it holds .*TensorStream besides; save the state dict"),
        ],
    )
    def test_what_is_no_start_is_refused(
        self, tmp_path: Path, write: Any, changes: dict[str, Any], message: str
    ) -> None:
        if write is not None:
            torch.save(write(), tmp_path / "start.pth")
            changes = {"checkpoint": str(tmp_path / "start.pth")}
        with pytest.raises(ValueError, match=message):
            create_models(ImageKind(tiny_config(output=tmp_path, model=changes)))

    def test_weights_of_another_size_are_resampled_on_demand(self, tmp_path: Path) -> None:
        config = tiny_config(output=tmp_path)
        torch.save(create_models(ImageKind(config))[0].state_dict(), tmp_path / "start.pth")
        # The size of the name, which nobody wrote.
        args = {name: value for name, value in config.model.args.items() if name != "img_size"}
        model = replace(config.model, args=args, checkpoint=str(tmp_path / "start.pth"))
        told = r"16 px, and the model of 224 px: set model\.args\.img_size and data\.image_size to 16, or to 224 to"
        # Images of the model's size, of the checkpoint's, and of none; a sketch knows the checkpoint by its path.
        for side, make in ((224, create_models), (16, create_models), (100, create_models), (100, sketch)):
            config = replace(config, model=model, data=replace(config.data, image_size=side))
            with pytest.raises(ValueError, match=told):
                make(ImageKind(config))
        config = replace(config, data=replace(config.data, image_size=224))
        asked = replace(model, args={**args, "img_size": 224})
        assert create_models(ImageKind(replace(config, model=asked)))[0].patch_embed.img_size == (224, 224)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("channels", 3, r"data\.channels is 3 and the model takes 1"),
            ("image_size", 12, r"set model\.args\.img_size to 12"),
        ],
    )
    def test_images_that_do_not_fit(self, tmp_path: Path, field: str, value: int, message: str) -> None:
        config = tiny_config(output=tmp_path)
        data = replace(config.data, **{field: value})
        with pytest.raises(ValueError, match=message):
            create_models(ImageKind(replace(config, data=data)))
        # A sketch that is only counted is refused alike.
        with pytest.raises(ValueError, match=message):
            ImageKind(replace(config, data=data)).prepare(weights=False)


@pytest.mark.parametrize("routing", [None, {"router": "linear", "gate": "tanh"}], ids=["dense", "routed"])
def test_the_saved_model_says_how_its_images_were_prepared(tmp_path: Path, routing: dict[str, Any] | None) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1, routing=routing)
    data = replace(config.data, mean=(0.2,), std=(0.3,), crop_pct=0.75, interpolation="bilinear")
    run(replace(config, data=data))
    folder = tmp_path / "run/model"
    model = timm.create_model(f"local-dir:{folder}") if routing is None else mmod.load_pretrained(folder)
    prepared = resolve_model_data_config(model)
    expected = evaluation_fields(data)
    for name in ("input_size", "crop_pct", "interpolation"):
        assert prepared[name] == expected[name]
    for name in ("mean", "std"):
        assert list(prepared[name]) == pytest.approx(list(expected[name]))
