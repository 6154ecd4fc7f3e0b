"""The model that advice is for: dense, with a head that returns what is evaluated."""

from __future__ import annotations

from typing import Any

from torch import nn

from mmod.adapters import find_library, image_facts, load_adapter
from mmod.io.yaml import read_yaml
from mmod.opening.open import OPEN_CLIP, open_model
from mmod.opening.opened import Opened
from mmod.opening.runs import RUN_CONFIG, find_run
from mmod.values import one_of


def open_advised(
    name: str,
    checkpoint: str | None = None,
    pretrained: bool = True,
    image_size: int | None = None,
    measure: str | None = None,
) -> Opened:
    """Open a dense model that reads images, see `mmod.open_model`.

    Args:
        measure: "top1", "features" or "patches"; the last two take off the head of a model of timm.
    """
    if name.startswith(OPEN_CLIP) and measure is not None:
        # Before weights, which may come from a hub.
        one_of("--measure of a model of open_clip", measure, ("features",))
    run = find_run(name)
    kind = "image" if run is None else read_yaml(run / RUN_CONFIG).get("kind", "image")
    if kind not in ("image", "pairs"):
        advice = "give its prompts by --prompts FILE" if kind == "chat" else "use mmod.search_plan"
        raise ValueError(f"{name!r} is a run of kind {kind!r}, whose model reads text: {advice}")
    opened = open_model(
        name,
        checkpoint=checkpoint,
        pretrained=pretrained,
        image_size=image_size,
        dense=True,
        advice="name a file of weights, --checkpoint FILE",
    )
    # Of the size that the model was made for.
    preprocessing = opened.preprocessing
    opened = opened._replace(prepare=lambda: preprocessing)
    if find_library(opened.model) == "timm":
        opened = opened._replace(model=_flexible(opened.model))
    _take_off_head(opened.model, name, measure)
    return opened


def _flexible(model: nn.Module) -> nn.Module:
    """Return a dense model of timm that takes images of any size if it can: smaller images are among the candidates."""
    saving = load_adapter("timm").SAVING
    described = saving.describe(model)
    arguments = {**described["arguments"], "dynamic_img_size": True}
    try:
        flexible: nn.Module = saving.build({**described, "arguments": arguments})
    # Architectures without position embeddings have no such argument.
    except TypeError:
        return model
    flexible.load_state_dict(model.state_dict())
    return flexible.to(next(model.parameters()))


def _take_off_head(model: Any, name: str, measure: str | None) -> None:
    """Let a model return what `--measure` evaluates, or refuse it."""
    if measure is None:
        return
    library = find_library(model)
    classes = image_facts(model).classes
    measures = ["top1"] if classes else ["features"]
    if library == "timm":
        # Whose head can be taken off.
        measures = [*measures, "features", "patches"] if classes else ["features", "patches"]
    one_of(f"--measure of {name!r}, which has {classes or 'no'} classes,", measure, measures)
    if library == "timm" and measure != "top1":
        # Without pooling, the model returns the features of each patch.
        model.reset_classifier(0, *([""] if measure == "patches" else []))
