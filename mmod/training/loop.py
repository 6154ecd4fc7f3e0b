"""The training loop: epochs, accumulation, averaging, evaluation, checkpoints and their resumption.

Everything random in an optimiser step follows from (seed, step, process). A checkpoint therefore needs the
weights, their average, the optimiser and the position alone, and a resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from timm.models import save_for_hf
from timm.utils import ModelEmaV3, accuracy, dispatch_clip_grad
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from mmod import is_routed, set_capacity, trace
from mmod.data.loader import BatchStream, DataConfig, create_eval_stream, create_train_stream, normalisation
from mmod.pretrained import save_pretrained
from mmod.training.build import (
    create_criterion,
    create_mixup,
    create_models,
    create_optimizer,
    create_schedule,
)
from mmod.training.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from mmod.training.config import TrainConfig
from mmod.training.distributed import Process, merge_counts, process_group
from mmod.training.evaluation import EvalResult, check_targets, evaluate
from mmod.training.logging import Meters, TensorBoard, write_csv
from mmod.training.run import FitResult, check_folder, read_result, write_record, write_result
from mmod.training.task import ClassificationTask, autocast

__all__ = ["fit", "seed_draws"]

Batch = tuple[Tensor, Tensor]


def fit(
    config: TrainConfig, *, streams: tuple[BatchStream, BatchStream] | None = None, progress: bool = True
) -> FitResult:
    """Train as a config says, from the start or from where the run in its folder stopped.

    Args:
        config: The run's config.
        streams: Training and evaluation batches to use instead of those `config.data` names.
        progress: Show bars.

    Returns:
        The outcome; that of the earlier run when the folder holds a finished run of the same config.

    Raises:
        ValueError: If the folder belongs to another config, or the config does not fit the data or model.
        FloatingPointError: If the loss stops being finite.

    Example:
        >>> import tempfile
        >>> from mmod.data.loader import DataConfig
        >>> from mmod.training import ModelConfig
        >>> folder = tempfile.mkdtemp()
        >>> args = {"img_size": 32, "patch_size": 8, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
        >>> model = ModelConfig("vit_tiny_patch16_224", {**args, "num_classes": 10})
        >>> data = DataConfig("digits:tiny", root=f"{folder}/digits")
        >>> config = TrainConfig(output=f"{folder}/run", model=model, data=data, epochs=1)
        >>> result = fit(config, progress=False)
        >>> result.steps, result.evaluation.samples
        (4, 64)
    """
    with process_group(config.device) as process:
        autocast(process.device, config.precision)
        folder = Path(config.output)
        record = {**config.to_dict(), "world_size": process.world}
        check_folder(folder, record)
        finished = read_result(folder)
        if finished is not None:
            return finished
        _wait()
        if process.is_first:
            write_record(folder, record)
        if streams is None:
            train = create_train_stream(config.data, config.seed, process.rank, process.world)
            streams = train, create_eval_stream(config.data, process.rank, process.world)
        return _Trainer(config, process, *streams, progress=progress and process.is_first).run()


def seed_draws(seed: int, step: int, rank: int) -> None:
    """Seed Python, NumPy and torch from the place in a run, so that its draws depend on nothing else.

    Args:
        seed: The run's seed.
        step: Optimiser steps begun; 0 for what is drawn before training.
        rank: The process.
    """
    word = int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0])
    random.seed(word)
    np.random.seed(word)  # noqa: NPY002 (timm's mixup draws from NumPy's global generator)
    torch.manual_seed(word)


class _Trainer:
    """The state of one run: objects made once, then `run`."""

    def __init__(
        self, config: TrainConfig, process: Process, train: BatchStream, test: BatchStream, *, progress: bool
    ) -> None:
        self.config, self.process, self.progress = config, process, progress
        self.train_stream, self.test_stream = train, test
        self.folder = Path(config.output)
        seed_draws(config.seed, 0, 0)
        self.model, teacher = create_models(config)
        self.model.to(process.device)
        self.routed = is_routed(self.model)
        self.ema = None
        if config.ema is not None:
            self.ema = ModelEmaV3(self.model, decay=config.ema.decay, use_warmup=config.ema.use_warmup)
        self.task: nn.Module = self._create_task(teacher)
        self.mixup = create_mixup(config.mixup, config.loss.smoothing, getattr(self.model, "num_classes", 0))
        self.steps_per_epoch = -(-train.steps_per_epoch // config.accumulate)
        if not self.steps_per_epoch:
            raise ValueError(f"the training data gives no batch of {config.data.batch_size} images")
        images = config.data.batch_size * config.accumulate * process.world
        self.optimizer = create_optimizer(config, self.model, images)
        self.scheduler, self.epochs = create_schedule(config, self.optimizer, self.steps_per_epoch)
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.precision == "fp16")
        self.meters = Meters(process.device)
        self.epoch = self.step = 0
        self.history: list[dict[str, float]] = []
        self.first_bad = torch.tensor(-1, device=process.device)
        self._resume()
        logs = self.folder / "tensorboard" if config.tensorboard and process.is_first else None
        self.board = TensorBoard(logs, self.step)

    def _create_task(self, teacher: nn.Module | None) -> nn.Module:
        config = self.config
        routing = config.routing_config()
        if config.compile:
            self.model.compile()
        task = ClassificationTask(
            self.model,
            create_criterion(config.loss, mixed=config.mixup is not None),
            teacher=teacher,
            distill_weight=config.distill.weight,
            temperature=config.distill.temperature,
            auxiliary=routing is not None and bool(routing.losses),
            precision=config.precision,
        ).to(self.process.device)
        if self.process.world == 1:
            return task
        devices = [self.process.device] if self.process.device.type == "cuda" else None
        return DistributedDataParallel(task, device_ids=devices)

    def run(self) -> FitResult:
        """Train the epochs that are left and write the result."""
        evaluation = average = None
        while self.epoch < self.epochs:
            self._set_capacity()
            self._train_epoch()
            row: dict[str, float] = {"epoch": self.epoch, "step": self.step, "lr": self._learning_rate()}
            self.meters.gather(keep=True)
            row |= {f"train_{name}": value for name, value in self.meters.means().items()}
            if self._is_evaluated():
                evaluation, average = self._evaluate()
                row |= _columns(evaluation, "") | (_columns(average, "ema_") if average else {})
            self.history.append(row)
            self.meters = Meters(self.process.device)
            self.epoch += 1
            self._save()
            if self.process.is_first:
                write_csv(self.folder / "metrics.csv", self.history)
            self.board.write(row, self.step)
        if evaluation is None:
            evaluation, average = self._evaluate()
        return self._finish(evaluation, average)

    def _train_epoch(self) -> None:
        """Do the optimiser steps of the epoch that are not done yet."""
        config = self.config
        self.task.train()
        done = self.step - self.epoch * self.steps_per_epoch
        start = min(done * config.accumulate, self.train_stream.steps_per_epoch)
        batches = self.train_stream.batches(self.epoch, start)
        images = config.data.batch_size * config.accumulate * self.process.world
        bar = tqdm(
            desc=f"epoch {self.epoch + 1}/{self.epochs}",
            total=self.steps_per_epoch * images,
            initial=done * images,
            unit="img",
            unit_scale=True,
            disable=not self.progress,
        )
        with bar:
            for group in _groups(batches, config.accumulate):
                logged = (self.step + 1) % config.log_every == 0
                kept = self._step(group, traced=logged and self.routed)
                bar.update(sum(len(targets) for _, targets in group) * self.process.world)
                if logged:
                    self._log(bar, kept)
                if config.checkpoint_every and self.step % config.checkpoint_every == 0:
                    self._save()
        self._check_finite()

    def _step(self, group: list[Batch], traced: bool) -> float | None:
        """Do one optimiser step on a list of batches; return the mean kept share when `traced`."""
        seed_draws(self.config.seed, self.step + 1, self.process.rank)
        if self.scheduler is not None:
            self.scheduler.step_update(self.step)
        total = sum(len(targets) for _, targets in group)
        kept = None
        for index, (images, targets) in enumerate(group):
            check_targets(targets, self.model)
            with ExitStack() as stack:
                if isinstance(self.task, DistributedDataParallel) and index + 1 < len(group):
                    stack.enter_context(self.task.no_sync())
                routings = stack.enter_context(trace(self.model)) if traced else None
                parts = self._forward(images, targets)
                self.scaler.scale(parts["loss"] * (len(targets) / total)).backward()
            if routings is not None:
                kept = float(np.mean(list(routings.kept_shares().values())))
        if self.config.grad_clip is not None:
            self.scaler.unscale_(self.optimizer)
            dispatch_clip_grad(self.model.parameters(), self.config.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1
        if self.ema is not None:
            self.ema.update(self.model, step=self.step)
        return kept

    def _forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Mix and run one batch, and count its figures."""
        device = self.process.device
        images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        if self.mixup is not None:
            # timm mixes in place, and the images may be a view of what the stream keeps.
            images, targets = self.mixup(images.clone(), targets)
        parts: dict[str, Tensor] = self.task(images, targets)
        bad = (self.first_bad < 0) & ~torch.isfinite(parts["loss"].detach())
        self.first_bad = torch.where(bad, self.step + 1, self.first_bad)
        hard = targets if targets.ndim == 1 else targets.argmax(1)
        logits = parts.pop("logits").detach()
        self.meters.update({**parts, "top1": accuracy(logits, hard)[0]}, len(images))
        return parts

    def _log(self, bar: tqdm, kept: float | None) -> None:
        self._check_finite()
        means = self.meters.means()
        figures = {"loss": means["loss"], "top1": means["top1"], "lr": self._learning_rate()}
        if kept is not None:
            figures["kept"] = kept
        bar.set_postfix({name: f"{value:.4g}" for name, value in figures.items()}, refresh=False)
        speed = bar.format_dict["rate"]
        self.board.write({f"step/{name}": value for name, value in figures.items()}, self.step)
        self.board.write({"step/images_per_second": speed} if speed else {}, self.step)

    def _learning_rate(self) -> float:
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def _set_capacity(self) -> None:
        """Follow the capacity schedule, in the model and in its average."""
        schedule, routing = self.config.capacity_schedule, self.config.routing_config()
        if schedule is None or routing is None:
            return
        if not isinstance(routing.capacity, (int, float)):
            raise ValueError(f"capacity_schedule needs one capacity for all blocks, got {routing.capacity}")
        share = min(1.0, self.epoch / schedule.epochs)
        capacity = round(schedule.start + share * (routing.capacity - schedule.start), 6)
        for model in (self.model, *([self.ema.module] if self.ema is not None else [])):
            set_capacity(model, capacity)

    def _is_evaluated(self) -> bool:
        return self.epoch + 1 == self.epochs or (self.epoch + 1) % self.config.eval_every == 0

    def _evaluate(self) -> tuple[EvalResult, EvalResult | None]:
        seed_draws(self.config.seed, self.step + 1, self.process.rank)
        arguments = (self.test_stream, self.process.device, self.config.precision)
        result = evaluate(self.model, *arguments, progress=self.progress)
        average = None
        if self.ema is not None:
            average = evaluate(self.ema.module, *arguments, progress=self.progress)
        return result, average

    def _check_finite(self) -> None:
        """Raise when a loss was not finite, naming the first such step."""
        step = int(self.first_bad)
        if step >= 0:
            good = latest_checkpoint(self._checkpoints)
            raise FloatingPointError(
                f"the loss stopped being finite at step {step} (epoch {self.epoch + 1}); last good "
                f"checkpoint: {good or 'none was written yet'}. A smaller optim.lr, grad_clip or precision "
                "fp32 may help"
            )

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _save(self) -> None:
        self._check_finite()
        self.meters.gather(keep=self.process.is_first)
        if self.process.is_first:
            training = {
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "meters": self.meters.state_dict(),
                "history": self.history,
                "epoch": self.epoch,
                "step": self.step,
            }
            average = self.ema.module.state_dict() if self.ema is not None else None
            routing = self.config.routing_config()
            metadata = {"routing": routing.to_dict()} if routing is not None else {}
            content = Checkpoint(self.model.state_dict(), average, training)
            save_checkpoint(self._checkpoints, self.epoch, self.step, content, metadata)
        _wait()

    def _resume(self) -> None:
        """Go on from the latest checkpoint, if there is one."""
        path = latest_checkpoint(self._checkpoints)
        if path is None:
            return
        found = load_checkpoint(path)
        self.model.load_state_dict(found.weights)
        if self.ema is not None and found.average is not None:
            self.ema.module.load_state_dict(found.average)
        training = found.training
        self.optimizer.load_state_dict(training["optimizer"])
        self.scaler.load_state_dict(training["scaler"])
        sums = training["meters"]
        self.meters.load_state_dict(sums if self.process.is_first else {name: [0.0, 0] for name in sums})
        self.history, self.epoch, self.step = training["history"], training["epoch"], training["step"]

    def _finish(self, evaluation: EvalResult, average: EvalResult | None) -> FitResult:
        """Write weights and result, and drop the checkpoints that only served to resume."""
        self.board.close()
        streams = {"train": self.train_stream, "val": self.test_stream}
        result = FitResult(
            folder=str(self.folder),
            epochs=self.epochs,
            steps=self.step,
            evaluation=evaluation,
            average=average,
            history=self.history,
            skipped={name: merge_counts(stream.report.counts) for name, stream in streams.items()},
        )
        if self.process.is_first:
            _export(self.model, self.folder / "model", self.config.data)
            if self.ema is not None:
                _export(self.ema.module, self.folder / "ema", self.config.data)
            write_csv(self.folder / "metrics.csv", self.history)
            write_result(result)
            shutil.rmtree(self._checkpoints, ignore_errors=True)
        _wait()
        return result


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield lists of `size` batches; the last may be shorter."""
    while group := list(islice(batches, size)):
        yield group


def _columns(result: EvalResult, prefix: str) -> dict[str, float]:
    """Return an evaluation as columns of the history."""
    columns = {f"{prefix}{name}": getattr(result, name) for name in ("loss", "top1", "top5")}
    if result.kept:
        columns[f"{prefix}kept"] = result.mean_kept
        columns |= {f"{prefix}kept/{name}": share for name, share in result.kept.items()}
    return columns


def _export(model: nn.Module, folder: Path, data: DataConfig) -> None:
    """Write the final weights, whole or not at all.

    A routed model is read again by `mmod.pretrained.load_pretrained`, a dense one by timm's
    `create_model("local-dir:FOLDER")`.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if is_routed(model):
        save_pretrained(model, partial)
    else:
        mean, std = (values.tolist() for values in normalisation(data))
        save_for_hf(model, str(partial), safe_serialization=True, data_config={"mean": mean, "std": std})
    if not folder.exists():
        os.replace(partial, folder)


def _wait() -> None:
    """Let all processes reach this point."""
    if dist.is_initialized():
        dist.barrier()
