"""The report of `mmod.advise`: a table, a picture, what to use and the lines that apply it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path

from mmod.analysis.repeats import RedundancyReport
from mmod.analysis.statistics import FEWEST, keeps
from mmod.io.files import check_free, make_folder, write_atomically, write_json
from mmod.io.tables import MarkdownTable, table_of
from mmod.lazy import name_missing_extra
from mmod.planning.candidate import shown_code, with_imports
from mmod.planning.choice import (
    NOISE,
    ON_FRONT,
    AdviceRow,
    Recommendation,
    batches_of,
    reaches,
)
from mmod.planning.early import COSINES
from mmod.planning.samples import AGREEMENT, ALONE, MIX
from mmod.planning.untrained import FASTER_SHARES, image_series
from mmod.planning.verdict import Verdict, beside_controls, say_guessing, verdict_of

# Milliseconds of a dense pass, from `python -m scripts.gradual_size`.
_BREAKS_EVEN = 12
_PAYS = 25
# By how much larger a batch is that may pay.
_LARGER = 4
# A table of more rows leaves out on a screen what is slower than the dense model.
_LONG = 10
# A budget below this share of the least that was tried is worth another call.
_CLEARLY_SMALLER = 0.9
# Below this share of equal answers, a recipe of the same accuracy is another model to its user.
_LIKE_DENSE = 0.9
# Shares of the FLOPs that differ by no more are those of one budget, see `at_budgets`.
_AS_MANY = 0.03
_MORE = " (`--number {0}`, in Python `images={0}`)"
WRITTEN = ("advice.json", "advice.md", "advice.png")
"""Names of the files of advice in its folder."""


@dataclass(frozen=True)
class Page:
    """What only a command knows of a model and its samples, for the page of advice.

    Args:
        title: Title of the page; empty names the model.
        note: A sentence about the model and the data, with which the page begins.
        opening: The line of Python that opens the model, which the lines of candidates follow.
        run: The run folder of the model, which the page names in a command.
        available: Samples that were given, of which some are used; None if that is not known.
    """

    title: str = ""
    note: str = ""
    opening: str = ""
    run: str = "RUN"
    available: int | None = None


@dataclass(frozen=True, repr=False)
class Advice:
    """What `advise` measured; `print` shows the table, what to use and the lines that apply it.

    Args:
        rows: The candidates, the fastest first.
        refused: Reasons why candidates were left out, by name.
        measure: "agreement" of the top class, "cosine of features" for a model without a head, "cosine of patches", or
            "cosine of outputs" for your own model without labels.
        accuracy: Accuracy of the dense model where there are labels: top-1 of images; of prompts, the share that it
            answers right, greedily.
        milliseconds: Time of a batch of `batch_size` images or prompts in the dense model.
        tolerance: Accuracy, agreement or cosine that may be lost; 0.02 are 2 points.
        redundancy: Redundancy of the images at the model's patch size; None where that is unknown.
        remarks: What was done with the samples and the candidates, a sentence or two each.
        cache: Bytes of the dense model's KV cache of a prompt of mean length; None for image models.
        faster: The speed-up that is wanted; None advises the fastest candidate within the tolerance.
        caution: What makes the times uncertain, in a sentence.
        classes: Number of classes that the model chooses from; None without labels, and for prompts.
        page: What only a command knows of the model and the samples.
        searched: Number of prompts beside these on which plans were searched.
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
    remarks: Sequence[str] = ()
    cache: int | None = None
    faster: float | None = None
    caution: str = ""
    classes: int | None = None
    page: Page = Page()
    searched: int = 0

    @property
    def metric(self) -> str:
        """What decides: "accuracy" or "right answers" where there are labels, else the agreement or cosine."""
        if self.accuracy is None:
            return self._measure_name
        return self._accuracy_name

    @property
    def _accuracy_name(self) -> str:
        return "accuracy" if self.samples == "images" else "right answers"

    @property
    def _measure_name(self) -> str:
        if self.samples == "images":
            return self.measure
        return f"next-token {self.measure}"

    @property
    def _flops_of(self) -> str:
        """The title of the column of FLOPs: of prompts, those of the vision tower are not counted."""
        return "FLOPs" if self.samples == "images" else "FLOPs, language model"

    @property
    def samples(self) -> str:
        """What the model was evaluated on: "images" or "prompts"."""
        return "images" if self.cache is None else "prompts"

    @property
    def recommendations(self) -> list[Recommendation]:
        """What to use in batches, as `sentence` says, and for single images if these were timed."""
        found = [self._recommendation(self.batch_size, self.rows)]
        # Few candidates are tried for a wanted speed, which is that of batches.
        if self.faster is None and self.rows and ALONE in self.rows[0].speedups:
            found.append(self._recommendation(1, [replace(row, speedup=row.speedups[ALONE]) for row in self.rows]))
        return found

    @property
    def verdict(self) -> Verdict:
        """What to do, with the table of what is named."""
        return verdict_of(self.recommendations)

    @property
    def best(self) -> AdviceRow | None:
        """The fastest candidate whose whole interval is within the tolerance, or one as fast that loses less.

        None means the dense model. With `faster`, it is the candidate whose interval has the best lower end, among
        those that reach that speed-up within the noise.
        """
        recommendation = self.recommendations[0]
        if self.faster is None:
            return recommendation.best
        return recommendation.at_speed(self.faster)

    @property
    def undecided(self) -> tuple[AdviceRow, ...]:
        """Candidates on the front that may be within the tolerance, and are faster than all that surely are."""
        return tuple(self.recommendations[0].undecided)

    @property
    def sentence(self) -> str:
        """The advice in one sentence."""
        return self.recommendations[0].sentence

    def _recommendation(self, size: int, rows: Sequence[AdviceRow]) -> Recommendation:
        where = batches_of(size, self.samples)
        return Recommendation(
            rows,
            self.tolerance,
            self.metric,
            self.samples,
            where,
            self.faster,
            more=_MORE,
            given=Fraction(self.images + self.searched, self.images),
            available=self.page.available or math.inf,
            is_unsteady=bool(self.caution),
            invalid=self._guessing,
        )

    @property
    def _guessing(self) -> str:
        return "" if self.accuracy is None else say_guessing(self.accuracy, self.classes, self.images)

    @property
    def code(self) -> str:
        """The Python lines that make the model named in `sentence`; empty for the dense model or one without code."""
        row = self.recommendations[0].named
        if row is None or not row.code:
            return ""
        lines = "\n".join(filter(None, [self.page.opening, row.code]))
        return with_imports(lines)

    def table(self) -> MarkdownTable:
        """Return all rows as a table."""
        return self._table_of(self.rows)

    @property
    def _too_slow(self) -> list[AdviceRow]:
        """Rows that a screen leaves out of a long table: slower than the dense model in every pass, and not named."""
        named = set(self.verdict.named)
        slow = []
        for row in self.rows:
            # As the table shows them.
            shown = [speedup.shown.median for speedup in (row.speedup, *row.speedups.values())]
            if max(shown) < 1 and row.name not in named:
                slow.append(row)
        # Without a faster row, they are the table.
        return slow if len(self.rows) > _LONG and len(slow) < len(self.rows) else []

    def _table_of(self, shown: Sequence[AdviceRow]) -> MarkdownTable:
        speed_form = "[.2f"
        score_form = ".1f" if self.measure == AGREEMENT else f".{COSINES}f"
        # All candidates are timed in the same passes.
        further = self.rows[0].speedups if self.rows else {}
        columns = {
            "recipe": ("recipe", ""),
            "speedup": ("speed-up", speed_form),
            **{f"speedup/{name}": (f"speed-up, {name}", speed_form) for name in further},
            "score": (self._measure_name, score_form),
            "accuracy": (f"{self._accuracy_name} to dense", "+.1f"),
            "flops": (self._flops_of, ".2f"),
            "cache": ("cache", ".2f"),
            "images": (self.samples, ""),
        }
        return table_of(columns, [self._cells(row) for row in shown])

    def _cells(self, row: AdviceRow) -> dict[str, object]:
        """Return the values of a row of the table, accuracies in percent."""
        star = "*" if row.on_front and not self._guessing else " "
        recipe = f"{star} {row.label} {self.recommendations[0].mark(row)}"
        cells: dict[str, object] = {**vars(row), "recipe": recipe.rstrip()}
        for name, speedup in row.speedups.items():
            cells[f"speedup/{name}"] = speedup
        if self.measure == AGREEMENT:
            cells["score"] = 100 * row.score
        if row.accuracy is not None:
            cells["accuracy"] = 100 * row.accuracy
        cells["cache"] = None
        if row.cache is not None and self.cache is not None:
            cells["cache"] = row.cache / self.cache
        return cells

    def __str__(self) -> str:
        slow = self._too_slow
        told = ""
        if slow:
            names = ", ".join(row.name for row in slow)
            told = f"Slower than the dense model by every speed-up, with rows in `advice.table()`: {names}."
        return self._report(self._table_of([row for row in self.rows if row not in slow]), told)

    def _report(self, table: MarkdownTable, left_out: str = "") -> str:
        """Return what to do, and all that it follows from."""
        verdict = self.verdict
        rows = {row.name: row for row in self.rows}
        lines = {rows[name].label: (rows[name].code, rows[name].config) for name in verdict.named}
        code = shown_code(lines, self.page.opening)
        facts = "\n".join(f"- {fact}" for fact in self.facts)
        return "\n\n".join(filter(None, [str(verdict), self.caution, str(table), left_out, facts, *code]))

    @property
    def facts(self) -> list[str]:
        """What the figures are of, a sentence or two each."""
        sample = self.samples.removesuffix("s")
        # `mmod evaluate` and studies have the time of one.
        dense = f"The dense model takes {self.milliseconds / self.batch_size:.3g} ms per {sample}"
        if self.batch_size > 1:
            dense += f" in batches of {self.batch_size} ({self.milliseconds:.1f} ms a batch)"
        if self.cache is not None:
            dense += f", with a KV cache of {self.cache / 2**20:.3g} MiB on average"
        if self.accuracy is not None:
            dense += f", and has {100 * self.accuracy:.1f} % {self.metric}"
        unanswered = ""
        if self.samples == "prompts" and self.accuracy is None:
            unanswered = "The prompts have no answers, so that next tokens decide."
        redundancy = ""
        if self.redundancy is not None:
            redundancy = f"The images: {self.redundancy}."
        spread = ""
        used = self.images + self.searched
        if self.page.available is not None and used < self.page.available:
            spread = f"{used:,} of {self.page.available:,} {self.samples} were used, spread evenly over them."
        return [
            *filter(None, [spread]),
            # Which labels decide, and what was left undone, is asked right behind the verdict.
            *self.remarks,
            f"{dense}.",
            *filter(None, [self._unlike_dense, self._slower_as_they_come]),
            self._marks,
            *self._on_few,
            *filter(None, [unanswered, self._too_small, self._to_be_faster]),
            *filter(None, [self._beside_controls, redundancy]),
            *[f"Left out: {', '.join(names)}: {reason}" for reason, names in self._by_reason.items()],
        ]

    @property
    def _by_reason(self) -> dict[str, list[str]]:
        """Names of what was refused by why, as one size of images is the nearest to several budgets."""
        names: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            names.setdefault(reason, []).append(name)
        return names

    @property
    def _marks(self) -> str:
        """What stars and brackets of the tables mean."""
        brackets = f"In brackets: quartiles of speeds, and 95 % intervals over {self.samples}."
        if self._guessing or not any(row.on_front for row in self.rows):
            return brackets
        of_all = ""
        if self.faster is not None:
            # Others may have a better mean, by luck.
            of_all = f"of what ran on all {self.images} {self.samples}, "
        return f"`*`: {of_all}{ON_FRONT} {brackets}"

    @property
    def _on_few(self) -> list[str]:
        """Why some candidates ran on few samples, a sentence for each reason."""
        few = [row for row in self.rows if row.images < self.images and not self._guessing]
        if not few:
            return []
        if self.faster is None:
            beaten = "clearly beaten there by what is as fast"
            return [f"{few[0].images} {self.samples}: {beaten}; all others ran on {self.images}."]
        told = []
        # A user's own may be so too.
        barred = [row.name for row in few if row.at_random or not reaches(row.speedup.shown.median, self.faster)]
        if len(barred) < len(few):
            told.append(
                f"Fewer than {self.images} {self.samples}: if all were like these, the lower end of their interval "
                "would lie below that of what is named."
            )
        if barred:
            told.append(f"Too slow or random, and so on few {self.samples}: {', '.join(barred)}.")
        return told

    @property
    def _too_small(self) -> str:
        """Say that `gradual` saves no time in passes that are too short for it."""
        speeds = [row.speedup.shown.median for row in self.rows if row.name.startswith("gradual")]
        # Of a longer pass, the rule of thumb does not say why.
        if not speeds or max(speeds) >= NOISE or self.milliseconds >= _PAYS:
            return ""
        return (
            f"No `gradual` saves time in passes of {self.milliseconds:.1f} ms: by a rule of thumb for an idle CPU "
            f"thread, it pays from {_PAYS} ms.{self._in_larger_batches}"
        )

    @property
    def _unlike_dense(self) -> str:
        """Say which recipes of the verdict answer many images otherwise than the dense model, beside their accuracy."""
        if self.measure != AGREEMENT or self.accuracy is None or self.samples != "images":
            return ""
        by_name = {row.name: row for row in self.rows}
        agreements = {name: by_name[name].score.value for name in self.verdict.named}
        low = [f"{name} ({100 * share:.0f} %)" for name, share in agreements.items() if share < _LIKE_DENSE]
        if not low:
            return ""
        answers = f"fewer than {100 * _LIKE_DENSE:g} % of the answers"
        return f"Of the recipes named above, {answers} equal the dense model's with {', '.join(low)}."

    @property
    def _slower_as_they_come(self) -> str:
        """Say which recipes of the verdict slow down prompts of different lengths, whatever they do on equal ones."""
        by_name = {row.name: row for row in self.rows}
        mixed = {name: by_name[name].speedups[MIX] for name in self.verdict.named if MIX in by_name[name].speedups}
        slow = [f"{name} ({speedup.shown.median:.2f})" for name, speedup in mixed.items() if speedup.shown.median < 1]
        if not slow:
            return ""
        return f"Of the recipes named above, these are slower than the dense model on the mix: {', '.join(slow)}."

    @property
    def _in_larger_batches(self) -> str:
        """Where no recipe is to be used and `gradual` saves no time, say how to ask about batches in which it may."""
        if self._guessing or self.recommendations[0].used is not None or _LARGER * self.milliseconds < _BREAKS_EVEN:
            return ""
        size = _LARGER * self.batch_size
        return f" Larger batches may pay: `--batch_size {size}`, in Python `batch_size={size}`."

    @property
    def _to_be_faster(self) -> str:
        """What to try where the smallest budget of a series loses little, or no model has a speed; or empty."""
        if self._guessing:
            return ""
        if self.faster is not None:
            return "" if self.best or self._too_small else "Larger batches may be faster."
        # A speed chooses among these series alone.
        tried = {one.series for one in image_series() if not one.at_random}
        counted = [(row.flops, row) for row in self.rows if row.series in tried and row.flops is not None]
        if self.samples != "images" or not counted:
            return ""
        counted.sort(key=lambda pair: -pair[0])
        # The last one of each series stays.
        smallest = {row.series: (flops, row) for flops, row in counted}
        little = [(flops, row) for flops, row in smallest.values() if self._loses_little(row)]
        if little:
            shares, rows = zip(*little)
            used = self.recommendations[0].used
            reached = [row.speedup.median for row in (*rows, *filter(None, [used]))]
            # Above the speeds that are reached.
            speed = (math.floor(10 * max(FASTER_SHARES[-1] / (_CLEARLY_SMALLER * min(shares)), *reached)) + 1) / 10
            verb = "loses" if len(rows) == 1 else "lose"
            return f"{' and '.join(row.name for row in rows)} {verb} little: {_smaller_at(speed)}"
        least, _ = counted[-1]
        unreached = [] if self._too_small else self.recommendations[0].unreached
        for speed in unreached:
            if FASTER_SHARES[-1] / speed < _CLEARLY_SMALLER * least:
                return _smaller_at(speed)
        return ""

    def _loses_little(self, row: AdviceRow) -> bool:
        """Return whether a recipe changed no answer or is within the tolerance, and fewer FLOPs may make it faster."""
        is_equal = self.measure == AGREEMENT and row.score.value == 1 and row.images >= FEWEST
        return row.speedup.high >= _CLEARLY_SMALLER and (is_equal or keeps(row.loss, self.tolerance))

    @property
    def _beside_controls(self) -> str:
        named = [row for row in self.rows if row.name in self.verdict.named]
        in_points = {row.label: row.to_control and 100 * row.to_control for row in named}
        agreements = {row.label: row.agreement_to_control for row in named}
        sentences = [beside_controls(in_points, self.tolerance, agreements)]
        without = []
        for row in named:
            if not row.chooses or row.control is not None or row.at_random:
                continue
            drawn = self._drawn_as_well(row)
            if drawn is None:
                without.append(row.label)
            else:
                sentences.append(
                    f"{drawn.name}, with as many FLOPs, is within {self.recommendations[0].limit} too: it hardly "
                    f"matters here which tokens {row.name} keeps."
                )
        if without:
            sentences.append(f"Not compared with random tokens here: {', '.join(without)}.")
        return " ".join(filter(None, sentences))

    def _drawn_as_well(self, row: AdviceRow) -> AdviceRow | None:
        """Return the row of random tokens with the FLOPs of one within the tolerance that is within it too, if any."""
        if row.flops is None or not keeps(row.loss, self.tolerance):
            return None
        for other in self.rows:
            is_as_large = other.flops is not None and abs(other.flops - row.flops) <= _AS_MANY
            if other.at_random and is_as_large and keeps(other.loss, self.tolerance):
                return other
        return None

    _repr_markdown_ = __str__  # Notebooks show it.

    def __repr__(self) -> str:
        return (
            f"<Advice from {self.images} {self.samples} on {len(self.rows)} recipes: {self.sentence} Print it for all.>"
        )

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write `advice.json`, `advice.md` and `advice.png`."""
        folder = Path(folder)
        for name in WRITTEN:
            check_free(folder / name, overwrite)
        make_folder(folder)
        heading = "\n\n".join(filter(None, [f"# {self.page.title}", self.page.note]))
        values = {**asdict(self), "sentence": self.sentence, "code": self.code}
        write_json(folder / "advice.json", values)
        write_atomically(
            folder / "advice.md",
            f"{heading}\n\n{self._report(self.table())}\n\n![{self.metric} over speed-up](advice.png)\n",
        )
        self.plot(folder / "advice.png", overwrite)

    @name_missing_extra()
    def plot(self, path: str | Path, overwrite: bool = False) -> None:
        """Draw the `metric` over speed-up, with a line along the front; its points and the advised are labelled."""
        from mmod.analysis.fronts import Fronts, Mark
        from mmod.analysis.style import FAINT, new_figure, save_figure, tidy

        is_share = self.accuracy is not None or self.measure == AGREEMENT
        factor = 100 if is_share else 1
        lossless = 1.0 if self.accuracy is None else 0.0
        baseline = factor * lossless
        named = self.recommendations[0].named
        marks = [Mark("dense", "dense", cost=1.0, score=baseline, low=baseline, high=baseline)]
        for row in self.rows:
            compared = row.score if row.accuracy is None else row.accuracy
            score = factor * compared
            # A schedule is named after its paper, as in "as FastV".
            series = row.series or row.name.removeprefix("as ").partition(" ")[0]
            # As the table shows them, whose stars are the front.
            figures = (row.speedup.shown.median, score.value, score.low, score.high)
            may_lead = row.images == self.images and not row.at_random
            marks.append(Mark(row.name, series, *figures, row.code, row == named, may_lead))
        figure = new_figure(7, 4.8)
        axis = figure.subplots()
        fronts = Fronts([axis], [marks], faster=True)
        axis.axhline(factor * (lossless - self.tolerance), color=FAINT, linewidth=0.8, linestyle=":", zorder=0)
        title = f"{self._measure_name} with the dense model"
        if is_share:
            title += ", in %"
        if self.accuracy is not None:
            title = f"{self.metric} to dense, in points"
        axis.set(xlabel=f"times as fast, batches of {self.batch_size}", ylabel=title)
        tidy(axis, "both")
        fronts.name(figure, f"dotted: tolerance of {self.recommendations[0].limit}")
        save_figure(figure, path, overwrite, dpi=150)


def _smaller_at(speed: float) -> str:
    """Say which speed to ask for, so that smaller budgets are tried."""
    return f"`--faster {speed:g}`, in Python `faster={speed:g}`, tries smaller budgets."
