"""Training image classifiers of timm and transformers."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from timm.data import Mixup
from timm.models import save_for_hf
from torch import Tensor, nn

from mmod.adapters import find_library, image_facts, image_output
from mmod.analysis.counting import by_data, meta_copy, pass_flops
from mmod.analysis.flop_count import flops
from mmod.data.config import DataConfig
from mmod.data.labels import Classes, ModelClasses, read_classes
from mmod.data.loader import BatchStream, evaluation_fields, image_stream, sample_images
from mmod.methods import Method, methods_of
from mmod.model import set_capacity_
from mmod.opening.open import open_model
from mmod.opening.runs import check_same_classes, find_run, model_folder, run_classes
from mmod.opening.timm import published_classes
from mmod.opening.transformers import INTERPOLATIONS, read_state
from mmod.opening.weights import check_size, converted
from mmod.pretrained import save_pretrained
from mmod.training.engine import start
from mmod.training.engine.distributed import Process
from mmod.training.engine.evaluate import BatchStore, Columns, Evaluated, store_of
from mmod.training.engine.kind import ModelInput, device_of, evaluation_data
from mmod.training.engine.run_folder import check_recorded
from mmod.training.engine.task import Batch
from mmod.training.image.config import TrainConfig
from mmod.training.image.evaluate import EvalResult, check_labels, evaluate_batch, evaluate_set
from mmod.training.image.preflight import check_input, check_normalisation, check_outputs
from mmod.training.image.preparation import open_start, wanted_by, with_preparation
from mmod.training.image.task import ClassificationTask, ElasticTask, create_criterion


@dataclass(frozen=True)
class ImageKind:
    """Image classification with models of timm or transformers, and timm's criteria and mixup; see `Kind`."""

    config: TrainConfig
    result = EvalResult

    def __post_init__(self) -> None:
        # A frozen dataclass refuses assignments.
        object.__setattr__(self, "config", with_preparation(self.config))

    def prepare(self, weights: bool = True) -> nn.Module:
        """Create the dense model, and check that it can read the images."""
        config = self.config.model
        # The model may be that of a teacher, which has one by its name.
        named = ""
        if config.name == self.config.distill.teacher:
            named = "distill.teacher to such a file"
        opened = open_start(config, weights, named)
        side = self.config.data.image_size
        if config.checkpoint is not None and image_facts(opened.model).size not in (None, (side, side)):
            # First, since it names the size that the images and the model need.
            self._check_size(read_state(config.checkpoint), opened.model, config.checkpoint)
        check_input(opened, self.config.data, weights and config.pretrained)
        return opened.model.train()

    def load(self, model: nn.Module, checkpoint: str, methods: Sequence[Method] | None) -> dict[str, Tensor]:
        """Load a checkpoint by timm's names, with a new classifier if the run asks for one; see `LoopKind.load`."""
        is_teacher = methods is None
        is_fresh = not is_teacher and self.config.model.head == "fresh"
        if is_teacher and (find_run(checkpoint) or model_folder(checkpoint)):
            fields = wanted_by(open_model(checkpoint))
            check_normalisation(fields, self.config.data, f"the weights of the teacher {checkpoint!r}")
        adapt = partial(_adapted, checkpoint=checkpoint, is_fresh=is_fresh, is_teacher=is_teacher)
        state = read_state(checkpoint)
        self._check_size(state, model, checkpoint)
        return start.load_dense(model, state, checkpoint, methods, adapt)

    def _check_size(self, state: Mapping[str, Tensor], model: nn.Module, checkpoint: str) -> None:
        keys = "model.args.img_size and data.image_size"
        check_size(state, model, checkpoint, keys, self.config.model.args)

    def data(
        self, model: nn.Module, process: Process, seed: int | None = None, classes: Classes | None = None
    ) -> BatchStream:
        """Open the images, whose classes are those of the model by name, or of the training data; see `LoopKind.data`.

        Raises:
            ValueError: The model does not know a class, or its names are not known and it has another number of them;
                in training, the teacher or the run folder numbers them in another way.
        """
        open_stream = partial(image_stream, self.config.data, seed, process.rank, process.world)
        if classes is not None:
            stream = open_stream(model=ModelClasses(classes.numbers, "the training data"))
            self._warn_of_few(stream, classes, process)
            return stream
        stream = open_stream(model=model_classes(self.config, model))
        outputs = image_facts(model).classes
        if stream.classes is None:
            return stream
        if seed is None:
            stream.classes.check_ranks(outputs)
            return stream
        check_recorded(Path(self.config.output), stream.classes.numbers)
        model_config = self.config.model
        from_checkpoint = model_config.checkpoint is not None and model_config.head is None
        check_outputs(stream.classes, outputs, from_checkpoint=from_checkpoint)
        teacher = self.config.teacher()
        if teacher is not None:
            check_same_classes(stream.classes.numbers, teacher, "the teacher")
        return stream

    @staticmethod
    def _warn_of_few(stream: BatchStream, trained: Classes, process: Process) -> None:
        """Warn of evaluation images that have few of the classes of training."""
        if stream.classes is None or not process.is_first:
            return
        present = stream.classes.present
        known = trained.present or len(trained.numbers)
        if present is not None and present < known:
            warnings.warn(
                f"the evaluation images have {present} of the {known} classes of the training images: their score says "
                "nothing of the others",
                stacklevel=3,
            )

    def task(self, model: nn.Module, teacher: nn.Module | None) -> ClassificationTask:
        """Create the task with the config's criterion, mixup and distillation."""
        config = self.config
        mixup = None
        if config.mixup is not None:
            classes = image_facts(model).classes or 0
            mixup = Mixup(**vars(config.mixup), label_smoothing=config.loss.smoothing, num_classes=classes)
        create: Callable[..., ClassificationTask] = ClassificationTask
        if config.elastic is not None:
            create = partial(ElasticTask, elastic=config.elastic)
        return create(
            model,
            create_criterion(config.loss, mixed=config.mixup is not None),
            feature_weight=config.distill.features,
            mixup=mixup,
            **start.task_options(self, teacher),
        )

    def evaluate(self, model: nn.Module, batch: Batch) -> Columns:
        """Return the rows of a batch; see `mmod.training.image.evaluate.evaluate_batch`."""
        rows = evaluate_batch(model, batch, self.config.precision)
        check_labels(rows)
        return rows

    def score(
        self, model: nn.Module, progress: bool = False, store: BatchStore | None = None, data: BatchStream | None = None
    ) -> Evaluated:
        """Measure accuracy at every trained capacity; see `mmod.training.image.evaluate.evaluate`."""
        if data is None:
            data = evaluation_data(self, model)
        config = self.config
        routing = self.config.image_routing
        measure = partial(evaluate_set, model, data, config.precision, progress=progress)
        if config.elastic is None or routing is None:
            return Evaluated(*measure(store=store))
        results = {}
        for capacity in config.elastic.capacities:
            set_capacity_(model, capacity)
            results[capacity] = measure(store=store_of(store, f"capacity {capacity}"))
        chosen = next(capacity for capacity in results if capacity == routing.capacity)
        # Last that of the config, which the model is saved and trained on with.
        set_capacity_(model, chosen)
        accuracies = {f"{capacity:g}": result.accuracies() for capacity, (result, _) in results.items()}
        result, outcomes = results[chosen]
        return Evaluated(dataclasses.replace(result, capacities=accuracies), outcomes)

    def inputs(self, model: nn.Module, size: int, batches: int = 1, training: bool = False) -> dict[str, ModelInput]:
        """Return images of all classes; those of evaluation are repeated where there are too few. See `Kind.inputs`."""
        if training:
            data = self.config.data
            # As an evaluation set, because training images are augmented.
            prepared = dataclasses.replace(data, val_split=data.train_split, val_limit=batches * size, batch_size=size)
            parts = [images.to(device_of(self)) for images, _ in image_stream(prepared).batches(0)]
        else:
            parts = timed_images(self.config.data, size, batches, device_of(self))
        count = partial(_flops, model, self.config.image_shape)
        return {"image": ModelInput(parts, len(parts[0]), partial(image_output, model), count)}

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write a folder for `mmod.load_pretrained`, or for the host if the model is dense: timm's by `local-dir:`."""
        prepared = evaluation_fields(self.config.data)
        numbers = run_classes(self.config.output)
        if find_library(model) == "transformers":
            _save_hf(model, folder, prepared, numbers)
        elif methods_of(model):
            if find_library(model) == "timm":
                # By which timm prepares images. Recommendations for tests were those of the starting weights.
                of_timm: Any = model
                tests = {"test_input_size": None, "test_crop_pct": None}
                of_timm.pretrained_cfg = {**of_timm.pretrained_cfg, **prepared, **tests}
            save_pretrained(model, folder)
        else:
            described: dict[str, Any] = {"data_config": prepared}
            if numbers is not None:
                described["model_config"] = {"label_names": {str(number): name for name, number in numbers.items()}}
            save_for_hf(model, str(folder), safe_serialization=True, **described)


def _adapted(
    model: nn.Module, state: dict[str, Tensor], checkpoint: str, is_fresh: bool, is_teacher: bool
) -> Mapping[str, Tensor]:
    """Return weights as timm converts them, with the classifier that was drawn with the model if it is to be fresh."""
    current = model.state_dict()
    head = image_facts(model).head
    state = converted(state, model)
    if is_fresh:
        state = {name: value for name, value in state.items() if not name.startswith(head)}
        # The new classifier was drawn with the model.
        state |= {name: value for name, value in current.items() if name.startswith(head)}
    differing = current.keys() ^ state.keys()
    if differing and all(name.startswith(head) for name in differing):
        has, needs = "no", "one"
        if differing & state.keys():
            has, needs = "a", "none"
        if is_teacher:
            raise ValueError(
                f"teacher {checkpoint!r} has {has} classifier and the model {needs}: distill from a model that answers "
                "with the same classes"
            )
        raise ValueError(
            f"checkpoint {checkpoint!r} does not fit the model: it has {has} classifier and the model {needs}; "
            "model.head='fresh' takes the other weights alone"
        )
    return state


def _flops(model: nn.Module, shape: tuple[int, int, int], kept: Mapping[str, float]) -> float:
    """Count the FLOPs of an image, the mean if they depend on the data."""
    if by_data(model):
        return flops(model, shape, kept=kept).routed
    image = torch.empty(1, *shape, dtype=next(model.parameters()).dtype, device="meta")
    return pass_flops(meta_copy(model), {"image": image})


def timed_images(data: DataConfig, size: int, batches: int, device: torch.device) -> list[Tensor]:
    """Return batches of exactly `size` evaluation images, which are repeated if there are fewer."""
    return _read_once(_Timed(str(data), size, batches, device, data))


@dataclass(frozen=True)
class _Timed:
    """Images that are timed, by the fields of a config, which itself has no hash."""

    fields: str
    size: int
    batches: int
    device: torch.device
    data: DataConfig = field(compare=False)


# A study times many models on the same images.
@lru_cache(maxsize=8)
def _read_once(timed: _Timed) -> list[Tensor]:
    count = timed.size * timed.batches
    images = sample_images(timed.data, count)
    # They come class by class, and each batch has as many classes as it can.
    order = torch.arange(count).view(timed.size, timed.batches).T % len(images)
    return list(images[order.flatten()].to(timed.device).split(timed.size))


def model_classes(config: TrainConfig, model: nn.Module) -> ModelClasses | None:
    """Return the classes of the model that a run starts from; None where they are not known, as of a new classifier."""
    checkpoint = config.model.checkpoint
    named = config.data.classes
    # The run that wrote the weights knows best; a list of the user's comes before what a library publishes.
    if config.has_classes:
        numbers = run_classes(checkpoint)
        if numbers is not None:
            return ModelClasses(numbers, f"the run of {checkpoint!r}")
    if named is not None:
        return ModelClasses(read_classes(named), named)
    if not config.has_classes:
        return None
    published = published_classes(model)
    if published is None:
        return None
    return ModelClasses(published, "timm", required=False)


def _save_hf(model: Any, folder: Path, prepared: Mapping[str, Any], numbers: Mapping[str, int] | None) -> None:
    """Write a folder that `mmod.load_pretrained` or transformers reads, with a processor of the evaluation images.

    Args:
        prepared: How images are prepared for evaluation, see `mmod.data.loader.evaluation_fields`.
        numbers: Number of each class by name; None keeps the model's names.
    """
    from transformers import ViTImageProcessor

    if numbers is not None:
        model.config.id2label = {number: name for name, number in numbers.items()}
        model.config.label2id = dict(numbers)
    # As the file will be read: JSON has no tuples.
    plain = {}
    for name, value in prepared.items():
        plain[name] = list(value) if isinstance(value, tuple) else value
    if hasattr(model, "timm_model"):
        # The processor of these models reads it in config.json.
        published = getattr(model.config, "pretrained_cfg", None) or {}
        model.config.pretrained_cfg = {**published, **plain}
        model.save_pretrained(folder)
        return
    model.save_pretrained(folder)
    _, height, width = plain["input_size"]
    # The size before the crop, from which the processor cuts the middle.
    side = math.floor(min(height, width) / plain["crop_pct"])
    size = {"shortest_edge": side}
    if plain["crop_mode"] == "squash":
        size = {"height": side, "width": side}
    processor = ViTImageProcessor(
        size=size,
        do_center_crop=True,
        crop_size={"height": height, "width": width},
        resample=INTERPOLATIONS.index(plain["interpolation"]),
        image_mean=plain["mean"],
        image_std=plain["std"],
    )
    processor.save_pretrained(folder)
