"""What a study writes into its folder: table, pictures and text, with the columns and words of its kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mmod.analysis.fronts import draw_tradeoff
from mmod.analysis.statistics import Estimate, one_of_many, published
from mmod.analysis.style import save_picture
from mmod.analysis.table import (
    DENSE,
    Table,
    best,
    close_groups,
    evaluated,
    gain,
    gaps,
    means_over_seeds,
    paired_by_sample,
)
from mmod.analysis.timing import Spread, ratios, relative_times, say_kept
from mmod.io.files import write_atomically, write_json
from mmod.io.jobs import Machine
from mmod.io.tables import Column, MarkdownTable, table_of, write_csv
from mmod.plain import without_none
from mmod.planning.candidate import TOLERANCE, Candidate
from mmod.planning.verdict import beside_controls
from mmod.studies.kind import Facts, Runs, Study
from mmod.studies.measure import BEFORE
from mmod.studies.runs import Comparison, Run
from mmod.training.engine.run_folder import epochs_and_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A baseline with a smaller share of the FLOPs of every routed model that it is matched to is no equal.
_MATCHED = 0.95
# Groups of models without significant differences that a sentence names.
_GROUPS = 3
COLUMNS: dict[str, Column] = {
    "name": ("model", ""),
    "front": ("front", ""),
    "capacity": ("budget", "g"),
    "epochs": ("epochs", ""),
    "gflops": ("GFLOPs", ".4g"),
    "image_gflops": ("GFLOPs / image", ".4f"),
    "text_gflops": ("GFLOPs / caption", ".4f"),
    "image_share": ("image FLOPs", ".3f"),
    "flops_share": ("FLOPs", ".3f"),
    "latency_ms": ("ms / image", ".3f"),
    "speedup": ("speed-up", "[.2f"),
    "image_ms": ("ms / image", ".3f"),
    "text_ms": ("ms / caption", ".3f"),
    "image_speedup": ("image speed-up", "[.2f"),
    "text_speedup": ("text speed-up", "[.2f"),
    "prefill_ms": ("prefill ms", ".2f"),
    "prefill_speedup": ("speed-up", "[.2f"),
    "decode_per_s": ("decode tok/s", ".0f"),
    "cache_bytes": ("cache bytes", ","),
    "peak_mb": ("peak MB", ".1f"),
    "mean_iou": ("mean IoU %", "±.2f"),
    "mean_iou_to_dense": ("IoU to dense", ""),
    "objects": ("objects %", "±.2f"),
    "top1": ("top-1 %", ".2f"),
    "top1_std": ("std", ".2f"),
    "knn": ("k-NN %", ".1f"),
    "knn_to_dense": ("k-NN to dense", ""),
    "linear": ("linear %", ".1f"),
    "linear_to_dense": ("linear to dense", ""),
    "recall1": ("R@1 %", ".2f"),
    "recall1_std": ("std", ".2f"),
    "recall5": ("R@5 %", ".2f"),
    "zero_shot_top1": ("zero-shot %", ".2f"),
    "right": ("right %", "±.1f"),
    "to_dense": ("to dense", ""),
    "to_control": ("to control", ""),
    "to_baseline": ("to the best as cheap", ""),
    "baseline": ("which", ""),
    "patches": ("patches %", ".1f"),
    "before": ("before tuning", "±.2f"),
    "cosine": ("cosine", ".3f"),
    "kept": ("kept", ".3f"),
}
"""The columns of all studies by the name that they have in CSV files."""


@dataclass(frozen=True)
class Point:
    """One model of a study: the costs of its first seed, the figures of all seeds, and differences paired by seed."""

    name: str
    series: str
    capacity: float | None
    cost: dict[str, float]
    figures: dict[int, Mapping[str, float]]
    to_dense: Estimate | None
    to_control: Estimate | None
    # The difference to the best baseline that is as fast, and the baseline's name, by column.
    to_baselines: Mapping[str, Estimate | str | None] = field(default_factory=dict)

    def row(self) -> dict[str, object]:
        """Return all columns by name."""
        row = {"name": self.name, "series": self.series, "capacity": self.capacity, "seeds": len(self.figures)}
        return {
            **row,
            **means_over_seeds(self.figures),
            **self.cost,
            "to_dense": self.to_dense,
            "to_control": self.to_control,
            **self.to_baselines,
        }


@dataclass(frozen=True)
class StudyResult:
    """The outcome of a study: its points, as rows of plain values in an isoFLOP study, and its text as Markdown."""

    folder: Path
    points: Sequence[object]
    rows: Sequence[Mapping[str, object]]  # Of the table.
    table: str
    printed: Sequence[str]  # The most important columns, the paragraphs of the text, and lines of Python.
    cpu_seconds: float  # Of all processes since the study was last started.
    recommended: Sequence[str] = ()  # Models that the text recommends.

    @property
    def summary(self) -> str:
        """What is printed, as Markdown."""
        return "\n\n".join(self.printed)

    def show(self, said: set[str]) -> None:
        """Print the outcome.

        Args:
            said: The sentences on images that studies before it have printed. Verdicts are printed, however alike.
        """
        parts = [part for part in self.printed if part not in said]
        said.update(part for part in self.printed if part.startswith("Images: "))
        # A log of several studies is read faster without blank lines and fences of code, which the page has.
        lines = [line for line in "\n".join(parts).splitlines() if line and not line.startswith("```")]
        print("", *lines, sep="\n")


def write_study(study: Study, table: Table, runs: Runs, facts: Facts, command: str, machine: Machine) -> StudyResult:
    """Write what is known of a study so far, and return it.

    Args:
        command: See `mmod.studies.study.run_study`.
        machine: What the study runs on, and its CPU time so far; see `Runner.facts`.
    """
    comparison = study.comparison
    score = study.config.score
    tolerance = study.config.tolerance
    points = _points(study, table, runs)
    rows = [point.row() for point in points]
    epochs = study.dense.epochs
    # Where a trainer counts steps, there are no epochs to show.
    if epochs is not None:
        before: float | None = None
        if comparison.train_dense:
            before = epochs
        elif comparison.train is not None:
            before, _ = epochs_and_seconds(study.dense.model.checkpoint)
        rows = [{**row, "epochs": epochs_of(runs[point.name], before)} for point, row in zip(points, rows)]
    told = study.kind.tell(study, table, runs, rows, facts)
    names = list(runs)
    harmed = [] if told.began_by_chance else harm(table, score, names, tolerance)
    caution = table.caution and f"{table.caution} {say_kept('`--output FOLDER`')}"
    # What to do is read first, behind what makes it doubtful.
    first = [part for part in (*harmed, *told.verdict, caution) if part]
    others = [*told.parts, *_cheaper(table, runs)]
    others += _of_one_seed(comparison, table, score, names)
    others += without_interval(points)
    others.append(beside_controls({point.name: point.to_control for point in points}, tolerance))
    others = [part for part in others if part]
    speedups = _speedups(study, table)
    lines = [{**row, **speedups.get(row["name"], {})} for row in told.rows]
    shown = table_of(told.columns, [*lines, *told.last_rows])
    summary = shown
    if told.summary is not None:
        summary = table_of(told.summary, lines)
    measure = told.measure[:1].upper() + told.measure[1:]
    record = {
        "command": command,
        "config": dataclasses.asdict(study.config),
        **machine,
        "rates": table.rates,
        **facts,
        "recommended": list(told.recommended),
        "summary": summary.rows,
        "code": "\n\n".join(told.code),
        "title": f"{measure} against {', '.join(told.axes.values())}",
        "points": [published(point) for point in points],
    }
    # Settings are shown where a browser points, and are no columns.
    noted = [
        {**row, "note": hint(runs[row["name"]].candidate, row), "recommended": row["name"] in told.recommended}
        for row in told.rows
    ]
    pictures = {"tradeoff": draw_tradeoff(noted, score, told.measure, told.axes), **(told.pictures or {})}
    page = write_outcome(
        comparison.folder,
        "tradeoff",
        record,
        [flat(row) for row in told.rows],
        [shown, *first, *others, *comparison.notes],
        pictures,
        told.code,
    )
    # The notes were printed before the first run.
    paragraphs = "\n\n".join(map(str, [*first, summary, *others])).split("\n\n")
    printed = [*paragraphs, *told.printed]
    cpu_seconds = machine["cpu_seconds"]
    return StudyResult(comparison.folder, list(points), told.rows, page, printed, cpu_seconds, told.recommended)


def _points(study: Study, table: Table, runs: Runs) -> list[Point]:
    """Return candidates with their differences to the dense model, to their control and to the best baselines."""
    score = study.config.score
    to_dense = gaps(table, score, dict.fromkeys(runs, DENSE))
    # A control may not be measured yet.
    to_control = gaps(table, score, {name: run.candidate.control for name, run in runs.items()})
    to_baselines: dict[str, dict[str, Estimate | str | None]] = {name: {} for name in runs}
    for suffix, others in study.kind.baselines(study, table, runs).items():
        best_baseline = {name: best(table, score, names) for name, names in others.items()}
        for name, gap in gaps(table, score, best_baseline).items():
            to_baselines[name] |= {f"to_baseline{suffix}": gap, f"baseline{suffix}": best_baseline[name]}
    times = _columns_of_time(study, table)
    return [
        Point(
            name,
            run.candidate.series,
            run.candidate.budget,
            table.costs[name] | times.get(name, {}),
            table.figures(name),
            to_dense[name],
            to_control[name],
            to_baselines[name],
        )
        for name, run in runs.items()
    ]


def _columns_of_time(study: Study, table: Table) -> dict[str, dict[str, float]]:
    """Return times and speed-ups by candidate; empty before they are measured."""
    suffixes = study.config.size_suffixes
    by_name: dict[str, dict[str, float]] = {}
    for (inputs, size), ms in table.times.items():
        columns = [f"{column}{suffixes[size]}" for column in study.kind.times[inputs]]
        # By round, as the load of the machine changes between rounds.
        for name, figures in relative_times(ms, DENSE).items():
            by_name.setdefault(name, {}).update(zip(columns, figures))
    return {name: {**columns, **study.kind.derive(columns)} for name, columns in by_name.items()}


def _speedups(study: Study, table: Table) -> dict[str, dict[str, Spread]]:
    """Return speed-ups with their quartiles over rounds, by candidate and column."""
    by_name: dict[str, dict[str, Spread]] = {}
    for (inputs, size), ms in table.times.items():
        _, column = study.kind.times[inputs]
        for name, values in ms.items():
            spread = ratios(ms[DENSE], values)
            by_name.setdefault(name, {})[f"{column}{study.config.size_suffixes[size]}"] = spread
    return by_name


def with_batch_sizes(suffixes: Mapping[int, str], names: Sequence[str]) -> dict[str, Column]:
    """Return columns by name, those of times and of baselines that are as fast for every batch size."""
    columns: dict[str, Column] = {}
    # Beside each difference to dense stand those to baselines, one for each batch size.
    gap_names = [name for name in names if name.endswith("to_dense")]
    for name in names:
        title, form = COLUMNS[name]
        if name in ("latency_ms", "speedup"):
            columns |= {f"{name}{suffix}": (f"{title} b{size}", form) for size, suffix in suffixes.items()}
            continue
        columns[name] = (title, form)
        if name in gap_names:
            baseline = f"{name.removesuffix('dense')}baseline"
            heading = f"{title.removesuffix('dense')}baseline"
            columns |= {f"{baseline}_b{size}": (f"{heading} b{size}", form) for size in suffixes}
        if name == gap_names[-1]:
            columns |= {f"baseline_b{size}": (f"baseline b{size}", "") for size in suffixes}
    return columns


def epochs_of(run: Run, before: float | None) -> str:
    """Return the epochs of a model as a study shows them: from scratch, or after those of the dense model.

    Args:
        before: Epochs of the dense model; None where they are not known.
    """
    epochs = run.training.epochs
    if run.is_trained and not run.is_tuned:
        return str(epochs)
    of_dense = "" if before is None else f"{before:g} "
    if not run.is_trained:
        return of_dense.strip()
    shown = f"{of_dense}+ {epochs}"
    # Of conversations, which parts of the model train.
    trained = getattr(run.training, "trained", None)
    if trained is not None:
        shown += f" ({trained})"
    return shown


def named_columns(names: Sequence[str]) -> dict[str, Column]:
    """Return columns by name, see `COLUMNS`."""
    return {name: COLUMNS[name] for name in names}


def significance(table: Table, score: str, names: Sequence[str]) -> str:
    """Say between which models there is no significant difference, paired by sample or by seed.

    Example:
        >>> from mmod.analysis.table import Measured
        >>> table = Table()
        >>> for name, values in {"dense": [95.0, 95.2], "a": [94.9, 95.2], "b": [70.0, 70.1]}.items():
        ...     for seed, value in enumerate(values):
        ...         table.add(name, seed, Measured({"top1": value}))
        >>> print(significance(table, "top1", list(table.runs)))
        No significant difference between dense and a (paired over 2 seeds, 95 % intervals).
    """
    # A study that goes on may have some models with fewer seeds.
    seeds = max((len(table.runs[name]) for name in names), default=0)
    is_by_sample = paired_by_sample(table, score, names)
    if seeds < 2 and not is_by_sample:
        return "One seed: differences are not tested. Add --seeds 5 for confidence intervals."
    over = f"{seeds} seeds"
    if is_by_sample:
        over = f"{evaluated(table, names[0]):,} samples"
    test = f"(paired over {over}, 95 % intervals)"
    groups = close_groups(table, score, names)
    if not groups:
        return f"All differences are significant {test}."
    first, *others = [_between(group) for group in groups[:_GROUPS]]
    sentences = [f"No significant difference {first} {test}.", *(f"Nor {other}." for other in others)]
    if len(groups) > _GROUPS:
        sentences.append(f"Nor within {len(groups) - _GROUPS} more groups.")
    return " ".join(sentences)


def _between(group: Sequence[str]) -> str:
    """Name the models of a group, each of which is as close to each other."""
    among = "any two of " if len(group) > 2 else ""
    return f"between {among}{listed(group, most=6)}"


def harm(table: Table, score: str, names: Sequence[str], tolerance: float = TOLERANCE) -> list[str]:
    """Return a warning if fine-tuning made models worse by more than chance explains; empty else.

    One of many models falls by chance. So a model counts by an interval that holds for all of them together, and the
    dense one, which is looked at first, by its own. Where most models fell by more than the tolerance, or none has an
    interval, that is what counts. Beside a dense model that fell, others that fell by at least as much are named.
    """
    gains = {name: gain(table, score, BEFORE, name) for name in names}
    tuned = without_none(gains)
    fallen = []
    how = "by more than chance explains"
    for name, value in tuned.items():
        seen = value if name == DENSE else one_of_many(value, len(tuned))
        if seen.high < 0:
            fallen.append(name)
    lower = [name for name, value in tuned.items() if value.value < -100 * tolerance]
    is_tested = any(value.has_interval for value in tuned.values())
    if 2 * len(lower) > len(tuned) or not is_tested:
        how = f"by more than {100 * tolerance:g} points"
        if not set(fallen) <= set(lower):
            how += " or by more than chance explains"
        fallen = list(dict.fromkeys([*fallen, *lower]))
    if not fallen:
        return []
    # The dense one, by which all are measured, counts most.
    fallen.sort(key=lambda name: (name != DENSE, tuned[name].value))
    told = "; ".join(f"{name} ({tuned[name]:+.1f} points)" for name in fallen[:_GROUPS])
    if len(fallen) > _GROUPS:
        told += f"; and {len(fallen) - _GROUPS} more"
    beside = ""
    if DENSE in fallen:
        # As far as the table shows.
        limit = round(tuned[DENSE].value, 1)
        as_low = [name for name, value in tuned.items() if name not in fallen and round(value.value, 1) <= limit]
        as_low.sort(key=lambda name: tuned[name].value)
        if as_low:
            beside = f" {listed(as_low)} fell by at least as much as dense."
    return [
        f"Fine-tuning may have done harm: {len(fallen)} of {len(tuned)} models fell {how}: {told}.{beside} A lower "
        "rate in `finetune`, more steps or more data may do less."
    ]


def without_interval(points: Sequence[Point]) -> list[str]:
    """Say which differences to the dense model are one number, though others have an interval over seeds."""
    names = []
    for point in points:
        gap = point.to_dense
        # Over the images of one seed, an interval says nothing of seeds.
        if gap is None or gap.seeds is None or gap.seeds < 2:
            continue
        if gap.has_interval and not gap.has_width:
            names.append(point.name)
    if not names:
        return []
    verb = "differs" if len(names) == 1 else "differ"
    return [f"Without an interval: {listed(names)} {verb} from the dense model by as much in every seed."]


def _of_one_seed(comparison: Comparison, table: Table, score: str, names: Sequence[str]) -> list[str]:
    """Say what intervals are over where models were trained with one seed."""
    if not comparison.trains or comparison.seeds > 1 or not paired_by_sample(table, score, names):
        return []
    return ["One seed: intervals are over samples, not over training runs; `--seeds 5` gives those over runs."]


def _cheaper(table: Table, runs: Runs) -> list[str]:
    """Warn of baselines with clearly fewer FLOPs than the routed models that they are matched to, or say nothing."""
    shares = {}
    for name in runs:
        flops = table.costs[name].get("gflops")
        if flops is not None:
            shares[name] = flops / table.costs[DENSE]["gflops"]
    routed: dict[float | None, float] = {}
    for name, share in shares.items():
        candidate = runs[name].candidate
        if not candidate.is_baseline:
            routed[candidate.budget] = min(share, routed.get(candidate.budget, share))
    told = []
    for name, share in shares.items():
        candidate = runs[name].candidate
        if candidate.budget is None:
            continue
        matched = routed.get(candidate.budget, 0.0)
        if candidate.is_baseline and share < _MATCHED * matched:
            told.append(f"{name} ({share:.2f} of the dense FLOPs; routed models from {matched:.2f})")
    if not told:
        return []
    return [
        f"Cheaper than the routed models that they are matched to: {', '.join(told)}. They are faster, and may lose "
        "more, than at equal FLOPs: give series `budgets`, and baselines numbers that are `fit` to them."
    ]


def hint(candidate: Candidate, row: Mapping[str, object]) -> str:
    """Return differences and settings of a model, the text that a browser shows at its point."""
    lines = []
    for name, title in (("to_dense", "to dense"), ("to_control", "to control")):
        if row[name] is not None:
            lines.append(f"{title}: {row[name]}")
    args = candidate.changes.get("model", {}).get("args", {})
    parts = [candidate.routing or {}, *candidate.methods, args]
    if candidate.image_size is not None:
        parts.append({"image_size": candidate.image_size})
    settings = []
    for part in parts:
        settings += [f"{name}: {value}" for name, value in part.items()]
    if settings:
        lines.append(", ".join(settings))
    return "\n".join(lines)


def write_outcome(
    folder: Path,
    name: str,
    record: Mapping[str, object],
    rows: Sequence[Mapping[str, object]],
    parts: Sequence[str | MarkdownTable],
    pictures: Mapping[str, Figure],
    code: Sequence[str] = (),
) -> str:
    """Write a study's record as JSON, its rows as CSV, its pictures by their names, and its page as Markdown.

    Args:
        parts: Tables and sentences of the page, which the record holds too, tables as rows of cells.
        code: Blocks at the end of the page.

    Returns:
        The page.
    """
    for title, figure in pictures.items():
        save_picture(folder, title, figure)
    kept = [part if isinstance(part, str) else part.rows for part in parts]
    write_json(folder / f"{name}.json", {**record, "page": kept})
    write_csv(folder / f"{name}.csv", rows)
    page = "\n\n".join(map(str, [*parts, *code]))
    write_atomically(folder / f"{name}.md", page + "\n")
    return page


def flat(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row with a column `NAME/FIELD` for every field of a difference."""
    columns: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, Estimate):
            columns |= {f"{name}/{field}": number for field, number in published(value).items()}
        else:
            columns[name] = value
    return columns


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first few names as a list, those with a comma in quotes, and how many follow.

    Example:
        >>> listed(["a", "b, merged", "c", "d", "e"]), listed(["a", "b"])
        ("a, 'b, merged', c and 2 more", 'a and b')
    """
    shown = [f"'{name}'" if "," in name else name for name in names[:most]]
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most} more"
    if len(shown) > 1:
        return f"{', '.join(shown[:-1])} and {shown[-1]}"
    return "".join(shown)
