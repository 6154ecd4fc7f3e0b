"""The pages of the docs, and the commands in them."""

from __future__ import annotations

import re

from mmod import cli
from tests.kit.scripts import ROOT

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")]
}
_FOLDERS = ("datasets/README.md", "datasets/sets.md", "scripts/README.md", "tests/README.md")
FOLDERS = {name: (ROOT / name).read_text() for name in _FOLDERS}
# A fenced block with its language, or lines indented by four or more after an empty one.
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# The same with its indent, as in lists.
NESTED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:mmod [a-z]|python\s+tools/benchmark)[^`]+)`")
INDENTED = re.compile(r"(?<=\n\n)((?: {4}.*\n)+)")
# Programs of others, which tests do not start; those of the repository that need a download.
FOREIGN = (
    "pip ",
    "python -m venv ",
    "source ",
    "git clone ",
    "cd ",
    "lmms_eval ",
    "tensorboard ",
    "wandb ",
    "python -c ",
    "apt-get ",
    "python train.py",
    "pytest",
    "ruff ",
    "zensical ",
    "MMOD_FUZZ",
)
BENCHMARK = "python tools/benchmark.py "
DOWNLOADS = ("python tools/run_timm_tests.py", "python tools/run_transformers_tests.py")


def commands_of(text: str) -> list[str]:
    """Return the shell commands of a page, without variables of the shell, loops and comments."""
    blocks = [body for language, body in FENCE.findall(text) if language in ("sh", "bash", "")]
    blocks += INDENTED.findall(FENCE.sub("", text))
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = [re.sub(r"\s+#.*", "", line).strip() for line in lines]
    inline = [re.sub(r"\s+", " ", words) for words in INLINE.findall(FENCE.sub("", text))]
    parts = [part.strip() for line in [*commands, *inline] for part in re.split(r"&&|; do |; done", line)]
    return [re.sub(r"^.*-m mmod ", "mmod ", part) for part in parts]


def is_command(line: str) -> bool:
    return line.startswith(("mmod ", BENCHMARK, "python datasets/", "python scripts/", "python -m scripts."))


NAMED = sorted(
    {(page, command) for page, text in PAGES.items() for command in commands_of(text) if is_command(command)}
)


def is_complete(command: str) -> bool:
    """Whether a page says more than the name of a command of mmod, which its text may stop at."""
    names = [[word for word in name.split() if word.islower()] for name in cli.COMMANDS if "CONFIG" in name]
    is_run = command.startswith(("mmod ", BENCHMARK)) and "..." not in command
    return is_run and command.split()[1:] not in [*names, ["advise"], ["report"]]


COMPLETE = [(page, command) for page, command in NAMED if is_complete(command)]
