"""The commands `mmod tradeoff`, `isoflop`, `evaluate`, `audit` and `plan`.

Each reads its line into a config, and passes it on to what does the work, which is imported late: help, and what is
wrong in a line, is answered without torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mmod.config.parse import check_output, parse_config
from mmod.io.files import read_text
from mmod.plain import check_keys, without
from mmod.planning.candidate import PlanOptions
from mmod.studies.audit.config import AUDITS
from mmod.studies.config import StudyConfig
from mmod.studies.isoflop_config import IsoflopConfig
from mmod.studies.kind_configs import CONFIGS
from mmod.training.command import parse_run
from mmod.training.engine.config import config_as
from mmod.training.kinds import all_configs, extended
from mmod.values import Mistakes

_DRY = "--dry-run"
# Options of advice that studies are asked for.
_OF_ADVICE = ("faster", "number", "prompts")


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The keys that a search adds to a training config.

    Args:
        plan: How it is searched. The plan goes to the folder `plan` in `output`.
    """

    plan: PlanOptions = field(default_factory=PlanOptions)


SEARCHES = extended(Searched)
"""The configs of searches by kind: training configs, whose model and data are searched on their device."""


def _check_study(kind: type[StudyConfig], fields: Mapping[str, object]) -> None:
    mistakes = Mistakes()
    of_advice = [name for name in _OF_ADVICE if name in fields]
    if of_advice:
        named = ", ".join(f"--{name}" for name in of_advice)
        mistakes.errors.append(ValueError(f"{named}: an option of `mmod advise MODEL`, and none of a study"))
    known = without(fields, of_advice)
    for check in (partial(check_keys, kind), kind.check_dense, partial(check_output, kind)):
        with mistakes.collected():
            check(known)
    mistakes.tell()


def tradeoff(arguments: Sequence[str]) -> Iterator[Path]:
    """Compare models as `CONFIG [--key value]` says: print the table of the study and of those that follow it.

    Yields:
        The folder of each.
    """
    # What is not there is refused before the routings are checked, which imports torch.
    config: StudyConfig | None = parse_config(arguments, CONFIGS, check=_check_study)
    from mmod.studies.study import run_study

    said: set[str] = set()
    while config is not None:
        result = run_study(config, command=shlex.join(["mmod", "tradeoff", *arguments]))
        result.show(said)
        yield result.folder
        config = config.following()


def isoflop(arguments: Sequence[str]) -> Iterator[Path]:
    """Run the isoFLOP study of `CONFIG [--dry-run] [--key value]`, print its table and yield its folder.

    `--dry-run` only describes it.
    """
    config = parse_config([word for word in arguments if word != _DRY], IsoflopConfig, check=check_output)
    from mmod.studies.isoflop import describe, run_isoflop

    if _DRY in arguments:
        print(describe(config))
        return
    result = run_isoflop(config, command=shlex.join(["mmod", "isoflop", *arguments]))
    result.show(set())
    yield result.folder


def evaluate(arguments: Sequence[str]) -> None:
    """Evaluate without training as `CONFIG_OR_RUN [--kind KIND] [--key value]` says and print score and costs."""
    config = parse_run(arguments, all_configs())
    from mmod.studies.assess import assess, described
    from mmod.training.engine.run_folder import unfinished

    notes = unfinished(config.model.checkpoint)
    print(*notes, described(assess(config)), sep="\n")


def audit(arguments: Sequence[str]) -> list[Path]:
    """Audit a trained model as `CONFIG_OR_RUN [--kind KIND] [--key value]` says and print the results."""
    config = parse_run(arguments, AUDITS, check_output)
    from mmod.studies.audit.run import audit_run

    audit_run(config, command=shlex.join(["mmod", "audit", *arguments]))
    folder = Path(config.output) / "audit"
    print(f"{read_text(folder / 'audit.md')}\nTables and pictures: {folder}")
    return [Path(config.output)]


def plan(arguments: Sequence[str]) -> None:
    """Search a plan for the model of `CONFIG_OR_RUN [--kind KIND] [--key value]` and print the result."""
    config = parse_run(arguments, SEARCHES, check_output)
    from mmod.studies.measure import search_for
    from mmod.training.kinds import kind_of

    folder = Path(config.output) / "plan"
    (search,) = search_for(kind_of(config), [config_as(config, Searched).plan], folder)
    print(f"{search}\n\nPlan, picture and scores: {folder}")
