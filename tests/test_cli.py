"""The command `mmod` and the configs it finds."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import mmod
from mmod.cli import COMMANDS, main
from mmod.extras import EXTRAS
from mmod.io.configs import config_names, existing_config, find_config
from tests.scripts import ROOT, run_script
from tests.test_architecture import MISSING

CONFIGURED = [command for command in COMMANDS if COMMANDS[command].example]
LEAN = """
import sys
from mmod.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print(end.code if isinstance(end.code, str) else "", file=sys.stderr)
print("torch" in sys.modules)
"""


def words_of(command: str) -> list[str]:
    return [word for word in command.split() if word.islower()]


def run_lean(*words: str) -> tuple[list[str], str]:
    """Return the lines that a command printed and what it said on stderr, after checking that it left torch alone."""
    done = subprocess.run([sys.executable, "-c", LEAN, *words], capture_output=True, text=True, check=True, cwd=ROOT)
    *lines, torch = done.stdout.splitlines()
    assert torch == "False"
    return lines, done.stderr.strip()


@pytest.mark.parametrize("command", CONFIGURED)
def test_a_missing_config_is_named_with_an_example(command: str) -> None:
    name = " ".join(["mmod", *words_of(command)])
    _, said = run_lean(*words_of(command))
    assert f"error: {command.split()[-1]} is missing, for example `{name} {COMMANDS[command].example}`" in said
    assert f"`{name} --help`" in said
    assert find_config(COMMANDS[command].example.split()[0]).is_file()


def test_options_without_a_config_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "image", "--epochs", "3"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.strip().endswith("required: output, model.name; name a CONFIG that has them before the options")


@pytest.mark.parametrize("command", CONFIGURED)
def test_an_unknown_config_is_refused_and_help_is_shown_without_torch(command: str) -> None:
    _, said = run_lean(*words_of(command), "digits/dens")
    assert said.startswith("error: no config file at 'digits/dens'; near ones: digits/dense, ")
    shown, _ = run_lean(*words_of(command), "--help")
    assert any("--output" in line for line in shown)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in CONFIGURED])
def test_help_of_a_command_without_a_config_leaves_torch_alone(command: str) -> None:
    shown, _ = run_lean(*words_of(command), "--help")
    assert shown


def test_a_package_lists_its_public_names_only() -> None:
    assert dir(mmod) == mmod.__all__


def test_help_and_version_import_nothing_heavy(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from mmod.cli import main; main(['--help']); main(['--version']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    *usage, version, torch = done.stdout.splitlines()
    assert torch == "False"
    assert version.startswith("mmod 0.")
    assert all(f"mmod {command}" in "\n".join(usage) for command in COMMANDS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage: mmod COMMAND"),
        (["train"], "mmod train pairs CONFIG"),
        (["trian", "image"], "unknown command 'trian image'"),
        (["train", "images", "x.yaml"], "unknown command 'train images x.yaml'"),
    ],
)
def test_what_is_no_command_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_a_function_with_arguments(command: str) -> None:
    assert callable(importlib.import_module(COMMANDS[command].module).main)


def test_commands_show_their_own_help() -> None:
    done = run_script("-m mmod", "train", "image", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: mmod train image CONFIG")


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
    (tmp_path / "digits-smallest").write_text("seeds: 3\n")
    assert find_config("digits-smallest") == Path("digits-smallest")
    assert find_config("missing.yaml") == Path("missing.yaml")


def test_configs_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["configs"])
    assert capsys.readouterr().out.split() == config_names()
    main(["configs", "tradeoff/digits"])
    assert capsys.readouterr().out.strip() == (ROOT / "configs/tradeoff/digits.yaml").read_text().strip()


@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("timm", "from mmod.training import EvalResult"),
        ("matplotlib", "from mmod.analysis.style import new_figure; new_figure(2, 2)"),
    ],
)
def test_a_missing_extra_is_named(package: str, code: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.splitlines()[-1] == (
        f'ModuleNotFoundError: this needs the package {package}, which is not installed: pip install "mmod[train]"'
    )


@pytest.mark.parametrize("package", ["jsonargparse", "timm"])
def test_the_command_names_a_missing_extra_in_one_line(package: str) -> None:
    command = [sys.executable, "-c", MISSING.replace("runpy.run_path(sys.argv[0]", "runpy.run_module(sys.argv[0]")]
    done = subprocess.run(
        [*command, package, "mmod", "tradeoff", "digits-smallest"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f'error: this needs the package {package}, which is not installed: pip install "mmod[train]"'
    )


def test_extras_are_those_of_the_installation() -> None:
    distributions = metadata.packages_distributions()
    text = (ROOT / "pyproject.toml").read_text()
    for extra, packages in EXTRAS.items():
        wanted = re.findall(r'"([\w-]+)', text.partition(f"\n{extra} = [")[2].partition("]\n")[0].replace("[", '"['))
        names = {name.lower().replace("_", "-") for name in wanted}
        for package in packages:
            # Two that come with jsonargparse.
            brought = {"docstring-parser": "jsonargparse"}
            owners = {name.lower().replace("_", "-") for name in distributions[package]}
            assert {brought.get(owner, owner) for owner in owners} & names, f"{package} is not of the extra {extra}"


def test_the_main_job_and_its_report_need_the_extra_train_alone() -> None:
    assert {"adjustText", "matplotlib"} <= set(EXTRAS["train"])
    assert "filelock" in EXTRAS["train"]
    assert "report" not in EXTRAS


def test_locks_need_nothing_of_unix() -> None:
    code = "import sys; sys.modules['fcntl'] = None; from mmod.io.locks import locked; from mmod.training import fit"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


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
