"""Training of the real halves: the projector's start, then projector and LoRA by answers, few image tokens first.

Axes: B conversations, N tokens, P patches, D channels of the tower, E those of the language model, C classes.
"""

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.real_halves.model import BEFORE
from scripts.real_halves.questions import Thing

_EMBEDDING_NORM = 3.2
_DECAY = 2e-3
# Ratio of the number of steps that the learning rates rise in.
_WARMUP = 0.05
_SAVED_EVERY = 40
_EVALUATED_EVERY = 200
# Conversations of each file.
_EVALUATED = 40
_STATE = "training.pt"


@dataclass(frozen=True)
class Stage:
    """A stage of training.

    Args:
        pooled: Side of the windows of patches whose mean is one image token.
        samples: Pictures that are read, several times each if there are fewer.
        rate: Learning rate of the projector; that of LoRA is half of it.
        batch: Pictures of a step.
    """

    pooled: int
    samples: int
    rate: float
    batch: int = 16


@dataclass(frozen=True)
class Schedule:
    """How long a model is trained.

    Args:
        start: Steps in which the projector learns to write names.
        stages: What follows.
    """

    start: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Chat:
    """A picture's number and what is asked of it: tokens of the questions and of the answers, and the kinds."""

    picture: int
    questions: list[list[int]]
    answers: list[list[int]]
    kinds: list[str]


class Chats:
    """Conversations of a file and the features of their pictures (pictures, P, D)."""

    def __init__(self, file: Path, tokenizer: Any) -> None:
        records = json.loads(file.read_text())
        names = list(dict.fromkeys(record["image"] for record in records))
        self.pictures = [file.parent / name for name in names]
        numbers = {name: number for number, name in enumerate(names)}
        self.before = tokenizer(BEFORE)["input_ids"]
        self.chats = list[Chat]()
        for record in records:
            texts = [turn["value"].replace("<image>", "") for turn in record["conversations"]]
            asked = [tokenizer(f". Question: {text} Answer:")["input_ids"] for text in texts[::2]]
            answers = [[*tokenizer(f" {text}")["input_ids"], tokenizer.eos_token_id] for text in texts[1::2]]
            self.chats.append(Chat(numbers[record["image"]], asked, answers, record["kinds"]))


def pooled(features: Tensor, side: int) -> Tensor:
    """Return means over windows of side x side patches of square pictures (B, P, D)."""
    if side == 1:
        return features
    rows = round(features.shape[1] ** 0.5)
    grid = features.transpose(1, 2).unflatten(2, (rows, rows))
    return F.avg_pool2d(grid, side).flatten(2).transpose(1, 2)


def seen_in(features: Tensor, pictures: Sequence[Path], things: Sequence[Thing]) -> Tensor:
    """Return the mean feature of each thing (things, D) from those of square pictures (pictures, P, D)."""
    rows = round(features.shape[1] ** 0.5)
    grid = features.unflatten(1, (rows, rows))
    numbers = {picture.name: number for number, picture in enumerate(pictures)}
    means = []
    for thing in things:
        left, top = (round(place * rows) for place in thing.corner)
        side = round(thing.side * rows)
        window = grid[numbers[Path(thing.file).name], top : top + side, left : left + side]
        means.append(window.float().mean((0, 1)))
    return torch.stack(means)


def start_projector(
    model: Any, tokenizer: Any, features: Tensor, seen: Tensor, names: Sequence[str], steps: int
) -> None:
    """Let the projector write a mixture of names: those that a classifier of mean features sees around a patch.

    A projector that starts at random learns the distribution of answers and does not look at the picture.

    Args:
        model: The vision-language model, whose projector changes in place.
        tokenizer: Its tokenizer.
        features: Features (pictures, P, D) of pictures.
        seen: Mean features (things, D) of things in them.
        names: The name of each thing.
        steps: Steps of gradient descent.
    """
    known = sorted(set(names))
    labels = torch.tensor([known.index(name) for name in names])
    center, spread = seen.mean(0), seen.std(0)
    classifier = fit_classifier((seen - center) / spread, labels)
    table = model.get_input_embeddings().weight.detach()
    name_CE = torch.stack([table[tokenizer(f" {name}")["input_ids"]].mean(0) for name in known])
    projector = model.model.multi_modal_projector
    # Hidden units in the range where the activation bends.
    with torch.no_grad():
        projector.linear_1.weight.copy_(torch.randn_like(projector.linear_1.weight) / features.shape[2] ** 0.5 / spread)
        projector.linear_1.bias.copy_(-projector.linear_1.weight @ center)
    optimizer = torch.optim.AdamW(projector.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(steps):
        x_BPD = features[torch.randint(len(features), (8,))].float()
        with torch.no_grad():
            logits = classifier((around(x_BPD) - center) / spread)
            target = F.normalize(logits.softmax(2) @ name_CE, dim=2) * _EMBEDDING_NORM
        error = F.mse_loss(projector(x_BPD), target) * target.shape[2]
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        schedule.step()
    right = (classifier((seen - center) / spread).argmax(1) == labels).float().mean().item()
    print(f"start: {right:.3f} of the things named by the classifier, squared error {error.item():.2f}", flush=True)


def fit_classifier(x_BD: Tensor, labels: Tensor) -> nn.Linear:
    """Return a logistic regression."""
    classifier = nn.Linear(x_BD.shape[1], int(labels.max()) + 1)
    optimizer = torch.optim.LBFGS(classifier.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        value = F.cross_entropy(classifier(x_BD), labels) + _DECAY * classifier.weight.square().sum()
        value.backward()
        return value.item()

    optimizer.step(loss)
    return classifier


def around(x_BPD: Tensor) -> Tensor:
    """Return the mean over each patch and its neighbours, of square pictures."""
    rows = round(x_BPD.shape[1] ** 0.5)
    grid = x_BPD.transpose(1, 2).unflatten(2, (rows, rows))
    means = F.avg_pool2d(grid, 3, stride=1, padding=1, count_include_pad=False)
    return means.flatten(2).transpose(1, 2)


def batch_of(chats: Chats, chosen: Sequence[Chat], image_BNE: Tensor, embed: nn.Module) -> dict[str, Tensor]:
    """Return inputs in which each question sees the text before it, the image and itself, not the other questions.

    So the answers are those of as many conversations of one question, at the cost of reading an image once.
    """
    image = image_BNE.shape[1]
    prefix = len(chats.before) + image
    lengths = [prefix + sum(map(len, [*chat.questions, *chat.answers])) for chat in chosen]
    size = max(lengths)
    ids = torch.zeros(len(chosen), size, dtype=torch.long)
    block = torch.full((len(chosen), size), -1)
    position = torch.zeros(len(chosen), size, dtype=torch.long)
    labels = torch.full((len(chosen), size), -100)
    ids[:, : len(chats.before)] = torch.tensor(chats.before)
    block[:, :prefix] = 0
    position[:, :prefix] = torch.arange(prefix)
    for row, chat in enumerate(chosen):
        at = prefix
        for number, (question, answer) in enumerate(zip(chat.questions, chat.answers), 1):
            end = at + len(question) + len(answer)
            ids[row, at:end] = torch.tensor([*question, *answer])
            block[row, at:end] = number
            position[row, at:end] = prefix + torch.arange(end - at)
            # The logits of a position are about the next token.
            labels[row, at + len(question) - 1 : end - 1] = torch.tensor(answer)
            at = end
    same = (block[:, :, None] == block[:, None, :]) | (block[:, None, :] == 0)
    # Padding sees itself, as a row of no key has no softmax.
    sees = (same & torch.ones(size, size, dtype=torch.bool).tril()) | torch.eye(size, dtype=torch.bool)
    x = embed(ids)
    x = torch.cat([x[:, : len(chats.before)], image_BNE.to(x.dtype), x[:, prefix:]], 1)
    return {"inputs_embeds": x, "attention_mask": sees[:, None], "position_ids": position, "labels": labels}


def answer_logits(
    model: Any, chats: Chats, chosen: Sequence[Chat], features: Tensor, side: int
) -> tuple[Tensor, Tensor]:
    """Return the logits at the tokens of all answers, and those tokens.

    Args:
        model: The vision-language model.
        chats: The conversations' file.
        chosen: Those that are answered.
        features: Features (pictures, P, D) of the pictures of the file.
        side: Side of the windows of patches whose mean is one image token.
    """
    x = pooled(features[[chat.picture for chat in chosen]].float(), side)
    with torch.autocast("cpu", torch.bfloat16):
        batch = batch_of(chats, chosen, model.model.multi_modal_projector(x), model.get_input_embeddings())
        labels = batch.pop("labels")
        hidden = model.model.language_model(**batch, use_cache=False).last_hidden_state
        asked = labels >= 0
        return model.lm_head(hidden[asked]), labels[asked]


@torch.inference_mode()
def right_answers(model: Any, chats: Chats, features: Tensor, side: int, limit: int) -> dict[str, float]:
    """Return the share of questions whose answer would be generated, by kind, of the first conversations."""
    right: dict[str, list[bool]] = {}
    for start in range(0, min(limit, len(chats.chats)), 10):
        chosen = chats.chats[start : start + 10]
        logits, wanted = answer_logits(model, chats, chosen, features, side)
        same = iter((logits.argmax(1) == wanted).tolist())
        for chat in chosen:
            for kind, answer in zip(chat.kinds, chat.answers):
                right.setdefault(kind, []).append(all(list(itertools.islice(same, len(answer)))))
    return {kind: sum(values) / len(values) for kind, values in right.items()}


def batches(chats: Sequence[Chat], stage: Stage, generator: torch.Generator) -> Iterator[list[Chat]]:
    """Yield the batches of a stage, each of conversations with as many questions."""
    assert len(chats) >= stage.batch, "fewer conversations than one batch"
    steps = stage.samples // stage.batch
    made = 0
    while made < steps:
        order = [chats[place] for place in torch.randperm(len(chats), generator=generator).tolist()]
        order.sort(key=lambda chat: len(chat.questions))
        groups = [order[start : start + stage.batch] for start in range(0, len(order) - stage.batch + 1, stage.batch)]
        for place in torch.randperm(len(groups), generator=generator).tolist():
            if made < steps:
                made += 1
                yield groups[place]


@dataclass
class Training:
    """Training of the parameters that need gradients, which goes on where an earlier call stopped.

    Processes of a group, as torchrun starts them, share the pictures of every step.

    Args:
        model: The vision-language model with adapters.
        chats: What is asked in training.
        features: Features (pictures, P, D) of its pictures.
        folder: Keeps the state.
        evaluated: Questions that are answered now and then, with the features of their pictures.
    """

    model: Any
    chats: Chats
    features: Tensor
    folder: Path
    evaluated: Mapping[str, tuple[Chats, Tensor]]
    seconds: float = 0.0

    def run(self, stages: Sequence[Stage]) -> None:
        """Train through all stages."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = self._read()
        for number, stage in enumerate(stages):
            if number == state["stage"]:
                self._run_stage(number, stage, state["step"], state["optimizer"])
            elif number > state["stage"]:
                self._run_stage(number, stage)

    def _run_stage(self, number: int, stage: Stage, first: int = 0, earlier: dict[str, Any] | None = None) -> None:
        optimizer = torch.optim.AdamW(self._groups(stage), weight_decay=0.01)
        if earlier is not None:
            optimizer.load_state_dict(earlier)
        steps = stage.samples // stage.batch
        losses = list[float]()
        for step, chosen in enumerate(batches(self.chats.chats, stage, torch.Generator().manual_seed(number))):
            if step < first:
                continue
            started = time.process_time()
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * scheduled(step / steps)
            losses.append(self._step(chosen, stage, optimizer))
            self.seconds += time.process_time() - started
            done = step + 1
            if _rank() == 0 and (done % _SAVED_EVERY == 0 or done == steps):
                print(f"stage {number} step {done}/{steps} loss {mean(losses[-_SAVED_EVERY:]):.3f}", flush=True)
                self._write(number + done // steps, done % steps, optimizer)
            if _rank() == 0 and (done % _EVALUATED_EVERY == 0 or done == steps):
                for name, (asked, seen) in self.evaluated.items():
                    print(name, right_answers(self.model, asked, seen, stage.pooled, _EVALUATED), flush=True)

    def _step(self, chosen: Sequence[Chat], stage: Stage, optimizer: torch.optim.Optimizer) -> float:
        world = dist.get_world_size() if dist.is_initialized() else 1
        own = chosen[_rank() :: world]
        logits, wanted = answer_logits(self.model, self.chats, own, self.features, stage.pooled)
        loss = F.cross_entropy(logits.float(), wanted)
        optimizer.zero_grad()
        loss.backward()
        trained = list(self._trained().values())
        if world > 1:
            average_gradients(trained, world)
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return loss.item()

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def _groups(self, stage: Stage) -> list[dict[str, Any]]:
        projector = [value for name, value in self._trained().items() if "projector" in name]
        adapters = [value for name, value in self._trained().items() if "projector" not in name]
        return [{"params": projector, "peak": stage.rate}, {"params": adapters, "peak": stage.rate / 2}]

    def _read(self) -> dict[str, Any]:
        file = self.folder / _STATE
        if not file.exists():
            return {"stage": 0, "step": 0, "optimizer": None}
        state: dict[str, Any] = torch.load(file, weights_only=True)
        self.model.load_state_dict(state["weights"], strict=False)
        self.seconds = state["seconds"]
        return state

    def _write(self, stage: int, step: int, optimizer: torch.optim.Optimizer) -> None:
        weights = {name: value.detach() for name, value in self._trained().items()}
        # A stage begins with an optimizer of its own.
        kept = optimizer.state_dict() if step else None
        state = {"stage": stage, "step": step, "weights": weights, "optimizer": kept, "seconds": self.seconds}
        partial = self.folder / f"{_STATE}.partial"
        torch.save(state, partial)
        partial.rename(self.folder / _STATE)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def average_gradients(parameters: Iterable[nn.Parameter], world: int) -> None:
    """Replace gradients by their means over all processes."""
    gradients = [value.grad for value in parameters if value.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(total.view_as(gradient) / world)


def scheduled(done: float) -> float:
    """Return the factor of the learning rates at a share of a stage: it rises, then falls linearly to a hundredth."""
    return min(done / _WARMUP + 0.05, 1.0, max(0.01, 1.0 - (done - _WARMUP) / (1.0 - _WARMUP)))
