"""Fine-tuning of vision-language models on image conversations, from a config to answers."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import IntervalStrategy, TrainingArguments

from mmod.adapters.transformers.cache_base import cache_of
from mmod.analysis import Prompt, flops
from mmod.analysis.counting import needed_shares
from mmod.analysis.evaluations import evaluate_answers
from mmod.analysis.timing import Reading
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ChatDataset, ChatSample, check_conversations
from mmod.data.readers.lengths import open_checked
from mmod.data.records import prior_of
from mmod.io.files import replacing, write_atomically
from mmod.opening.runs import FINAL_MODEL
from mmod.opening.transformers import hidden_bars
from mmod.training.chat.config import TrainConfig
from mmod.training.chat.estimate import ChatEstimate, estimate
from mmod.training.chat.evaluate import Answer, EvalResult, answer_loss, answer_outcomes, ask, check_enough, score
from mmod.training.chat.model import apply_methods, create_dense, create_with_processor, warn_of_halves
from mmod.training.chat.preflight import check_start, steps_of
from mmod.training.chat.processor import create_processor
from mmod.training.chat.trainer import RoutedTrainer, train_to_end, training_arguments
from mmod.training.engine.distributed import faults_of_all, wait_for_all
from mmod.training.engine.evaluate import Columns, Evaluated, decisions_of, kept_rows
from mmod.training.engine.health import evaluation_rows, rows_of_logs, write_rows
from mmod.training.engine.kind import AfterStep, device_of
from mmod.training.engine.run_folder import FitResult, read_fit, run_once, write_result

ANSWERS = "answers.jsonl"
"""File of the answers in the run folder."""
# Prompts whose mean length costs are counted at.
_COUNTED = 8


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


@dataclass(frozen=True)
class ChatKind:
    """Image conversations with vision-language models of transformers, in its Trainer; see `Kind`."""

    config: TrainConfig
    result = EvalResult

    def create(self) -> nn.Module:
        """Create the model that the run starts from; see `mmod.training.chat.model.create_with_processor`."""
        return create_with_processor(self.config)[0]

    def sketch(self) -> nn.Module:
        """Create the model without weights; see `Kind.sketch`."""
        model = create_dense(self.config, None, on_meta=True)
        apply_methods(model, self.config)
        return model.eval()

    def fit(self, *, progress: bool = True, after_step: AfterStep = lambda step: None) -> FitResult[EvalResult | None]:
        """Train, or read the result of a finished run; see `mmod.training.fit`."""
        # From the environment, because the trainer joins the processes only when it is made.
        rank = int(os.environ.get("RANK", 0))
        world = int(os.environ.get("WORLD_SIZE", 1))
        train = partial(self._train, progress, after_step)
        return run_once(self.config, rank, world, partial(read_fit, result_class=EvalResult), train)

    def _train(
        self, progress: bool, after_step: AfterStep, write_config: Callable[[], object]
    ) -> FitResult[EvalResult | None]:
        """Train, evaluate and write the result, in a locked folder."""
        config = self.config
        folder = Path(config.output)
        check_conversations(config.data)
        arguments = training_arguments(config)
        progress = progress and arguments.process_index == 0
        data = self._open_data(arguments, progress)
        model, processor = create_with_processor(config)
        warn_of_halves(model, config)
        size = arguments.per_device_eval_batch_size
        trainer = RoutedTrainer(
            config.optim,
            None if data.val is None else partial(self._measure, data=data, size=size, progress=progress),
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
        evaluation = self._answer(model, data, arguments.should_save, progress)
        return _write_result(trainer, folder, data, evaluation)

    def _open_data(self, arguments: TrainingArguments, progress: bool) -> _Data:
        """Open the conversations, and check what the run would do with them; set the steps between two logs."""
        data = self.config.data
        collator = ChatCollator(create_processor(self.config), data.max_length, data.packed, data.protected)
        train = open_checked(data.train, data, collator, progress)
        # Questions and losses of the evaluation are of whole conversations, one a row.
        whole = dataclasses.replace(collator, max_length=None, packed=False, protected=None)
        val = None
        if data.val is not None:
            asks_in_training = arguments.eval_strategy != IntervalStrategy.NO
            val = open_checked(data.val, data, whole, progress, prompts=not asks_in_training)
            check_enough(val, arguments.world_size)
        check_start(self.config, arguments, collator.processor.tokenizer, train, val)
        if arguments.logging_steps >= 1:
            # A loss for each epoch, and for a run of fewer steps.
            arguments.logging_steps = min(arguments.logging_steps, *steps_of(arguments, len(train)))
        return _Data(collator, whole, train, val)

    def _answer(self, model: Any, data: _Data, saves: bool, progress: bool) -> EvalResult | None:
        """Answer the questions after training, and write the answers; None without questions. Collective."""
        if data.val is None:
            return None
        answers, kept = self._ask(model, data.collator, data.val, progress)
        if saves:
            lines = [
                json.dumps({**answer._asdict(), "right": answer.is_right}, ensure_ascii=False) for answer in answers
            ]
            write_atomically(Path(self.config.output) / ANSWERS, "\n".join(lines) + "\n")
        prior = prior_of(data.train.turns(), data.val.turns(last=True))
        return dataclasses.replace(score(answers, kept), prior={kind: 100 * share for kind, share in prior.items()})

    def estimate(self) -> ChatEstimate:
        """Count what the run would cost; see `Kind.estimate`."""
        return estimate(self.config)

    def evaluate_batch(self, model: nn.Module, batch: Any) -> Columns:
        """Return "loss" and "outcome", whether all tokens of the answers are the most likely, of every conversation."""
        with decisions_of(model) as decisions:
            loss_B, outcome_B = evaluate_answers(model, batch)
        return {"loss": loss_B, "outcome": outcome_B, **kept_rows(decisions)}

    def evaluate(self, model: nn.Module, progress: bool = False) -> Evaluated:
        """Generate answers to the evaluation questions; see `Kind.evaluate`."""
        answers, kept = self._ask(model, self.collator, self.questions, progress)
        return Evaluated(score(answers, kept), answer_outcomes(answers))

    def _ask(
        self, model: nn.Module, collator: ChatCollator, questions: ChatDataset, progress: bool
    ) -> tuple[list[Answer], dict[str, float]]:
        config = self.config
        size = config.eval_batch_size
        return ask(model, collator, questions, batch_size=size, max_new_tokens=config.max_new_tokens, progress=progress)

    def _measure(self, model: nn.Module, data: _Data, size: int, progress: bool) -> dict[str, float]:
        """Return the loss of the answers, in batches of `size`, and how many are right."""
        assert data.val is not None
        # Asked first, which refuses questions of which none can be read: they have no mean loss.
        answers, kept = self._ask(model, data.whole, data.val, progress)
        loss = answer_loss(model, data.whole, data.val, size)
        return {"loss": loss, **score(answers, kept).columns()}

    def cost(self, model: nn.Module, kept: Mapping[str, float]) -> dict[str, float]:
        """Count the FLOPs of the prefill of a prompt of mean length with one image."""
        _, text, image = self.prompts(_COUNTED)
        return {"prompt": flops(model, Prompt(text, image), needed_shares(model, kept)).routed}

    def report(self, model: nn.Module) -> None:
        """Count nothing by part."""

    def readings(self, model: nn.Module, size: int, batches: int = 1) -> dict[str, Reading]:
        """Return the prefill of a batch of prompts with one image."""
        prompts = self.prompts(size)[0]
        return {"prompt": Reading(partial(fill_cache, model, prompts), len(prompts["input_ids"]))}

    def calibration(self, model: nn.Module, batches: int, size: int) -> Iterable[dict[str, Tensor]]:
        """Return training conversations; see `Kind.calibration`."""
        collator = self.collator
        device = device_of(self)
        chats = open_checked(self.config.data.train, self.config.data, collator)
        count = min(len(chats), batches * size)
        # Evenly over the data, with the first conversation among them.
        chosen = [number * len(chats) // count for number in range(count)]

        def encoded(batch: list[ChatSample]) -> dict[str, Tensor]:
            chats.report.add(chain.from_iterable(chat.faults for chat in batch))
            return {name: value.to(device) for name, value in collator(batch).items()}

        # An explicit generator: the loader would otherwise draw from the global one.
        return DataLoader(Subset(chats, chosen), size, collate_fn=encoded, generator=torch.Generator())  # type: ignore[arg-type]

    @property
    def collator(self) -> ChatCollator:
        """The encoder of conversations for this model."""
        return ChatCollator(create_processor(self.config), self.config.data.max_length)

    @property
    def questions(self) -> ChatDataset:
        """The conversations of the evaluation; a ValueError without any."""
        if self.config.data.val is None:
            raise ValueError("there is nothing to ask: set data.val")
        return open_checked(self.config.data.val, self.config.data, self.collator, prompts=True)

    def chats(self, count: int) -> list[ChatSample]:
        """Return up to `count` evaluation conversations with one image, whose prompts have similar lengths."""
        questions = self.questions
        indices = [index for index in range(len(questions)) if questions.images[index] == 1][:count]
        chats = questions.read(indices)
        if not chats:
            raise ValueError("no evaluation question has one image that can be read, so there is nothing to time")
        return chats

    def prompts(self, count: int) -> tuple[dict[str, Tensor], int, int]:
        """Return the encoded prompts of `chats`, and the mean numbers of text and image tokens per prompt."""
        collator = self.collator
        prompts = collator.prompts(self.chats(count))
        rows = len(prompts["input_ids"])
        image = int((prompts["input_ids"] == collator.processor.image_token_id).sum()) // rows
        return prompts, int(prompts["attention_mask"].sum()) // rows - image, image


def fill_cache(model: Any, prompts: Mapping[str, Tensor]) -> Any:
    """Return the key-value cache of encoded prompts."""
    inputs = {name: value.to(model.device) for name, value in prompts.items()}
    return cache_of(model(**inputs, use_cache=True, logits_to_keep=1))


def _write_result(
    trainer: RoutedTrainer, folder: Path, data: _Data, evaluation: EvalResult | None
) -> FitResult[EvalResult | None]:
    """Write the result of a run with the statistics of its routers, and return it. Collective."""
    state = trainer.state
    reports = {"train": data.train.report, **({} if data.val is None else {"val": data.val.report})}
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
    wait_for_all()
    return model


def _gathered(config: TrainConfig, state: dict[str, torch.Tensor], sharded: Any) -> Any:
    """Create a sharded model anew from its gathered weights, in the dtype of the config."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    # Otherwise ZeRO-3 would shard this model too.
    unset_hf_deepspeed_config()
    model, _ = create_with_processor(config, on_meta=True)
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.to(dtypes[name]) for name, value in state.items()}, assign=True)
    inner = model if config.lora is None else model.get_base_model()
    # Tied weights are gathered twice.
    inner.tie_weights()
    inner.generation_config = sharded.generation_config
    return model
