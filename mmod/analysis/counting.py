"""FLOPs and activation memory of one model, from forward passes on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mmod.adapters.tokens import share_proofs
from mmod.analysis.memory import ActivationMemory
from mmod.analysis.tracing import Trace
from mmod.blocks import Deciding, copy_modules, deciding_modules
from mmod.ops.intercept import AttentionCall, AttentionIntercept
from mmod.routing import Router, Routing

Shape = Sequence[int]


def by_data(model: nn.Module) -> bool:
    """Return whether the cost of a forward pass depends on the data."""
    return any(module.mod_cost_follows_data for module in deciding_modules(model).values())


def needed_shares(model: nn.Module, kept: Mapping[str, float] | None) -> Mapping[str, float] | None:
    """Return kept shares if the cost of the model depends on the data; None otherwise."""
    if not by_data(model):
        return None
    return kept


class PassCounts(NamedTuple):
    """FLOPs by module name ("" for the model), tokens and kept tokens by block, and the peak of activation bytes."""

    flops: Counter[str]
    tokens: Mapping[str, int]
    kept: Mapping[str, int]
    activation_bytes: int


class _FlopCount(TorchDispatchMode):
    """Counts the FLOPs of the modules that are running, of which "" is the model.

    Args:
        memory: Tracks the storage of the results; counts for searches ask for none, which takes a third less time.
    """

    def __init__(self, memory: ActivationMemory | None = None) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.running: set[str] = set()
        self._memory = memory
        self._formulas = _flop_formulas()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation, and count it."""
        result = self._compute(func, args, kwargs or {})
        if self._memory is not None:
            self._memory.follow(result)
        return result

    def _compute(self, func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        # Operators of higher order run whole subgraphs, which no formula of a single operation covers.
        if isinstance(func, HigherOrderOperator) and func not in self._formulas:
            raise ValueError(f"cannot count the FLOPs of {func}, which this model calls")
        call = (func, _layout(args), _layout([*kwargs.items()]))
        known = _OUTCOMES.get(call)
        if known is not None and known.layout is not None:
            result = _empty(known.layout)
        else:
            run = func
            if func is torch.ops.aten._grouped_mm.default:
                # The meta device's own takes bf16 alone, unlike CPUs and GPUs.
                run = _grouped_mm
            result = run(*args, **kwargs)
        if known is None:
            # Formulas are registered for an operation, not for each of its overloads.
            formula = self._formulas.get(getattr(func, "_overloadpacket", func))
            flops = 0
            if formula is not None:
                flops = int(formula(*args, **kwargs, out_val=result))
            layout = None
            if _is_new(result, [*args, *kwargs.values()]):
                layout = _layout(result)
            known = _Outcome(flops, layout)
            # What an operator of higher order computes is in its arguments.
            if isinstance(func, OpOverload):
                if len(_OUTCOMES) >= _MOST_OUTCOMES:
                    _OUTCOMES.clear()
                _OUTCOMES[call] = known
        if known.flops:
            # A module's FLOPs are those of all modules inside it, too.
            self.flops.update(dict.fromkeys(self.running, known.flops))
        return result


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: object, **__: object) -> Tensor:
    """Return room for the products of groups of rows or columns, one for each expert; `offs` are the groups' ends."""
    shape = (*left.shape[:-1], right.shape[-1])
    if left.ndim == right.ndim == 2:
        # Groups of what is summed over, as in the gradient of the weights.
        assert offs is not None
        shape = (*offs.shape, *shape)
    if left.ndim > right.ndim:
        # Groups of columns on the right, each of which is multiplied by the matrix of its group alone.
        shape = shape[-2:]
    return left.new_empty(shape)


class _Layout(NamedTuple):
    """What decides the result of an operation on a meta tensor."""

    shape: Shape
    stride: Sequence[int]
    dtype: torch.dtype
    device: torch.device


class _Outcome(NamedTuple):
    """FLOPs of an operation, and the layout of its result: None if it is a view or in place, and must stay so."""

    flops: int
    layout: object


# By operation and layouts of its arguments: most kernels of the meta device are slow Python, and blocks repeat them.
_OUTCOMES: dict[object, _Outcome] = {}
# Some 20 MB, many passes of a large model.
_MOST_OUTCOMES = 10_000


def _layout(value: object) -> object:
    """Return a hashable description of an operation's arguments or results, in which 1, 1.0 and True differ."""
    if isinstance(value, Tensor):
        return _Layout(value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple(map(_layout, value))
    return type(value), value


def _empty(layout: Any) -> object:
    """Return new tensors of the layouts."""
    if isinstance(layout, _Layout):
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)
    return tuple(map(_empty, layout))


def _is_new(result: object, arguments: Sequence[object]) -> bool:
    """Return whether a result is one or several new meta tensors, without storage of the arguments or each other."""
    results = [result] if isinstance(result, Tensor) else result
    if not isinstance(results, (list, tuple)):
        return False
    if not all(type(leaf) is Tensor and leaf.is_meta for leaf in results):
        return False
    tensors = [leaf for leaf in tree_leaves(list(arguments)) if isinstance(leaf, Tensor)]
    # Of storages, since views of one tensor differ in all else.
    read = {tensor.untyped_storage()._cdata for tensor in tensors}
    written = {tensor.untyped_storage()._cdata for tensor in results}
    return len(written) == len(results) and not written & read


# Operations whose indices may be masks.
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class KnownValues(TorchDispatchMode):
    """Keeps on the CPU what no weight on the meta device has changed, so that code can read its values.

    Towers read the sizes of images, and some their pixels, to tell windows, positions and padding.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        named = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            if func in _INDEXED:
                values, indices, *others = args
                args = (values, list(chain.from_iterable(map(_places, indices))), *others)
            args, named = tree_map(to_meta, (args, named))
        elif named.get("device") is not None:
            # What is asked for beside weights, such as positions.
            named["device"] = torch.device("cpu")
        return func(*args, **named)


def _places(index: Tensor | None) -> Sequence[Tensor | None]:
    """Return the indices for which an index stands: of a mask with values, those of its true elements."""
    if index is None or index.is_meta or index.dtype is not torch.bool:
        return [index]
    return index.nonzero(as_tuple=True)


def to_meta(leaf: object) -> object:
    """Return a tensor of the same shape on the meta device, and anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to("meta")


class _ToMeta(TorchFunctionMode):
    """Makes deep copies of tensors on the meta device, including those that are neither parameter nor buffer."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        # `deepcopy` of a tensor would copy its data.
        if func is Tensor.__deepcopy__:
            return _shape_of(args[0])
        return func(*args, **(kwargs or {}))


def _shape_of(tensor: Tensor) -> Tensor:
    """Return a plain meta tensor of the same shape, for quantized tensors too."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device, without copying weights."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        # Integer weights have no gradient.
        memo[id(parameter)] = nn.Parameter(_shape_of(parameter), requires_grad=parameter.is_floating_point())
    for module in model.modules():
        # The state of a generator, such as that of a moving average, is no tensor of the model.
        memo |= {id(value): value for value in vars(module).values() if isinstance(value, torch.Generator)}
    with _ToMeta():
        copied = copy_modules(model, memo)
    for module, copied_module in zip(model.modules(), copied.modules()):
        # No layer draws or averages in evaluation; `eval()` would take off methods for training alone.
        copied_module.training = False
        config: Any = getattr(copied_module, "config", None)
        # Attention is counted by torch's function: kernels of others need a device.
        if getattr(config, "_attn_implementation", None) not in (None, "sdpa", "eager"):
            # The public name would change the parts of the model too.
            config._attn_implementation_internal = "sdpa"
        # Copies do not have what this thread decides by.
        if isinstance(module, Router) and isinstance(copied_module, Router):
            copied_module.config = module.config
            copied_module.capacity = module.capacity
        if isinstance(module, Deciding) and isinstance(copied_module, Deciding):
            copied_module.mod_record.together = module.mod_record.together
    share_proofs(model, copied)
    return copied


def count_pass(
    model: nn.Module, blocks: Mapping[str, nn.Module], inputs: Mapping[str, object], run: Callable[[], object]
) -> PassCounts:
    """Count what a pass of a model in inference computes and holds.

    Args:
        inputs: What the pass reads, which is no activation.
        run: Runs the pass.
    """
    tokens: dict[str, int] = {}
    # The hooks stay: the model is a copy without data, for this count alone.
    for name, block in blocks.items():

        def note(_: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Any], name: str = name) -> None:
            # Hosts may pass the tokens by name, before all else.
            x = next(iter((*args, *kwargs.values())))
            # Towers may run all images as one sequence, without an axis of images.
            tokens[name] = x.shape[min(1, x.ndim - 2)]

        block.register_forward_pre_hook(note, with_kwargs=True)
    memory = _memory_of(model, inputs)
    counted = _FlopCount(memory)
    # Whatever runs is the model's, also where its own forward is not called.
    counted.running.add("")
    with (
        torch.no_grad(),
        _tracing(model) as decisions,
        _running_modules(model, counted.running),
        _WithoutMaps(),
        counted,
    ):
        run()
    # Not from the routers, which blocks that share a decision do not call.
    kept = {name: routing.kept.index_BK.shape[1] for name, routing in decisions.items() if name in tokens}
    return PassCounts(counted.flops, tokens, kept, memory.peak)


def _memory_of(model: nn.Module, inputs: Mapping[str, object]) -> ActivationMemory:
    """Return what tracks activations: neither inputs nor weights."""
    given = [leaf for leaf in tree_leaves(dict(inputs)) if isinstance(leaf, Tensor)]
    return ActivationMemory([*given, *model.parameters(), *model.buffers()])


def _tracing(model: nn.Module) -> AbstractContextManager[Mapping[str, Routing]]:
    """Return a context in which the decisions of a model are recorded, none of a model that does not decide."""
    if deciding_modules(model):
        return Trace(model).recording()
    return nullcontext({})


def training_bytes(model: nn.Module, inputs: Mapping[str, object]) -> int:
    """Return the bytes of activations that a model on the meta device holds for its backward pass."""
    memory = _memory_of(model, inputs)
    # In training, as in a trace, blocks hold their last decision.
    with torch.enable_grad(), _tracing(model), _WithoutMaps(), _FlopCount(memory):
        output = run_model(model, inputs)
        # Read while the output keeps the graph alive.
        held = memory.live
        del output
    return held


@torch.inference_mode(False)
def pass_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Return the FLOPs of one inference pass, as `mmod.flops` counts them: for searches, which ask for nothing else.

    Args:
        model: On the meta device, in evaluation mode.
        inputs: Its arguments by name, without data; those of a model of images are `{"image": image}`.
    """
    # Neither by module nor with memory or decisions, which would take half as long again.
    counted = _FlopCount()
    counted.running.add("")
    # Hosts may make positions in their forward without saying where.
    with torch.no_grad(), torch.device("meta"), _WithoutMaps(), counted:
        run_model(model, inputs)
    return counted.flops[""]


@torch.inference_mode(False)
def step_flops(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """Return the FLOPs of a forward and backward pass of a model on the meta device."""
    counted = _FlopCount()
    counted.running.add("")
    # Hosts may make positions in their forward without saying where.
    with torch.enable_grad(), torch.device("meta"), _WithoutMaps(), counted:
        loss().backward()
    return counted.flops[""]


def run_model(model: nn.Module, inputs: Mapping[str, object]) -> object:
    """Run a model on its arguments by name."""
    # Models of images alone name their argument as they like.
    if set(inputs) == {"image"}:
        return model(inputs["image"])
    return model(**inputs)


@contextmanager
def _running_modules(model: nn.Module, running: set[str]) -> Iterator[None]:
    """Keep a set of the names of the model's modules whose forward is running."""
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, _: object) -> None:
        if module in names:
            running.add(names[module])

    def leave(module: nn.Module, *_: object) -> None:
        # A module may run that is not the model's, as in the head of an exit.
        if module in names:
            running.discard(names[module])

    with register_module_forward_pre_hook(enter), register_module_forward_hook(leave):
        yield


class _WithoutMaps(AttentionIntercept):
    """Replaces attention by its shapes and what it holds."""

    def replace(self, func: Callable[..., Any]) -> Callable[..., object] | None:
        """Leave `torch.nn.MultiheadAttention` alone where it returns its map: its products are counted one by one."""
        if func is not F.multi_head_attention_forward:
            return super().replace(func)
        without_map = super().replace(func)
        assert without_map is not None

        def attend(*args: object, **kwargs: object) -> object:
            # With its map, attention is computed in parts, and they are counted.
            if kwargs.get("need_weights", True):
                return func(*args, **kwargs)
            return without_map(*args, **kwargs)

        return attend

    def attend(self, call: AttentionCall) -> Tensor:
        return _FusedAttention.apply(call.query, call.key, call.value)


class _FusedAttention(torch.autograd.Function):
    """Attention as shapes and memory: it holds queries, keys, values and its output, and no map."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = fused_attention_shape(query, key, value)
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _ = ctx.saved_tensors
        return fused_attention_gradients(grad, query, key, value)


@torch.library.custom_op("mmod::fused_attention_shape", mutates_args=())
def fused_attention_shape(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return room for the output of attention, with heads behind tokens in memory; an operation to be counted."""
    heads_first = (*query.shape[:-1], value.shape[-1])
    # As fused attention returns it: the host's transpose is then a view, here as on a device.
    return query.new_empty([heads_first[d] for d in (0, 2, 1, 3)]).transpose(1, 2)


fused_attention_shape.register_fake(fused_attention_shape._init_fn)


@torch.library.custom_op("mmod::fused_attention_gradients", mutates_args=())
def fused_attention_gradients(grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for the gradients of attention; an operation to be counted."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


fused_attention_gradients.register_fake(fused_attention_gradients._init_fn)


def _flop_formulas() -> Mapping[object, Callable[..., int]]:
    """Return torch's formulas and those that it lacks: attention, products with vectors, and those of groups."""
    from torch.utils.flop_counter import FlopCounterMode

    def attention(query: Shape, key: Shape, value: Shape, **_: object) -> int:
        # Two products: queries with keys, and probabilities with values.
        pairs = prod(query[:-1]) * key[-2]
        return 2 * pairs * (query[-1] + value[-1])

    def backward(grad: Shape, query: Shape, key: Shape, value: Shape, **_: object) -> int:
        # Scores are computed again instead of stored: three products as wide as keys, and two as wide as values.
        pairs = prod(query[:-1]) * key[-2]
        return 2 * pairs * (3 * query[-1] + 2 * value[-1])

    def grouped(left: Shape, right: Shape, *_: object, **__: object) -> int:
        # Each row is multiplied by the matrix of its group alone; of columns on the right, each by that of its group.
        rows = left[1:] if len(left) > len(right) else left
        return 2 * prod(rows) * right[-1]

    def refuse(*_: object, **__: object) -> int:
        raise ValueError("cannot count the FLOPs of bilinear, which this model calls")

    formulas: dict[object, Callable[..., int]] = {
        torch.ops.mmod.fused_attention_shape: attention,
        torch.ops.mmod.fused_attention_gradients: backward,
        torch.ops.aten.mv: lambda matrix, vector, **_: 2 * prod(matrix),
        torch.ops.aten.addmv: lambda added, matrix, vector, **_: 2 * prod(matrix),
        torch.ops.aten.dot: lambda left, right, **_: 2 * prod(left),
        torch.ops.aten._grouped_mm: grouped,
        torch.ops.aten._trilinear: refuse,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas).flop_registry
