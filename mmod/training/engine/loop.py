"""The training loop: epochs, accumulation, averaging, evaluation, checkpoints and their resumption.

Every random draw of an optimiser step is a function of (seed, step, process). A checkpoint therefore needs only the
weights, their average, the optimiser and the position, and a resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch import Tensor, nn

from mmod.data.corrupt import CorruptReport, Fault
from mmod.data.labels import Classes
from mmod.data.loader import BatchStream
from mmod.io.files import replacing
from mmod.io.processes import gathered
from mmod.io.progress import Bar, progress_bar
from mmod.io.stop import heeding
from mmod.io.store import Store
from mmod.io.sums import write_sums
from mmod.io.tables import write_csv
from mmod.methods.base import as_evaluated, undo_training_only_
from mmod.opening.runs import CHECKPOINTS, FINAL_MODEL, LAST_WEIGHTS, list_checkpoints
from mmod.training.engine.checkpoint import Checkpoint, read_newest, remove_checkpoints, save_checkpoint
from mmod.training.engine.distributed import (
    Process,
    StopRequest,
    faults_of_all,
    process_group,
    sum_over_processes,
    wait_for_all,
)
from mmod.training.engine.evaluate import Evaluated, RoutedResult, check_evaluation
from mmod.training.engine.health import RouterHealth, RouterRow, evaluation_rows, logged_figures, write_rows
from mmod.training.engine.kind import AfterStep, LoopKind, Step, Streams, seed_draws
from mmod.training.engine.logging import Meters, TensorBoard, Usage, note, note_resumed
from mmod.training.engine.optim import create_optimizer, create_schedule
from mmod.training.engine.parallel import Replicas, Shards
from mmod.training.engine.run_folder import (
    FitResult,
    read_fit,
    record_classes,
    run_once,
    write_result,
)
from mmod.training.engine.start import begin
from mmod.training.engine.task import Batch, Task, all_finite, autocast, find_nonfinite, gradient_norm


def fit(
    kind: LoopKind,
    *,
    streams: Streams | None = None,
    progress: bool = True,
    after_step: AfterStep = lambda step: None,
    store: Store | None = None,
) -> FitResult[RoutedResult]:
    """Train, or read the result of a finished run; see `mmod.training.fit`.

    Args:
        store: That of a comparison, whose runs read their evaluation samples once; see `check_evaluation`.
    """
    config = kind.config
    shared = config.distributed
    with process_group(config.device, grouped=shared.sharded, timeout=shared.timeout) as process:
        # Only to refuse a precision that the device lacks, before anything is made.
        autocast(process.device, config.precision)

        def train(write_config: Callable[[], object]) -> FitResult[RoutedResult]:
            shown = progress and process.is_first
            trainer = _Trainer(kind, process, streams, write_config, after_step, store, progress=shown)
            with heeding(StopRequest()) as trainer.stop:
                return trainer.run()

        read = partial(read_fit, result_class=kind.result)
        return run_once(config, process.rank, process.world, read, train, with_files=streams is None)


class _Trainer:
    """The state of one run."""

    def __init__(
        self,
        kind: LoopKind,
        process: Process,
        streams: Streams | None,
        write_config: Callable[[], object],
        after_step: AfterStep,
        store: Store | None,
        *,
        progress: bool,
    ) -> None:
        config = kind.config
        self.kind = kind
        self.config = config
        self.process = process
        self.progress = progress
        self.write_config = write_config
        self.after_step = after_step
        self.store = store
        self.stop: StopRequest
        self.evaluated: tuple[Evaluated, Evaluated | None]
        self.folder = Path(config.output)

        self.usage = Usage(process.device)
        self.step_samples = config.step_samples(process.world)
        self.model, teacher, (train, test) = begin(kind, process, streams)
        self.train_stream = train
        self.test_stream = test
        # Streams of a caller may name no classes.
        self.classes: Classes | None = getattr(train, "classes", None)

        sharded = config.distributed.sharded
        if not sharded:
            # Blocks with shards are moved one by one: together they may not fit.
            self.model.to(process.device)
        self.health = RouterHealth(self.model, measured=not config.compile)
        self.ema = None
        self.average: nn.Module | None = None
        if config.ema is not None:
            self.ema = ModelEmaV3(self.model, decay=config.ema.decay, use_warmup=config.ema.use_warmup)
            self.average = self.ema.module
        share = Shards if sharded else Replicas
        self.parallel = share(self.model, self.average, process, config.precision, compiled=config.compile)
        self.task: Task = kind.task(self.model, teacher).to(process.device)
        self.wrapped = self.parallel.wrap(self.task)

        self.steps_per_epoch = config.steps_of_epoch(train.steps_per_epoch)
        if not self.steps_per_epoch:
            raise ValueError(f"the training data gives no batch of {config.data.batch_size} samples")
        self.optimizer = create_optimizer(config.optim, self.model, self.step_samples)
        self.scheduler, self.epochs = create_schedule(config, self.optimizer, self.steps_per_epoch)
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.precision == "fp16")

        self.meters = Meters(process.device)
        self.epoch = self.step = 0
        self.history: list[dict[str, float]] = []
        self.routers: list[RouterRow] = []
        # Last, because it loads into model, average, optimiser, meters and the streams' reports.
        self._resume()
        logs = None
        if config.tensorboard and process.is_first:
            logs = self.folder / "tensorboard"
        self.board = TensorBoard(logs, self.step)

    def run(self) -> FitResult[RoutedResult]:
        """Train the remaining epochs and write the result."""
        if self.step and self.progress:
            note_resumed(self.folder, self.step, self.epochs * self.steps_per_epoch)
        # Streams of a caller may be anything that yields batches.
        if not self.step and isinstance(self.test_stream, BatchStream):
            check_evaluation(self.test_stream, self.config.data, self.store, self.progress)
        with self._bar() as bar:
            while self.epoch < self.epochs:
                self._do_epoch(bar)
        return self._finish(*self.evaluated)

    def _bar(self) -> Bar:
        """Return a bar over the samples of all epochs, and say what no epoch reads."""
        stream = self.train_stream
        batch_samples = self.config.data.batch_size * self.process.world
        batches = min(self.steps_per_epoch * self.config.accumulate, stream.steps_per_epoch)
        # Also those batches that `epoch_steps` leaves to later epochs.
        in_batches = stream.steps_per_epoch * batch_samples
        # Streams of a caller may not say how many samples they have.
        available = getattr(stream, "num_samples", in_batches)
        if available > in_batches and self.progress:
            note(f"each epoch leaves out {available - in_batches:,} of {available:,} samples, which fill no batch")
        return progress_bar(
            total=self.epochs * batches * batch_samples,
            initial=self.epoch * batches * batch_samples + self._done * self.step_samples,
            unit="samples",
            shown=self.progress,
            leave=False,
        )

    @property
    def _done(self) -> int:
        """Finished steps of the present epoch."""
        return self.step - self.epoch * self.steps_per_epoch

    def _do_epoch(self, bar: Bar) -> None:
        """Train an epoch, save, and evaluate the model and its moving average where they are due."""
        # A resumed run begins with the methods of its config, and undoes them once more.
        if self.epoch >= (self.config.training_only_epochs or self.epochs):
            undo_training_only_(self.model)
        self._train_epoch(bar)
        number = self.epoch + 1
        is_due = number == self.epochs or number % self.config.eval_every == 0
        if is_due:
            self.parallel.average_statistics()
        # Before the evaluation, which may fail, or outlast what a signal leaves; a run that goes on repeats it.
        self._save()
        # Agreed by all: a process that left alone would leave the others waiting.
        if self.stop.agreed():
            self._leave()
        row: dict[str, float] = {"epoch": self.epoch, "step": self.step, "lr": self._learning_rate()}
        # Behind the save, which leaves all sums to the first process: gathered before it, they would be added twice.
        self.meters.gather(keep=True)
        row |= {f"train_{name}": value for name, value in self.meters.means().items()}
        if is_due:
            self.evaluated = self._evaluate()
            for data, prefix, evaluated in zip(("val", "ema"), ("", "ema_"), self.evaluated):
                if evaluated is not None:
                    row |= self._record_evaluation(data, prefix, evaluated.result)
        row |= self.usage.figures()
        self.history.append(row)
        self.meters = Meters(self.process.device)
        self.epoch += 1
        if self.process.is_first:
            write_csv(self.folder / "metrics.csv", self.history)
        self.board.write(row, self.step)

    def _record_evaluation(self, data: str, prefix: str, result: RoutedResult) -> dict[str, float]:
        """Return the figures of an evaluation for the history, and note them and what routers kept."""
        self.routers += evaluation_rows(self.step, data, result.kept)
        if self.progress:
            of_average = " of the moving average" if prefix else ""
            note(f"epoch {self.epoch + 1}/{self.epochs}: validation{of_average} {result}")
        return {f"{prefix}{name}": value for name, value in result.columns().items()}

    def _train_epoch(self, bar: Bar) -> None:
        config = self.config
        self.wrapped.train()
        first = self.step + 1
        # A resumed epoch goes on behind the batches of its finished steps, of which the last may have had fewer.
        done = self._done
        start = min(done * config.accumulate, self.train_stream.steps_per_epoch)
        batches = self.usage.waiting(self.train_stream.batches(self.epoch, start))
        # The bar counts over the whole run, whose time left it tells.
        bar.set_description_str(f"epoch {self.epoch + 1}/{self.epochs}, run", refresh=False)
        # The time since the epoch before went into its evaluation.
        bar.unpause()
        # The last group of an epoch may be shorter.
        groups = iter(lambda: list(islice(batches, config.accumulate)), [])
        for group in islice(groups, self.steps_per_epoch - done):
            is_last = self.step + 1 == (self.epoch + 1) * self.steps_per_epoch
            logged = is_last or (self.step + 1) % config.log_every == 0
            samples = sum(len(targets) for _, targets in group) * self.process.world
            with self.usage.step(samples):
                self._step(group, logged=logged)
            bar.update(samples)
            if self.step == first and self.process.is_first:
                # A start that fails before its first step leaves the folder free.
                self.write_config()
                if self.classes is not None:
                    record_classes(self.folder, self.classes.numbers)
            total = self.epochs * self.steps_per_epoch
            self.after_step(Step(self.step, total, self.model, self.average, self.optimizer))
            if logged:
                self._log(bar)
            if config.checkpoint_every and self.step % config.checkpoint_every == 0:
                self._save()
            if self.stop.agreed():
                self._save()
                self._leave()
        bar.keep_line()

    def _leave(self) -> None:
        self.board.close()
        self.stop.leave(self.folder, self.step, loud=self.process.is_first)

    def _step(self, group: list[Batch], *, logged: bool) -> None:
        """Do one optimiser step on a list of batches; read the routers' health if `logged`."""
        # By step and rank, so that a resumed run draws what an uninterrupted one would have drawn.
        seed_draws(self.config.seed, self.step + 1, self.process.rank)
        if self.scheduler is not None:
            self.scheduler.step_update(self.step)
        passes = self._run_passes(group, logged=logged)
        # Before the step changes the weights, in all processes at once.
        if not self._is_finite([parts["loss"] for parts, _ in passes]):
            self.optimizer.zero_grad()
            self._refuse(group)
        for parts, samples in passes:
            self.meters.update(parts, samples)
        self._update()
        self.task.after_step()
        self.step += 1
        if self.ema is not None:
            # By the step of the run, because the warm-up of the decay goes on where an interrupted run stopped.
            self.ema.update(self.model, step=self.step)

    def _run_passes(self, group: list[Batch], *, logged: bool) -> list[tuple[dict[str, Tensor], int]]:
        """Go forward and backward on each batch of a step; return the figures and the samples of each pass."""
        passes: list[tuple[dict[str, Tensor], int]] = []
        for index, one_pass in enumerate(self.task.passes(group, self.process.device)):
            is_last = index + 1 == len(group)
            # Gradients are exchanged once a step, in its last pass.
            exchange = nullcontext() if is_last else self.parallel.local(self.wrapped)
            with exchange:
                parts: dict[str, Tensor] = self.wrapped(*one_pass.arguments)
                # Before the backward pass, in which the gradients of scores are counted.
                if logged and is_last:
                    self.health.read()
                # Weighed, so that accumulated batches have the gradient of one large batch.
                self.scaler.scale(parts["loss"] * one_pass.weight).backward()
            passes.append((parts, one_pass.samples))
        return passes

    def _is_finite(self, losses: Sequence[Tensor]) -> bool:
        """Return whether losses and gradients are finite in all processes; collective over them."""
        loss_L = torch.stack([loss.detach() for loss in losses])
        bad = (~loss_L.isfinite()).sum()
        # The scaler of fp16 looks for infinite gradients itself, and skips their steps.
        if not self.scaler.is_enabled():
            bad = bad + ~gradient_norm(self.model).isfinite()
        return not int(sum_over_processes(bad))

    def _update(self) -> None:
        """Change the weights by their gradients, in the scaler's order: finish, unscale, clip, step."""
        self.parallel.before_update()
        if self.config.grad_clip is not None:
            self.scaler.unscale_(self.optimizer)
            dispatch_clip_grad(self.model.parameters(), self.config.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def _refuse(self, group: list[Batch]) -> NoReturn:
        """Save the state before a step whose loss is not finite, and raise."""
        step = self.step + 1
        broken = not all_finite([*self.model.parameters(), *self.model.buffers()])
        # Running statistics differ between processes, which save together or not at all.
        usable = not int(sum_over_processes(torch.tensor(broken, dtype=torch.int64, device=self.process.device)))
        # The draws of the failed step, so that the repeated passes meet what it met.
        seed_draws(self.config.seed, step, self.process.rank)
        where = find_nonfinite(self.task, group, self.process.device)
        # Running statistics may hold what was not finite; the weights do not.
        if usable and self.step:
            self._save()
        good = next(iter(list_checkpoints(self._checkpoints)), None)
        raise FloatingPointError(
            f"the loss, or its gradient, stopped being finite at step {step} (epoch {self.epoch + 1}); last good "
            f"checkpoint: {good or 'none was written yet'}; first in {where}. A smaller optim.lr, grad_clip or "
            "precision fp32 may help"
        )

    def _log(self, bar: Bar) -> None:
        rows = self.health.take(self.step)
        self.routers += rows
        means = self.meters.means()
        figures = {**{name: means[name] for name in self.task.shown}, "lr": self._learning_rate()}
        if rows:
            figures["kept"] = float(np.mean([row["kept"] for row in rows]))
        bar.set_postfix({name: f"{value:.4g}" for name, value in figures.items()}, refresh=False)
        # Smoothed by tqdm; none is known after the first step.
        speed = bar.format_dict["rate"]
        self.board.write({f"step/{name}": value for name, value in figures.items()}, self.step)
        if speed:
            self.board.write({"step/samples_per_second": speed}, self.step)
        self.board.write(logged_figures(rows), self.step)

    def _learning_rate(self) -> float:
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def _evaluate(self) -> tuple[Evaluated, Evaluated | None]:
        # Evaluations may draw as well, and a resumed run has to give the same figures.
        seed_draws(self.config.seed, self.step + 1, self.process.rank)
        evaluation = self._evaluate_model(self.model)
        if self.average is None:
            return evaluation, None
        return evaluation, self._evaluate_model(self.average)

    def _evaluate_model(self, model: nn.Module) -> Evaluated:
        with self.parallel.full_weights(model) as gathered_model:
            return self.kind.score(gathered_model, self.progress, data=self.test_stream)

    @property
    def _checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    def _save(self) -> None:
        # The first process keeps the sums of all and the others start anew, so that any number of processes may
        # resume.
        self.meters.gather(keep=self.process.is_first)
        reports = self._reports()
        faults = {name: [tuple(fault) for fault in report.faults] for name, report in reports.items()}
        optimizer, moments = self.parallel.optimizer_state(self.optimizer)
        training = {
            "optimizer": optimizer,
            "scaler": self.scaler.state_dict(),
            "meters": self.meters.state_dict(),
            "history": self.history,
            "routers": self.routers,
            "faults": faults,
            "steps_per_epoch": self.steps_per_epoch,
            "usage": self.usage.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
        }
        content = Checkpoint.of(self.model, self.average, training, moments)
        save_checkpoint(self._checkpoints, self.epoch, self.step, content)
        if self.process.is_first:
            write_rows(self.folder, self.routers)

    def _resume(self) -> None:
        """Resume from the newest checkpoint, if there is one."""
        paths = list_checkpoints(self._checkpoints)
        # A disk that is not shared, or late, shows other checkpoints to some processes.
        newest = gathered(next(iter(paths), None))
        if len(set(newest)) > 1:
            listed = ", ".join(map(str, newest))
            raise ValueError(f"the processes would go on from different checkpoints: {listed}")
        found = read_newest(paths, partial(self.parallel.load, optimizer=self.optimizer))
        if found is None:
            return
        path, training = found
        if training["steps_per_epoch"] != self.steps_per_epoch:
            raise ValueError(
                f"{str(path)!r} is of a run with {training['steps_per_epoch']} steps per epoch, and these processes "
                f"and batches make {self.steps_per_epoch}: choose others, or another output"
            )
        # Weights, average and optimiser are loaded by now; what follows is small and the same in every process.
        self.scaler.load_state_dict(training["scaler"])
        for name, stream in (("train", self.train_stream), ("val", self.test_stream)):
            faults = (Fault(*fault) for fault in training["faults"][name])
            stream.report.faults.update(dict.fromkeys(faults))
        sums = training["meters"]
        # The sums of all processes were saved as one, which the first takes up.
        if not self.process.is_first:
            sums = {name: [0.0, 0] for name in sums}
        self.meters.load_state_dict(sums)
        self.history = training["history"]
        self.epoch = training["epoch"]
        self.step = training["step"]
        self.routers = training["routers"]
        self.usage.load_state_dict(training["usage"])

    def _reports(self) -> dict[str, CorruptReport]:
        streams = {"train": self.train_stream, "val": self.test_stream}
        return {name: faults_of_all(stream.report) for name, stream in streams.items()}

    def _finish(self, evaluation: Evaluated, average: Evaluated | None) -> FitResult[RoutedResult]:
        self.board.close()
        result = FitResult(
            folder=str(self.folder),
            epochs=self.epochs,
            steps=self.step,
            evaluation=evaluation.result,
            average=None if average is None else average.result,
            history=self.history,
            skipped={name: report.counts for name, report in self._reports().items()},
            usage=self.usage.figures(),
            outcomes=(average or evaluation).outcomes,
        )
        if self.average is None:
            self._export(self.model, FINAL_MODEL)
        else:
            self._export(self.average, FINAL_MODEL)
            self._export(self.model, LAST_WEIGHTS)
        if self.process.is_first:
            write_csv(self.folder / "metrics.csv", self.history)
            write_rows(self.folder, self.routers)
            # From here on the run counts as finished, and nothing reads its checkpoints again.
            write_result(self.folder, result)
            remove_checkpoints(self._checkpoints)
        wait_for_all()
        return result

    def _export(self, model: nn.Module, name: str) -> None:
        with self.parallel.full_weights(model) as gathered_model:
            if not self.process.is_first:
                return
            # An earlier start may have ended between weights and result.
            shutil.rmtree(self.folder / name, ignore_errors=True)
            with as_evaluated(gathered_model), replacing(self.folder / name) as folder:
                self.kind.save(gathered_model, folder)
                write_sums(folder)
