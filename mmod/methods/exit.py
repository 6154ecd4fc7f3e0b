"""Early exit: images with a confident prediction skip the remaining blocks.

Axes: B images, N tokens, D channels, C classes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.blocks import Deciding, Records, convert, host_class
from mmod.blocks.forward_pass import PassTracker, recomputing
from mmod.blocks.routed import ConvertedBlock
from mmod.config.plan import check_blocks
from mmod.methods.base import Method, register_method
from mmod.ops.backend import exporting
from mmod.routing import Evidence, Kept, Routing

_HEAD = ("norm", "fc_norm", "head", "head_dist")


@register_method("exit")
@dataclass(frozen=True)
class Exit(Method, confidence="(0, inf)", blocks="[0, inf)"):
    """Early exit after some blocks, each with a separate head.

    In evaluation, an image exits where its head's largest probability reaches the confidence. The remaining images are
    gathered, so later blocks cost less. In training, images are assigned to the exits and the final head in turn, so
    that any recipe trains all heads equally.

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
    confidence: float = 0.9
    blocks: tuple[int, ...] = (3, 6, 9)

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
        tracker, ends = PassTracker(), len(self.blocks) + 1
        heads = {index: ExitHead(model) for index in self.blocks}
        for index in range(self.blocks[0], len(stack.blocks)):
            turn = self.blocks.index(index) if index in heads else None
            convert(stack.blocks[index], ExitBlock, _ExitState(tracker, self.confidence, turn, ends, Records()))
            if index in heads:
                stack.blocks[index].exit = heads[index]
        convert(model, ExitModel, tracker)


class ExitHead(nn.Module):
    """Copy of a timm model's final norm and head, with separate weights; all other attributes are the model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name in _HEAD:
            if isinstance(getattr(model, name, None), nn.Module):
                setattr(self, name, copy.deepcopy(getattr(model, name)))
        # Not as a submodule: the head would be its own descendant.
        self.__dict__["model"] = model

    def __getattr__(self, name: str) -> Any:
        """Return a module of the head, or else an attribute of the model."""
        return self._modules[name] if name in self._modules else getattr(self.__dict__["model"], name)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Return logits (B, C), or (B, N, C) for a model with one output per token."""
        host: Any = host_class(self.__dict__["model"])
        return host.forward_head(self, self.norm(x_BND))


class _Leaving:
    """The images of a forward pass that exited, and the remaining ones."""

    def __init__(self) -> None:
        self.total = 0
        # Batch indices of the remaining images; None for all.
        self.index_B: Tensor | None = None
        # Batch indices and logits of the images that left, by exit.
        self.answers: list[tuple[Tensor, Tensor]] = []


class _ExitState(NamedTuple):
    """Plain state of a block before, at or after an exit, whose index is `turn`; `ends` counts the final head too."""

    tracker: PassTracker
    confidence: float
    turn: int | None
    ends: int
    records: Records


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
        if self.record.traced:
            self._trace(x)
        if not len(x):
            # Not every host supports an empty batch.
            return x
        masks = {name: self._of_remaining(x, value) for name, value in kwargs.items()}
        y: Tensor = super().forward(x, *(self._of_remaining(x, value) for value in args), **masks)
        if self.mod_state.turn is None:
            return y
        if y.is_meta:
            # On meta, FLOPs are counted as if no image exited.
            self.exit(y)
            return y
        if exporting():
            raise ValueError("early exit cannot be exported: the number of remaining images depends on the data")
        return self._leave(y)

    def _of_remaining(self, x_BND: Tensor, argument: Any) -> Any:
        """Return the rows of the remaining images, of a mask of all (B, H, N, N); other arguments are unchanged."""
        if not isinstance(argument, Tensor) or argument.ndim != 4 or len(argument) in (1, len(x_BND)):
            return argument
        index_B = self.mod_state.tracker.running.slot(_Leaving).index_B
        return argument if index_B is None else argument.index_select(0, index_B)

    def _trace(self, x_BND: Tensor) -> None:
        """Record which images the block runs on."""
        leaving = self.mod_state.tracker.running.slot(_Leaving)
        leaving.total = leaving.total or len(x_BND)
        runs_B1 = torch.zeros(leaving.total, 1, dtype=torch.bool, device=x_BND.device)
        runs_B1[slice(None) if leaving.index_B is None else leaving.index_B] = True
        kept = Kept(torch.zeros_like(runs_B1, dtype=torch.long), runs_B1)
        self.record.keep("", Routing(kept, Evidence(runs_B1.float())))

    # The number of remaining images depends on the data, so this cannot be compiled.
    @torch.compiler.disable
    def _leave(self, y_BND: Tensor) -> Tensor:
        """Store the logits of the images that exit, and return the tokens of the others."""
        state = self.mod_state
        assert state.turn is not None
        leaving = state.tracker.running.slot(_Leaving)
        if leaving.index_B is None:
            leaving.index_B = torch.arange(len(y_BND), device=y_BND.device)
        if self.training:
            leaves_B = (leaving.index_B % state.ends).eq(state.turn)
            logits = self.exit(y_BND[leaves_B])
        else:
            logits = self.exit(y_BND)
            sure = logits.detach().softmax(dim=-1).amax(dim=-1)
            # An image is as sure as its tokens on average, if there are logits for every token.
            leaves_B = (sure.flatten(1).mean(dim=1) if sure.ndim > 1 else sure) >= state.confidence
            logits = logits[leaves_B]
        leaving.answers.append((leaving.index_B[leaves_B], logits))
        leaving.index_B = leaving.index_B[~leaves_B]
        return y_BND[~leaves_B]


class ExitModel(nn.Module):
    """Mixin of a model that gathers the logits of its exits."""

    mod_state: PassTracker

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all images, from the exit that each one took."""
        leaving = self.mod_state.begin().slot(_Leaving)
        last: Tensor = super().forward(*args, **kwargs)
        self.mod_state.leave(None)
        if leaving.index_B is None:
            return last
        places, logits = zip(*leaving.answers, (leaving.index_B, last))
        order = torch.cat(places).argsort()
        return torch.cat(logits)[order]
