"""What a refusal is, and what is a fault whose traceback must be seen."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from torch.utils.data import DataLoader

import mmod
from mmod.data.corrupt import original_errors
from mmod.io.refusals import one_line_errors, one_line_warnings
from tests.kit.scripts import ROOT, run_script


def refuse() -> None:
    mmod.RoutingConfig(capacity=2)


def fail() -> None:
    int("seven")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["configs", "digits/dense"], 0, ""),
        (["train", "image", "digits/dense", "--model.checkpoint", "nowhere"], 2, "error: no checkpoint at 'nowhere'"),
        # As it stands, it names a run and images that no user has.
        (
            ["tradeoff", "my-model"],
            2,
            "error: 2 mistakes: (1) no checkpoint at 'runs/mine': name the dense model's training run by --dense RUN",
        ),
        # Printed, it is the start of one's own.
        (["tradeoff", "my-model", "--print_config"], 0, ""),
        (["train", "image", "digits/dense", "--output", "README.md", "--print_config"], 0, ""),
        (["evaluate", "tests"], 2, "error: no config file at 'tests': it is a folder"),
        (["tradeoff", "tests"], 2, "error: no config file at 'tests': it is a folder"),
        (["evaluate", "docs/imags"], 2, "no run, config or folder at 'docs/imags'; near ones: docs/images"),
        (["configs", "my-modle"], 2, "error: no config file at 'my-modle'; near ones: my-model"),
        (["advise", "test_vit"], 2, "error: advice needs --images FOLDER"),
        (["advise", "test_vit", "--images", "tests", "--tolerance", "2"], 2, "error: --tolerance must be a number"),
        (["train", "image"], 2, "CONFIG is missing"),
        (["train", "image", "digits/dense", "--epochz", "3"], 2, "unknown config key 'epochz'"),
        (["train", "image", "digits/dense", "--epochs", "0"], 2, "epochs must be an integer of at least 1"),
        (["data", "conversations", "nowhere", "here"], 2, "error: "),
        (["data", "digits", "--cluter", "here"], 2, "error: unrecognized arguments: --cluter; near ones: --clutter"),
        (["trian"], 2, "no command 'mmod trian'; near ones: train"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, message: str) -> None:
    ended = run_script("-m mmod", *arguments)
    assert ended.returncode == code
    assert message in ended.stderr


def test_an_interrupt_ends_with_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, one_line_errors():
        raise KeyboardInterrupt
    assert end.value.code == 130
    assert capsys.readouterr().err.startswith("interrupted: ")


def test_refusals_end_in_one_line_and_faults_keep_their_traceback() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:

        def elsewhere(task: Callable[[], None]) -> Callable[[], None]:
            return lambda: pool.submit(task).result()

        def in_loader(task: Callable[[], None]) -> Callable[[], None]:
            def load() -> None:
                with original_errors():
                    next(iter(DataLoader([0], num_workers=1, collate_fn=lambda _: task())))  # type: ignore[arg-type]

            return load

        for refusal in (refuse, elsewhere(refuse), in_loader(refuse)):
            with pytest.raises(SystemExit, match=r"^error: capacity must be a number in \[0, 1\]"), one_line_errors():
                refusal()
        for fault in (fail, elsewhere(fail), in_loader(fail)):
            with pytest.raises(ValueError, match="seven"), one_line_errors():
                fault()


@pytest.mark.parametrize("words", [["configs"], ["tradeoff", "--help"]])
def test_a_reader_of_the_output_may_end_first(words: list[str]) -> None:
    reading = subprocess.Popen(
        [sys.executable, "-m", "mmod", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert reading.stdout is not None
    reading.stdout.close()
    _, said = reading.communicate()
    assert (reading.returncode, said) == (141, b"")


def test_a_warning_is_one_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    with one_line_warnings():
        for text in ("first", "second", "first"):
            print(warnings.formatwarning(UserWarning(text), UserWarning, "a.py", 1), end="")
    assert capsys.readouterr().out == "warning: first\nwarning: second\n"
    assert "a.py:1: UserWarning" in warnings.formatwarning("first", UserWarning, "a.py", 1)
