"""Training image classifiers: what the loop needs to know of timm models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from timm.models import save_for_hf
from torch import Tensor, nn

from mmod import apply_, flops, learn_capacity_, route_, set_capacity_, settle_capacity_, undo_
from mmod.analysis import FlopReport
from mmod.analysis.audit.judges import judge_classes
from mmod.data.loader import BatchStream, create_eval_stream, create_train_stream, normalisation
from mmod.methods import methods_of
from mmod.planning.learned import capacity_hook
from mmod.pretrained import save_pretrained
from mmod.training.engine.config import resolve_routing
from mmod.training.engine.distributed import Process, choose_device
from mmod.training.engine.evaluate import RoutedResult
from mmod.training.engine.loop import run
from mmod.training.engine.recipe import LoopRecipe, Reading, Streams, Tick, kept_shares
from mmod.training.engine.run_folder import FitResult
from mmod.training.image.config import InTrainingConfig, TrainConfig
from mmod.training.image.elastic import ElasticTask, at_capacities
from mmod.training.image.evaluate import EvalResult, evaluate
from mmod.training.image.model import create_criterion, create_mixup, create_models
from mmod.training.image.task import ClassificationTask

__all__ = ["ImageRecipe", "fit", "sample_images", "timed_images"]


def fit(config: TrainConfig, *, streams: Streams | None = None, progress: bool = True) -> FitResult[EvalResult]:
    """Train a classifier as a config says, from the start or from where the run in its folder stopped.

    Args:
        config: The run's config.
        streams: Training and evaluation batches to use instead of those `config.data` names.
        progress: Show bars.

    Returns:
        The outcome; that of the earlier run when the folder holds a finished run of the same config.

    Raises:
        ValueError: If the folder belongs to another config, or the config does not fit the data or model.
        FloatingPointError: If the loss stops being finite.

    Example:
        >>> import tempfile
        >>> from mmod.data.config import DataConfig
        >>> from mmod.training import ModelConfig
        >>> folder = tempfile.mkdtemp()
        >>> args = {"img_size": 32, "patch_size": 8, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
        >>> model = ModelConfig("vit_tiny_patch16_224", {**args, "num_classes": 10})
        >>> data = DataConfig("digits:tiny", root=f"{folder}/digits")
        >>> config = TrainConfig(output=f"{folder}/run", model=model, data=data, epochs=1)
        >>> result = fit(config, progress=False)
        >>> result.steps, result.evaluation.samples
        (4, 64)
    """
    return run(ImageRecipe(config), streams=streams, progress=progress)


class ImageRecipe(LoopRecipe[TrainConfig, EvalResult]):
    """Image classification with timm's models, criteria and mixup; see `Recipe`."""

    result = EvalResult
    part = "image"

    def create_models(self) -> tuple[nn.Module, nn.Module | None]:
        """Make model and teacher, see `mmod.training.image.model.create_models`, and let capacities be learned."""
        model, teacher = create_models(self.config)
        config, data = self.config.learn_capacity, self.config.data
        if config is not None:
            device = choose_device(self.config.device)
            example = torch.zeros(data.batch_size, data.channels, data.image_size, data.image_size, device=device)
            learn_capacity_(model.to(device), config.budget, example, cost=config.cost, rate=config.rate)
        return model, teacher

    def create_train_stream(self, process: Process, model: nn.Module) -> BatchStream:
        """Make the stream of training images that `config.data` names."""
        return create_train_stream(self.config.data, self.config.seed, process.rank, process.world)

    def create_eval_stream(self, process: Process, model: nn.Module) -> BatchStream:
        """Make the stream of evaluation images that `config.data` names."""
        return create_eval_stream(self.config.data, process.rank, process.world)

    def create_task(self, model: nn.Module, teacher: nn.Module | None, process: Process) -> ClassificationTask:
        """Make the task with the config's criterion, mixup and distillation."""
        config = self.config
        routing, method = config.routing_config(), config.method_config()
        kind = ClassificationTask if config.elastic is None else partial(ElasticTask, elastic=config.elastic)
        return kind(
            model,
            create_criterion(config.loss, mixed=config.mixup is not None),
            teacher=teacher,
            distill_weight=config.distill.weight,
            temperature=config.distill.temperature,
            feature_weight=config.distill.features,
            auxiliary=(routing is not None and bool(routing.losses)) or (method is not None and method.has_loss),
            precision=config.precision,
            mixup=create_mixup(config.mixup, config.loss.smoothing, getattr(model, "num_classes", 0)),
        )

    def evaluate(self, model: nn.Module, stream: BatchStream, process: Process, progress: bool) -> EvalResult:
        """Measure accuracy, at each capacity that is trained; see `mmod.training.image.evaluate.evaluate`."""
        config, routing = self.config, self.config.routing_config()
        if config.in_training is not None:
            _make_dense(model)
        judge = partial(evaluate, model, stream, process.device, config.precision, progress=progress)
        if config.elastic is None or routing is None:
            return judge()
        return at_capacities(model, config.elastic, routing, judge)

    def train(self, tick: Tick) -> EvalResult:
        """Train, or read the result of a finished run; see `Recipe.train`."""
        return run(self, progress=False, tick=tick).best

    def judge(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return cross entropy and correctness of each image."""
        return judge_classes(model, batch)

    def cost(self, model: nn.Module, found: RoutedResult) -> dict[str, float]:
        """Count the FLOPs of an image, on average where images leave early."""
        return {"image": flops(model, self.image_shape, **kept_shares(model, found)).routed}

    def report(self, model: nn.Module) -> FlopReport:
        """Count the FLOPs of an image by part."""
        return flops(model, self.image_shape)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.config.data.channels, self.config.data.image_size, self.config.data.image_size

    def readings(self, model: nn.Module, count: int) -> dict[str, Reading]:
        """Return a pass over evaluation images of all classes."""
        images = sample_images(self.config, count).to(self.device)
        return {"image": Reading(partial(model, images), len(images))}

    def calibration(self, model: nn.Module, batches: int, size: int) -> list[Tensor]:
        """Return training images, prepared as those of an evaluation; see `Recipe.calibration`."""
        data = self.config.data
        calm = dataclasses.replace(data, val_split=data.train_split, val_limit=batches * size, batch_size=size)
        return [images.to(self.device) for images, _ in create_eval_stream(calm).batches(0)]

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write a folder: of a changed model for `mmod.load_pretrained`, of a dense one for timm's `local-dir:`.

        Beside capacities that were learned stands `plan.json`.
        """
        if capacity_hook(model) is not None:
            found = settle_capacity_(model)
            save_pretrained(model, folder)
            found.plan.save(folder / "plan.json")
        elif methods_of(model):
            save_pretrained(model, folder)
        else:
            mean, std = (values.tolist() for values in normalisation(self.config.data))
            save_for_hf(model, str(folder), safe_serialization=True, data_config={"mean": mean, "std": std})

    def start_epoch(self, models: Sequence[nn.Module], epoch: int) -> None:
        """Follow the capacity schedule, end the learning of capacities, and do what is for training alone."""
        learned = self.config.learn_capacity
        if learned is not None and epoch >= learned.epochs:
            hooks = [hook for hook in map(capacity_hook, models) if hook is not None]
            for hook in hooks:
                # A model's average goes by what the model has learned.
                hook.hold(hooks[0].chosen())
        if self.config.in_training is not None:
            self._change_in_training(models[0], self.config.in_training, epoch)
        schedule, routing = self.config.capacity_schedule, self.config.routing_config()
        if schedule is None or routing is None:
            return
        if not isinstance(routing.capacity, (int, float)):
            raise ValueError(f"capacity_schedule needs one capacity for all blocks, got {routing.capacity}")
        share = min(1.0, epoch / schedule.epochs)
        capacity = round(schedule.start + share * (routing.capacity - schedule.start), 6)
        for model in models:
            set_capacity_(model, capacity)

    def _change_in_training(self, model: nn.Module, config: InTrainingConfig, epoch: int) -> None:
        if config.epochs is not None and epoch >= config.epochs:
            # An epoch without evaluation may have left it changed.
            _make_dense(model)
        elif not methods_of(model):
            if config.routing is not None:
                route_(model, resolve_routing(config.routing))
            if config.method is not None:
                apply_(model, config.method)


def _make_dense(model: nn.Module) -> None:
    """Take back what a run does in training alone."""
    if methods_of(model):
        undo_(model)


def sample_images(config: TrainConfig, count: int) -> Tensor:
    """Return some evaluation images, spread over the classes."""
    data = dataclasses.replace(config.data, val_limit=count, batch_size=count)
    return next(iter(create_eval_stream(data).batches(0)))[0]


def timed_images(config: TrainConfig, count: int) -> Tensor:
    """Return a batch of that many evaluation images; where there are fewer, they come again."""
    images = sample_images(config, count)
    return images[torch.arange(count) % len(images)]
