"""More epochs of a finished run: refused with a command that works, as the schedule depends on their number."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmod.config.parse import parse_config
from mmod.io.records import FolderTakenError
from mmod.training import TrainConfig, fit
from mmod.training.engine.config import RunConfig
from mmod.training.engine.kind import load
from mmod.training.kinds import config_class, kind_of
from tests.kit.engine_worker import MODEL, weights
from tests.kit.sets import SETS
from tests.kit.text_configs import SCORE, text_config

ROUTED = {"router": "linear", "capacity": 0.5, "blocks": [1, 2], "losses": {"membership": 0.1}}
IMAGES: dict[str, Any] = {
    "model": {"name": "vit_tiny_patch16_224", "args": {**MODEL, "img_size": 32, "patch_size": 8, "num_classes": 10}},
    "data": {"source": "digits:tiny", "root": str(SETS / "digits"), "batch_size": 64},
    "device": "cpu",
}


def advised(config: RunConfig, epochs: int) -> RunConfig:
    """Return the config of the command that the refusal of more epochs names."""
    with pytest.raises(FolderTakenError, match=rf"epochs: \d there, {epochs} now.* It is finished\. ") as caught:
        fit(replace(config, epochs=epochs), progress=False)  # type: ignore[call-overload]
    words = shlex.split(str(caught.value).partition(f"mmod train {config.kind} ")[2])
    continued: RunConfig = parse_config(words, config_class(config.kind))
    return continued


@pytest.mark.parametrize("kind", ["dense", "from weights", "text"])
def test_more_epochs_of_a_finished_run_are_a_new_run_from_its_weights(tmp_path: Path, kind: str) -> None:
    config: Any
    if kind == "text":
        config = replace(text_config(tmp_path / "a run", routing=SCORE), epochs=1)
    else:
        fields = {**IMAGES, "output": str(tmp_path / "a run"), "epochs": 1}
        config = TrainConfig.from_dict({**fields, "routing": None if kind == "dense" else ROUTED})
    if kind == "from weights":
        start = replace(config, output=str(tmp_path / "start"), routing=None)
        fit(start, progress=False)
        config = replace(config, model=replace(config.model, checkpoint=str(tmp_path / "start")))
    first = fit(config, progress=False)
    continued: Any = advised(config, 3)
    assert continued.epochs == 2
    assert continued.output == f"{config.output}-more"
    # Neither does it learn from a teacher that the run had not, nor from itself.
    teacher = {"from weights": str(tmp_path / "start")}.get(kind)
    assert continued.teacher() == teacher
    more = fit(continued, progress=False)
    assert (more.epochs, more.steps) == (2, 2 * first.steps)
    loaded = load(kind_of(continued)).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights(tmp_path / "a run" / "model").items())
    # The finished run is as it was.
    assert fit(config, progress=False).reused


def test_what_cannot_be_continued_so_is_told(tmp_path: Path) -> None:
    changes = {"routing": {"router": "random", "training_only": True}, "training_only_epochs": 1}
    config = TrainConfig.from_dict({**IMAGES, **changes, "output": str(tmp_path / "run"), "epochs": 2})
    fit(config, progress=False)
    with pytest.raises(FolderTakenError, match=r"It is finished.*cannot be combined with training_only_epochs"):
        fit(replace(config, epochs=3), progress=False)
    shorter = TrainConfig.from_dict({**IMAGES, "output": str(tmp_path / "short"), "epochs": 2})
    fit(shorter, progress=False)
    with pytest.raises(FolderTakenError, match=r"epochs: 2 there, 1 now.*It is finished: choose another folder"):
        fit(replace(shorter, epochs=1), progress=False)
    (tmp_path / "short" / "result.json").unlink()
    with pytest.raises(FolderTakenError, match=r"It is not finished: the command with its own length goes on"):
        fit(replace(shorter, epochs=3), progress=False)
