"""transformers' Trainer for routed models, and its checkpoints in a run folder."""

from __future__ import annotations

import copy
import dataclasses
import functools
import shutil
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import seed_worker

from mmod.adapters import find_stacks
from mmod.blocks import host_class
from mmod.data.corrupt import original_errors
from mmod.data.readers.chat import ChatCollator, LengthSampler
from mmod.data.readers.conversations import ChatDataset, ChatSample
from mmod.io.files import UnwrittenError, writing
from mmod.io.progress import progress_bar
from mmod.io.stop import heeding
from mmod.io.sums import check_sums, write_sums
from mmod.io.tensors import tensor_names
from mmod.losses import auxiliary_loss
from mmod.methods import methods_of
from mmod.opening.runs import CHECKPOINTS, checkpoint_folders, list_checkpoints
from mmod.opening.transformers import hidden_bars
from mmod.training.chat.config import TrainConfig
from mmod.training.chat.evaluate import RIGHT
from mmod.training.engine.checkpoint import read_newest
from mmod.training.engine.distributed import StopRequest, sum_over_processes, wait_for_all
from mmod.training.engine.groups import OptimConfig
from mmod.training.engine.health import RouterHealth, logged_figures, rows_of_logs, write_rows
from mmod.training.engine.kind import AfterStep, Step
from mmod.training.engine.logging import note, note_resumed
from mmod.training.engine.optim import complete_states, create_optimizer
from mmod.training.engine.task import all_finite
from mmod.values import refuse_unknown

_FAULTS = "faults"
_GATHERED = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def training_arguments(config: TrainConfig) -> TrainingArguments:
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
    defaults = {
        "report_to": "none",
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
        "metric_for_best_model": None,
        # Without an accelerator, torch warns of it.
        "dataloader_pin_memory": torch.accelerator.is_available(),
    }
    if options.get("load_best_model_at_end"):
        defaults["metric_for_best_model"] = RIGHT
    chosen = {**defaults, **options}
    for name, value in chosen.items():
        # YAML reads the word no as False.
        if name.endswith("_strategy") and value is False:
            chosen[name] = "no"
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
    if arguments.save_total_limit == 1:
        # The trainer removes the older ones before the newest counts as finished.
        arguments.save_total_limit = 2
    return arguments


class RoutedTrainer(Trainer):
    """A Trainer for dense and routed vision-language models.

    It adds the auxiliary losses of methods to the model's loss, and the statistics of routers to the logs. It overrides
    and uses documented methods of the trainer alone.

    Args:
        optim: Name of one of timm's optimisers; None for the trainer's own.
        ask: Returns figures of a model's answers to questions; None without any.

    Attributes:
        last_saved: The folder that weights were written to last.
    """

    last_saved: Path | None = None

    def __init__(
        self, optim: str | None = None, ask: Callable[[nn.Module], dict[str, float]] | None = None, **options: Any
    ) -> None:
        arguments = options["args"]
        model = options["model"]
        if isinstance(options.get("train_dataset"), ChatDataset):
            options["data_collator"] = functools.partial(_collate, options["data_collator"])
        if arguments.fsdp:
            names = arguments.fsdp_plugin_args.get("transformer_cls_names_to_wrap")
            arguments.fsdp_plugin_args["transformer_cls_names_to_wrap"] = ",".join(_layer_classes(model, names))
        super().__init__(**options)
        if arguments.fsdp and not self.is_fsdp_enabled:
            raise ValueError("fsdp splits models over GPUs: accelerate would leave this one whole in every process")
        if self.args.n_gpu > 1:
            raise ValueError(f"{self.args.n_gpu} GPUs in one process: start one process for each with torchrun")
        self.optim = optim
        self._ask = ask
        module: Any = self.model
        self._health = RouterHealth(module, measured=not arguments.torch_compile)
        self._losses = None
        if any(method.has_loss for method in methods_of(module)):
            self._losses = _AuxiliaryLosses()
            # A hook, because the trainer calls a wrapper of the model.
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
        inputs: dict[str, object],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the model's loss with the auxiliary losses; see `transformers.Trainer.compute_loss`."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        step = self.state.global_step + 1
        # At the steps that are logged, as the trainer counts them.
        logged = self.args.logging_strategy != "steps" or step == 1 or step % self.state.logging_steps == 0
        if model.training and logged:
            self._health.read()
        if model.training and self._losses is not None:
            auxiliary = self._losses.take()
            # The model's loss is then a sum over all accumulated batches, of which this is one.
            if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
                auxiliary = auxiliary / self.current_gradient_accumulation_steps
            loss = loss + auxiliary.to(loss.dtype)
        # Before the step changes the weights, in all processes at once.
        if model.training:
            is_bad = ~loss.detach().isfinite()
            if int(sum_over_processes(is_bad.sum())):
                self._end(f"the loss stopped being finite at step {step}")
        if return_outputs:
            return loss, outputs
        return loss

    def _end(self, reason: str) -> NoReturn:
        checkpoints = list_checkpoints(Path(str(self.args.output_dir)))
        good = next(iter(checkpoints), "none was written yet")
        raise FloatingPointError(
            f"{reason}; last good checkpoint: {good}. "
            "A smaller trainer.learning_rate or max_grad_norm, or float32, may help"
        )

    def evaluate(
        self, eval_dataset: object = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Answer the questions; see `transformers.Trainer.evaluate`. The data are those of `ask`."""
        assert self._ask is not None
        figures = self._ask(self.accelerator.unwrap_model(self.model))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        # The statistics of routers belong to the steps of training.
        super().log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the statistics of routers."""
        logs |= logged_figures(self._health.take(self.state.global_step))
        super().log(logs, start_time)

    def get_train_dataloader(self) -> DataLoader[object]:
        """Return the loader of the training data, in the order of `length_sampler` if there is one."""
        sampler = length_sampler(self.train_dataset, self.args)
        if sampler is None:
            return super().get_train_dataloader()
        args = self.args
        dataset: Any = self.train_dataset
        # The trainer names the options of loaders so.
        prefix = "dataloader_"
        names = [item.name for item in dataclasses.fields(args) if item.name.startswith(prefix)]
        loader: DataLoader[object] = DataLoader(
            dataset,
            args.train_batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
            worker_init_fn=functools.partial(
                seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
            ),
            **{name.removeprefix(prefix): getattr(args, name) for name in names},
        )
        return self.accelerator.prepare(loader)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Read the batches of a step, and count their faults; see `transformers.Trainer.get_batch_samples`."""
        with original_errors():
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        dataset: Any = self.train_dataset
        for batch in batches:
            if _FAULTS in batch:
                dataset.report.add(batch.pop(_FAULTS))
        return batches, items

    def save_model(self, output_dir: str | None = None, *arguments: Any, **options: Any) -> None:
        """Save the weights by the names of the model's own modules; see `transformers.Trainer.save_model`.

        Raises:
            UnwrittenError: The run folder is gone. transformers would create it anew, with these weights alone.
            FloatingPointError: A weight is not finite: an infinite gradient of a finite loss went into it.
        """
        model: Any = self.model
        run = Path(str(self.args.output_dir)).parent
        self.last_saved = Path(output_dir or str(self.args.output_dir))
        if not run.is_dir():
            raise UnwrittenError(f"{str(self.last_saved)!r} could not be written: the folder {str(run)!r} is gone")
        if not self.is_split and not all_finite(model.parameters()):
            self._end(f"the weights stopped being finite by step {self.state.global_step}")
        if not hasattr(model, "peft_config"):
            # The trainer reads a checkpoint by the names of modules, and not by those of published weights.
            model.save_pretrained = functools.partial(type(model).save_pretrained, model, save_original_format=False)
        try:
            super().save_model(output_dir, *arguments, **options)
        finally:
            vars(model).pop("save_pretrained", None)

    @property
    def is_split(self) -> bool:
        """Whether the weights are split over processes."""
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        """Train; see `transformers.Trainer.train`.

        Raises:
            ValueError: The checkpoint has other names than the model.
            UnwrittenError: A checkpoint could not be written; what was written of it is removed.
        """
        if resume_from_checkpoint is not None and not self.is_split:
            check_names(Path(resume_from_checkpoint), self.model)
        try:
            return super().train(resume_from_checkpoint, *arguments, **options)
        except Exception:
            finished = list_checkpoints(Path(str(self.args.output_dir)))
            path = self.last_saved
            # A checkpoint that was finished before did not fail for want of room.
            if path is None or path in finished:
                raise
            try:
                with writing(path, kept=next(iter(finished), None)):
                    raise
            except UnwrittenError:
                shutil.rmtree(path, ignore_errors=True)
                raise


def length_sampler(dataset: object, args: TrainingArguments) -> LengthSampler | None:
    """Return the order of training conversations; None for that of the trainer."""
    grouped = args.train_sampling_strategy == "group_by_length"
    # Plain data parallelism finds unused weights by itself, unless gradients are checkpointed.
    waits = args.fsdp or args.deepspeed or args.activation_checkpointing
    together = args.world_size > 1 and bool(waits)
    if not isinstance(dataset, ChatDataset) or not (grouped or together):
        return None
    # Letters only: images have the same length in most models; the number of images weighs most.
    # Images first, then letters: one number sorts by both.
    lengths = dataset.images * (1 + int(dataset.letters.max())) + dataset.letters
    if not grouped:
        lengths = np.zeros_like(lengths)
    share = args.train_batch_size
    images = dataset.images if together else None
    return LengthSampler(lengths, share * args.world_size, args.seed, images, share)


def check_names(checkpoint: Path, model: Any) -> None:
    """Refuse a checkpoint whose weights have other names than those that the model saves; the trainer would go on."""
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict

        expected = set(get_peft_model_state_dict(model))
    else:
        expected = set(model.state_dict())
    saved = set(chain.from_iterable(tensor_names(path) for path in checkpoint.glob("*.safetensors")))
    # Of tied weights, one name is saved.
    wrong = sorted((saved ^ expected) - set(getattr(model, "all_tied_weights_keys", None) or ()))
    if wrong:
        raise ValueError(
            f"the checkpoint {str(checkpoint)!r} does not fit the model in {len(wrong)} names, {', '.join(wrong[:3])}: "
            "go on with the versions that wrote it, or choose another output"
        )


def _collate(collator: ChatCollator, chats: Sequence[ChatSample]) -> dict[str, object]:
    """Return a batch, with the faults of conversations that others replace if there are any."""
    batch = collator(chats)
    faults = list(chain.from_iterable(chat.faults for chat in chats))
    if faults:
        batch = {**batch, _FAULTS: faults}
    return batch


class _AuxiliaryLosses:
    """A forward hook that collects the auxiliary losses, and makes the model's loss depend on them with weight 0.

    Data parallelism derives the used weights from the outputs. It would report a router that only its auxiliary loss
    reaches as unused, and its gradient as a second one.
    """

    _loss: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[object, ...], output: Any) -> object:
        if not module.training or output.get("loss") is None:
            return None
        self._loss = auxiliary_loss(module)
        # With weight 0: backward hooks of wrapped models see every parameter that takes part.
        output["loss"] = output["loss"] + 0.0 * self._loss.to(output["loss"])
        return output

    def take(self) -> Tensor:
        """Return the losses of the last pass, once."""
        assert self._loss is not None
        loss = self._loss
        self._loss = None
        return loss


def _layer_classes(model: nn.Module, names: str | None) -> list[str]:
    """Return the classes of layers that are sharded one by one: all that can be routed, or those of some host classes.

    The names in the models are no use: LLaVA names layers that it does not have.
    """
    if names is None:
        layers = chain.from_iterable(stack.blocks for stack in find_stacks(model).values())
        return sorted({type(layer).__name__ for layer in layers})
    classes: set[str] = set()
    for name in names.split(","):
        matches = []
        for module in model.modules():
            if name in (type(module).__name__, host_class(module).__name__):
                matches.append(type(module).__name__)
        classes |= set(matches or [name])
    return sorted(classes)


@dataclasses.dataclass(eq=False)
class RunCallback(TrainerCallback):
    """Writes the config after the first step, shows a bar, finishes checkpoints, and stops after a signal."""

    write_config: Callable[[], object] | None
    after_step: AfterStep
    stop: StopRequest
    progress: bool
    folder: Path
    stopped: bool = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **_: object) -> None:
        """Show the bar, and where the run resumes; remove what a kill interrupted."""
        if args.should_save:
            folder = Path(str(args.output_dir))
            for path in set(checkpoint_folders(folder)) - set(list_checkpoints(folder)):
                # The trainer would keep it in place of a finished one.
                shutil.rmtree(path)
        if self.progress and state.global_step:
            note_resumed(self.folder, state.global_step, state.max_steps)
        shown = self.progress and state.is_world_process_zero
        self._bar = progress_bar(
            desc="train", total=state.max_steps, initial=state.global_step, unit="steps", shown=shown
        )

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict[str, float] | None = None, **_: object
    ) -> None:
        """Show loss and learning rate, and of which step, as few are logged; the summary at the end has neither."""
        named_logs = {"loss": "loss", "lr": "learning_rate", "epoch": "epoch"}
        if logs is not None and "loss" in logs:
            shown = {name: f"{logs[key]:.4g}" for name, key in named_logs.items() if key in logs}
            self._bar.set_postfix({"at step": state.global_step, **shown}, refresh=False)

    def on_evaluate(
        self, args: object, state: TrainerState, control: object, metrics: dict[str, float] | None = None, **_: object
    ) -> None:
        """Show how many answers are right."""
        if metrics is not None and self.progress and state.is_world_process_zero:
            right, loss = metrics[f"eval_{RIGHT}"], metrics["eval_loss"]
            note(f"step {state.global_step}: {right:.2f} % of the answers right, loss {loss:.4g}")

    def on_train_end(self, *_: object, **__: object) -> None:
        """Close the bar."""
        self._bar.close()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_: object,
    ) -> None:
        """Write the config once; stop after a signal; complete the states of a split optimiser, which may be saved."""
        self._bar.update(state.global_step - self._bar.n)
        if args.fsdp:
            complete_states(optimizer)
        if self.write_config is not None:
            self.write_config()
            self.write_config = None
        self.after_step(Step(state.global_step, state.max_steps, model, None, optimizer))
        if self.stop.agreed() and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: object, **_: object) -> None:
        """Finish the checkpoint, and write `routers.csv`; what a stopped run has saved stays its last."""
        if self.stopped:
            # The trainer ends as after the last step: it would read the best weights, and remove all others.
            args.load_best_model_at_end = False
            args.save_total_limit = None
        # Every process writes files of its own.
        wait_for_all()
        if args.should_save:
            write_sums(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")
            write_rows(Path(str(args.output_dir)).parent, rows_of_logs(state.log_history))


def train_to_end(
    trainer: RoutedTrainer, folder: Path, write_config: Callable[[], object], after_step: AfterStep, progress: bool
) -> None:
    """Train in a run folder, from its last checkpoint if it has one; exit after a stop signal, whose step is saved.

    Args:
        write_config: Writes the config into the folder.
    """
    saves = trainer.args.should_save
    with heeding(StopRequest()) as stop, hidden_bars():
        shows = progress and bool(trainer.args.disable_tqdm)
        callback = RunCallback(write_config if saves else None, after_step, stop, shows, folder)
        trainer.add_callback(callback)
        # The bar shows what it prints.
        trainer.remove_callback(PrinterCallback)
        trainer.train(last_checkpoint(folder / CHECKPOINTS))
        if callback.stopped:
            stop.leave(folder, trainer.state.global_step, loud=saves)


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest checkpoint in a trainer's folder, after checking it; None without finished ones."""
    newest = read_newest(list_checkpoints(folder), check_sums)
    if newest is None:
        return None
    return str(newest[0])
