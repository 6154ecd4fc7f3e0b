"""Fine-tuning on image conversations with transformers' Trainer, from a config to answers."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import IntervalStrategy, TrainingArguments

from mmod.data.files import check_files
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ChatDataset
from mmod.data.readers.lengths import open_checked
from mmod.data.records import prior_of
from mmod.io.files import replacing, write_atomically
from mmod.io.store import Store
from mmod.io.sums import write_sums
from mmod.opening.runs import FINAL_MODEL
from mmod.opening.transformers import hidden_bars
from mmod.training.chat.config import TrainConfig
from mmod.training.chat.evaluate import EvalResult, answer_loss, ask, check_enough, score
from mmod.training.chat.kind import ChatKind
from mmod.training.chat.preflight import check_start, steps_of
from mmod.training.chat.start import create_with_processor, sketch_to_train, warn_of_halves
from mmod.training.chat.trainer import RoutedTrainer, train_to_end, training_arguments
from mmod.training.engine.distributed import check_launch, faults_of_all, wait_for_all
from mmod.training.engine.health import evaluation_rows, rows_of_logs, write_rows
from mmod.training.engine.kind import AfterStep
from mmod.training.engine.run_folder import FitResult, read_fit, run_once, write_result

ANSWERS = "answers.jsonl"
"""File of the answers in the run folder."""


class _Data(NamedTuple):
    """The conversations of a run, and their encoders.

    Attributes:
        collator: Encodes conversations for training.
        whole: Encodes whole conversations: the loss of an evaluation is that of whole answers.
    """

    collator: ChatCollator
    whole: ChatCollator
    train: ChatDataset
    val: ChatDataset | None


def fit(
    kind: ChatKind,
    *,
    progress: bool = True,
    after_step: AfterStep = lambda step: None,
    store: Store | None = None,
) -> FitResult[EvalResult | None]:
    """Train, or read the result of a finished run; see `mmod.training.fit`.

    Args:
        store: Not read. Comparisons pass theirs to every kind, and checks of conversations are kept beside their data.
    """
    check_launch()
    # From the environment, because the trainer joins the processes only when it is made.
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    train = partial(_train, kind, progress, after_step)
    return run_once(kind.config, rank, world, partial(read_fit, result_class=kind.result), train)


def _train(
    kind: ChatKind, progress: bool, after_step: AfterStep, write_config: Callable[[], object]
) -> FitResult[EvalResult | None]:
    """Train, evaluate and write the result, in a locked folder."""
    config = kind.config
    folder = Path(config.output)
    check_files(config.data)
    # What the model cannot be is refused before conversations and weights are read, which takes long; and before the
    # trainer's arguments, with which DeepSpeed would split this model too.
    _, processor = sketch_to_train(config)
    arguments = training_arguments(config)
    progress = progress and arguments.process_index == 0
    data = open_data(config, processor, arguments, progress)
    model, processor = create_with_processor(config)
    warn_of_halves(model, config)
    measure = None
    if data.val is not None:
        size = arguments.per_device_eval_batch_size
        measure = partial(_measure, kind, data=data, size=size, progress=progress)
    trainer = RoutedTrainer(
        config.optim,
        measure,
        model=model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=data.val,
        data_collator=data.collator,
        processing_class=processor,
    )
    train_to_end(trainer, folder, write_config, after_step, progress)
    # Saved before it is evaluated: answers take long, and an interruption among them costs no training.
    model = _save(trainer, folder / FINAL_MODEL, config)
    evaluation = _answer(kind, model, data, arguments.should_save, progress)
    return _write_result(trainer, folder, data, evaluation)


def open_data(config: TrainConfig, processor: Any, arguments: TrainingArguments, progress: bool) -> _Data:
    """Open the conversations, those of training last, and check what the run would do with them.

    Sets the steps between two logs.
    """
    data = config.data
    collator = ChatCollator(processor, data.max_length, data.packed, data.protected)
    # Questions and losses of the evaluation are of whole conversations, one a row.
    whole = dataclasses.replace(collator, max_length=None, packed=False, protected=None)
    val = None
    if data.val is not None:
        asks_in_training = arguments.eval_strategy != IntervalStrategy.NO
        val = open_checked(data.val, data, whole, progress, prompts=not asks_in_training)
        check_enough(val, arguments.world_size)
    train = open_checked(data.train, data, collator, progress)
    check_start(config, arguments, processor.tokenizer, train, val)
    if arguments.logging_steps >= 1:
        # A loss for each epoch, and for a run of fewer steps.
        arguments.logging_steps = min(arguments.logging_steps, *steps_of(arguments, len(train)))
    return _Data(collator, whole, train, val)


def _answer(kind: ChatKind, model: nn.Module, data: _Data, saves: bool, progress: bool) -> EvalResult | None:
    """Answer the questions after training, and write the answers; None without questions. Collective."""
    if data.val is None:
        return None
    answers, kept = ask(kind.config, model, data.whole, data.val, progress=progress)
    if saves:
        lines = [json.dumps({**answer._asdict(), "right": answer.is_right}, ensure_ascii=False) for answer in answers]
        write_atomically(Path(kind.config.output) / ANSWERS, "\n".join(lines) + "\n")
    prior = prior_of(data.train.turns(), data.val.turns(last=True))
    percentages = {kind: 100 * share for kind, share in prior.items()}
    return dataclasses.replace(score(answers, kept), prior=percentages)


def _measure(kind: ChatKind, model: nn.Module, data: _Data, size: int, progress: bool) -> dict[str, float]:
    """Return the loss of the answers, in batches of `size`, and how many are right."""
    assert data.val is not None
    # Asked first, which refuses questions of which none can be read: they have no mean loss.
    answers, kept = ask(kind.config, model, data.whole, data.val, progress=progress)
    loss = answer_loss(model, data.whole, data.val, size)
    return {"loss": loss, **score(answers, kept).columns()}


def _write_result(
    trainer: RoutedTrainer, folder: Path, data: _Data, evaluation: EvalResult | None
) -> FitResult[EvalResult | None]:
    """Write the result of a run with the statistics of its routers, and return it. Collective."""
    state = trainer.state
    reports = {"train": data.train.report}
    if data.val is not None:
        reports["val"] = data.val.report
    result = FitResult(
        folder=str(folder),
        epochs=round(state.epoch or 0.0, 6),
        steps=state.global_step,
        evaluation=evaluation,
        average=None,
        history=state.log_history,
        skipped={name: faults_of_all(report).counts for name, report in reports.items()},
    )
    if trainer.args.should_save:
        kept = {} if evaluation is None else evaluation.kept
        write_rows(folder, [*rows_of_logs(result.history), *evaluation_rows(result.steps, "val", kept)])
        write_result(folder, result)
    return result


def _save(trainer: RoutedTrainer, folder: Path, config: TrainConfig) -> Any:
    """Save the final model with merged adapters and return it; a sharded one only exists in the saving process."""
    model: Any = None
    if not config.is_sharded:
        model = trainer.accelerator.unwrap_model(trainer.model)
    else:
        # Collective: all processes give their shards, and one gets the weights.
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if trainer.args.should_save:
            model = _gathered(config, state, trainer.model)
    if config.lora is not None and model is not None:
        model = model.merge_and_unload()
    if trainer.args.should_save:
        # An earlier start may have ended between weights and result.
        shutil.rmtree(folder, ignore_errors=True)
        with hidden_bars(), replacing(folder) as partial_folder:
            model.save_pretrained(partial_folder)
            trainer.processing_class.save_pretrained(partial_folder)  # type: ignore[union-attr]
            write_sums(partial_folder)
    wait_for_all()
    return model


def _gathered(config: TrainConfig, state: dict[str, torch.Tensor], sharded: Any) -> object:
    """Create a sharded model anew from its gathered weights, in the dtype of the config."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    # Otherwise ZeRO-3 would shard this model too.
    unset_hf_deepspeed_config()
    model, _ = create_with_processor(config, on_meta=True)
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    weights = {name: value.to(dtypes[name]) for name, value in state.items()}
    model.load_state_dict(weights, assign=True)
    inner = model if config.lora is None else model.get_base_model()
    # Tied weights are gathered twice.
    inner.tie_weights()
    inner.generation_config = sharded.generation_config
    return model
