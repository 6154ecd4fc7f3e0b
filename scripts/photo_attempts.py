"""Try ways to make DINOv2 cheaper on photographs with label maps: `python scripts/photo_attempts.py FOLDER FILE`.

FOLDER holds images/{train,test} and labels/{train,test}, FILE the first blocks of timm's ViT-S/14. A linear classifier
of patches is fitted on 24 images and tested on 48. Axes: B images, N tokens, K rows, H heads, E channels of a head.
"""

import argparse
import copy
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import mmod
from mmod.analysis.statistics import Resampling
from mmod.data.config import DataConfig
from mmod.data.loader import image_stream
from mmod.methods import Merge, Method
from mmod.opening.weights import converted
from mmod.ops import gather_rows, mean_rows, unit_rows
from mmod.ops.alike import nearest_rows, redundancy_scores
from mmod.planning import falling
from mmod.studies.features import figures_of
from mmod.studies.image import mean_iou

SIDE, GRID = 448, 40
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Steps:
    """Merging between attention and MLP as `preset("gradual")` does it, with a place for every attempt.

    Args:
        plan: Block to the share of all tokens that it keeps.
        score: "redundancy" or "random"; "windows" makes every window of 2x2 patches one row.
        by_size: Power of a row's size that multiplies its score.
        restored_from: Number of the most similar rows whose updates a token gets back, weighted by similarity.
        shared_among: Number of the most similar rows into which a token is merged, and from which it is restored.
        restored_before: Block before which all tokens are restored; None for after the last one.
        pooled_keys: Keys and values are means over windows of 2x2 patches, from the second block on.
        thresholds: Block to the score above which a row is kept, instead of the plan's number; images run one by one.
    """

    plan: dict[int, float] = field(default_factory=dict)
    score: str = "redundancy"
    by_size: float = 0.0
    restored_from: int = 1
    shared_among: int = 1
    restored_before: int | None = None
    pooled_keys: bool = False
    thresholds: dict[int, float] | None = None


# What tokens are compared by (B, N, E), and which rows are kept (B, K).
Compared = tuple[Tensor, Tensor]


class Merging(NamedTuple):
    """What a merging needs to be undone: tokens, rows, slot or weights of each token."""

    x_BND: Tensor
    z_BKD: Tensor
    into: Tensor
    compared: Compared | None


def heads(block: Any, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (B, H, N, E)."""
    attention = block.attn
    shape = (*x_BND.shape[:2], 3, attention.num_heads, attention.head_dim)
    q, k, v = attention.qkv(block.norm1(x_BND)).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
    return attention.q_norm(q), attention.k_norm(k), v


def attended(block: Any, q: Tensor, k: Tensor, v: Tensor, size_BN: Tensor | None) -> Tensor:
    """Return the update of the attention, in which a key counts as the tokens of its row."""
    bias = None if size_BN is None else size_BN.log()[:, None, None, :]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    update: Tensor = block.ls1(block.attn.proj(out.transpose(1, 2).flatten(2)))
    return update


def fed(block: Any, x_BND: Tensor) -> Tensor:
    """Return the update of the MLP."""
    update: Tensor = block.ls2(block.mlp(block.norm2(x_BND)))
    return update


def embedded(model: Any, images: Tensor) -> Tensor:
    """Return the input of the first block."""
    x: Tensor = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    return x


def window_slots(patches: int) -> Tensor:
    """Return the slot of each token, the class token alone and patches by windows of 2x2."""
    side = math.isqrt(patches)
    row = torch.arange(side) // 2
    slot = (row[:, None] * -(-side // 2) + row).flatten() + 1
    return torch.cat([slot.new_zeros(1), slot])


def merging_forward(model: Any, images: Tensor, steps: Steps, record: dict[int, list[Tensor]] | None = None) -> Tensor:
    """Return the patches' features (B, N, D) of a model whose tokens merge as `steps` says."""
    x = embedded(model, images)
    tokens, size, undo = x.shape[1], None, list[Merging]()
    compared: Compared | None
    for number, block in enumerate(model.blocks):
        if number == steps.restored_before:
            x, size, undo = restored(steps, x, undo), None, []
        q, k, v = heads(block, x)
        if steps.pooled_keys and number:
            update = attended(block, q, *pooled(k, v))
        else:
            update = attended(block, q, k, v, size)
        x = x + update
        if number in steps.plan:
            if steps.score == "windows":
                slot, compared = window_slots(tokens - 1).expand(len(x), -1), None
            else:
                unit = unit_rows(x, 64)
                if steps.score == "random":
                    scores = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(number))
                else:
                    scores = redundancy_scores(unit, prefix=1)
                if record is not None:
                    record.setdefault(number, []).append(scores[:, 1:].flatten())
                compared = unit, chosen(steps, number, scores, size, tokens)
                slot = nearest_rows(*compared, prefix=1)
            x, size, merging = merged(steps, x, slot, size, compared)
            undo.append(merging)
        x = x + fed(block, x)
    patches: Tensor = model.norm(restored(steps, x, undo))[:, 1:]
    return patches


def chosen(steps: Steps, number: int, scores: Tensor, size: Tensor | None, tokens: int) -> Tensor:
    """Return the kept rows (B, K), ascending."""
    if size is not None and steps.by_size:
        scores = scores * size.pow(steps.by_size)
    kept = int(steps.plan[number] * tokens + 1e-6)
    if steps.thresholds is not None:
        kept = int((scores[:, 1:] > steps.thresholds[number]).sum()) + 1
    scores = scores.index_fill(1, torch.tensor([0]), torch.inf)
    return scores.topk(kept, dim=1).indices.sort(dim=1).values


def merged(
    steps: Steps, x: Tensor, slot: Tensor, size: Tensor | None, compared: Compared | None
) -> tuple[Tensor, Tensor, Merging]:
    """Return the rows, their sizes, and what undoes the merging."""
    count = int(slot.max()) + 1 if compared is None else compared[1].shape[1]
    one = x.new_ones(x.shape[:2]) if size is None else size
    if steps.shared_among > 1:
        assert compared is not None
        weight, place = similar(*compared, steps.shared_among)
        into = x.new_zeros(*x.shape[:2], count).scatter_(2, place, weight)
        sized = into * one.unsqueeze(-1)
        new = sized.sum(1).clamp_min(1e-6)
        z = sized.transpose(1, 2) @ x / new.unsqueeze(-1)
        return z, new, Merging(x, z, into, compared)
    new = x.new_zeros(len(x), count).scatter_add_(1, slot, one)
    if size is None:
        z = mean_rows(x, slot, new, all_join=True)
    else:
        z = x.new_zeros(len(x), count, x.shape[2])
        z = z.scatter_add_(1, slot.unsqueeze(-1).expand_as(x), x * one.unsqueeze(-1)) / new.unsqueeze(-1)
    return z, new, Merging(x, z, slot, compared)


def similar(unit: Tensor, index: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return weights and slots of the kept rows most similar to each token (B, N, most); the class token has itself."""
    best, place = (unit @ gather_rows(unit, index[:, 1:]).transpose(1, 2)).topk(most, dim=-1)
    weight, place = torch.softmax(best / 0.05, -1), place + 1
    weight[:, 0], place[:, 0] = 0, 0
    weight[:, 0, 0] = 1
    return weight, place


def restored(steps: Steps, y: Tensor, undo: list[Merging]) -> Tensor:
    """Return all tokens from the rows of the last merging."""
    for x, z, into, compared in reversed(undo):
        update = y - z
        if steps.shared_among > 1:
            y = x + into @ update
        elif steps.restored_from > 1:
            assert compared is not None
            weight, place = similar(*compared, steps.restored_from)
            y = x + sum(gather_rows(update, place[..., n]) * weight[..., n, None] for n in range(steps.restored_from))
        else:
            y = x + gather_rows(update, into)
    return y


def pooled(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return means of keys and values over windows of 2x2 patches, and the sizes of the windows."""
    side = math.isqrt(k.shape[2] - 1)

    def pool(t: Tensor) -> Tensor:
        grid = t[:, :, 1:].flatten(0, 1).transpose(1, 2).unflatten(2, (side, side))
        means = F.avg_pool2d(grid, 2, ceil_mode=True, count_include_pad=False).flatten(2).transpose(1, 2)
        return torch.cat([t[:, :, :1], means.unflatten(0, t.shape[:2])], 2)

    k, v = pool(k), pool(v)
    size = torch.full((1, k.shape[2]), 4.0)
    size[:, 0] = 1
    return k, v, size


@dataclass(frozen=True)
class Parts:
    """All tokens live on, and groups stand for them in parts of a block.

    Args:
        capacity: Number of groups, as a share of the tokens.
        keys, mlp: Whether "all" tokens or "groups" are read by the attention, and transformed by the MLP.
        decided: Blocks at whose input the groups are formed anew.
    """

    capacity: float
    keys: str
    mlp: str
    decided: tuple[int, ...] = (1, 4, 7)


def parts_forward(model: Any, images: Tensor, parts: Parts) -> Tensor:
    """Return the patches' features (B, N, D) of a model in which groups stand for tokens in parts of its blocks."""
    x, slot, size = embedded(model, images), None, None
    for number, block in enumerate(model.blocks):
        if number in parts.decided:
            unit = unit_rows(x, 64)
            kept = redundancy_scores(unit, prefix=1).topk(int(parts.capacity * x.shape[1]), dim=1).indices
            slot = nearest_rows(unit, kept.sort(dim=1).values, prefix=1)
            size = x.new_zeros(kept.shape).scatter_add_(1, slot, x.new_ones(slot.shape))
        if slot is None or size is None:
            x = block(x)
            continue
        read = mean_rows(x, slot, size, all_join=True) if parts.keys == "groups" else x
        # Only what is used is projected.
        q, k, v = projected(block, x, read)
        x = x + attended(block, q, k, v, size if parts.keys == "groups" else None)
        rows = mean_rows(x, slot, size, all_join=True) if parts.mlp == "groups" else x
        x = x + (gather_rows(fed(block, rows), slot) if parts.mlp == "groups" else fed(block, rows))
    patches: Tensor = model.norm(x)[:, 1:]
    return patches


def projected(block: Any, asking: Tensor, read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries of some rows, keys and values of others (B, H, N, E)."""
    attention, dim = block.attn, asking.shape[2]
    weight, bias = attention.qkv.weight, attention.qkv.bias
    normed = block.norm1(asking)
    q = F.linear(normed, weight[:dim], bias[:dim])
    k, v = F.linear(normed if read is asking else block.norm1(read), weight[dim:], bias[dim:]).chunk(2, -1)
    q, k, v = (t.unflatten(2, (attention.num_heads, attention.head_dim)).transpose(1, 2) for t in (q, k, v))
    return q, k, v


def rows(weights: Path, images: Tensor) -> dict[str, tuple[int, Forward]]:
    """Return the side of the images and the forward pass of every row, gradual merging first.

    Thresholds are calibrated on `images`.
    """
    plan, sparser = (dict(zip(range(1, 11, 2), falling(11, mean).capacity[::2])) for mean in (0.55, 0.45))
    model = dinov2(weights, 11)

    def changed(method: Method) -> Forward:
        return patches_of(mmod.apply_(copy.deepcopy(model), method))

    def steps(**options: Any) -> tuple[int, Forward]:
        values = Steps(**{"plan": plan, **options})
        return SIDE, lambda images: merging_forward(model, images, values)

    def parts(*values: Any) -> tuple[int, Forward]:
        return SIDE, lambda images: parts_forward(model, images, Parts(*values))

    return {
        "gradual, 0.55": steps(),
        "gradual, 0.45": steps(plan=sparser),
        "gradual, 0.45, on 560 pixels": (560, lambda images: merging_forward(model, images, Steps(sparser))),
        "dense, 560 pixels": (560, patches_of(model)),
        "dense, 448 pixels": (SIDE, patches_of(model)),
        "dense, 392 pixels": (392, patches_of(model)),
        "dense, 336 pixels": (336, patches_of(model)),
        "8 of the 11 blocks": (SIDE, patches_of(dinov2(weights, 8))),
        "ToMe, 75 tokens a block, restored": (SIDE, changed(Merge(r=75))),
        "gradual, 0.55, random": steps(score="random"),
        "restored from four rows": steps(restored_from=4),
        "shared among four rows": steps(shared_among=4),
        "kept by size": steps(by_size=0.5),
        "last block on all tokens": steps(plan={1: 0.75, 3: 0.55, 5: 0.35, 7: 0.2}, restored_before=10),
        "threshold of similarity": (SIDE, by_threshold(model, plan, images)),
        "windows after the sixth block": steps(plan={5: 0.25}, score="windows"),
        "pooled keys": steps(plan={}, pooled_keys=True),
        "MLP on groups, 0.4": parts(0.4, "all", "groups"),
        "keys of groups, 0.3": parts(0.3, "groups", "all"),
    }


def dinov2(weights: Path, depth: int) -> Any:
    """Return the first blocks of the model, as many as `depth`."""
    model: Any = timm.create_model(
        "vit_small_patch14_dinov2", img_size=560, num_classes=0, global_pool="", depth=depth, dynamic_img_size=True
    )
    state = converted(load_file(weights), model)
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    return model.eval()


def patches_of(model: Any) -> Forward:
    """Return the function from images to the features of their patches (B, N, D)."""
    return lambda images: model.forward_features(images)[:, 1:]


def by_threshold(model: Any, plan: dict[int, float], images: Tensor) -> Forward:
    """Return merging by thresholds, image by image, that keep as many tokens as the plan on some images."""
    record: dict[int, list[Tensor]] = {}
    for image in images:
        merging_forward(model, shrunk(image[None], SIDE), Steps(plan), record)
    thresholds, before = {}, 1.0
    for number, share in plan.items():
        thresholds[number] = torch.quantile(torch.cat(record[number]), 1 - share / before).item()
        before = share
    steps = Steps(plan, thresholds=thresholds)
    return lambda images: torch.cat([merging_forward(model, image[None], steps) for image in images])


def shrunk(images: Tensor, side: int) -> Tensor:
    """Return images scaled to a side."""
    return F.interpolate(images, size=(side, side), mode="bicubic", antialias=True)


def read(folder: str, split: str, count: int) -> tuple[Tensor, Tensor]:
    """Return images of 560 pixels and the classes of their patches (B, patches)."""
    options = {"root": folder, "train_split": "train", "val_split": split, "val_limit": count, "batch_size": 4}
    config = DataConfig("maps:560", image_size=560, channels=3, label_patch=560 // GRID, **options)
    images, labels = zip(*image_stream(config).batches(0))
    return torch.cat(images), torch.cat(labels)


def features(forward: Forward, side: int, images: Tensor) -> Tensor:
    """Return the features of patches, interpolated to the grid of the labels (B * patches, D)."""
    x = torch.cat([forward(shrunk(batch, side)).half() for batch in images.split(2)]).float()
    grid = x.transpose(1, 2).unflatten(2, (math.isqrt(x.shape[1]),) * 2)
    return F.interpolate(grid, size=(GRID, GRID), mode="bilinear").flatten(2).transpose(1, 2).flatten(0, 1)


def fitted(x_ND: Tensor, label_N: Tensor, classes: int, strength: float = 0.01) -> Forward:
    """Return a logistic regression on standardised features, as studies of segmentation fit it."""
    mean, deviation = x_ND.mean(0), x_ND.std(0).clamp_min(1e-6)
    x_ND = (x_ND - mean) / deviation
    weight = torch.zeros(x_ND.shape[1], classes, requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=60, history_size=10, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        penalty = weight.square().sum() / (2 * strength * len(x_ND))
        value = F.cross_entropy(x_ND @ weight + bias, label_N) + penalty
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(loss)
    return lambda x: ((x - mean) / deviation @ weight + bias).argmax(1)


def evaluated(forward: Forward, side: int, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> np.ndarray:
    """Return the confusion matrix of every tested image (N, classes, classes)."""
    classes = int(max(train[1].max(), test[1].max())) + 1
    # Every second patch suffices for the fit.
    x_ND, label_N = features(forward, side, train[0])[::2], train[1].flatten()[::2]
    predicted = fitted(x_ND, label_N, classes)(features(forward, side, test[0])).view_as(test[1])
    pairs = test[1] * classes + predicted
    counts = [torch.bincount(image, minlength=classes**2).view(classes, -1).tolist() for image in pairs]
    return np.array(counts)


def difference(one: np.ndarray, other: np.ndarray, weight_SN: np.ndarray) -> np.ndarray:
    """Return the difference of two mean IoUs (S,) for several weightings of the images."""
    return mean_iou({"confusion": one}, weight_SN) - mean_iou({"confusion": other}, weight_SN)


def times(entries: dict[str, tuple[int, Forward]], images: Tensor, rounds: int) -> dict[str, float]:
    """Return the median CPU time of each row for a batch, in milliseconds, rows interleaved."""
    batches = {side: shrunk(images, side) for side, _ in entries.values()}
    taken: dict[str, list[float]] = {name: [] for name in entries}
    for number in range(rounds + 1):
        for name, (side, forward) in entries.items():
            start = time.process_time()
            forward(batches[side])
            # The first round warms up.
            if number:
                taken[name].append(1000 * (time.process_time() - start))
    return {name: float(np.median(values)) for name, values in taken.items()}


@torch.no_grad()
def main() -> None:
    """Measure the rows and print them as a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("weights", type=Path)
    parser.add_argument("--images", nargs=2, type=int, help="how many are fitted and tested; else 24 and 48, of 72")
    parser.add_argument("--rows", nargs="*", help="names of rows; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="of the measurement of time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fitted_images, tested_images = options.images or (72, 72)
    train, test = read(options.folder, "train", fitted_images), read(options.folder, "test", tested_images)
    if options.images is None:
        third = torch.arange(72) % 3 == 0
        train, test = (train[0][third], train[1][third]), (test[0][~third], test[1][~third])
    entries = rows(options.weights, train[0][:24:4])
    entries = {name: entries[name] for name in options.rows or entries}
    taken, resampling = times(entries, test[0][:2], options.rounds), Resampling(len(test[0]))
    first: np.ndarray | None = None
    print("| | ms | mean IoU % | to the first row |\n|---|---|---|---|")
    for name, (side, forward) in entries.items():
        result = evaluated(forward, side, train, test)
        first = result if first is None else first
        gap = resampling.of(functools.partial(difference, result, first))
        score = figures_of({"confusion": result}, len(result))["mean_iou"]
        print(f"| {name} | {taken[name]:.0f} | {score:.1f} | {gap} |", flush=True)


if __name__ == "__main__":
    main()
