"""The configuration of fine-tuning a vision-language model on image conversations."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from mmod.config import RoutingConfig
from mmod.data.readers.conversations import ConversationsConfig
from mmod.training.engine.config import RunConfig, check_sizes
from mmod.values import check_fields, check_value

__all__ = ["ModelConfig", "TrainConfig"]

TOWERS = ("vision", "projector", "language")
WITHOUT_WEIGHTS = ("dtype", "attn_implementation")
"""Arguments of `from_pretrained` that a model of random weights takes, too."""
# What the run itself decides.
_TAKEN = ("output_dir", "seed", "data_seed", "remove_unused_columns", "label_names", "eval_strategy", "do_train")
# Arguments of the trainer that say how to watch and how to store, not what comes out.
_FREE = ("logging_steps", "save_steps", "save_total_limit", "report_to", "disable_tqdm", "dataloader_num_workers")
# Numbers that the trainer and peft take as they come, and what makes sense of them.
_TRAINER: dict[str, tuple[Any, str]] = {
    "learning_rate": (float, "[0, inf)"),
    "weight_decay": (float, "[0, inf)"),
    "max_grad_norm": (float, "[0, inf)"),
    "num_train_epochs": (float, "(0, inf)"),
    "max_steps": (int, "[-1, inf)"),
    "per_device_train_batch_size": (int, "[1, inf)"),
    "gradient_accumulation_steps": (int, "[1, inf)"),
    "warmup_steps": (float, "[0, inf)"),
    "warmup_ratio": (float, "[0, 1]"),
    "adam_beta1": (float, "[0, 1)"),
    "adam_beta2": (float, "[0, 1)"),
    "adam_epsilon": (float, "(0, inf)"),
    "label_smoothing_factor": (float, "[0, 1)"),
    "dataloader_num_workers": (int, "[0, inf)"),
    "logging_steps": (float, "(0, inf)"),
    "save_steps": (float, "(0, inf)"),
    "save_total_limit": (int, "[1, inf)"),
}
_LORA: dict[str, tuple[Any, str]] = {
    "r": (int, "[1, inf)"),
    "lora_alpha": (float, "(0, inf)"),
    "lora_dropout": (float, "[0, 1)"),
}


@dataclass(frozen=True)
class ModelConfig:
    """Which model is fine-tuned and from which weights.

    Args:
        checkpoint: Folder, or name on the hub, of a transformers model, dense or saved while it was routed.
        config: Instead of a checkpoint, fields of a transformers config with its `model_type`: random weights.
        processor: Folder or name of the processor; None is the checkpoint's. "words" is that of the embedded questions,
            which also gives `config` its vocabulary and special tokens.
        args: Further arguments of `from_pretrained`, such as `dtype`, `attn_implementation` or `quantization_config`;
            with `config` the first two.
        image_size: Side in pixels of the images that a LLaVA-like model reads, whose number of image tokens falls with
            it: position embeddings are resampled. None is the model's own.
    """

    checkpoint: str | None = None
    config: dict[str, Any] | None = None
    processor: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    image_size: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "model", image_size="[1, inf)")
        if (self.checkpoint is None) == (self.config is None):
            raise ValueError("give either model.checkpoint or model.config")
        if self.config is not None and self.processor is None:
            raise ValueError("model.config needs model.processor: a folder, a name, or 'words'")
        check_sizes(self.config or {}, "model.config")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError(f"model.config needs a model_type, got {', '.join(self.config) or 'nothing'}")
        foreign = sorted(set(self.args) - set(WITHOUT_WEIGHTS))
        if self.config is not None and foreign:
            known = " and ".join(WITHOUT_WEIGHTS)
            raise ValueError(f"model.args {', '.join(foreign)} need a checkpoint; random weights take {known}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Everything that decides the outcome of fine-tuning on image conversations.

    The run folder's `model/` gets the model, `checkpoints/` those of the trainer.

    Args:
        model: The model and its starting weights.
        data: The conversations.
        routing: None trains the model as it is. Otherwise the name of each part to route (`language`, `vision`) to its
            routing: fields of `mmod.RoutingConfig`, or `preset: NAME` with the fields to change; a preset is told the
            part's depth.
        lora: None trains the weights themselves. Otherwise fields of `peft.LoraConfig`: adapters are trained beside
            the routers, and merged into the model that is saved at the end.
        frozen: Parts whose weights stay as they are: "vision", "projector", "language". Routers always learn.
        optim: Name of one of timm's optimisers, such as "muon", in place of the trainer's own. It gets the trainer's
            learning rate and weight decay.
        trainer: Arguments of `transformers.TrainingArguments`: learning rate, batch size, epochs, `fsdp`,
            `deepspeed`, `gradient_checkpointing` and so on.
        eval_batch_size: Questions answered at once in the evaluation after training.
        max_new_tokens: Longest answer, in tokens.
    """

    model: ModelConfig
    data: ConversationsConfig = field(default_factory=ConversationsConfig)
    routing: dict[str, dict[str, Any]] | None = None
    lora: dict[str, Any] | None = None
    frozen: list[str] = field(default_factory=list)
    optim: str | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    eval_batch_size: int = 32
    max_new_tokens: int = 16

    def __post_init__(self) -> None:
        self.check(frozen=TOWERS, eval_batch_size="[1, inf)", max_new_tokens="[1, inf)")
        for group, limits in (("trainer", _TRAINER), ("lora", _LORA)):
            given = getattr(self, group) or {}
            for name in sorted(limits.keys() & given.keys()):
                check_value(f"{group}.{name}", given[name], *limits[name])
        taken = sorted(set(_TAKEN) & set(self.trainer))
        if taken:
            raise ValueError(f"trainer must not set {', '.join(taken)}: the run sets them")
        if self.data.val is not None and self.is_sharded:
            raise ValueError(
                "answers are not generated while the model is split by fsdp or deepspeed: set data.val: null"
            )
        if self.model.args.get("quantization_config") is not None:
            if self.lora is None:
                raise ValueError("quantized weights are not trained: give lora, whose adapters are")
            if self.is_sharded:
                raise ValueError("quantized weights are not split by fsdp or deepspeed here: use plain torchrun")
        for fields in (self.routing or {}).values():
            # A preset is told the depth of its part, which only the model says; a plan's file is read with the model.
            if not {"preset", "plan"} & set(fields):
                RoutingConfig.from_dict(fields)
        if self.routing is not None and not self.routing:
            raise ValueError("routing names no part; use `routing: null` for none")

    def at_size(self, side: int) -> TrainConfig:
        """Return the same run on images of another size, see `ModelConfig`.

        Args:
            side: Side of the images in pixels.
        """
        return dataclasses.replace(self, model=dataclasses.replace(self.model, image_size=side))

    @property
    def is_sharded(self) -> bool:
        """Whether the model's weights are split over processes."""
        return bool(self.trainer.get("fsdp") or self.trainer.get("deepspeed"))

    @property
    def free_keys(self) -> frozenset[str]:
        """Keys in which a continued run may differ; see `RunConfig.free_keys`."""
        return super().free_keys | {"data.root", "eval_batch_size", *(f"trainer.{name}" for name in _FREE)}
