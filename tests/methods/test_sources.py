"""Merging and pruning against their sources' algorithms on whole models, one image at a time in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from open_clip.transformer import VisionTransformer
from torch import Tensor

from mmod.methods import Merge, Prune
from tests.kit.attention_oracle import attention_of
from tests.kit.cover import cover, in_turn
from tests.kit.zoo import make_images, make_model

Rows = list[Tensor]
# What happens between attention and MLP of a block, given its number, tokens, their sizes, and each head's queries and
# keys. It returns tokens and sizes.
Step = Callable[[int, Rows, list[int], Tensor, Tensor], tuple[Rows, list[int]]]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "class-token": ("vit_tiny_patch16_224", {}),
    "class-token-mean": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "layer-scale": ("deit3_small_patch16_224", {}),
    "no-class-token": ("vit_medium_patch16_gap_240", {}),
    "registers": ("vit_small_patch14_reg4_dinov2", {}),
    "registers-alone": ("vit_little_patch16_reg4_gap_256", {}),
}


def logits(model: Any, image: Tensor, step: Step) -> Tensor:
    """Return a model's answer to an image where tokens change between attention and MLP."""
    x = list(model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0])
    sizes = [1] * len(x)
    for number, block in enumerate(model.blocks):
        tokens = torch.stack(x)
        update, query, key = attention_of(block, tokens, torch.tensor(sizes, dtype=tokens.dtype).log())
        x, sizes = step(number, list(tokens + update), sizes, query, key)
        tokens = torch.stack(x)
        x = list(tokens + block.ls2(block.mlp(block.norm2(tokens))))
    y, weight = model.norm(torch.stack(x)), torch.tensor(sizes, dtype=image.dtype)
    prefix = model.num_prefix_tokens
    if hasattr(model, "head_dist"):
        return (model.head(y[0]) + model.head_dist(y[1])) / 2
    pooled = weight[prefix:] @ y[prefix:] / weight[prefix:].sum() if model.global_pool == "avg" else y[0]
    return model.head(model.fc_norm(pooled))


def merging(counts: list[int], prefix: int) -> Step:
    """Return the step of bipartite soft matching: tokens at even places, prefix too, propose to those at odd ones."""

    def step(number: int, x: Rows, sizes: list[int], query: Tensor, key: Tensor) -> tuple[Rows, list[int]]:
        count = min(counts[number], (len(x) - prefix) // 2)
        if not count:
            return x, sizes
        metric = key.mean(dim=0)
        first, second = list(range(0, len(x), 2)), list(range(1, len(x), 2))
        best = {}
        for a in first:
            alike = {
                b: -math.inf
                if a < prefix or b < prefix
                else torch.cosine_similarity(metric[a], metric[b], dim=0).item()
                for b in second
            }
            best[a] = max((value, -b) for b, value in alike.items())
        ranked = sorted(first, key=lambda a: best[a][0], reverse=True)
        unmerged = sorted(ranked[count:]) if prefix else ranked[count:]
        total = {token: (sizes[token] * x[token], sizes[token]) for token in range(len(x))}
        for a in ranked[:count]:
            b = -best[a][1]
            total[b] = total[b][0] + total[a][0], total[b][1] + total[a][1]
        # The protected tokens come first.
        order = [*range(prefix), *(token for token in [*unmerged, *second] if token >= prefix)]
        return [total[token][0] / total[token][1] for token in order], [total[token][1] for token in order]

    return step


def pruning(method: Prune, prefix: int, pool: str = "token") -> Step:
    """Return the step of pruning by the attention of the class token or of all tokens, with the others fused to one."""
    by_class_token = method.by == "auto" and pool == "token"

    def step(number: int, x: Rows, sizes: list[int], query: Tensor, key: Tensor) -> tuple[Rows, list[int]]:
        if number not in method.blocks:
            return x, sizes
        readers = query[:, :1] if by_class_token else query
        products = torch.einsum("hme,hne->hmn", readers, key)
        score = (products / math.sqrt(key.shape[-1])).softmax(dim=-1).mean(dim=(0, 1))
        # The mean is observed, and no gradient goes through what is observed.
        score = score if by_class_token else score.detach()
        ranked = sorted(range(prefix, len(x)), key=lambda token: -score[token].item())
        count = math.ceil(method.keep * len(ranked))
        kept, dropped = ranked[:count], ranked[count:]
        fused = [torch.stack([score[token] * x[token] for token in dropped]).sum(dim=0)] if method.fuse else []
        left = [*x[:prefix], *(x[token] for token in kept), *fused]
        return left, [1] * len(left)

    return step


def check(model: Any, changed: Any, images: Tensor, step: Step) -> None:
    """Compare answers, and gradients of all weights."""
    expected, answers = torch.stack([logits(model, image, step) for image in images]), changed(images)
    torch.testing.assert_close(answers, expected, rtol=0, atol=1e-10)
    for values in (expected, answers):
        values.square().sum().backward()
    gradients = {name: weight.grad for name, weight in changed.named_parameters()}
    for name, weight in model.named_parameters():
        torch.testing.assert_close(
            gradients[name], weight.grad, rtol=1e-8, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}"
        )


# 14: half of what is left, in every block.
@pytest.mark.parametrize(("case", "r"), in_turn(MODELS, [1, 3, 14, (4, 0, 1, 2)], times=2))
def test_merging_is_bipartite_soft_matching(case: str, r: int | tuple[int, ...]) -> None:
    name, changes = MODELS[case]
    model, images = make_model(name, **changes).double(), make_images(name, 2).double()
    counts = list(r) if isinstance(r, tuple) else [r] * len(model.blocks)
    merged = Merge(r).apply_(copy.deepcopy(model))
    check(model, merged, images, merging(counts, model.num_prefix_tokens))


PRUNED = [Prune(keep, (0, 2), fuse, by) for keep, fuse, by in cover((0.5, 0.7), (True, False), ("auto", "mean"))]


@pytest.mark.parametrize(("case", "method"), in_turn(MODELS, PRUNED, times=2))
def test_pruning_keeps_what_is_attended_to(case: str, method: Prune) -> None:
    name, changes = MODELS[case]
    model, images = make_model(name, **changes).double(), make_images(name, 2).double()
    pruned = method.apply_(copy.deepcopy(model))
    check(model, pruned, images, pruning(method, model.num_prefix_tokens, model.global_pool))


def test_a_fused_token_has_the_place_of_the_dropped_one_with_the_most_attention() -> None:
    score_BN = torch.rand(2, 9)
    attention: Any = SimpleNamespace(read=lambda: score_BN)
    step = Prune(0.5).reduce(1, torch.randn(2, 9, 4), None, attention)
    assert step is not None
    # Of eight patches, four are kept.
    assert torch.equal(step.index_BK[:, -1], 1 + score_BN[:, 1:].argsort(dim=1, descending=True)[:, 4])


def as_transformers(model: Any) -> Any:
    """Return a ViT of transformers with the weights of a timm ViT."""
    dim = model.embed_dim
    config = transformers.ViTConfig(
        hidden_size=dim,
        num_hidden_layers=len(model.blocks),
        num_attention_heads=model.blocks[0].attn.num_heads,
        intermediate_size=model.blocks[0].mlp.fc1.out_features,
        image_size=64,
        patch_size=16,
        layer_norm_eps=model.norm.eps,
        num_labels=7,
    )
    other = transformers.ViTForImageClassification(config).double().eval()
    weights = model.state_dict()
    state = {
        "vit.embeddings.cls_token": weights["cls_token"],
        "vit.embeddings.position_embeddings": weights["pos_embed"],
    }
    for name, value in weights.items():
        for before, after in NAMES.items():
            name = name.replace(before, after)
        name = f"vit.layernorm.{name[5:]}" if name.startswith("norm.") else name
        if "qkv" in name:
            for part, rows in zip("qkv", value.chunk(3)):
                state[name.replace("qkv", f"{part}_proj")] = rows
        elif name in other.state_dict():
            state[name] = value
    other.load_state_dict(state)
    return other


# timm's names of modules -> those of transformers.
NAMES = {
    "patch_embed.proj.": "vit.embeddings.patch_embeddings.projection.",
    "blocks.": "vit.layers.",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.o_proj",
    "attn.qkv": "attention.qkv",
    "head.": "classifier.",
}
DROPPED = Prune(0.6, (0, 2), fuse=False)
FUSED = Prune(0.6, (0, 2))
REDUCED: dict[str, tuple[Any, Callable[[int], Step]]] = {
    "merge": (Merge(3), lambda prefix: merging([3] * 4, prefix)),
    "merge by block": (Merge((4, 0, 1, 2)), lambda prefix: merging([4, 0, 1, 2], prefix)),
    "prune": (DROPPED, lambda prefix: pruning(DROPPED, prefix)),
    "prune and fuse": (FUSED, lambda prefix: pruning(FUSED, prefix)),
}


@pytest.mark.parametrize(("case", "attention"), in_turn(REDUCED, ["sdpa", "eager"]))
@torch.no_grad()
def test_a_model_of_transformers_has_the_same_definition(case: str, attention: str) -> None:
    method, step = REDUCED[case]
    model, images = make_model("vit_tiny_patch16_224").double(), make_images("vit_tiny_patch16_224", 2).double()
    other = as_transformers(model)
    other.set_attn_implementation(attention)
    # transformers' own softmax is computed in fp32.
    atol = 1e-10 if attention == "sdpa" else 1e-6
    torch.testing.assert_close(other(images).logits, model(images), rtol=0, atol=atol)
    expected = torch.stack([logits(model, image, step(1)) for image in images])
    method.apply_(other)
    torch.testing.assert_close(other(images).logits, expected, rtol=0, atol=atol)


def as_open_clip(model: Any) -> Any:
    """Return an image tower of open_clip with the weights of timm's version of it, and its head as projection."""
    sizes: dict[str, Any] = {"image_size": 128, "patch_size": 32, "mlp_ratio": 4.0, "output_dim": 7}
    tower = VisionTransformer(width=64, layers=len(model.blocks), heads=4, **sizes).double().eval()
    weights = model.state_dict()
    state = {
        "conv1.weight": weights["patch_embed.proj.weight"],
        "class_embedding": weights["cls_token"][0, 0],
        "positional_embedding": weights["pos_embed"][0],
        "proj": weights["head.weight"].T,
    }
    for name, value in weights.items():
        for before, after in CLIP_NAMES.items():
            name = name.replace(before, after)
        if name in tower.state_dict():
            state[name] = value
    tower.load_state_dict(state)
    return tower


# timm's names of modules -> those of open_clip.
CLIP_NAMES = {
    "norm_pre.": "ln_pre.",
    "blocks.": "transformer.resblocks.",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "norm.": "ln_post.",
    "attn.proj": "attn.out_proj",
    "attn.qkv.": "attn.in_proj_",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}


@pytest.mark.parametrize("case", REDUCED)
@torch.no_grad()
def test_images_of_open_clip_have_the_same_definition(case: str) -> None:
    method, step = REDUCED[case]
    name = "vit_base_patch32_clip_224"
    model, images = make_model(name).double(), make_images(name, 2).double()
    model.head.bias.zero_()
    tower = as_open_clip(model)
    torch.testing.assert_close(tower(images), model(images), rtol=0, atol=1e-10)
    expected = torch.stack([logits(model, image, step(1)) for image in images])
    method.apply_(tower)
    torch.testing.assert_close(tower(images), expected, rtol=0, atol=1e-10)
