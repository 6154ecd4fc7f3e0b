"""FLOPs by block, parameters and activation memory of a model, from shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mmod.adapters import BlockStack, adapted_model, find_library, find_parts, find_stacks
from mmod.adapters.images import image_facts
from mmod.adapters.probe import channels_of
from mmod.adapters.tokens import Tokens, declared, proofs_of, restore_proofs
from mmod.analysis.counting import (
    PassCounts,
    by_data,
    count_pass,
    meta_copy,
    run_model,
    to_meta,
    training_bytes,
)
from mmod.analysis.flop_report import REST, BlockFlops, FlopCounts, FlopReport, PrefillFlops
from mmod.analysis.prefill import Prefill, Prompt, VisionPass, language_stack, shares_of_free
from mmod.analysis.tracing import Trace
from mmod.blocks import Deciding, ImportanceBlock, Mixin, RoutedBlock, deciding_modules
from mmod.blocks.hook import ModelHook
from mmod.methods.base import methods_inside, restore_
from mmod.values import brief, check_module, check_value

Counts = TypeVar("Counts")
Size = int | tuple[int, int] | tuple[int, int, int] | Mapping[str, object]
# What `kept` of `flops` may be.
Shares = float | Mapping[str, float] | Trace | None


@overload
def flops(
    model: nn.Module, input_size: Prompt, kept: float | Mapping[str, float] | Trace | None = None
) -> PrefillFlops: ...


@overload
def flops(
    model: nn.Module, input_size: Size, kept: float | Mapping[str, float] | Trace | None = None
) -> FlopReport: ...


def flops(
    model: nn.Module, input_size: Size | Prompt, kept: float | Mapping[str, float] | Trace | None = None
) -> FlopReport | PrefillFlops:
    """Count the FLOPs and activation memory of a model for one image, caption or prompt, without running it.

    One FLOP is one multiplication or one addition: a matrix product of (n, k) and (k, m) has `2 n k m`. Norms,
    activations, softmax, sorting and row movement count nothing. The model runs on the meta device, with the formulas
    of `torch.utils.flop_counter` and formulas for matrix-vector products.

    Importance counts as an additional product of queries and keys, as on a GPU and in dtypes other than fp32. Attention
    in fp32 on a CPU computes importance from its probabilities and saves `report.importance` FLOPs, except those of the
    one query that "class_token" reads.

    Where images are kept or skipped as a whole, counts are means over images and memory is that of a kept image. Memory
    is that of activations in the parameters' dtype, with attention that stores no map.

    For a `Prompt`, the layers of a transformers model's language model and the logits of the last token are counted; no
    memory is. Attention counts all pairs of queries and keys that are computed, as `torch.utils.flop_counter` does.
    With `pixels` of the prompt, vision tower and projector are counted too: values of images are read, those of weights
    not. Where weights decide how many tokens each window of a tower keeps, attention among all kept tokens of an image
    is counted: a few percent too much.

    Args:
        model: A model of a supported library or a part of one, such as `clip.visual`, routed or dense; it stays
            unchanged. Methods for training alone count in training mode only. A model without blocks that can be
            routed, such as a ResNet, is counted as a whole.
        input_size: Height and width of the image, channels in front of them if they are not the model's, or one number
            for a square. Or the model's arguments by name: `{"text": ids}` counts the text tower of a CLIP model; they
            are also the example by which blocks of your own model are found. Or the `Prompt` of a language model, as
            numbers of tokens.
        kept: For threshold routing, whose cost depends on the data: share of tokens (or images) kept in [0, 1], for
            all routed blocks or by module name, or a trace over representative images. Counts are rounded down to
            tokens. Blocks with `max_tokens` run that many slots, including empty ones. For a `Prompt`, shares of the
            tokens that may be skipped.

    Raises:
        ValueError: An unsupported model, threshold routing without `kept`, `kept` for a model without threshold
            routing, a routed language model or shared layers without a `Prompt`, or an operation that cannot be
            counted.

    Example:
        >>> import timm, mmod
        >>> model = mmod.route_(timm.create_model("test_vit"), mmod.RoutingConfig(capacity=0.25))
        >>> round(flops(model, 160).share, 2)
        0.71
    """
    return _flops(model, input_size, kept, _Dense())


def flops_of_each(
    model: nn.Module, input_size: Size | Prompt, changes: Iterable[AbstractContextManager[object]]
) -> Iterator[FlopReport | PrefillFlops]:
    """Yield the `flops` of a model in each of the contexts, which change it; the dense model is counted once."""
    dense = _Dense()
    for change in changes:
        with change:
            yield _flops(model, input_size, None, dense)


class _Dense:
    """The dense model of one on the meta device, and its counts once they are made."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.counts: Any = None

    def of(self, routed: nn.Module) -> nn.Module:
        if self.model is None or not methods_inside(routed):
            self.model = _dense(routed)
        return self.model

    def counted(self, count: Callable[[], Counts]) -> Counts:
        if self.counts is None:
            self.counts = count()
        return self.counts


# In inference mode torch runs a linear layer as one operation, which is no product of matrices to a counter.
@torch.inference_mode(False)
def _flops(
    model: nn.Module,
    input_size: Size | Prompt,
    kept: Shares,
    beside: _Dense,
) -> FlopReport | PrefillFlops:
    check_module(model)
    if isinstance(input_size, Prompt):
        return _count_prefill(model, input_size, kept, beside)
    routed = meta_copy(model)
    images = _fix_shares(deciding_modules(routed), kept)
    dense = beside.of(routed)
    stacks = _stacks(dense, input_size)
    _check_language(routed, stacks)
    inputs = _inputs(dense, stacks, input_size)
    try:
        dense_count, dense_bytes = beside.counted(partial(_count, dense, stacks, inputs))
    except NotImplementedError as error:
        raise _unreadable(model, ", ".join(inputs), error) from error
    except (AssertionError, RuntimeError) as error:
        # As timm's models refuse the size of an image, and as torch refuses sums of positions in your own.
        shapes = [f"{name} {shape}" for name, shape in _shapes(inputs).items()]
        raise ValueError(f"this {type(model).__name__} cannot take {', '.join(shapes)}: {error}") from error
    routed_count, routed_bytes = dense_count, dense_bytes
    if dense is not routed:
        routed_count, routed_bytes = _count(routed, stacks, inputs)
    dense_parameters = sum(parameter.numel() for parameter in dense.parameters())
    parameters = sum(parameter.numel() for parameter in routed.parameters())
    return FlopReport(
        inputs=_shapes(inputs),
        blocks=_rows(routed, stacks.values(), dense_count, routed_count, images),
        rest=BlockFlops(REST, 0, 0, _outside(dense_count), _outside(routed_count)),
        parameters=parameters,
        added_parameters=parameters - dense_parameters,
        dense_activation_bytes=dense_count.activation_bytes,
        activation_bytes=routed_count.activation_bytes,
        dense_training_bytes=dense_bytes,
        training_bytes=routed_bytes,
    )


def _count_prefill(model: nn.Module, prompt: Prompt, kept: Shares, beside: _Dense) -> PrefillFlops:
    """Count one prefill of a language model, dense and routed: its layers and the logits of its last token."""
    routed = meta_copy(model)
    dense = beside.of(routed)
    stack = language_stack(dense)
    if len(_blocks(routed, stack)) < len(stack.blocks):
        raise ValueError("a model with shared layers is counted as a whole: mmod.flops(model, {'input_ids': ids})")
    prefill = Prefill(routed, stack, prompt)
    free = sum(prefill.free)
    # Not those of a vision tower.
    deciding = {name: one for name, one in deciding_modules(routed).items() if name.startswith(stack.block_list)}
    shares = shares_of_free(model, _needed_of(deciding, model, kept))
    images = _fix_shares(deciding, shares, free)
    for name in images:
        block = routed.get_submodule(name)
        if isinstance(block, RoutedBlock):
            # Of text, a layer runs one token at the least, which is subtracted from the count.
            block.router.capacity = Fraction(int(prefill.skips_text), max(1, free))
    routed_count, caches = _run_prefill(routed, stack, prefill)
    dense_count = routed_count
    dense_caches = caches
    if dense is not routed:
        dense_count, dense_caches = beside.counted(lambda: _run_prefill(dense, stack, Prefill(dense, stack, prompt)))
    if not prefill.skips_text:
        # Text runs in any case: no prompt is skipped as a whole.
        images = {}
    rows = _rows(routed, [stack], dense_count, routed_count, images)
    cached = [cache.keys.shape[-2] for cache in caches]
    # The last layers may have no keys of their own.
    cached += [0] * (len(rows) - len(caches))
    blocks = tuple(dataclasses.replace(row, cached=keys) for row, keys in zip(rows, cached))
    head = sum(routed_count.flops[name] for name in prefill.heads)
    rest = BlockFlops(REST, 0, 0, head, head)
    vision = None
    if prompt.pixels is not None:
        vision = vision_flops(model, prompt.pixels, kept)
        blocks = (*vision.blocks, *blocks)
        rest = BlockFlops(REST, 0, 0, head + vision.rest.dense, head + vision.rest.routed)
    return PrefillFlops(
        blocks=blocks,
        rest=rest,
        tokens=prompt.tokens,
        image_tokens=sum(prompt.images),
        cache_bytes=_bytes(caches),
        dense_cache_bytes=_bytes(dense_caches),
        vision=vision,
    )


@torch.inference_mode(False)
def vision_flops(
    model: nn.Module, inputs: Mapping[str, object], kept: float | Mapping[str, float] | Trace | None = None
) -> FlopCounts:
    """Count what a vision-language model of transformers computes for images before its language model reads them.

    `rest` is all but the tower's layers: patch embedding and projector.

    Args:
        inputs: What its processor returned for prompts with these images.
        kept: As of `mmod.flops`, by module name or a trace.
    """
    routed = meta_copy(model)
    text = language_stack(model).block_list
    # The pass is counted once where methods changed the language model alone.
    dense = routed
    if _changes_images(routed, text):
        dense = _dense(routed)
    stack = _stacks(dense, 1).get("image")
    deciding = {name: one for name, one in deciding_modules(routed).items() if not name.startswith(text)}
    images = _fix_shares(deciding, _needed_of(deciding, model, kept))
    routed_count = _run_images(routed, stack, inputs)
    dense_count = routed_count
    if dense is not routed:
        dense_count = _run_images(dense, stack, inputs)
    stacks = [] if stack is None else [stack]
    return FlopCounts(
        blocks=_rows(routed, stacks, dense_count, routed_count, images),
        rest=BlockFlops(REST, 0, 0, _outside(dense_count), _outside(routed_count)),
    )


def _changes_images(model: nn.Module, layers: str) -> bool:
    """Return whether a method changed modules that are neither among a language model's layers nor around them."""
    for name, module in model.named_modules():
        is_among_layers = f"{name}.".startswith(f"{layers}.")
        # The model itself, which has no name, is around them too.
        is_around_layers = not name or f"{layers}.".startswith(f"{name}.")
        if is_among_layers or is_around_layers:
            continue
        if isinstance(module, Mixin):
            return True
        if any(isinstance(hook, ModelHook) for hook in module._forward_pre_hooks.values()):
            return True
    return False


def _run_images(model: nn.Module, stack: BlockStack | None, inputs: Mapping[str, object]) -> PassCounts:
    """Count a pass over images on the meta device."""
    reader = VisionPass(model, inputs)
    blocks = {}
    if stack is not None:
        blocks = _blocks(model, stack)
    try:
        return count_pass(model, blocks, reader.inputs, reader.run)
    except NotImplementedError as error:
        raise _unreadable(model, "its image tokens", error) from error


def _needed_of(deciding: Mapping[str, Deciding], model: nn.Module, kept: Shares) -> Shares:
    """Return kept shares for one part of a model: None where the cost of another part alone follows from the data."""
    of_part = any(module.mod_cost_follows_data for module in deciding.values())
    if not of_part and by_data(model):
        return None
    return kept


def _run_prefill(model: nn.Module, stack: BlockStack, prefill: Prefill) -> tuple[PassCounts, Sequence[Any]]:
    """Count the prefill of a language model on the meta device; also return the layers of its cache."""
    caches: list[object] = []

    def run() -> None:
        caches.extend(prefill.run().layers)

    try:
        with torch.device("meta"):
            counts = count_pass(model, _blocks(model, stack), prefill.inputs, run)
    except NotImplementedError as error:
        raise _unreadable(model, "its tokens", error) from error
    except (AssertionError, RuntimeError, ValueError) as error:
        # Some hosts, such as MiniMax, refuse all caches but their own; other messages of ValueErrors are the model's.
        if isinstance(error, ValueError) and "DynamicCache" not in str(error):
            raise
        raise ValueError(
            f"this {type(model).__name__} cannot read a prompt by shapes alone: {error}; count a batch by "
            "mmod.flops(model, batch)"
        ) from error
    return counts, caches


def _bytes(caches: Sequence[Any]) -> int:
    return sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)


def _unreadable(model: nn.Module, what: str, error: Exception) -> ValueError:
    """Return the error for a model that does not run on the meta device, whose tensors have no values."""
    does = f"reads the values of {what}"
    if "fake impl" in str(error):
        # As that of a layer quantized by torch: its name comes first.
        does = f"runs {str(error).partition(': ')[0]}"
    return ValueError(
        f"this {type(model).__name__} {does}, and FLOPs are counted from shapes alone: time it, or count another part"
    )


def _dense(routed: nn.Module) -> nn.Module:
    """Return the dense model of one on the meta device, which itself stays unchanged: itself if nothing changed it."""
    if not methods_inside(routed):
        return routed
    dense = restore_(meta_copy(routed))
    # How its blocks are called is known already.
    restore_proofs(dense, proofs_of(routed))
    return dense


def _rows(
    routed: nn.Module,
    stacks: Iterable[BlockStack],
    dense_count: PassCounts,
    routed_count: PassCounts,
    images: Mapping[str, float],
) -> tuple[BlockFlops, ...]:
    """Return the rows of the blocks that ran: one that the input does not reach, as of another tower, has none."""
    rows = []
    for stack in stacks:
        for name, block, dense_names in _paired(routed, stack):
            if name in routed_count.tokens:
                rows.append(_row(name, block, dense_names, dense_count, routed_count, images.get(name)))
    return tuple(rows)


def _check_language(model: nn.Module, stacks: Mapping[str, BlockStack]) -> None:
    """Raise a ValueError if blocks of a language model are routed."""
    for stack in stacks.values():
        if stack.language and any(isinstance(block, RoutedBlock) for block in _blocks(model, stack).values()):
            raise ValueError(
                "which tokens a routed language model may skip follows from the ids, which are not read here: use "
                "mmod.flops(model, mmod.Prompt(text_tokens, image_tokens))"
            )


def _count(model: nn.Module, stacks: Mapping[str, BlockStack], inputs: Mapping[str, object]) -> tuple[PassCounts, int]:
    """Count one pass of a model on the meta device, and the bytes that it holds for the backward pass."""
    blocks: dict[str, nn.Module] = {}
    for stack in stacks.values():
        blocks |= _blocks(model, stack)
    # Hosts may make positions in their forward without saying where.
    with torch.device("meta"):
        return count_pass(model, blocks, inputs, partial(run_model, model, inputs)), training_bytes(model, inputs)


def _blocks(model: nn.Module, stack: BlockStack) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, from the stack of its dense version."""
    children = model.get_submodule(stack.block_list).named_children()
    return {f"{stack.block_list}.{name}": block for name, block in children}


def _outside(count: PassCounts) -> int:
    return count.flops[""] - sum(count.flops[name] for name in count.tokens)


def _paired(model: nn.Module, stack: BlockStack) -> Iterator[tuple[str, nn.Module, Sequence[str]]]:
    """Yield the blocks of a changed model, with the names of the dense blocks that each one replaces."""
    first = 0
    for name, block in _blocks(model, stack).items():
        count = 1
        if isinstance(block, Deciding):
            # A module of a method may stand for several dense blocks, such as a recursion.
            count = block.mod_dense_blocks
        yield name, block, stack.names[first : first + count]
        first += count


def _row(
    name: str, block: nn.Module, dense_names: Sequence[str], dense: PassCounts, routed: PassCounts, images: float | None
) -> BlockFlops:
    total = routed.flops[name]
    router = routed.flops[f"{name}.router"]
    for inner, module in block.named_modules():
        if not inner or not isinstance(module, Deciding):
            continue
        for scorer in module.mod_scorers():
            router += routed.flops[f"{name}.{inner}.{scorer}"]
    baseline = sum(dense.flops[dense_name] for dense_name in dense_names)
    tokens = dense.tokens[dense_names[0]]
    importance = _importance(name, block, baseline, dense, routed)
    kept = routed.kept.get(name, routed.tokens[name])
    if images is not None:
        assert isinstance(block, Deciding)
        # The pass ran all images, so the FLOPs that skipped images save are subtracted.
        total = total - round((1 - images) * block.mod_missed(routed.flops, name))
        kept = int(images * kept)
    return BlockFlops(name, tokens, kept, baseline, total, router, importance)


def _importance(name: str, block: nn.Module, baseline: int, dense: PassCounts, routed: PassCounts) -> int:
    """Return the FLOPs of importance: in a dense block those beyond the baseline, in a routed one of attention."""
    if isinstance(block, ImportanceBlock):
        # A block that reads all images as one sequence attends to each by itself, so that it may even cost less.
        return max(0, routed.flops[name] - baseline)
    if not isinstance(block, RoutedBlock) or not block.mod_state.observes:
        return 0
    # Its attention comes before the decision and runs on all tokens, as in the dense model.
    operators = block.mod_state.call.operators
    attention = f"{name}.{operators['attention']}"
    return routed.flops[attention] - dense.flops[attention]


def _fix_shares(deciding: Mapping[str, Deciding], kept: Shares, free: int = 0) -> dict[str, float]:
    """Fix the kept shares of modules whose cost depends on the data; return the shares of images by module.

    Args:
        free: Tokens that may be skipped, of which shares are whole numbers; 0 if it is not known.
    """
    by_data = {name: module for name, module in deciding.items() if module.mod_cost_follows_data}
    if kept is not None and not isinstance(kept, Trace) and not by_data:
        raise ValueError(
            "leave kept out: it is for models that decide by a threshold, whose cost follows from the data; this one's "
            "follows from its config. Only a trace, kept=decisions, may be passed with any model"
        )
    if not by_data:
        return {}
    if kept is None:
        raise ValueError(
            f"the cost of {_first_of(by_data)} follows from the data: pass kept=, "
            "the share of tokens or images that they keep, or `decisions` of `with mmod.trace(model) as decisions`, in "
            "which the model saw representative images"
        )
    shares = kept.kept_shares() if isinstance(kept, Trace) else kept
    if not isinstance(shares, Mapping):
        shares = dict.fromkeys(by_data, shares)
    missing = [name for name in by_data if name not in shares]
    if missing:
        names = "it is empty: run the model within `mmod.trace`"
        if shares:
            names = f"it names {', '.join(shares)}"
        raise ValueError(f"kept names no share for {_first_of(missing)}; {names}")
    images = {}
    for name, module in by_data.items():
        check_value(f"the kept share of {name}", shares[name], float, "[0, 1]")
        share = float(shares[name])
        if free:
            share = int(free * share) / free
        images[name] = module.mod_assume_kept(share)
    return {name: share for name, share in images.items() if share < 1}


def _first_of(names: Iterable[str]) -> str:
    first, *others = names
    if not others:
        return first
    return f"{first} and {len(others)} more"


def _stacks(model: nn.Module, input_size: Size) -> dict[str, BlockStack]:
    """Return the stacks of blocks that have a row in the report; none if nothing in the model can be routed."""
    example = None
    if isinstance(input_size, Mapping) and find_library(model) is None:
        example = Tokens(example=input_size)
    try:
        with declared(adapted_model(model), example):
            return find_stacks(model)
    except ValueError:
        return {}


def _shapes(inputs: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's arguments for one image, of those that are tensors."""
    return {name: tuple(value.shape[1:]) for name, value in inputs.items() if isinstance(value, Tensor)}


def _inputs(model: nn.Module, stacks: Mapping[str, BlockStack], input_size: Size) -> dict[str, object]:
    """Return a model's arguments by name, without data."""
    if isinstance(input_size, Mapping):
        leaves = tree_leaves(dict(input_size))
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            return {name: tree_map(to_meta, value) for name, value in input_size.items()}
    parts = find_parts(model)
    # A model of transformers with a vision tower may read text that no part knows.
    if "image" not in parts or "language" in parts or hasattr(model, "get_image_features"):
        raise ValueError(f"this {type(model).__name__} takes more than an image: give its arguments by name")
    size: Any = input_size
    if isinstance(size, int):
        size = (size, size)
    channels = image_facts(model).channels
    if isinstance(size, (tuple, list)) and len(size) == 2:
        size = (channels or channels_of(model), *size)
    is_shape = isinstance(size, (tuple, list)) and len(size) == 3
    if not is_shape or not all(isinstance(side, int) and side > 0 for side in size):
        # A batch of images, in place of the size of one.
        hint = ""
        if isinstance(input_size, Tensor) and input_size.ndim == 4:
            hint = f": pass {tuple(input_size.shape[1:])}"
        raise ValueError(
            "input_size must be (channels, height, width), (height, width), one number or arguments by name, got "
            f"{brief(input_size)}{hint}"
        )
    if channels not in (None, size[0]):
        raise ValueError(f"this {type(model).__name__} cannot take image {tuple(size)}: it reads {channels} channels")
    dtype = next(model.parameters()).dtype
    inputs: dict[str, object] = {"image": torch.empty(1, *size, device="meta", dtype=dtype)}
    for name, stack in stacks.items():
        if stack.sequence is not None:
            inputs[name] = torch.zeros(1, stack.sequence, dtype=torch.int64, device="meta")
    return inputs
