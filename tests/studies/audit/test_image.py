"""The command that audits a run's model."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

from mmod.audits.result import Audit
from mmod.data.synthetic.digits import DIFFICULTIES, compose_scenes
from mmod.io.records import FolderTakenError
from mmod.io.store import STORE
from mmod.studies import commands
from mmod.studies.audit.config import AUDITS, AuditOptions
from mmod.studies.audit.run import audit_run
from mmod.studies.audit.sets import read_set, regions_of
from mmod.training import fit
from mmod.training.engine.kind import load
from mmod.training.image.config import TrainConfig
from mmod.training.image.kind import ImageKind
from mmod.training.kinds import kind_of
from tests.kit.disk import visible
from tests.kit.sets import SETS

ARGS = {"img_size": 32, "patch_size": 8, "in_chans": 1, "num_classes": 10, "embed_dim": 16, "depth": 4, "num_heads": 2}
QUICK = ["--audit.draws", "1", "--audit.resamples", "100", "--audit.maps", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a routed run that was started from a dense one, which is gone."""
    root = tmp_path_factory.mktemp("runs")
    model = {"name": "vit_tiny_patch16_224", "args": ARGS}
    data = {"source": "digits:tiny", "root": str(SETS / "digits"), "image_size": 32, "channels": 1}
    common = {"data": data, "epochs": 1, "epoch_steps": 1}
    fit(TrainConfig.from_dict({**common, "model": model, "output": str(root / "dense")}), progress=False)
    start = {**model, "checkpoint": str(root / "dense")}
    routing = {"router": "linear", "capacity": 0.5, "blocks": [1, 3]}
    config = {**common, "model": start, "routing": routing, "output": str(root / "routed")}
    fit(TrainConfig.from_dict(config), progress=False)
    (root / "dense").rename(root / "moved")
    return root / "routed"


def test_a_run_is_audited_as_it_was_trained(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    arguments = [str(run), *QUICK, "--output", str(tmp_path)]
    commands.audit(arguments)
    said = capsys.readouterr().out
    folder = tmp_path / "audit"
    assert visible(folder) == {"audit.json", "audit.md", "audit.png", "config.json", "maps.png", "maps.svg"}
    record = json.loads((folder / "audit.json").read_text())
    audit = Audit.from_dict(record["audit"])
    assert said.startswith(str(audit))
    assert (folder / "audit.md").read_text() == f"{audit}\n"
    assert audit.to_dict() == record["audit"]
    assert record["command"].startswith("mmod audit ")
    trained = json.loads((run / "result.json").read_text())["evaluation"]
    assert audit.conditions[0].accuracy.value == pytest.approx(trained["top1"])
    assert audit.conditions[0].loss.value == pytest.approx(trained["loss"], rel=1e-4)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == files


def test_a_run_of_one_checkpoint_for_many_budgets_is_audited(run: Path, tmp_path: Path) -> None:
    elastic = tmp_path / "elastic"
    shutil.copytree(run, elastic)
    config = yaml.safe_load((run / "config.yaml").read_text()) | {
        "elastic": {"capacities": [0.25, 0.5], "samples": 2},
    }
    (elastic / "config.yaml").write_text(yaml.safe_dump(config))
    commands.audit([str(elastic), *QUICK])
    record = json.loads((elastic / "audit" / "audit.json").read_text())
    trained = json.loads((run / "result.json").read_text())["evaluation"]
    assert Audit.from_dict(record["audit"]).conditions[0].accuracy.value == pytest.approx(trained["top1"])


def test_a_finished_audit_is_read_and_never_overwritten(run: Path, tmp_path: Path) -> None:
    arguments = [str(run), *QUICK, "--output", str(tmp_path), "--audit.maps", "0"]
    commands.audit(arguments)
    audit_file = tmp_path / "audit/audit.json"
    before = audit_file.stat().st_mtime_ns
    commands.audit(arguments)
    assert audit_file.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"audit\.draws: 1 there, 2 now"):
        commands.audit([*arguments, "--audit.draws", "2"])
    with pytest.raises(ValueError, match="methods: "):
        commands.audit([*arguments, "--methods", "[{kind: experts, experts: 2}]"])


def test_an_audit_of_other_weights_or_files_is_refused(run: Path, tmp_path: Path) -> None:
    audited, reference = tmp_path / "run", tmp_path / "dense"
    shutil.copytree(run, audited)
    shutil.copytree(run.parent / "moved", reference)
    arguments = [str(audited), *QUICK, "--audit.maps", "0", "--audit.reference", str(reference)]
    commands.audit(arguments)
    # As of a run that was audited by a checkpoint, and has gone on.
    for folder, name in ((audited, r"weights\.checkpoint"), (reference, r"weights\..*dense")):
        weights = folder / "model" / "model.safetensors"
        before = weights.read_bytes()
        save_file({name: value + 1 for name, value in load_file(weights).items()}, weights)
        with pytest.raises(FolderTakenError, match=rf"{name}: '\w{{8}}' there, '\w{{8}}' now"):
            commands.audit(arguments)
        weights.write_bytes(before)
    reference.rename(tmp_path / "dense-1")
    with pytest.raises(FileNotFoundError, match=r"weights of '.*dense', which are missing; near ones: .*dense-1: "):
        commands.audit(arguments)
    (tmp_path / "dense-1").rename(reference)
    record = audited / "audit" / "config.json"
    fields = json.loads(record.read_text())
    record.write_text(json.dumps({**fields, "files": "2 files, 12345678"}))
    with pytest.raises(FolderTakenError, match="files: '2 files, 12345678' there, None now"):
        commands.audit(arguments)
    record.write_text(json.dumps({name: value for name, value in fields.items() if name != "weights"}))
    with pytest.raises(FolderTakenError, match=r"weights\.checkpoint: not set there, '\w{8}' now"):
        commands.audit(arguments)


def test_an_audit_that_was_cut_goes_on(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [str(run), *QUICK, "--audit.conditions", "[random]", "--audit.maps", "0", "--data.batch_size", "16"]
    (uninterrupted,) = commands.audit([*arguments, "--output", str(tmp_path / "whole")])
    cut = [*arguments, "--output", str(tmp_path / "cut")]
    left, evaluate = itertools.count(18, -1), ImageKind.evaluate

    def stopping(*args: Any) -> Any:
        if not next(left):
            raise KeyboardInterrupt
        return evaluate(*args)

    monkeypatch.setattr(ImageKind, "evaluate", stopping)
    with pytest.raises(KeyboardInterrupt):
        commands.audit(cut)
    monkeypatch.setattr(ImageKind, "evaluate", evaluate)
    _, *results = (tmp_path / "cut/audit" / STORE).read_bytes().splitlines()
    sets = [json.loads(line[9:])["identity"]["set"] for line in results]
    assert sets == 4 * ["positions"] + 3 * ["audit"]
    with pytest.raises(ValueError, match=r"audit\.draws: 1 there, 2 now"):
        commands.audit([*cut, "--audit.draws", "2"])
    (resumed,) = commands.audit(cut)
    first, second = (
        json.loads((folder / "audit/audit.json").read_text())["audit"] for folder in (uninterrupted, resumed)
    )
    assert first == second
    assert not (tmp_path / "cut/audit" / STORE).exists()


@pytest.mark.parametrize("conditions", ["[random, sharpest]", "[stride]", "[random, dense attention]"])
def test_an_audit_that_is_refused_leaves_no_folder(run: Path, tmp_path: Path, conditions: str) -> None:
    with pytest.raises(ValueError, match="condition"):
        commands.audit([str(run), *QUICK, "--output", str(tmp_path), "--audit.conditions", conditions])
    assert not (tmp_path / "audit").exists()


def test_strata_of_objects_shifts_and_a_dense_model(run: Path, tmp_path: Path) -> None:
    options = ["--audit.shifts", "[blur]", "--audit.reference", str(run.parent / "moved"), "--audit.leave_one_out", "1"]
    options += ["--audit.conditions", "[random]", "--data.val_limit", "20", "--output", str(tmp_path)]
    commands.audit([str(run), *QUICK, *options])
    audit = Audit.from_dict(json.loads((tmp_path / "audit/audit.json").read_text())["audit"])
    sizes = {}
    for stratum in audit.strata:
        sizes[stratum.group] = sizes.get(stratum.group, 0) + stratum.images
    assert sizes == {
        "side of the object": 20,
        "distance of the object from the middle": 20,
        "loss of the dense model": 20,
        "shift": 40,
    }
    known = audit.across.information["blocks.1"]
    assert set(known) == {"position", "region"}
    # On a grid of patches of 8 pixels, fragments of ink lie nearly everywhere.
    assert {"object", "clutter"} <= set(known["region"].kept) <= {"object", "clutter", "background"}
    assert audit.leave_one_out is not None
    assert set(audit.leave_one_out.agreement) == {"blocks.1", "blocks.3"}
    with pytest.raises(ValueError, match=r"unknown shift of audit\.shifts fog"):
        commands.audit([str(run), *QUICK, "--audit.shifts", "[fog]", "--output", str(tmp_path / "other")])


def test_another_set_stands_among_the_shifts(run: Path, tmp_path: Path) -> None:
    root = yaml.safe_load((run / "config.yaml").read_text())["data"]["root"]
    other = (
        f"{{seen: {{val_split: train, val_limit: 30}}, again: {{source: 'digits:tiny', val_limit: 12, root: {root}2}}}}"
    )
    options = ["--audit.others", other, "--audit.conditions", "[random]", "--output", str(tmp_path)]
    commands.audit([str(run), *QUICK, *options])
    audit = Audit.from_dict(json.loads((tmp_path / "audit/audit.json").read_text())["audit"])
    rows = {stratum.name: stratum for stratum in audit.strata if stratum.group == "shift"}
    assert {name: stratum.images for name, stratum in rows.items()} == {"none": 64, "seen": 30, "again": 12}
    assert rows["none"].gap.value == pytest.approx(audit.gap.value)
    with pytest.raises(ValueError, match="unknown key of data sources"):
        commands.audit(
            [str(run), *QUICK, "--audit.others", "{other: {sources: digits}}", "--output", str(tmp_path / "new")]
        )
    both = ["--audit.others", "{blur: {val_split: val}}", "--audit.shifts", "[blur]"]
    with pytest.raises(ValueError, match="shifts and others both name blur"):
        commands.audit([str(run), *QUICK, *both, "--output", str(tmp_path / "newer")])


def test_patches_show_the_object_clutter_or_nothing() -> None:
    for scene in itertools.islice(compose_scenes(DIFFICULTIES["tiny"], "test"), 20):
        shown = regions_of(scene.image, scene.box, (8, 8)).reshape(8, 8)
        left, top, right, bottom = scene.box
        for row, column in itertools.product(range(8), repeat=2):
            x, y = 4 * column + 2, 4 * row + 2
            has_ink = bool(scene.image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4].any())
            outside = "clutter" if has_ink else "background"
            expected = "object" if left <= x < right and top <= y < bottom else outside
            assert shown[row, column] == expected


def test_an_early_exit_model_is_evaluated_beside(run: Path, tmp_path: Path) -> None:
    fields = yaml.safe_load((run / "config.yaml").read_text())
    leaves = {"kind": "exit", "confidence": 0.105, "blocks": [0]}
    model = {**fields["model"], "checkpoint": str(run.parent / "moved")}
    config = {"data": fields["data"], "epochs": 1, "epoch_steps": 1, "model": model, "methods": [leaves]}
    done = fit(TrainConfig.from_dict({**config, "output": str(tmp_path / "exit")}), progress=False)
    folders = f"[{tmp_path / 'exit'}, {run.parent / 'moved'}]"
    options = ["--audit.reference", str(run.parent / "moved"), "--audit.baselines", folders]
    commands.audit([str(run), *QUICK, *options, "--audit.conditions", "[random]", "--output", str(tmp_path / "found")])
    record = json.loads((tmp_path / "found/audit/audit.json").read_text())
    rows = {
        comparison.group: comparison
        for comparison in Audit.from_dict(record["audit"]).baselines
        if comparison.name == "all images"
    }
    assert rows["exit"].random.value == pytest.approx(done.evaluation.top1)
    assert sum(comparison["group"] == "exit" for comparison in record["audit"]["baselines"]) == 1 + 3 * 3
    cost = record["baseline_flops"]
    assert cost["moved"] == record["flops"]["dense"]
    assert done.evaluation.mean_kept < 1
    assert 0 < cost["exit"] < cost["moved"]
    assert "MFLOPs of a sample" in (tmp_path / "found/audit/audit.md").read_text()
    with pytest.raises(ValueError, match="names two folders alike"):
        commands.audit([str(run), *QUICK, "--audit.baselines", f"[{run}, {run}]", "--output", str(tmp_path / "other")])


def test_what_cannot_be_audited_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"the model of '.*moved' is dense, .* name the run of a routed one"):
        commands.audit([str(run.parent / "moved"), "--output", str(tmp_path)])
    with pytest.raises(SystemExit):
        commands.audit([str(run), "--audit.draw", "3"])
    with pytest.raises(ValueError, match=r"audit\.draws must be"):
        AuditOptions(draws=0)
    assert not list(tmp_path.iterdir())
    config = AUDITS["image"].from_dict(
        {"output": str(tmp_path), "model": {"name": "test_vit"}, "data": {"source": "digits"}}
    )
    with pytest.raises(ValueError, match=r"audit\.generation is for runs of kind 'text'.* kind 'image': leave it out"):
        commands.audit([str(run), "--output", str(tmp_path), "--audit.generation", "32"])
    with pytest.raises(ValueError, match=r"random weights .* name a run folder"):
        audit_run(config)
    published = dataclasses.replace(config, model=dataclasses.replace(config.model, pretrained=True))
    monkeypatch.setattr("mmod.studies.audit.run.load", lambda _: nn.Identity())
    with pytest.raises(ValueError, match="the model of 'test_vit' is dense"):
        audit_run(published)


def test_another_set_has_no_options_of_the_first(tmp_path: Path) -> None:
    data = {"source": "torch/mnist", "root": str(tmp_path), "options": {"download": True}, "channels": 1}
    model = {"name": "vit_tiny_patch16_224", "args": ARGS}
    kind = kind_of(AUDITS["image"].from_dict({"output": str(tmp_path / "run"), "model": model, "data": data}))
    digits = {"source": "digits:tiny", "root": str(SETS / "digits"), "options": {}, "mean": None, "std": None}
    assert len(read_set(kind, load(kind), digits)) == 1
