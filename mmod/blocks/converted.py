"""Blocks that run their host's forward themselves, and are one node of a symbolic trace by torch.fx.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx, nn

from mmod.blocks.branches import Branch, running
from mmod.blocks.conversion import Mixin, host_class
from mmod.blocks.record import recomputing
from mmod.config import CHANGE
from mmod.ops import capture_importance
from mmod.ops.intercept import AttentionIntercept
from mmod.routing import token_change

EXPORT = "Use torch.export, torch.onnx.export(dynamo=True) or torch.compile, which replace TorchScript"


class ConvertedBlock(Mixin):
    """Mixin of a block that runs its host's forward itself."""

    def mod_run_host(self, z: Tensor, **arguments: object) -> Tensor:
        """Return tokens after the host's forward."""
        return super().forward(z, **arguments)

    def mod_observe(
        self, run: Callable[[], Tensor], x: Tensor, queries_BN: Tensor | None, importance: str
    ) -> tuple[Tensor, Tensor]:
        """Run what contains the host's attention on tokens x; return its result, and the importance of x (B, N).

        Args:
            queries_BN: True at tokens whose attention counts (B, N); None for all.
        """
        if importance == CHANGE:
            y = run()
            return y, token_change(x, y)
        captured = capture_importance(queries_BN, importance)
        y = self.mod_run_observed(run, captured)
        return y, captured.read()

    def mod_run_observed(self, run: Callable[[], Tensor], watch: AttentionIntercept) -> Tensor:
        """Run what contains the host's attention, inside a mode that reads it."""
        state = self.mod_state
        name = state.call.operators.get("attention")
        if name is not None:
            attention = self.get_submodule(name)
            # Each call of torch inside the mode costs time, so the attention alone runs in it, unless its forward was
            # replaced.
            if isinstance(attention, Branch) and "forward" not in vars(attention):
                with running(state.inner, {name: watch.run}):
                    return run()
        watch.cross = state.call.cross
        with running(state.inner, {}):
            return watch.run(run, (), {})

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse TorchScript."""
        raise RuntimeError(
            "a routed model cannot be scripted: its blocks take the host's arguments as they come, which TorchScript "
            f"has no types for. {EXPORT}"
        )


def trace_as_node(block: nn.Module, x: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Return the block as one node of torch.fx's graph, because decisions depend on values.

    What is inside it cannot be extracted.

    Raises:
        ValueError: What stands in the place of tokens is no proxy of a tracer.
    """
    check_tokens(block, x)
    assert isinstance(x, fx.Proxy)
    tracer: Any = x.tracer
    path = tracer.path_of_module(block)
    names = getattr(tracer, "node_to_qualname", None)
    if names is not None:
        # A feature extractor takes the names that match a pattern, and would leave out this block without a word.
        # Nodes that nobody asks for are removed from its graph.
        known = set(names.values())
        for inside in (f"{path}.{name}" for name in _names_inside(block)):
            if inside not in known:
                proxy = tracer.create_proxy("call_function", refuse_inside, (x, path), {})
                names[proxy.node] = inside
    return tracer.create_proxy("call_module", path, (x, *args), dict(kwargs))


def check_tokens(block: nn.Module, x: object) -> None:
    """Raise a ValueError if a block gets anything but tokens, such as a list of batches of several sizes."""
    if not isinstance(x, (Tensor, fx.Proxy)):
        what = type(x).__name__
        if isinstance(x, (list, tuple)):
            what += f" of {len(x)}"
        raise ValueError(
            f"a changed {host_class(block).__name__} takes tokens (images, tokens, channels), got a {what}: call "
            "the model once for each batch of images of one size"
        )


def check_once(block: Mixin, x: object) -> None:
    """Raise an error if a block behind which rows are gone for good gets anything but tokens, or runs again."""
    check_tokens(block, x)
    if recomputing():
        raise RuntimeError(
            f"the method {block.mod_method.kind!r} does not support gradient checkpointing, which runs blocks "
            "twice: turn it off"
        )


def _names_inside(block: nn.Module) -> list[str]:
    """Return the names of the nodes that the dense block would have: its leaf modules, and the map of its attention."""
    modules = list(block.named_modules())[1:]
    leaves = [name for name, module in modules if not any(True for _ in module.children())]
    return [*leaves, *(f"{name}.softmax" for name, module in modules if hasattr(module, "fused_attn"))]


def refuse_inside(x: object, path: str) -> None:
    """Raise, where a node inside a converted block was asked for."""
    raise ValueError(
        f"{path} is converted by mmod and one node of this graph, from which nothing inside it can be extracted: "
        "register hooks, as AttentionExtract does by method='hook', and bring their values to all tokens by "
        "mmod.to_all_tokens"
    )
