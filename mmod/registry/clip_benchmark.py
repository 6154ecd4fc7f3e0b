"""Routed CLIP models in CLIP_benchmark, which judges models of open_clip on many sets of images.

    python -m mmod.registry.clip_benchmark eval --model_type mmod --model ViT-B-32 --pretrained FOLDER --dataset cifar10

is its own command with one more type of model: `--pretrained` is what `mmod.load_pretrained` takes, and `--model` the
architecture, which says how captions are split into tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mmod.pretrained import load_pretrained

NAME = "mmod"


def load_routed(
    model_name: str, pretrained: str, cache_dir: str | None = None, device: torch.device | str = "cpu"
) -> tuple[nn.Module, Callable[..., Any], Callable[..., Any]]:
    """Load a routed model as CLIP_benchmark asks for it.

    Args:
        model_name: Architecture in open_clip.
        pretrained: A folder of `mmod.save_pretrained`, or "hf-hub:owner/name".
        cache_dir: Ignored; the hub has its cache.

    Returns:
        Model, image transform and tokenizer.
    """
    import open_clip
    from open_clip.transform import PreprocessCfg, image_transform_v2

    model: Any = load_pretrained(pretrained, device)
    picture = PreprocessCfg(**open_clip.get_model_preprocess_cfg(model))
    transform = image_transform_v2(picture, is_train=False)
    return model, transform, open_clip.get_tokenizer(model_name, context_length=model.context_length)


def register() -> None:
    """Add the type of model "mmod" to CLIP_benchmark's own; a second call changes nothing."""
    models = importlib.import_module("clip_benchmark.models")
    if NAME not in models.TYPE2FUNC:
        models.TYPE2FUNC[NAME] = load_routed
        models.MODEL_TYPES.append(NAME)


def main() -> None:
    """Run CLIP_benchmark's command with the type of model "mmod"."""
    register()
    importlib.import_module("clip_benchmark.cli").main()


if __name__ == "__main__":
    main()
