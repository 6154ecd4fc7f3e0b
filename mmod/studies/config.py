"""The configuration of a study: what all kinds share; `kind_configs.py` has that of each kind.

It is plain data, which checks itself. It becomes the `Candidate` of each series at each budget, and in `candidates.py`
a `Comparison`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from mmod.config import PRESETS, ROUTING_FIELDS, preset, rational, read_routing, spelled
from mmod.io.configs import existing_config
from mmod.io.files import folder_name
from mmod.io.yaml import BASE_KEY, merged
from mmod.names import say_near, similar
from mmod.opening.runs import RUN_CONFIG, find_run, find_weights
from mmod.plain import from_plain, without
from mmod.planning.candidate import FIT, TOLERANCE, Candidate, PlanOptions
from mmod.training.kinds import config_class
from mmod.values import Checked, check_value, refuse_unknown

if TYPE_CHECKING:
    from mmod.training.engine.config import RunConfig

RUN_FIELDS = ("image_size", "changes", "tune")
"""Fields of a series or baseline that describe its runs instead of what makes the model cheaper."""
_SERIES_FIELDS = ("preset", "search", "budgets", *RUN_FIELDS)


@contextmanager
def naming_dense() -> Iterator[None]:
    """Say how the dense model is named where its weights are missing."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}: name the dense model's training run by --dense RUN, or its weights by --dense.model.checkpoint"
        ) from error


# How files of weights end.
_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin")
# Keys of training configs that the study sets, or each series for itself.
_OF_STUDY = ("output", "routing", "methods")


@dataclass(frozen=True, kw_only=True)
class StudyConfig(Checked):
    """Settings that all kinds of study share.

    Args:
        output: Folder of runs, table and pictures. A stopped study resumes there, and another one is refused. Empty is
            `runs/tradeoff/` with the last two parts of the path or name of the dense model, or of its run, without a
            file's ending, and "-tuned" where models are fine-tuned.
        dense: Training config of the dense model: a YAML file, its fields, or a run folder, for its final model and
            data; or one of these as `base`, with the keys that differ. The study sets its `output` and `seed`;
            `routing` and `methods` are those of series.
        routers: The routing of each series by its name, at every capacity: fields of `RoutingConfig`, `preset: NAME`
            with changes, or `plan: FILE` with other fields. It may also have

            - `search`: fields of `PlanOptions` in place of a routing: a plan is searched in the dense model of every
              seed, and the capacity is its budget;
            - `changes`: fields of the training config that differ in its runs;
            - `tune: false`: leaves it untrained;
            - `budgets`: replace the capacities; shares of the dense model's FLOPs with the fields that they set. One
              number may be "fit": a `capacity`, or of baselines `keep`, `r` or a size of images that brings the model
              to its budget. A model more than 3 % off its budget is named by its share.
        kind: The kind of study.
        changes: Fields of the training config to set differently in all runs, nested as in the file.
        finetune: Keys of the training config that fine-tuning sets otherwise than `dense`, such as epochs and schedule.
            Where `tune` is set, there is at least one.
        budgets: The budgets of series and baselines that are run; null for all.
        capacities: Capacities of the routed blocks; null runs a series as it is, like one that sets `capacity`.
        train_dense: Train the dense model first; False loads it as the config's `model` says. Null trains it unless
            `dense` names a run.
        tune: Fine-tune all models, the dense one like the others; "others" leaves the dense one as it is, and False
            evaluates routed models without training.
        before: Also evaluate models before they are fine-tuned.
        tolerance: What may be lost of the dense score, in points and not relative to it: 0.02 are 2 points. A change
            measures nothing again.
        seeds: Number of seeds; all runs are repeated with every seed. A study that trains nothing has one.
        processes: Parallel runs, in processes of one thread; 1 runs them in this process.
        then: Fields that differ in a second study, which follows in a subfolder: merged over this one's, as a file over
            its `base`.
        bases: Folder of another study with the same dense model and seeds. Its dense models are used, and trained if
            they are missing.
        controls: The control of a series: the name of another one, or false for none. Each other series is compared
            with its own routing with random scores, at the same budget. Such a control has a row in the table only if
            it is one of your series too.
        latency_batch: Samples in the batch whose latency is drawn; of images, also the batch whose memory is measured.
        latency_batches: Further batch sizes whose latency is measured.
        latency_rounds: Interleaved rounds of the measurement.
    """

    output: str = ""
    dense: str | dict[str, object] = field(
        metadata={"config": lambda study: config_class(study.run_kind), "unnamed": _OF_STUDY}
    )
    routers: dict[str, dict[str, Any]] = field(default_factory=dict)
    kind: str
    changes: dict[str, object] = field(default_factory=dict)
    finetune: dict[str, object] = field(default_factory=dict)
    budgets: list[float] | None = None
    capacities: list[float | None] = field(default_factory=lambda: [0.5])
    train_dense: bool | None = None
    tune: bool | Literal["others"] = True
    before: bool = True
    tolerance: Annotated[float, "[0, 1)"] = TOLERANCE
    seeds: Annotated[int, "[1, inf)"] = 1
    processes: Annotated[int, "[1, inf)"] = 1
    then: dict[str, object] | None = None
    bases: str | None = None
    controls: dict[str, str | Literal[False]] = field(default_factory=dict)
    latency_batch: Annotated[int, "[1, inf)"] = 32
    latency_batches: Annotated[list[int], "[1, inf)"] = field(default_factory=list)
    latency_rounds: Annotated[int, "[1, inf)"] = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.output:
            named = _name_of(self.dense)
            path = find_run(named) or Path(named)
            # The folder that a command runs in has a name too.
            if path.name in ("", ".."):
                path = path.resolve()
            if path.suffix in (".yaml", *_WEIGHTS):
                path = path.with_suffix("")
            output = f"runs/tradeoff/{folder_name('/'.join(path.parts[-2:]))}"
            if self.tune:
                output += "-tuned"
            object.__setattr__(self, "output", output)
        if self.train_dense is None:
            object.__setattr__(self, "train_dense", not _names_run(self.dense))
        self.check_settings()
        # What is wrong in a series is told now, and not after the training of the dense model.
        list(self.routed())
        if self.tune and not self.finetune:
            # A silent default would repeat the dense model's whole schedule for each model.
            raise ValueError(
                "finetune is empty: say how long models are fine-tuned, such as `finetune: {epochs: 1}` (of "
                "conversations `{trainer: {max_steps: 100}}`), or set tune to false"
            )
        self._check_following()

    def check_settings(self) -> None:
        """Raise unless the fields fit each other; no model is described yet."""
        if not self.series or not self.capacities:
            raise ValueError("a study needs at least one entry in routers or baselines, and in capacities")
        for capacity in self.capacities:
            if capacity is not None:
                rational(capacity)
        for series, fields in self.routers.items():
            for key in fields:
                near = similar(key, _SERIES_FIELDS, cutoff=0.8)
                # All others are options of its routing, which checks them.
                if near and key not in (*_SERIES_FIELDS, *ROUTING_FIELDS):
                    raise ValueError(f"unknown key routers.{series}.{key}; {say_near(near)}")
            check_value(f"routers.{series}.search", fields.get("search", {}), Mapping[str, object])
            check_value(f"routers.{series}.budgets", fields.get("budgets", {}), dict[float, dict[str, object]])
            if "preset" in fields:
                # Before any routing is checked, which imports torch.
                PRESETS.check(fields["preset"])
            for settings in (fields, *fields.get("budgets", {}).values()):
                _check_run_fields(f"routers.{series}", settings)
        for series, budgets in self.baselines_by_series.items():
            for settings in budgets.values():
                _check_run_fields(f"baselines.{series}", settings)
        self._check_budgets()
        named = [name for name in self.controls.values() if name is not False]
        refuse_unknown("series in controls", [*self.controls, *named], self.series)
        refuse_set_by_study("changes", self.changes)
        refuse_set_by_study("finetune", self.finetune)
        model = self.finetune.get("model")
        if self.train_dense and isinstance(model, Mapping):
            # Fine-tuning starts from the dense model that the study has trained.
            refuse_set_by_study("finetune.model", model, "checkpoint", "pretrained", "head")

    @property
    def series(self) -> list[str]:
        """Names of all series apart from the dense model's; some kinds have baselines."""
        return [*self.routers, *self.baselines_by_series]

    @property
    def baselines_by_series(self) -> Mapping[str, Mapping[float, dict[str, object]]]:
        """Fields of the baselines by series and budget."""
        # Configs of kinds without baselines have no such field.
        return getattr(self, "baselines", {})

    def _check_budgets(self) -> None:
        """Raise for a series that names no budget, and for a budget that is run and no series names."""
        routed = {f"routers.{series}": fields for series, fields in self.routers.items() if "budgets" in fields}
        named = {f"{name}.budgets": fields["budgets"] for name, fields in routed.items()}
        named |= {f"baselines.{series}": fields for series, fields in self.baselines_by_series.items()}
        for name, budgets in named.items():
            if not budgets:
                raise ValueError(f"{name} must name a budget, got {budgets!r}")
        valid = sorted({*itertools.chain.from_iterable(named.values())})
        unknown = [budget for budget in self.budgets or () if budget not in valid]
        if unknown:
            raise ValueError(
                f"no series has the budgets {unknown}; those of series and baselines are {valid}: name some of "
                "them, or set budgets to null"
            )

    def routed(self) -> Iterator[Candidate]:
        """Yield the model of every series of `routers` at every budget that is run; a ValueError for a wrong one."""
        for series, fields in self.routers.items():
            if "budgets" in fields:
                shared = without(fields, ("budgets",))
                # A series that names its budgets says what each of them sets.
                for budget, differing in fields["budgets"].items():
                    if self._is_run(budget):
                        yield self._routed(series, budget, {**shared, **differing})
            elif self._is_one(series):
                yield self._routed(series, None, fields)
            else:
                for capacity in self.capacities:
                    yield self._routed(series, capacity, fields, capacity)

    def _routed(
        self, series: str, budget: float | None, fields: Mapping[str, object], capacity: float | None = None
    ) -> Candidate:
        """Return the model of a series at a budget, with the routing that its fields set, or the search of one."""
        plain = self._candidate(series, budget, fields)
        if "search" in fields:
            refuse_unknown(f"field beside routers.{series}.search", fields, ("search", "budgets", *RUN_FIELDS))
            options = fields["search"]
            # A series without a budget says it among the options.
            if budget is not None:
                options = merged(fields, {"search": {"budget": budget}})["search"]
            return dataclasses.replace(plain, search=from_plain(PlanOptions, options, f"routers.{series}.search"))
        parts = self.parts_in(without(fields, RUN_FIELDS))
        if capacity is not None:
            parts = {part: {**routing, "capacity": capacity} for part, routing in parts.items()}
        # A name that promises the method of a paper must keep it.
        if series in PRESETS:
            for routing in parts.values():
                _check_named(series, routing)
        # Configs of one part have its routing itself.
        return dataclasses.replace(plain, routing=parts.get("", parts))

    def unrouted(self) -> Iterator[tuple[Candidate, dict[str, object]]]:
        """Yield the model of every baseline at every budget that is run, with the fields that make it cheaper."""
        for series, budgets in self.baselines_by_series.items():
            for budget, fields in budgets.items():
                if self._is_run(budget):
                    settings = without(fields, RUN_FIELDS)
                    yield self._candidate(series, budget, fields), settings

    def _candidate(self, series: str, budget: float | None, fields: Mapping[str, Any]) -> Candidate:
        """Return the model of a series at a budget with what describes its run, and nothing that makes it cheaper."""
        control = self.controls.get(series) or None
        if control is not None:
            control = self._name_at(control, budget)
        return Candidate(
            self._name_at(series, budget),
            series=series,
            budget=budget,
            control=control,
            image_size=fields.get("image_size"),
            changes=fields.get("changes", {}),
            is_trained=bool(self.tune) and fields.get("tune", True),
        )

    def _is_run(self, budget: float) -> bool:
        """Whether models of a budget that a series names are run."""
        return self.budgets is None or budget in self.budgets

    def _is_one(self, series: str) -> bool:
        """Whether a series sets its capacity or budget itself, so that it is run once."""
        fields = self.routers.get(series, {})
        # One that names budgets is run at each of them, whatever they share.
        sets_capacity = any("capacity" in routing for routing in self.parts_in(fields).values())
        return "budgets" not in fields and (sets_capacity or "budget" in fields.get("search", {}))

    def parts_in(self, fields: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
        """Return the routing of each part in the fields of a series, by name; "" is the only part of a config."""
        return {"": fields}

    def _name_at(self, series: str, budget: float | None) -> str:
        if budget is None or self._is_one(series):
            return series
        return f"{series}-{budget:g}"

    def _check_following(self) -> None:
        """Raise for what is wrong in the study that follows, before this one runs."""
        if self.then is not None:
            check_value("then.output", self.then.get("output", ""), str)
            output = Path(str(self.then.get("output") or "."))
            # An absolute path or one upwards would leave the study's folder.
            if not output.parts or output.is_absolute() or ".." in output.parts:
                raise ValueError(f"then must name its output, a folder in this study's, got {self.then}")
        self.following()

    def following(self) -> StudyConfig | None:
        """Return the study that follows this one, in a folder of its `output`; None for none."""
        if self.then is None:
            return None
        folder = Path(self.output) / str(self.then["output"])
        fields = merged({**vars(self), "then": None}, {**self.then, "output": str(folder)}, null_removes=True)
        # Read as a file is, which converts values and names an unknown key.
        return from_plain(type(self), fields, "then")

    run_kind: ClassVar[str]
    """The kind of its runs."""
    opens_names: ClassVar[bool] = False
    """Whether the dense model's checkpoint may be a name of a hub."""

    @classmethod
    def check_dense(cls, fields: Mapping[str, object]) -> None:
        """Raise a FileNotFoundError if the dense model's file, run or weights are missing, as far as plain fields say.

        Torch is not imported, as it is for a config whose routings are checked.
        """
        dense = fields.get("dense")
        if isinstance(dense, str):
            dense = {BASE_KEY: dense}
        if not isinstance(dense, Mapping):
            return
        base = dense.get(BASE_KEY)
        if isinstance(base, str) and not Path(base, RUN_CONFIG).is_file():
            if Path(base).suffix in _WEIGHTS:
                raise ValueError(
                    f"dense names a run or a config file, and {base!r} a file of weights: name it by "
                    f"--dense.model.checkpoint {base}, and its model by --dense.model.name"
                )
            existing_config(base, "run or config file")
        model = dense.get("model")
        if not isinstance(model, Mapping):
            return
        checkpoint = model.get("checkpoint")
        if isinstance(checkpoint, str) and not cls.opens_names:
            with naming_dense():
                find_weights(checkpoint)

    # What `candidates.py` asks, which reads the training configs.
    def fields_of_dense(self, fields: Mapping[str, object]) -> dict[str, object]:
        """Return the fields of the dense model's training config, as the study changes those that `dense` names."""
        # Each run sets a folder of its own in place of the output.
        return {**merged(fields, self.changes), "output": self.output}

    @property
    def budgets_are_shares(self) -> bool:
        """Whether budgets, and the numbers in names, are shares of the dense model's FLOPs."""
        return False

    @property
    def trains_shallow(self) -> bool:
        """Whether dense models of fewer blocks are trained that have about the FLOPs of the routed ones."""
        return False

    def starts_trained(self, dense: RunConfig) -> bool:
        """Whether a config starts from trained weights, as far as the study uses them."""
        return bool(dense.model.has_weights)

    def check_runs(self, dense: RunConfig, tuned: RunConfig) -> None:
        """Raise a ValueError unless the training configs of the dense model and of fine-tuning it fit the study."""
        for run in (dense, tuned):
            kinds = [method.get("kind") for method in run.methods if not method.get("training_only")]
            if run.routing is not None:
                kinds.append("routing")
            if kinds:
                got = ", ".join(map(str, kinds))
                raise ValueError(
                    f"the dense model of a study has no methods and no routing, got {got}: leave them out of `dense` "
                    "and its changes, and name them in `routers` or `baselines`"
                )
        if not self.train_dense and self.tune is not True and not self.starts_trained(dense):
            raise ValueError(
                "nothing to compare with: the dense config starts from no weights, and the study does not train it; "
                "set dense.model.checkpoint, name a run in `dense`, or set train_dense to true"
            )

    # What runs and tables are made by.
    @property
    def score(self) -> str:
        """The figure by which models are compared."""
        raise NotImplementedError

    @property
    def maps(self) -> int:
        """Samples over which routing is drawn; 0 draws none."""
        return 0

    @property
    def evaluation(self) -> Mapping[str, object]:
        """How models are compared, besides what they are: one table has one."""
        return {"kind": self.kind, "score": self.score}

    @property
    def size_suffixes(self) -> dict[int, str]:
        """The batch sizes whose latency is measured, and what follows the name of a column of times of each."""
        suffixes = {size: f"_b{size}" for size in sorted({*self.latency_batches, self.latency_batch})}
        # The size that is drawn has the plain names, as where it is the only one.
        suffixes[self.latency_batch] = ""
        return suffixes


def _names_run(dense: str | Mapping[str, object]) -> bool:
    """Return whether the dense model is that of a run, by its folder, and not one that a config describes."""
    named = dense.get(BASE_KEY) if isinstance(dense, Mapping) else dense
    return named is not None and find_run(str(named)) is not None


def _name_of(dense: str | Mapping[str, object]) -> str:
    """Return what tells the dense model in the name of a folder: its run or config, its weights or its architecture."""
    if isinstance(dense, str):
        return dense.removesuffix("/config.yaml")
    if BASE_KEY in dense:
        return _name_of(str(dense[BASE_KEY]))
    model = dense.get("model")
    if not isinstance(model, Mapping):
        return "dense"
    return str(model.get("checkpoint") or model.get("name") or "dense")


def refuse_set_by_study(what: str, changes: Mapping[str, object], *more: str) -> None:
    """Raise a ValueError where changes of a training config name what a study sets itself."""
    reserved = sorted({"output", "seed", "routing", *more} & set(changes))
    if reserved:
        raise ValueError(f"{what} must not set {', '.join(reserved)}: the study sets them")


def _check_named(series: str, routing: Mapping[str, object]) -> None:
    """Raise a ValueError if a series is named after a preset and its routing decides in another way.

    Blocks, capacities, gates, losses and options for language models may differ.
    """
    # A plan says block by block what is decided.
    if "plan" in routing:
        return
    named = preset(series)
    # What is still to be fitted is a number, and no option that is compared.
    fixed = {key: value for key, value in routing.items() if key != "depth" and value != FIT}
    known = read_routing(fixed)
    for option in ("router", "select", "skipped", "operator", "context"):
        expected = spelled(getattr(named, option))
        actual = spelled(getattr(known, option))
        if actual != expected:
            raise ValueError(
                f"routers.{series} is named after a preset with {option}={expected!r}, and has "
                f"{option}={actual!r}: give the series another name, or set `preset: {series}`"
            )


def _check_run_fields(name: str, fields: Mapping[str, Any]) -> None:
    """Raise for a wrong field that describes the runs of a series or baseline."""
    check_value(f"{name}.changes", fields.get("changes", {}), Mapping[str, object])
    refuse_set_by_study(f"{name}.changes", fields.get("changes", {}))
    check_value(f"{name}.tune", fields.get("tune", True), bool)
