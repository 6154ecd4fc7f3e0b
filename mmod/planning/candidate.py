"""What advice and studies compare: a model made from the dense one, written as keys of a training config.

Imported without torch, as configs of studies are made into candidates, and help is answered without.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mmod.values import Checked, check_value

if TYPE_CHECKING:
    from torch import nn


CONTROL = "random"
"""Name of the series that others are compared with, unless a study names another, and of its score."""
ImageSize = int | Mapping[str, int]
"""A side in pixels, or the fewest and most pixels of an image, as the `size` of Qwen-VL's processors has them."""
TOLERANCE = 0.02
"""Share of accuracy, or of agreement, that may be lost."""
Measure = Literal["top1", "features", "patches"]
"""What of a model of images must stay equal: the top class, the features that a head reads, or those of patches."""
MEASURES: tuple[Measure, ...] = ("top1", "features", "patches")
ANY_SIZE = {"dynamic_img_size": True}
"""Arguments by which a model of timm takes images of any size."""
FIT = "fit"
"""In place of a number of a candidate: the one that brings its FLOPs to its budget."""


@dataclass(frozen=True)
class PlanOptions(Checked, group="plan"):
    """Options of the search for a plan, see `mmod.search_plan`.

    Args:
        budget: Share of the dense model's cost that the plan may have, or milliseconds.
        batches: Calibration batches, spread evenly over the training data.
        batch_size: Samples of a batch.
        part: The part that is planned; null for the image tower of image and pairs, the language model of chat and
            text.
        cost: Unit of the budget: "flops", "milliseconds" of a pass over a batch, or in a language model "cache" or
            "image_flops", the FLOPs that image tokens add.
        router: Chooses the tokens of a capacity above 0; a name, or a mapping with options such as `importance`.
        options: Capacity, operator and context of every option; null for all that the blocks support.
        divergence: "kl" or "cosine"; null chooses by the model.
        rounds: Rounds in which options are scored again together with the choices of the plan so far.
    """

    budget: float = 0.5
    batches: Annotated[int, "[1, inf)"] = 4
    batch_size: Annotated[int, "[1, inf)"] = 16
    part: Literal["image", "text", "language"] | None = None
    cost: Literal["flops", "image_flops", "cache", "milliseconds"] = "flops"
    router: str | dict[str, object] = "stride"
    options: Annotated[list[tuple[float, str, str]] | None, "[0, 1]"] = None
    divergence: Literal["kl", "cosine"] | None = None
    rounds: Annotated[int, "[0, inf)"] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Other budgets than milliseconds are shares of the dense model's cost.
        limit = "(0, inf)" if self.cost == "milliseconds" else "(0, 1)"
        check_value("plan.budget", self.budget, float, limit)


@dataclass(frozen=True)
class Candidate:
    """A model that is compared with the dense one; without changes it is the dense one.

    Args:
        routing: As in a training config; for `mmod.advise`, that of the part that is made cheaper.
        methods: As in a training config: mappings with the `kind` and the fields of a method, applied before routing.
        image_size: Side of its images in pixels, if it differs; "fit" chooses it by `budget`. Position embeddings are
            resampled. For processors that limit pixels, their `size`: `shortest_edge` and `longest_edge`, the fewest
            and the most.
        changes: Fields of its training config that differ, nested as there.
        from_scratch: Train it from random weights instead of fine-tuning the dense model.
        is_trained: Train it, where a comparison trains at all.
        search: How its routing is searched in the dense model of every seed; None where it is known.
        series: Name that it shares with the same model at other budgets.
        budget: The capacity or share of the dense cost that it is made for.
        control: Name of the candidate that it is compared with besides the dense one.

    Raises:
        TypeError: The routing is a name.

    Example:
        >>> candidate = Candidate("ToMe r=8", methods=({"kind": "merge", "r": 8},))
        >>> print(candidate.code("image", is_only=True))
        mmod.apply_(model, mmod.methods.Merge(r=8))
    """

    name: str
    _: dataclasses.KW_ONLY
    routing: Mapping[str, object] | None = None
    methods: tuple[Mapping[str, Any], ...] = ()
    image_size: ImageSize | str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    from_scratch: bool = False
    is_trained: bool = True
    search: PlanOptions | None = None
    series: str = ""
    budget: float | None = None
    control: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.routing, str):
            preset = json.dumps({"preset": self.routing})
            raise TypeError(f"routing is a mapping as in a training config, such as {preset}, got {self.routing!r}")

    @property
    def is_baseline(self) -> bool:
        """Whether the model has no router: it is dense, or changed by a fixed rule."""
        has_router = self.routing is not None or self.search is not None
        # Only methods that learn what they choose are trained from scratch.
        return not has_router and not (self.methods and self.from_scratch)

    @property
    def at_random(self) -> bool:
        """Whether chance chooses what it keeps: other models are compared with it, and it is never advised."""
        # By its name where a user made it, as `models` of `mmod.advise`.
        return CONTROL in (self.name, self.series) or _draws(self.routing) or any(map(_draws, self.methods))

    @property
    def resizes(self) -> bool:
        """Whether a method makes its images smaller."""
        return any(method["kind"] == "resize" for method in self.methods)

    @property
    def label(self) -> str:
        """Its name, and in a series of smaller images their side or most pixels."""
        sizes = [self.image_size, *(method.get("size") for method in self.methods if method["kind"] == "resize")]
        side = next((size for size in sizes if size is not None), None)
        if side is None or not self.series:
            return self.name
        if isinstance(side, Mapping):
            return f"{self.name} (at most {side['longest_edge']:,})"
        # Height and width, where images are not square.
        pixels = side if isinstance(side, int) else " x ".join(map(str, side))
        return f"{self.name} ({pixels} px)"

    def apply_(self, model: nn.Module, part: str, depth: int) -> bool:
        """Change a dense model in place, without training, and return whether most blocks compute attention twice then.

        Args:
            part: The part that is routed.
            depth: Number of its blocks.
        """
        # Imported late, as in `code`.
        from mmod.blocks import noting_methods
        from mmod.methods.resolve import resolve_methods
        from mmod.model import change_

        # Of each of many candidates; whoever compares them says it once.
        with noting_methods() as noted:
            for method in resolve_methods(self.methods, {part: self.routing}, {part: depth}):
                change_(model, method)
        return bool(noted)

    def config(self, part: str, is_only: bool) -> str:
        """Return the keys of a training config that apply it, a line each.

        Args:
            part: The part that is routed.
            is_only: The model has no other part, so its name is left out.
        """
        lines = []
        if isinstance(self.image_size, Mapping):
            lines.append(f"model: {json.dumps({'processor_args': {'size': self.image_size}})}")
        elif self.image_size is not None:
            lines.append(f"model: {json.dumps({'image_size': self.image_size})}")
        if self.methods:
            lines.append(f"methods: {json.dumps(self.methods)}")
        if self.routing is not None:
            routing = self.routing if is_only else {part: self.routing}
            lines.append(f"routing: {json.dumps(routing)}")
        return "\n".join(lines)

    def code(self, part: str, is_only: bool, tokens: str = "") -> str:
        """Return the lines of Python that apply it.

        Args:
            part: That of `config`, and so is `is_only`.
            tokens: The argument `tokens=` of a user's own model; empty for none.
        """
        from mmod.methods import METHODS

        lines = []
        for values in self.methods:
            fields = {name: value for name, value in values.items() if name != "kind"}
            method = METHODS[values["kind"]]
            # A method of another package is named by its kind.
            shown = _literal(dict(values))
            # `mmod.methods`, or the lab.
            home = method.__module__.rpartition(".")[0]
            if home.startswith("mmod."):
                shown = f"{home}.{method.__name__}({_arguments(fields)})"
            lines.append(_call("apply_", shown, tokens))
        if self.routing is not None:
            fields = dict(self.routing)
            preset = fields.pop("preset", None)
            if preset is None:
                config = f"mmod.RoutingConfig({_arguments(fields)})"
            elif fields:
                config = f"mmod.preset({_literal(preset)}, {_arguments(fields)})"
            else:
                config = _literal(preset)
            if not is_only:
                config = f"{part}={config}"
            lines.append(_call("route_", config, tokens))
        return "\n".join(lines)


def opening_line(name: str, **options: object) -> str:
    """Return the line of Python that opens a model, with the options of `mmod.open_model` that are set.

    Example:
        >>> opening_line("test_vit", checkpoint=None, args={"depth": 3})
        'model = mmod.open_model("test_vit", args={"depth": 3}).model'
    """
    named = {option: value for option, value in options.items() if value not in (None, {})}
    arguments = ", ".join(filter(None, [_literal(name), _arguments(named)]))
    return f"model = mmod.open_model({arguments}).model"


def shown_code(models: Mapping[str, tuple[str, str]], opening: str = "", difference: str = "") -> list[str]:
    """Return the lines of Python of some models, and the keys of a training config, as a block of Markdown each.

    Args:
        models: Lines and keys by the name of the model; empty for what it does not have.
        opening: The line that opens the dense model; empty where only the user knows it.
        difference: What the keys do otherwise than the lines, which stands between both.
    """
    python = {name: lines for name, (lines, _) in models.items() if lines}
    keys = {name: lines for name, (_, lines) in models.items() if lines}
    blocks = []
    if python:
        # Lines that open a model of their own need no other.
        needs_model = not all(lines.startswith("model =") for lines in python.values())
        opening = opening or "# model: your dense model"
        dense = f"{opening}\n" if needs_model else ""
        lines = with_imports(f"{dense}{_with_names(python)}")
        blocks.append(f"{_heading(python, 'Python')}\n\n```python\n{lines}\n```")
    if keys:
        between = f"{difference}\n\n" if difference and python else ""
        blocks.append(f"{between}{_heading(keys, 'a training config')}\n\n```yaml\n{_with_names(keys)}\n```")
    return blocks


def _heading(models: Mapping[str, str], medium: str) -> str:
    if len(models) > 1:
        return f"In {medium}, one of:"
    return f"{next(iter(models))} in {medium}:"


def _with_names(models: Mapping[str, str]) -> str:
    if len(models) == 1:
        return next(iter(models.values()))
    return "\n".join(f"# {name}\n{lines}" for name, lines in models.items())


def with_imports(lines: str) -> str:
    """Return lines of Python behind the imports that they need."""
    also = "import torch\n" if "torch.zeros(" in lines else ""
    return f"import mmod\n{also}\n{lines}"


def _call(function: str, change: str, tokens: str) -> str:
    return f"mmod.{function}({', '.join(filter(None, ['model', change, tokens]))})"


def _arguments(fields: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={_literal(value)}" for name, value in fields.items())


def _literal(value: object) -> str:
    """Return a value as Python code, with double quotes as in the docs."""
    text = repr(value)
    # Quotes inside a string would end it.
    if '"' in text:
        return text
    return text.replace("'", '"')


def _draws(choice: object) -> bool:
    """Return whether a routing, of one part or of several, or a method draws what it keeps."""
    if not isinstance(choice, Mapping):
        return False
    named = [choice.get(key) for key in ("router", "chosen")]
    # A score with options is a mapping with its name.
    named += [score.get("name") for score in named if isinstance(score, Mapping)]
    return CONTROL in named or any(map(_draws, choice.values()))
