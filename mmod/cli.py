"""The command `mmod`: studies, training, audits and data sets.

It finds the function of a command, which reads the words behind it. Of a config it only asks whether it is there,
and of which command.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from mmod.io.builds import check_builds, installed_versions
from mmod.io.configs import config_names, existing_config
from mmod.io.refusals import one_line_errors, one_line_warnings
from mmod.lazy import import_path
from mmod.names import near_names
from mmod.plain import from_plain
from mmod.screens import SCREENS, first_screen
from mmod.training.kinds import KINDS, config_class


class Command(NamedTuple):
    """What a command runs.

    Attributes:
        function: Path of the function that runs it, which reads the words behind the command.
        purpose: What it does.
        example: A config that it takes, and options that go with it; empty for commands without a config.
        kind: Kind of training, a second argument of the function; empty for other commands.
    """

    function: str
    purpose: str
    example: str = ""
    kind: str = ""


_WEIGHTS = "digits/dense --model.checkpoint runs/digits/dense"
COMMANDS = {
    "advise MODEL": Command(
        "mmod.studies.advise:main", "what makes a model cheaper on your images or prompts and this machine, untrained"
    ),
    "tradeoff CONFIG": Command(
        "mmod.studies.commands:tradeoff", "accuracy against FLOPs, time and memory, with controls", "digits"
    ),
    **{
        f"train {name} CONFIG": Command("mmod.training.command:main", row.purpose, row.example, name)
        for name, row in KINDS.items()
    },
    "train open-clip [ROUTING] -- ARGUMENTS": Command(
        "mmod.registry.open_clip_program:main", "run open_clip's own training program on a routed model"
    ),
    "isoflop CONFIG": Command(
        "mmod.studies.commands:isoflop",
        "language models of several sizes, dense and routed, at equal FLOPs of training",
        "isoflop/text",
    ),
    "evaluate CONFIG_OR_RUN": Command(
        "mmod.studies.commands:evaluate", "score and cost of a model of any kind as it is", _WEIGHTS
    ),
    "audit CONFIG_OR_RUN": Command(
        "mmod.studies.commands:audit",
        "what the routers of a trained model learned, by counterfactuals",
        "digits/a-mod --model.checkpoint runs/digits/a-mod",
    ),
    "plan CONFIG_OR_RUN": Command(
        "mmod.studies.commands:plan", "which tokens may miss which operator, searched without training", _WEIGHTS
    ),
    "report FOLDER...": Command("mmod.report.command:main", "one page of studies and audits, for a browser"),
    "data SET": Command("mmod.data.commands:main", "build an embedded data set, or draw a picture of it"),
    "configs [NAME]": Command("mmod.io.configs:main", "list the configs of mmod, or print one"),
}
# Threads of GNU's and Intel's OpenMP that wait without running: on a machine with other work, waiting threads that spin
# take the time that the working ones need.
_WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
_USAGE = "mmod COMMAND [--key value] | mmod --help | mmod --version"
_NOTES = (
    "CONFIG is a YAML file or the name of a config that comes with mmod.",
    "`mmod COMMAND --help` has examples and the usual options, `mmod COMMAND --help all` every option.",
    "RUN is the folder of a run, for its final model, or the last checkpoint where it is not finished; or of a saved",
    "model: options then name the data.",
    "Models are timed on one CPU thread unless OMP_NUM_THREADS is set. Threads wait without spinning, unless",
    "OMP_WAIT_POLICY, GOMP_SPINCOUNT or KMP_BLOCKTIME is set.",
)
# Commands that end with pages of results; their function returns the folders.
_REPORTED = ("tradeoff CONFIG", "isoflop CONFIG", "audit CONFIG_OR_RUN")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that a command line names; only that command's modules are imported.

    It exits with code 2 if the command line, or a config or file that it names, is wrong, and with 1 for other errors.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    words = list(arguments)
    # What a shell adds to this are the words that it completes, not a command.
    if words[:1] == ["--complete"]:
        print("\n".join(completions(os.environ.get("COMP_LINE", ""))))
        return
    command, rest = read_command(words)
    sys.argv[0] = " ".join(["mmod", *_words(command)])
    run(command, rest)


def read_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command that a command line begins with, and the words behind it, which the command reads itself.

    It ends the program after help or the version, and where no command is named.

    Example:
        >>> read_command(["train", "image", "digits/dense", "--help"])
        ('train image CONFIG', ['digits/dense', '--help'])
    """
    group: list[str] = []
    # A command is one word, or one of a group of commands.
    while True:
        members = [name for name in COMMANDS if _words(name)[: len(group)] == group]
        if len(members) == 1 and _words(members[0]) == group:
            return members[0], list(words[len(group) :])
        valid = sorted({_words(name)[len(group)] for name in members})
        word = ""
        if len(words) > len(group):
            word = words[len(group)]
        if word not in valid:
            _end_without_command(group, members, valid, word)
        group.append(word)


def _end_without_command(group: Sequence[str], members: Sequence[str], valid: Sequence[str], word: str) -> NoReturn:
    """End the program where a word is no command of a group: with help, the version or what is wrong."""
    title = " ".join(["mmod", *group])
    listing = f"usage: {_USAGE}\n\n{_listing(members)}\n"
    if word in ("-h", "--help"):
        print(listing)
        sys.exit()
    if word == "--version" and not group:
        print(installed_versions())
        # Users check an installation by this.
        with one_line_errors():
            check_builds()
        sys.exit()
    problem = f"name a command behind {title!r}"
    if word:
        command = f"{title} {word}"
        problem = f"no command {command!r}"
        near = near_names(word, valid)
        if near:
            _end(f"{problem}; {near}; `{title} --help` lists all")
    if Path(word).is_file():
        meant = _meant_command(" ".join(group), word)
        if meant:
            _end(f"{problem}: run `{meant} {word}`")
    # The fault stands last to be seen.
    sys.stderr.write(f"{listing}\n")
    _end(problem)


def completions(line: str) -> list[str]:
    """Return the words that may end a command line: commands, then names of configs.

    A shell requests them after `complete -o default -C "mmod --complete" mmod`.

    Example:
        >>> completions("mmod tr"), completions("mmod train i"), completions("mmod tradeoff tradeoff/digits-s")
        (['tradeoff', 'train'], ['image'], ['tradeoff/digits-smallest'])
    """
    typed = line.split()[1:]
    current = ""
    if typed and not line.endswith(" "):
        current = typed.pop()
    valid = {words[len(typed)] for words in map(_words, COMMANDS) if words[: len(typed)] == typed != words}
    if typed == ["configs"] or any(typed == _words(name) for name in COMMANDS if COMMANDS[name].example):
        valid |= set(config_names())
    return sorted(word for word in valid if word.startswith(current))


def run(command: str, arguments: Sequence[str]) -> None:
    """Run a command; studies and audits end with a report page."""
    wait_passively()
    # peft imports bitsandbytes, which would begin the output with a line on a kernel that no command needs.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # And it reads an old name of transformers, which is no key of a user's.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    with one_line_errors(), one_line_warnings():
        _check_config(command, arguments)
        if command in SCREENS and asks_for_screen(arguments):
            print(first_screen(command), flush=True)
            return
        entry = COMMANDS[command]
        function = import_path(entry.function)
        if entry.kind:
            folders = function(list(arguments), entry.kind)
        else:
            folders = function(list(arguments))
        if command in _REPORTED:
            from mmod.report.command import report_on

            for folder in folders:
                report_on(folder)
        # Here, where it is no fault that the program that reads them ended.
        sys.stdout.flush()


def asks_for_screen(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for the first screen of help, and not for all of it.

    Example:
        >>> asks_for_screen(["digits", "--help"]), asks_for_screen(["digits", "--help", "all"])
        (True, False)
    """
    asked = [index for index, word in enumerate(arguments) if word in ("-h", "--help")]
    return bool(asked) and list(arguments[asked[0] + 1 :][:1]) != ["all"]


def wait_passively() -> None:
    """Let threads wait without spinning, in this program and those it starts, unless the user says how they wait.

    OpenMP reads its settings when torch is imported, so nothing is set later.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _WAITING):
        os.environ.update(_WAITING)


def _check_config(command: str, arguments: Sequence[str]) -> None:
    """Refuse a missing or unknown config, and that of another command, before the command's modules are imported."""
    if not COMMANDS[command].example:
        return
    name = " ".join(["mmod", *_words(command)])
    if not arguments:
        _end(
            f"{command.split()[-1]} is missing, for example `{name} {COMMANDS[command].example}`; `mmod configs` lists "
            f"the configs, `{name} --help all` their keys"
        )
    path = arguments[0]
    if command == "tradeoff CONFIG" and (Path(path) / "config.yaml").is_file():
        _end(
            f"{path!r} is a run: name it as the dense model of a study of its kind, as `mmod tradeoff my-model --dense "
            f"{path}` does for images"
        )
    # A folder may be that of a run.
    if path.startswith("-") or Path(path).is_dir():
        return
    noun = "run, config or folder" if command.endswith("_OR_RUN") else "config file"
    try:
        existing_config(path, noun)
    except FileNotFoundError as error:
        _end(str(error))
    meant = _meant_command(command, path)
    if meant not in ("", name):
        is_named = meant.startswith("mmod train") and not name.startswith("mmod train")
        hint = ""
        if is_named:
            hint = f", or name it in the config of a study, `dense: {path}`"
        _end(f"{path!r} is a config of another kind: run `{meant} {path}`{hint}")


def _meant_command(command: str, path: str) -> str:
    """Return the command whose config a file is, as its keys show; empty where any may read it."""
    # Imported here, inside of what names a missing package in one line.
    from mmod.io.yaml import read_yaml

    try:
        fields = read_yaml(path)
    except (ValueError, OSError):
        # The command says what is wrong with the file.
        return ""
    if "dense" in fields:
        return "mmod isoflop" if "sizes" in fields else "mmod tradeoff"
    if "model" not in fields or command.endswith("_OR_RUN"):
        return ""
    kind = fields.get("kind")
    if kind is None:
        with suppress(ValueError, TypeError):
            from_plain(config_class("image"), fields)
            kind = "image"
    if kind is None:
        # Only the command says the kind of a file that names none.
        return "" if command.startswith("train") else "mmod train KIND"
    if kind not in KINDS:
        return ""
    return f"mmod train {kind}"


def _end(text: str) -> NoReturn:
    """End the program with one line, as for a wrong command line."""
    sys.stderr.write(f"error: {text}\n")
    sys.exit(2)


def _words(command: str) -> list[str]:
    return [word for word in command.split() if word.islower()]


def _listing(commands: Iterable[str]) -> str:
    lines = [f"  mmod {command:<40}{COMMANDS[command].purpose}" for command in commands]
    return "\n".join([*lines, "", *_NOTES])
