"""Early exit: images with a confident prediction skip the remaining blocks.

Axes: B images, N tokens, D channels, C classes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.blocks import Deciding, Mixin, Pass, Passes, Records, convert, host_class, recomputing
from mmod.blocks.passes import StackCall
from mmod.blocks.routed import ConvertedBlock
from mmod.config.plan import check_blocks
from mmod.methods.base import Method, register_method
from mmod.ops.backend import exporting
from mmod.routing import Evidence, Kept, Routing

_CLASSIFIER = ("head", "head_dist")
_HEAD = ("norm", "fc_norm", *_CLASSIFIER)


@register_method("exit")
@dataclass(frozen=True)
class Exit(Method):
    """Early exit after some blocks, each with a separate head.

    In evaluation, an image exits where its head's largest probability reaches the confidence. The remaining images are
    gathered, so later blocks cost less. In training, images are assigned to the exits and the final head in turn, so
    that any recipe trains all heads equally. Images exit in a call of the model only: `forward_features` and
    `forward_intermediates` run all blocks on all images.

    Args:
        confidence: Probability at which an image exits; above 1, none does.
        blocks: Numbers of the blocks that an exit follows.

    Source: BranchyNet, Teerapittayanon et al., arXiv 1709.01686.

    Example:
        >>> import timm, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit"), Exit(confidence=0.5, blocks=(1, 3)))
        >>> [name for name, _ in model.named_modules() if name.endswith("exit")]
        ['blocks.1.exit', 'blocks.3.exit']
    """

    added: ClassVar[tuple[str, ...]] = (".exit.",)
    confidence: Annotated[float, "(0, inf)"] = 0.9
    blocks: Annotated[tuple[int, ...], "[0, inf)"] = (3, 6, 9)

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the model classifies and has blocks after each exit."""
        check_blocks(self.blocks, len(stack.blocks))
        if self.blocks[-1] == len(stack.blocks) - 1:
            raise ValueError(
                f"an exit after the last block saves nothing: blocks must be below {len(stack.blocks) - 1}"
            )
        if not getattr(model, "num_classes", 0):
            raise ValueError(f"this {type(model).__name__} is no classifier: early exit needs class probabilities")

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Add a copy of the model's head to every exit block, and make the model gather the logits of all exits."""
        first = self.blocks[0]
        ends = len(self.blocks) + 1
        passes = Passes(stack.calls, Leaving, last=len(stack.blocks) - 1 - first)
        heads = {index: ExitHead(model) for index in self.blocks}
        for index in range(first, len(stack.blocks)):
            turn = self.blocks.index(index) if index in heads else None
            state = _ExitState(passes, index - first, self.confidence, turn, ends, Records())
            convert(stack.blocks[index], ExitBlock, state)
            if index in heads:
                stack.blocks[index].exit = heads[index]
        convert(model, ExitModel, passes)


class ExitHead(nn.Module):
    """Copy of a timm model's final norm and head, with separate weights; all other attributes are the model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # Not as a submodule: the head would be its own descendant.
        self.__dict__["model"] = model
        self.copy_modules(_HEAD)

    def copy_modules(self, names: Iterable[str]) -> None:
        """Copy some of the model's modules, where it has them."""
        model = self.__dict__["model"]
        for name in names:
            if isinstance(getattr(model, name, None), nn.Module):
                setattr(self, name, copy.deepcopy(getattr(model, name)))

    def __getattr__(self, name: str) -> Any:
        """Return a module of the head, or else an attribute of the model."""
        return self._modules[name] if name in self._modules else getattr(self.__dict__["model"], name)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Return logits (B, C), or (B, N, C) for a model with one output per token."""
        host: Any = host_class(self.__dict__["model"])
        logits = host.forward_head(self, self.norm(x_BND))
        if not isinstance(logits, Tensor):
            raise ValueError("early exit supports heads with one output: call model.set_distilled_training(False)")
        return logits


class Leaving(Pass):
    """The images of a forward pass that exited, and the remaining ones, which `shape` counts.

    Attributes:
        total: Number of all images.
        exits: Images may exit, as in a call of the model.
        index_B: Batch indices of the remaining images; None for all.
        answers: Batch indices and logits of the images that exited, by exit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.exits = False
        self.index_B: Tensor | None = None
        self.answers: list[tuple[Tensor, Tensor]] = []


class _ExitState(NamedTuple):
    """Plain state of a block at or after the first exit.

    Args:
        place: Number of blocks between the first exit's and this one.
        turn: Number of the exit after this block; None for none.
        ends: Number of exits, including the final head.
    """

    passes: Passes[Leaving]
    place: int
    confidence: float
    turn: int | None
    ends: int
    records: Records


class ExitCall(StackCall):
    """A call of an early-exit model, with the pass of its images once a block has begun it."""

    def __init__(self, outer: StackCall) -> None:
        super().__init__(outer)
        self.leaving: Leaving | None = None


class ExitBlock(Deciding, ConvertedBlock):
    """Mixin of a timm block with an exit, or after one."""

    mod_state: _ExitState
    exit: ExitHead
    added_modules = ("exit",)

    @property
    def cost_follows_data(self) -> bool:
        """The cost depends on the data: images that exited cost nothing."""
        return True

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host's block on tokens (B, N, D), and return those of the remaining images."""
        if recomputing():
            raise RuntimeError(
                "early exit does not support gradient checkpointing, which runs blocks twice: turn it off"
            )
        state = self.mod_state
        leaving = self._leaving(x)
        if self.record.traced:
            self._trace(x, leaving)
        if not x.shape[0]:
            # Not every host supports an empty batch.
            return x
        masks = {name: _of_remaining(x, value, leaving) for name, value in kwargs.items()}
        leaving.busy = True
        y: Tensor = super().forward(x, *(_of_remaining(x, value, leaving) for value in args), **masks)
        leaving.busy = False
        if not leaving.exits:
            return y
        if state.turn is not None and y.is_meta:
            # On meta, FLOPs are counted as if no image exited.
            self.exit(y)
        elif state.turn is not None:
            y = self._leave(y, leaving)
        state.passes.hand_on(leaving, y)
        return y

    def _leaving(self, x: Tensor) -> Leaving:
        """Return the pass that a block's input belongs to; outside a call of the model, one in which none exits."""
        state = self.mod_state
        call = state.passes.calls.value.running
        if not isinstance(call, ExitCall):
            leaving = Leaving()
            leaving.total = x.shape[0]
            return leaving
        found = state.passes.find(x, state.place) if state.place else None
        if found is None:
            if call.leaving is not None:
                raise RuntimeError(
                    "the blocks of an early-exit model got a second batch while the model ran on a first one, as from "
                    "a hook: call the model itself on the second batch, which keeps their images apart"
                )
            found = state.passes.begin(x)
            found.total = x.shape[0]
            found.exits = True
            call.leaving = found
        if x.shape[0] != found.shape[0]:
            raise RuntimeError(
                f"a block of an early-exit model got {x.shape[0]} images, and {found.shape[0]} remain after the block "
                "before: images cannot be added or removed between the blocks"
            )
        return found

    def _trace(self, x_BND: Tensor, leaving: Leaving) -> None:
        """Record which images the block runs on."""
        runs_B1 = torch.zeros(leaving.total, 1, dtype=torch.bool, device=x_BND.device)
        runs_B1[slice(None) if leaving.index_B is None else leaving.index_B] = True
        kept = Kept(torch.zeros_like(runs_B1, dtype=torch.long), runs_B1)
        self.record.keep("", Routing(kept, Evidence(runs_B1.float())))

    # The number of remaining images depends on the data, so this cannot be compiled.
    @torch.compiler.disable
    def _leave(self, y_BND: Tensor, leaving: Leaving) -> Tensor:
        """Store the logits of the images that exit, and return the tokens of the others."""
        state = self.mod_state
        assert state.turn is not None
        if leaving.index_B is None:
            leaving.index_B = torch.arange(y_BND.shape[0], device=y_BND.device)
        if self.training:
            leaves_B = (leaving.index_B % state.ends).eq(state.turn)
            logits = self.exit(y_BND[leaves_B])
        else:
            logits = self.exit(y_BND)
            # In half precision, 0.999 would be 1.
            dtype = torch.promote_types(logits.dtype, torch.float32)
            sure = logits.detach().softmax(dim=-1, dtype=dtype).amax(dim=-1)
            # An image is as sure as its tokens on average, if there are logits for every token.
            leaves_B = (sure.flatten(1).mean(dim=1) if sure.ndim > 1 else sure) >= state.confidence
            logits = logits[leaves_B]
        leaving.answers.append((leaving.index_B[leaves_B], logits))
        leaving.index_B = leaving.index_B[~leaves_B]
        remaining_BND = y_BND[~leaves_B]
        leaving.shape = tuple(remaining_BND.shape[:2])
        return remaining_BND


def _of_remaining(x_BND: Tensor, argument: Any, leaving: Leaving) -> Any:
    """Return the rows of the remaining images, of a mask of all (B, H, N, N); other arguments are unchanged."""
    if not isinstance(argument, Tensor) or argument.ndim != 4 or argument.shape[0] in (1, x_BND.shape[0]):
        return argument
    return argument if leaving.index_B is None else argument.index_select(0, leaving.index_B)


class ExitModel(Mixin):
    """Mixin of a model that gathers the logits of its exits."""

    mod_state: Passes[Leaving]

    # Export wants a name for what its dynamic shapes describe.
    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all images, from the exit that each one took."""
        if exporting():
            raise ValueError("early exit cannot be exported: the number of remaining images depends on the data")
        calls = self.mod_state.calls.value
        call = ExitCall(calls.running)
        calls.begin(call)
        try:
            last: Tensor = super().forward(x, *args, **kwargs)
        finally:
            calls.end()
        leaving = call.leaving
        if leaving is None or leaving.index_B is None:
            return last
        places, logits = zip(*leaving.answers, (leaving.index_B, last))
        shapes = [tuple(values.shape[1:]) for values in logits]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"the model's head returns {shapes[-1]} per image, and its exits {shapes[0]}: change the number of "
                "classes by model.reset_classifier, which changes the exits too"
            )
        order = torch.cat(places).argsort()
        return torch.cat(logits)[order]

    def reset_classifier(self, num_classes: int, *args: Any, **kwargs: Any) -> None:
        """Reset the model's classifier as the host does, and give each exit a copy of it."""
        if not num_classes:
            raise ValueError("early exit needs class probabilities: call mmod.undo_ before reset_classifier(0)")
        host: Any = super()
        host.reset_classifier(num_classes, *args, **kwargs)
        for module in self.modules():
            if isinstance(module, ExitHead):
                module.copy_modules(_CLASSIFIER)
