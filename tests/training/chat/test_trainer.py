"""The parts of the trainer: routers' losses, their figures, the order of samples."""

from __future__ import annotations

import ast
import inspect
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Trainer

import mmod
from mmod.data.readers.chat import ChatCollator, LengthSampler
from mmod.data.readers.conversations import open_conversations
from mmod.io.files import UnwrittenError
from mmod.training.chat.start import create_with_processor
from mmod.training.chat.trainer import RoutedTrainer, training_arguments
from mmod.training.engine.health import RouterHealth
from tests.kit.chat_configs import vlm_config


@pytest.mark.parametrize("accumulate", [1, 2])
def test_auxiliary_losses_are_added_once(folder: Path, accumulate: int) -> None:

    gradients = []
    for split in (1, accumulate):
        trainer_fields = {"per_device_train_batch_size": 4 // split, "gradient_accumulation_steps": split}
        fields = {"router": "linear", "capacity": 1.0, "gate": "identity", "losses": {"membership": 0.5}}
        config = vlm_config(folder, trainer=trainer_fields, routing={"language": fields})
        model, processor = create_with_processor(config)
        train, collator = open_conversations(config.data.train, config.data), ChatCollator(processor)
        arguments = training_arguments(config)
        trainer = RoutedTrainer(model=model, args=arguments, train_dataset=train, data_collator=collator)
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


def test_the_trainer_of_transformers_is_used_by_documented_names_alone() -> None:
    inside = list(ast.walk(ast.parse(inspect.getsource(Trainer))))
    private = {node.name for node in inside if isinstance(node, ast.FunctionDef)}
    private |= {node.attr for node in inside if isinstance(node, ast.Attribute)}
    private = {name for name in private if name.startswith("_") and not name.startswith("__")}
    assert {"_save_checkpoint", "_train_batch_size"} <= private
    for path in Path(inspect.getfile(RoutedTrainer)).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        methods = chain.from_iterable(node.body for node in nodes if isinstance(node, ast.ClassDef))
        names = {node.name for node in methods if isinstance(node, ast.FunctionDef)}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert not names & private, path


def test_a_run_folder_that_is_gone_is_not_created_anew(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run/checkpoints"
    trainer: Any = SimpleNamespace(args=SimpleNamespace(output_dir=checkpoints), model=torch.nn.Identity())
    with pytest.raises(UnwrittenError, match=rf"checkpoint-3' could not be .*: the folder '{tmp_path}/run' is gone"):
        RoutedTrainer.save_model(trainer, str(checkpoints / "checkpoint-3"))
    assert not (tmp_path / "run").exists()


def test_health_counts_what_blocks_keep(folder: Path) -> None:
    config = vlm_config(folder, routing={"language": {"router": "linear", "capacity": 0.25}})
    model, processor = create_with_processor(config)
    data = open_conversations(config.data.train, config.data)
    batch = ChatCollator(processor)([data[index] for index in range(6)])
    health = RouterHealth(model.train())
    loss = model(**batch).loss
    health.read()
    loss.backward()
    rows = health.take(1)
    assert [row["block"] for row in rows] == list(mmod.routed_blocks(model))
    for figures in rows:
        name = figures["block"]
        routing = mmod.routed_blocks(model)[name].mod_state.routing
        image = batch["input_ids"] == processor.image_token_id
        assert figures["kept"] == pytest.approx(float(routing.keep_BN[image].float().mean()))
        kept = routing.keep_BN & image
        gates = torch.zeros(image.shape).scatter(1, routing.kept.index_BK, routing.gate_BK.detach())[kept]
        assert figures["gate"] == pytest.approx(float(gates.mean()), rel=1e-5)
        assert figures["gate_std"] == pytest.approx(float(gates.std(unbiased=False)), abs=1e-4)


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
