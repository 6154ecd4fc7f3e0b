"""How the processes of a run share its model: whole in each of them, or in shards (FSDP2)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timm.utils import distribute_bn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mmod.adapters import find_stacks
from mmod.plain import without
from mmod.training.engine.checkpoint import Checkpoint, load_checkpoint
from mmod.training.engine.distributed import Process
from mmod.training.engine.optim import complete_states
from mmod.training.engine.task import Task

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Replicas:
    """The whole model in each process; DistributedDataParallel averages the gradients of several."""

    def __init__(
        self, model: nn.Module, average: nn.Module | None, process: Process, precision: str, *, compiled: bool
    ) -> None:
        self.model = model
        self.average = average
        self.process = process
        self.models = [model] if average is None else [model, average]
        if compiled:
            # In place, so that the names of weights stay.
            model.compile()

    def wrap(self, task: Task) -> nn.Module:
        """Return the module to call in training."""
        if self.process.world == 1:
            return task
        devices = None
        if self.process.device.type == "cuda":
            devices = [self.process.device]
        # It sums gradients in other groups in its first step than in later ones: after a resumption, sums of three
        # processes or more may be rounded differently.
        return DistributedDataParallel(task, device_ids=devices)

    def local(self, wrapped: nn.Module) -> AbstractContextManager[object]:
        """Context of a pass whose gradients are not exchanged, because others of the step follow."""
        if isinstance(wrapped, DistributedDataParallel):
            return wrapped.no_sync()
        return nullcontext()

    def before_update(self) -> None:
        """Finish the gradients of a step."""

    def average_statistics(self) -> None:
        """Average the running statistics of batch norms over processes, so that all have the model that is saved."""
        if self.process.world > 1:
            # Weights are equal after a step; running statistics are those of a process's batches.
            for model in self.models:
                distribute_bn(model, self.process.world, reduce=True)

    def full_weights(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """Context with all weights of a model in each process, to evaluate and to export it."""
        return nullcontext(model)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, object], dict[str, Tensor] | None]:
        """Return the optimiser's state: plain values, which may hold tensors, and tensors that are sharded, if any."""
        return optimizer.state_dict(), None

    def load(self, path: Path, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Load weights, moving average and optimiser from a checkpoint in place; return its state of training."""
        checkpoint = load_checkpoint(path, averaged=self.average is not None)
        self._load(checkpoint)
        optimizer.load_state_dict(checkpoint.training["optimizer"])
        return checkpoint.training

    def _load(self, checkpoint: Checkpoint) -> None:
        self.model.load_state_dict(checkpoint.weights)
        if self.average is not None and checkpoint.average is not None:
            self.average.load_state_dict(checkpoint.average)


class Shards(Replicas):
    """A share of weights, moving average, gradients and moments in each process: FSDP2, block by block.

    With `precision` "bf16", weights are gathered and used in bf16; they are kept, and gradients averaged, in fp32.
    """

    def __init__(
        self, model: nn.Module, average: nn.Module | None, process: Process, precision: str, *, compiled: bool
    ) -> None:
        # Blocks are compiled one by one below, between the hooks that gather their weights.
        super().__init__(model, average, process, precision, compiled=False)
        # Evaluations and exports need the host's plain modules, so a copy is made before sharding.
        self._full = copy.deepcopy(model)
        mesh = init_device_mesh(process.device.type, (process.world,))
        half = torch.bfloat16 if precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for module in filter(None, (model, average)):
            # FSDP2 shards no scalars, such as CLIP's logit scale.
            ignored = {weight for weight in module.parameters() if not weight.ndim}
            # Blocks first, the model last: FSDP2 gathers the weights of a block just before it runs.
            stacks = find_stacks(module).values()
            for block in chain.from_iterable(stack.blocks for stack in stacks):
                if compiled and module is model:
                    block.compile()
                fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=ignored)
            fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)
            module.to(process.device)
        self._scalars = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]

    def wrap(self, task: Task) -> nn.Module:
        """Return the task, whose model communicates by itself."""
        return task

    @contextmanager
    def local(self, wrapped: nn.Module) -> Iterator[None]:
        """Context of a pass whose gradients are not exchanged; see `Replicas.local`."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def before_update(self) -> None:
        """Average the gradients of scalars."""
        # FSDP2 ignores them, and does not average their gradients either.
        for weight in self._scalars:
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
                weight.grad /= self.process.world

    @contextmanager
    def full_weights(self, model: nn.Module) -> Iterator[nn.Module]:
        """Context with a copy of a model that is not sharded; see `Replicas.full_weights`."""
        weights = self._full.to(self.process.device).state_dict()
        try:
            for name, value in model.state_dict().items():
                # Collective: all processes walk the state dict in the same order.
                if isinstance(value, DTensor):
                    value = value.full_tensor()
                weights[name].copy_(value)
            yield self._full
        finally:
            # Off the device between evaluations: whole weights are what shards are there to avoid.
            self._full.cpu()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, object], dict[str, Tensor] | None]:
        """Return the optimiser's state by names of weights; see `Replicas.optimizer_state`."""
        complete_states(optimizer)
        state: Mapping[str, object] = get_optimizer_state_dict(self.model, optimizer, options=_FLAT)
        moments = {
            name: value for name, value in state.items() if name.startswith("state.") and isinstance(value, Tensor)
        }
        return without(state, moments), moments

    def load(self, path: Path, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Load a checkpoint that any number of processes wrote; see `Replicas.load`."""
        # A new optimiser makes the moments that are loaded in a step without gradients.
        _, moments = self.optimizer_state(optimizer)
        checkpoint = load_checkpoint(path, into=Checkpoint.of(self.model, self.average, {}, moments))
        self._load(checkpoint)
        state = {**checkpoint.training["optimizer"], **(checkpoint.moments or {})}
        set_optimizer_state_dict(self.model, optimizer, state, options=_FLAT)
        return checkpoint.training
