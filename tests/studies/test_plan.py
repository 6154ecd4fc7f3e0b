"""The command that searches a plan for the model of a training config."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import mmod
from mmod.io.store import STORE
from mmod.planning.candidate import PlanOptions
from mmod.studies import commands
from mmod.studies.commands import SEARCHES
from mmod.studies.measure import search_for
from mmod.training import fit
from mmod.training.image.config import TrainConfig
from mmod.training.kinds import kind_of
from tests.kit.disk import visible
from tests.kit.sets import SETS

ARGS = {"img_size": 32, "patch_size": 8, "in_chans": 1, "num_classes": 10, "embed_dim": 16, "depth": 4, "num_heads": 2}
FEW = "[[0.5, block, kept], [0, mlp, kept]]"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a config whose model starts from the weights of a run."""
    root = tmp_path_factory.mktemp("runs")
    model = {"name": "vit_tiny_patch16_224", "args": ARGS}
    data = {"source": "digits:tiny", "root": str(SETS / "digits"), "image_size": 32, "channels": 1}
    fields = {"data": data, "model": model, "output": str(root / "dense"), "epochs": 1, "epoch_steps": 1}
    fit(TrainConfig.from_dict(fields), progress=False)
    path = root / "config.yaml"
    start = {**model, "checkpoint": str(root / "dense")}
    path.write_text(yaml.safe_dump({**fields, "model": start, "output": str(root / "searched")}))
    return path


def test_an_image_classifier_is_searched_once(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--plan.options", FEW, "--plan.batches", "2", "--plan.batch_size", "4"]
    commands.plan([str(config), *quick, "--plan.budget", "0.8"])
    folder = config.parent / "searched/plan"
    assert "divergence added by each option, mean over 8 rows" in capsys.readouterr().out
    scores = (folder / STORE).read_text()
    commands.plan([str(config), *quick, "--plan.budget", "0.9"])
    assert (folder / STORE).read_text() == scores
    names = {f"flops-{budget}.{ending}" for budget in (0.8, 0.9) for ending in ("json", "png", "svg")}
    assert visible(folder) == {STORE, *names}
    assert mmod.RoutingConfig.load(folder / "flops-0.8.json").depth == 4
    commands.plan([str(config), *quick, "--plan.budget", "0.8", "--plan.rounds", "1"])
    assert (folder / STORE).read_text().startswith(scores)
    assert (folder / STORE).read_text() != scores
    assert mmod.RoutingConfig.load(folder / "flops-0.8-rounds-1.json").depth == 4
    commands.plan([str(config), *quick, "--plan.options", "[[0.5, mlp, kept]]", "--plan.budget", "0.95"])
    mmod.RoutingConfig(blocks=(0,), capacity=(0.125,), depth=4).save(folder / "flops-0.8.json", overwrite=True)
    with pytest.raises(FileExistsError, match="overwrite"):
        commands.plan([str(config), *quick, "--plan.budget", "0.8"])


def test_what_cannot_be_searched_is_refused(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.plan([str(config), "--kind=conversations"])
    assert "kind must be one of 'image', 'pairs', 'chat', 'text'" in capsys.readouterr().err
    fields = TrainConfig.load(config).to_dict()
    for changes, message in (
        ({"routing": {"router": "random"}}, "routing: null"),
        ({"model": {"name": "vit_tiny_patch16_224", "args": ARGS}}, "set model.checkpoint"),
    ):
        refused = SEARCHES["image"].from_dict({**fields, **changes})
        with pytest.raises(ValueError, match=message):
            search_for(kind_of(refused), [refused.plan], tmp_path)
    for wrong in ({"budget": 1.0}, {"batches": 0}, {"cost": "ms"}, {"options": [(2.0, "mlp", "kept")]}):
        with pytest.raises(ValueError, match="plan"):
            PlanOptions(**wrong)  # type: ignore[arg-type]
