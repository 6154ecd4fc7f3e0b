"""Retrieval, zero-shot accuracy and kept shares of an image-text model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mmod.analysis.modes import in_mode
from mmod.data.embedded import zero_shot_prompts
from mmod.data.labels import some_names
from mmod.data.loader import BatchStream, Tokenizer, Transform, folder_stream
from mmod.io.processes import process_count, process_rank
from mmod.training.engine.evaluate import (
    BatchStore,
    Columns,
    Evaluated,
    RoutedResult,
    decisions_of,
    kept_means,
    kept_rows,
    read_rows,
    store_of,
)
from mmod.training.engine.task import autocast
from mmod.values import check_finite

_ROWS = 1024
# Images of a folder that are classified at once.
_BATCH = 64


@dataclass(frozen=True)
class EvalResult(RoutedResult):
    """The result of an evaluation on pairs: recall at 1 and 5 in both directions, and accuracies, in percent.

    Args:
        zero_shot_top1: Zero-shot accuracy; None without zero-shot classes.
        kept: Mean kept share of tokens, in [0, 1], by routed block.
    """

    image_to_text_r1: float
    image_to_text_r5: float
    text_to_image_r1: float
    text_to_image_r5: float
    samples: int
    zero_shot_top1: float | None
    zero_shot_top5: float | None
    kept: dict[str, float]

    @property
    def recall1(self) -> float:
        """Recall at 1, mean of both directions."""
        return (self.image_to_text_r1 + self.text_to_image_r1) / 2

    @property
    def recall5(self) -> float:
        """Recall at 5, mean of both directions."""
        return (self.image_to_text_r5 + self.text_to_image_r5) / 2

    def columns(self) -> dict[str, float]:
        """Return the figures by name, with the means of recall in both directions."""
        return super().columns() | {"recall1": self.recall1, "recall5": self.recall5}

    def __str__(self) -> str:
        zero = ""
        if self.zero_shot_top1 is not None:
            zero = f", zero-shot top-1 {self.zero_shot_top1:.2f} %"
        return (
            f"image to text R@1 {self.image_to_text_r1:.2f} %, R@5 {self.image_to_text_r5:.2f} %, "
            f"text to image R@1 {self.text_to_image_r1:.2f} %, R@5 {self.text_to_image_r5:.2f} %{zero}"
            f"{self.told_kept} ({self.samples} pairs)"
        )


def evaluate_set(
    model: nn.Module,
    stream: BatchStream,
    tokenizer: Tokenizer,
    precision: str = "fp32",
    *,
    zero_shot: str | None = None,
    transform: Transform | None = None,
    workers: int = 0,
    progress: bool = False,
    store: BatchStore | None = None,
) -> Evaluated:
    """Measure retrieval in both directions, zero-shot accuracy and kept shares over one pass of a stream.

    A caption of several images matches each of them, and counts once among the captions of an image. With several
    processes, each evaluates its share of the data and all return the result of all data. The outcome of a pair is its
    recall at 1, the mean of both directions.

    Args:
        model: An open_clip model; its mode is restored at the end.
        tokenizer: From prompts to tokens (B, L).
        zero_shot: "scenes", "imagenet:FOLDER" or None; see `TrainConfig`.
        transform: From a PIL image to a tensor, for the images of a folder.
        workers: Worker processes that read the images of a folder.
        store: See `mmod.training.engine.kind.Kind.score`.

    Raises:
        ValueError: The stream is empty, embeddings are not finite, or an image has no zero-shot class.
    """
    read = partial(evaluate_batch, precision=precision)
    rows = read_rows(read, model, stream, progress=progress, store=store)
    device = next(model.parameters()).device
    images, texts, tokens = (rows[name].to(device) for name in ("image", "text", "tokens"))
    for name, embeddings in (("image", images), ("text", texts)):
        check_finite(f"the {name} embeddings of an evaluation", embeddings)
    top1 = top5 = None
    with in_mode(False, model), torch.no_grad(), autocast(device, precision):
        if zero_shot == "scenes":
            top1, top5 = classify_scenes(model, tokenizer, images, tokens)
        elif zero_shot is not None:
            folder = zero_shot.partition(":")[2]
            assert transform is not None
            classify = partial(classify_folder, model, tokenizer, transform, folder, stream=stream, workers=workers)
            top1, top5 = classify(bar=progress, store=store_of(store, "zero-shot"))
    first_N, second_N = rank_both_ways(images, texts, tokens)
    result = EvalResult(
        image_to_text_r1=share(first_N < 1),
        image_to_text_r5=share(first_N < 5),
        text_to_image_r1=share(second_N < 1),
        text_to_image_r5=share(second_N < 5),
        samples=len(tokens),
        zero_shot_top1=top1,
        zero_shot_top5=top5,
        kept=kept_means(rows),
    )
    recall_N = _recall(first_N, second_N).cpu().numpy()
    return Evaluated(result, {"recall1": recall_N})


def evaluate_batch(model: nn.Module, batch: tuple[Tensor, Tensor], precision: str = "fp32") -> Columns:
    """Return the rows of a batch: embeddings, the captions' tokens, shares of kept tokens, "loss" and "outcome".

    The last two are cross entropy and recall at 1 of every pair among those of its batch, the mean of both directions.
    Images with equal captions match each other's, and a tie counts as a miss.

    Args:
        model: An open_clip model, made with `output_dict=True`.
        batch: Images (B, C, H, W) and their captions' tokens (B, L).

    Source: the loss of CLIP (arXiv 2103.00020).
    """
    images, texts = batch
    with autocast(images.device, precision), decisions_of(model) as decisions:
        output = model(images, texts)
    image_BD, text_BD, scale = (output[name].float() for name in ("image_features", "text_features", "logit_scale"))
    loss_B, outcome_B = _among(image_BD, text_BD, scale, texts)
    rows = {"loss": loss_B, "outcome": outcome_B, "image": image_BD, "text": text_BD, "tokens": texts}
    return {**rows, **kept_rows(decisions)}


def _recall(first_N: Tensor, second_N: Tensor) -> Tensor:
    """Return recall at 1 of every pair from its ranks in both directions, their mean."""
    return ((first_N < 1).float() + (second_N < 1)) / 2


def rank_both_ways(images: Tensor, texts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many wrong captions rank before the right one of each image, and wrong images of each caption.

    Equal captions are one caption: its copies would fill the first ranks of an image together.

    Args:
        images: Embeddings of images (N, D), of length 1.
        texts: Embeddings of their captions (N, D), of length 1.
        tokens: The captions' tokens (N, L).

    Example:
        >>> images, texts = torch.eye(3), torch.eye(3)[[1, 0, 0]]
        >>> rank_both_ways(images, texts, torch.tensor([[7], [8], [8]]))
        (tensor([1, 1, 1]), tensor([2, 1, 1]))
    """
    # Equal captions are one entry: each of them is the right answer to all of their images.
    captions, copy_N = torch.unique(tokens, dim=0, return_inverse=True)
    position_N = torch.arange(len(tokens), device=tokens.device)
    # The first pair of each caption, found by the smallest position.
    once_C = position_N.new_full((len(captions),), len(tokens)).scatter_reduce(0, copy_N, position_N, "amin")
    caption_N = copy_N.to(images.device)
    distinct_C = once_C.to(images.device)
    return (
        rank_matches(images, texts[distinct_C], caption_N, caption_N[distinct_C]),
        rank_matches(texts, images, caption_N, caption_N),
    )


def rank_matches(queries: Tensor, entries: Tensor, query_captions: Tensor, entry_captions: Tensor) -> Tensor:
    """Return the number of wrong entries (N,) before the best match of each query; a tie counts against the query.

    Args:
        queries: Embeddings (N, D), of length 1.
        entries: Embeddings (M, D) of the other modality.
        query_captions: Number of each query's caption (N,).
        entry_captions: Number of each entry's caption (M,); a query and an entry of one caption match.
    """
    ranks = []
    # By rows, because the full matrix of a large set does not fit into memory.
    for first in range(0, len(queries), _ROWS):
        similarity = queries[first : first + _ROWS] @ entries.T
        right = query_captions[first : first + _ROWS, None] == entry_captions[None]
        best = similarity.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        # Negated comparison: a NaN similarity ranks before the match.
        ranks.append((~right & ~(similarity < best)).sum(1))
    return torch.cat(ranks)


def _among(image_BD: Tensor, text_BD: Tensor, scale: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss and recall at 1 of every pair among those of its batch; see `evaluate_batch`."""
    captions = torch.unique(texts, dim=0, return_inverse=True)[1]
    same_BB = captions[:, None] == captions[None]
    loss_B = image_BD.new_zeros(len(texts))
    for queries, others in ((image_BD, text_BD), (text_BD, image_BD)):
        similarity_BB = scale * queries @ others.T
        # The probability of any matching pair, since equal captions are not wrong.
        matched_B = similarity_BB.masked_fill(~same_BB, -torch.inf).logsumexp(1)
        loss_B += (similarity_BB.logsumexp(1) - matched_B) / 2
    return loss_B, _recall(*rank_both_ways(image_BD, text_BD, texts))


def classify_scenes(model: object, tokenizer: Tokenizer, images: Tensor, tokens: Tensor) -> tuple[float, float]:
    """Return top-1 and top-5 accuracy in percent on the first digit of each scene, read from its caption."""
    names, templates = zero_shot_prompts()
    prompts = tokenizer([template.format(name) for name, template in product(names, templates)])
    # A prompt's number counts templates within classes.
    class_of = {tuple(row): number // len(templates) for number, row in enumerate(prompts.tolist())}
    classes = [class_of.get(tuple(row)) for row in tokens.tolist()]
    if None in classes:
        raise ValueError(f"pair {classes.index(None)} has a caption of another kind than the embedded set's")
    logits = images @ _classifier(model, tokenizer, names, templates)
    rows = _hits(logits, torch.tensor(classes, device=images.device))
    return share(rows["first"]), share(rows["five"])


def classify_folder(
    model: nn.Module,
    tokenizer: Tokenizer,
    transform: Transform,
    folder: str,
    *,
    stream: BatchStream,
    workers: int,
    bar: bool,
    store: BatchStore | None,
) -> tuple[float, float]:
    """Return top-1 and top-5 accuracy in percent on the images in FOLDER/CLASS/, over all processes.

    Prompts are open_clip's ImageNet names and templates. Images that cannot be read are faults of the stream's report.
    """
    from open_clip import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES

    batches, names = folder_stream(folder, transform, stream.report, _BATCH, workers, process_rank(), process_count())
    check_imagenet(names, len(IMAGENET_CLASSNAMES), folder)
    weights = _classifier(model, tokenizer, IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES)

    def classify(model: Any, batch: tuple[Tensor, Tensor]) -> Columns:
        images, classes = batch
        return _hits(model.encode_image(images, normalize=True).float() @ weights, classes)

    rows = read_rows(classify, model, batches, progress=bar, store=store)
    return share(rows["first"]), share(rows["five"])


def check_imagenet(names: Sequence[str], expected: int, folder: str) -> None:
    """Raise a ValueError unless folders are all of ImageNet's classes, in the order of the prompts.

    Valid names are all WordNet identifiers, as ImageNet comes, or all numbers of classes.
    """
    are_numbers = all(name.isdecimal() for name in names)
    are_classes = are_numbers and sorted(map(int, names)) == list(range(expected))
    # ImageNet's own names, which come in the order of the prompts.
    are_synsets = all(re.fullmatch(r"n\d+", name) for name in names)
    if len(names) != expected or not (are_classes or are_synsets):
        raise ValueError(
            f"{folder!r} must have {expected} folders, named by WordNet identifiers such as n01440764, or by numbers "
            f"from 0 to {expected - 1} in their order, so that each is known to prompts; got {len(names)}: "
            f"{some_names([*names], 20)}"
        )


def _classifier(model: Any, tokenizer: Tokenizer, names: Sequence[str], templates: Sequence[object]) -> Tensor:
    from open_clip import build_zero_shot_classifier

    device = next(model.parameters()).device
    weights: Tensor = build_zero_shot_classifier(model, tokenizer, names, templates, device=device)
    return weights.float()


def _hits(logits: Tensor, classes: Tensor) -> Columns:
    """Return whether the class of each image is the first guess, and among the first five."""
    hits = logits.topk(5, dim=1).indices == classes[:, None]
    return {"first": hits[:, 0], "five": hits.any(1)}


def share(hits: Tensor) -> float:
    """Return the share that is true, in percent."""
    return 100 * float(hits.double().mean())
