"""CLIP_benchmark's command with one more type of model: `mmod`, whose `--pretrained` goes to `mmod.open_model`.

python -m mmod.registry.clip_benchmark eval --model_type mmod --model ViT-B-32 --pretrained FOLDER --dataset cifar10
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import nn

from mmod.opening.open import open_model

NAME = "mmod"


def load_routed(
    model_name: str, pretrained: str, cache_dir: str | None = None, device: torch.device | str = "cpu"
) -> tuple[nn.Module, Callable[..., object], Callable[..., object]]:
    """Return a routed model, its image transform and its tokenizer, as CLIP_benchmark expects them.

    Args:
        model_name: Architecture in open_clip, which says how captions are split into tokens.
        pretrained: A folder of `mmod.save_pretrained`, or "hf-hub:owner/name".
        cache_dir: Ignored; the hub has its cache.
    """
    import open_clip
    from open_clip.transform import PreprocessCfg, image_transform_v2

    model = open_model(pretrained).model.to(device)
    # By open_clip's defaults where the model does not say how its images are prepared.
    picture = PreprocessCfg(**open_clip.get_model_preprocess_cfg(model))
    transform = image_transform_v2(picture, is_train=False)
    return model, transform, open_clip.get_tokenizer(model_name, context_length=model.context_length)


def register() -> None:
    """Add the type of model "mmod" to CLIP_benchmark's; a second call changes nothing."""
    models = importlib.import_module("clip_benchmark.models")
    if NAME not in models.TYPE2FUNC:
        models.TYPE2FUNC[NAME] = load_routed
        # Choices of the command's option, beside the functions.
        models.MODEL_TYPES.append(NAME)


def main() -> None:
    """Run CLIP_benchmark's command with the type of model "mmod"."""
    register()
    importlib.import_module("clip_benchmark.cli").main()


if __name__ == "__main__":
    main()
