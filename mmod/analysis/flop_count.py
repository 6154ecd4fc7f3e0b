"""FLOPs by block, parameters and activation memory of a model, from shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from mmod.adapters import BlockStack, adapted_model, find_library, find_parts, find_stacks
from mmod.adapters.images import image_facts
from mmod.adapters.tokens import Tokens, declared, proofs_of, restore_proofs
from mmod.analysis.counting import PassCounts, count_pass, pass_flops
from mmod.analysis.flop_report import REST, BlockFlops, FlopReport, PrefillFlops
from mmod.analysis.prefill import Prompt, check_read, count_prefill
from mmod.analysis.tracing import Trace
from mmod.blocks import Deciding, ImportanceBlock, RoutedBlock, deciding_modules
from mmod.methods.base import methods_inside, restore_
from mmod.values import brief, check_module, check_value

Size = int | tuple[int, int] | tuple[int, int, int] | Mapping[str, Any]


@overload
def flops(
    model: nn.Module, input_size: Prompt, kept: float | Mapping[str, float] | Trace | None = None
) -> PrefillFlops: ...


@overload
def flops(
    model: nn.Module, input_size: Size, kept: float | Mapping[str, float] | Trace | None = None
) -> FlopReport: ...


# In inference mode torch runs a linear layer as one operation, which is no product of matrices to a counter.
@torch.inference_mode(False)
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

    For a `Prompt`, the language model of a transformers model is counted from its layers alone: neither vision tower
    nor memory, and all pairs of queries and keys that are computed, as `torch.utils.flop_counter` does.

    Args:
        model: A model of a supported library or a part of one, such as `clip.visual`, routed or dense; it stays
            unchanged. With methods for training alone, what it costs in its mode is counted. A model without blocks
            that can be routed, such as a ResNet, is counted as a whole.
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
    check_module(model)
    if isinstance(input_size, Prompt):
        return count_prefill(model, input_size, kept)
    routed = meta_copy(model)
    images = _fix_shares(routed, kept)
    # Undone on the copy, so that the model itself is never touched.
    dense = routed
    if methods_inside(routed):
        dense = restore_(meta_copy(routed))
        # How its blocks are called is known already.
        restore_proofs(dense, proofs_of(routed))
    stacks = _stacks(dense, input_size)
    _check_language(routed, stacks)
    inputs = _inputs(dense, stacks, input_size)
    try:
        dense_count = _count(dense, stacks, inputs)
    except NotImplementedError as error:
        # As of torch, for values of meta tensors.
        raise ValueError(
            f"this {type(model).__name__} reads the values of {', '.join(inputs)}, and FLOPs are counted from shapes "
            "alone: time it, or count another part"
        ) from error
    except (AssertionError, RuntimeError) as error:
        # As timm's models refuse the size of an image, and as torch refuses sums of positions in your own.
        shapes = ", ".join(f"{name} {shape}" for name, shape in _shapes(inputs).items())
        raise ValueError(f"this {type(model).__name__} cannot take {shapes}: {error}") from error
    routed_count = dense_count if dense is routed else _count(routed, stacks, inputs)
    rows = []
    for stack in stacks.values():
        for name, block, dense_names in _paired(routed, stack):
            # A block that the input does not reach, such as one of the other tower, has no row.
            if name in routed_count.tokens:
                rows.append(_row(name, block, dense_names, dense_count, routed_count, images.get(name)))
    dense_parameters = sum(parameter.numel() for parameter in dense.parameters())
    parameters = sum(parameter.numel() for parameter in routed.parameters())
    return FlopReport(
        inputs=_shapes(inputs),
        blocks=tuple(rows),
        rest=BlockFlops(REST, 0, 0, _outside(dense_count), _outside(routed_count)),
        parameters=parameters,
        added_parameters=parameters - dense_parameters,
        dense_activation_bytes=dense_count.activation_bytes,
        activation_bytes=routed_count.activation_bytes,
        dense_training_bytes=dense_count.training_bytes,
        training_bytes=routed_count.training_bytes,
    )


def _check_language(model: nn.Module, stacks: Mapping[str, BlockStack]) -> None:
    """Raise a ValueError if blocks of a language model are routed."""
    for stack in stacks.values():
        if stack.language and any(isinstance(block, RoutedBlock) for block in _blocks(model, stack).values()):
            raise ValueError(
                "which tokens a routed language model may skip follows from the ids, which are not read here: use "
                "mmod.flops(model, mmod.Prompt(text_tokens, image_tokens))"
            )


def _count(model: nn.Module, stacks: Mapping[str, BlockStack], inputs: Mapping[str, Tensor]) -> PassCounts:
    """Count one pass of a model on the meta device, with the costs of its blocks by themselves."""
    blocks: dict[str, nn.Module] = {}
    for stack in stacks.values():
        blocks |= _blocks(model, stack)
    # Hosts may make positions in their forward without saying where.
    with torch.device("meta"):
        return count_pass(model, blocks, inputs)


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
        # A module of a method may stand for several dense blocks, such as a recursion.
        count = block.dense_blocks if isinstance(block, Deciding) else 1
        yield name, block, stack.names[first : first + count]
        first += count


def _row(
    name: str, block: nn.Module, dense_names: Sequence[str], dense: PassCounts, routed: PassCounts, images: float | None
) -> BlockFlops:
    total = routed.flops[name]
    router = routed.flops[f"{name}.router"]
    baseline = sum(dense.flops[dense_name] for dense_name in dense_names)
    tokens = dense.tokens[dense_names[0]]
    importance = _importance(name, block, baseline, dense, routed)
    kept = routed.kept.get(name, routed.tokens[name])
    if images is not None:
        assert isinstance(block, Deciding)
        # The pass ran all images, so the FLOPs that skipped images save are subtracted.
        total = total - round((1 - images) * block.missed(routed.flops, name))
        kept = int(images * kept)
    return BlockFlops(name, tokens, kept, baseline, total, router, importance)


def _importance(name: str, block: nn.Module, baseline: int, dense: PassCounts, routed: PassCounts) -> int:
    """Return the FLOPs of importance: in a dense block those beyond the baseline, in a routed one of attention."""
    if isinstance(block, ImportanceBlock):
        return routed.flops[name] - baseline
    if not isinstance(block, RoutedBlock) or not block.mod_state.observes:
        return 0
    # Its attention comes before the decision and runs on all tokens, as in the dense model.
    attention = f"{name}.{block.mod_state.call.operators['attention']}"
    return routed.flops[attention] - dense.flops[attention]


class _ToMeta(TorchFunctionMode):
    """Makes deep copies of tensors on the meta device, including those that are neither parameter nor buffer."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # `deepcopy` of a tensor would copy its data.
        if func is Tensor.__deepcopy__:
            return _shape_of(args[0])
        return func(*args, **(kwargs or {}))


def _shape_of(tensor: Tensor) -> Tensor:
    """Return a plain meta tensor of the same shape, for quantized tensors too."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device, without copying weights."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        # Integer weights have no gradient.
        memo[id(parameter)] = nn.Parameter(_shape_of(parameter), requires_grad=parameter.is_floating_point())
    for module in model.modules():
        # The state of a generator, such as that of a moving average, is no tensor of the model.
        memo |= {id(value): value for value in vars(module).values() if isinstance(value, torch.Generator)}
    with _ToMeta():
        copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        # No layer draws or averages in evaluation; `eval()` would take off methods for training alone.
        module.training = False
    return copied


def inference_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Return `flops(...).routed` of a model whose cost does not depend on the data, by one pass on the meta device.

    Args:
        inputs: Its arguments by name, without data; those of a model of images are `{"image": image}`.
    """
    # Hosts may make positions in their forward without saying where.
    with torch.device("meta"):
        return pass_flops(meta_copy(model), inputs)


def _fix_shares(model: nn.Module, kept: float | Mapping[str, float] | Trace | None) -> dict[str, float]:
    """Fix the kept shares of modules whose cost depends on the data; return the shares of images by module."""
    by_data = {name: module for name, module in deciding_modules(model).items() if module.cost_follows_data}
    check_read(model, kept)
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
        names = f"it names {', '.join(shares)}" if shares else "it is empty: run the model within `mmod.trace`"
        raise ValueError(f"kept names no share for {_first_of(missing)}; {names}")
    images = {}
    for name, module in by_data.items():
        check_value(f"the kept share of {name}", shares[name], float, "[0, 1]")
        images[name] = module.assume_kept(float(shares[name]))
    return {name: share for name, share in images.items() if share < 1}


def _first_of(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first


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


def _to_meta(leaf: object) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _reads_images_alone(model: nn.Module) -> bool:
    parts = find_parts(model)
    # A model of transformers with a vision tower may read text that no part knows.
    return "image" in parts and "language" not in parts and not hasattr(model, "get_image_features")


def _inputs(model: nn.Module, stacks: Mapping[str, BlockStack], input_size: Size) -> dict[str, Any]:
    """Return a model's arguments by name, without data."""
    if isinstance(input_size, Mapping) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(dict(input_size))):
        return {name: tree_map(_to_meta, value) for name, value in input_size.items()}
    if not _reads_images_alone(model):
        raise ValueError(f"this {type(model).__name__} takes more than an image: give its arguments by name")
    size = (input_size, input_size) if isinstance(input_size, int) else input_size
    channels = image_facts(model).channels
    if isinstance(size, (tuple, list)) and len(size) == 2:
        size = (channels or 3, *size)
    if not isinstance(size, (tuple, list)) or len(size) != 3 or not all(isinstance(x, int) and x > 0 for x in size):
        # A batch of images, in place of the size of one.
        given: Any = input_size
        hint = f": pass {tuple(given.shape[1:])}" if isinstance(given, Tensor) and given.ndim == 4 else ""
        raise ValueError(
            "input_size must be (channels, height, width), (height, width), one number or arguments by name, got "
            f"{brief(input_size)}{hint}"
        )
    if channels not in (None, size[0]):
        raise ValueError(f"this {type(model).__name__} cannot take image {tuple(size)}: it reads {channels} channels")
    inputs = {"image": torch.empty(1, *size, device="meta", dtype=next(model.parameters()).dtype)}
    for name, stack in stacks.items():
        if stack.sequence is not None:
            inputs[name] = torch.zeros(1, stack.sequence, dtype=torch.int64, device="meta")
    return inputs
