"""Zero-shot classification by the embeddings of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmod.data.readers.pairs import Tokenizer, Transform
from mmod.data.synthetic.scenes import zero_shot_prompts
from mmod.io.progress import progress_bar
from mmod.training.engine.distributed import sum_over_processes


def classify_scenes(model: Any, tokenizer: Tokenizer, images: Tensor, tokens: Tensor) -> tuple[float, float]:
    """Return top-1 and top-5 accuracy in percent on the first digit of each scene, read from its caption."""
    names, templates = zero_shot_prompts()
    prompts = tokenizer([template.format(name) for name in names for template in templates])
    places = {tuple(row): place // len(templates) for place, row in enumerate(prompts.tolist())}
    classes = [places.get(tuple(row)) for row in tokens.tolist()]
    if None in classes:
        raise ValueError(f"pair {classes.index(None)} has a caption of another kind than the embedded set's")
    logits = images @ _classifier(model, tokenizer, names, templates)
    return _top(logits, torch.tensor(classes, device=images.device))


def classify_folder(
    model: Any,
    tokenizer: Tokenizer,
    transform: Transform,
    folder: str,
    *,
    workers: int,
    place: tuple[int, int],
    bar: bool,
) -> tuple[float, float]:
    """Return top-1 and top-5 accuracy in percent on the images in FOLDER/CLASS/, over all processes.

    Prompts are open_clip's ImageNet names and templates.
    """
    from open_clip import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES
    from torch.utils.data import DataLoader, Subset
    from torchvision.datasets import ImageFolder  # type: ignore[import-untyped]

    data = ImageFolder(folder, transform=transform)
    if len(data.classes) != len(IMAGENET_CLASSNAMES):
        raise ValueError(
            f"{folder!r} holds {len(data.classes)} classes, ImageNet's validation set has {len(IMAGENET_CLASSNAMES)}"
        )
    mine = Subset(data, range(place[0], len(data), place[1]))
    batches: Iterable[tuple[Tensor, Tensor]] = DataLoader(mine, batch_size=64, num_workers=workers)
    weights = _classifier(model, tokenizer, IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES)
    device = weights.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, classes in progress_bar(batches, desc="zero-shot", shown=bar):
        logits = model.encode_image(images.to(device), normalize=True).float() @ weights
        first, five = _top(logits, classes.to(device))
        sums += len(images) * torch.tensor([first, five, 1.0], dtype=torch.float64, device=device)
    first, five, count = sum_over_processes(sums).tolist()
    return first / count, five / count


def _classifier(model: Any, tokenizer: Tokenizer, names: Sequence[str], templates: Sequence[Any]) -> Tensor:
    from open_clip import build_zero_shot_classifier

    device = next(model.parameters()).device
    weights: Tensor = build_zero_shot_classifier(model, tokenizer, names, templates, device=device)
    return weights.float()


def _top(logits: Tensor, classes: Tensor) -> tuple[float, float]:
    hits = logits.topk(5, dim=1).indices == classes[:, None]
    return share(hits[:, 0]), share(hits.any(1))


def share(hits: Tensor) -> float:
    """Return the share that is true, in percent."""
    return 100 * float(hits.double().mean())
