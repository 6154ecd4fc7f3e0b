"""The command that audits a trained model: `mmod audit CONFIG_OR_RUN [--key value]`."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmod.audits.config import AUDITS, AnyConfig, PairsAuditConfig, TextAuditConfig
from mmod.training.engine.parse import parse_config
from mmod.training.kinds import kind_of, recipe_of, split_kind

if TYPE_CHECKING:
    from mmod.analysis import Audit
    from mmod.audits.subject import Subject

_RECORD, _FOUND, _PARTIAL = "config.json", "audit.json", "partial.json"
_RUN = "config.yaml"


def audit_run(config: AnyConfig, *, command: str | None = None, progress: bool = True) -> Audit:
    """Audit the model that a run would start from, and write what was found into the folder `audit` of its output."""
    from mmod import is_routed
    from mmod.analysis.audit.plots import draw_audit
    from mmod.analysis.audit.result import read_audit
    from mmod.analysis.statistics import published
    from mmod.audits.subjects import subject_of
    from mmod.io.claim import claim_folder
    from mmod.io.files import write_atomically
    from mmod.training.engine.loop import seed_draws

    options, folder = config.audit, Path(config.output) / "audit"
    later: dict[str, Any] = {"audit.reference": None, "audit.shifts": [], "audit.leave_one_out": 0, "audit.beside": []}
    # A mapping with keys of its own is none in the record.
    later |= {} if options.others else {"audit.others": {}}
    later |= {"generation": 0, "texts": 32} if isinstance(config, TextAuditConfig) else {}
    claim = partial(claim_folder, folder, _record(config), file=_RECORD, kind="an audit", defaults=later)
    if (folder / _FOUND).exists():
        claim()
        return read_audit(json.loads((folder / _FOUND).read_text())["audit"])
    seed_draws(config.seed, 0, 0)
    subject = subject_of(config)
    model = subject.create() if subject.recipe.has_weights else None
    if model is None or not is_routed(model):
        raise ValueError(
            "an audit needs a routed model with weights: name a run folder of one, or set model.checkpoint and routing"
        )
    found, costs = _audited(config, subject, model, claim, folder / _PARTIAL, progress)
    maps = subject.maps(model, options.maps) if options.maps else None
    cost, generation = subject.flops(model), subject.generation(model)
    record = {
        "name": Path(config.output).name,
        "command": command or f"mmod audit {shlex.quote(config.output)}",
        "environment": _environment(),
        "audit": found.to_dict(),
        "flops": cost,
        "beside_flops": costs,
        "generation": None if generation is None else dataclasses.asdict(generation, dict_factory=published),
        "maps": None if maps is None else maps.to_dict(),
    }
    if maps is not None:
        maps.draw().savefig(folder / "maps.png", dpi=150)
    draw_audit(found).savefig(folder / "audit.png", dpi=150)
    more = "" if generation is None else f"\n{generation}\n"
    write_atomically(folder / "audit.md", f"{found}\n{_costs_told(cost, costs)}{more}")
    write_atomically(folder / _FOUND, json.dumps(record, indent=1) + "\n")
    (folder / _PARTIAL).unlink(missing_ok=True)
    return found


def _audited(
    config: AnyConfig,
    subject: Subject[Any],
    model: Any,
    claim: Callable[[], object],
    progress_file: Path,
    progress: bool,
) -> tuple[Audit, dict[str, float | None]]:
    """Audit a model in a folder that is claimed once all is there; return also what the models beside it cost."""
    from mmod import audit
    from mmod.analysis.audit.choices import choices

    options = config.audit
    conditions = subject.conditions(options)
    # An audit that is refused leaves no folder behind.
    choices(tuple(conditions), None, has_reference=options.reference is not None)
    shifts, beside = subject.shifts(options), _beside(config)
    others = {name: subject.batches(changes) for name, changes in options.others.items()}
    split = options.positions_split
    claim()
    found = audit(
        model,
        subject.batches(),
        judge=lambda own, batch: subject.judge(own, batch.batch),
        positions_from=None if split is None else subject.batches({subject.split: split}),
        conditions=conditions,
        draws=options.draws,
        margin=options.margin,
        resamples=options.resamples,
        strata=lambda batch: batch.strata,
        token_kinds=lambda batch: batch.kinds,
        reference=None if options.reference is None else subject.create(options.reference),
        shifts=shifts,
        others=others,
        leave_one_out=options.leave_one_out,
        beside=beside,
        progress_file=progress_file,
        progress=progress,
    )
    return found, {name: subject.cost(own) for name, own in beside.items()}


def _beside(config: AnyConfig) -> dict[str, Any]:
    """Return the models of other runs by the names of their folders."""
    from mmod.audits.subjects import subject_of

    folders = {Path(folder).name: Path(folder) for folder in config.audit.beside}
    if len(folders) < len(config.audit.beside):
        raise ValueError(f"audit.beside names two folders alike: {', '.join(config.audit.beside)}")
    found = {}
    for name, folder in folders.items():
        kind, fields = _of_run(folder)
        if kind is not type(config):
            raise ValueError(f"audit.beside: {str(folder)!r} is a run of another kind than the audited one")
        found[name] = subject_of(kind.from_dict(fields)).create()
    return found


def _costs_told(own: Mapping[str, Any] | None, costs: Mapping[str, float | None]) -> str:
    """Return what the models cost beside each other; nothing where that was not counted."""
    counted = {name: cost for name, cost in costs.items() if cost is not None}
    if own is None or not counted:
        return ""
    others = ", ".join(f"{name} {cost / 1e6:.2f}" for name, cost in counted.items())
    return f"\nMFLOPs of a sample, as counted on these: this model {own['routed'] / 1e6:.2f}, {others}.\n"


def _record(config: AnyConfig) -> dict[str, Any]:
    """Return what decides the outcome, as plain values."""
    # Captions are found within a batch.
    free = ("workers", "pin_memory", *(() if isinstance(config, PairsAuditConfig) else ("batch_size",)))
    plain = config.to_dict()
    data = {name: value for name, value in plain["data"].items() if name not in free}
    kept = ("model", "routing", "audit", "questions", "generation", "texts")
    return {name: value for name, value in plain.items() if name in kept} | {"data": data}


def _environment() -> dict[str, Any]:
    import platform
    from importlib.metadata import version

    import torch

    return {
        "mmod": version("mmod"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> Path:
    """Audit as the command line `CONFIG_OR_RUN [--kind KIND] [--key value]` says and print what was found."""
    arguments = list(arguments)
    command = shlex.join(["mmod", "audit", *arguments])
    if arguments and (Path(arguments[0]) / _RUN).is_file():
        kind, fields = _of_run(Path(arguments[0]))
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            json.dump(fields, file)
            file.flush()
            config = parse_config([file.name, *arguments[1:]], kind)
    else:
        name, arguments = split_kind(arguments)
        config = parse_config(arguments, AUDITS[name])
    audit_run(config, command=command)
    folder = Path(config.output) / "audit"
    print(f"{(folder / 'audit.md').read_text()}\nTables and pictures: {folder}")
    return Path(config.output)


def _of_run(folder: Path) -> tuple[type[AnyConfig], dict[str, Any]]:
    """Return kind and config of a finished run, started from its own weights."""
    from mmod.io.yaml import read_yaml

    fields = {name: value for name, value in read_yaml(folder / _RUN).items() if name != "world_size"}
    kind = AUDITS[kind_of(fields)]
    config = kind.from_dict({**fields, "output": str(folder)})
    return kind, recipe_of(config).finished(str(folder)).to_dict()
