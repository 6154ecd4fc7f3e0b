"""The report of `mmod.advise`: a table, a picture, one sentence of advice and the lines that apply it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mmod.analysis.repeats import RedundancyReport
from mmod.analysis.statistics import Estimate
from mmod.analysis.timing import Spread
from mmod.io.files import check_free, make_folder, write_atomically, write_json
from mmod.io.tables import MarkdownTable, table_of
from mmod.lazy import name_missing_extra
from mmod.planning.samples import AGREEMENT
from mmod.planning.tolerance import exceeds, is_too_close, keeps, missing_samples

# From `python -m scripts.gradual_size`.
_GRADUAL_PAYS = (
    "No `gradual` saves time here: decisions take longer than what they save. On one idle CPU thread it pays for "
    "images of 196 tokens: at width 192 alone, at width 64 in batches of 8."
)
WRITTEN = ("advice.json", "advice.md", "advice.png")
"""Names of the files of advice in its folder."""
# A speed-up below this is within the noise of a machine.
LEAST_SPEEDUP = 1.03
# A loss this near to the tolerance, as a share of it, may be above it on other images.
_NEAR = 0.25


@dataclass(frozen=True)
class AdviceRow:
    """What a candidate does to a model.

    Args:
        speedup: Time of the dense model over the candidate's, over the rounds: median and quartiles.
        score: Share of images with the dense model's top class, mean cosine of features, or share of next tokens that
            are the dense model's; 95 % interval over images or prompts.
        accuracy: Difference of top-1 accuracy, or of the share of right answers to prompts, to the dense model's, where
            there are labels; 95 % interval. It replaces the score in every comparison.
        images: Number of images; few for candidates that were far from the front.
        code: The line of Python that applies it, empty for smaller images of prompts; `config` the key of a training
            config that does, empty for a class of model that configs cannot name.
        on_front: No other row is faster and loses less.
        cache: Bytes of the KV cache of a prompt of mean length; None for image models.
        series: Name that it shares with the same model at other budgets; empty for none.
        speedups: Speed-ups of further passes: of images in "batch 1", or on the "mix" of prompts of different lengths,
            padded to one.
    """

    name: str
    speedup: Spread
    score: Estimate
    accuracy: Estimate | None
    images: int
    code: str
    config: str
    advice: str
    on_front: bool = False
    cache: int | None = None
    series: str = ""
    speedups: Mapping[str, Spread] = field(default_factory=dict)

    @property
    def loss(self) -> Estimate:
        """Accuracy lost, or disagreement where there are no labels."""
        # A score turned round, and so are the ends of its interval.
        score, lossless = (self.score, 1) if self.accuracy is None else (self.accuracy, 0)
        return Estimate(lossless - score.value, lossless - score.high, lossless - score.low)


def _named(row: AdviceRow) -> str:
    return f"{row.name} ({row.speedup.median:.2f} times as fast)"


def _side(row: AdviceRow) -> str:
    """Return the size of smaller images, which their share of the FLOPs does not say."""
    size = row.advice.removeprefix("use images of ")
    return "" if size == row.advice else f", {size}"


@dataclass(frozen=True)
class Advice:
    """What `advise` measured; `print` shows the table, one sentence of advice and the lines that apply it.

    Args:
        rows: The candidates, the fastest first.
        refused: Reasons why candidates were left out, by name.
        measure: "agreement" of the top class, "cosine of features" for a model without a head, "cosine of patches", or
            "cosine of outputs" for your own model without labels.
        accuracy: Accuracy of the dense model where there are labels: top-1 of images; of prompts, the share that it
            answers right, greedily.
        milliseconds: Time of a batch of `batch_size` images or prompts in the dense model.
        tolerance: Share of agreement, or of accuracy, that may be lost.
        redundancy: Redundancy of the images at the model's patch size; None where that is unknown.
        note: Further facts about the data.
        cache: Bytes of the dense model's KV cache of a prompt of mean length; None for image models.
        title: Title of the page, which names the model.
        faster: The speed-up that is wanted; None advises the fastest candidate within the tolerance.
    """

    rows: tuple[AdviceRow, ...]
    refused: Mapping[str, str]
    measure: str
    accuracy: float | None
    milliseconds: float
    batch_size: int
    images: int
    tolerance: float
    redundancy: RedundancyReport | None = None
    note: str = ""
    cache: int | None = None
    title: str = "Advice"
    faster: float | None = None

    @property
    def metric(self) -> str:
        """What decides: "accuracy" or "right answers" where there are labels, else the agreement or cosine."""
        return self._measure_name if self.accuracy is None else self._accuracy_name

    @property
    def _accuracy_name(self) -> str:
        return "accuracy" if self.samples == "images" else "right answers"

    @property
    def _measure_name(self) -> str:
        return self.measure if self.samples == "images" else f"next-token {self.measure}"

    @property
    def samples(self) -> str:
        """What the model was evaluated on: "images" or "prompts"."""
        return "images" if self.cache is None else "prompts"

    @property
    def best(self) -> AdviceRow | None:
        """The fastest candidate that clearly keeps the tolerance, or one as fast that loses less.

        Where none is clear, the fastest whose measured loss is within the tolerance; None if the dense model is. Where
        a speed-up is wanted, the candidate that reaches it, within the noise, and loses least.
        """
        if self.faster is not None:
            reaching = [row for row in self.rows if LEAST_SPEEDUP * row.speedup.median >= self.faster]
            return min(reaching, key=lambda row: row.loss.value, default=None)
        # What may be faster is named as undecided beside it: a stricter tolerance must not allow more.
        keeping = [row for row in self._faster if keeps(row.loss, self.tolerance)]
        fitting = keeping or [row for row in self._faster if row.loss.value <= self.tolerance]
        # Times of a few rounds cannot tell these apart: the loss does.
        as_fast = [row for row in fitting if LEAST_SPEEDUP * row.speedup.median >= fitting[0].speedup.median]
        return min(as_fast, key=lambda row: row.loss.value, default=None)

    @property
    def undecided(self) -> tuple[AdviceRow, ...]:
        """Candidates on the front that neither clearly keep the tolerance nor lose more.

        They are faster than any that keeps it; what is hardly faster would not change the advice.
        """
        clear = next((row.speedup.median for row in self._faster if keeps(row.loss, self.tolerance)), 0.0)
        return tuple(
            row
            for row in self._faster
            if row.on_front and not exceeds(row.loss, self.tolerance) and row.speedup.median > LEAST_SPEEDUP * clear
        )

    @property
    def _faster(self) -> list[AdviceRow]:
        return [row for row in self.rows if row.speedup.low >= LEAST_SPEEDUP]

    @property
    def _near(self) -> list[AdviceRow]:
        """Candidates on the front that lose about the tolerance: of advice on these, half is right."""
        near = [row for row in self._faster if row.on_front and self.faster is None]
        return [row for row in near if abs(row.loss.value - self.tolerance) <= _NEAR * self.tolerance]

    def is_decided(self, row: AdviceRow) -> bool:
        """Whether a candidate clearly keeps the tolerance, or clearly loses more; each is tested at 5 %."""
        return keeps(row.loss, self.tolerance) or exceeds(row.loss, self.tolerance)

    @property
    def sentence(self) -> str:
        """The advice in one sentence, and which candidates so few samples leave undecided."""
        limit = f"{100 * self.tolerance:g} %"
        row = self.best
        if self.faster is not None:
            return self._at_speed(self.faster, row)
        others = [other for other in self.undecided if other is not row]
        names = ", ".join(map(_named, others))
        lost = f"whether more than {limit} is lost"
        open_ones = f"Undecided: {self._missing(others)} {lost} by {names}" if others else ""
        if row is None and not others:
            return f"Nothing here pays at a tolerance of {limit}: keep the dense model."
        if row is None:
            # Off the front it may be as good, and need fewer samples to say so.
            possible = [other for other in self._faster if not exceeds(other.loss, self.tolerance)]
            soonest = min(possible, key=self._needed)
            sooner = "" if soonest in others else f", {self._needed(soonest):,} by {_named(soonest)}"
            return f"{open_ones}{sooner}. Until then keep the dense model."
        action = row.advice or f"use `{row.code}`"
        measured = f"{self._times(row)} at {self._measured(row)}."
        if self.is_decided(row):
            return f"{action[0].upper()}{action[1:]}: {measured}{f' {open_ones}.' if others else ''}"
        text = f"Undecided: {self._missing([row])} {lost} if you {action}: {measured}"
        too = f" Undecided too: {names}." if others else ""
        return f"{text}{too} Until then keep the dense model."

    def _at_speed(self, faster: float, row: AdviceRow | None) -> str:
        """Return what to do for the speed-up that is wanted."""
        if row is None:
            fastest = max(self.rows, key=lambda row: row.speedup.median, default=None)
            nearest = ""
            if fastest is not None:
                nearest = f"; the fastest is {fastest.name}: {self._times(fastest)} at {self._measured(fastest)}"
            return (
                f"None of these few is {faster:g} times as fast{nearest}. Time larger batches, or leave out "
                "`faster`: then smaller sizes are tried too."
            )
        action = row.advice or f"use `{row.code}`"
        is_open = not self.is_decided(row)
        # What reaches it within the noise counts.
        about = "" if row.speedup.median >= faster else "about "
        open_one = f" Undecided: {self._missing([row])} whether more than {100 * self.tolerance:g} % is lost."
        return (
            f"For {about}{faster:g} times the speed {action}: {self._times(row)} at "
            f"{self._measured(row)}, the least lost of these few.{open_one if is_open else ''}"
        )

    def _missing(self, rows: Sequence[AdviceRow]) -> str:
        """Return how many samples decide about all of some rows, as the beginning of a clause."""
        least = "at least " if any(is_too_close(row.loss, self.tolerance) for row in rows) else ""
        return f"{least}{max(map(self._needed, rows)):,} more {self.samples} would tell"

    def _needed(self, row: AdviceRow) -> int:
        return missing_samples(row.loss, self.tolerance, row.images)

    def _times(self, row: AdviceRow) -> str:
        """Return how much faster a candidate is, and in which other passes it is slower than the dense model."""
        slower = ", ".join(f"{name}: {other.median:.2f}" for name, other in row.speedups.items() if other.median < 1)
        return f"{row.speedup.median:.2f} times as fast{f' ({slower})' if slower else ''}"

    def _measured(self, row: AdviceRow) -> str:
        """Return what a candidate scores by the `metric`, in words."""
        if row.accuracy is not None:
            return f"{100 * row.accuracy:+.1f} points of {self.metric}"
        if self.measure == AGREEMENT:
            return f"{100 * row.score} % {self._measure_name} with the dense model"
        return f"a {self.measure} of {row.score:.3f} with the dense model"

    @property
    def code(self) -> str:
        """The lines of Python that follow the advice; empty without any.

        Where the samples leave it undecided, there are lines only for a wanted speed-up.
        """
        row = self.best
        return f"import mmod\n\n{row.code}" if row is not None and row.code and self._is_given(row) else ""

    def _is_given(self, row: AdviceRow) -> bool:
        """Whether the lines that apply a candidate are told: it is decided, or the best at a wanted speed."""
        return self.faster is not None or self.is_decided(row)

    def table(self) -> MarkdownTable:
        """Return the rows as a table."""
        in_percent = self.measure == AGREEMENT
        # All candidates are timed in the same passes.
        further = self.rows[0].speedups if self.rows else {}
        columns = {
            "recipe": ("recipe", ""),
            "speedup": ("speed-up", "[.2f"),
            **{name: (f"speed-up, {name}", "[.2f") for name in further},
            "score": (self._measure_name, ".1f" if in_percent else ".3f"),
            "accuracy": (f"change of {self._accuracy_name}", "+.1f"),
            "cache": ("cache", ".2f"),
            "images": (self.samples, ""),
        }
        rows = [
            {
                **vars(row),
                **row.speedups,
                "recipe": f"{'*' if row.on_front else ' '} {row.name}{_side(row)}",
                "score": 100 * row.score if in_percent else row.score,
                "accuracy": None if row.accuracy is None else 100 * row.accuracy,
                "cache": None if row.cache is None or self.cache is None else row.cache / self.cache,
            }
            for row in self.rows
        ]
        return table_of(columns, rows)

    def __str__(self) -> str:
        lines = [str(self.table()), f"\n**{self.sentence}**\n", *[f"- {fact}" for fact in self.facts]]
        if self.best and self._is_given(self.best):
            lines += [f"\n```python\n{self.code}\n```"] if self.code else []
            if self.best.config:
                lines.append(f"\nIn a training config:\n\n```yaml\n{self.best.config}\n```")
        return "\n".join(lines)

    @property
    def facts(self) -> list[str]:
        """What the figures are of, a sentence or two each."""
        dense = f"The dense model takes {self.milliseconds:.1f} ms for {self.batch_size} {self.samples}"
        if self.cache is not None:
            dense += f", whose KV caches have {self.cache / 2**20:.3g} MiB each on average"
        if self.accuracy is not None:
            dense += f", and has {100 * self.accuracy:.1f} % {self.metric}"
        unit = f"{'in %, ' if self.measure == AGREEMENT else ''}with a 95 % interval over {self.samples}"
        columns = "Speed-up: median and quartiles over rounds. "
        columns += f"The {self._measure_name} is that with the dense model, {unit}."
        if self.accuracy is not None:
            columns += f" The change of {self.metric}, in points, decides."
        if self.samples == "prompts":
            columns += (
                " The prompts have no answers, so that next tokens decide."
                if self.accuracy is None
                else " Answers are generated greedily; one is right as a whole or not."
            )
        gradual = [row.speedup.median for row in self.rows if row.name.startswith("gradual")]
        too_small = [_GRADUAL_PAYS] if gradual and max(gradual) < LEAST_SPEEDUP else []
        near = ", ".join(f"{row.name} loses {100 * row.loss} %" for row in self._near)
        redundancy = [] if self.redundancy is None else [f"The images: {self.redundancy}."]
        front = ""
        if any(row.on_front for row in self.rows):
            front = "Rows with * are on the Pareto front: none is faster and loses less. "
        return [
            f"{dense}.",
            f"{front}{columns}",
            "Nothing was trained: fine-tuned models may lose less, and rank differently.",
            *([f"So near the tolerance, other images may decide otherwise: {near}."] if near else []),
            *too_small,
            *redundancy,
            *filter(None, [self.note]),
            *[f"Left out: {name}: {reason}" for name, reason in self.refused.items()],
        ]

    _repr_markdown_ = __str__  # Notebooks show it.

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write `advice.json`, `advice.md` and `advice.png`."""
        folder = Path(folder)
        for name in WRITTEN:
            check_free(folder / name, overwrite)
        make_folder(folder)
        values = {**asdict(self), "sentence": self.sentence, "code": self.code}
        write_json(folder / "advice.json", values)
        write_atomically(
            folder / "advice.md", f"# {self.title}\n\n{self}\n\n![{self.metric} over speed-up](advice.png)\n"
        )
        self.plot(folder / "advice.png", overwrite)

    @name_missing_extra()
    def plot(self, path: str | Path, overwrite: bool = False) -> None:
        """Draw the `metric` over speed-up; a line joins the candidates on the front, which alone are named."""
        from mmod.analysis.fronts import Fronts, Mark
        from mmod.analysis.style import FAINT, new_figure, save_figure, tidy

        is_share = self.accuracy is not None or self.measure == AGREEMENT
        factor = 100 if is_share else 1
        lossless = 1.0 if self.accuracy is None else 0.0
        baseline = factor * lossless
        marks = [Mark("dense", "dense", cost=1.0, score=baseline, low=baseline, high=baseline)]
        for row in self.rows:
            score = factor * (row.score if row.accuracy is None else row.accuracy)
            # A schedule is named after its paper, as in "as FastV".
            series = row.series or row.name.removeprefix("as ").partition(" ")[0]
            marks.append(Mark(row.name, series, row.speedup.median, score.value, score.low, score.high, row.code))
        figure = new_figure(7, 4.8)
        axis = figure.subplots()
        fronts = Fronts([axis], [marks], faster=True)
        axis.axhline(factor * (lossless - self.tolerance), color=FAINT, linewidth=0.8, linestyle=":", zorder=0)
        title = f"{self._measure_name} with the dense model{', in %' if is_share else ''}"
        if self.accuracy is not None:
            title = f"change of {self.metric} in points"
        axis.set(xlabel=f"times as fast, batches of {self.batch_size}", ylabel=title)
        tidy(axis, "both")
        note = f"dotted: tolerance of {100 * self.tolerance:g} %"
        note = f"{note}; below the axis: {fronts.lost}" if fronts.lost else note
        figure.suptitle(note, fontsize=9, color=FAINT, x=0.99, ha="right")
        fronts.name(figure)
        save_figure(figure, path, overwrite, dpi=150)
