"""Train a small diffusion transformer on digits with half of its tokens, as TREAD does; it is evaluated dense.

python examples/train_dit.py        # 64 tokens: it shows how. TREAD was found to help from 1,024 tokens on
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from timm.layers import Mlp
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

import mmod


class Block(nn.Module):
    """A transformer block whose norms and updates the condition scales, shifts and gates (adaLN-zero)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attn = Attention(width, width // 64, qkv_bias=True)
        self.mlp = Mlp(width, 4 * width)
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x_BND: Tensor, condition_BD: Tensor) -> Tensor:
        """Return tokens (B, N, D)."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition_BD)[:, None].chunk(6, dim=-1)
        x_BND = x_BND + gate * self.attn(self.norm1(x_BND) * (1 + scale) + shift)
        return x_BND + mlp_gate * self.mlp(self.norm2(x_BND) * (1 + mlp_scale) + mlp_shift)


class DiT(nn.Module):
    """A diffusion transformer on pixels (Peebles and Xie, arXiv 2212.09748), conditioned on the time alone."""

    def __init__(self, side: int = 8, patch: int = 1, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, patch**2))
        self.grid = nn.PixelShuffle(patch)

    def forward(self, noisy_BCHW: Tensor, time_B: Tensor) -> Tensor:
        """Return the velocity from pictures to noise (B, 1, H, W)."""
        grid = self.embed(noisy_BCHW)
        x_BND = grid.flatten(2).mT + self.positions
        condition_BD = self.time(time_B[:, None])
        for block in self.blocks:
            x_BND = block(x_BND, condition_BD)
        return self.grid(self.head(x_BND).mT.unflatten(2, grid.shape[2:]))


def loss_of(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    """Return the loss of flow matching: noise and pictures are mixed, and the model predicts their difference."""
    noise = torch.randn_like(images_BCHW)
    time_B = torch.rand(len(images_BCHW), device=images_BCHW.device)
    mixed = images_BCHW + time_B[:, None, None, None] * (noise - images_BCHW)
    return (model(mixed, time_B) - (noise - images_BCHW)).square().mean()


def main() -> None:
    """Train, and compare the loss of the routed model with that of the dense one."""
    torch.manual_seed(0)
    images = torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1
    train, test = images[:1500], images[1500:]
    model = DiT()
    example = {"noisy_BCHW": test[:2], "time_B": torch.rand(2)}
    mmod.route_(model, "tread", tokens=mmod.Tokens(example=example)).train()
    print("half of the tokens skip", *mmod.routed_blocks(model))
    print(f"a step needs {mmod.flops(model, example).share:.2f} of the dense FLOPs")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(40):
        loss = loss_of(model, train[torch.randint(len(train), (32,))])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            print(f"step {step + 1}: loss {loss:.2f} on half of the tokens")
    model.eval()
    print("blocks in evaluation:", type(model.blocks[2]).__name__)
    with torch.no_grad():
        print(f"loss of the dense model {loss_of(model, test):.2f}")


if __name__ == "__main__":
    main()
