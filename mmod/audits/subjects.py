"""What is audited: a model of any kind of training, its evaluation set, and the strata of samples and tokens."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mmod import audit, is_routed
from mmod.adapters import find_stack, image_stack, patch_grid
from mmod.analysis.audit.choices import REFERENCE_ENTROPY, choices, default_choices
from mmod.analysis.audit.generation import Generation, judge_generation
from mmod.analysis.audit.plots import draw_audit
from mmod.analysis.audit.result import Audit
from mmod.analysis.audit.run import LabelledBatch, Shift
from mmod.analysis.audit.shifts import SHIFTS, ImageShift
from mmod.analysis.plots import draw_sample_maps
from mmod.analysis.statistics import published
from mmod.analysis.style import save_figure
from mmod.audits.config import AUDITS, record_of
from mmod.audits.strata import regions_of, roles_of, scenes_of, strata_of
from mmod.data.loader import text_stream
from mmod.data.readers.chat import IGNORED
from mmod.data.readers.lengths import open_checked
from mmod.data.stream import BatchStream
from mmod.data.synthetic.digits import DigitScene
from mmod.io.claim import claim_folder
from mmod.io.environment import environment
from mmod.io.files import read_json_object, write_atomically
from mmod.io.store import STORE, Store
from mmod.methods.route import routing_configs
from mmod.studies.results import save_picture
from mmod.training.engine.config import RUN_CONFIG
from mmod.training.engine.distributed import Process
from mmod.training.engine.evaluate import kept_means
from mmod.training.engine.kind import device_of, seed_draws
from mmod.training.engine.parse import read_config
from mmod.training.image.classes import check_same_classes, run_classes
from mmod.training.image.config import TrainConfig as ImageConfig
from mmod.training.image.kind import sample_images
from mmod.training.kinds import finished_run, kind_named, kind_of
from mmod.training.text.config import BYTES
from mmod.values import refuse_unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PIXELS = "pixel_values"
_QUESTION = "kind of question"


@dataclass(frozen=True)
class Batches:
    """A number of batches that can be iterated several times."""

    make: Callable[[], Iterator[LabelledBatch]]
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[LabelledBatch]:
        return self.make()


class Subject:
    """A trained model and its evaluation set; a subclass for every kind of training, whose `Kind` makes the model."""

    # Conditions that are only compared where the config names them.
    on_request: ClassVar[frozenset[str]] = frozenset()
    model: nn.Module  # The routed one, once it was made.

    def __init__(self, config: Any) -> None:
        self.config = config
        self.kind: Any = kind_of(config)

    @property
    def conditions(self) -> list[str]:
        """Names of the choices of tokens that are compared."""
        options = self.config.audit
        if options.conditions is not None:
            return options.conditions
        return [name for name in default_choices(options.reference is not None) if name not in self.on_request]

    def create(self, reference: str | None = None) -> nn.Module:
        """Make the routed model, or the dense one of a run folder, in evaluation mode and on its device."""
        plain = self.config.plain()
        if reference is not None:
            return kind_of(dataclasses.replace(plain.finished(reference), routing=None)).load()
        self.model = kind_of(plain).load()
        return self.model

    def batches(self, /, **changes: Any) -> Batches:
        """Return the evaluation set, or another with changed keys of `data`."""
        stream = self.stream(self.data(changes))
        return Batches(lambda: map(self.labelled, stream.batches(0)), stream.steps_per_epoch)

    def labelled(self, batch: Any) -> LabelledBatch:
        """Return a batch with the labels of its samples and tokens."""
        return LabelledBatch(batch)

    def data(self, changes: Mapping[str, Any]) -> Any:
        """Return the config of a set with changed keys of `data`."""
        refuse_unknown("key of data", changes, [field.name for field in dataclasses.fields(self.config.data)])
        return dataclasses.replace(self.config.data, **changes)

    def stream(self, data: Any) -> BatchStream:
        """Return the batches of a set as the model reads them."""
        kind: Any = kind_of(dataclasses.replace(self.config, data=data))
        return kind.create_stream(Process(0, 1, device_of(kind)), self.model)

    def shifted(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Return a batch with changed images (B, C, H, W) and the same labels."""
        images, labels = batch
        return change(images), labels

    def flops(self) -> dict[str, Any] | None:
        """Return the FLOPs of a sample by part, None where they are not counted."""
        report = self.kind.report(self.model)
        return None if report is None else dict(report.to_dict())

    def cost(self, model: nn.Module) -> float:
        """Return the mean FLOPs of a sample in a model of another run, which may depend on the sample."""
        with torch.inference_mode():
            parts = [self.kind.evaluate(model, self.on_device(labelled.batch)) for labelled in self.batches()]
        rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return float(sum(self.kind.cost(model, kept_means(rows)).values()))

    def judge(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return loss and accuracy of every sample of a batch."""
        rows = self.kind.evaluate(model, self.on_device(batch))
        if "labels" in rows and not bool(rows["labels"].all()):
            raise ValueError(f"each image needs a patch with a class: all patches of an image are {IGNORED}")
        return rows["loss"], rows["outcome"]

    def on_device(self, batch: Any) -> Any:
        """Return a batch with its tensors on the model's device."""
        device = device_of(self.kind)
        return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)

    def generation(self) -> Generation | None:
        """Return the decisions of the model while it writes long texts; None where the config asks for none."""
        return None

    def maps(self) -> Figure | None:
        """Draw the kept tokens of some samples; None where they are not drawn."""
        return None

    def shifts(self) -> dict[str, Shift]:
        """Return the shifts that the config asks for, as functions of batches."""
        refuse_unknown("shift of audit.shifts", self.config.audit.shifts, list(SHIFTS))

        def shift(batch: Any, images: range, change: ImageShift) -> Any:
            return self.shifted(batch, lambda x_BCHW: change(x_BCHW, images))

        return {name: partial(shift, change=SHIFTS[name]) for name in self.config.audit.shifts}


class _Images(Subject):
    def batches(self, /, **changes: Any) -> Batches:
        data = self.data(changes)
        stream = self.stream(data)
        scenes = scenes_of(data)

        def make() -> Iterator[LabelledBatch]:
            start = 0
            for images, targets in stream.batches(0):
                shown = scenes[start : start + len(images)]
                start += len(images)
                kinds = self._token_kinds(shown, targets, images)
                yield LabelledBatch((images, targets), strata_of(shown, targets), kinds)

        return Batches(make, stream.steps_per_epoch)

    def maps(self) -> Figure | None:
        count = self.config.audit.maps
        return draw_sample_maps(self.model, sample_images(self.config, count)) if count else None

    def _token_kinds(
        self, scenes: Sequence[DigitScene], targets: Tensor, images: Tensor
    ) -> dict[str, NDArray[np.str_]]:
        """Return the content of every token of a batch; empty where the set does not name it."""
        if targets.ndim == 2:
            regions = np.where(targets > 0, "object", np.where(targets == IGNORED, "unlabelled", "background"))
        elif scenes and image_stack(self.model) is not None:
            grid = patch_grid(self.model, (images.shape[2], images.shape[3]))
            regions = np.stack([regions_of(scene, grid) for scene in scenes])
        else:
            return {}
        prefix = ((0, 0), (find_stack(self.model).prefix, 0))
        return {"region": np.pad(regions.astype(object), prefix, constant_values="prefix token")}


class _Pairs(Subject):
    # No head of such a model predicts tokens.
    on_request = frozenset({REFERENCE_ENTROPY})


class _Chat(Subject):
    # Conversations differ in length, and no loss trained the head on image tokens.
    on_request = frozenset({"shuffled", REFERENCE_ENTROPY})

    def batches(self, /, **changes: Any) -> Batches:
        data = self.data(changes)
        size = self.config.eval_batch_size
        if data.val is None:
            raise ValueError("an audit needs conversations to ask: set data.val")
        collate = self.kind.collator
        talks = open_checked(data.val, data, collate)
        # Conversations with images, those of about equal length together.
        order = np.lexsort((talks.letters, talks.images))
        order = order[np.asarray(talks.images)[order] > 0]
        wanted = self.config.audit.questions
        if wanted is not None and wanted < len(order):
            chosen = np.random.default_rng(self.config.seed).choice(len(order), wanted, replace=False)
            order = order[np.sort(chosen)]
        is_language_routed = is_routed(self.model) and "language" in routing_configs(self.model)

        def make() -> Iterator[LabelledBatch]:
            for start in range(0, len(order), size):
                asked = talks.read(order[start : start + size])
                if not asked:
                    continue
                batch = collate(asked)
                kinds = [talk.question_type for talk in asked]
                roles = roles_of(batch, collate.processor) if is_language_routed else {}
                if roles:
                    roles[_QUESTION] = np.repeat(np.asarray(kinds)[:, None], batch["input_ids"].shape[1], axis=1)
                yield LabelledBatch(batch, {_QUESTION: kinds}, roles)

        return Batches(make, -(-len(order) // size))

    def shifted(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        if _PIXELS not in batch or batch[_PIXELS].ndim != 4 or len(batch[_PIXELS]) != len(batch["labels"]):
            raise ValueError("audit.shifts need conversations of one image each, of one size")
        return {**batch, _PIXELS: change(batch[_PIXELS])}


def _role(byte: bytes) -> str:
    if byte.isspace():
        return "end of line" if byte in b"\r\n" else "space"
    if byte.isalnum() or byte == b"_":
        return "digit" if byte.isdigit() else "letter"
    return "punctuation" if byte.isascii() and byte >= b" " else "other"


_ROLES = np.array([_role(bytes([value])) for value in range(BYTES)])


class _Text(Subject):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        generation = config.audit.generation
        length = config.data.length
        if generation % length:
            raise ValueError(f"audit.generation must be a multiple of data.length={length}, got {generation}")

    def labelled(self, batch: Any) -> LabelledBatch:
        return LabelledBatch(batch, token_kinds={"role": _ROLES[batch[0].numpy()]})

    def generation(self) -> Generation | None:
        config = self.config
        options = config.audit
        if not options.generation:
            return None
        # Longer texts than the windows of the training.
        length = config.data.length + options.generation
        stream = text_stream(dataclasses.replace(config.data, length=length, val_limit=options.texts))
        tokens_BN = torch.cat([tokens for tokens, _ in stream.batches(0)]).to(device_of(self.kind))
        return judge_generation(self.model, tokens_BN, config.data.length, config.seed)

    def shifted(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        raise ValueError("audit.shifts change images, and text has none: leave them out")


_SUBJECTS: dict[str, type[Subject]] = {"image": _Images, "pairs": _Pairs, "chat": _Chat, "text": _Text}


def subject_of(config: Any) -> Subject:
    """Return the subject of an audit."""
    return _SUBJECTS[config.kind](config)


def audit_run(config: Any, *, command: str | None = None, progress: bool = True) -> Audit:
    """Audit the model that a run would start from, and write the results into the folder `audit` of its output."""
    folder = Path(config.output) / "audit"
    result = folder / "audit.json"
    store = folder / STORE
    options = config.audit
    if result.exists():
        claim_folder(folder, record_of(config), file="config.json", kind="an audit")
        return Audit.from_dict(read_json_object(result)["audit"])
    seed_draws(config.seed, 0, 0)
    subject = subject_of(config)
    model = subject.create() if config.model.has_weights else None
    if model is None or not is_routed(model):
        raise ValueError(
            "an audit needs a routed model with weights: name a run folder of one, or set model.checkpoint and routing"
        )
    choices(subject.conditions, None, has_reference=options.reference is not None)
    baselines = _baselines(config)
    shifts = subject.shifts()
    others = {name: subject.batches(**changes) for name, changes in options.others.items()}
    # Once the options are checked, so that a refused audit leaves no folder.
    claim_folder(folder, record_of(config), file="config.json", kind="an audit")
    report = audit(
        model,
        subject.batches(),
        dataclasses.replace(options, conditions=subject.conditions),
        judge=subject.judge,
        reference=options.reference and subject.create(options.reference),
        beside=baselines,
        shifts=shifts,
        others=others,
        store=store,
        progress=progress,
    )
    costs = {name: subject.cost(baseline) for name, baseline in baselines.items()}
    _write(folder, subject, report, costs, command or f"mmod audit {shlex.quote(config.output)}")
    # The record holds the result.
    Store(store).remove()
    return report


def _write(folder: Path, subject: Subject, report: Audit, baseline_costs: Mapping[str, float], command: str) -> None:
    """Write pictures, text and record of an audit."""
    cost = subject.flops()
    generation = subject.generation()
    maps = subject.maps()
    if maps is not None:
        save_picture(folder, "maps", maps)
    save_figure(draw_audit(report), folder / "audit.png", dpi=150)
    text = f"{report}\n"
    if cost is not None and baseline_costs:
        others = ", ".join(f"{name} {value / 1e6:.2f}" for name, value in baseline_costs.items())
        routed = cost["routed"] / 1e6
        text += f"\nMFLOPs of a sample, as counted on these: this model {routed:.2f}, {others}.\n"
    if generation is not None:
        text += f"\n{generation}\n"
    write_atomically(folder / "audit.md", text)
    record = {
        "name": Path(subject.config.output).name,
        "command": command,
        "environment": environment(),
        "audit": report.to_dict(),
        "flops": cost,
        "beside_flops": baseline_costs,
        "generation": None if generation is None else dataclasses.asdict(generation, dict_factory=published),
    }
    # Last, because a record says that the audit is finished.
    write_atomically(folder / "audit.json", json.dumps(record, indent=1) + "\n")


def _baselines(config: Any) -> dict[str, Any]:
    """Return the models of `audit.beside` by the names of their folders."""
    folders = {Path(folder).name: Path(folder) for folder in config.audit.beside}
    if len(folders) < len(config.audit.beside):
        raise ValueError(f"audit.beside names two folders alike: {', '.join(config.audit.beside)}")
    models = {}
    for name, folder in folders.items():
        file = [str(folder / RUN_CONFIG)]
        run = finished_run(read_config(file, AUDITS[kind_named(file)]), folder)
        if type(run) is not type(config):
            raise ValueError(f"audit.beside: {str(folder)!r} is a run of another kind than the audited one")
        if isinstance(run, ImageConfig):
            check_same_classes(run_classes(config.model.checkpoint), folder, "audit.beside:")
        models[name] = subject_of(run).create()
    return models
