"""Evaluating without training."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmod import Prompt, flops, open_model, route_, save_pretrained
from mmod.analysis.table import DENSE
from mmod.analysis.timing import DRAWS
from mmod.data.loader import image_stream, sample_images
from mmod.io.store import OptionalStore, Store
from mmod.studies import commands
from mmod.studies.assess import assess, described
from mmod.training import evaluate, fit
from mmod.training.command import parse_run
from mmod.training.engine.evaluate import BatchStore
from mmod.training.engine.kind import COUNTED, readings, seed_draws
from mmod.training.engine.start import create_models
from mmod.training.image import evaluate as image_evaluate
from mmod.training.image import kind as image_kind
from mmod.training.image.kind import ImageKind, timed_images
from mmod.training.kinds import all_configs, kind_of
from tests.kit.chat_configs import P_MOD, vlm_config
from tests.kit.disk import small_disk
from tests.kit.image_study import MODEL, config
from tests.kit.processes import run_processes

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


def _evaluate_until_killed(folder: Path, words: list[str], batches: int) -> None:
    """Evaluate a run in this process, and kill it once so many batches are stored."""
    put = Store.put
    stored = 0

    def dying(self: Store, *args: Any, **options: Any) -> None:
        nonlocal stored
        put(self, *args, **options)
        stored += 1
        if stored == batches:
            os.kill(os.getpid(), signal.SIGKILL)

    Store.put = dying  # type: ignore[method-assign]
    commands.evaluate([str(folder), *words])


def _count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of images of each batch that is evaluated from now on."""
    passes: list[int] = []
    evaluate_batch = image_evaluate.evaluate_batch

    def counted(model: nn.Module, batch: Any, precision: str) -> Any:
        passes.append(len(batch[0]))
        return evaluate_batch(model, batch, precision)

    monkeypatch.setattr(image_evaluate, "evaluate_batch", counted)
    return passes


def test_an_evaluation_that_was_killed_goes_on_behind_its_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    words = ["--data.batch_size=16"]
    result = fit(config(tmp_path), progress=False).evaluation
    assert run_processes(_evaluate_until_killed, run, words, 3) == [-signal.SIGKILL]
    assert run_processes(_evaluate_until_killed, run, ["--data.batch_size=32"], 1) == [-signal.SIGKILL]
    assert len(list(run.glob(".evaluate-*.jsonl"))) == 2
    passes = _count_passes(monkeypatch)
    # Another seed evaluates the same, and is another config.
    commands.evaluate([str(run), *words, "--seed", "1"])
    assert passes == [16, 16, 16, 16]
    passes.clear()
    commands.evaluate([str(run), *words])
    assert passes == [16]
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("top-1"))
    assert first == second == str(result)
    # That of the other interrupted evaluation stays, and nothing else.
    assert len(list(run.glob(".evaluate-*"))) == 1


def test_an_interrupted_evaluation_reads_no_batch_of_other_data_or_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_config = config(tmp_path)
    model = create_models(ImageKind(run_config))[0].eval()
    stream = image_stream(run_config.data)
    store = BatchStore(OptionalStore(tmp_path / "store.jsonl"), {"model": 0})
    passes = _count_passes(monkeypatch)
    expected = image_evaluate.evaluate_set(model, stream, store=store)[0]
    assert passes == [64]
    for other in (BatchStore(store.file, {"model": 1}), store.of("another pass")):
        image_evaluate.evaluate_set(model, stream, store=other)
    assert passes == [64, 64, 64]

    ((images, labels),) = stream.batches(0)
    for batch in ((images + 1, labels), (images, labels.flip(0))):
        monkeypatch.setattr(stream, "batches", lambda epoch, batch=batch: iter([batch]))
        assert image_evaluate.evaluate_set(model, stream, store=store)[0] != expected
    assert passes == [64] * 5
    monkeypatch.setattr(stream, "batches", lambda epoch: iter([(images, labels)]))
    assert image_evaluate.evaluate_set(model, stream, store=store)[0] == expected
    assert passes == [64] * 5


def test_an_evaluation_goes_on_where_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(config(tmp_path), progress=False).evaluation
    with small_disk(100):
        commands.evaluate([str(tmp_path / "run"), "--data.batch_size=16"])
    said, figures, *_ = capsys.readouterr().out.splitlines()
    assert said.startswith("If it is interrupted, the evaluation will start anew: ")
    assert figures == str(result)


def test_an_evaluation_leaves_no_folder_of_its_config_though_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(config(tmp_path), progress=False)
    start = {"name": "vit_tiny_patch16_224", "args": {**MODEL, "img_size": 32}, "checkpoint": str(tmp_path / "run")}
    started = config(tmp_path, model=start, output=str(tmp_path / "new" / "folder"))

    put = Store.put

    def interrupted(*args: Any) -> None:
        put(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            assess(started, progress=False)
    # The nearest folder that exists has the file.
    assert list(tmp_path.glob(".evaluate-*.jsonl"))
    before = {path.name for path in tmp_path.iterdir() if "evaluate" not in path.name}
    assess(started, progress=False)
    assert {path.name for path in tmp_path.iterdir()} == before
    assert "new" not in before


def _damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


def _block(file: Path) -> None:
    shutil.rmtree(file.parent)
    # A file in the folder's place.
    file.parent.write_text("")


def _make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _replace(file: Path) -> None:
    file.write_text("notes of the user\n")


@pytest.mark.parametrize("harm", [_damage, _block, _make_folder, _replace])
@pytest.mark.parametrize("is_open", [False, True])
def test_nothing_that_happens_to_its_file_ends_an_evaluation(
    harm: Callable[[Path], None], is_open: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "folder" / "batches.jsonl"
    file.parent.mkdir()
    store = BatchStore(OptionalStore(file, "said"), {})
    assert store.once("one", lambda: 1) == 1
    harm(file)
    if not is_open:
        store = BatchStore(OptionalStore(file, "said"), {})
    for part in ("a", "b"):
        for batch in ("one", "two"):
            assert store.of(part).once(batch, lambda: 2) == 2
    store.file.remove()
    if harm is _replace:
        assert file.read_text() == "notes of the user\n"
    # Once, whatever goes wrong later; a damaged file is made anew.
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in said] == ["said"] * (harm is not _damage)


def test_of_two_equal_evaluations_the_first_ends_and_the_other_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (BatchStore(OptionalStore(tmp_path / "batches.jsonl", "said"), {}) for _ in range(2))
    assert [store.once("one", lambda: 1) for store in (first, second)] == [1, 1]
    first.file.remove()
    assert not list(tmp_path.iterdir())
    assert second.once("two", lambda: 2) == 2
    resumed = BatchStore(OptionalStore(tmp_path / "batches.jsonl", "said"), {})
    assert resumed.once("two", lambda: 3) == 2
    second.file.remove()
    resumed.file.remove()
    assert not list(tmp_path.iterdir())
    assert not capsys.readouterr().out


def test_what_a_full_disk_left_of_a_file_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = OptionalStore(tmp_path / "batches.jsonl", "said")
    with small_disk(8):
        assert store.once({"batch": 1}, lambda: 1) == 1
    assert capsys.readouterr().out.startswith("said: ")
    store.remove()
    assert not list(tmp_path.iterdir())


def test_an_evaluation_needs_no_folder_of_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(config(tmp_path), progress=False).evaluation
    start = {"name": "vit_tiny_patch16_224", "args": {**MODEL, "img_size": 32}, "checkpoint": str(tmp_path / "run")}
    (tmp_path / "file").write_text("")
    table = assess(config(tmp_path, model=start, output=str(tmp_path / "file")), progress=False)
    assert table.runs[DENSE][0].text == str(result)
    assert not capsys.readouterr().out
    commands.evaluate([str(tmp_path / "run"), "--output", str(tmp_path / "file")])
    assert capsys.readouterr().out.startswith(str(result))


def test_an_evaluation_of_prompts_counts_the_whole_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_config = vlm_config(tmp_path, trainer={"max_steps": 1}, routing={**P_MOD, "image": {"router": "linear"}})
    fit(run_config, progress=False)
    commands.evaluate([run_config.output])
    printed = capsys.readouterr().out
    model = open_model(run_config.output).model
    prompts, text, image = kind_of(run_config).prompts(COUNTED)
    one = {"pixel_values": prompts["pixel_values"][:1]}
    count = flops(model, Prompt(text, image, pixels=one))
    assert f"prompt: {count.routed / 1e9:.4g} GFLOPs, ms per prompt " in printed
    assert f"prompt, dense: {count.dense / 1e9:.4g} GFLOPs, ms per prompt " in printed
    assert f"prompt: {count.dense / count.routed:.3g} times fewer FLOPs than dense, times as fast: " in printed


def test_a_timed_batch_has_its_size_whatever_the_set_has(tmp_path: Path) -> None:
    run_config = config(tmp_path)
    few, (images,) = sample_images(run_config.data, 100), timed_images(run_config.data, 100, 1, torch.device("cpu"))
    assert len(few) == 64
    assert torch.equal(images, torch.cat([few, few[:36]]))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("batches", [1, 2])
def test_each_timed_round_reads_other_images(
    size: int, batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many tokens a model keeps may depend on the images, as equal patches do."""
    kind = ImageKind(config(tmp_path))
    read: list[Tensor] = []
    monkeypatch.setattr(image_kind, "image_output", lambda model, images: read.append(images))
    timed = readings(kind, nn.Identity(), size, batches)["image"]
    assert (len(timed.draws), timed.samples) == (DRAWS, size * batches)
    for draw in timed.draws:
        draw()
    assert [len(images) for images in read] == [size] * batches * DRAWS
    assert len(torch.cat(read).unique(dim=0)) == size * batches * DRAWS
    # Each batch is spread over the set, whose images may come class by class.
    spread = sample_images(kind.config.data, size * batches * DRAWS)
    for number, images in enumerate(read):
        assert torch.equal(images, spread[number :: batches * DRAWS])


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
