"""One of two processes that split a routed model whose blocks were found by structure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import mmod
from tests.kit.vision_zoo import make_pixels, make_vision, output_of

LEARNED = mmod.RoutingConfig(router=mmod.score("linear", init_std=0.3), gate="sigmoid", blocks="every_other")
CASES: dict[str, tuple[str, Any]] = {
    "halves": ("dinov2", "gradual"),
    "rotary": ("mlcd", LEARNED),
    "learned": ("siglip", LEARNED),
    "training only": ("dinov2", mmod.preset("gradual", training_only=True)),
    "random": ("siglip", mmod.RoutingConfig(router="random", blocks=(1, 2), training_only=True)),
}


def routed(case: str) -> nn.Module:
    """Return the routed model of a case, in training."""
    name, config = CASES[case]
    return mmod.route_(make_vision(name), config).train()


def loss_of(model: nn.Module, case: str, rank: int) -> Tensor:
    """Return the loss of a process's own images."""
    return output_of(model(**make_pixels(CASES[case][0], 2, seed=rank))).square().mean()


def answer_of(model: nn.Module, case: str) -> Tensor:
    """Return what a model says in evaluation, which `train()` follows."""
    with torch.no_grad():
        answer = output_of(model.eval()(**make_pixels(CASES[case][0], 2, seed=7)))
    model.train()
    return answer


def train_split(folder: Path) -> None:
    """Evaluate every case split, take a step of training, and save answer, loss and gradients."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2,))
    for case in CASES:
        model = routed(case)
        for block in mmod.routed_blocks(model).values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        answer = answer_of(model, case)
        loss = loss_of(model, case, rank)
        loss.backward()
        losses = [torch.zeros(()) for _ in range(2)]
        dist.all_gather(losses, loss.detach())
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
        if rank == 0:
            torch.save({"answer": answer, "losses": losses, "gradients": gradients}, folder / f"{case}.pt")
    dist.destroy_process_group()
