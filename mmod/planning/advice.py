"""The report of `mmod.advise`: a table, a picture, one sentence of advice and the lines that apply it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mmod.analysis.redundancy import RedundancyReport
from mmod.analysis.statistics import Estimate
from mmod.analysis.timing import Spread
from mmod.io.files import check_free, write_atomically
from mmod.io.tables import Table, table_of
from mmod.lazy import name_missing_extra

AGREEMENT = "agreement"
# A speed-up below this is within the noise of a machine.
LEAST_SPEEDUP = 1.03


@dataclass(frozen=True)
class RecipeResult:
    """What a recipe does to a model.

    Args:
        speedup: Time of the dense model over the recipe's, over the rounds: median and quartiles.
        score: Share of images with the dense model's top class, mean cosine of features, or share of next tokens that
            are the dense model's; 95 % interval over images or prompts.
        accuracy: Difference of top-1 accuracy to the dense model's, where images have labels; 95 % interval.
        images: Number of images; few for recipes that were far from the front.
        code: The line of Python that applies it; `config` the key of a training config that does.
        on_front: No other row is faster and agrees more.
        cache: Bytes of the KV cache of a prompt of mean length; None for image models.
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

    @property
    def loss(self) -> Estimate:
        """Accuracy lost, or disagreement where there are no labels."""
        score, lossless = (self.score, 1) if self.accuracy is None else (self.accuracy, 0)
        return Estimate(lossless - score.value, lossless - score.high, lossless - score.low)


@dataclass(frozen=True)
class Advice:
    """What `advise` measured; `print` shows the table, one sentence of advice and the lines that apply it.

    Args:
        rows: The recipes, the fastest first.
        refused: Reasons why recipes were left out, by name.
        measure: "agreement" of the top class, "cosine of features" for a model without a head, or "cosine of patches".
        accuracy: Top-1 accuracy of the dense model, where images have labels.
        milliseconds: Time of a batch of `batch_size` images or prompts in the dense model.
        tolerance: Share of agreement, or of accuracy, that may be lost.
        redundancy: Redundancy of the images at the model's patch size; None where that is unknown.
        note: Further facts about the data.
        cache: Bytes of the dense model's KV cache of a prompt of mean length; None for image models.
    """

    rows: tuple[RecipeResult, ...]
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

    @property
    def samples(self) -> str:
        """What the model was judged on: "images" or "prompts"."""
        return "images" if self.cache is None else "prompts"

    @property
    def best(self) -> RecipeResult | None:
        """The fastest recipe within the tolerance, or one as fast that loses less; None if the dense model is."""
        fitting = [row for row in self._faster if row.loss.value <= self.tolerance]
        as_fast = [row for row in fitting if LEAST_SPEEDUP * row.speedup.median >= fitting[0].speedup.median]
        return min(as_fast, key=lambda row: row.loss.value, default=None)

    @property
    def undecided(self) -> tuple[RecipeResult, ...]:
        """Recipes on the front whose intervals include the tolerance, if faster than any that clearly keeps it."""
        clear = next((place for place, row in enumerate(self._faster) if row.loss.high <= self.tolerance), None)
        return tuple(row for row in self._faster[:clear] if row.on_front and row.loss.low <= self.tolerance)

    @property
    def _faster(self) -> list[RecipeResult]:
        return [row for row in self.rows if row.speedup.low >= LEAST_SPEEDUP]

    @property
    def sentence(self) -> str:
        """The advice in one sentence, and which recipes so few samples leave undecided."""
        limit = f"{100 * self.tolerance:g} %"
        row = self.best
        if row is None:
            text = f"Nothing here pays at a tolerance of {limit}: keep the dense model."
        else:
            action = row.advice or f"use `{row.code}`"
            text = f"{action[0].upper()}{action[1:]}: {row.speedup.median:.2f} times as fast at "
            if self.measure == AGREEMENT:
                text += f"{100 * row.score} % agreement with the dense model"
            else:
                text += f"a {self.measure} of {row.score:.3f} with the dense model"
            if row.accuracy is not None:
                text += f", accuracy {100 * row.accuracy.value:+.1f} points"
            text += "."
        if self.undecided:
            names = ", ".join(f"{row.name} ({row.speedup.median:.2f} times as fast)" for row in self.undecided)
            text += f" {self.images} {self.samples} are too few to tell whether more than {limit} is lost by {names}."
        return text

    @property
    def code(self) -> str:
        """The lines of Python that follow the advice; empty without one."""
        return "" if self.best is None else f"import mmod\n\n{self.best.code}"

    def table(self) -> Table:
        """Return the rows as a table."""
        in_percent = self.measure == AGREEMENT
        columns = {
            "recipe": ("recipe", ""),
            "speedup": ("speed-up", "[.2f"),
            "score": (self.measure, ".1f" if in_percent else ".3f"),
            "accuracy": ("accuracy", "+.1f"),
            "cache": ("cache", ".2f"),
            "images": (self.samples, ""),
        }
        rows = [
            {
                **vars(row),
                "recipe": f"{'*' if row.on_front else ' '} {row.name}",
                "score": 100 * row.score if in_percent else row.score,
                "accuracy": None if row.accuracy is None else 100 * row.accuracy,
                "cache": None if row.cache is None or self.cache is None else row.cache / self.cache,
            }
            for row in self.rows
        ]
        return table_of(columns, rows)

    def __str__(self) -> str:
        unit = f"{'%, ' if self.measure == AGREEMENT else ''}95 % interval over {self.samples}"
        facts = f"The dense model takes {self.milliseconds:.1f} ms for {self.batch_size} {self.samples}"
        if self.cache is not None:
            facts += f", whose KV caches have {self.cache / 2**20:.3g} MiB each on average,"
        if self.accuracy is not None:
            facts += f" and has an accuracy of {100 * self.accuracy:.1f} %"
        facts += ". Rows with * are on the Pareto front. Speed-up: median and quartiles over rounds; "
        facts += f"{self.measure} with the dense model: {unit}."
        if self.redundancy is not None:
            facts += f" The images: {self.redundancy}."
        if self.note:
            facts += f" {self.note}"
        lines = [
            str(self.table()),
            f"\n{facts}",
            *[f"\nLeft out: {name}: {reason}" for name, reason in self.refused.items()],
            f"\n**{self.sentence}**",
        ]
        if self.best:
            lines.append(f"\n```python\n{self.code}\n```\n\nIn a training config:\n\n```yaml\n{self.best.config}\n```")
        return "\n".join(lines)

    _repr_markdown_ = __str__  # Notebooks show it.

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write `advice.json`, `advice.md` and `advice.png`."""
        folder = Path(folder)
        for name in ("advice.json", "advice.md", "advice.png"):
            check_free(folder / name, overwrite)
        folder.mkdir(parents=True, exist_ok=True)
        values = {**asdict(self), "sentence": self.sentence, "code": self.code}
        write_atomically(folder / "advice.json", json.dumps(values, indent=2) + "\n")
        write_atomically(
            folder / "advice.md", f"# {self.sentence}\n\n{self}\n\n![{self.measure} over speed-up](advice.png)\n"
        )
        self.plot(folder / "advice.png", overwrite)

    @name_missing_extra()
    def plot(self, path: str | Path, overwrite: bool = False) -> None:
        """Draw agreement over speed-up; a line joins the rows on the front."""
        from mmod.analysis.style import FAINT, INK, looks, new_figure, save_figure, tidy

        figure = new_figure(7, 4.5)
        axis = figure.subplots()
        for row in self.rows:
            look = looks([row.name])[row.name] | {"linestyle": "", "alpha": 1.0 if row.on_front else 0.5}
            bars = [[row.score.value - row.score.low], [row.score.high - row.score.value]]
            axis.errorbar(row.speedup.median, row.score.value, yerr=bars, elinewidth=0.8, **look)
            axis.annotate(
                row.name, (row.speedup.median, row.score.value), (5, 4), textcoords="offset points", fontsize=7
            )
        front = sorted((row.speedup.median, row.score.value) for row in self.rows if row.on_front)
        axis.plot(*zip((1.0, 1.0), *front), color=FAINT, linewidth=1, zorder=0)
        axis.plot(1.0, 1.0, color=INK, marker="*", markersize=12)
        axis.axhline(1 - self.tolerance, color=FAINT, linewidth=0.7, linestyle=":")
        axis.set(xlabel=f"times as fast, batches of {self.batch_size}", ylabel=f"{self.measure} with the dense model")
        tidy(axis, "both")
        save_figure(figure, path, overwrite, dpi=150)
