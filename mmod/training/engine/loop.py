"""The training loop: epochs, accumulation, averaging, evaluation, checkpoints and their resumption.

Everything random in an optimiser step follows from (seed, step, process). A checkpoint therefore needs the
weights, their average, the optimiser and the position alone, and a resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic

import numpy as np
import torch
import torch.distributed as dist
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mmod.data.corrupt import CorruptReport, Fault
from mmod.data.stream import BatchStream
from mmod.io.files import replacing
from mmod.io.progress import progress_bar
from mmod.training.engine.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    read_newest,
    remove_checkpoints,
    save_checkpoint,
    set_aside,
)
from mmod.training.engine.config import LoopConfig
from mmod.training.engine.distributed import Process, merge_faults, process_group, wait_for_all
from mmod.training.engine.health import RouterHealth, evaluated, named, write_rows
from mmod.training.engine.logging import Meters, TensorBoard, write_csv
from mmod.training.engine.optim import create_optimizer, create_schedule
from mmod.training.engine.recipe import LoopRecipe, Streams
from mmod.training.engine.run_folder import FitResult, Found, read_fit, run_once, write_result
from mmod.training.engine.signals import StopRequest, stop_signals
from mmod.training.engine.task import Batch, Pass, Task, autocast

__all__ = ["run", "seed_draws", "steps_of_epoch"]


def run(
    recipe: LoopRecipe[Any, Found],
    *,
    streams: Streams | None = None,
    progress: bool = True,
    tick: Callable[[float], object] = lambda share: None,
) -> FitResult[Found]:
    """Train as a recipe and its config say, from the start or from where the run in its folder stopped.

    Args:
        recipe: The kind of training, with the run's config.
        streams: Training and evaluation batches to use instead of the recipe's.
        progress: Show bars.
        tick: Told after each optimiser step the share of all of them that is done, in (0, 1].

    Returns:
        The outcome; that of the earlier run when the folder holds a finished run of the same config.

    Raises:
        ValueError: If the folder belongs to another config, or the config does not fit the data or model.
        LockedError: If another process trains into the folder.
        FloatingPointError: If the loss stops being finite.
        SystemExit: If SIGTERM or SIGINT asked to stop: after the step that was being done, which is saved.
    """
    config = recipe.config
    with process_group(config.device) as process:
        autocast(process.device, config.precision)

        def train(claim: Callable[[], object]) -> FitResult[Found]:
            trainer = _Trainer(recipe, process, streams, claim, tick, progress=progress and process.is_first)
            with stop_signals() as trainer.stop:
                return trainer.run()

        read = partial(read_fit, kind=recipe.result)
        return run_once(config, process.rank, process.world, read, train)


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


def steps_of_epoch(config: LoopConfig, train: BatchStream) -> int:
    """Return the optimiser steps of an epoch.

    Args:
        config: The run's config.
        train: The training batches.
    """
    steps = -(-train.steps_per_epoch // config.accumulate)
    return steps if config.epoch_steps is None else min(steps, config.epoch_steps)


class _Trainer(Generic[Found]):
    """The state of one run: objects made once, then `run`."""

    def __init__(
        self,
        recipe: LoopRecipe[Any, Found],
        process: Process,
        streams: Streams | None,
        claim: Callable[[], object],
        tick: Callable[[float], object],
        *,
        progress: bool,
    ) -> None:
        config = recipe.config
        self.recipe, self.config, self.process, self.progress = recipe, config, process, progress
        self.claim, self.tick = claim, tick
        self.stop: StopRequest
        self.folder = Path(config.output)
        seed_draws(config.seed, 0, 0)
        self.model, teacher = recipe.create_models()
        train, test = streams or recipe.create_streams(process, self.model)
        self.train_stream, self.test_stream = train, test
        self.model.to(process.device)
        self.health = RouterHealth(self.model, measured=not config.compile)
        self.ema = None
        if config.ema is not None:
            self.ema = ModelEmaV3(self.model, decay=config.ema.decay, use_warmup=config.ema.use_warmup)
        if config.compile:
            self.model.compile()
        self.task: Task = recipe.create_task(self.model, teacher, process).to(process.device)
        self.wrapped: nn.Module = self.task
        if process.world > 1:
            devices = [process.device] if process.device.type == "cuda" else None
            self.wrapped = DistributedDataParallel(self.task, device_ids=devices)
        self.steps_per_epoch = steps_of_epoch(config, train)
        if not self.steps_per_epoch:
            raise ValueError(f"the training data gives no batch of {config.data.batch_size} samples")
        images = config.data.batch_size * config.accumulate * process.world
        self.optimizer = create_optimizer(config.optim, self.model, images)
        self.scheduler, self.epochs = create_schedule(config, self.optimizer, self.steps_per_epoch)
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.precision == "fp16")
        self.meters = Meters(process.device)
        self.epoch = self.step = 0
        self.history: list[dict[str, float]] = []
        self.routers: list[dict[str, Any]] = []
        self.first_bad = torch.tensor(-1, device=process.device)
        self._resume()
        logs = self.folder / "tensorboard" if config.tensorboard and process.is_first else None
        self.board = TensorBoard(logs, self.step)

    def run(self) -> FitResult[Found]:
        """Train the epochs that are left and write the result."""
        evaluation = average = None
        while self.epoch < self.epochs:
            self.recipe.start_epoch([self.model, *([self.ema.module] if self.ema is not None else [])], self.epoch)
            self._train_epoch()
            row: dict[str, float] = {"epoch": self.epoch, "step": self.step, "lr": self._learning_rate()}
            self.meters.gather(keep=True)
            row |= {f"train_{name}": value for name, value in self.meters.means().items()}
            if self._is_evaluated():
                evaluation, average = self._evaluate()
                for data, found in (("val", evaluation), ("ema", average)):
                    if found is not None:
                        prefix = "" if data == "val" else "ema_"
                        row |= {f"{prefix}{name}": value for name, value in found.columns().items()}
                        self.routers += evaluated(self.step, data, found.kept)
            self.history.append(row)
            self.meters = Meters(self.process.device)
            self.epoch += 1
            self._save()
            if self.process.is_first:
                write_csv(self.folder / "metrics.csv", self.history)
            self.board.write(row, self.step)
            if self.epoch < self.epochs and self.stop.agreed():
                self._leave()
        if evaluation is None:
            evaluation, average = self._evaluate()
        return self._finish(evaluation, average)

    def _train_epoch(self) -> None:
        """Do the optimiser steps of the epoch that are not done yet."""
        config = self.config
        self.wrapped.train()
        first, done = self.step + 1, self.step - self.epoch * self.steps_per_epoch
        start = min(done * config.accumulate, self.train_stream.steps_per_epoch)
        batches = self.train_stream.batches(self.epoch, start)
        images = config.data.batch_size * config.accumulate * self.process.world
        bar = progress_bar(
            desc=f"epoch {self.epoch + 1}/{self.epochs}",
            total=self.steps_per_epoch * images,
            initial=done * images,
            unit="sample",
            unit_scale=True,
            shown=self.progress,
        )
        with bar:
            for group in islice(_groups(batches, config.accumulate), self.steps_per_epoch - done):
                logged = (self.step + 1) % config.log_every == 0
                self._step(group, logged=logged)
                bar.update(sum(len(targets) for _, targets in group) * self.process.world)
                self.tick(self.step / (self.epochs * self.steps_per_epoch))
                if self.step == first and self.process.is_first:
                    # A start that fails before its first step leaves the folder to another.
                    self.claim()
                if logged:
                    self._log(bar)
                if config.checkpoint_every and self.step % config.checkpoint_every == 0:
                    self._save()
                if self.stop.agreed():
                    self._save()
                    self._leave()
        self._check_finite()

    def _leave(self) -> None:
        """End the program where everything is saved."""
        self.board.close()
        self.stop.leave(self.folder, self.step, loud=self.process.is_first)

    def _step(self, group: list[Batch], *, logged: bool) -> None:
        """Do one optimiser step on a list of batches; read the routers' health when `logged`."""
        seed_draws(self.config.seed, self.step + 1, self.process.rank)
        if self.scheduler is not None:
            self.scheduler.step_update(self.step)
        for index, work in enumerate(self.task.passes(group, self.process.device)):
            with ExitStack() as stack:
                if isinstance(self.wrapped, DistributedDataParallel) and index + 1 < len(group):
                    stack.enter_context(self.wrapped.no_sync())
                parts = self._forward(work)
                if logged and index + 1 == len(group):
                    self.health.read()
                self.scaler.scale(parts["loss"] * work.weight).backward()
        if self.config.grad_clip is not None:
            self.scaler.unscale_(self.optimizer)
            dispatch_clip_grad(self.model.parameters(), self.config.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.task.after_step()
        self.step += 1
        if self.ema is not None:
            self.ema.update(self.model, step=self.step)

    def _forward(self, work: Pass) -> dict[str, Tensor]:
        """Run one pass and count its figures."""
        parts: dict[str, Tensor] = self.wrapped(*work.arguments)
        bad = (self.first_bad < 0) & ~torch.isfinite(parts["loss"].detach())
        self.first_bad = torch.where(bad, self.step + 1, self.first_bad)
        self.meters.update(parts, work.samples)
        return parts

    def _log(self, bar: Any) -> None:
        self._check_finite()
        rows = self.health.take(self.step)
        self.routers += rows
        means = self.meters.means()
        figures = {**{name: means[name] for name in self.task.shown}, "lr": self._learning_rate()}
        if rows:
            figures["kept"] = float(np.mean([row["kept"] for row in rows]))
        bar.set_postfix({name: f"{value:.4g}" for name, value in figures.items()}, refresh=False)
        speed = bar.format_dict["rate"]
        self.board.write({f"step/{name}": value for name, value in figures.items()}, self.step)
        self.board.write({"step/images_per_second": speed} if speed else {}, self.step)
        self.board.write(named(rows), self.step)

    def _learning_rate(self) -> float:
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def _is_evaluated(self) -> bool:
        return self.epoch + 1 == self.epochs or (self.epoch + 1) % self.config.eval_every == 0

    def _evaluate(self) -> tuple[Found, Found | None]:
        seed_draws(self.config.seed, self.step + 1, self.process.rank)
        arguments = (self.test_stream, self.process, self.progress)
        result = self.recipe.evaluate(self.model, *arguments)
        return result, None if self.ema is None else self.recipe.evaluate(self.ema.module, *arguments)

    def _check_finite(self) -> None:
        """Raise when a loss was not finite, naming the first such step."""
        step = int(self.first_bad)
        if step >= 0:
            good = next(iter(list_checkpoints(self._checkpoints)), None)
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
        faults = {name: [tuple(fault) for fault in report.faults] for name, report in self._reports().items()}
        if self.process.is_first:
            training = {
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "meters": self.meters.state_dict(),
                "history": self.history,
                "routers": self.routers,
                "faults": faults,
                "epoch": self.epoch,
                "step": self.step,
            }
            average = self.ema.module.state_dict() if self.ema is not None else None
            content = Checkpoint(self.model.state_dict(), average, training)
            save_checkpoint(self._checkpoints, self.epoch, self.step, content, self.recipe.metadata())
            write_rows(self.folder, self.routers)
        wait_for_all()

    def _resume(self) -> None:
        """Go on from the newest checkpoint that can be read, if there is one."""
        load = partial(load_checkpoint, averaged=self.ema is not None)
        path, found = read_newest(list_checkpoints(self._checkpoints), load) or (None, None)
        _agree(path)
        if path is None or found is None:
            return
        if self.process.is_first:
            set_aside(self._checkpoints, path)
        self.model.load_state_dict(found.weights)
        if self.ema is not None and found.average is not None:
            self.ema.module.load_state_dict(found.average)
        training = found.training
        self.optimizer.load_state_dict(training["optimizer"])
        self.scaler.load_state_dict(training["scaler"])
        for name, stream in (("train", self.train_stream), ("val", self.test_stream)):
            stream.report.faults.update(dict.fromkeys(Fault(*fault) for fault in training["faults"][name]))
        sums = training["meters"]
        self.meters.load_state_dict(sums if self.process.is_first else {name: [0.0, 0] for name in sums})
        self.history, self.epoch, self.step = training["history"], training["epoch"], training["step"]
        # Not there in what earlier versions wrote.
        self.routers = training.get("routers", [])

    def _reports(self) -> dict[str, CorruptReport]:
        """Return what could not be read so far in any process, for each split."""
        streams = {"train": self.train_stream, "val": self.test_stream}
        return {
            name: CorruptReport(stream.report.on_corrupt, merge_faults(stream.report.faults))
            for name, stream in streams.items()
        }

    def _finish(self, evaluation: Found, average: Found | None) -> FitResult[Found]:
        """Write weights and result, and drop the checkpoints that only served to resume."""
        self.board.close()
        result = FitResult(
            folder=str(self.folder),
            epochs=self.epochs,
            steps=self.step,
            evaluation=evaluation,
            average=average,
            history=self.history,
            skipped={name: report.counts for name, report in self._reports().items()},
        )
        if self.process.is_first:
            self._export(self.model, "model")
            if self.ema is not None:
                self._export(self.ema.module, "ema")
            write_csv(self.folder / "metrics.csv", self.history)
            write_rows(self.folder, self.routers)
            write_result(self.folder, result)
            remove_checkpoints(self._checkpoints)
        wait_for_all()
        return result

    def _export(self, model: nn.Module, name: str) -> None:
        """Write final weights, whole or not at all."""
        # Those that a start before this one left, which ended between weights and result, may be damaged since.
        shutil.rmtree(self.folder / name, ignore_errors=True)
        with replacing(self.folder / name) as folder:
            self.recipe.export(model, folder)


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield lists of `size` batches; the last may be shorter."""
    while group := list(islice(batches, size)):
        yield group


def _agree(path: Path | None) -> None:
    """Raise unless all processes found the same checkpoint."""
    if dist.is_initialized():
        found: list[Path | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, path)
        if len(set(found)) > 1:
            raise ValueError(f"the processes would go on from different checkpoints: {', '.join(map(str, found))}")
