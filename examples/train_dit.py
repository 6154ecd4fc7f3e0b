"""Train a small diffusion transformer on digits with half of its tokens, as TREAD does; it is evaluated dense.

python examples/train_dit.py        # 64 tokens: it shows how. TREAD was found to help from 1,024 tokens on
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import mmod


class DiT(nn.Module):
    """A diffusion transformer on pixels, with the time in a token of its own (in-context conditioning)."""

    def __init__(self, side: int = 8, patch: int = 1, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, **options) for _ in range(depth)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, patch**2))
        self.grid = nn.PixelShuffle(patch)

    def forward(self, noisy_BCHW: Tensor, time_B: Tensor | None = None) -> Tensor:
        """Return the velocity from pictures to noise (B, 1, H, W)."""
        grid = self.embed(noisy_BCHW)
        time_B = noisy_BCHW.new_zeros(len(noisy_BCHW)) if time_B is None else time_B
        x_BND = torch.cat([self.time(time_B[:, None])[:, None], grid.flatten(2).mT + self.positions], dim=1)
        for block in self.blocks:
            x_BND = block(x_BND)
        return self.grid(self.head(x_BND[:, 1:]).mT.unflatten(2, grid.shape[2:]))


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
    mmod.route_(model, "tread", tokens=mmod.Tokens(prefix=1, example=test[:1])).train()
    print("half of the tokens skip", *mmod.routed_blocks(model))
    print(f"a step needs {1 / mmod.flops(model, {'noisy_BCHW': test}).speedup:.2f} of the dense FLOPs")
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
