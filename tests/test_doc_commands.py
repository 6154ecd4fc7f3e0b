"""Commands of README and docs run: one training of each kind, audits and reports; others up to their models."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import open_clip
import open_clip_train.main
import pytest
import timm
import yaml
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from mmod import cli
from mmod.studies import isoflop
from mmod.studies.candidates import comparison_of
from mmod.studies.config import StudyConfig
from mmod.studies.kind_configs import ImageStudyConfig, PairsStudyConfig, TimmStudyConfig
from mmod.training.engine.start import sketch
from mmod.training.kinds import config_class, kind_of
from mmod.training.text import kind as text_kind
from tests.kit import pages
from tests.kit.conversations import write_own
from tests.kit.fitted import fit_by_budget, make_models, open_alone
from tests.kit.folders import save_image_model
from tests.kit.prompts import make_prompts
from tests.kit.sets import SETS
from tools.benchmarks import suite
from tools.benchmarks.command import main as benchmark
from tools.benchmarks.report import BenchmarkReport

IMAGES = f"--data.source digits:tiny --data.root {SETS}/digits --data.batch_size 8 --data.val_limit 8 --device cpu"
STEPS = "--epochs 1 --epoch_steps 1 --eval_every 1 --schedule.warmup_epochs 0"
SCENES = f"--data.train scenes:tiny/train --data.val scenes:tiny/val --data.root {SETS}/scenes --device cpu"
QUESTIONS = f"--data.train questions:tiny/train --data.val questions:tiny/val --data.root {SETS}/questions"
TEXT = "--data.length 32 --data.batch_size 2 --data.val_limit 2 --device cpu"
CHAT_STEPS = "--trainer.max_steps 1 --trainer.warmup_steps 0 --trainer.use_cpu true --max_new_tokens 6"
AUDIT = "--audit.draws 1 --audit.resamples 100 --audit.maps 0 --audit.leave_one_out 0"
PRESETS = "--presets '[p-mod, modification]'"
TIMED = "--seconds 0.01 --rounds 1 --threads 1"
# Options that make a command small, by its beginning; the longest that fits counts. Models of 7 billion parameters and
# those whose weights lie elsewhere are not made: their merged config is printed.
SMALL = {
    "": "",
    "train image": f"{IMAGES} {STEPS}",
    "train image configs/imagenet": "--print_config",
    "train pairs": f"{SCENES} --epochs 1 --epoch_steps 1 --schedule.warmup_epochs 0",
    "train chat": f"{QUESTIONS} {CHAT_STEPS} --eval_batch_size 72",
    # A plan is made of it, and nothing is asked.
    "train chat vlm/tiny-llava": f"{QUESTIONS} --data.val null {CHAT_STEPS}",
    "train text": f"{TEXT} --epochs 1 --epoch_steps 1 --eval_every 1 --schedule.warmup_epochs 0",
    "data": "--difficulty tiny",
    "data conversations": "",
    "evaluate": IMAGES,
    "audit": f"{IMAGES} {AUDIT}",
    "audit runs/text": f"{TEXT} {AUDIT} --audit.generation 64",
    "audit runs/vlm": f"--audit.questions 4 {AUDIT}",
    "plan": f"{QUESTIONS} --plan.batches 1 --plan.batch_size 2",
    "isoflop": "--dry-run",
    "isoflop configs/isoflop/text": "--print_config",
    "advise llava": "--number 4 --batch_size 2 --device cpu",
    "advise runs/vlm": "--number 4 --batch_size 2 --device cpu",
    "advise": "--number 2 --batch_size 2 --no_pretrained",
    "benchmark drafts": "--prompts 1 --prompt_tokens 4 --new_tokens 2 --rounds 1 --draft_tokens [3] --threads 1",
    "benchmark generation": f"{PRESETS} --image_tokens [16] --batch_sizes [1] --hidden 64 --layers 6 {TIMED}",
    "benchmark models": f"--model test_vit --capacities [0.5] --batch_sizes [1] --execution [eager] {TIMED}",
    "benchmark ops": f"--sizes '[{{images: 1, tokens: 17}}]' --backends [auto] {TIMED}",
}
# What a page leaves open, in commands that hold the first word.
OPEN = [
    ("", "$runs", "runs/tradeoff/digits-exit/seed0"),
    ("audit $run", "$run", "runs/digits/a-mod"),
    ("text", "$run", "mod"),
    ("", "$run", "a-mod"),
    ("", "$seed", "0"),
    ("", "MODEL", "vit_small_patch16_224"),
    ("segmentation", "FOLDER", "street"),
    ("", "FOLDER", "photos"),
    ("", "FILE", "dinov2.safetensors"),
    ("", "RUN", "runs/vlm/tiny-p-mod"),
    ("pairs", "CONFIG", "configs/clip/scenes.yaml"),
    ("image", "CONFIG", "configs/digits/dense.yaml"),
    ("chat", "CONFIG", "configs/vlm/tiny-llava.yaml"),
    ("text", "CONFIG", "configs/text/mod.yaml"),
]
EXIT = "--methods '[{kind: exit, confidence: 0.8, blocks: [1, 2, 3]}]'"
# Runs that commands of a group read: folders to the commands that make them.
RUNS = {
    "image": {
        "runs/digits/dense": "train image digits/dense",
        "runs/digits/a-mod": "train image digits/a-mod",
        "runs/digits/exit": f"train image digits/dense {EXIT}",
    },
    "pairs": {"runs/clip/scenes": "train pairs clip/scenes"},
    "chat": {f"runs/vlm/{name}": f"train chat vlm/{name}" for name in ("tiny-llava", "tiny-p-mod")},
    "text": {"runs/text/elastic": "train text text/elastic", "runs/text/seed0/mod": "train text text/mod"},
}
# Runs of studies, and the runs above that stand for them.
STUDIED = {"dense": "dense", "exit": "exit", "exit-0.25": "exit", "a-mod-0.25": "a-mod"}
# Commands like another one but for the run that they read.
ALIKE = {
    "audit runs/digits/a-mod",
    "audit runs/tradeoff/digits-quarter/seed0/mod-0.25",
    "evaluate runs/digits/dense",
}
# Which commands are run one after another in one folder.
GROUPS = {
    "image": r"train image|evaluate|audit runs/(digits|tradeoff)|report runs/(audit|tradeoff)",
    "pairs": "train pairs",
    "chat": "train chat|audit runs/vlm|advise runs/vlm|plan",
    "text": "train text|audit runs/text|report runs/text|benchmark drafts",
    "photos": "advise (?!runs/vlm)",
    "data": "data",
    "benchmarks": "benchmark (models|ops|generation|suite)",
    "studies": "tradeoff",
    "others": "configs|isoflop|train open-clip|--version",
}


def filled(command: str) -> str:
    """Return a command with values for what its page leaves open."""
    for where, name, value in OPEN:
        if where in command:
            command = re.sub(rf"{re.escape(name)}\b", value, command)
    return command.replace(pages.BENCHMARK, "benchmark ").removeprefix("mmod ")


# Pages on one's own data are run from their first line to their last, in tests/test_own_data.py.
COMPLETE = sorted({filled(command) for page, command in pages.COMPLETE if not page.startswith("docs/own_")})


def test_every_command_is_in_a_group() -> None:
    for command in COMPLETE:
        assert sum(bool(re.match(f"(?:{beginning})", command)) for beginning in GROUPS.values()) == 1, command


@pytest.fixture(autouse=True)
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder, and ViTs of 24 channels without published weights."""
    create = timm.create_model

    def create_narrow(name: str, *, pretrained: bool = False, **options: Any) -> Any:
        width = {"embed_dim": 24, "num_heads": 2} if name.startswith(("vit_small", "vit_tiny", "deit")) else {}
        return create(name, **{**width, **options})

    monkeypatch.setattr(timm, "create_model", create_narrow)
    monkeypatch.chdir(tmp_path)


def smaller(command: str) -> list[str]:
    """Return the options that make a command small."""
    return shlex.split(SMALL[max(("", *SMALL), key=lambda start: len(start) * command.startswith(start))])


def unlike(commands: list[str]) -> list[str]:
    """Return commands that differ by more than options that are replaced, and that no other one continues."""
    words: dict[tuple[str, ...], str] = {}
    for command in commands:
        said, replaced = shlex.split(command), smaller(command)
        places = [place for place, word in enumerate(said) if word.startswith("--") and word in replaced]
        names = [word for place, word in enumerate(said) if not {place, place - 1} & set(places)]
        words.setdefault(tuple(names), command)
    return [
        command
        for names, command in words.items()
        if not any(names == other[: len(names)] and names != other and "--dry-run" not in other for other in words)
    ]


def run(command: str, small: bool = True) -> str:
    """Run a command, in small or as it is, and return what it prints."""
    words = [*shlex.split(command), *(smaller(command) if small else [])]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            benchmark(words[1:]) if words[0] == "benchmark" else cli.main(words)
        except SystemExit as end:
            if end.code:
                pytest.fail(f"mmod {shlex.join(words)} ended with {end.code}")
    return printed.getvalue()


def check_training(command: str) -> None:
    """Read the config of a run and make its model by names and sizes: each kind is trained by its `RUNS`."""
    printed = yaml.safe_load(run(f"{command} --print_config", small=False))
    config = config_class(command.split()[1]).from_dict(printed)
    config.check_schedule()
    # The architecture of this one is on a hub.
    if not command.startswith("train chat configs/vlm/llava"):
        sketch(kind_of(config))


def run_group(group: str) -> None:
    """Run the commands of a group that are not among its `RUNS`, reports last; only read those that train."""
    made = {re.sub(r"^(train \w+) (\S+)", r"\1 configs/\2.yaml", command) for command in RUNS.get(group, {}).values()}
    commands = [command for command in COMPLETE if re.match(f"(?:{GROUPS[group]})", command)]
    commands = [command for command in unlike(commands) if command not in made | ALIKE]
    assert commands
    for number, command in enumerate(sorted(commands, key=lambda command: command.startswith("report"))):
        if re.match("train (image|pairs|chat|text) ", command) and not {"--dry-run", "--help"} & set(command.split()):
            check_training(command)
            continue
        # Two pages may run one config in different ways.
        option = {"train": "--output", "advis": "--output", "bench": "--out"}.get(command[:5], "")
        is_free = option and option not in command and not command.startswith("train open-clip")
        assert run(f"{command} {option} runs/{number}" if is_free else command), command


def step_flops(model: nn.Module, tokens: int) -> int:
    """Return about what a training step costs."""
    return 6 * tokens * sum(parameter.numel() for parameter in model.parameters())


IMAGE = pytest.param("image", marks=pytest.mark.slow)


@pytest.mark.parametrize("group", [IMAGE, "pairs", "chat", "text", "data", "benchmarks", "others"])
def test_commands_run(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_clip_train.main, "main", lambda words: print(*words))
    report = BenchmarkReport("a suite", {}, {}, {}, [])
    monkeypatch.setattr(suite, "benchmark_suite", lambda config: report)
    # A plan of models at equal FLOPs counts a pass and a step of each: tests/studies/test_isoflop.py tests both.
    monkeypatch.setattr(isoflop, "training_flops", step_flops)
    monkeypatch.setattr(text_kind, "window_flops", lambda model, length, _=None: step_flops(model, length) // 3)
    for output, command in RUNS.get(group, {}).items():
        run(f"{command} --output {output}")
    if group == "data":
        write_own(Path())
    if group == "chat":
        run("data questions data/questions --json")
    if group == "image":
        for folder in (f"runs/tradeoff/{study}/seed0" for study in ("digits-quarter", "digits-exit")):
            for name, made in STUDIED.items():
                shutil.copytree(f"runs/digits/{made}", f"{folder}/{name}")
    run_group(group)


def test_models_of_photos_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    # What advice compares, and on which samples, `studies/test_advise.py` and the references show.
    open_alone(monkeypatch)
    tower = {"image_size": 32, "patch_size": 16, "width": 32, "layers": 2, "head_width": 16}
    text = {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1}
    make_clip = open_clip.create_model_and_transforms
    monkeypatch.setattr(
        open_clip,
        "create_model_and_transforms",
        lambda name, **_: make_clip("ViT-B-32", pretrained=None, vision_cfg=tower, text_cfg=text),
    )
    for number in range(3):
        Path(f"photos/{number}").mkdir(parents=True)
        Image.effect_noise((48, 48), 50 * number).convert("RGB").save(f"photos/{number}/a.png")
    save_file(timm.create_model("vit_small_patch14_dinov2", img_size=224).state_dict(), "dinov2.safetensors")
    timm.models.save_for_hf(timm.create_model("test_vit"), "runs/mine", safe_serialization=True)
    save_image_model("vit", Path("vit-base-patch16-224"))
    make_prompts(Path())
    shutil.copy("one.png", "photos")
    run_group("photos")


class _MadeError(Exception):
    """All models of a study are made."""


@pytest.mark.slow
def test_studies_make_every_model_that_they_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    is_plain = False

    def make(study: Any, **_: Any) -> Any:
        # Those of configs as they are, `test_study_configs_plan_their_runs` in tests/studies/test_image.py makes.
        if not is_plain or type(study) not in (ImageStudyConfig, PairsStudyConfig):
            comparison = comparison_of(study)
            assert len(comparison.candidates) > 2
            make_models(comparison, monkeypatch)
        raise _MadeError

    # Runs, weights and images that pages name are not here.
    for config in (StudyConfig, TimmStudyConfig):
        monkeypatch.setattr(config, "check_dense", lambda _: None)
    fit_by_budget(monkeypatch)
    monkeypatch.setattr("mmod.studies.study.run_study", make)
    # What says on what, how often and in how many processes models are compared makes no other model.
    same = r" --(seeds|processes|images|limit|checkpoint|latency_\w+) \S+"
    studies = {re.sub(same, "", command): command for command in COMPLETE if command.startswith("tradeoff")}
    for made, command in studies.items():
        is_plain = len(made.split()) == 2
        with pytest.raises(_MadeError):
            run(f"{command} --seeds 1")
