"""An isoFLOP study: sizes of a language model compared at equal FLOPs of training, each with its best learning rate.

A curve of loss over size is fitted at every budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import nn

from mmod.analysis.counting import meta_copy, step_flops
from mmod.analysis.prefill import Prefill, Prompt, language_stack
from mmod.analysis.statistics import Estimate, difference, published
from mmod.analysis.style import FAINT, INK, MARKERS, Style, add_hint, add_legend, looks, new_figure, tidy
from mmod.analysis.table import Measured, Table, compare, means_over_seeds
from mmod.data.loader import text_stream
from mmod.io.files import locked, make_folder
from mmod.io.jobs import Callback, Runner
from mmod.io.records import QUESTION
from mmod.io.store import STORE, Store
from mmod.io.tables import Column, MarkdownTable, table_of
from mmod.io.yaml import merged, read_yaml
from mmod.losses import auxiliary_loss
from mmod.methods.base import deciding_together
from mmod.plain import without
from mmod.planning.candidate import Candidate
from mmod.studies.isoflop_config import IsoflopConfig
from mmod.studies.measure import Measurer, fit, rows_of
from mmod.studies.question import question_of
from mmod.studies.rates import Rates, at_rates, best_rates
from mmod.studies.report import StudyResult, write_outcome
from mmod.studies.runs import Comparison, Run, run_config_of
from mmod.training.engine.start import sketch
from mmod.training.kinds import kind_of
from mmod.training.text.config import TrainConfig
from mmod.training.text.kind import window_flops
from mmod.values import refuse_unknown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Budget and name of a series.
Group = tuple[float, str]
Points = Sequence[Mapping[str, Any]]
_COLUMNS: dict[str, Column] = {
    "budget": ("training FLOPs", ".3g"),
    "series": ("model", ""),
    "size": ("size", ""),
    "parameters": ("parameters", ",.0f"),
    "forward": ("forward FLOPs", ".3g"),
    "steps": ("steps", ""),
    "rate": ("rate", "g"),
    "loss": ("loss", "±.4f"),
    "causal_loss": ("token by token", "±.4f"),
    "agreement": ("alike", ".3f"),
    "difference": ("to the first", ""),
}
# The negative loss, so that more is better.
_GAIN = "gain"


class Setting(NamedTuple):
    """One model of the grid, trained with one budget; the first seven are its columns in the study's table."""

    series: str
    size: str
    budget: float
    parameters: int  # Routers included.
    forward: int  # FLOPs of the forward pass of a window.
    steps: int
    spent: float  # FLOPs of all steps.
    candidate: Candidate
    config: TrainConfig  # Without the best learning rate, seed and folder.

    @property
    def name(self) -> str:
        """Name of its runs."""
        return self.candidate.name

    def row(self, rate: float, seeds: Mapping[int, Mapping[str, float]]) -> dict[str, object]:
        """Return its columns at a learning rate: the figures of every seed, and their means."""
        facts = without(self._asdict(), ("candidate", "config"))
        return {**facts, "rate": rate, "seeds": seeds, **means_over_seeds(seeds)}


def settings_of(config: IsoflopConfig) -> list[Setting]:
    """Return the models of a study, by budget, series and size."""
    dense = _dense(config)
    settings = []
    for series in _series(config):
        for size, changes in config.sizes.items():
            sized = dataclasses.replace(series, changes={"model": {"config": changes}})
            run = run_config_of(sized, dense)
            model = sketch(kind_of(run))
            parameters = sum(parameter.numel() for parameter in model.parameters())
            # Counted as in training: logits of every token, and the top-k of routed layers.
            forward = window_flops(model, run.data.length)
            window = training_flops(model, run.data.length)
            for budget in config.budgets:
                step = window * run.data.batch_size * run.accumulate
                length = _length(run, budget, step, f"{series.name} {size}")
                steps = length["epochs"] * length["epoch_steps"]
                candidate = dataclasses.replace(
                    sized, name=f"{series.name}-{size}-{budget:g}", changes={**sized.changes, **length}
                )
                timed = run_config_of(candidate, dense)
                spent = float(step * steps)
                settings.append(Setting(series.name, size, budget, parameters, forward, steps, spent, candidate, timed))
    _check_text(settings)
    # Small budgets first, whose runs are the shortest.
    return sorted(settings, key=lambda setting: setting.budget)


def training_flops(model: nn.Module, tokens: int) -> int:
    """Count the FLOPs of training on a text: forward and backward pass, with the logits of every token."""
    copied = meta_copy(model)
    # Training takes the top-k, whatever decides in evaluation.
    with deciding_together(copied):
        copied.train()
        prefill = Prefill(copied, language_stack(copied), Prompt(tokens))
        # The embeddings, which are looked up, learn too.
        prefill.inputs["inputs_embeds"].requires_grad_()
        return step_flops(copied, lambda: prefill.logits().sum() + auxiliary_loss(copied))


def _dense(config: IsoflopConfig) -> TrainConfig:
    fields = merged(read_yaml(config.dense), config.changes)
    # Rates of the study are factors of this one, whatever the file has, which may be 0.
    fields = merged(fields, {"output": config.output, "routing": None, "optim": {"lr": 1.0}})
    return TrainConfig.from_dict(fields)


def _series(config: IsoflopConfig) -> list[Candidate]:
    """Return the models compared at every size and budget."""
    candidates = []
    for series, fields in config.routings.items():
        if fields is None or "methods" not in fields:
            candidates.append(Candidate(series, routing=fields))
            continue
        refuse_unknown(f"field beside routings.{series}.methods", fields, ("methods", "routing"))
        candidates.append(Candidate(series, methods=tuple(fields["methods"]), routing=fields.get("routing")))
    return candidates


def run_isoflop(config: IsoflopConfig, *, command: str = "", progress: bool = True) -> StudyResult:
    """Find every model's learning rate, train it, and write `isoflop.{csv,json,md,png}` after each seed.

    Args:
        command: The command that asks for it, as it was typed, for the report.
    """
    settings = settings_of(config)
    runner = Runner(config.processes, progress)
    runner.say(f"{_ahead(config, settings)}. The time left is known from the first run on")
    dense = _dense(config)
    candidates = [setting.candidate for setting in settings]
    keys = ("changes", "changes")
    runs = Comparison(candidates=candidates, dense=dense, train=dense, seeds=config.seeds, keys=keys).checked_runs()
    # A folder that cannot be written is no news for the end of a run.
    folder = make_folder(config.output)
    store = Store(folder / STORE)
    # Of other rates, another one may be the best.
    question = question_of({"kind": "isoflop", "rates": sorted(config.rates)}, runs)
    question.begin(folder)
    # The results of this seed are not reported. Of equal losses the lowest rate is taken.
    rates = Rates(sorted(config.rates), _GAIN, _gain, folder / "rates", seed=config.seeds)
    table = Table()
    table.rates = best_rates(runs, rates, store, runner)
    runs = at_rates(runs, table.rates)
    result: StudyResult | None = None
    for run in compare(table, [runs], Measurer(_train, store), runner):
        # Other programs may do runs of the study too.
        with locked(folder / QUESTION, wait=True):
            question.keep(folder, table.runs)
            # By seed, so that there is a picture after the first.
            if all(run.seed in table.runs.get(setting.name, {}) for setting in settings):
                points = [setting.row(table.rates[setting.name], table.figures(setting.name)) for setting in settings]
                result = _write(config, command, points, runner)
    assert result is not None
    return result


def describe(config: IsoflopConfig) -> str:
    """Say what a study would do: runs, steps and FLOPs of every model."""
    settings = settings_of(config)
    lines = [
        f"{setting.name}: {setting.parameters:,} parameters, {setting.forward:.3g} FLOPs a window, "
        f"{setting.steps} steps, {setting.spent:.3g} FLOPs a run"
        for setting in settings
    ]
    return "\n".join([*lines, _ahead(config, settings)])


def _ahead(config: IsoflopConfig, settings: Sequence[Setting]) -> str:
    """Say how many runs a study has, and of which lengths."""
    trials = len(config.rates) if len(config.rates) > 1 else 0
    runs = trials + config.seeds
    steps = [setting.steps for setting in settings]
    total = runs * sum(setting.spent for setting in settings)
    return (
        f"{len(settings)} models, each trained {runs} times ({trials} rates, {config.seeds} seeds) for {min(steps):,} "
        f"to {max(steps):,} steps: {runs * len(settings)} runs, {total:.3g} FLOPs in total"
    )


def _length(run_config: TrainConfig, budget: float, step: int, name: str) -> dict[str, int]:
    """Return the length of a run, as fields of its config, whose steps of some FLOPs come nearest to the budget."""
    paid = budget / step
    # Epochs have whole steps: some numbers of them come nearer to the budget.
    numbers = range(run_config.epochs, 2 * run_config.epochs)
    if paid < run_config.epochs:
        raise ValueError(
            f"budget {budget:g} pays for {paid:.1f} steps of {name}, and its run has {run_config.epochs} epochs: "
            "give a larger budget, or smaller batches"
        )
    epochs = min(numbers, key=lambda number: abs(number * round(paid / number) - paid))
    return {"epochs": epochs, "epoch_steps": round(paid / epochs), "eval_every": epochs}


def _check_text(settings: list[Setting]) -> None:
    # Who reads most text tells for all.
    longest = max(settings, key=lambda setting: setting.steps)
    stream = text_stream(longest.config.data, seed=0)
    available = dataclasses.replace(longest.config, epoch_steps=None).steps_of_epoch(stream.steps_per_epoch)
    if longest.steps > available:
        raise ValueError(
            f"budget {longest.budget:g} trains {longest.series} {longest.size} for {longest.steps} steps, and the text "
            f"has {available}: give a smaller budget, or smaller batches"
        )


def _train(run: Run, callback: Callback, measurer: Measurer) -> Measured:
    return rows_of(fit(run.training, callback, measurer.store).result)


def _gain(run: Run, callback: Callback, measurer: Measurer) -> Measured:
    return Measured({_GAIN: -_train(run, callback, measurer).figures["loss"]})


def _write(config: IsoflopConfig, command: str, points: list[dict[str, object]], runner: Runner) -> StudyResult:
    folder = Path(config.output)
    facts = runner.facts
    minima = optima(points)
    least = [{**row, "difference": row["difference"] and published(row["difference"])} for row in minima]
    asked = {"command": command, "config": dataclasses.asdict(config)}
    record = {**asked, **facts, "points": points, "optima": least}
    record["title"] = "Loss against parameters and FLOPs of a forward pass at equal training FLOPs"
    rows = [without(row, ("seeds",)) for row in points]
    text = write_outcome(folder, "isoflop", record, rows, told(points, minima), {"isoflop": draw(points)})
    runner.say(f"{len(points)} models after {facts['cpu_seconds']:.0f} CPU seconds: {folder}/isoflop.{{md,png}}")
    return StudyResult(folder, points, points, text, [text], facts["cpu_seconds"])


@dataclass(frozen=True)
class Curve:
    """A parabola of the loss in the logarithm of the size, through models of one budget and routing."""

    sizes: tuple[float, ...]  # Parameters of the models, ascending.
    flops: tuple[float, ...]  # Of their forward passes.
    coefficients: tuple[float, float, float]  # The highest power first.

    def loss(self, size: float) -> float:
        """Return the loss at a number of parameters."""
        return float(np.polyval(self.coefficients, np.log(size)))

    def forward(self, size: float) -> float:
        """Return the FLOPs of a forward pass at a number of parameters, interpolated between the models."""
        log_flops = np.interp(np.log(size), np.log(self.sizes), np.log(self.flops))
        return float(np.exp(log_flops))

    @property
    def minimum(self) -> dict[str, float]:
        """Parameters, FLOPs of a forward pass and loss where it is least; empty without a minimum among the sizes."""
        square, slope, _ = self.coefficients
        # A parabola that opens downwards is lowest at its ends, beyond which other sizes may be better.
        if square <= 0:
            return {}
        best = float(np.exp(-slope / (2 * square)))
        if not self.sizes[0] <= best <= self.sizes[-1]:
            return {}
        return {"parameters": best, "forward": self.forward(best), "loss": self.loss(best)}


def fit_curve(sizes: Sequence[float], flops: Sequence[float], losses: Sequence[float]) -> Curve:
    """Fit a curve to three models or more by least squares.

    Example:
        >>> sizes = [1e4, 1e5, 1e6, 1e7]
        >>> least = fit_curve(sizes, sizes, [3.0, 2.0, 2.0, 3.0]).minimum
        >>> round(least["parameters"]), round(least["loss"], 3)
        (316228, 1.875)
    """
    order = np.argsort(sizes)
    size, flop, loss = (np.asarray(values, dtype=float)[order] for values in (sizes, flops, losses))
    square, slope, level = np.polyfit(np.log(size), loss, 2).tolist()
    return Curve(tuple(size.tolist()), tuple(flop.tolist()), (square, slope, level))


def curves_of(points: Points, seed: int | None = None) -> dict[Group, Curve]:
    """Fit the curve of every budget and series with three sizes or more, to one seed's losses or the means."""
    groups: dict[Group, list[Mapping[str, Any]]] = {}
    for point in points:
        groups.setdefault((point["budget"], point["series"]), []).append(point)
    curves = {}
    for group, rows in groups.items():
        sizes = [row["parameters"] for row in rows]
        if len(set(sizes)) >= 3:
            of_seed = rows
            if seed is not None:
                of_seed = [row["seeds"][seed] for row in rows]
            losses = [row["loss"] for row in of_seed]
            curves[group] = fit_curve(sizes, [row["forward"] for row in rows], losses)
    return curves


def optima(points: Points) -> Points:
    """Return the minimum of every curve, and the difference to that of the first series, of curves paired by seed."""
    # Curves are paired by seed: one that a model lacks says nothing.
    seeds = sorted(set.intersection(*(set(point["seeds"]) for point in points)))
    # By group and seed, where there is a minimum.
    least: dict[Group, dict[int, float]] = {}
    for seed in seeds:
        for group, curve in curves_of(points, seed).items():
            if curve.minimum:
                least.setdefault(group, {})[seed] = curve.minimum["loss"]
    first = points[0]["series"]
    rows = []
    for (budget, series), curve in curves_of(points).items():
        one = least.get((budget, series), {})
        other = least.get((budget, first), {})
        gap = None
        if series != first and one.keys() & other.keys():
            gap = difference(one, other)
        rows.append({"budget": budget, "series": series, "difference": gap, **curve.minimum})
    return rows


def told(points: Points, minima: Points) -> list[str | MarkdownTable]:
    """Return the text of a page on isoFLOP curves.

    Args:
        points: The models that were trained: one for each series, budget and size.
        minima: The lowest point of each curve; empty without curves.

    Returns:
        A table of each, and a sentence that compares the series at their minima.
    """
    return [*_tables(points, minima), _verdict(minima, points[0]["series"])]


def _tables(points: Points, minima: Points) -> list[MarkdownTable]:
    """Return points and minima as tables; models are compared with those of the first series, paired by seed."""
    first = points[0]["series"]
    firsts = {(point["budget"], point["size"]): point["seeds"] for point in points if point["series"] == first}
    rows = []
    for point in points:
        gap = None
        if point["series"] != first:
            base = firsts[point["budget"], point["size"]]
            gap = difference(_losses(point["seeds"]), _losses(base))
        rows.append({**point, "difference": gap})
    tables = []
    for part in (rows, minima):
        shown = [{**row, "difference": _in_nats(row["difference"])} for row in part]
        if shown:
            tables.append(table_of(_COLUMNS, shown))
    return tables


def _losses(seeds: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    return {seed: row["loss"] for seed, row in seeds.items()}


def _verdict(minima: Points, first: str) -> str:
    """Say at which size every curve is lowest, and how far below the first series' minimum."""
    sentences = []
    for row in minima:
        at = f"At {row['budget']:.3g} training FLOPs"
        if "loss" not in row:
            sentences.append(f"{at} the loss of {row['series']} has no minimum among the sizes.")
            continue
        best = f"{at} {row['series']} is best with {row['parameters']:,.0f} parameters: {row['loss']:.4f} nats a byte"
        if row["difference"] is not None:
            best += f", {_in_nats(row['difference'])} to {first}"
        sentences.append(f"{best}.")
    return " ".join(sentences) or "No curve was fitted: a budget needs three sizes or more."


def draw(points: Points) -> Figure:
    """Draw loss against parameters and against FLOPs: colours are series, markers budgets, stars minima of curves."""
    from matplotlib.lines import Line2D

    figure = new_figure(11.2, 4.7)
    axes = figure.subplots(1, 2, sharey=True)
    styles = looks(point["series"] for point in points)
    budgets = sorted({point["budget"] for point in points})
    markers = {budget: MARKERS[number % len(MARKERS)] for number, budget in enumerate(budgets)}
    for axis, key, title in zip(axes, ("parameters", "forward"), ("parameters", "FLOPs of a window's forward pass")):
        for (_, name), curve in curves_of(points).items():
            _draw_curve(axis, curve, key, styles[name])
        for point in points:
            look = {"color": styles[point["series"]]["color"], "marker": markers[point["budget"]], "markersize": 5}
            axis.errorbar(point[key], point["loss"], point.get("loss_std") or 0.0, capsize=2, ecolor=look["color"])
            (mark,) = axis.plot(point[key], point["loss"], **look)
            model = f"{point['series']} {point['size']}"
            add_hint(mark, f"{model}, {point['budget']:.3g} FLOPs: {point['loss']:.4f}")
        axis.set(xlabel=title, xscale="log")
        tidy(axis)
    axes[0].set_ylabel("loss in nats a byte", color=INK)
    handles = {
        name: Line2D([], [], color=styles[name]["color"], linestyle=styles[name]["linestyle"] or "-")
        for name in dict.fromkeys(point["series"] for point in points)
    }
    handles |= {
        f"{budget:.3g} FLOPs": Line2D([], [], color=FAINT, marker=marker, linestyle="")
        for budget, marker in markers.items()
    }
    add_legend(figure, handles, 6)
    seeds = max(len(point["seeds"]) for point in points)
    note = "one seed"
    if seeds > 1:
        note = f"mean and standard deviation over {seeds} seeds"
    figure.suptitle(f"stars: least loss of a curve · {note}", fontsize=9, color=FAINT, x=0.99, ha="right")
    return figure


def _draw_curve(axis: Axes, curve: Curve, key: str, style: Style) -> None:
    sizes = np.geomspace(curve.sizes[0], curve.sizes[-1], 60)
    colour = style["color"]
    line = style["linestyle"] or "-"
    x = list(sizes)
    if key != "parameters":
        x = [curve.forward(size) for size in sizes]
    axis.plot(x, [curve.loss(size) for size in sizes], line, color=colour, linewidth=1.2)
    least = curve.minimum
    if least:
        axis.plot([least[key]], [least["loss"]], "*", color=colour, markersize=13, markeredgecolor=INK)


def _in_nats(gap: Estimate | None) -> str | None:
    if gap is None:
        return None
    return f"{gap:+.4f} ({gap.seeds} seeds)"
