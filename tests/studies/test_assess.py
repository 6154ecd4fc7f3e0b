"""Evaluating without training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmod import Prompt, flops, open_model, route_, save_pretrained
from mmod.analysis.table import DENSE
from mmod.data.loader import image_stream
from mmod.studies import commands
from mmod.studies.assess import assess, described
from mmod.training import evaluate, fit
from mmod.training.command import parse_run
from mmod.training.engine.kind import COUNTED, seed_draws
from mmod.training.engine.start import create_models
from mmod.training.image.kind import ImageKind, sample_images, timed_images
from mmod.training.kinds import all_configs, kind_of
from tests.kit.chat_configs import P_MOD, vlm_config
from tests.kit.image_study import MODEL, config

DATA = ("source", "root", "image_size", "channels", "batch_size")


def test_a_checkpoint_is_evaluated_as_it_is_routed_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(config(tmp_path), progress=False)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    start = {"name": "vit_tiny_patch16_224", "args": {**MODEL, "img_size": 32}, "checkpoint": str(tmp_path / "run")}
    dense = assess(config(tmp_path, model=start), progress=False)
    assert dense.figures(DENSE) == {0: result.evaluation.columns()}
    commands.evaluate([str(tmp_path / "run")])
    assert capsys.readouterr().out.startswith(str(result.evaluation))
    assert sorted(dense.times) == [("image", 1), ("image", 8), ("image", 32)]
    assert "image: " in described(dense)

    run_config = config(tmp_path, model=start, routing={"router": "random", "blocks": "late", "capacity": 0.25})
    routed = assess(run_config, progress=False)
    seed_draws(0, 0, 0)
    model = create_models(ImageKind(run_config))[0].eval()
    assert routed.runs[DENSE][0].text == str(evaluate(model, image_stream(run_config.data)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    costs = {"image": flops(model, (1, 32, 32)).routed, "image, dense": dense.costs[DENSE]["image"]}
    assert routed.costs[DENSE] == {**costs, "parameters": parameters}
    assert costs["image"] < costs["image, dense"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == files


def test_an_evaluation_of_prompts_counts_the_whole_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_config = vlm_config(tmp_path, trainer={"max_steps": 1}, routing={**P_MOD, "image": {"router": "linear"}})
    fit(run_config, progress=False)
    commands.evaluate([run_config.output])
    printed = capsys.readouterr().out
    model = open_model(run_config.output).model
    prompts, text, image = kind_of(run_config).prompts(COUNTED)
    one = {"pixel_values": prompts["pixel_values"][:1]}
    count = flops(model, Prompt(text, image, pixels=one))
    assert f"prompt: {count.routed / 1e9:.4g} GFLOPs, ms " in printed
    assert f"prompt, dense: {count.dense / 1e9:.4g} GFLOPs, ms " in printed
    assert f"prompt: {count.dense / count.routed:.3g} times fewer FLOPs than dense, times as fast: " in printed


def test_a_timed_batch_has_its_size_whatever_the_set_has(tmp_path: Path) -> None:
    run_config = config(tmp_path)
    few, images = sample_images(run_config, 100), timed_images(run_config, 100)
    assert len(few) == 64
    assert torch.equal(images, torch.cat([few, few[:36]]))


def test_a_config_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set model\.checkpoint"):
        assess(config(tmp_path), progress=False)


def test_the_folder_of_a_saved_model_stands_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_config = config(tmp_path)
    model = create_models(ImageKind(run_config))[0].eval()
    route_(model, "gradual")
    save_pretrained(model, tmp_path / "saved")
    words = [f"--data.{name}={value}" for name, value in vars(run_config.data).items() if name in DATA]
    commands.evaluate([str(tmp_path / "saved"), *words])
    assert capsys.readouterr().out.startswith(str(evaluate(model, image_stream(run_config.data))))
    with pytest.raises(SystemExit):
        commands.evaluate([str(tmp_path / "saved")])
    assert "keys that are required: data; name them in --config FILE or as options" in capsys.readouterr().err


def test_the_kind_of_a_run_folder_without_one_is_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(
        "output: here\nmodel: {config: {model_type: llama}}\ndata: {length: 8}\nworld_size: 1\n"
    )
    with pytest.raises(SystemExit):
        parse_run([str(tmp_path)], all_configs())
    assert "without a key `kind`, a config is read as image" in capsys.readouterr().err
    run = parse_run([str(tmp_path), "--kind", "text", "--seed", "3"], all_configs())
    assert (run.kind, run.output, run.seed, run.data.length) == ("text", str(tmp_path), 3, 8)
    assert run.model.checkpoint == str(tmp_path)
