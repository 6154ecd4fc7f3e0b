"""The command that audits a trained model: `mmod audit CONFIG_OR_RUN [--key value]`."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmod.audits.config import audit_config
from mmod.training.engine.config import RunConfig
from mmod.training.engine.parse import parse_config
from mmod.training.kinds import CONFIGS, kind_of, recipe_of, split_kind

if TYPE_CHECKING:
    from mmod.analysis.audit.result import Audit
    from mmod.audits.subjects import Subject

_RUN = "config.yaml"


def audit_run(config: Any, *, command: str | None = None, progress: bool = True) -> Audit:
    """Audit the model that a run would start from, and write the results into the folder `audit` of its output."""
    from mmod import is_routed
    from mmod.analysis.audit.plots import draw_audit
    from mmod.analysis.audit.result import Audit
    from mmod.analysis.statistics import published
    from mmod.analysis.style import save_figure
    from mmod.analysis.timing import environment
    from mmod.audits.subjects import subject_of
    from mmod.io.claim import claim_folder
    from mmod.io.files import write_atomically
    from mmod.studies.results import save_picture
    from mmod.training.engine.loop import seed_draws

    folder = Path(config.output) / "audit"
    claim = partial(claim_folder, folder, _record(config), file="config.json", kind="an audit")
    result, progress_file = folder / "audit.json", folder / "progress.jsonl"
    if result.exists():
        claim()
        return Audit.from_dict(json.loads(result.read_text())["audit"])
    seed_draws(config.seed, 0, 0)
    subject = subject_of(config)
    model = subject.create() if subject.recipe.has_weights else None
    if model is None or not is_routed(model):
        raise ValueError(
            "an audit needs a routed model with weights: name a run folder of one, or set model.checkpoint and routing"
        )
    baselines = _baselines(config)
    report = _audited(subject, model, baselines, claim, progress_file, progress)
    costs = {name: subject.cost(baseline) for name, baseline in baselines.items()}
    cost, generation = subject.flops(model), subject.generation(model)
    record = {
        "name": Path(config.output).name,
        "command": command or f"mmod audit {shlex.quote(config.output)}",
        "environment": environment(),
        "audit": report.to_dict(),
        "flops": cost,
        "beside_flops": costs,
        "generation": None if generation is None else dataclasses.asdict(generation, dict_factory=published),
    }
    maps = subject.maps(model, config.audit.maps) if config.audit.maps else None
    if maps is not None:
        save_picture(folder, "maps", maps)
    save_figure(draw_audit(report), folder / "audit.png", dpi=150)
    more = "" if generation is None else f"\n{generation}\n"
    write_atomically(folder / "audit.md", f"{report}\n{_costs_text(cost, costs)}{more}")
    write_atomically(result, json.dumps(record, indent=1) + "\n")
    progress_file.unlink(missing_ok=True)
    return report


def _audited(
    subject: Subject,
    model: Any,
    baselines: Mapping[str, Any],
    claim: Callable[[], object],
    progress_file: Path,
    progress: bool,
) -> Audit:
    """Audit a model; `claim` the folder once the options are checked, so that a refused audit leaves none."""
    from mmod import audit
    from mmod.analysis.audit.choices import choices

    options = subject.config.audit
    choices(tuple(subject.conditions), None, has_reference=options.reference is not None)
    shifts, split = subject.shifts(), options.positions_split
    others = {name: subject.batches(changes) for name, changes in options.others.items()}
    claim()
    return audit(
        model,
        subject.batches(),
        judge=lambda judged, labelled: subject.recipe.judge(judged, labelled.batch),
        positions_from=None if split is None else subject.batches({subject.split: split}),
        conditions=subject.conditions,
        draws=options.draws,
        margin=options.margin,
        resamples=options.resamples,
        strata=lambda labelled: labelled.strata,
        token_kinds=lambda labelled: labelled.token_kinds,
        reference=None if options.reference is None else subject.create(options.reference),
        shifts=shifts,
        others=others,
        leave_one_out=options.leave_one_out,
        beside=baselines,
        progress_file=progress_file,
        progress=progress,
    )


def _baselines(config: Any) -> dict[str, Any]:
    """Return the models of `audit.beside` by the names of their folders."""
    from mmod.audits.subjects import subject_of

    folders = {Path(folder).name: Path(folder) for folder in config.audit.beside}
    if len(folders) < len(config.audit.beside):
        raise ValueError(f"audit.beside names two folders alike: {', '.join(config.audit.beside)}")
    models = {}
    for name, folder in folders.items():
        run = _run_config(folder)
        if type(run) is not type(config):
            raise ValueError(f"audit.beside: {str(folder)!r} is a run of another kind than the audited one")
        models[name] = subject_of(run).create()
    return models


def _costs_text(cost: Mapping[str, Any] | None, costs: Mapping[str, float]) -> str:
    """Return the costs of the model and its baselines as a line; empty where they were not counted."""
    if cost is None or not costs:
        return ""
    others = ", ".join(f"{name} {value / 1e6:.2f}" for name, value in costs.items())
    return f"\nMFLOPs of a sample, as counted on these: this model {cost['routed'] / 1e6:.2f}, {others}.\n"


def _record(config: RunConfig) -> dict[str, Any]:
    """Return the options that the results depend on, as plain values."""
    # Captions are retrieved within a batch, so its size counts.
    free = ("workers", "pin_memory", *(() if isinstance(config, CONFIGS["pairs"]) else ("batch_size",)))
    plain = config.to_dict()
    data = {name: value for name, value in plain["data"].items() if name not in free}
    kept = ("model", "routing", "audit")
    return {name: value for name, value in plain.items() if name in kept} | {"data": data}


def main(arguments: Sequence[str]) -> list[Path]:
    """Audit as the command line `CONFIG_OR_RUN [--kind KIND] [--key value]` says and print the results."""
    command = shlex.join(["mmod", "audit", *arguments])
    config: Any
    if arguments and (Path(arguments[0]) / _RUN).is_file():
        run = _run_config(Path(arguments[0]))
        config = parse_config(arguments[1:], type(run), run.to_dict())
    else:
        name, options = split_kind(arguments)
        config = parse_config(options, audit_config(name))
    audit_run(config, command=command)
    folder = Path(config.output) / "audit"
    print(f"{(folder / 'audit.md').read_text()}\nTables and pictures: {folder}")
    return [Path(config.output)]


def _run_config(folder: Path) -> Any:
    """Return the config of the audit of a finished run."""
    from mmod.io.yaml import read_yaml

    fields = {name: value for name, value in read_yaml(folder / _RUN).items() if name != "world_size"}
    config = audit_config(kind_of(fields)).from_dict({**fields, "output": str(folder)})
    return recipe_of(config).finished(str(folder))
