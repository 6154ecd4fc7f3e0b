"""One of two processes that train a model: the second keeps no token."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mmod
from tests.kit.zoo import make_images, make_model

NAME = "vit_medium_patch16_gap_240"


def starved(rank: int) -> nn.Module:
    """Return the model as a process routes it: the first one keeps every token, the second one none."""
    config = mmod.RoutingConfig(router=mmod.score("linear", init_std=0.3), select=mmod.Threshold(float(rank)))
    return mmod.route_(make_model(NAME, depth=2), config).train()


def loss_of(model: nn.Module, rank: int) -> Tensor:
    """Return the loss of a process's own images."""
    return model(make_images(NAME, 2, seed=rank)).square().mean()


def save_gradients(folder: Path, way: str) -> None:
    """Take gradients together, by "ddp" or "fsdp", and save them."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = starved(rank)
    if way == "fsdp":
        mesh = dist.init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss_of(model, rank).backward()
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    else:
        replica = DistributedDataParallel(model)
        loss_of(replica, rank).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
    if rank == 0:
        torch.save(gradients, folder / f"{way}.pt")
    dist.destroy_process_group()
