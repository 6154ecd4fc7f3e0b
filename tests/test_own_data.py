"""The pages on one's own data work from the first line to the last, in their order, on files as a user has them."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import yaml
from PIL import Image
from safetensors.torch import save_file

from mmod import cli
from mmod.analysis import timing
from mmod.studies.candidates import comparison_of
from mmod.studies.report import StudyResult
from tests.kit.fitted import count_candidates_once, fit_roughly, open_alone
from tests.kit.folders import save_image_model
from tests.kit.pages import FENCE, NAMED, PAGES, commands_of, is_command
from tests.kit.prompts import make_prompts
from tests.kit.scripts import ROOT

CLASSES = ("daisy", "rose", "tulip")
SMALL_VIT = (
    "{num_classes: 3, embed_dim: 24, num_heads: 2, depth: 3, img_size: 32, patch_size: 8, dynamic_img_size: true}"
)
FAST = "--schedule.warmup_epochs 0 --epochs 1 --device cpu"
CHAT = "--trainer.max_steps 1 --trainer.warmup_steps 0 --trainer.use_cpu true"
VIT = "vit_small_patch16_224"
# The models of the page on studies, and the side of their images: a folder of transformers, and two of timm.
NARROW = {"embed_dim": 24, "num_heads": 2, "num_classes": 3}
STUDIED: dict[str, tuple[dict[str, Any], int]] = {
    "study": ({"name": "vit", "args": {}, "pretrained": True, "checkpoint": None}, 32),
    "study, 6 blocks, 64 patches": ({"args": {**NARROW, "depth": 6, "img_size": 64, "patch_size": 8}}, 64),
    "study, 12 blocks, 576 patches": ({"args": {**NARROW, "depth": 12, "img_size": 384, "patch_size": 16}}, 384),
}
# Options that make a command small, by its beginning.
SMALL = {
    "": "",
    "advise deit": "--number 4 --batch_size 2 --no_pretrained",
    "advise": "--number 4 --batch_size 2 --device cpu",
    "train image": f"--model.pretrained false --model.args '{SMALL_VIT}' --data.image_size 32 --data.batch_size 4 "
    f"{FAST}",
    "train pairs": "--model.name tiny-scenes --model.config configs/clip/tiny-scenes.json --model.pretrained null "
    f"--data.batch_size 4 {FAST}",
    # The run that is evaluated has questions.
    "train chat mine.yaml": f"--data.train questions:tiny/train --data.val null {CHAT}",
    "train chat mine.yaml --output": "--data.train questions:tiny/train --data.val questions:tiny/val "
    f"--max_new_tokens 6 {CHAT}",
    "tradeoff my-model": "",
    "tradeoff my-model --dense.model": "",
    # Written from the config that comes with mmod, and told of its model by the test.
    "tradeoff study.yaml": "",
}


def write_photos(folder: Path, number: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for place in range(number):
        Image.effect_noise((48, 40), 40 + 9 * place).convert("RGB").save(folder / f"{place}.jpg")
    return [f"{place}.jpg" for place in range(number)]


def write_table(path: Path, folder: str, number: int) -> None:
    rows = [(f"{folder}/{name}", f"a photo of {name}") for name in write_photos(path.parent / folder, number)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("file", "caption"), *rows])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with everything that the pages start from, and a small DeiT without published weights."""
    monkeypatch.chdir(tmp_path)
    # What advice compares, and on which samples, `studies/test_advise.py` and the references show.
    open_alone(monkeypatch)
    fit_roughly(monkeypatch)
    count_candidates_once(monkeypatch)
    monkeypatch.setattr(timing, "interleave", lambda calls, **_: {name: [1.0, 1.0] for name in calls})
    create = timm.create_model

    def create_small(name: str, *, pretrained: bool = False, **options: Any) -> Any:
        narrow = {"embed_dim": 24, "num_heads": 2, "depth": 3} if name.startswith("deit") else {}
        return create(name, **{**narrow, **options})

    monkeypatch.setattr(timm, "create_model", create_small)
    for name in CLASSES:
        write_photos(tmp_path / f"data/flowers/{name}", 20)
    write_table(tmp_path / "captions.csv", "pictures", 12)
    write_table(tmp_path / "held_out.csv", "others", 4)
    make_prompts(tmp_path)
    (tmp_path / "photos").mkdir()
    shutil.copy(tmp_path / "one.png", tmp_path / "photos")
    (tmp_path / "questions.json").rename(tmp_path / "conversations.json")
    return tmp_path


def run(command: str) -> str:
    """Run a command in small, write what it prints to the file that it names, and return it."""
    line, _, target = command.removeprefix("mmod ").partition(" > ")
    small = SMALL[max((start for start in SMALL if line.startswith(start)), key=len)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            cli.main([*shlex.split(line), *shlex.split(small)])
        except SystemExit as end:
            if end.code:
                pytest.fail(f"{command} ended with {end.code}")
    if target:
        Path(target.strip()).write_text(printed.getvalue())
    return printed.getvalue()


@pytest.mark.parametrize("name", ["images", "pairs", "conversations", *STUDIED])
def test_a_page_works_in_its_order(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGES[f"docs/own_{name.partition(',')[0]}.md"]
    planned: list[list[str]] = []

    def plan_only(config: Any, **_: Any) -> StudyResult:
        planned.append([run.name for run in comparison_of(config).runs()])
        return StudyResult(Path(config.output), [], [], "", [], 0.0)

    save_image_model("vit", folder / "vit")
    monkeypatch.setattr("mmod.studies.study.run_study", plan_only)
    monkeypatch.setattr("mmod.report.command.report_on", lambda folder: None)
    ran = []
    if name in STUDIED:
        told, side = STUDIED[name]
        if told["args"]:
            told = {**told, "checkpoint": "weights.safetensors"}
            save_file(timm.create_model(VIT, **told["args"]).state_dict(), folder / "weights.safetensors")
        words = [f"--dense.model.{key} {shlex.quote(json.dumps(value))}" for key, value in told.items()]
        # The folder that the config names as it comes, and that of the page.
        (folder / "data/mine/val").mkdir(parents=True)
        (folder / "data/flowers/val").mkdir()
        # Every budget on the smallest grid, and one on those that take longer to count.
        few = "--budgets '[0.7]'" if side > 32 else ""
        monkeypatch.setitem(SMALL, "tradeoff my-model", few)
        smaller = f"{' '.join(words)} --dense.data.image_size {side} {few}"
        monkeypatch.setitem(SMALL, "tradeoff my-model --dense.model", smaller)
        monkeypatch.setitem(SMALL, "tradeoff study.yaml", smaller)
        # The run of the page on images, whose final model is not loaded where a study is planned alone.
        (folder / "runs/flowers").mkdir(parents=True)
        data = {"source": "folder", "root": "data/flowers", "image_size": side, "channels": 3}
        model = {"name": VIT, **told}
        trained = {"output": "runs/flowers", "model": model, "data": data, "world_size": 1}
        (folder / "runs/flowers/config.yaml").write_text(yaml.safe_dump(trained))
        shutil.copytree(folder / "vit", folder / "runs/flowers/model")
    for language, body in FENCE.findall(page):
        if language == "python":
            exec(body, {})
        elif language == "json":
            assert set(json.loads(body)[0]) == {"id", "image", "conversations"}
        elif language == "yaml" and (file := re.match(r"# (\S+\.yaml)\n", body)):
            (folder / file[1]).write_text(body)
        elif language == "sh":
            for command in filter(is_command, commands_of(f"```sh\n{body}```")):
                if command.startswith("python "):
                    # `test_imagenet_script.py` runs it.
                    continue
                ran.append(command)
                assert run(command) or command.startswith("mmod tradeoff"), command
    assert len(ran) >= 2
    if name == "images":
        assert sorted(path.name for path in (folder / "data/flowers").iterdir()) == ["train", "val"]
        assert len(list((folder / "data/flowers/val").rglob("*.jpg"))) == 2 * len(CLASSES)
    if name in STUDIED:
        assert len(planned) == 4
        assert all(models == planned[0] for models in planned)
        # Controls that are no rows are named by their models.
        series = {run.rpartition("-")[0] for run in planned[0] if not run.startswith(("random-merge", "random-a-mod"))}
        assert series == {"", "gradual", "merge-late", "a-mod", "random", "smaller-image", "tome", "prune"}


def test_every_page_on_own_data_is_linked_where_data_are_prepared() -> None:
    pages = [page for page in PAGES if page.startswith("docs/own_")]
    assert len(pages) == 4
    for text in ((ROOT / "README.md").read_text(), (ROOT / "datasets/README.md").read_text()):
        assert all(page in text for page in pages), text[:80]
    assert {page for page, _ in NAMED} >= set(pages)
