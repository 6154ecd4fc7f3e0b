"""The config of fine-tuning a vision-language model on image conversations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mmod.data.readers.conversations import ConversationsConfig
from mmod.methods.resolve import resolve_methods
from mmod.opening.runs import check_source, model_folder
from mmod.plain import without
from mmod.training.engine.config import RunConfig, check_described
from mmod.training.engine.groups import check_warmup
from mmod.values import Checked, check_value

TOWERS = ("image", "projector", "language")
WITHOUT_WEIGHTS = ("dtype", "attn_implementation")
"""Arguments of `from_pretrained` that a model with random weights takes too."""
WORDS = "words"
BPE = "bpe"
BUILT = (WORDS, BPE)
"""Processors that are built for a run."""
# Older names for the limits in the `size` of a processor.
_PIXELS = ("min_pixels", "max_pixels")
# Set by the run.
_TAKEN = ("output_dir", "seed", "data_seed", "remove_unused_columns", "label_names", "do_train")
# Wrong here, or where the questions to be asked are missing.
_UNUSABLE = {
    "label_smoothing_factor": "transformers does not shift the labels of vision-language models when it smooths them",
    "auto_find_batch_size": "the steps of a run would depend on free memory: set per_device_train_batch_size",
    "save_only_model": "a run resumes from its checkpoints, which then lack the state of the optimiser",
}
_ASKING = ("eval_strategy", "eval_on_start", "load_best_model_at_end")
# Arguments of the trainer that do not affect the result.
_FREE = ("logging_steps", "save_steps", "save_total_limit", "report_to", "disable_tqdm", "dataloader_num_workers")
# Numbers that the trainer and peft do not check: type and range by option.
_LIMITS: dict[str, dict[str, tuple[object, str | None]]] = {
    "trainer": {
        **dict.fromkeys(("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps"), (float, "[0, inf)")),
        **dict.fromkeys(("num_train_epochs", "adam_epsilon"), (float, "(0, inf)")),
        **dict.fromkeys(("logging_steps", "save_steps", "eval_steps"), (float, "(0, inf)")),
        **dict.fromkeys(("adam_beta1", "adam_beta2"), (float, "[0, 1)")),
        "warmup_ratio": (float, "[0, 1]"),
        "per_device_train_batch_size": (int, "[1, inf)"),
        "gradient_accumulation_steps": (int, "[1, inf)"),
        "save_total_limit": (int, "[1, inf)"),
        "dataloader_num_workers": (int, "[0, inf)"),
        "max_steps": (int, "[-1, inf)"),
    },
    "lora": {
        "r": (int, "[1, inf)"),
        "lora_alpha": (float, "(0, inf)"),
        "lora_dropout": (float, "[0, 1)"),
        # peft replaces any other by it unsaid.
        "peft_type": (Literal["LORA"], None),
    },
}


@dataclass(frozen=True)
class ModelConfig(Checked, group="model"):
    """The model and its starting weights.

    Args:
        checkpoint: A run folder, a folder of a transformers model, or its name on the hub; dense or routed.
        config: Instead of a checkpoint, fields of a transformers config with its `model_type`: random weights.
        processor: Folder or name of the processor; None is the checkpoint's. For small models with random weights,
            "bpe" trains a byte-level tokenizer on the training conversations, and "words" knows the words of the
            embedded questions; both also set the vocabulary and special tokens of `config`.
        args: Further arguments of `from_pretrained`, such as `dtype`, `attn_implementation` or `quantization_config`;
            with `config` only the first two.
        processor_args: Arguments of the processor's `from_pretrained`, such as Qwen-VL's `size: {shortest_edge: N,
            longest_edge: N}`, the fewest and most pixels of a picture, which limit the number of image tokens.
        image_size: Side in pixels of the images of a LLaVA-like model, which determines the number of image tokens;
            position embeddings are resampled. None keeps the model's size.
    """

    checkpoint: str | None = None
    config: dict[str, Any] | None = None
    processor: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    processor_args: dict[str, object] = field(default_factory=dict)
    image_size: Annotated[int | None, "[1, inf)"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint is None and self.config is None:
            raise ValueError("give either model.checkpoint or model.config")
        if self.checkpoint is not None and self.config is not None:
            replaced = "model.config"
            if self.processor in BUILT:
                replaced += " and model.processor"
            raise ValueError(
                f"model.checkpoint={self.checkpoint!r} and model.config exclude each other: set {replaced} to null for "
                "the checkpoint's, or model.checkpoint to null"
            )
        if self.checkpoint is not None and self.processor in BUILT:
            raise ValueError(
                f"model.processor={self.processor!r} is built for a model.config, and model.checkpoint="
                f"{self.checkpoint!r} has its own: set model.processor to null"
            )
        if self.config is not None and self.processor is None:
            raise ValueError("model.config needs model.processor: a folder, a name, 'bpe' or 'words'")
        if self.processor_args and self.processor in BUILT:
            raise ValueError(f"model.processor_args are those of a saved processor, not of {self.processor!r}")
        older = [name for name in _PIXELS if self.processor_args.get(name) is not None]
        if older and self.processor_args.get("size") is not None:
            raise ValueError(f"model.processor_args: {', '.join(older)} would replace a part of size: leave one out")
        if self.config is None:
            return
        check_described(self.config)
        foreign = sorted(set(self.args) - set(WITHOUT_WEIGHTS))
        if foreign:
            known = " and ".join(WITHOUT_WEIGHTS)
            raise ValueError(f"model.args {', '.join(foreign)} need a checkpoint; random weights take {known}")

    def check_sources(self) -> None:
        """Raise a FileNotFoundError if checkpoint or processor are no folder here and no name of the hub."""
        named = [name for name in (self.checkpoint, self.processor) if name is not None and name not in BUILT]
        for name in named:
            check_source(name)

    @property
    def has_weights(self) -> bool:
        """Whether training starts from trained weights."""
        return self.checkpoint is not None

    @property
    def weights(self) -> dict[str, str]:
        """Where starting weights are read from; see `StartConfig.weights`."""
        return {} if self.checkpoint is None else {"checkpoint": self.checkpoint}

    def started_from(self, folder: str | None) -> ModelConfig:
        """Return the config of a model that starts from the final model of a run.

        The folder holds the architecture and the processor, so only `args` are kept of this config.
        """
        return ModelConfig(checkpoint=folder, args=self.args)

    @property
    def folder(self) -> str | None:
        """The folder on this machine that holds the checkpoint's model; None for a name on the hub."""
        if self.checkpoint is None:
            return None
        folder = model_folder(self.checkpoint)
        return None if folder is None else str(folder)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """The config of fine-tuning on image conversations.

    In the run folder, `model/` is the final model, and `checkpoints/` holds those of the trainer.

    Args:
        model: The model and its starting weights.
        data: The conversations.
        routing: The routing by part (`language`, `image`): fields of `mmod.RoutingConfig`, or `preset: NAME` with the
            fields to change; presets take the depth from the model. None, also of a part, trains it as it is.
        lora: Fields of `peft.LoraConfig`: adapters are trained with the routers, and merged into the saved model. None
            trains the weights themselves.
        frozen: Parts whose weights are not trained: "image", "projector", "language". Routers always learn.
        optim: Name of one of timm's optimisers, such as "muon", which takes the learning rate and weight decay of
            `trainer`. None for the trainer's optimiser.
        trainer: Arguments of `transformers.TrainingArguments`: learning rate, batch size, epochs, `fsdp`,
            `deepspeed`, `activation_checkpointing` and so on. `eval_strategy` and `eval_steps` also evaluate in
            training, and `load_best_model_at_end` keeps the weights with the most right answers. At least two
            checkpoints are kept, also by `save_total_limit: 1`.
        eval_batch_size: Questions per batch in an evaluation.
        max_new_tokens: Longest answer, in tokens.
    """

    kind: Literal["chat"] = "chat"
    model: ModelConfig
    data: ConversationsConfig = field(default_factory=ConversationsConfig)
    routing: dict[str, dict[str, object] | None] | None = field(default=None, metadata={"names": ("language", "image")})
    lora: dict[str, object] | None = None
    frozen: Annotated[list[str], TOWERS] = field(default_factory=list)
    optim: str | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    eval_batch_size: Annotated[int, "[1, inf)"] = 32
    max_new_tokens: Annotated[int, "[1, inf)"] = 16

    engine = "mmod.training.chat"

    def __post_init__(self) -> None:
        self.check()
        for group, limits in _LIMITS.items():
            options = getattr(self, group) or {}
            for name in sorted(limits.keys() & options.keys()):
                check_value(f"{group}.{name}", options[name], *limits[name])
        taken = sorted(set(_TAKEN) & set(self.trainer))
        if taken:
            raise ValueError(f"trainer must not set {', '.join(taken)}: the run sets them")
        for name, reason in _UNUSABLE.items():
            if self.trainer.get(name):
                raise ValueError(f"trainer.{name}: {reason}")
        asking = [name for name in _ASKING if self.trainer.get(name, "no") not in ("no", False)]
        if self.data.val is None and asking:
            raise ValueError(f"trainer.{asking[0]} asks questions in training: set data.val")
        # A question is asked of the whole model, which no process has.
        if self.data.val is not None and self.is_sharded:
            raise ValueError(
                "answers are not generated while the model is split by fsdp or deepspeed: set data.val: null"
            )
        parallel = sorted({"tp_plan", "tp_size", "distributed_config"} & set(self.model.args))
        if parallel:
            raise ValueError(
                f"model.args {', '.join(parallel)}: a run does not train a model that is split by tensor parallelism, "
                "which one process could not save; set trainer.fsdp instead"
            )
        if self.model.args.get("quantization_config") is not None:
            if self.lora is None:
                raise ValueError("quantized weights are not trained: give lora, whose adapters are")
            if self.is_sharded:
                raise ValueError("quantized weights are not split by fsdp or deepspeed here: use plain torchrun")
        # The file of a plan is read with the model, which knows its number of layers.
        known = {part: fields for part, fields in (self.routing or {}).items() if "plan" not in (fields or ())}
        resolve_methods((), known)

    def check_weights(self) -> None:
        """Refuse a run of another kind, before its processor is opened; see `RunConfig.check_weights`."""
        self.model.check_sources()
        self.check_kind("a vision-language model of transformers with its processor")

    def check_schedule(self, world: int = 1) -> None:
        """Check the warm-up where the config states the number of steps; see `RunConfig.check_schedule`."""
        steps = self.trainer.get("max_steps", 0)
        # Otherwise the steps follow from the number of conversations.
        if steps > 0 and self.trainer.get("lr_scheduler_type") != "constant":
            check_warmup("trainer.warmup_steps", self.trainer.get("warmup_steps", 0), "trainer.max_steps", steps)

    def sketched_by(self, other: TrainConfig) -> TrainConfig:
        """Return the config with another's model: only weights say which architecture a run has."""
        return dataclasses.replace(self, model=other.model)

    def keys_of_size(self, side: int) -> dict[str, object]:
        """Return the key of the model, whose processor resizes images."""
        return {"model": {"image_size": side}}

    def with_pixels(self, size: Mapping[str, int]) -> TrainConfig:
        """Return the config whose processor limits the pixels of an image; see `pixel_limits_of`."""
        # Their older names, which would be taken instead.
        kept = without(self.model.processor_args, _PIXELS)
        model = dataclasses.replace(self.model, processor_args={**kept, "size": dict(size)})
        return dataclasses.replace(self, model=model)

    @property
    def is_sharded(self) -> bool:
        """Whether the model's weights are sharded over processes."""
        return bool(self.trainer.get("fsdp") or self.trainer.get("deepspeed"))

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether the trainer saves any; see `RunConfig.keeps_checkpoints`."""
        return self.trainer.get("save_strategy") != "no"

    @property
    def free_keys(self) -> frozenset[str]:
        """Keys that a resumed run may change; see `RunConfig.free_keys`."""
        free = {"data.root", "data.on_corrupt", "data.max_corrupt", "eval_batch_size"}
        return super().free_keys | free | {f"trainer.{name}" for name in _FREE}

    def plain(self) -> TrainConfig:
        """Return the config without adapters and frozen parts; see `RunConfig.plain`."""
        return dataclasses.replace(self, lora=None, frozen=[])

    def finished(self, folder: str) -> TrainConfig:
        """Return the config of a final model, which was saved with its methods and merged adapters."""
        return dataclasses.replace(self.plain().started_from(folder), routing=None, methods=[])
