"""Fine-tuning of vision-language models: what trains, what is logged, what a killed run goes on with."""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import shutil
import signal
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoModelForImageTextToText, Trainer

import mmod
from mmod.data.corrupt import CorruptDataError
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from mmod.data.readers.lengths import open_checked
from mmod.data.synthetic.questions import export_questions
from mmod.io.files import DamagedFileError, LockedError, UnwrittenError, locked
from mmod.io.sums import write_sums
from mmod.io.tensors import read_tensors, write_tensors
from mmod.training import fit
from mmod.training.chat import loop, start
from mmod.training.chat.config import ModelConfig
from mmod.training.chat.evaluate import EvalResult, answer_loss, ask, mean_over_kinds, score
from mmod.training.chat.processor import create_processor
from mmod.training.chat.start import create_with_processor, router_parameters
from mmod.training.chat.trainer import RunCallback, last_checkpoint
from mmod.training.engine.health import FIGURES
from mmod.training.engine.run_folder import told_start
from mmod.training.kinds import estimate
from tests.kit.chat_configs import GAMMA, MASKED, P_MOD, same, vlm_config, weights
from tests.kit.disk import small_disk
from tests.kit.processors import qwen
from tests.kit.sets import SETS


def test_a_routed_run_learns_logs_answers_and_is_kept(folder: Path) -> None:
    config = vlm_config(folder, "routed", routing=GAMMA)
    result = fit(config, progress=False)
    assert result.steps == 4
    assert not result.reused
    assert result.evaluation is not None
    assert set(result.evaluation.right) == set(result.evaluation.prior)
    assert sum(result.evaluation.questions.values()) == 72
    shares = list(result.evaluation.kept.values())
    assert shares == pytest.approx([0.5, 0.5])
    kept = [entry for entry in result.history if any(key.startswith("kept/") for key in entry)]
    assert len(kept) == 2
    assert all(math.isfinite(value) for entry in kept for value in entry.values())
    assert {key.partition("/")[0] for key in kept[0] if "/" in key} == set(FIGURES)
    with (folder / "routed" / "routers.csv").open() as file:
        rows = [(row["data"], row["step"]) for row in csv.DictReader(file)]
    assert rows[::2] == [("train", "2"), ("train", "4"), ("val", "4")]
    again = fit(config, progress=False)
    assert again.reused
    assert replace(again, reused=False) == result
    model = mmod.load_pretrained(folder / "routed" / "model")
    assert len(mmod.routed_blocks(model)) == 2
    go_on = vlm_config(folder, model=ModelConfig(checkpoint=str(folder / "routed" / "model")))
    assert estimate(go_on).kept == mmod.capacities(model)
    assert "answers right" in str(result)
    assert "language-only prior" in str(result)
    with pytest.raises(ValueError, match=r"trainer\.learning_rate: 0\.001 there, 0\.01 now"):
        fit(vlm_config(folder, "routed", {"learning_rate": 1e-2}, routing=GAMMA), progress=False)


def test_a_score_of_one_kind_of_question_is_said_once() -> None:
    one = EvalResult({"all": 43 / 0.6}, {"all": 60}, prior={"all": 25.0})
    assert str(one) == "answers right 71.67 % of 60"
    assert one.baseline.startswith("language-only prior 25.00 % (right answers without looking")
    two = EvalResult(
        {"read": 60.0, "count": 80.0}, {"read": 30, "count": 30}, {"layers.1": 0.5}, {"read": 20, "count": 30}
    )
    assert str(two).startswith("answers right 70.00 %: read 60.00 % of 30, count 80.00 % of 30, kept 0.500 of the ")
    assert two.baseline.startswith("language-only prior 25.00 %: read 20.00 %, count 30.00 % (right")


def test_a_run_killed_before_a_checkpoint_is_finished_goes_on_from_the_one_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The trainer removes older checkpoints before a new one is finished.
    trainer = {"save_steps": 1, "save_total_limit": 1}
    config = vlm_config(folder, "every-step", trainer, data=replace(vlm_config(folder).data, val=None), routing=P_MOD)
    uninterrupted = weights(fit(config, progress=False))
    config = replace(config, output=str(folder / "unfinished"))
    checkpoints = folder / "unfinished" / "checkpoints"

    def killed(path: Path) -> None:
        if path.name == "checkpoint-3":
            raise KeyboardInterrupt
        write_sums(path)

    with monkeypatch.context() as patch:
        patch.setattr("mmod.training.chat.trainer.write_sums", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(config, progress=False)
    assert {path.name for path in checkpoints.iterdir()} == {"checkpoint-2", "checkpoint-3"}
    assert last_checkpoint(checkpoints) == str(checkpoints / "checkpoint-2")
    # Were the unfinished one kept, it would count as one of the two.
    shutil.copytree(checkpoints / "checkpoint-3", checkpoints / "checkpoint-9")
    assert same(weights(fit(config, progress=False)), uninterrupted)
    assert {path.name for path in checkpoints.iterdir()} == {"checkpoint-3", "checkpoint-4"}


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj"]}], ids=["weights", "LoRA"])
def test_a_checkpoint_with_other_names_than_the_model_is_refused(folder: Path, lora: dict[str, Any] | None) -> None:
    data = replace(vlm_config(folder).data, val=None)
    config = vlm_config(folder, f"renamed-{lora is None}", {"max_steps": 2}, data=data, routing=GAMMA, lora=lora)
    fit(config, progress=False)
    run = Path(config.output)
    (run / "result.json").unlink()
    checkpoint = run / "checkpoints" / "checkpoint-2"
    file = next(checkpoint.glob("*model.safetensors"))
    tensors, header = read_tensors(file)
    router = next(name for name in tensors if "shared_router" in name)
    tensors["score"] = tensors.pop(router)
    write_tensors(file, tensors, header)
    write_sums(checkpoint)
    with pytest.raises(ValueError, match=rf"'{checkpoint}' does not fit the model in 2 names, {router}, score: go on"):
        fit(config, progress=False)


def test_what_is_routed_in_training_alone_is_left_dense(folder: Path) -> None:
    random_tokens = {"router": "random", "training_only": True}
    routing = {"language": random_tokens, "image": {**random_tokens, "blocks": [1]}}
    result = fit(vlm_config(folder, "random", routing=routing), progress=False)
    assert result.evaluation is not None
    assert result.evaluation.kept == {}
    assert any(key.startswith("kept/") for entry in result.history for key in entry)
    model = AutoModelForImageTextToText.from_pretrained(folder / "random" / "model")
    assert mmod.methods.methods_of(model) == ()
    assert type(model).__name__ == "LlavaForConditionalGeneration"


def test_questions_asked_in_training_change_no_weight(folder: Path) -> None:
    asked = fit(vlm_config(folder, "asked", {"eval_strategy": "steps", "eval_steps": 2}, routing=GAMMA), progress=False)
    answers = [entry for entry in asked.history if "eval_right" in entry]
    assert [entry["step"] for entry in answers] == [2, 4]
    assert asked.evaluation is not None
    assert answers[1]["eval_right"] == asked.evaluation.accuracy
    questions = open_conversations("questions:tiny/val", ConversationsConfig(root=str(SETS / "questions")))
    model = mmod.load_pretrained(folder / "asked" / "model")
    collator = ChatCollator(create_processor(vlm_config(folder)))
    # The mean over tokens does not depend on the batches.
    assert answers[1]["eval_loss"] == pytest.approx(answer_loss(model, collator, questions, batch_size=5), rel=1e-5)
    # Each entry of training keeps the statistics of its routers.
    assert sum(any(name.startswith("kept/") for name in entry) for entry in asked.history) == 2
    alone = fit(vlm_config(folder, "routed", routing=GAMMA), progress=False)
    assert same(weights(asked), weights(alone))


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj", "v_proj"]}], ids=["weights", "LoRA"])
def test_the_weights_with_the_most_right_answers_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any] | None
) -> None:
    trainer = {"lr_scheduler_type": "constant", "max_steps": 3, "save_steps": 1}
    name = f"best-{lora is None}"
    changes = {"routing": P_MOD, "lora": lora}
    data = replace(vlm_config(folder).data, val=None)
    short = fit(vlm_config(folder, f"{name}-short", {**trainer, "max_steps": 2}, data=data, **changes), progress=False)
    shares = iter([10.0, 30.0, 20.0])
    monkeypatch.setattr(EvalResult, "columns", lambda self: {"right": next(shares)})
    keep = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    best = fit(vlm_config(folder, name, {**trainer, **keep}, **changes), progress=False)
    assert best.steps == 3
    assert same(weights(best), weights(short))


def test_a_stopped_run_keeps_what_it_saved_beside_the_best(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    trainer = {"lr_scheduler_type": "constant", "max_steps": 6, **keep}
    shares = iter([30.0, 20.0, 10.0, 5.0])
    monkeypatch.setattr(EvalResult, "columns", lambda self: {"right": next(shares)})
    on_step_end = RunCallback.on_step_end

    def stopped(self: RunCallback, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            signal.raise_signal(signal.SIGTERM)
        on_step_end(self, args, state, *others, **kwargs)

    config = vlm_config(folder, "stopped-beside-the-best", trainer, routing=P_MOD)
    with monkeypatch.context() as patch:
        patch.setattr(RunCallback, "on_step_end", stopped)
        with pytest.raises(SystemExit):
            fit(config, progress=False)
    checkpoints = Path(config.output) / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"checkpoint-2", "checkpoint-5"}
    assert fit(config, progress=False).steps == 6


def _with_broken_gradient(create: Any) -> Any:
    """Return a method that creates the optimiser of a model whose third gradient of a weight is infinite."""

    def created(self: Trainer, *arguments: Any) -> Any:
        calls = iter(range(10**6))
        weight = self.model.get_parameter("model.multi_modal_projector.linear_1.weight")  # type: ignore[union-attr]
        weight.register_hook(lambda gradient: gradient * torch.inf if next(calls) == 2 else None)
        return create(self, *arguments)

    return created


def test_a_loss_that_is_not_finite_ends_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"data": replace(vlm_config(folder).data, val=None), "routing": P_MOD}
    # The first step changes the weights, so that all that follows is NaN.
    blown = vlm_config(folder, "blown", {"learning_rate": 1e40, "lr_scheduler_type": "constant"}, **fields)
    with pytest.raises(FloatingPointError, match=r"at step 2; last good checkpoint: none was written yet"):
        fit(blown, progress=False)
    assert not (folder / "blown" / "result.json").exists()
    calls = []
    compute_loss = Trainer.compute_loss

    def broken(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        loss, outputs = compute_loss(self, *args, **kwargs)
        return loss * (float("nan") if len(calls) == 4 else 1.0), outputs

    config = vlm_config(folder, "nan", **fields)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "compute_loss", broken)
        with pytest.raises(FloatingPointError, match=r"at step 4; last good checkpoint: .*checkpoint-2"):
            fit(config, progress=False)
    # Weights that are not finite, by an infinite gradient, are not saved.
    monkeypatch.setattr(Trainer, "create_optimizer", _with_broken_gradient(Trainer.create_optimizer))
    infinite = vlm_config(folder, "infinite", {"save_steps": 1, "max_grad_norm": 0.0}, **fields)
    with pytest.raises(FloatingPointError, match=r"weights .* by step 3; last good checkpoint: .*checkpoint-2"):
        fit(infinite, progress=False)
    monkeypatch.undo()
    # Going on from it is as if nothing had happened.
    whole = fit(vlm_config(folder, "never-nan", **fields), progress=False)
    assert same(weights(fit(config, progress=False)), weights(whole))


@pytest.mark.parametrize("name", ["trainer_state.json", "rng_state.pth", "optimizer.pt", "model.safetensors"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    for step in (2, 3):
        path = tmp_path / f"checkpoint-{step}"
        path.mkdir()
        (path / "trainer_state.json").write_text('{"global_step": 2}')
        torch.save({"x": torch.zeros(9)}, path / "rng_state.pth")
        torch.save({"x": torch.zeros(9)}, path / "optimizer.pt")
        write_tensors(path / "model.safetensors", {"x": torch.zeros(9)})
        write_sums(path)
    damaged = tmp_path / "checkpoint-3" / name
    damaged.write_bytes(damaged.read_bytes()[:-5])
    with pytest.raises(DamagedFileError, match=rf"cannot go on: '?{damaged}'? is .* go on from '.*checkpoint-2', or"):
        last_checkpoint(tmp_path)
    shutil.rmtree(damaged.parent)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")


def test_a_full_disk_ends_a_run_with_its_last_whole_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vlm_config(folder, "full", data=replace(vlm_config(folder).data, val=None), routing=P_MOD)
    on_save = RunCallback.on_save
    with ExitStack() as disk:

        def fill(self: RunCallback, *args: Any, **kwargs: Any) -> None:
            on_save(self, *args, **kwargs)
            disk.enter_context(small_disk(5000))

        monkeypatch.setattr(RunCallback, "on_save", fill)
        message = r"checkpoint-4' could not be written: .*checkpoint-2' is kept as it was"
        with pytest.raises(UnwrittenError, match=message):
            fit(config, progress=False)
    monkeypatch.undo()
    # Of the first checkpoint nothing stays.
    first = replace(config, output=str(folder / "first"))
    with small_disk(5000), pytest.raises(UnwrittenError, match=r"checkpoint-2' could not be written.*nothing was writ"):
        fit(first, progress=False)
    assert not any((folder / "first" / "checkpoints").iterdir())
    checkpoints = folder / "full" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint-2"]
    with small_disk(5000), pytest.raises(UnwrittenError, match=r"checkpoint-4' could not be written"):
        fit(config, progress=False)
    (folder / "full" / "model").mkdir()
    (folder / "full" / "model" / "model.safetensors").write_bytes(b"half")
    assert fit(config, progress=False).steps == 4
    assert weights(fit(config, progress=False))


def test_an_image_that_a_worker_cannot_decode_is_named(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "<image> what ?"}, {"from": "gpt", "value": "3"}]
    Image.effect_noise((32, 32), 50).save(tmp_path / "0.png")
    (tmp_path / "0.png").write_bytes((tmp_path / "0.png").read_bytes()[:200])
    (tmp_path / "t.json").write_text(json.dumps([{"id": "7", "image": "0.png", "conversations": said}] * 8))
    data = replace(vlm_config(tmp_path).data, train=str(tmp_path / "t.json"), val=None)
    config = vlm_config(tmp_path, "run", {"dataloader_num_workers": 1}, data=data)
    before = multiprocessing.active_children()
    told = rf"\A{tmp_path}/0\.png \[7\]: image of 200 bytes cannot be decoded.* \(on_corrupt: skip in data counts such"
    with pytest.raises(CorruptDataError, match=told):
        fit(config, progress=False)
    # What is told may be done in the folder of a run that had begun.
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({**config.to_dict(), "world_size": 1}))
    skipping = replace(config, data=replace(data, on_corrupt="skip"))
    assert told_start(skipping, 1).endswith("before its first checkpoint, and would start anew")
    # The error does not keep the loader, whose worker would go on until garbage is collected.
    assert multiprocessing.active_children() == before


def test_a_start_that_fails_leaves_the_folder_to_another(folder: Path) -> None:
    data = replace(vlm_config(folder).data, val=None)
    with pytest.raises(ValueError, match="no-such-optimiser"):
        fit(vlm_config(folder, "failed", data=data, optim="no-such-optimiser"), progress=False)
    config = vlm_config(folder, "failed", data=data, optim="sgd")
    message = r"another process is writing to '.*failed"
    with locked(config.output, wait=False), pytest.raises(LockedError, match=message):
        fit(config, progress=False)
    assert fit(config, progress=False).steps == 4


def test_text_protected_in_training_is_left_to_the_threshold_afterwards(folder: Path) -> None:
    data = replace(vlm_config(folder).data, protected="question")
    result = fit(vlm_config(folder, "masked", data=data, routing=MASKED), progress=False)
    assert result.evaluation is not None
    model, processor = mmod.load_pretrained(folder / "masked" / "model"), create_processor(vlm_config(folder))
    val = open_conversations(data.val, data)
    batch = ChatCollator(processor).prompts([val[0], val[1]])
    with mmod.trace(model) as decisions:
        model.generate(**batch, max_new_tokens=1)
    for routing in decisions.values():
        above = torch.sigmoid(routing.score_BN) >= 0.5
        assert torch.equal(routing.keep_BN, above & batch["attention_mask"].bool())


def test_adapters_and_routers_train_and_the_rest_stays(folder: Path) -> None:
    data = replace(vlm_config(folder).data, val=None)
    config = vlm_config(folder, "lora", data=data, routing=P_MOD, lora={"r": 2, "target_modules": ["q_proj"]})
    before, _ = create_with_processor(config)
    start = create_with_processor(config.plain())[0].state_dict()
    trained = {name for name, parameter in before.named_parameters() if parameter.requires_grad}
    assert all("lora" in name or "router" in name for name in trained)
    assert {name for name in trained if "router" in name} == set(router_parameters(before))
    after = weights(fit(config, progress=False))
    changed = {name for name, value in after.items() if not torch.equal(value, start[name])}
    # No answer depends on what image tokens become in the last layer, so its router has nothing to learn from.
    routers = {name for name in start if "router" in name and "layers.3" not in name}
    assert changed == routers | {name for name in start if "q_proj.weight" in name}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"learning_rat": 1}}, "unknown argument of the trainer learning_rat; near ones: learning_rate"),
        ({"trainer": {"warmup_steps": 4}}, r"warmup_steps=4 is as long as the run, steps=4: .* to 0, or at most 3"),
        ({"routing": {"text": {}}}, "unknown part in routing text; valid ones are language, image"),
        ({"routing": {"language": {"capacity": 0.01}}}, "keeps none of 16 image tokens"),
        ({"max_new_tokens": 1}, r"of 72 answers in data\.val have more tokens than max_new_tokens=1 .* set it to 3"),
    ],
)
def test_wrong_configs_are_named(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(vlm_config(folder, "wrong", **changes), progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": {"r": 4}}, "lora with target_modules=None matches no module .* set lora.target_modules"),
        ({"lora": {"rank": 2}}, "unknown option of LoRA rank"),
        ({"lora": {"target_modules": ["q_proj"], "bias": "some"}}, "is refused by peft"),
        ({"routing": {"language": {"capacity": 0.5, "blocks": [99]}}}, "99"),
        ({"data": ConversationsConfig(root=str(SETS / "questions"), protected="question")}, "would change nothing"),
        ({"optim": "adamw_torch"}, "timm knows no optimiser 'adamw_torch'; timm.optim.list"),
        ({"trainer": {"epochs": 3}}, "unknown argument of the trainer epochs; near ones: num_train_epochs"),
        ({"frozen": ["image", "projector", "language"]}, r"^frozen: \['image', .*'\] leaves no weight to train: leave"),
        ({"data": ConversationsConfig(root=str(SETS / "questions"), packed=True)}, "Qwen.* cannot be packed"),
    ],
)
def test_what_the_model_cannot_be_is_refused_before_conversations_are_read(
    folder: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*arguments: object) -> None:
        pytest.fail("conversations were read")

    monkeypatch.setattr(loop, "open_checked", read)
    if "packed" in message:
        monkeypatch.setattr(start, "create_processor", lambda config: qwen())
    config = vlm_config(folder, "refused", **changes)
    for begin in (partial(fit, progress=False), estimate):
        with pytest.raises(ValueError, match=message):
            begin(config)


def test_what_only_training_needs_keeps_no_model_from_being_counted_and_evaluated(folder: Path) -> None:
    # It exists on GPUs alone.
    config = vlm_config(folder, optim="fusedadam")
    assert estimate(config).parameters > 0
    model, _ = create_with_processor(replace(config, frozen=["image", "projector", "language"]))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_an_empty_file_of_questions_is_named_before_training_conversations_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.json").write_text("[]")
    data = replace(vlm_config(folder).data, val=str(tmp_path / "empty.json"))

    def read(source: str, *arguments: Any, **options: Any) -> Any:
        assert source == data.val
        return open_checked(source, *arguments, **options)

    monkeypatch.setattr(loop, "open_checked", read)
    for begin in (partial(fit, progress=False), estimate):
        with pytest.raises(ValueError, match=r"empty\.json' holds no record$"):
            begin(vlm_config(folder, "refused", data=data))


def test_answers_are_written_with_what_was_expected(folder: Path) -> None:
    result = fit(vlm_config(folder, "routed", routing=GAMMA), progress=False)
    lines = [json.loads(line) for line in (folder / "routed" / "answers.jsonl").read_text().splitlines()]
    assert result.evaluation is not None
    for kind, asked in result.evaluation.questions.items():
        right = [line["right"] for line in lines if line["kind"] == kind]
        assert len(right) == asked
        assert 100 * sum(right) / asked == pytest.approx(result.evaluation.right[kind])
    questions = open_conversations("questions:tiny/val", ConversationsConfig(root=str(SETS / "questions")))
    assert {line["key"]: line["expected"] for line in lines} == {talk.key: talk.answer for talk in questions}


def test_answers_do_not_depend_on_the_batch(folder: Path) -> None:
    config = vlm_config(folder, routing=P_MOD)
    torch.manual_seed(0)
    model, processor = create_with_processor(config)
    data, collator = open_conversations("questions:tiny/test", config.data), ChatCollator(processor)
    configs = [replace(config, eval_batch_size=size, max_new_tokens=3) for size in (7, 72)]
    results = [score(*ask(asking, model, collator, data)) for asking in configs]
    assert results[0] == results[1]
    assert model.training


def test_kinds_that_need_no_image_do_not_count() -> None:
    assert mean_over_kinds({"count": 50.0, "text": 100.0}) == 50.0
    assert mean_over_kinds({"text": 100.0}) == 100.0


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Files of conversations, some of whose images cannot be decoded, as fields of the data."""
    root = tmp_path_factory.mktemp("broken")
    export_questions(root, "tiny")
    fields = {}
    for split, key in (("train", "train"), ("val", "val")):
        records = [record for record in json.loads((root / f"{split}.json").read_text()) if "image" in record][:16]
        for number in (1, 2, 15) if split == "train" else range(8, 16):
            name, images = f"images/bad-{split}-{number}.png", records[number]["image"]
            # The header is whole, so training finds out when it reads the image.
            content = (root / (images if isinstance(images, str) else images[0])).read_bytes()
            (root / name).write_bytes(content[: len(content) // 2])
            records[number]["image"] = name if isinstance(images, str) else [name, *images[1:]]
        (root / f"{split}-broken.json").write_text(json.dumps(records))
        fields[key] = str(root / f"{split}-broken.json")
    return fields


def test_images_that_cannot_be_decoded_are_counted_replaced_and_left_out(folder: Path, broken: dict[str, Any]) -> None:
    data = ConversationsConfig(**broken, on_corrupt="skip")
    trainer = {"max_steps": 4, "dataloader_num_workers": 2}
    config = vlm_config(folder, "broken", trainer, data=data, eval_batch_size=2)
    result = fit(config, progress=False)
    assert result.steps == 4
    assert result.evaluation is not None
    # Whole batches of the evaluation are unreadable.
    assert sum(result.evaluation.questions.values()) == 8
    assert {split: sum(counts.values()) for split, counts in result.skipped.items()} == {"train": 3, "val": 8}
    # A dry run reads all of so few.
    assert "\nsamples read: 16 of training with their images, all others without; 3 broken" in str(estimate(config))
    whole = vlm_config(folder, "whole")
    assert "; none is broken\n" in str(estimate(whole))
    strict = replace(config, output=str(folder / "refused"), data=replace(data, max_corrupt=2))
    with pytest.raises(CorruptDataError, match=r"bad-train-\d+\.png"):
        fit(strict, progress=False)


def test_a_conversation_is_replaced_by_one_that_has_an_image_too(broken: dict[str, Any], tmp_path: Path) -> None:
    records = json.loads(Path(broken["train"]).read_text())
    blind = {"id": "blind", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    path = Path(broken["train"]).with_name("mixed.json")
    path.write_text(json.dumps([records[1], blind, records[3], records[2]]))
    talks = open_conversations(str(path), ConversationsConfig(on_corrupt="skip"))
    assert [len(talks[index].images) for index in range(4)] == [1, 0, 1, 1]
    assert [len(talks[index].faults) for index in range(4)] == [1, 0, 0, 2]
    assert [talk.key for talk in talks.read(range(4))] == ["blind", talks[2].key]
    assert len(talks.report.faults) == 2
    path.write_text(json.dumps([records[1], blind]))
    with pytest.raises(CorruptDataError, match="no conversation with an image can be read"):
        open_conversations(str(path), ConversationsConfig(on_corrupt="skip"))[0]
    config = vlm_config(tmp_path, data=ConversationsConfig(val=str(path), on_corrupt="skip"))
    path.write_text(json.dumps([records[1]]))
    model, processor = create_with_processor(config)
    with pytest.raises(ValueError, match="no conversation of the evaluation can be read; 1 corrupt"):
        ask(config, model, ChatCollator(processor), open_conversations(str(path), config.data))
    asking = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    config = vlm_config(tmp_path, "asking", asking, data=replace(config.data, train=broken["train"]))
    with pytest.raises(ValueError, match="no conversation of the evaluation can be read; 1 corrupt"):
        fit(config, progress=False)
