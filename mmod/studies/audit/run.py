"""The audit of a run: its model, on its evaluation set, and the files of the result."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mmod.analysis import FlopReport, flops
from mmod.analysis.counting import by_data
from mmod.analysis.evaluations import check_classes, joined
from mmod.analysis.statistics import published
from mmod.analysis.style import save_figure, save_picture
from mmod.analysis.tracing import draw_sample_maps
from mmod.audits.choices import choices, default_choices
from mmod.audits.contexts import Comparisons
from mmod.audits.generation import Generation, evaluate_generation
from mmod.audits.plots import draw_audit
from mmod.audits.result import Audit
from mmod.audits.run import audit
from mmod.audits.shifts import SHIFTS
from mmod.config.parse import read_config
from mmod.data.config import DataConfig, TextConfig
from mmod.data.loader import sample_images, text_stream
from mmod.io.environment import environment
from mmod.io.files import near_paths, read_json_object, write_atomically, write_json
from mmod.io.records import read_record, record_config
from mmod.io.store import STORE, Store
from mmod.methods.route import is_routed
from mmod.opening.runs import (
    RUN_CONFIG,
    check_at_rest,
    check_same_classes,
    find_run,
    run_classes,
    told_sums,
    weight_sums,
)
from mmod.studies.audit.config import AUDITS, Audited, AuditOptions, record_of
from mmod.studies.audit.sets import Batches, read_set, sets_of
from mmod.studies.measure import identity_of
from mmod.training.command import finished_run
from mmod.training.engine.config import RunConfig, config_as
from mmod.training.engine.evaluate import kept_means
from mmod.training.engine.kind import COUNTED, Kind, cost, device_of, load
from mmod.training.engine.run_folder import read_files
from mmod.training.kinds import kind_of
from mmod.values import refuse_unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CONFIG = "config.json"


def audit_run(config: RunConfig, *, command: str | None = None, progress: bool = True) -> Audit:
    """Audit the model that a run would start from, and write the results into the folder `audit` of its output."""
    config = kind_of(config).config
    folder = Path(config.output) / "audit"
    result = folder / "audit.json"
    options = config_as(config, Audited).audit
    if result.exists():
        _record(folder, config, options)
        return Audit.from_dict(read_json_object(result)["audit"])
    if isinstance(config.data, TextConfig):
        length = config.data.length
        if options.generation % length:
            raise ValueError(f"audit.generation must be a multiple of data.length={length}, got {options.generation}")
    elif options.generation:
        raise ValueError(
            f"audit.generation is for runs of kind 'text', whose models write bytes, and this is one of kind "
            f"{config.kind!r}: leave it out"
        )
    config.check_weights()
    for path in filter(None, (options.reference, *options.baselines)):
        check_at_rest(path)
    kind = kind_of(config.plain())
    # Before anything is read.
    if not config.model.has_weights:
        raise ValueError("random weights have learned nothing to audit: name a run folder, or set model.checkpoint")
    model = load(kind)
    if not is_routed(model):
        # Published weights have a name of their kind's.
        named = config.model.checkpoint or getattr(config.model, "name", None)
        raise ValueError(
            f"the model of {named!r} is dense, or has no routers to audit: name the run of a routed one, and this as "
            "--audit.reference; `mmod evaluate` has its score and cost"
        )
    conditions = options.conditions
    if conditions is None:
        on_request = sets_of(config.kind).on_request
        conditions = [name for name in default_choices(options.reference is not None) if name not in on_request]
    refuse_unknown("shift of audit.shifts", options.shifts, list(SHIFTS))
    choices(conditions, None, has_reference=options.reference is not None)
    baselines = _baselines(config, options.baselines)
    reference = None
    if options.reference is not None:
        reference = _dense(kind, options.reference)
    comparisons = Comparisons(
        reference=reference,
        baselines=baselines,
        others={name: read_set(kind, model, changes) for name, changes in options.others.items()},
        shifts={name: SHIFTS[name] for name in options.shifts},
    )
    # Once the options are checked, so that a refused audit leaves no folder.
    _record(folder, config, options)
    batches = read_set(kind, model)
    report = audit(
        model,
        batches,
        dataclasses.replace(options, conditions=conditions),
        comparisons,
        evaluate=partial(_evaluate, kind),
        store=folder / STORE,
        progress=progress,
    )
    costs = {name: _cost(kind, baseline, batches) for name, baseline in baselines.items()}
    _write(folder, kind, model, options, report, costs, command or f"mmod audit {shlex.quote(config.output)}")
    # The record holds the result.
    Store(folder / STORE).remove()
    return report


def _record(folder: Path, config: RunConfig, options: AuditOptions) -> None:
    """Record what is audited in a folder.

    Raises:
        FileNotFoundError: It has an audit whose weights are missing now.
        FolderTakenError: It has the audit of something else.
    """
    checksums = {**identity_of(config)["weights"]}
    for path in (options.reference, *options.baselines):
        if path is not None:
            checksums[path] = weight_sums(path)
    weights = {name: told_sums(by_file) for name, by_file in checksums.items()}
    record = {**record_of(config), "weights": weights, "files": read_files(config)}
    existing = read_record(folder, _CONFIG)
    if existing is not None:
        recorded = existing.get("weights", {})
        for name in [name for name, sums in weights.items() if not sums and recorded.get(name)]:
            path = config.model.weights.get(name, name)
            raise FileNotFoundError(
                f"{str(folder)!r} is an audit with the weights of {path!r}, which are missing{near_paths(path)}: "
                "put them back, or choose another folder"
            )
    record_config(folder, record, file=_CONFIG, kind="an audit")


def _evaluate(kind: Kind, model: nn.Module, batch: object) -> tuple[Tensor, Tensor]:
    """Return loss and accuracy of every sample of a batch."""
    rows = kind.evaluate(model, _on_device(kind, batch))
    if "labels" in rows:
        check_classes(rows["labels"])
    return rows["loss"], rows["outcome"]


def _on_device(kind: Kind, batch: object) -> object:
    """Return a batch with its tensors on the model's device."""
    device = device_of(kind)
    return tree_map_only(Tensor, lambda leaf: leaf.to(device), batch)


def _dense(kind: Kind, folder: str) -> nn.Module:
    """Return the dense model of a run folder."""
    config = dataclasses.replace(kind.config.finished(folder), routing=None)
    return load(kind_of(config))


def _cost(kind: Kind, model: nn.Module, batches: Batches) -> float:
    """Return the mean FLOPs of a sample in a model of another run; it is evaluated where they follow from the data."""
    kept = {}
    if by_data(model):
        with torch.inference_mode():
            parts = [kind.evaluate(model, _on_device(kind, labelled.batch)) for labelled in batches]
        kept = kept_means(joined(parts))
    flops = cost(kind, model, kept)
    return float(sum(flops.values()))


def _counted(kind: Kind, model: nn.Module) -> FlopReport | None:
    """Count the FLOPs of a sample by part; None for models of text, which are counted by lengths alone."""
    if "language" in kind.config.parts:
        return None
    samples = {name: next(iter(one.batches)) for name, one in kind.inputs(model, COUNTED).items()}
    return flops(model, {name: batch[:1] for name, batch in samples.items()})


def _generation(kind: Kind, model: nn.Module, options: AuditOptions) -> Generation | None:
    """Return the decisions of a model while it writes long texts; None if it writes none."""
    data = kind.config.data
    if not isinstance(data, TextConfig) or not options.generation:
        return None
    # Longer texts than the windows of the training.
    length = data.length + options.generation
    stream = text_stream(dataclasses.replace(data, length=length, val_limit=options.texts))
    tokens_BN = torch.cat([tokens for tokens, _ in stream.batches(0)]).to(device_of(kind))
    return evaluate_generation(model, tokens_BN, data.length, kind.config.seed)


def _maps(kind: Kind, model: nn.Module, count: int) -> Figure | None:
    """Draw the kept tokens of some images; None for other samples."""
    data = kind.config.data
    if not isinstance(data, DataConfig) or not count:
        return None
    return draw_sample_maps(model, sample_images(data, count))


def _write(
    folder: Path,
    kind: Kind,
    model: nn.Module,
    options: AuditOptions,
    report: Audit,
    baseline_costs: Mapping[str, float],
    command: str,
) -> None:
    """Write pictures, text and record of an audit."""
    counted = _counted(kind, model)
    generation = _generation(kind, model, options)
    maps = _maps(kind, model, options.maps)
    if maps is not None:
        save_picture(folder, "maps", maps)
    save_figure(draw_audit(report), folder / "audit.png", dpi=150)
    text = f"{report}\n"
    if counted is not None and baseline_costs:
        others = ", ".join(f"{name} {value / 1e6:.2f}" for name, value in baseline_costs.items())
        text += f"\nMFLOPs of a sample, as counted on these: this model {counted.routed / 1e6:.2f}, {others}.\n"
    generated = None
    if generation is not None:
        text += f"\n{generation}\n"
        generated = published(generation)
    write_atomically(folder / "audit.md", text)
    record = {
        "name": Path(kind.config.output).name,
        "command": command,
        "environment": environment(),
        "audit": report.to_dict(),
        "flops": counted and counted.to_dict(),
        "baseline_flops": baseline_costs,
        "generation": generated,
    }
    # Last, because a record says that the audit is finished.
    write_json(folder / "audit.json", record, indent=1)


def _baselines(config: RunConfig, folders: Sequence[str]) -> dict[str, nn.Module]:
    """Return the models of `audit.baselines` by the names of their folders."""
    named = {Path(folder).name: Path(folder) for folder in folders}
    if len(named) < len(folders):
        raise ValueError(f"audit.baselines names two folders alike: {', '.join(folders)}")
    models = {}
    for name, folder in named.items():
        root = find_run(folder)
        if root is None:
            raise FileNotFoundError(f"audit.baselines: {str(folder)!r} is no folder of a run, or weights in one")
        run = finished_run(read_config([str(root / RUN_CONFIG)], AUDITS), root, folder)
        if type(run) is not type(config):
            raise ValueError(f"audit.baselines: {str(folder)!r} is a run of another kind than the audited one")
        check_same_classes(run_classes(config.model.checkpoint), folder, "audit.baselines:")
        models[name] = load(kind_of(run.plain()))
    return models
