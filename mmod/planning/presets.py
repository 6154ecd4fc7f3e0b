"""Routing configs by the name of the method that proposed them.

A preset is a function that returns keywords of `RoutingConfig`; one that takes `depth` chooses blocks by it.
"""

from __future__ import annotations

import inspect
from typing import Any

from mmod.config import (
    PRESETS,
    Gate,
    LanguageRouting,
    Merged,
    RoutingConfig,
    Threshold,
    register_preset,
    revised,
    score,
)
from mmod.config.plan import DEPTH
from mmod.planning.schedules import falling, ratio_decay
from mmod.values import check_value


def preset(name: str, depth: int | None = None, **changes: Any) -> RoutingConfig:
    """Return the routing config of a published method, or this library's recommended learned router.

    Presets are "mod", "a-mod", "p-mod", "modification", "mindskip" and "distilled"; for ViTs of timm "gradual"; for
    language models "gamma-mod" and "videollm-mod"; and those of `mmod.register_preset`. What they are, and where they
    differ from their papers, stands in `mmod.planning.presets`.

    Args:
        name: One of these names.
        depth: Number of blocks of the model; "p-mod", "mindskip", "gradual" and "gamma-mod" choose blocks by it.
        changes: Fields of `RoutingConfig` to set differently; a mapping for a part changes some of its options.

    Raises:
        ValueError: Unknown name or field, or no depth where one is needed.

    Example:
        >>> preset("a-mod", capacity=0.25).capacity
        0.25
    """
    make = PRESETS[name]
    if depth is not None:
        check_value("depth", depth, int, DEPTH)
    if "depth" not in inspect.signature(make).parameters:
        return RoutingConfig.from_dict(revised(make(), changes))
    if depth is None and not {"capacity", "blocks"} <= set(changes):
        raise ValueError(
            f"preset {name!r} chooses blocks by depth: give depth=len(model.blocks), or capacity and blocks"
        )
    return RoutingConfig.from_dict(revised(make(depth=depth), changes))


@register_preset("mod")
def mod() -> dict[str, Any]:
    """Raposo et al., arXiv 2404.02258: a linear score of the raw tokens is its own gate (Eq. 1).

    Causal sampling's auxiliary loss is left out: image models see all tokens, so top-k needs none. A language model
    needs `LanguageRouting(inference_threshold=0.5)` with the loss "membership" to generate; `predictor=True` is the
    paper's second way.
    The score starts around 1 instead of around 0, so that a pretrained model starts from its own function. Trained from
    scratch the raw gate is known to diverge (Mixture-of-Recursions, arXiv 2507.10524, table 13); use
    `preset("mod", gate=Gate("sigmoid", scale=0.1))` there.
    """
    return {"router": score("linear", normalize=False), "gate": "linear", "capacity": 0.125}


@register_preset("a-mod")
def a_mod() -> dict[str, Any]:
    """Gadhikar et al., arXiv 2412.20875: importance of the preceding dense block, no gate, no parameter.

    The paper leaves open whether the class token is protected; here it is.
    """
    return {"router": "attention", "capacity": 0.5}


@register_preset("p-mod")
def p_mod(depth: int | None) -> dict[str, Any]:
    """Zhang et al., arXiv 2412.04449: gate 1 + 0.2 tanh, and capacity that falls over depth, see `ratio_decay`.

    A linear score with bias of the raw tokens, both starting at zero. Skipped tokens are multiplied by the gate, as in
    paper and code. For kept tokens the paper weighs the block's output and the code its MLP branch; here the gate
    weighs the whole update, which both agree with while it is 1. In language models `language={"gate_on": "mlp"}` is
    the code's way; only image tokens are scored, weighed or skipped there.
    """
    fields = {
        "router": score("linear", normalize=False, bias=True, init_std=0.0),
        "gate": Gate("tanh", scale=0.2, reweight_skipped=True),
    }
    if depth is None:
        return fields
    plan = ratio_decay(depth)
    return {**fields, "blocks": plan.blocks, "capacity": plan.capacities}


@register_preset("modification")
def modification() -> dict[str, Any]:
    """Zhang et al., arXiv 2410.14268: threshold 0.5 on a sigmoid score, which is also the gate, and the load penalty.

    The paper gates the attention and MLP outputs one by one, which is `language={"gate_on": "branches"}` in language
    models; here the gate weighs their sum.
    """
    return {"router": "linear", "gate": "sigmoid", "select": Threshold(0.5), "losses": {"load": 0.01}}


@register_preset("mindskip")
def mindskip(depth: int | None) -> dict[str, Any]:
    """He et al., arXiv 2410.13184: whole images skip the attention of blocks in the deeper half, by a hard threshold.

    Routers alone are trained in the source (`mmod.freeze_dense`): a linear score, its mean over the image's tokens, a
    gate of 0 or 1 with a straight-through gradient. The score reads the tokens over their root mean square; the source,
    what the layer's first norm returns. The source penalises a kept share above the target; here the distance to it
    counts on both sides, and its weight, 0 in the released script, is 1, without which nothing need be skipped.
    `router={"per": "token"}` with `context="all"` decides by token, which language models need.
    """
    fields: dict[str, Any] = {
        "router": score("linear", per="sequence"),
        "gate": "step",
        "select": Threshold(0.5),
        "operator": "attention",
        "losses": {"capacity": 1.0},
    }
    return fields if depth is None else {**fields, "blocks": tuple(range(depth // 2, depth))}


@register_preset("gradual")
def gradual(depth: int | None) -> dict[str, Any]:
    """This library's way to route a trained ViT without training it: tokens that are alike merge, a few in each of five
    steps, between attention and MLP, and get their update back.

    Tokens are compared by 64 sums of their channels. Other budgets are plans of `mmod.planning.falling`. The place of
    the merging and that attention counts merged tokens are ToMe's, Bolya et al., arXiv 2210.09461; ToMe merges in every
    block, by keys, and leaves merged tokens one.
    """
    fields: dict[str, Any] = {"router": score("redundancy", channels=64), "skipped": Merged("mlp")}
    if depth is None:
        return fields
    plan = falling(depth, steps=min(5, depth - 1))
    return {**fields, "blocks": plan.blocks, "capacity": plan.capacities}


@register_preset("distilled")
def distilled() -> dict[str, Any]:
    """Return this library's learned router: gate 1 + 0.2 tanh, and a score that learns to select what importance would.

    Importance is computed in training only, so inference needs no attention map.
    """
    return {"router": "linear", "gate": "tanh", "losses": {"importance": 0.25}}


@register_preset("gamma-mod")
def gamma_mod(depth: int | None) -> dict[str, Any]:
    """Luo et al., arXiv 2410.13859, for language models: one score for all layers, squashed by a sigmoid.

    The score reads what each layer's first norm returns; the released two-class softmax is the sigmoid of the
    difference of its two rows. Routed are all layers but the first three and the last, as released; the paper chooses
    them by `attention_ranks`. Capacity 0.5 of the tokens that `protected_mask` leaves free: the released code protects
    whatever follows the image, the paper's best variant the question (`data.protected` in fine-tuning). The gate weighs
    the MLP branch as released; the paper's text describes the whole layer, `gate_on="update"`. Rotary positions are
    counted among kept tokens as released; `positions="original"` is nearer to a pretrained model, and the only way in
    Qwen-VL. The loss is 0.01, summed over layers. In evaluation tokens above 0.005 are kept; the released code compares
    decoded tokens with 0.5 or runs them all.
    """
    if depth is not None and depth < 5:
        raise ValueError(f"preset 'gamma-mod' keeps the first three layers and the last dense: give depth, got {depth}")
    return {
        # Two rows of standard deviation 0.02, subtracted.
        "router": score("linear", normalize=False, init_std=0.02 * 2**0.5),
        "blocks": tuple(range(3, (depth or 5) - 1)),
        "capacity": 0.5,
        "gate": "sigmoid",
        "losses": {"membership": 0.01},
        "language": LanguageRouting(
            tokens="all", shared=True, scored="norm", inference_threshold=0.005, gate_on="mlp", positions="compact"
        ),
    }


@register_preset("videollm-mod")
def videollm_mod() -> dict[str, Any]:
    """Wu et al., arXiv 2408.16730, for language models: a fifth of the tokens of each frame in every other layer.

    A frame is an image or a frame of a video; text is never skipped. The source leaves the gate open; here it is MoD's.
    """
    return {
        "router": score("linear", normalize=False),
        "gate": "linear",
        "capacity": 0.2,
        "language": LanguageRouting(tokens="image", frames="span"),
    }
