"""Route a ViT of timm: what it saves, and which patches each routed block keeps.

python examples/route_timm_vit.py                         # small, random weights, a random picture
python examples/route_timm_vit.py --model deit_small_patch16_224 --pretrained --image photo.jpg
"""

from __future__ import annotations

import argparse

import timm
import torch
from PIL import Image, ImageOps
from torchvision.transforms.functional import to_tensor

import mmod


def main() -> None:
    """Route the model that the command line names, and draw its maps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="test_vit")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--image", help="a picture; random pixels without one")
    parser.add_argument("--capacity", type=float, default=0.5, help="share of tokens that a routed block keeps")
    parser.add_argument("--output", default="routing_maps.png")
    options = parser.parse_args()

    model = timm.create_model(options.model, pretrained=options.pretrained).eval()
    mmod.route_(model, mmod.RoutingConfig(router="attention", blocks="late", capacity=options.capacity))
    print(model.blocks[-1].router)

    size = model.pretrained_cfg["input_size"][-1]
    image = torch.rand(3, size, size)
    if options.image:
        image = to_tensor(ImageOps.exif_transpose(Image.open(options.image)).convert("RGB").resize((size, size)))
    mean, std = (torch.tensor(model.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))

    with torch.no_grad(), mmod.trace(model) as routing:
        model(((image - mean) / std).unsqueeze(0))
    print("kept:", {name: round(share, 2) for name, share in routing.kept_shares().items()})
    print(mmod.flops(model, size))

    routing.plot(image.unsqueeze(0)).savefig(options.output)
    print(f"maps: {options.output}")


if __name__ == "__main__":
    main()
