"""Channel routing in a ResNet (CNN-MoD): blocks run on selected channels.

Axes: B images, C channels, K channels of a narrow block, H and W positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mmod.adapters import find_library
from mmod.blocks import Deciding, Record, convert, make_records
from mmod.methods.base import Method, register_method
from mmod.ops import gather_rows, merge_rows, select_topk
from mmod.routing import Kept, RandomScore, Routing
from mmod.threads import PerThread


@register_method("channels")
@dataclass(frozen=True)
class Channels(Method):
    """Narrow ResNet blocks that run on the channels of an image that a selector chooses.

    They replace every second block of a stage. The first block of a stage stays, because it may change the number of
    channels. A narrow block is a timm block with `K = C / divisor` channels and new weights. With the scores s of the K
    chosen channels, sorted by channel index, and the block's output on them, it returns

        x[:, j] + s[:, j] * output[:, j]    for the channels j < K
        x[:, j]                             for all others

    Args:
        divisor: Ratio of a block's channels to its narrow block's, without a remainder.
        squeeze: Ratio of a block's channels to its selector's hidden units. The selector is a global average pool, two
            linear layers with a ReLU between them, and a sigmoid.
        into: Channels that the gated output is added to: the "first" K, which needs no scatter, or the chosen ones
            ("own").
        adds: What is gated and added: the narrow block's "output", which includes its shortcut, or the "change" to the
            chosen channels, as in MoD.
        chosen: How the K channels are chosen: by "score", or as ablations "random" per image, or always the "first".
            Scores are the gates in all cases.

    Source: Cakaj, Mehnert and Yang, arXiv 2409.17016, whose options are the defaults.

    Example:
        >>> import timm, mmod
        >>> model = mmod.apply_(timm.create_model("resnet18"), Channels())
        >>> model.layer4[1].conv1
        Conv2d(8, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
    """

    divisor: Annotated[int, "[1, inf)"] = 64
    squeeze: Annotated[int, "[1, inf)"] = 16
    into: Literal["first", "own"] = "first"
    adds: Literal["output", "change"] = "output"
    chosen: Literal["score", "random", "first"] = "score"
    replaces: ClassVar[str] = ".selector."

    def find(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return every second block of the stages of a ResNet, by name."""
        if not _is_resnet(model):
            raise ValueError(f"method 'channels' supports timm ResNets, got a {type(model).__name__}")
        blocks: dict[str, nn.Module] = {}
        for name, stage in model.named_children():
            if not name.startswith("layer"):
                continue
            for index, block in enumerate(stage.children()):
                if index % 2:
                    blocks[f"{name}.{index}"] = block
        return blocks

    def check(self, model: nn.Module, stack: dict[str, Any]) -> None:
        """Raise a ValueError unless there are blocks to replace and all can be narrowed."""
        if not stack:
            raise ValueError(f"no stage of this {type(model).__name__} has a second block to replace")
        from timm.models.resnet import BasicBlock, Bottleneck

        for name, block in stack.items():
            is_known = type(block) in (BasicBlock, Bottleneck) and isinstance(block.bn1, nn.BatchNorm2d)
            if not is_known or block.conv2.groups > 1 or block.se is not None:
                raise ValueError(
                    f"{name} ({type(block).__name__}) cannot be narrowed: supported are BasicBlock and Bottleneck with "
                    "BatchNorm2d, without groups and attention"
                )
            wide = block.conv1.in_channels
            multiple = block.expansion
            if wide % self.divisor or wide // self.divisor % multiple:
                raise ValueError(
                    f"method.divisor={self.divisor} must divide the {wide} channels of {name}, "
                    f"and leave a multiple of {multiple}"
                )

    def change(self, model: nn.Module, stack: dict[str, Any]) -> None:
        """Replace the blocks' layers by narrow ones and add selectors."""
        for number, block in enumerate(stack.values()):
            narrow = _narrow(block, self.divisor)
            selector = _selector(block, self.squeeze)
            # Layers without weights, such as activations, serve the narrow block as they are.
            wide: dict[str, nn.Module] = {}
            for name, child in block.named_children():
                if any(True for _ in child.parameters()):
                    wide[name] = child
            for name in wide:
                setattr(block, name, getattr(narrow, name))
            convert(block, ChannelBlock, ChannelState(self, wide, RandomScore(0, number), make_records()))
            block.selector = selector

    def restore(self, model: nn.Module) -> None:
        """Put the dense layers back, on the model's current device and in its dtype."""
        for block in model.modules():
            if isinstance(block, ChannelBlock):
                weight = next(block.selector.parameters())
                for name, child in block.mod_state.wide.items():
                    setattr(block, name, child.to(weight.device, weight.dtype).train(block.training))
        super().restore(model)


class ChannelState(NamedTuple):
    """Plain state of a `ChannelBlock`; `wide` has the replaced dense modules by name."""

    config: Channels
    wide: dict[str, nn.Module]
    draw: RandomScore
    records: PerThread[Record]


class ChannelBlock(Deciding):
    """Mixin of a narrow residual block that runs on selected channels; its selector maps channel means to logits."""

    selector: nn.Sequential
    mod_state: ChannelState
    mod_added_modules = ("selector",)

    def mod_scorers(self) -> dict[str, nn.Module]:
        """Return the selector."""
        return {"selector": self.selector}

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return all channels after the block (B, C, H, W)."""
        config = self.mod_state.config
        if self.training:
            self.mod_tell_of_frozen()
        logit_BC = self.selector(x_BCHW.mean(dim=(2, 3)))
        # fp32 under autocast too, so that the choice does not depend on it.
        logit_BC = logit_BC.to(torch.promote_types(logit_BC.dtype, torch.float32))
        flat = x_BCHW.flatten(2)
        index_BK, gate_BK = self._mod_choose(flat, logit_BC)
        if self.mod_record.traced:
            self.mod_record.keep("", Routing(Kept(index_BK), logit_BC, gate_BK))
        z = gather_rows(flat, index_BK).unflatten(2, x_BCHW.shape[2:])
        y = super().forward(z)
        if config.adds == "change":
            # The narrow block added its shortcut already.
            y = y - z
        added = y * gate_BK.to(y.dtype)[..., None, None]
        if config.into == "own":
            new = (z + added).flatten(2)
            return merge_rows(flat, index_BK, z.flatten(2), new).view_as(x_BCHW)
        count = index_BK.shape[1]
        return torch.cat([x_BCHW[:, :count] + added, x_BCHW[:, count:]], dim=1)

    def _mod_choose(self, flat: Tensor, logit_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of the channels that run, ascending, and their scores (B, K)."""
        config = self.mod_state.config
        rank_BC = logit_BC
        if config.chosen == "random":
            rank_BC = self.mod_state.draw(flat)
        kept, _ = select_topk(rank_BC, Fraction(1, config.divisor))
        index_BK = kept.index_BK
        if config.chosen == "first":
            index_BK = torch.arange(index_BK.shape[1], device=flat.device).expand_as(index_BK)
        # Of the selector, however the channels were chosen: only so does it learn.
        return index_BK, logit_BC.gather(1, index_BK).sigmoid()


def _is_resnet(model: nn.Module) -> bool:
    # A name in a config is read without timm.
    if find_library(model) != "timm":
        return False
    from timm.models import ResNet

    return isinstance(model, ResNet)


def _narrow(block: Any, divisor: int) -> nn.Module:
    """Return a narrow block of the same class, initialised as in timm."""
    wide = block.conv1.in_channels // block.expansion
    inner = block.conv2.out_channels
    weight = block.conv1.weight
    # timm's basic blocks support no other width.
    base_width = 64
    channels = wide
    if block.expansion > 1:
        base_width = 64 * inner // wide
        channels = inner
    narrow = type(block)(
        wide * block.expansion // divisor,
        wide // divisor,
        base_width=base_width,
        reduce_first=channels // block.conv1.out_channels,
        dilation=block.dilation,
        act_layer=type(block.act1),
        device=weight.device,
        dtype=weight.dtype,
    )
    for module in narrow.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    # The block then begins as its shortcut, as in timm.
    narrow.zero_init_last()
    return narrow.train(block.training)


def _selector(block: Any, squeeze: int) -> nn.Sequential:
    channels = block.conv1.in_channels
    weight = block.conv1.weight
    hidden = max(1, channels // squeeze)
    like = {"device": weight.device, "dtype": weight.dtype}
    return nn.Sequential(nn.Linear(channels, hidden, **like), nn.ReLU(), nn.Linear(hidden, channels, **like))
