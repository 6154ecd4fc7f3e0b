"""Routed layers of a model that tensor parallelism splits over processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import mmod
from tests.kit.processes import run_processes

ROUTINGS: dict[str, dict[str, Any]] = {
    "linear": {"router": "linear", "gate": "tanh"},
    "all keys": {"router": "linear", "gate": "tanh", "context": "all"},
    "attention alone": {"router": "linear", "gate": "sigmoid", "operator": "attention"},
    "threshold": {"router": "linear", "select": "threshold"},
}
TOKENS = torch.arange(48).reshape(2, 24) % 64


def outcome(model: Any, name: str) -> dict[str, torch.Tensor]:
    """Route a model; return its logits and the gradients of all weights."""
    torch.manual_seed(1)
    mmod.route_(
        model.train(), mmod.RoutingConfig(blocks=[1, 2], capacity=0.5, losses={"membership": 0.1}, **ROUTINGS[name])
    )
    output = model(input_ids=TOKENS, labels=TOKENS, use_cache=False)
    (output.loss + mmod.auxiliary_loss(model)).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    gradients["logits"] = output.logits.detach()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in gradients.items()}


def split(folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))


def compute(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    for name in ROUTINGS:
        model = split(folder)
        assert isinstance(model.model.layers[1].self_attn.q_proj.weight, DTensor)
        torch.save(outcome(model, name), folder / f"{name}-{torch.distributed.get_rank()}.pt")
    with pytest.raises(ValueError, match="processes would keep different tokens: choose a router and losses that read"):
        mmod.route_(split(folder), mmod.RoutingConfig(router="attention", blocks=[1, 2]))


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).save_pretrained(tmp_path)
    assert run_processes(compute, tmp_path, world=2) == [0, 0]
    for name in ROUTINGS:
        expected = outcome(LlamaForCausalLM.from_pretrained(tmp_path), name)
        for rank in range(2):
            shared = torch.load(tmp_path / f"{name}-{rank}.pt")
            assert shared.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(shared[key], value, rtol=1e-4, atol=1e-6)
