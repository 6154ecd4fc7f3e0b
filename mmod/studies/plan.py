"""The command that searches a plan: `mmod plan CONFIG [--kind chat] [--key value]`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmod.io.locks import locked
from mmod.io.yaml import stack_configs
from mmod.studies.config import PlanOptions
from mmod.training.chat.config import TrainConfig as ChatConfig
from mmod.training.engine.parse import parse_config
from mmod.training.image.config import TrainConfig
from mmod.values import one_of

if TYPE_CHECKING:
    # By way of the package, which what reads the types of fields imports without torch.
    import mmod

__all__ = ["ChatPlanConfig", "ImagePlanConfig", "main", "search_for", "search_run"]


@dataclass(frozen=True, kw_only=True)
class ImagePlanConfig(TrainConfig):
    """The keys of an image classifier's training config, whose `model`, `data` and `device` say what is searched.

    Args:
        kind: The kind of model.
        plan: How it is searched. What is found goes to the folder `plan` in `output`.
    """

    kind: Literal["image"] = "image"
    plan: PlanOptions = field(default_factory=PlanOptions)


@dataclass(frozen=True, kw_only=True)
class ChatPlanConfig(ChatConfig):
    """The keys of a vision-language model's training config, whose `model` and `data` say what is searched.

    Args:
        kind: The kind of model.
        plan: How it is searched. What is found goes to the folder `plan` in `output`.
    """

    kind: Literal["chat"] = "chat"
    plan: PlanOptions = field(default_factory=PlanOptions)


_KINDS: dict[str, type[ImagePlanConfig] | type[ChatPlanConfig]] = {
    "image": ImagePlanConfig,
    "chat": ChatPlanConfig,
}


def search_run(config: ImagePlanConfig | ChatPlanConfig) -> mmod.PlanSearch:
    """Search a plan for the model that a run would start from, and write what was found into its folder `plan`.

    Args:
        config: The model with its weights, the data, and how to search.

    Raises:
        FileExistsError: The folder holds another plan of the same name.
        ValueError: A config that starts from no weights or routes, or the folder belongs to another search.
    """
    return search_for(config, config.plan, Path(config.output) / "plan")


def search_for(config: TrainConfig | ChatConfig, options: PlanOptions, folder: Path) -> mmod.PlanSearch:
    """Search a plan for the model that a run would start from, and write what was found.

    Scores are kept batch by batch in `scores.jsonl`, so that the search goes on where it stopped and another budget
    tries nothing again; each budget has a plan and a picture of its own.

    Args:
        config: The run: its model with weights, and its training data.
        options: How to search.
        folder: Where scores, plan and picture go.

    Raises:
        FileExistsError: The folder holds another plan of the same name.
        ValueError: A run that starts from no weights or routes, or the folder belongs to another search.
    """
    from mmod import Option, Plan, search_plan

    if config.routing is not None:
        raise ValueError("a plan is searched for a dense model: set `routing: null`")
    if isinstance(config, ChatConfig):
        model, batches, part = _chat(config, options)
    else:
        model, batches, part = _images(config, options)
    name = f"{options.cost}-{options.budget:g}" + (f"-rounds-{options.rounds}" if options.rounds else "")
    with locked(folder, wait=True):
        folder.mkdir(parents=True, exist_ok=True)
        found = search_plan(
            model,
            batches,
            options.budget,
            part=part,
            options=None if options.options is None else [Option(*each) for each in options.options],
            router=options.router,
            importance=options.importance,
            cost=options.cost,
            divergence=options.divergence,
            rounds=options.rounds,
            progress_file=folder / "scores.jsonl",
        )
        path = folder / f"{name}.json"
        if not path.exists() or Plan.load(path) != found.plan:
            found.plan.save(path)
        found.plot(folder / f"{name}.png")
    return found


def _images(config: TrainConfig, options: PlanOptions) -> tuple[Any, Iterable[Any], str]:
    from mmod.data.loader import create_eval_stream
    from mmod.training.engine.distributed import choose_device
    from mmod.training.image.model import create_models

    if not config.model.has_weights:
        raise ValueError("nothing to search: set model.checkpoint to a file or run folder, or model.pretrained to true")
    device = choose_device(config.device)
    # As in evaluation, without augmentation.
    data = dataclasses.replace(
        config.data, val_split=config.data.train_split, val_limit=options.batches * options.batch_size,
        batch_size=options.batch_size,
    )  # fmt: skip
    model = create_models(config)[0].to(device).eval()
    return model, [images.to(device) for images, _ in create_eval_stream(data).batches(0)], "image"


def _chat(config: ChatConfig, options: PlanOptions) -> tuple[Any, Iterable[Any], str]:
    from mmod.training.chat.model import create_model
    from mmod.training.engine.distributed import choose_device

    if config.model.checkpoint is None:
        raise ValueError("nothing to search: set model.checkpoint to a folder with weights")
    model, processor = create_model(config)
    return model.to(choose_device()).eval(), _Talks(config, options, processor, model), "language"


class _Talks:
    """Calibration batches of conversations, encoded when they are asked for."""

    def __init__(self, config: ChatConfig, options: PlanOptions, processor: Any, model: Any) -> None:
        from mmod.data.readers.chat import ChatCollator
        from mmod.data.readers.conversations import open_conversations

        self._collator = ChatCollator(processor, config.data.max_length)
        self._talks = open_conversations(config.data.train, config.data)
        self._device = model.device
        self._size = options.batch_size
        count = min(len(self._talks), options.batches * self._size)
        self._chosen = [place * len(self._talks) // count for place in range(count)]

    def __len__(self) -> int:
        return -(-len(self._chosen) // self._size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self._chosen), self._size):
            talks = [self._talks[place] for place in self._chosen[start : start + self._size]]
            yield {name: value.to(self._device) for name, value in self._collator(talks).items()}


def main(arguments: Sequence[str]) -> None:
    """Search as the command line `CONFIG [--kind image|chat] [--key value]` says and print what was found."""
    kind = _kind(arguments)
    one_of("kind", kind, tuple(_KINDS))
    config: Any = parse_config(arguments, _KINDS[kind])
    found = search_run(config)
    print(f"{found}\n\nPlan, picture and scores: {Path(config.output) / 'plan'}")


def _kind(arguments: Sequence[str]) -> str:
    """Return the kind that a command line or its config file names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--kind")
    given = parser.parse_known_args(arguments)[0].kind
    if given is not None:
        return str(given)
    return str((stack_configs(arguments)[0] or {}).get("kind", "image"))
