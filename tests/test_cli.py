"""The command `mmod` and the configs it finds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import mmod
from mmod.cli import COMMANDS, main, read_command
from mmod.config.parse import read_config
from mmod.io.configs import GROUPS, config_names, existing_config, find_config
from mmod.io.environment import on_timing_threads, timing_threads
from mmod.lazy import EXTRAS
from mmod.screens import SCREENS, first_screen
from mmod.training.kinds import config_class
from tests.kit.scripts import ROOT, run_script

CONFIGURED = [command for command in COMMANDS if COMMANDS[command].example]
# From the words of a command to the lines that it prints and what it says on stderr.
Lean = Callable[..., tuple[list[str], str]]
LEAN = """
import contextlib, io, json, sys
from mmod.cli import main
answers = []
for words in json.load(sys.stdin):
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            main(words)
        except SystemExit as end:
            print(end.code if isinstance(end.code, str) else "", file=sys.stderr)
    answers.append([out.getvalue().splitlines(), said.getvalue().strip(), "torch" in sys.modules])
print(json.dumps(answers))
"""


def words_of(command: str) -> list[str]:
    return [word for word in command.split() if word.islower()]


CHAT = "train chat vlm/own-conversations --output /proc/none/run --model.config null --model.processor null"
WRITING = (
    "train image digits/dense",
    "train chat vlm/own-conversations",
    "tradeoff digits",
    "isoflop isoflop/text",
    "audit digits/dense",
    "plan digits/dense",
    "advise test_vit --images docs",
    "report docs",
)
EARLY = {
    "train image digits/dense --output /proc/none/run --model.checkpoint nowhere": "no checkpoint at 'nowhere'",
    "train image digits/dense --routing.preset nope": "preset 'nope' is unknown; ToMe, ",
    "tradeoff my-model --dense signs.pth": "dense names a run or a config file, and 'signs.pth' a file of weights",
    "tradeoff my-model --dense runs/nope": "no run or config file at 'runs/nope'",
    "tradeoff my-model --dense.model.checkpoint nope --dense.data.source digits": "no checkpoint at 'nope': name the",
    "tradeoff my-model --dense.data.root tests": "2 mistakes: (1) no checkpoint at 'runs/mine': name the dense model's",
    "tradeoff digits --routers.mod.preset nope": "preset 'nope' is unknown; ToMe, ",
    "advise runs/nope --images docs": "no run or model at 'runs/nope'",
    "advise tests/kitt --images docs": "no run or model at 'tests/kitt'; near ones: tests/kit",
    # What is wrong twice is told at once.
    "tradeoff my-model --faster 1.4": "3 mistakes: (1) --faster: an option of `mmod advise MODEL`, and none of a study",
    "tradeoff my-model --images docs": "2 mistakes: (1) unknown config key 'images'; near ones: dense.data.image_size",
    "advise test_vit --images docs --batch_size 0 --faster 1": "2 mistakes: (1) --faster must be a number above 1, got",
    "advise test_vit --images docs --output docs/new": "'docs/new' is in --images, which its picture would join",
    "advise runs/nope --images nope": "2 mistakes: (1) no run or model at 'runs/nope'; (2) --images: there is no f",
    "advise runs/nope --prompts nope": "2 mistakes: (1) no run or model at 'runs/nope'; (2) --prompts 'nope' is no",
    # Before the hub is asked, for which it takes a minute without a network.
    "advise testz --prompts README.md": "there is no folder 'testz' here; near ones: tests; a model of the",
    f"{CHAT} --model.checkpoint testz": "there is no folder 'testz' here; near ones: tests; a model of the",
    f"{CHAT} --model.checkpoint runs/nope/model": "there is no folder 'runs/nope/model' here; a model of the",
    f"{CHAT} --model.checkpoint A/B --model.processor testz": "there is no folder 'testz' here; near ones: tests;",
    "advise vit_tiny_patch16_224 --checkpoint nope --images docs": "no checkpoint at 'nope'",
    # A file in the place of what is written.
    **{
        f"{command} --output README.md/run": "'README.md' is a file, and a folder is needed there: name another folder"
        for command in WRITING
    },
}
"""What is refused before torch is imported: the command and the message. No run writes anything."""


@pytest.fixture(scope="module")
def lean() -> Lean:
    """Return what every command printed and said on stderr, in a process in which none may import torch."""
    asked = [words_of(command) for command in CONFIGURED]
    asked += [[*words, "digits/dens"] for words in asked]
    asked += [[*words_of(command), "--help"] for command in COMMANDS]
    asked += [[*words_of(command), "--help", "all"] for command in SCREENS]
    asked += [["--help"], ["--version"], *(command.split() for command in EARLY)]
    done = subprocess.run(
        [sys.executable, "-c", LEAN], input=json.dumps(asked), capture_output=True, text=True, check=True, cwd=ROOT
    )
    answers = dict(zip(map(tuple, asked), json.loads(done.stdout), strict=True))

    def answer(*words: str) -> tuple[list[str], str]:
        lines, said, has_torch = answers[words]
        assert not has_torch
        return lines, said

    return answer


@pytest.mark.parametrize("command", CONFIGURED)
def test_a_missing_config_is_named_with_an_example(command: str, lean: Lean) -> None:
    name = " ".join(["mmod", *words_of(command)])
    _, said = lean(*words_of(command))
    assert f"error: {command.split()[-1]} is missing, for example `{name} {COMMANDS[command].example}`" in said
    assert f"`{name} --help all`" in said
    assert find_config(COMMANDS[command].example.split()[0]).is_file()


def test_options_without_a_config_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "image", "--epochs", "3"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.strip().endswith("required: output, model, data; name a CONFIG that has them before the options")


@pytest.mark.parametrize("command", CONFIGURED)
def test_an_unknown_config_is_refused_without_torch(command: str, lean: Lean) -> None:
    _, said = lean(*words_of(command), "digits/dens")
    noun = "run, config or folder" if command.endswith("_OR_RUN") else "config file"
    assert said.startswith(f"error: no {noun} at 'digits/dens'; near ones: digits/dense, ")


@pytest.mark.parametrize("command", EARLY)
def test_paths_and_presets_are_checked_without_torch(command: str, lean: Lean) -> None:
    _, said = lean(*command.split())
    assert said.startswith(f"error: {EARLY[command]}")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_leaves_torch_alone(command: str, lean: Lean) -> None:
    shown, _ = lean(*words_of(command), "--help")
    assert shown
    everything, _ = lean(*words_of(command), "--help", *(["all"] if command in SCREENS else []))
    assert command not in CONFIGURED or any("--output" in line for line in everything)


def test_help_begins_with_one_screen_and_names_what_shows_all(lean: Lean) -> None:
    # Commands without a first screen have a help that is one.
    for command in COMMANDS:
        shown, _ = lean(*words_of(command), "--help")
        assert len(shown) <= 36
        assert max(map(len, shown)) <= 140
        assert (f"`mmod {' '.join(words_of(command))} --help all`" in shown[-1]) == (command in SCREENS)
    assert {*SCREENS} >= {*CONFIGURED}


def options_in(line: str) -> set[str]:
    return {*re.findall(r"(?<!\S)--([\w-]+(?:\.\w+)*)", line)}


@pytest.mark.parametrize("command", SCREENS)
def test_examples_and_options_of_a_first_screen_are_the_commands(command: str, lean: Lean) -> None:
    screen = SCREENS[command]
    everything, _ = lean(*words_of(command), "--help", "all")
    known = set.union(*map(options_in, everything))
    if "train" in command or "isoflop" in command:
        known.add("dry-run")
    assert len(everything) > len(first_screen(command).splitlines())
    assert 5 <= len(screen.options) <= 10
    for line in [*screen.options, *screen.examples]:
        for option in options_in(line):
            # Behind a key of free fields stand those of another config.
            assert {option, option.partition(".")[0]} & known, option
    for words in screen.examples:
        *name, given = words.split()[: len(words_of(command)) + 1]
        assert name == words_of(command)
        is_of_a_user = given.startswith("runs/") or given.endswith(".yaml") or command == "advise MODEL"
        assert is_of_a_user or existing_config(given)
    assert (ROOT / "docs" / screen.page).is_file()


def test_a_package_lists_its_public_names_only() -> None:
    assert dir(mmod) == mmod.__all__


def test_help_and_version_import_nothing_heavy(lean: Lean) -> None:
    (usage, _), ((version,), _) = lean("--help"), lean("--version")
    assert version.startswith("mmod 0.")
    assert all(f"mmod {command}" in "\n".join(usage) for command in COMMANDS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage: mmod COMMAND"),
        (["train"], "mmod train pairs CONFIG"),
        (["--vers"], "usage: mmod COMMAND"),
        (["xyz", "digits"], "no command 'mmod xyz'"),
        (["trade", "digits"], "no command 'mmod trade'; near ones: tradeoff"),
        (["advise", "vit", "--measure", "accuracy"], "'patches'); near ones: top1; `mmod advise --help all`"),
        (["advise", "vit", "--image", "x"], "unrecognized arguments: --image x; near ones: --images, "),
        (["advise", "vit", "--number", "few"], "error: argument --number: invalid int value: 'few'; `mmod advise"),
        (["report", "--out=x", "y"], "arguments: --out=x; near ones: --output; `mmod report --help all`"),
        (["tradeoff", "digits", "vlm"], "unrecognized arguments: vlm"),
        # The kind of a command line is that of its config.
        (["tradeoff", "my-model", "--kind", "chat"], "baselines.tome.kind must be one of 'resolution', got 'merge'"),
        (["train", "image", "digits/dense", "digits/mod"], "unrecognized arguments: digits/mod"),
        (["trian", "image"], "no command 'mmod trian'; near ones: train; `mmod --help` lists all"),
        (["train", "images", "x.yaml"], "no command 'mmod train images'; near ones: image; `mmod train --help` lists"),
    ],
)
def test_what_is_no_command_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.splitlines()[-1].startswith("error: ")


def test_a_config_behind_a_run_is_refused() -> None:
    with pytest.raises(ValueError, match="unrecognized arguments: digits/mod; further configs are merged by --config"):
        read_config(["digits/mod", "--seed", "1"], config_class("image"), {"output": "run"})


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (
            ["tradeoff", "digits/dense"],
            "mmod train image digits/dense`, or name it in the config of a study, `dense: d",
        ),
        (["isoflop", "text/mod"], "mmod train text text/mod`, or name it in the config of a study"),
        (["tradeoff", "isoflop/text"], "mmod isoflop isoflop/text`"),
        (["train", "chat", "digits/dense"], "mmod train image digits/dense`"),
        (["train", "pairs", "vlm/tiny-llava"], "mmod train chat vlm/tiny-llava`"),
        (["train", "image", "tradeoff/my-model"], "mmod tradeoff tradeoff/my-model`"),
        (["evaluate", "tradeoff/my-model"], "mmod tradeoff tradeoff/my-model`"),
    ],
)
def test_a_config_of_another_command_names_it(words: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert f"error: {words[-1]!r} is a config of another kind: run `{meant}" in capsys.readouterr().err


def test_a_run_in_place_of_a_study_is_told_where_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("kind: image\n")
    with pytest.raises(SystemExit) as end:
        main(["tradeoff", str(tmp_path)])
    assert end.value.code == 2
    assert f"as `mmod tradeoff my-model --dense {tmp_path}` does" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "audit", "plan"])
def test_what_cannot_be_read_is_told_once(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shapes").mkdir()
    Path("list.yaml").write_text("- 1\n")
    for path in ("shapes", "list.yaml"):
        with pytest.raises(SystemExit):
            main([command, path])
        assert capsys.readouterr().err.count("error: ") == 1


def test_a_file_in_the_place_of_a_command_or_a_config_is_told_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, weights = tmp_path / "study.yaml", tmp_path / "own.pt"
    study.write_text("dense: digits/dense\n")
    weights.write_bytes(b"0")
    refused = {
        ("train", str(study)): f"no command 'mmod train {study}': run `mmod tradeoff {study}`",
        ("evaluate", str(weights)): "is a file of weights, and no config: name it by --model.checkpoint",
        ("train", "image", str(weights)): "is a file of weights, and no config: name it by --model.checkpoint",
    }
    for words, said in refused.items():
        with pytest.raises(SystemExit):
            main(words)
        assert said in capsys.readouterr().err


def test_a_config_without_its_kind_is_not_taken_for_one_of_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("model: {config: {dim: 64}}\ndata: {source: 'books/*.txt'}\n")
    with pytest.raises(SystemExit):
        main(["tradeoff", str(path)])
    assert f"run `mmod train KIND {path}`" in capsys.readouterr().err


@pytest.mark.parametrize("rest", [["--help"], ["x", "--a=1", "--b", "-3", "--", "--c", "--"], ["--version"], []])
@pytest.mark.parametrize("command", COMMANDS)
def test_what_follows_a_command_is_left_to_it(command: str, rest: list[str]) -> None:
    assert read_command([*words_of(command), *rest]) == (command, rest)


def test_errors_are_one_line() -> None:
    done = run_script("-m mmod", "tradeoff", "digits-smalest")
    assert done.returncode != 0
    assert "error: no config file at 'digits-smalest'; near ones: digits-smallest" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "`mmod configs` lists the known ones" in run_script("-m mmod", "configs", "zzz").stderr


@pytest.mark.parametrize("name", ["digts", "tradeoff/digts", "configs/tradeoff/digts.yaml", "configs/tradeoff/digts"])
def test_near_names_are_in_the_form_of_the_unknown_one(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"near ones: (tradeoff/)?digits") as refusal:
        existing_config(name)
    assert ("tradeoff/" in str(refusal.value).partition(";")[2]) == ("/" in name)


def test_configs_are_found_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = ROOT / "configs/tradeoff/digits-smallest.yaml"
    for name in ("configs/tradeoff/digits-smallest.yaml", "tradeoff/digits-smallest", "digits-smallest", expected):
        assert find_config(name) == expected
    monkeypatch.setattr("mmod.io.configs.config_names", lambda: ["digits/distilled", "clip/distilled"])
    with pytest.raises(ValueError, match="several configs: digits/distilled"):
        find_config("distilled")


def test_a_file_of_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A folder is no config.
    (tmp_path / "digits-large").mkdir()
    assert find_config("digits-large") == ROOT / "configs/tradeoff/digits-large.yaml"
    (tmp_path / "digits-smallest").write_text("seeds: 3\n")
    assert find_config("digits-smallest") == Path("digits-smallest")
    assert find_config("missing.yaml") == Path("missing.yaml")


def test_configs_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["configs"])
    out = capsys.readouterr().out
    rows = re.findall(r"^  (\S+) +(.+)$", out, re.MULTILINE)
    assert sorted(name for name, _ in rows) == config_names()
    # One short line each, by which they differ.
    assert len({summary for _, summary in rows}) == len(rows)
    assert max(map(len, out.splitlines())) <= 120
    assert all(re.search(r"\w.*[.?]$", summary) for _, summary in rows)
    assert list(GROUPS) == re.findall(r"^(\w+): ", out, re.MULTILINE)
    assert {path.name for path in (ROOT / "configs").iterdir() if any(path.glob("*.yaml"))} == set(GROUPS)
    main(["configs", "tradeoff/digits"])
    assert capsys.readouterr().out.strip() == (ROOT / "configs/tradeoff/digits.yaml").read_text().strip()
    main(["configs", "my-model"])
    assert capsys.readouterr().out.strip() == (ROOT / "configs/tradeoff/my-model.yaml").read_text().strip()


def test_extras_are_those_of_the_installation() -> None:
    distributions = metadata.packages_distributions()
    text = (ROOT / "pyproject.toml").read_text()
    for extra, packages in EXTRAS.items():
        expected = re.findall(r'"([\w-]+)', text.partition(f"\n{extra} = [")[2].partition("]\n")[0].replace("[", '"['))
        names = {name.lower().replace("_", "-") for name in expected}
        for package in packages:
            owners = {name.lower().replace("_", "-") for name in distributions[package]}
            assert owners & names, f"{package} is not of the extra {extra}"


def test_a_shell_completes_commands_and_configs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, words in {
        "mmod ": sorted({command.split()[0] for command in COMMANDS}),
        "mmod t": ["tradeoff", "train"],
        "mmod train ": ["chat", "image", "open-clip", "pairs", "text"],
        "mmod tradeoff tradeoff/digits-sm": ["tradeoff/digits-smallest"],
        "mmod nothing ": [],
    }.items():
        monkeypatch.setenv("COMP_LINE", line)
        main(["--complete", "mmod", "", ""])
        assert capsys.readouterr().out.split() == words


WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SHOW_WAITING = "import json, os, sys; print(json.dumps([*map(os.environ.get, {0}), 'torch' in sys.modules]))"
# Programs say how their threads wait when the first command asks for the configs that there are.
PROGRAMS = {
    "mmod": "import sys; sys.argv[1:] = ['configs']; import mmod.cli; mmod.cli.main()",
    "python -m mmod": "import runpy, sys; sys.argv[1:] = ['configs']; runpy.run_module('mmod', run_name='__main__')",
    "tools": "import runpy, sys; sys.argv[1:] = ['-']\ntry: runpy.run_path('tools/train.py', run_name='__main__')\n"
    "except SystemExit: pass",
}


def waiting_after(code: str, **environment: str) -> list[Any]:
    """Return how threads of OpenMP wait in a program and its children, and whether it imported torch."""
    inherited = {name: value for name, value in os.environ.items() if name not in WAITING}
    child = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SHOW_WAITING.format(WAITING)!r}], check=True)"
    )
    command, env = [sys.executable, "-c", f"{code}\n{child}"], {**inherited, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=env)
    return json.loads(done.stdout.splitlines()[-1])[:-1]


@pytest.mark.parametrize("program", PROGRAMS)
def test_threads_of_commands_and_their_children_wait_without_spinning(program: str) -> None:
    assert waiting_after(PROGRAMS[program]) == ["passive", "0", "0"]


def test_a_policy_of_the_user_stays() -> None:
    assert waiting_after(PROGRAMS["mmod"], OMP_WAIT_POLICY="active") == ["active", None, None]


def test_every_tool_is_a_command() -> None:
    for path in (ROOT / "tools").glob("*.py"):
        text = path.read_text()
        if "from mmod.cli import run" in text:
            named = re.search(r'run\("(.+)", sys\.argv\[1:\]\)', text)
            assert named is not None, path
            assert named[1] in COMMANDS, path
    assert "from mmod.cli import run" in (ROOT / "tools/tradeoff.py").read_text()


def test_models_are_timed_on_one_thread_unless_the_user_names_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for number, expected in (("", 1), ("2", 2)):
            monkeypatch.setenv("OMP_NUM_THREADS", number)
            with on_timing_threads():
                assert torch.get_num_threads() == timing_threads() == expected
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
