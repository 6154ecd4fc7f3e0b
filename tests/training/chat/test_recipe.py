"""Fine-tuning of vision-language models: what trains, what is logged, what a killed run goes on with."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmod
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import open_conversations
from mmod.io.locks import LockedError, locked
from mmod.training.chat.checkpoints import last_checkpoint
from mmod.training.chat.config import ModelConfig, TrainConfig
from mmod.training.chat.estimate import estimate
from mmod.training.chat.evaluate import evaluate, mean_over_kinds
from mmod.training.chat.model import create_model, create_processor, router_parameters
from mmod.training.chat.recipe import fit, read_outcome, training_arguments
from mmod.training.chat.sampler import LengthSampler
from mmod.training.chat.trainer import RoutedTrainer, watch_routing
from tests.training.chat.configs import MODEL, vlm_config
from tests.training.chat.fsdp_worker import RUNS, run_config

ROOT = Path(__file__).parents[3]
P_MOD = {"language": {"preset": "p-mod"}}
GAMMA = {
    "language": {"preset": "gamma-mod", "depth": 6, "blocks": [1, 2], "tokens": "image", "inference_threshold": None}
}

PREDICTOR = {
    "language": {
        "preset": "mod", "blocks": [1, 2], "capacity": 0.5, "tokens": "image", "inference_threshold": 0.5,
        "losses": {"membership": 0.01}, "predictor": True,
    }
}  # fmt: skip
MASKED = {"language": {"preset": "gamma-mod", "depth": 6, "blocks": [1, 2], "inference_threshold": 0.5}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vlm")


def weights(result: Any) -> dict[str, torch.Tensor]:
    return mmod.load_pretrained(Path(result.folder) / "model").state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_routed_run_learns_logs_answers_and_is_kept(folder: Path) -> None:
    config = vlm_config(folder, "routed", routing=GAMMA)
    result = fit(config, progress=False)
    assert result.steps == 4
    assert not result.reused
    assert result.answers is not None
    assert set(result.answers.right) == set(result.prior)
    assert sum(result.answers.asked.values()) == 72
    shares = list(result.answers.kept.values())
    assert shares == pytest.approx([0.5, 0.5])
    kept = [entry for entry in result.history if any(key.startswith("kept/") for key in entry)]
    assert len(kept) == 2
    assert all(math.isfinite(value) for entry in kept for value in entry.values())
    assert any(key.startswith("gate_std/") for key in kept[0])
    again = fit(config, progress=False)
    assert again.reused
    assert replace(again, reused=False) == result
    model = mmod.load_pretrained(folder / "routed" / "model")
    assert len(mmod.routed_blocks(model)) == 2
    go_on = vlm_config(folder, model=ModelConfig(checkpoint=str(folder / "routed" / "model")))
    assert estimate(go_on).kept == mmod.capacities(model)
    assert "answers right" in str(result)
    with pytest.raises(ValueError, match=r"trainer\.learning_rate: 0\.001 there, 0\.01 now"):
        fit(vlm_config(folder, "routed", {"learning_rate": 1e-2}, routing=GAMMA), progress=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"routing": P_MOD, "optim": "muon"},
        {"routing": GAMMA},
        {"routing": P_MOD, "lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]}},
    ],
    ids=["p-mod, muon", "gamma-mod, shared router", "p-mod, LoRA"],
)
def test_a_killed_run_goes_on_as_if_it_had_not_stopped(
    folder: Path, changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name = f"killed-{request.node.callspec.id[:5]}-{'lora' in changes}"
    config = vlm_config(folder, name, data=replace(vlm_config(folder).data, val=None), **changes)
    whole = weights(fit(config, progress=False))
    run = folder / name
    (run / "result.json").unlink()
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")
    # A checkpoint that was being written when the process died.
    shutil.copytree(run / "checkpoints" / "checkpoint-2", run / "checkpoints" / "checkpoint-3")
    (run / "checkpoints" / "checkpoint-3" / "trainer_state.json").write_text("{")
    assert str(last_checkpoint(run / "checkpoints")).endswith("checkpoint-2")
    assert same(weights(fit(config, progress=False)), whole)


def test_a_signal_ends_a_run_after_its_step_and_another_start_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vlm_config(folder, "whole", data=replace(vlm_config(folder).data, val=None), routing=P_MOD)
    whole = weights(fit(config, progress=False))
    config = replace(config, output=str(folder / "stopped"))
    calls = []
    compute_loss = RoutedTrainer.compute_loss

    def interrupted(self: RoutedTrainer, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return compute_loss(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(RoutedTrainer, "compute_loss", interrupted)
        with pytest.raises(SystemExit) as stop:
            fit(config, progress=False)
    assert stop.value.code == 143
    checkpoints = folder / "stopped" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} >= {"checkpoint-2", "checkpoint-3"}
    damaged = checkpoints / "checkpoint-3" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"going on from '.*checkpoint-2', because '.*checkpoint-3/model\.safe"):
        assert same(weights(fit(config, progress=False)), whole)


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
    assert result.answers is not None
    model, processor = mmod.load_pretrained(folder / "masked" / "model"), create_processor(vlm_config(folder).model)
    val = open_conversations(data.val, data)
    batch = ChatCollator(processor).prompts([val[0], val[1]])
    with mmod.trace(model) as decisions:
        model.generate(**batch, max_new_tokens=1)
    for routing in decisions.values():
        above = torch.sigmoid(routing.score_BN) >= 0.5
        assert torch.equal(routing.keep_BN, above & batch["attention_mask"].bool())


@pytest.mark.parametrize("routing", [None, P_MOD, GAMMA], ids=["dense", "p-mod", "gamma-mod"])
def test_protection_that_changes_nothing_is_refused(folder: Path, routing: Any) -> None:
    config = vlm_config(folder, data=replace(vlm_config(folder).data, protected="question"), routing=routing)
    with pytest.raises(ValueError, match=r"data\.protected: question would change nothing.*tokens: all"):
        create_model(config)


def test_adapters_and_routers_train_and_the_rest_stays(folder: Path) -> None:
    config = vlm_config(folder, "lora", routing=P_MOD, lora={"r": 2, "target_modules": ["q_proj"]})
    before, _ = create_model(config)
    start = {name: value.clone() for name, value in before.base_model.model.state_dict().items()}
    trained = {name for name, parameter in before.named_parameters() if parameter.requires_grad}
    assert all("lora" in name or "router" in name for name in trained)
    assert {name for name in trained if "router" in name} == set(router_parameters(before))
    after = weights(fit(config, progress=False))
    changed = {name for name, value in after.items() if name in start and not torch.equal(value, start[name])}
    # No answer depends on what image tokens become in the last layer, so its router has nothing to learn from.
    assert changed == {name for name in start if "router" in name and "layers.3" not in name}
    query = "model.language_model.layers.0.self_attn.q_proj"
    assert not torch.equal(after[f"{query}.weight"], start[f"{query}.base_layer.weight"])


def test_routers_that_would_not_learn_are_refused_before_training(folder: Path) -> None:
    routing = {"language": {"router": "linear", "gate": "identity", "blocks": [1, 2]}}
    with pytest.raises(ValueError, match=r"router of model.language_model.layers.1 would not learn: gate 'identity'"):
        create_model(vlm_config(folder, routing=routing))
    create_model(vlm_config(folder, routing={"language": {**routing["language"], "losses": {"capacity": 0.1}}}))
    model, _ = create_model(vlm_config(folder, routing=GAMMA))
    model.model.language_model.shared_router.requires_grad_(False)
    arguments = training_arguments(vlm_config(folder), False)
    with watch_routing(model) as watch, pytest.raises(ValueError, match="all of their 1 weights are frozen"):
        RoutedTrainer(watch, model=model, args=arguments)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["vision"], {"projector", "language"}),
        (["vision", "projector"], {"language"}),
        (["language"], {"vision", "projector", "router"}),
    ],
)
def test_frozen_parts_do_not_train(folder: Path, parts: list[str], expected: set[str]) -> None:
    model, _ = create_model(vlm_config(folder, frozen=parts, routing=P_MOD))

    def kind(name: str) -> str:
        if "router" in name:
            return "router"
        return "vision" if "vision_tower" in name else "projector" if "projector" in name else "language"

    trained = {kind(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == expected | {"router"}


@pytest.mark.parametrize("routing", [None, P_MOD, GAMMA, MASKED], ids=["dense", "p-mod", "gamma-mod", "masked"])
def test_packed_samples_train_like_padded_ones(folder: Path, routing: Any) -> None:
    data = replace(vlm_config(folder).data, protected="question" if routing is MASKED else None)
    config = vlm_config(folder, data=data, routing=routing)
    model, processor = create_model(config)
    data = open_conversations(config.data.train, config.data)
    # The first conversations about two, one and no images.
    talks = [data[int((data.images == count).argmax())] for count in (2, 1, 0)]
    losses, gradients = [], []
    for packed in (False, True):
        batch = ChatCollator(processor, packed=packed, protected=config.data.protected)(talks)
        assert ("attention_mask" in batch) is not packed
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        if routing is MASKED:
            for block in mmod.routed_blocks(model).values():
                keep_BN = block.mod_state.routing.keep_BN
                assert bool(keep_BN[batch["protected_mask"]].all())
                free_BN = batch.get("attention_mask", torch.ones_like(keep_BN)).bool() & ~batch["protected_mask"]
                assert 0 < int(keep_BN[free_BN].sum()) <= int(free_BN.sum()) // 2
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_auxiliary_losses_are_added_once(folder: Path, accumulate: int) -> None:
    from mmod.training.chat.trainer import RoutedTrainer

    gradients = []
    for split in (1, accumulate):
        trainer_fields = {"per_device_train_batch_size": 4 // split, "gradient_accumulation_steps": split}
        fields = {"router": "linear", "capacity": 1.0, "gate": "identity", "losses": {"membership": 0.5}}
        config = vlm_config(folder, trainer=trainer_fields, routing={"language": fields})
        model, processor = create_model(config)
        train, collator = open_conversations(config.data.train, config.data), ChatCollator(processor)
        arguments = training_arguments(config, progress=False)
        with watch_routing(model) as watch:
            trainer = RoutedTrainer(watch, model=model, args=arguments, train_dataset=train, data_collator=collator)
            trainer.current_gradient_accumulation_steps = split
            talks = [train[0]] * 4
            size = 4 // split
            items = (collator(talks)["labels"] != -100).sum()
            for start in range(0, 4, size):
                trainer.training_step(model, dict(collator(talks[start : start + size])), items)
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert any("router" in name for name in gradients[0])
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, rtol=1e-4, atol=1e-6)


def test_watch_counts_what_blocks_keep(folder: Path) -> None:
    config = vlm_config(folder, routing={"language": {"router": "linear", "capacity": 0.25}})
    model, processor = create_model(config)
    data = open_conversations(config.data.train, config.data)
    batch = ChatCollator(processor)([data[index] for index in range(6)])
    with watch_routing(model) as watch:
        model(**batch)
        figures = watch.take()
        assert watch.take() == {}
    assert list(figures) == list(mmod.routed_blocks(model))
    for name, found in figures.items():
        routing = mmod.routed_blocks(model)[name].mod_state.routing
        image = batch["input_ids"] == processor.image_token_id
        assert found["kept"] == pytest.approx(float(routing.keep_BN[image].float().mean()))
        kept = routing.keep_BN & image
        gates = torch.zeros(image.shape).scatter(1, routing.index_BK, routing.gate_BK.detach())[kept]
        assert found["gate"] == pytest.approx(float(gates.mean()), abs=1e-6)
        assert found["gate_std"] == pytest.approx(float(gates.std(unbiased=False)), abs=1e-4)


def test_answers_do_not_depend_on_the_batch(folder: Path) -> None:
    config = vlm_config(folder, routing=P_MOD)
    torch.manual_seed(0)
    model, processor = create_model(config)
    data, collator = open_conversations("questions:tiny/test", config.data), ChatCollator(processor)
    results = [evaluate(model, collator, data, batch_size=size, max_new_tokens=3) for size in (7, 72)]
    assert results[0] == results[1]
    assert model.training


def test_plan_agrees_with_the_model(folder: Path) -> None:
    config = vlm_config(folder, "planned", routing=P_MOD)
    plan = estimate(config)
    model, _ = create_model(config)
    assert plan.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert plan.router_parameters == 3 * 33
    assert plan.kept == mmod.capacities(model)
    assert (plan.samples, plan.steps, plan.batch, plan.depth) == (256, 4, 4, 4)
    assert plan.flops.routed < plan.flops.dense
    assert plan.activation_bytes < estimate(vlm_config(folder)).activation_bytes
    assert estimate(replace(config, trainer={"per_device_train_batch_size": 8, "num_train_epochs": 2})).steps == 64
    assert "3 of 4 layers are routed" in str(plan)
    free, masked = (
        estimate(vlm_config(folder, routing=MASKED, data=replace(config.data, protected=protected)))
        for protected in (None, "question")
    )
    assert free.flops.routed < masked.flops.routed < masked.flops.dense
    assert free.activation_bytes < masked.activation_bytes
    assert not (folder / "planned").exists()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(1, 8), st.integers(0, 3), st.integers(0, 2))
def test_sampler_shuffles_everything_and_keeps_lengths_together(
    lengths: list[int], batch: int, seed: int, epoch: int
) -> None:
    sampler = LengthSampler(lengths, batch, seed)
    sampler.set_epoch(epoch)
    order = list(sampler)
    assert sorted(order) == list(range(len(lengths)))
    assert order == list(sampler)
    random = np.random.default_rng(0).permutation(len(lengths))

    def padding(indices: Any) -> int:
        parts = [[lengths[i] for i in indices[at : at + batch]] for at in range(0, len(lengths), batch)]
        return sum(max(part) * len(part) - sum(part) for part in parts)

    if len(lengths) <= 8 * batch and len(lengths) % batch == 0:
        assert padding(order) <= padding(random)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=80), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9))
def test_every_batch_of_a_process_has_an_image(images: list[int], share: int, processes: int, seed: int) -> None:
    lengths = [5 + 20 * number for number in images]
    batches = -(-len(images) // share)
    if 0 < sum(map(bool, images)) < batches:
        with pytest.raises(ValueError, match=f"{batches} batches of {share} need one each"):
            LengthSampler(lengths, share * processes, seed, images, share)
        return
    plain = list(LengthSampler(lengths, share * processes, seed))
    order = list(LengthSampler(lengths, share * processes, seed, images, share))
    assert sorted(order) == list(range(len(images)))
    places = range(0, len(order), share)
    assert not any(images) or all(any(images[i] for i in order[at : at + share]) for at in places)
    bare = sum(not any(images[i] for i in plain[at : at + share]) for at in places) if any(images) else 0
    assert sum(one != other for one, other in zip(order, plain)) == 2 * bare


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"learning_rat": 1}}, "unknown argument of the trainer learning_rat; valid ones are"),
        ({"lora": {"rank": 2}}, "unknown option of LoRA rank"),
        ({"routing": {"text": {}}}, "no part text; it has"),
        ({"routing": {"language": {"capacty": 1}}}, "unknown routing option capacty"),
        ({"routing": {"language": {"capacity": 0.01}}}, "keeps none of 16 image tokens"),
    ],
)
def test_wrong_configs_are_named(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(vlm_config(folder, "wrong", **changes), progress=False)


def test_configs_that_exclude_themselves(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.val: null"):
        vlm_config(folder, trainer={"fsdp": "full_shard"})
    with pytest.raises(ValueError, match="trainer must not set seed"):
        vlm_config(folder, trainer={"seed": 1})
    with pytest.raises(ValueError, match="frozen must be several values, each one of 'vision'"):
        vlm_config(folder, frozen=["tower"])
    with pytest.raises(ValueError, match="names no part"):
        vlm_config(folder, routing={})
    with pytest.raises(ValueError, match="either"):
        ModelConfig()
    with pytest.raises(ValueError, match=r"needs model\.processor"):
        ModelConfig(config=MODEL)


def test_kinds_that_need_no_image_do_not_count() -> None:
    assert mean_over_kinds({"count": 50.0, "text": 100.0}) == 50.0
    assert mean_over_kinds({"text": 100.0}) == 100.0


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "vlm").glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_are_read_and_say_what_they_are(path: Path) -> None:
    config = TrainConfig.load(path)
    assert config.output == f"runs/vlm/{path.stem}"
    if config.trainer.get("bf16"):
        config = replace(config, trainer={k: v for k, v in config.trainer.items() if k not in ("bf16", "deepspeed")})
    training_arguments(config, progress=False)
    header = path.read_text().split("output:")[0]
    for entry in ("Source row:", "Command:", "Source's figure:", f"tools/finetune_vlm.py configs/vlm/{path.name}"):
        assert header.count(entry) == 1, entry
    assert "Time:" in header or "Hours:" in header


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "vlm").glob("tiny-*.yaml")), ids=lambda path: path.stem)
def test_tiny_configs_build_what_they_route(path: Path, folder: Path) -> None:
    dense = TrainConfig.load(ROOT / "configs/vlm/tiny-llava.yaml")
    config = replace(TrainConfig.load(path), model=dense.model)
    model, _ = create_model(config, on_meta=True)
    assert mmod.is_routed(model) == (config.routing is not None)


@pytest.mark.slow
@pytest.mark.parametrize("routing", [P_MOD, PREDICTOR], ids=["p-mod", "predictor"])
def test_two_processes_train_as_one(folder: Path, routing: Any) -> None:
    fields = {"max_steps": 3, "save_strategy": "no", "logging_steps": 1, "max_grad_norm": 0.0}
    name = f"predicted-{routing is PREDICTOR}"
    one = vlm_config(folder, f"one-{name}", {**fields, "per_device_train_batch_size": 4}, routing=routing)
    single = fit(one, progress=False)
    script = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
        "from tests.training.chat.configs import vlm_config; from mmod.training.chat.recipe import fit\n"
        f"fields = {fields!r} | {{'per_device_train_batch_size': 2, 'use_cpu': True, 'ddp_backend': 'gloo'}}\n"
        f"fit(vlm_config(Path(sys.argv[1]), 'two-{name}', fields, routing={routing!r}), progress=False)\n"
    )
    (folder / "two.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [str(folder / "two.py"), str(folder), str(ROOT)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    other = read_outcome(folder / f"two-{name}")
    assert other is not None
    losses = [[entry["loss"] for entry in result.history if "loss" in entry] for result in (single, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert single.answers is not None
    assert other.answers is not None
    assert other.answers.asked == single.answers.asked
    one_weights, two_weights = weights(single), weights(other)
    for name, value in one_weights.items():
        torch.testing.assert_close(two_weights[name], value, rtol=1e-3, atol=1e-4)


def test_two_processes_that_split_the_model_train_as_one(folder: Path) -> None:
    for name in RUNS:
        fit(run_config(folder, name, 1), progress=False)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [str(Path(__file__).with_name("fsdp_worker.py")), str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    split = json.loads((folder / "split.json").read_text())
    assert len(split) == len(RUNS) * (4 + 2)
    assert all(split)
    for name in RUNS:
        single, other = (read_outcome(folder / f"{name}-{processes}") for processes in (1, 2))
        assert single is not None
        assert other is not None
        losses = [[entry["loss"] for entry in result.history if "loss" in entry] for result in (single, other)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        one, two = weights(single), weights(other)
        assert one.keys() == two.keys()
        for key, value in one.items():
            torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-4)
        assert same(mmod.load_pretrained(folder / f"{name}-whole").state_dict(), two)
