"""The command that searches a plan: `python tools/plan.py CONFIG [--kind conversations] [--key value]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmod.io.yaml import read_yaml
from mmod.training.chat.config import TrainConfig as ChatConfig
from mmod.training.engine.parse import parse_config
from mmod.training.image.config import TrainConfig
from mmod.values import check_fields, one_of

if TYPE_CHECKING:
    from mmod import PlanSearch

__all__ = ["ChatPlanConfig", "ImagePlanConfig", "PlanOptions", "main", "search_run"]

_KIND = "--kind"


@dataclass(frozen=True)
class PlanOptions:
    """How a plan is searched, see `mmod.search_plan`.

    Args:
        budget: Share of the dense model's cost that the plan may have, or milliseconds.
        batches: Calibration batches, spread evenly over the training data.
        batch_size: Images or conversations in each.
        cost: What the budget is of: "flops", "milliseconds" of a pass over a batch, or "cache" in a language model.
        router: Which tokens a capacity above 0 keeps.
        options: Capacity, operator and context of each option; null for all that the blocks can do.
        divergence: "kl" or "cosine"; null chooses by the model.
        rounds: How often choices are scored again beside those of the plan so far.
    """

    budget: float = 0.5
    batches: int = 4
    batch_size: int = 16
    cost: str = "flops"
    router: str = "stride"
    options: list[tuple[float, str, str]] | None = None
    divergence: str | None = None
    rounds: int = 0

    def __post_init__(self) -> None:
        check_fields(
            self, "plan", budget="(0, inf)" if self.cost == "milliseconds" else "(0, 1)", batches="[1, inf)",
            batch_size="[1, inf)", cost=("flops", "cache", "milliseconds"), divergence=("kl", "cosine"),
            options="[0, 1]", rounds="[0, inf)",
        )  # fmt: skip


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

    kind: Literal["conversations"] = "conversations"
    plan: PlanOptions = field(default_factory=PlanOptions)


_KINDS: dict[str, type[ImagePlanConfig] | type[ChatPlanConfig]] = {
    "image": ImagePlanConfig,
    "conversations": ChatPlanConfig,
}


def search_run(config: ImagePlanConfig | ChatPlanConfig) -> PlanSearch:
    """Search a plan for the model that a run would start from, and write what was found into its folder `plan`.

    Scores are kept batch by batch in `scores.json`, so that the search goes on where it stopped and another budget
    tries nothing again; each budget has a plan and a picture of its own.

    Args:
        config: The model with its weights, the data, and how to search.

    Raises:
        FileExistsError: The folder holds another plan of the same name.
        ValueError: A config that starts from no weights or routes, or the folder belongs to another search.
    """
    from mmod import Option, Plan, search_plan

    if config.routing is not None:
        raise ValueError("a plan is searched for a dense model: set `routing: null`")
    options, folder = config.plan, Path(config.output) / "plan"
    model, batches, part = _chat(config) if isinstance(config, ChatPlanConfig) else _images(config)
    folder.mkdir(parents=True, exist_ok=True)
    found = search_plan(
        model,
        batches,
        options.budget,
        part=part,
        options=None if options.options is None else [Option(*each) for each in options.options],
        router=options.router,
        cost=options.cost,
        divergence=options.divergence,
        rounds=options.rounds,
        progress_file=folder / "scores.json",
    )
    name = f"{options.cost}-{options.budget:g}" + (f"-rounds-{options.rounds}" if options.rounds else "")
    path = folder / f"{name}.json"
    if not path.exists() or Plan.load(path) != found.plan:
        found.plan.save(path)
    found.plot(folder / f"{name}.png")
    return found


def _images(config: ImagePlanConfig) -> tuple[Any, Iterable[Any], str]:
    from mmod.data.loader import create_eval_stream
    from mmod.training.engine.distributed import choose_device
    from mmod.training.image.model import create_models

    if not config.model.has_weights:
        raise ValueError("nothing to search: set model.checkpoint to a file or run folder, or model.pretrained to true")
    options, device = config.plan, choose_device(config.device)
    # As in evaluation, without augmentation.
    data = dataclasses.replace(
        config.data, val_split=config.data.train_split, val_limit=options.batches * options.batch_size,
        batch_size=options.batch_size,
    )  # fmt: skip
    model = create_models(config)[0].to(device).eval()
    return model, [images.to(device) for images, _ in create_eval_stream(data).batches(0)], "image"


def _chat(config: ChatPlanConfig) -> tuple[Any, Iterable[Any], str]:
    from mmod.training.chat.model import create_model
    from mmod.training.engine.distributed import choose_device

    if config.model.checkpoint is None:
        raise ValueError("nothing to search: set model.checkpoint to a folder with weights")
    model, processor = create_model(config)
    return model.to(choose_device()).eval(), _Talks(config, processor, model), "language"


class _Talks:
    """Calibration batches of conversations, encoded when they are asked for."""

    def __init__(self, config: ChatPlanConfig, processor: Any, model: Any) -> None:
        from mmod.data.readers.chat import ChatCollator
        from mmod.data.readers.conversations import open_conversations

        self._collator = ChatCollator(processor, config.data.max_length)
        self._talks = open_conversations(config.data.train, config.data)
        self._device = model.device
        self._size = config.plan.batch_size
        count = min(len(self._talks), config.plan.batches * self._size)
        self._chosen = [place * len(self._talks) // count for place in range(count)]

    def __len__(self) -> int:
        return -(-len(self._chosen) // self._size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self._chosen), self._size):
            talks = [self._talks[place] for place in self._chosen[start : start + self._size]]
            yield {name: value.to(self._device) for name, value in self._collator(talks).items()}


def main(arguments: Sequence[str]) -> None:
    """Search as the command line `CONFIG [--kind image|conversations] [--key value]` says and print what was found."""
    one_of("kind", kind := _kind(arguments), tuple(_KINDS))
    config: Any = parse_config(arguments, _KINDS[kind])
    found = search_run(config)
    print(f"{found}\n\nPlan, picture and scores: {Path(config.output) / 'plan'}")


def _kind(arguments: Sequence[str]) -> str:
    """Return the kind that a command line or its config file names."""
    for place, word in enumerate(arguments):
        if word.startswith(f"{_KIND}="):
            return word.removeprefix(f"{_KIND}=")
        if word == _KIND and place + 1 < len(arguments):
            return arguments[place + 1]
    named = arguments and not arguments[0].startswith("-")
    return str(read_yaml(arguments[0]).get("kind", "image")) if named else "image"
