"""Look inside a routed ViT of timm: a class activation map of its last norm, and an attention rollout.

python examples/look_inside.py                         # small, random weights, a random picture
python examples/look_inside.py --model deit_small_patch16_224 --pretrained --image photo.jpg
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import to_tensor

import mmod
from mmod.analysis.style import new_figure


def activation_map(model: Any, image: Tensor, place: str) -> Tensor:
    """Return the class activation map (rows, columns) of a block's first norm, for the most probable class."""
    seen: list[Tensor] = []
    norm = model.get_submodule(place).norm1

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    handle = norm.register_forward_hook(keep)
    with mmod.trace(model) as decisions:
        model(image)[0].max().backward()
    handle.remove()
    # The norm of a routed block sees kept tokens only; those of a skipped token become 0.
    values, gradients = (mmod.to_all_tokens(rows, decisions[place]) for rows in (seen[0].detach(), seen[0].grad))
    weights = gradients[:, model.num_prefix_tokens :].mean(dim=1)
    weighed = (values[:, model.num_prefix_tokens :] * weights.unsqueeze(1)).sum(-1).relu()
    return weighed[0].unflatten(0, decisions.grid)


def rollout(model: Any, image: Tensor) -> Tensor:
    """Return how much the class token draws from each patch (rows, columns), through the attention of all blocks."""
    maps: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: object, output: Tensor, name: str) -> None:
        maps[name] = output

    handles = [
        block.attn.attn_drop.register_forward_hook(partial(keep, name=f"blocks.{index}"))
        for index, block in enumerate(model.blocks)
    ]
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(image)
    for handle in handles:
        handle.remove()
    total = torch.eye(1 + decisions.grid[0] * decisions.grid[1])
    for name, attention in maps.items():
        # Skipped tokens attend to themselves, as they pass a block by unchanged.
        whole = mmod.to_all_tokens(attention, decisions[name], attention=True) if name in decisions else attention
        total = (whole[0].mean(dim=0) + torch.eye(len(total))) / 2 @ total
    return total[0, 1:].unflatten(0, decisions.grid)


def main() -> None:
    """Route the model that the command line names, and draw both maps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="test_vit")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--image", help="a picture; random pixels without one")
    parser.add_argument("--output", default="inside.png")
    options = parser.parse_args()

    model: Any = timm.create_model(options.model, pretrained=options.pretrained).eval()
    for block in model.blocks:
        # Fused attention has no map.
        block.attn.fused_attn = False
    mmod.route_(model, mmod.RoutingConfig(router="attention", blocks="late", capacity=0.5))

    size = model.pretrained_cfg["input_size"][-1]
    image = torch.rand(3, size, size)
    if options.image:
        image = to_tensor(Image.open(options.image).convert("RGB").resize((size, size)))
    mean, std = (torch.tensor(model.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    batch = ((image - mean) / std).unsqueeze(0)

    last = f"blocks.{len(model.blocks) - 1}"
    pictures = {"image": image.permute(1, 2, 0), "activation map": activation_map(model, batch, last)}
    pictures["attention rollout"] = rollout(model, batch)
    figure = new_figure(6, 2.3)
    for axis, (title, picture) in zip(figure.subplots(1, 3), pictures.items()):
        axis.imshow(picture.numpy())
        axis.set(xticks=[], yticks=[], title=title)
    figure.savefig(options.output)
    print(f"{last} keeps half of the tokens; maps of {tuple(pictures['attention rollout'].shape)}: {options.output}")


if __name__ == "__main__":
    main()
