"""What a study tells of its models: table, pictures and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mmod.analysis.fronts import draw_tradeoff
from mmod.io.tables import table_of
from mmod.planning.candidate import Candidate
from mmod.studies.costs import AnyStudyConfig, ByModel, Costs
from mmod.studies.results import COLUMNS, StudyScores
from mmod.studies.scorer import Scorer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AnyCosts = TypeVar("AnyCosts", bound=Costs[Any])
Rows = Sequence[Mapping[str, Any]]


class Report(Generic[AnyStudyConfig, AnyCosts]):
    """Tells of models by one table, one picture and one sentence.

    Args:
        columns: Names of the table's columns, see `COLUMNS`.
    """

    def __init__(self, config: AnyStudyConfig, scorer: Scorer[Any], costs: AnyCosts, columns: Sequence[str]) -> None:
        self.config = config
        self.scorer = scorer
        self.costs = costs
        self.columns = columns

    @property
    def title(self) -> str:
        """What is drawn."""
        measure = self.scorer.measure
        return f"{measure[:1].upper()}{measure[1:]} against {', '.join(self.costs.axes.values())}"

    def pictures(self, rows: Rows) -> dict[str, Figure]:
        """Draw the points; return figures by the name of their file."""
        return {"tradeoff": draw_tradeoff(rows, self.scorer.score, self.scorer.measure, self.costs.axes)}

    def table(self, rows: Rows) -> str:
        """Return the points as a Markdown table."""
        return str(table_of({name: COLUMNS[name] for name in self.columns}, rows))

    def summary(self, rows: Rows) -> str:
        """Return the table that is printed; all of it as a rule."""
        return self.table(rows)

    def text(self, scores: StudyScores, costs: ByModel) -> str:
        """Say which models are significantly better."""
        return scores.verdict()

    def recommended(self, scores: StudyScores, costs: ByModel) -> list[str]:
        """Return the models that the text recommends."""
        return []

    def code(self, candidates: Sequence[Candidate]) -> str:
        """Return the lines that apply recommended models, as Markdown; empty where there are none."""
        return ""

    def facts(self) -> dict[str, Any]:
        """Return further entries of the JSON file."""
        return {}


def hint(candidate: Candidate, row: Mapping[str, Any]) -> str:
    """Return differences and settings of a model, the text that a browser shows at its point."""
    lines = [f"{name.replace('_', ' ')}: {row[name]}" for name in ("to_dense", "to_control") if row[name] is not None]
    size = {} if candidate.image_size is None else {"image_size": candidate.image_size}
    settings = []
    for part in (candidate.routing or {}, *candidate.methods, candidate.changes.get("model", {}).get("args", {}), size):
        settings += [f"{name}: {value}" for name, value in part.items()]
    if settings:
        lines.append(", ".join(settings))
    return "\n".join(lines)
