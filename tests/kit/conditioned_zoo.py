"""Small diffusion and video transformers, whose blocks take time, labels and text beside the tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmod
from tests.kit.made import made_once

DIM, HEADS, DEPTH = 24, 3, 5
TEXT, TEXT_DIM = 7, 10
_HEADS: dict[str, Any] = {"num_attention_heads": HEADS, "num_layers": DEPTH, "in_channels": 4}
_LATENT: dict[str, Any] = {**_HEADS, "attention_head_dim": DIM // HEADS, "sample_size": 8, "patch_size": 2}


class AdaLNBlock(nn.Module):
    """A block of the DiT paper: six vectors of each image's condition shift, scale and gate both branches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.norm2 = nn.LayerNorm(DIM, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))
        nn.init.zeros_(self.modulation[1].weight)
        nn.init.zeros_(self.modulation[1].bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).unsqueeze(1).chunk(6, dim=2)
        y = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attn(y, y, y, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class OwnDiT(nn.Module):
    """A class-conditional DiT as research code writes it, whose gates begin at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, DIM, 2, 2)
        self.times = nn.Linear(1, DIM)
        self.labels = nn.Embedding(5, DIM)
        self.blocks = nn.ModuleList(AdaLNBlock() for _ in range(DEPTH))
        self.out = nn.Linear(DIM, 16)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        c = self.times(t.unsqueeze(1).to(x.dtype) / 100) + self.labels(y)
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, c)
        return self.out(x)


class SelfAttention(nn.Module):
    """Attention with rotary positions, whose softmax is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = (rotate(y, *rotary) for y in (q, k))
        scores = q @ k.mT / k.shape[-1] ** 0.5
        return self.out(scores.softmax(-1).matmul(v).transpose(1, 2).flatten(2))


class TextAttention(nn.Module):
    """Attention to the text."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(DIM, DIM)
        self.text = nn.Linear(DIM, 2 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        q = self.query(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        k, v = self.text(states).unflatten(2, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / k.shape[-1] ** 0.5).masked_fill(~mask[:, None, None], -torch.inf)
        return self.out(scores.softmax(-1).matmul(v).transpose(1, 2).flatten(2))


class TextBlock(nn.Module):
    """A block that attends to its tokens and to the text, which comes as a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(3))
        self.attention = SelfAttention()
        self.cross = TextAttention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.scales = nn.Parameter(torch.zeros(1, 6, DIM))

    def forward(self, x: Tensor, text: dict[str, Tensor], time: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.scales + time).chunk(6, dim=1)
        x = x + gate1 * self.attention(self.norms[0](x) * (1 + scale1) + shift1, rotary)
        x = x + self.cross(self.norms[1](x), text["states"], text["mask"])
        return x + gate2 * self.mlp(self.norms[2](x) * (1 + scale2) + shift2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class OwnVideo(nn.Module):
    """A video transformer with text states, times and rotary positions of its frames, rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv3d(4, DIM, (1, 2, 2), (1, 2, 2))
        self.words = nn.Linear(TEXT_DIM, DIM)
        self.times = nn.Linear(1, 6 * DIM)
        self.layers = nn.ModuleList(TextBlock() for _ in range(DEPTH))
        self.out = nn.Linear(DIM, 16)

    def forward(self, video: Tensor, text: Tensor, mask: Tensor, time: Tensor) -> Tensor:
        x = self.patches(video).flatten(2).transpose(1, 2)
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * torch.logspace(0, -2, DIM // HEADS // 2)
        angle = torch.cat([angle, angle], dim=1)
        words = {"states": self.words(text), "mask": mask}
        modulation = self.times(time.unsqueeze(1).to(video.dtype) / 100).unflatten(1, (6, DIM))
        for layer in self.layers:
            x = layer(x, words, modulation, (angle.cos(), angle.sin()))
        return self.out(x)


class RotaryBlock(nn.Module):
    """A block that takes rotary positions (1, N, 1, E), as Wan's, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, -1)).unbind(2)
        q, k = (rotate(y, *rotary) for y in (q, k))
        attended = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)))
        x = x + attended.transpose(1, 2).flatten(2)
        return x + self.mlp(x)


class RotaryVideo(nn.Module):
    """A video transformer that knows frames, rows and columns by rotary positions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv3d(4, DIM, (1, 2, 2), (1, 2, 2))
        self.layers = nn.ModuleList(RotaryBlock() for _ in range(DEPTH))

    def forward(self, video: Tensor) -> Tensor:
        x = self.patches(video).flatten(2).transpose(1, 2)
        angle = torch.arange(x.shape[1])[:, None] * torch.logspace(0, -2, DIM // HEADS // 2)
        angle = torch.cat([angle, angle], dim=1)[None, :, None]
        for layer in self.layers:
            x = layer(x, (angle.cos(), angle.sin()))
        return x


@dataclass(frozen=True)
class Stack:
    """A model, and what its forward takes.

    Args:
        inputs: Returns arguments by name for a number of images, which all differ.
    """

    make: Callable[[], Any]
    inputs: Callable[[int], dict[str, Any]]


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _times(batch: int) -> Tensor:
    return torch.arange(batch) * 97 + 31


def _wan(batch: int) -> dict[str, Any]:
    text = _draw(batch, TEXT, TEXT_DIM)
    return {"hidden_states": _draw(batch, 4, 3, 8, 10), "timestep": _times(batch), "encoder_hidden_states": text}


def _wan_by_token(batch: int) -> dict[str, Any]:
    return {**_wan(batch), "timestep": torch.arange(batch * 60).unflatten(0, (batch, 60)) * 3 + 3}


def _pixart(batch: int) -> dict[str, Any]:
    mask = torch.arange(TEXT) < (torch.arange(batch) % 3 + 4).unsqueeze(1)
    text = {"encoder_hidden_states": _draw(batch, TEXT, TEXT_DIM), "encoder_attention_mask": mask.long()}
    return {"hidden_states": _draw(batch, 4, 8, 8), "timestep": _times(batch), **text}


def _own_video(batch: int) -> dict[str, Any]:
    mask = torch.arange(TEXT) < (torch.arange(batch) % 3 + 4).unsqueeze(1)
    return {
        "video": _draw(batch, 4, 3, 8, 10),
        "text": _draw(batch, TEXT, TEXT_DIM),
        "mask": mask,
        "time": _times(batch),
    }


def _make_wan() -> Any:
    widths = {"text_dim": TEXT_DIM, "freq_dim": 16, "ffn_dim": 2 * DIM, "rope_max_seq_len": 32}
    return diffusers.WanTransformer3DModel(**_HEADS, **widths, attention_head_dim=12, out_channels=4)


def _ltx(batch: int) -> dict[str, Any]:
    text = {"encoder_hidden_states": _draw(batch, TEXT, TEXT_DIM), "encoder_attention_mask": torch.ones(batch, TEXT)}
    grid = {"num_frames": 3, "height": 4, "width": 5}
    return {"hidden_states": _draw(batch, 60, 4), "timestep": _times(batch), **text, **grid}


CONDITIONED: dict[str, Stack] = {
    "dit": Stack(
        lambda: diffusers.DiTTransformer2DModel(**_LATENT, num_embeds_ada_norm=10),
        lambda batch: {
            "hidden_states": _draw(batch, 4, 8, 8),
            "timestep": _times(batch),
            "class_labels": torch.arange(batch) % 4 + 1,
        },
    ),
    "pixart": Stack(
        lambda: diffusers.PixArtTransformer2DModel(
            **_LATENT, cross_attention_dim=DIM, caption_channels=TEXT_DIM, use_additional_conditions=False
        ),
        _pixart,
    ),
    "wan": Stack(_make_wan, _wan),
    "wan, times of tokens": Stack(_make_wan, _wan_by_token),
    # Blocks get their tokens by name, and rotary positions for each video.
    "ltx": Stack(
        lambda: diffusers.LTXVideoTransformer3DModel(
            **_HEADS, attention_head_dim=8, out_channels=4, cross_attention_dim=DIM, caption_channels=TEXT_DIM
        ),
        _ltx,
    ),
    "own dit": Stack(
        OwnDiT,
        lambda batch: {"x": _draw(batch, 4, 8, 8), "t": _times(batch), "y": torch.arange(batch) % 4 + 1},
    ),
    "own video": Stack(OwnVideo, _own_video),
    "rotary video": Stack(RotaryVideo, lambda batch: {"video": _draw(batch, 4, 3, 8, 10)}),
}


@made_once
def make_conditioned(name: str, seed: int = 0) -> Any:
    """Return a small evaluated model whose every parameter matters: no gate of zeros."""
    torch.manual_seed(seed)
    model = CONDITIONED[name].make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def tokens_of(name: str) -> mmod.Tokens:
    """Return what a user says of a model: an example of one image."""
    return mmod.Tokens(example=CONDITIONED[name].inputs(1))


def run(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return a model's output for each image."""
    output = model(**inputs)
    return (output if isinstance(output, Tensor) else output.sample).flatten(1)


def only(inputs: dict[str, Any], image: int) -> dict[str, Any]:
    """Return the arguments for one image of a batch."""
    return {name: value[image : image + 1] if isinstance(value, Tensor) else value for name, value in inputs.items()}
