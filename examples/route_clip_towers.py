"""Route both towers of a CLIP model, each by a config of its own, and change its budget afterwards.

python examples/route_clip_towers.py                      # small, random weights
python examples/route_clip_towers.py --model ViT-B-32 --weights laion2b_s34b_b79k
"""

from __future__ import annotations

import argparse
from typing import Any

import open_clip
import torch

import mmod

SMALL = {
    "embed_dim": 32,
    "vision_cfg": {"width": 64, "head_width": 16, "layers": 4, "patch_size": 8, "image_size": 64},
    "text_cfg": {"width": 64, "heads": 4, "layers": 4},
}


def main() -> None:
    """Route the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--weights", help="tag of published weights; without one, a small random model of that kind")
    options = parser.parse_args()

    shape: dict[str, Any] = {} if options.weights else SMALL
    model = open_clip.create_model(options.model, pretrained=options.weights, **shape).eval()
    mmod.route_(
        model,
        image=mmod.RoutingConfig(router="attention", blocks="late", capacity=0.5),
        text=mmod.RoutingConfig(router="linear", capacity=0.5),
    )

    ids = open_clip.get_tokenizer(options.model)(["a photo of a dog", "a diagram of a routed block"])
    images = torch.randn(2, 3, *model.visual.image_size)
    for capacity in (0.5, 0.25):
        mmod.set_capacity_(model, capacity)
        with torch.no_grad():
            similarity = model.encode_image(images, normalize=True) @ model.encode_text(ids, normalize=True).T
        image, text = mmod.flops(model.visual, images.shape[-1]), mmod.flops(model, {"text": ids[:1]})
        print(f"capacity {capacity}: {image.share:.2f} of the dense FLOPs for an image, {text.share:.2f} for a caption")
        print(f"similarity of images and captions: {similarity.tolist()}")


if __name__ == "__main__":
    main()
