"""Random routing configs, and the hosts to route by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

import mmod
from mmod.config import SCORES
from tests.kit.hosts import Host, of_clip, of_joint, of_language, of_timm, of_tower

HOSTS: dict[str, Host] = {
    "vit": of_timm("test_vit", 6),
    "registers": of_timm("vit_little_patch16_reg4_gap_256"),
    "distilled": of_timm("deit_tiny_distilled_patch16_224"),
    "no-class-token": of_timm("vit_base_patch16_siglip_gap_224"),
    "one-token": of_timm("vit_base_patch16_siglip_224", img_size=16),
    "one-patch": of_timm("vit_tiny_patch16_224", img_size=16),
    "rope": of_timm("eva02_tiny_patch14_224"),
    "dinov3": of_timm("vit_small_patch16_dinov3"),
    "bias": of_timm("beit_base_patch16_224"),
    "parallel": of_timm("vit_base_patch16_xp_224"),
    "post-norm": of_timm("vit_base_patch16_rpn_224"),
    "naflex": of_timm("naflexvit_base_patch16_gap"),
    "clip": of_clip("ViT-B-32"),
    "coca": of_clip("coca_ViT-B-32"),
    "siglip": of_clip("ViT-B-16-SigLIP"),
    "clip-tower": of_tower("CLIPVisionModel", "CLIPVisionConfig"),
    "siglip-tower": of_tower("SiglipVisionModel", "SiglipVisionConfig", vision_use_head=False),
    "llama": of_language("llama"),
    "qwen2": of_language("qwen2"),
    "window": of_language("mistral-window"),
    "sandwich": of_language("gemma2"),
    "llava": of_joint("llava"),
    "llava-qwen2": of_joint("llava-qwen2"),
}


# Those of the package, whatever other tests have registered.
ROUTERS = (
    "attention",
    "linear",
    "random",
    "stride",
    "norm",
    "diversity",
    "redundancy",
    "cells",
    "duplicate",
    "change",
    "coin",
    "function",
)
# Those of language models alone.
LANGUAGE_ROUTERS = (*ROUTERS, "temporal")
LOSSES = ("membership", "load", "capacity", "importance")


def third_channel(x_BND: Tensor) -> Tensor:
    """Score tokens by one of their channels."""
    return x_BND[..., 2]


@dataclass(frozen=True)
class Draw:
    """What is routed, how, and on what it runs.

    Args:
        host: Key of `HOSTS`.
        parts: Fields of `RoutingConfig` for each routed part.
        capacity: What `set_capacity_` gives all blocks after routing, or None.
        batch: Samples.
        training: The model trains.
        dtype: Of its weights.
    """

    host: str
    parts: dict[str, dict[str, Any]]
    capacity: float | None = None
    batch: int = 2
    training: bool = False
    dtype: torch.dtype = torch.float32

    def simpler(self) -> list[Draw]:
        """Return draws that say one thing less each."""
        change = dataclasses.replace
        fewer = [{key: value for key, value in self.parts.items() if key != part} for part in self.parts]
        plain = [
            {**self.parts, part: {key: value for key, value in fields.items() if key != field}}
            for part, fields in self.parts.items()
            for field in fields
        ]
        options = [
            {**self.parts, part: {**fields, field: {key: old for key, old in value.items() if key != option}}}
            for part, fields in self.parts.items()
            for field, value in fields.items()
            if isinstance(value, dict)
            for option in value
            if option != "name"
        ]
        return [
            *(change(self, parts=parts) for parts in [*fewer, *plain, *options] if parts),
            *([change(self, capacity=None)] if self.capacity is not None else []),
            *([change(self, batch=self.batch - 1)] if self.batch > 1 else []),
            *([change(self, training=False)] if self.training else []),
            *([change(self, dtype=torch.float32)] if self.dtype != torch.float32 else []),
        ]


def draw(host: str, number: int) -> Draw:
    """Return one of the draws for a host; the same number gives the same draw."""
    random = Random(f"{host} {number}")
    depths = HOSTS[host].parts
    routed = [part for part in depths if len(depths) == 1 or random.random() < 0.7] or list(depths)
    parts = {part: _fields(random, part, depths[part], len(depths) > 1) for part in routed}
    return Draw(
        host,
        parts,
        _maybe(random, 0.15, lambda: _capacity(random))
        if not any("select" in fields_of_part for fields_of_part in parts.values())
        else None,
        random.randint(1, 5),
        random.random() < 0.4,
        random.choice([torch.float32, torch.float32, torch.float32, torch.bfloat16]),
    )


def _maybe(random: Random, share: float, make: Callable[[], Any]) -> Any:
    return make() if random.random() < share else None


def _capacity(random: Random) -> float:
    usual = [0.0, 1.0, 0.25, 0.3, 0.5, 0.6, 0.75, 0.9]
    return random.choice([*usual, round(random.uniform(0.1, 1), 3), random.uniform(0.1, 1)])


def _fields(random: Random, part: str, depth: int, joint: bool) -> dict[str, Any]:
    """Return fields of a config; seven of eight times they avoid most of what excludes each other."""
    wild = random.random() < 0.125
    text = part == "language" and not wild
    router = _router(random, wild or part == "language")
    while text and any(word in str(router) for word in ("coin", "cells", "duplicate", "per")):
        router = _router(random, wild or part == "language")
    name, options = (router["name"], router) if isinstance(router, dict) else (router, {})
    learns, per_image = name == "linear" or callable(router), name == "coin" or options.get("per") == "sequence"
    shared = name in SCORES and SCORES[name].shared
    blocks: Any = random.choice(["every_other", "late", "all", None])
    from_before = name in ("attention", "change") and not wild
    if blocks is None or (blocks == "all" and from_before):
        blocks = sorted(random.sample(range(0 if wild else 1, depth), random.randint(1, depth - 1)))
    count = len(mmod.RoutingConfig(blocks=blocks).resolved(depth).blocks)

    def per_block(one: Callable[[], Any], share: float) -> Any:
        return [one() for _ in range(count)] if random.random() < share else one()

    capacity = per_block(lambda: _capacity(random), 0.3)
    if isinstance(capacity, list) and random.random() < 0.7:
        capacity.sort(reverse=True)
    fields = {
        "router": router,
        "blocks": blocks,
        "capacity": capacity,
        "protect_prefix": _maybe(random, 0.15, lambda: False),
        "select": _maybe(random, 0.95 if per_image else 0.3, lambda: _select(random, per_image)),
        "gate": _maybe(random, 0.6, lambda: _gate(random)),
        "context": _maybe(random, 0.25, lambda: per_block(lambda: random.choice(["kept", "all"]), 0.3)),
        "operator": _maybe(random, 0.25, lambda: per_block(lambda: random.choice(["block", "attention", "mlp"]), 0.3)),
        "skipped": random.choice(
            ["follow", "merge", *([{"name": "merge", "before": "mlp"}] if shared or wild else [])]
        ),
        "losses": _maybe(random, 0.3, lambda: _losses(random)),
        "language": _maybe(random, 0.6, lambda: _language(random, joint)),
    }
    fields = fields if wild else _fitting(random, fields, part, learns, per_image)
    return {name: value for name, value in fields.items() if value is not None}


def _fitting(random: Random, fields: dict[str, Any], part: str, learns: bool, per_image: bool) -> dict[str, Any]:
    """Return fields without most of what excludes each other, or does not suit the part."""
    gate, language, operator = dict(fields["gate"] or {}), dict(fields["language"] or {}), fields["operator"]
    joins = part == "image" and not per_image and random.random() < 0.25
    if part == "language":
        fields = {**fields, "select": _maybe(random, 0.3, lambda: {"threshold": random.choice([0.5, 0.0, 1.0, 2.5])})}
    if operator or not learns or gate.get("name", "identity") == "identity":
        language.pop("gate_on", None)
    if not learns or fields["select"]:
        language.pop("inference_threshold", None)
    if learns and isinstance(fields["select"], dict):
        fields["select"]["threshold"] = min(max(fields["select"]["threshold"], 0.0), 1.0)
    if not learns or fields["select"] or "membership" not in (fields["losses"] or ()):
        language.pop("predictor", None)
    unfit = {"context", "operator"} if joins else {"skipped"}
    if gate.get("name") == "step" and not (fields["select"] and (per_image or operator == "mlp")):
        unfit.add("gate")
    unfit |= {"gate", "losses"} if not learns else set()
    unfit |= {"context"} if per_image or "mlp" in str(operator) else set()
    unfit |= {"language"} if part != "language" else set()
    weighs = gate.get("name", "tanh") not in ("identity", "step") and "gate" not in unfit
    if weighs and not (joins or operator) and random.random() < 0.25:
        unfit.discard("skipped")
        fields = {**fields, "skipped": "scale"}
    fields = {**fields, "gate": gate or None, "language": language or None}
    return {name: value for name, value in fields.items() if name not in unfit}


def _router(random: Random, language: bool) -> Any:
    """Return a router; those of a language model may read importance in its ways."""
    name = random.choice(["attention", "linear", *(LANGUAGE_ROUTERS if language else ROUTERS)])
    options: dict[str, Any] = {}
    if name == "function":
        return third_channel
    if name == "linear":
        options = {
            "normalize": _maybe(random, 0.3, lambda: False),
            "bias": _maybe(random, 0.3, lambda: True),
            "init_std": _maybe(random, 0.8, lambda: random.choice([0.0, 0.1, 0.3])),
            "per": _maybe(random, 0.2, lambda: "sequence"),
            "initial": _maybe(random, 0.2, lambda: random.choice([-1.0, 0.0, 2.0])),
            "tied": _maybe(random, 0.1 * language, lambda: True),
        }
    if name in ("linear", "attention"):
        reads = ["mean", "per_viewer", "class_token", *(["last_token", "vision_tower"] if language else [])]
        options["importance"] = _maybe(random, 0.3, lambda: random.choice(reads))
    if name in ("random", "coin"):
        options = {"seed": _maybe(random, 0.5, lambda: random.randint(-3, 10**6))}
    elif name == "temporal":
        # The hosts get images alone.
        options = {"images": random.random() < 0.9}
    elif name == "redundancy":
        options = {"channels": _maybe(random, 0.5, lambda: random.choice([1, 8, 500]))}
    elif name == "duplicate":
        options = {
            "tolerance": _maybe(random, 0.5, lambda: random.choice([-1.0, 0.0, 6.0, 200.0])),
            "cell": _maybe(random, 0.5, lambda: random.choice([2, 3, 8])),
            "std": 0.3,
        }
    elif name == "cells":
        options = {"side": _maybe(random, 0.5, lambda: random.randint(2, 5)), "width": _maybe(random, 0.3, lambda: 4)}
    options = {key: value for key, value in options.items() if value is not None}
    return {"name": name, **options} if options else name


def _select(random: Random, per_image: bool) -> Any:
    if random.random() < 0.2:
        return "threshold"
    options = {"threshold": random.choice([0.5, 0.5, 0.0, 1.0, 0.9, 1.1, 2.5, -5.0, 100.0])}
    if random.random() < (0.05 if per_image else 0.3):
        options["min_tokens"] = random.choice([0, 1, 3, 50])
    if random.random() < (0.05 if per_image else 0.3):
        options["max_tokens"] = random.choice([1, 4, 17, 100])
    return options


def _gate(random: Random) -> Any:
    name = random.choice(["identity", "linear", "sigmoid", "tanh", "step"])
    options = {
        "scale": _maybe(random, 0.4, lambda: random.choice([0.0, 0.1, 1.0, 3.0])),
    }
    return {"name": name, **{key: value for key, value in options.items() if value is not None}}


def _losses(random: Random) -> dict[str, float]:
    return {name: random.choice([0.01, 1.0]) for name in LOSSES if random.random() < 0.5}


def _language(random: Random, joint: bool) -> dict[str, Any]:
    options = {
        "tokens": _maybe(random, 0.5, lambda: random.choice(["image", "all", "span", 3, 9, 4] if joint else ["all"])),
        "scored": _maybe(random, 0.3, lambda: "norm"),
        "inference_threshold": _maybe(random, 0.3, lambda: random.choice([0.0, 0.5, 0.9])),
        "gate_on": _maybe(random, 0.3, lambda: random.choice(["mlp", "branches"])),
        "positions": _maybe(random, 0.2, lambda: "compact"),
    }
    if options["inference_threshold"] is not None:
        options["predictor"] = _maybe(random, 0.4, lambda: True)
    return {name: value for name, value in options.items() if value is not None}
