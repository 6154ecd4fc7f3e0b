"""Attention is seen through what a library puts in the place of torch's function, or its absence is told by name."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmod
from mmod.methods import Merge, Prune
from tests.kit import clip_zoo, zoo

TORCHS_OWN = F.scaled_dot_product_attention


def halve(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return TORCHS_OWN(query * 0.5, *args, **kwargs)


@torch.library.custom_op("mmod_tests::unseen_attention", mutates_args=())
def unseen_op(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return TORCHS_OWN(query, key, value).clone()


def unseen(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    return unseen_op(query, key, value)


class Attention:
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return TORCHS_OWN(*args, **kwargs)


READS = {
    "kept": mmod.RoutingConfig(router="norm"),
    "all": mmod.RoutingConfig(router="norm", context="all"),
    "attention": mmod.RoutingConfig(router="attention"),
    "class-token": mmod.RoutingConfig(router=mmod.score("attention", importance="class_token")),
    "threshold": mmod.RoutingConfig(router=mmod.score("linear", init_std=0.5), select=mmod.Threshold(0.5)),
    "merge": Merge(3),
    "prune": Prune(0.6, (0, 1)),
}


class ByName(nn.Module):
    """A ViT whose attention was imported by name before anything was replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 32, 8, 8)
        self.blocks = nn.ModuleList(ByNameBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


class ByNameBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm2, self.mlp = nn.LayerNorm(32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.proj(TORCHS_OWN(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def make_model(name: str) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """Return a model, and what it is called with."""
    if name == "open_clip":
        pictures = clip_zoo.make_images("ViT-B-32", 2)
        return clip_zoo.make_clip("ViT-B-32"), lambda model: model.encode_image(pictures)
    if name == "by-name":
        torch.manual_seed(0)
        return ByName().eval(), lambda model: model(torch.linspace(-3, 3, 2 * 3 * 64 * 64).view(2, 3, 64, 64).sin())
    pictures = zoo.make_images("vit_tiny_patch16_224", 2)
    return zoo.make_model("vit_tiny_patch16_224"), lambda model: model(pictures)


def apply(model: nn.Module, read: str) -> nn.Module:
    torch.manual_seed(1)
    method = READS[read]
    if hasattr(model, "visual"):
        return mmod.route_(model, image=method)
    declared = {"tokens": mmod.Tokens("blocks")} if isinstance(model, ByName) else {}
    return mmod.apply_(model, method, **declared)


def halve_queries_(model: nn.Module) -> None:
    """Change the weights as `halve` changes what attention gets."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "qkv" in name or "in_proj" in name:
                weight[: len(weight) // 3] *= 0.5


MODELS = ("timm", "open_clip", "by-name")
UNFIT = {("open_clip", "merge"), ("open_clip", "prune"), ("by-name", "class-token"), ("by-name", "all")}
CASES = [(name, read) for name, read in itertools.product(MODELS, READS) if (name, read) not in UNFIT]


# With gradients: without, torch.nn.MultiheadAttention runs a kernel of its own in place of the function.
@pytest.mark.parametrize(("name", "read"), CASES)
def test_what_replaces_the_attention_of_a_process_runs_once(
    name: str, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, run = make_model(name)
    model = apply(model, read)
    monkeypatch.setattr(F, "scaled_dot_product_attention", halve)
    actual = run(model)
    monkeypatch.undo()
    before = run(model)
    # Attention that was imported by name is torch's own.
    if name != "by-name":
        halve_queries_(model)
        assert not torch.allclose(run(model), before, atol=1e-3)
    torch.testing.assert_close(actual, run(model), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("how", ["partial", "object"])
@pytest.mark.parametrize("read", READS)
@torch.no_grad()
def test_a_replacement_without_a_name_is_seen_through(how: str, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = make_model("timm")
    apply(model, read)
    expected = run(model)
    replacement = functools.partial(TORCHS_OWN, scale=16**-0.5) if how == "partial" else Attention()
    monkeypatch.setattr(F, "scaled_dot_product_attention", replacement)
    torch.testing.assert_close(run(model), expected)


@pytest.mark.parametrize("read", [read for read in READS if read != "kept"])
@torch.no_grad()
def test_a_replacement_that_hides_the_attention_is_refused_by_name(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = make_model("timm")
    apply(model, read)
    monkeypatch.setattr(F, "scaled_dot_product_attention", unseen)
    message = r"is replaced in this process by tests\.ops\.test_intercept\.unseen, .* Put torch's own back, or let"
    with pytest.raises(RuntimeError, match=message):
        run(model)
    monkeypatch.undo()
    run(model)


@torch.no_grad()
def test_kept_tokens_alone_run_with_any_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = make_model("timm")
    expected = run(apply(model, "kept"))
    monkeypatch.setattr(F, "scaled_dot_product_attention", unseen)
    torch.testing.assert_close(run(model), expected)
