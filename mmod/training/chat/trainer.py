"""transformers' Trainer for routed models, and the order of conversations in it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import Sampler
from transformers import Trainer, TrainingArguments

from mmod import auxiliary_loss
from mmod.adapters import find_stacks
from mmod.blocks import host_class
from mmod.data.corrupt import original_errors
from mmod.data.readers.conversations import ChatDataset
from mmod.io.files import UnwrittenError, writing
from mmod.io.tensors import read_tensors, write_tensors
from mmod.methods import methods_of
from mmod.training.chat.checkpoints import finished_checkpoints
from mmod.training.chat.config import TrainConfig
from mmod.training.chat.model import check_routers_learn, router_parameters
from mmod.training.engine.checkpoint import write_sums
from mmod.training.engine.config import OptimConfig
from mmod.training.engine.distributed import wait_for_all
from mmod.training.engine.health import RouterHealth, named
from mmod.training.engine.optim import complete_states, create_optimizer
from mmod.values import refuse_unknown

CHECKPOINTS = "checkpoints"
"""Folder of the trainer's checkpoints in the run folder."""
_ROUTERS = "routers.safetensors"
_GATHERED = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def training_arguments(config: TrainConfig) -> Any:
    """Return transformers' training arguments of a run.

    Example:
        >>> from mmod.training.chat.config import ModelConfig
        >>> run = TrainConfig(output="run", model=ModelConfig(checkpoint="x"), trainer={"learning_rate": 2e-5})
        >>> training_arguments(run).learning_rate
        2e-05
    """
    known = [item.name for item in dataclasses.fields(TrainingArguments) if item.init]
    refuse_unknown("argument of the trainer", config.trainer, known)
    # A copy, because the trainer changes the options of fsdp and deepspeed in place.
    options = copy.deepcopy(config.trainer)
    chosen = {"report_to": "none", "disable_tqdm": True, "logging_nan_inf_filter": False, **options}
    # YAML reads the word no as False.
    chosen |= {name: "no" for name, value in chosen.items() if name.endswith("_strategy") and value is False}
    arguments = TrainingArguments(
        output_dir=str(Path(config.output) / CHECKPOINTS),
        seed=config.seed,
        data_seed=config.seed,
        remove_unused_columns=False,
        label_names=["labels"],
        **chosen,
    )
    deepspeed = getattr(arguments, "hf_deepspeed_config", None)
    if deepspeed is not None and deepspeed.is_zero3() and not deepspeed.get_value(_GATHERED):
        raise ValueError(f"ZeRO-3 would not gather the final model: set {_GATHERED} in trainer.deepspeed to true")
    return arguments


class RoutedTrainer(Trainer):
    """A Trainer for dense and routed vision-language models.

    It adds the auxiliary losses of methods to the model's loss, the statistics of routers to the logs, and the weights
    of routers to checkpoints of adapters.

    Args:
        optim: Name of one of timm's optimisers; None for the trainer's own.
        options: Arguments of `transformers.Trainer`.
    """

    def __init__(self, optim: str | None = None, **options: Any) -> None:
        arguments, model = options["args"], options["model"]
        check_routers_learn(model)
        if arguments.fsdp:
            names = arguments.fsdp_plugin_args.get("transformer_cls_names_to_wrap")
            arguments.fsdp_plugin_args["transformer_cls_names_to_wrap"] = ",".join(_layer_classes(model, names))
        super().__init__(**options)
        if arguments.fsdp and not self.is_fsdp_enabled:
            raise ValueError("fsdp splits models over GPUs: accelerate would leave this one whole in every process")
        if self.args.n_gpu > 1:
            raise ValueError(f"{self.args.n_gpu} GPUs in one process: start one process for each with torchrun")
        self.optim = optim
        module: Any = self.model
        self._health = RouterHealth(module, measured=not arguments.torch_compile)
        self._losses = _AuxiliaryLosses() if any(method.has_loss for method in methods_of(module)) else None
        if self._losses is not None:
            module.register_forward_hook(self._losses)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimiser; see `transformers.Trainer.create_optimizer`."""
        if self.optim is None or self.optimizer is not None:
            return super().create_optimizer(model)
        config = OptimConfig(self.optim, lr=self.args.learning_rate, weight_decay=self.args.weight_decay)
        module: Any = self.model if model is None else model
        self.optimizer = create_optimizer(config, module)
        return self.optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the model's loss with the auxiliary losses; see `transformers.Trainer.compute_loss`."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        step = self.state.global_step + 1
        logged = self.args.logging_strategy != "steps" or step == 1 or step % self.state.logging_steps == 0
        if model.training and logged:
            self._health.read()
        if model.training and self._losses is not None:
            auxiliary = self._losses.take()
            # The model's loss is then a sum over all accumulated batches, of which this is one.
            if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
                auxiliary = auxiliary / self.current_gradient_accumulation_steps
            loss = loss + auxiliary.to(loss.dtype)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the statistics of routers."""
        logs |= named(self._health.take(self.state.global_step))
        super().log(logs, start_time)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        grouped = self.args.train_sampling_strategy == "group_by_length"
        # Plain data parallelism finds unused weights by itself, unless gradients are checkpointed.
        waits = self.args.fsdp or self.args.deepspeed or self.args.gradient_checkpointing
        together = self.args.world_size > 1 and bool(waits)
        if not isinstance(dataset, ChatDataset) or not (grouped or together):
            return super()._get_train_sampler(train_dataset)
        # Letters only: images have the same length in most models; the number of images weighs most.
        lengths = dataset.images * (1 + int(dataset.letters.max())) + dataset.letters
        share, seed = self.args.train_batch_size, int(self.args.seed)
        lengths = lengths if grouped else np.zeros_like(lengths)
        return LengthSampler(lengths, share * self.args.world_size, seed, dataset.images if together else None, share)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(str(self.args.output_dir))
        path = folder / f"checkpoint-{self.state.global_step}"
        if not folder.parent.is_dir():
            # transformers would create it anew, with this checkpoint alone.
            raise UnwrittenError(f"{str(path)!r} could not be written: the folder {str(folder.parent)!r} is gone")
        try:
            with writing(path, kept=next(iter(finished_checkpoints(folder)), None)):
                super()._save_checkpoint(model, trial)
                # Every process writes files of its own.
                wait_for_all()
                if self.args.should_save:
                    write_sums(path)
        except UnwrittenError:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Read the batches of a step; see `transformers.Trainer.get_batch_samples`."""
        with original_errors():
            return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        model: Any = self.model
        folder = str(output_dir or self.args.output_dir)
        if not _has_adapters(model):
            # By the names of its own modules: a checkpoint is read by them, and not by those of published weights.
            model.save_pretrained = functools.partial(type(model).save_pretrained, model, save_original_format=False)
        try:
            super()._save(folder, state_dict)
        finally:
            vars(model).pop("save_pretrained", None)
        if _has_adapters(model) and self.args.should_save:
            # They are not saved with adapters.
            routers = {name: (state_dict or {}).get(name, value) for name, value in router_parameters(model).items()}
            if routers:
                write_tensors(Path(folder) / _ROUTERS, routers)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_fsdp_enabled:
            complete_states(self.optimizer)
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        path = Path(resume_from_checkpoint) / _ROUTERS
        if path.exists():
            module: Any = self.model if model is None else model
            weights = router_parameters(module)
            with torch.no_grad():
                for name, value in read_tensors(path)[0].items():
                    weight = weights[name]
                    if isinstance(weight, DTensor):
                        value = distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
                    weight.copy_(value)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        module: Any = self.model
        tied = set(getattr(module, "all_tied_weights_keys", None) or {})
        wrong = [*(set(load_result.missing_keys) - tied), *load_result.unexpected_keys]
        if wrong:
            raise ValueError(
                f"the checkpoint does not fit the model in {len(wrong)} names, {', '.join(sorted(wrong)[:3])}"
            )


class _AuxiliaryLosses:
    """A forward hook that collects the auxiliary losses, and makes the model's loss depend on them with weight 0.

    Data parallelism derives the used weights from the outputs. It would report a router that only its auxiliary loss
    reaches as unused, and its gradient as a second one.
    """

    def __init__(self) -> None:
        self._loss: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not module.training or output.get("loss") is None:
            return None
        self._loss = auxiliary_loss(module)
        output["loss"] = output["loss"] + 0.0 * self._loss.to(output["loss"])
        return output

    def take(self) -> Tensor:
        """Return the losses of the last pass, once."""
        assert self._loss is not None
        loss, self._loss = self._loss, None
        return loss


def _layer_classes(model: nn.Module, names: str | None) -> list[str]:
    """Return the classes of layers that are sharded one by one: all that can be routed, or those of some host classes.

    The names in the models are no use: LLaVA names layers that it does not have.
    """
    if names is None:
        layers = [block for stack in find_stacks(model).values() for block in stack.blocks]
        return sorted({type(layer).__name__ for layer in layers})
    classes: set[str] = set()
    for name in names.split(","):
        matches = [type(m).__name__ for m in model.modules() if name in (type(m).__name__, host_class(m).__name__)]
        classes |= set(matches or [name])
    return sorted(classes)


def _has_adapters(model: Any) -> bool:
    return hasattr(model, "peft_config")


# Batches that are sorted by length together: enough for even batches, few enough that an epoch stays shuffled.
_WINDOW = 8


class LengthSampler(Sampler[int]):
    """Shuffles samples so that batches have similar lengths; a function of seed and epoch.

    Args:
        batch: Samples of one step over all processes.
        images: Images of each sample, if each batch of a process needs one: processes wait for each other's gradients
            of the vision tower. None otherwise.
        share: Samples in a batch of one process.

    Example:
        >>> order = list(LengthSampler([1, 9, 1, 9], batch=2, seed=0))
        >>> sorted(order), order[0] % 2 == order[1] % 2
        ([0, 1, 2, 3], True)
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        batch: int,
        seed: int,
        images: Sequence[int] | np.ndarray | None = None,
        share: int = 1,
    ) -> None:
        self.lengths = np.asarray(lengths)
        self.batch = batch
        self.seed = seed
        self.share = share
        self.seeing = None if images is None or not np.any(images) else np.asarray(images) > 0
        self.epoch = 0
        batches = -(-len(self.lengths) // share)
        if self.seeing is not None and self.seeing.sum() < batches:
            raise ValueError(
                f"{self.seeing.sum()} conversations have an image, and {batches} batches of {share} need one each: use "
                "larger batches, or leave conversations without images out"
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        """Yield the samples of an epoch."""
        order = list(self._shuffled())
        return iter(order if self.seeing is None else _spread(order, self.seeing, self.share))

    def _shuffled(self) -> Iterator[int]:
        rng = np.random.default_rng([self.seed, self.epoch])
        order = rng.permutation(len(self.lengths))
        for start in range(0, len(order), self.batch * _WINDOW):
            window = order[start : start + self.batch * _WINDOW]
            window = window[np.argsort(self.lengths[window], kind="stable")]
            full = len(window) // self.batch * self.batch
            for place in rng.permutation(full // self.batch):
                yield from window[place * self.batch : (place + 1) * self.batch].tolist()
            yield from window[full:].tolist()


def _spread(order: list[int], seeing: np.ndarray, share: int) -> list[int]:
    """Swap the fewest samples such that every batch has one with an image."""
    batches = [order[start : start + share] for start in range(0, len(order), share)]
    donors = [batch for batch in batches if seeing[batch].sum() > 1]
    for batch in batches:
        if seeing[batch].any():
            continue
        donor = donors[-1]
        place = int(np.flatnonzero(seeing[donor])[-1])
        batch[-1], donor[place] = donor[place], batch[-1]
        if seeing[donor].sum() == 1:
            donors.pop()
    return [sample for batch in batches for sample in batch]
