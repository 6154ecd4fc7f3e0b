"""The cost of fine-tuning a vision-language model, before it starts: tokens, FLOPs, memory, routed layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from mmod.adapters import BlockStack, find_stacks
from mmod.analysis import PrefillFlops, Prompt, flops
from mmod.analysis.counting import needed_shares
from mmod.analysis.flop_count import vision_flops
from mmod.analysis.flop_report import FlopCounts
from mmod.blocks.routed import RoutedBlock
from mmod.data.files import check_files
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ChatDataset
from mmod.methods.route import capacities, is_routed, routed_blocks
from mmod.plain import without
from mmod.training.chat.config import TrainConfig
from mmod.training.chat.kind import ChatKind
from mmod.training.chat.loop import open_data
from mmod.training.chat.preflight import step_samples, steps_of
from mmod.training.chat.start import router_parameters, sketch_to_train
from mmod.training.chat.trainer import training_arguments
from mmod.training.engine.estimate import RunEstimate, bytes_of, said_reading
from mmod.values import IGNORED

# Encoded conversations, evenly spread over the data.
_SAMPLES = 64
# Arguments of the trainer that need devices and packages which an estimate does not.
_DEVICES = ("bf16", "fp16", "tf32", "fsdp", "fsdp_config", "deepspeed")


@dataclass(frozen=True, kw_only=True)
class ChatEstimate(RunEstimate):
    """The cost of a run on conversations, if neither fsdp nor deepspeed splits the model.

    Activations are inputs and outputs of linear layers, or with gradient checkpointing the inputs of blocks.

    Args:
        tokens: Mean tokens of a conversation, image tokens included.
        longest: Tokens of the longest encoded conversation.
        answers: Mean number of tokens with a label.
        language: FLOPs of the language model for a prompt of mean length; training computes the logits of all tokens.
        vision: Mean FLOPs of vision tower and projector for a conversation.
        dense: FLOPs of the dense model for a conversation.
        tower_trains: The backward pass goes through the vision tower: something in it is trained.
        kept: Kept share by routed block; None for a threshold.
        depth: Number of blocks in the routed parts, or in the language model if none is routed.
    """

    samples: int
    tokens: int
    image_tokens: int
    longest: int
    answers: float
    language: PrefillFlops
    vision: float
    dense: float
    tower_trains: bool
    kept: dict[str, float | None]
    depth: int
    router_parameters: int

    @property
    def step_flops(self) -> float:
        """FLOPs of an optimiser step; a backward pass counts as two forward passes, without a tower that is fixed."""
        if self.tower_trains:
            return super().step_flops
        return super().step_flops - 2 * self.batch * self.vision

    def __str__(self) -> str:
        backward = "" if self.tower_trains else " (no backward pass)"
        lines = [
            super().__str__(),
            f"{self.samples} conversations of {self.tokens} tokens on average, {self.image_tokens} of images and "
            f"{self.answers:.1f} to learn; the longest has {self.longest}",
            f"forward GFLOPs of the vision tower: {self.vision / 1e9:.4g}{backward}; of the dense model: "
            f"{self.dense / 1e9:.4g}",
        ]
        if self.kept:
            routers = f"{self.router_parameters:,} parameters"
            lines.append(f"{len(self.kept)} of {self.depth} layers are routed, by {routers}")
        for name, share in self.kept.items():
            rule = "by threshold" if share is None else f"keeps {share:g}"
            lines.append(f"  {name}: {rule}")
        return "\n".join(lines)


def estimate(kind: ChatKind) -> ChatEstimate:
    """Count what a run would cost from shapes and some of the data, without weights."""
    config: TrainConfig = kind.config
    trainer = without(config.trainer, _DEVICES)
    arguments = training_arguments(replace(config, trainer=trainer))
    check_files(config.data)
    model, processor = sketch_to_train(config)
    collator, _, train, val = open_data(config, processor, arguments, progress=False)

    read = _read(collator, train)
    faults = [*train.report.faults]
    if val is not None:
        faults += val.report.faults
    samples = read.samples
    patches = round(mean(count_patches(model, sample) for sample in samples))

    steps, epoch_steps = steps_of(arguments, len(train))
    blocks: dict[str, RoutedBlock] = {}
    shares: dict[str, float] = {}
    if is_routed(model):
        blocks = routed_blocks(model)
        shares = dict(capacities(model))
    known = needed_shares(model, shares)
    # Before the counts, whose copies of the model then try its blocks no more.
    stacks = find_stacks(model)
    language = flops(model, Prompt(read.tokens - read.image_tokens, read.image_tokens, read.protected), known)
    # The loss reads the logits of every token, and the count has those of one.
    logits = (read.tokens - 1) * language.rest.routed
    dense_vision, vision = _mean_vision(model, samples, known)

    kept = {row.name: row.kept for row in language.blocks}
    # The tolerance covers rounding: 0.29 * 100 is a little below 29.
    for name, share in shares.items():
        kept.setdefault(name, math.floor(patches * share + 1e-9))
    # The arguments leave out what needs a device.
    is_half = bool(config.trainer.get("bf16") or config.trainer.get("fp16"))
    recomputes = bool(arguments.activation_checkpointing)
    held = 0
    for name, stack in stacks.items():
        # Below the language model, a frozen tower has no backward pass.
        if name != "language" and not _is_trained(stack):
            continue
        stack_tokens = patches if name == "image" else read.tokens
        held += _held_bytes(stack, stack_tokens, kept, is_half, recomputes)

    kept_shares: dict[str, float | None] = dict.fromkeys(blocks)
    for name, block in blocks.items():
        # What a threshold keeps depends on the data.
        if block.router.config.select == "topk":
            kept_shares[name] = shares[name]
    routable = config.routing or ["language"]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ChatEstimate(
        samples=len(train),
        epochs=steps / epoch_steps,
        steps=steps,
        batch=step_samples(arguments),
        processes=arguments.world_size,
        tokens=read.tokens,
        image_tokens=read.image_tokens,
        longest=read.longest,
        answers=mean(_count(sample["labels"] != IGNORED) for sample in samples),
        flops={"conversation": language.routed + logits + vision},
        language=language,
        vision=vision,
        dense=language.dense + logits + dense_vision,
        tower_trains="image" in stacks and _is_trained(stacks["image"]),
        kept=kept_shares,
        depth=sum(len(stack.blocks) for name, stack in stacks.items() if name in routable),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        router_parameters=sum(parameter.numel() for parameter in router_parameters(model).values()),
        trained=sum(parameter.numel() for parameter in trained),
        weight_bytes=_weight_bytes(model, config.model.args.get("quantization_config")),
        training_bytes=3 * bytes_of(trained),
        activation_bytes=arguments.train_batch_size * held,
        reading=said_reading([f"{len(samples)} of training with their images, all others without"], faults),
    )


class _Read(NamedTuple):
    """Encoded conversations of the training data, one in a batch, and their mean numbers of tokens."""

    samples: Sequence[Mapping[str, Tensor]]
    tokens: int
    image_tokens: int
    protected: int
    longest: int


def _read(collator: ChatCollator, train: ChatDataset) -> _Read:
    """Encode some conversations, whose faults the data's report then holds."""
    # Evenly over the data, since files are often sorted.
    indices = np.linspace(0, len(train) - 1, min(_SAMPLES, len(train))).astype(int)
    chats = [train[int(index)] for index in indices]
    train.report.add(chain.from_iterable(chat.faults for chat in chats))
    samples = [collator([chat]) for chat in chats]
    lengths = [sample["input_ids"].shape[1] for sample in samples]
    tokens = round(mean(lengths))
    image_token = collator.processor.image_token_id
    image_tokens = round(mean(_count(sample["input_ids"] == image_token) for sample in samples))
    protected = 0
    if collator.protected is not None:
        protected = round(mean(_count(sample["protected_mask"]) for sample in samples))
    # Text that is protected cannot be more than there is: each mean is rounded by itself.
    return _Read(samples, tokens, image_tokens, min(protected, tokens - image_tokens), max(lengths))


def _mean_vision(
    model: nn.Module, samples: Sequence[Mapping[str, Tensor]], shares: Mapping[str, float] | None
) -> tuple[float, float]:
    """Return the mean FLOPs of vision tower and projector for a conversation, dense and with the model's methods."""
    counted: dict[object, FlopCounts] = {}
    dense = routed = 0
    for sample in samples:
        if count_patches(model, sample):
            # Images of one size cost the same.
            shapes = {name: value.shape for name, value in sample.items() if name.startswith(("pixel", "image"))}
            sizes = str((shapes, sample.get("image_grid_thw")))
            if sizes not in counted:
                counted[sizes] = vision_flops(model, sample, shares)
            dense += counted[sizes].dense
            routed += counted[sizes].routed
    return dense / len(samples), routed / len(samples)


def _count(mask: Tensor) -> float:
    return float(mask.sum())


def _weight_bytes(model: Any, quantization: Mapping[str, Any] | None) -> int:
    """Return the memory of the weights, with linear layers quantized as bitsandbytes does it."""
    total = bytes_of(model.parameters())
    if quantization is None:
        return total
    bits = next((bits for bits in (4, 8) if quantization.get(f"load_in_{bits}bit")), None)
    if bits is None:
        raise ValueError(f"an estimate knows load_in_4bit and load_in_8bit, not the quantization {dict(quantization)}")
    inner = model.get_base_model()
    skipped = quantization.get("llm_int8_skip_modules") or get_keys_to_not_convert(inner)
    for name, module in inner.named_modules():
        # Adapters are not quantized, nor are routers, whose layers are a subclass.
        # Quantized weights take so many bits in place of those of their dtype.
        if type(module) is nn.Linear and ".lora_" not in name and should_convert_module(name, skipped):
            total -= module.weight.numel() * (8 * module.weight.element_size() - bits) // 8
    return total


def count_patches(model: Any, batch: Mapping[str, Tensor]) -> int:
    """Return the number of patches in the vision tower's layers for a conversation."""
    if "image_grid_thw" in batch:
        return int(batch["image_grid_thw"].prod(-1).sum())
    if "pixel_values" not in batch:
        return 0
    *images, _, height, width = batch["pixel_values"].shape
    side = model.config.vision_config.patch_size
    if isinstance(side, int):
        side = (side, side)
    down, across = side
    return math.prod(images) * (height // down) * (width // across)


def _is_trained(stack: BlockStack) -> bool:
    """Return whether training changes a weight of the stack's blocks."""
    weights = chain.from_iterable(block.parameters() for block in stack.blocks)
    return any(weight.requires_grad for weight in weights)


def _held_bytes(stack: BlockStack, tokens: int, kept: Mapping[str, int], is_half: bool, recomputed: bool) -> int:
    """Return the memory that the blocks of a stack hold for their backward pass; `recomputed`: their inputs alone."""
    total = 0
    for name, block in zip(stack.names, stack.blocks):
        held = stack.dim * tokens
        if not recomputed:
            # What a linear layer reads and writes is held for its gradient.
            linear = [part for part in block.modules() if isinstance(part, nn.Linear)]
            widths = sum(part.in_features + part.out_features for part in linear)
            held += kept.get(name, tokens) * widths
        element_size = 2 if is_half else next(block.parameters()).element_size()
        total += held * element_size
    return total
