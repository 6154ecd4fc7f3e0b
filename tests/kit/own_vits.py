"""Vision transformers as people write them for research: no class of theirs is known to mmod.

Axes: B images, N tokens, H heads, E channels of a head, D channels.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.made import made_once

DIM, HEADS, SIDE, PATCH = 32, 4, 64, 8
GRID = SIDE // PATCH


class FusedSoftmax(nn.Module):
    """Queries, keys and values from one layer, attention written out, as in DINO's and MAE's repositories."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-2, -1) * (DIM // HEADS) ** -0.5).softmax(dim=-1)
        return self.proj((attention @ v).transpose(1, 2).flatten(2))


class Einsum(FusedSoftmax):
    """Attention by einsum."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        score = torch.einsum("bhie,bhje->bhij", q, k) * (DIM // HEADS) ** -0.5
        return self.proj(torch.einsum("bhij,bhje->bihe", torch.softmax(score, dim=-1), v).flatten(2))


class Sdpa(FusedSoftmax):
    """Fused attention inside a module."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class RelativeBias(FusedSoftmax):
    """Attention with a learned bias for each pair of positions."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((HEADS, GRID**2, GRID**2), value))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        score = q @ k.transpose(-2, -1) * (DIM // HEADS) ** -0.5 + self.bias[:, : x.shape[1], : x.shape[1]]
        return self.proj((score.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class RotaryInside(Sdpa):
    """Rotary positions that attention computes itself."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        angle = torch.arange(x.shape[1]).unsqueeze(1) * torch.logspace(0, -2, DIM // HEADS // 2)
        q, k = (torch.cat([y[..., :4] * angle.cos() - y[..., 4:] * angle.sin(), y[..., 4:]], dim=-1) for y in (q, k))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))


class OwnBlock(nn.Module):
    """A block with norms in front of its branches, and a scale behind each that begins near zero."""

    def __init__(self, attention: type[nn.Module] = Sdpa) -> None:
        super().__init__()
        self.first = nn.LayerNorm(DIM)
        self.mixer = attention()
        self.second = nn.LayerNorm(DIM)
        self.channels = Mlp()
        self.scale = nn.Parameter(torch.full((DIM,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.mixer(self.first(x))
        return x + self.channels(self.second(x))


class AttendingBlock(OwnBlock):
    """Attention in the block's own forward, as in many short scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(DIM, 3 * DIM)
        self.mixer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query_key_value(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.scale * self.mixer(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.channels(self.second(x))


class PostNormBlock(OwnBlock):
    """Norms behind the branches, inside the residual sum."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.mixer(x))
        return x + self.second(self.channels(x))


class ParallelBlock(OwnBlock):
    """Both branches on the same input."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return x + self.mixer(y) + self.channels(y)


class Half(nn.Module):
    """A branch with its residual sum."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.LayerNorm(DIM), branch)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class HalvesInSequence(nn.Sequential):
    """A block that is a container of its halves."""

    def __init__(self) -> None:
        super().__init__(Half(Sdpa()), Half(Mlp()))


class Chunk(nn.ModuleList):
    """Several blocks in a list that runs them, as DINOv2's, which FSDP wraps as one."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class IndexedChunk(Chunk):
    """The same by numbers."""

    def forward(self, x: Tensor) -> Tensor:
        for number in range(len(self)):
            x = self[number](x)
        return nn.Sequential(*self[3:])(x)


class ChildrenBlock(HalvesInSequence):
    """A block that runs whatever modules it contains."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


class DividingBlock(OwnBlock):
    """Stochastic depth as DINOv2 has it: in training, a branch runs on a part of the batch.

    Args:
        rate: The share of images that a branch drops.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop_prob = rate

    def choose(self, images: int) -> Tensor:
        return torch.randperm(images)[: max(int(images * (1 - self.drop_prob)), 1)]

    def add(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        if not self.training or not self.drop_prob:
            return x + branch(x)
        chosen = self.choose(len(x))
        if not len(chosen):
            return x
        return torch.index_add(x, 0, chosen, branch(x[chosen]), alpha=len(x) / len(chosen))

    def forward(self, x: Tensor) -> Tensor:
        x = self.add(x, lambda y: self.mixer(self.first(y)))
        return self.add(x, lambda y: self.channels(self.second(y)))


class DrawingBlock(DividingBlock):
    """The same with a draw for each image, from NumPy."""

    def choose(self, images: int) -> Tensor:
        return torch.from_numpy(np.flatnonzero(np.random.rand(images) >= self.drop_prob))  # noqa: NPY002


class SkippingBlock(DividingBlock):
    """The same with a draw for the batch, from Python."""

    def choose(self, images: int) -> Tensor:
        return torch.arange(images if random.random() >= self.drop_prob else 0)


class WindowedBlock(OwnBlock):
    """Attention within quarters of the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        windows = self.first(x).unflatten(1, (4, -1)).flatten(0, 1)
        x = x + self.mixer(windows).unflatten(0, (-1, 4)).flatten(1, 2)
        return x + self.channels(self.second(x))


class LargeWindowBlock(OwnBlock):
    """Attention within halves of the sequence, where it is longer than 32 tokens."""

    def forward(self, x: Tensor) -> Tensor:
        parts = 2 if x.shape[1] > 32 else 1
        windows = self.first(x).unflatten(1, (parts, -1)).flatten(0, 1)
        x = x + self.mixer(windows).unflatten(0, (-1, parts)).flatten(1, 2)
        return x + self.channels(self.second(x))


class ReorderingBlock(OwnBlock):
    """Every second block of this kind would bring tokens back to their places."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(1)


class ConvolvedBlock(OwnBlock):
    """A convolution along the tokens beside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Conv1d(DIM, DIM, 3, padding=1, groups=DIM)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.local(x.transpose(1, 2)).transpose(1, 2))


class Convolution(nn.Module):
    """A convolution along the tokens, whose single weight is all that a block has."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Conv1d(DIM, DIM, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.local(x.mT).mT


class MixingBlock(nn.Module):
    """A block of MLP-Mixer: one layer across the patches, one across channels."""

    def __init__(self) -> None:
        super().__init__()
        self.across = nn.Linear(GRID**2, GRID**2)
        self.channels = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(x.mT).mT
        return x + self.channels(x)


class PooledBlock(OwnBlock):
    """Every token gets the mean of all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean(dim=1, keepdim=True))


class BatchBlock(OwnBlock):
    """Every image gets the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean(dim=0, keepdim=True))


class OwnViT(nn.Module):
    """A vision transformer with class and register tokens in front of its patches.

    Args:
        make: Makes a block, from its number.
        prefix: Number of tokens in front of the patches.
    """

    def __init__(self, make: Callable[[int], nn.Module], prefix: int = 1, depth: int = 5) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.special = nn.Parameter(torch.randn(1, prefix, DIM))
        self.places = nn.Parameter(torch.randn(1, GRID**2, DIM))
        self.stages = nn.ModuleList([make(index) for index in range(depth)])
        self.final = nn.LayerNorm(DIM)
        self.classes = nn.Linear(DIM, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2) + self.places
        x = torch.cat([self.special.expand(len(x), -1, -1), x], dim=1)
        for stage in self.stages:
            x = stage(x)
        return self.classes(self.final(x).mean(dim=1))


class NamedBlocks(OwnViT):
    """A vision transformer whose list names its blocks, as torchvision's does."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__(make)
        self.stages = nn.Sequential(OrderedDict((f"layer_{index}", stage) for index, stage in enumerate(self.stages)))


ROUTED: dict[str, Callable[[], OwnViT]] = {
    "own softmax": lambda: OwnViT(lambda _: OwnBlock(FusedSoftmax)),
    "einsum": lambda: OwnViT(lambda _: OwnBlock(Einsum)),
    "sdpa, registers": lambda: OwnViT(lambda _: OwnBlock(Sdpa), prefix=5),
    "no class token": lambda: OwnViT(lambda _: OwnBlock(Sdpa), prefix=0),
    "norms behind, named blocks": lambda: NamedBlocks(lambda _: PostNormBlock(Sdpa)),
    "attention in the block": lambda: OwnViT(lambda _: AttendingBlock()),
    "parallel branches": lambda: OwnViT(lambda _: ParallelBlock(Sdpa)),
    "halves in sequence": lambda: OwnViT(lambda _: HalvesInSequence()),
    "layers of torch": lambda: OwnViT(
        lambda _: nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, batch_first=True, norm_first=True)
    ),
}
# Model -> the property that it lacks.
REFUSED: dict[str, tuple[Callable[[], OwnViT], str]] = {
    "windows": (lambda: OwnViT(lambda _: WindowedBlock(), prefix=0), "computes with their positions|does not run on"),
    "large windows": (lambda: OwnViT(lambda _: LargeWindowBlock(), prefix=0), "all 64 tokens in another order"),
    "relative bias of zeros": (lambda: OwnViT(lambda _: OwnBlock(RelativeBias), prefix=0), "in another order"),
    "relative bias": (
        lambda: OwnViT(lambda _: OwnBlock(lambda: RelativeBias(0.5)), prefix=0),  # type: ignore[arg-type]
        "in another order",
    ),
    "rotary inside": (lambda: OwnViT(lambda _: OwnBlock(RotaryInside)), "in another order"),
    "reordering": (lambda: OwnViT(lambda _: ReorderingBlock()), "in another order"),
    "convolution": (lambda: OwnViT(lambda _: ConvolvedBlock()), "in another order.* a convolution"),
    "pooling": (lambda: OwnViT(lambda _: PooledBlock()), "another way than attention"),
    "batch": (lambda: OwnViT(lambda _: BatchBlock()), "another batch"),
    "no attention": (
        lambda: OwnViT(lambda _: OwnBlock(Mlp)),
        "with tokens hidden from attention: no attention was seen",
    ),
    "one matrix": (lambda: OwnViT(lambda _: nn.Linear(DIM, DIM)), r"stages\.0 \(Linear\).*no attention was seen"),
    "token mixing": (
        lambda: OwnViT(lambda _: MixingBlock(), prefix=0),
        "computes with their positions.* layers across tokens",
    ),
    "another size": (
        lambda: OwnViT(lambda _: MixingBlock()),
        r"does not run on tokens \(2, 65, 32\): .*example=\.\.\.\)",
    ),
    "convolution alone": (lambda: OwnViT(lambda _: Convolution()), r"stages\.0 .* a convolution"),
    "any children": (lambda: OwnViT(lambda _: ChildrenBlock()), "would run the router that a method adds"),
    "one windowed block": (
        lambda: OwnViT(lambda index: WindowedBlock() if index == 3 else OwnBlock(), prefix=0),
        "stages.3",
    ),
    "one named block": (
        lambda: NamedBlocks(lambda index: PooledBlock() if index == 3 else OwnBlock()),
        "stages.layer_3",
    ),
}


@made_once
def make_own(name: str, seed: int = 0) -> Any:
    """Return a model of `ROUTED` whose every parameter matters."""
    torch.manual_seed(seed)
    model = ROUTED[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def make_own_images(batch: int) -> Tensor:
    return torch.randn(batch, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
