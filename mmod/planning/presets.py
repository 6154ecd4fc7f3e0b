"""The presets of `mmod.preset`: functions to fields of `RoutingConfig`, some of them of a model's depth."""

from __future__ import annotations

import math

from mmod.config import Gate, LanguageRouting, Merged, Threshold, register_preset, score
from mmod.planning.schedules import drop_once, falling, ratio_decay


@register_preset("mod")
def mod() -> dict[str, object]:
    """Raposo et al., arXiv 2404.02258: a linear score of the raw tokens is its own gate (Eq. 1).

    The auxiliary loss for causal sampling is omitted: image models see all tokens, so top-k needs none. To generate, a
    language model needs `LanguageRouting(inference_threshold=0.5)` with the loss "membership"; `predictor=True` is the
    paper's alternative. The score starts around 1 instead of 0, so that a pretrained model initially computes its dense
    function. From scratch the raw gate is known to diverge (Mixture-of-Recursions, arXiv 2507.10524, table 13): use
    `preset("mod", gate=Gate("sigmoid", scale=0.1))`.
    """
    return {"router": score("linear", normalize=False), "gate": "linear", "capacity": 0.125}


@register_preset("a-mod")
def a_mod() -> dict[str, object]:
    """Gadhikar et al., arXiv 2412.20875: importance of the preceding dense block, without gate or parameters.

    The paper does not say whether the class token is protected; here it is.
    """
    return {"router": "attention", "capacity": 0.5}


@register_preset("p-mod")
def p_mod(depth: int) -> dict[str, object]:
    """Zhang et al., arXiv 2412.04449: gate 1 + 0.2 tanh, and capacity that falls over depth, see
    `mmod.planning.ratio_decay`.

    The score is linear in the raw tokens, with a bias; both start at zero. The gate also multiplies skipped tokens, as
    in paper and code. For kept tokens the paper weighs the block's output and the code its MLP branch; here the gate
    weighs the block's update. All three agree while the gate is 1. In language models `language={"gate_on": "mlp"}`
    follows the code, and only image tokens are scored, weighed or skipped: a model that names none is refused.
    """
    plan = ratio_decay(depth)
    return {
        "router": score("linear", normalize=False, bias=True, init_std=0.0),
        "gate": Gate("tanh", scale=0.2),
        "skipped": "scale",
        "blocks": plan.blocks,
        "capacity": plan.capacity,
    }


@register_preset("modification")
def modification() -> dict[str, object]:
    """Zhang et al., arXiv 2410.14268: threshold 0.5 on a sigmoid score, which is also the gate, and the load penalty.

    The paper gates the attention and MLP outputs separately (`language={"gate_on": "branches"}` in language
    models); here the gate weighs their sum.
    """
    return {"router": "linear", "gate": "sigmoid", "select": Threshold(0.5), "losses": {"load": 0.01}}


@register_preset("mindskip")
def mindskip(depth: int) -> dict[str, object]:
    """He et al., arXiv 2410.13184: images skip the attention of blocks in the deeper half, by a hard threshold.

    The source trains the routers alone (`mmod.freeze_dense_`): a linear score averaged over the image's tokens, and a
    gate of 0 or 1 with a straight-through gradient. Differences: the score reads tokens divided by their root mean
    square, where the source reads the output of the layer's first norm. The source penalises only a kept share above
    the target; here the loss is the distance to it. Its weight is 1; the released script has 0, which skips nothing.
    `router={"per": "token"}` with `context="all"` decides per token, which language models need.
    """
    return {
        "router": score("linear", per="sequence"),
        "gate": "step",
        "select": Threshold(0.5),
        "operator": "attention",
        "losses": {"capacity": 1.0},
        "blocks": tuple(range(depth // 2, depth)),
    }


@register_preset("gradual")
def gradual(depth: int, mean: float = 0.6, start: int = 1) -> dict[str, object]:
    """This library's training-free routing of ViTs: similar tokens merge between attention and MLP, in five steps, and
    all get the update of their group.

    `mean` is the mean capacity of the five steps, and that of the routed blocks if all steps have the same length;
    otherwise early steps have more blocks, and it is a little higher. `start` is the first routed block, see
    `mmod.planning.falling`. A number as `capacity` scales this plan to that mean over the blocks, also below 0.4, which
    five equal steps cannot reach. Similarity is measured on 64 sums of channels. Merging between attention and MLP, and
    attention that counts merged tokens, come from ToMe, Bolya et al., arXiv 2210.09461, which merges in every block,
    compares keys, and never splits merged tokens.
    """
    steps = min(5, depth - start)
    least = (steps - 1) / (2 * max(1, steps))
    if isinstance(mean, (int, float)) and 0 < mean <= least:
        raise ValueError(
            f"mean must be a number in ({least:g}, 1], got {mean!r}, which {steps} equal steps cannot reach: "
            f"capacity={mean!r} in its place scales the plan to it"
        )
    plan = falling(depth, mean, steps=steps, start=start)
    return {
        "router": score("redundancy", channels=64),
        "skipped": Merged("mlp"),
        "blocks": plan.blocks,
        "capacity": plan.capacity,
    }


@register_preset("tread")
def tread(depth: int, start: int = 2, end: int = 2) -> dict[str, object]:
    """TREAD, Krause et al., arXiv 2501.04765, for training alone: half of the tokens, drawn at random, skip the middle
    blocks.

    One draw for each sample and pass holds from block `start` (from 0) to the last but `end`; the kept tokens attend to
    each other, and all are written back in place. In evaluation the model is dense. The source has 2, and 4 or fewer
    dense blocks at the end. Differences: prefix tokens are always kept and count as tokens, and the draw is a hash of
    the tokens, so that recomputing a block draws alike. With `training_only=False` evaluations draw too.
    """
    _check_depth("tread", depth, start + end + 1)
    return {"router": "random", "blocks": tuple(range(start, depth - end)), "capacity": 0.5, "training_only": True}


@register_preset("pixelprune")
def pixelprune() -> dict[str, object]:
    """PixelPrune, arXiv 2604.00886, in a vision tower: patches whose pixels equal those of a neighbour do not run.

    For pages, screens and drawings, whose patches are mostly equal. Decided before the first block, from the pixels
    that the model gets; no weight and no calibration. Differences: the source removes patches, here they merge with one
    that is kept in their cell of 4 x 4 patches, attention counts them, and all patches go out. A patch is compared with
    the kept one, where the source compares neighbours; `router={"tolerance": 6, "std": ...}` joins patches that differ
    by a few grey levels, as after JPEG. The language model has a preset of its own, "pixelprune-language".
    """
    return {"router": "duplicate", "select": Threshold(), "skipped": Merged(), "blocks": "all"}


@register_preset("pixelprune-language")
def pixelprune_language() -> dict[str, object]:
    """PixelPrune, arXiv 2604.00886, for language models: image tokens of patches whose pixels equal those of a
    neighbour reach no layer.

    Decided from the pixels that the vision tower gets, without weights or calibration; the tower stays dense, or has
    the preset "pixelprune". A token that is made of several patches is skipped if all of them are duplicates. Text and
    the ends of lines stay, and tokens keep their positions. Differences: a patch is compared with the kept one, where
    the source compares neighbours, and skipped tokens remain in the output of the last layer.
    """
    return {
        "router": score("duplicate", cell=None),
        "select": Threshold(),
        "blocks": "all",
        "language": LanguageRouting(tokens="image"),
    }


@register_preset("ipcv")
def ipcv(depth: int) -> dict[str, object]:
    """IPCV, arXiv 2512.18747, in a vision tower: from the fourth block on, 0.35 of the tokens, those that the third one
    moved farthest.

    Skipped tokens get the update of the most similar kept token, which the source averages over the ten nearest. Two
    differences: the source approximates keys and values of skipped tokens in the next blocks, and prunes the language
    model too.
    """
    plan = drop_once(depth, after=3, keep=0.35)
    return {"router": "change", "skipped": "follow", "blocks": plan.blocks, "capacity": plan.capacity}


@register_preset("v2drop")
def v2drop(depth: int) -> dict[str, object]:
    """V2Drop, Chen et al., arXiv 2509.01552, for language models: image tokens that the third layer moved farthest.

    A half of them run from the fourth layer on, a quarter from 17/32 of the depth on and none from 22/32 on, as
    released for LLaVA-1.5; the released code keeps one token there. Differences: tokens are ranked once instead of at
    each stage, and skipped tokens remain in the output of the last layer.
    """
    stages = (3, math.ceil(depth * 17 / 32), math.ceil(depth * 22 / 32))
    _check_depth("v2drop", depth, 6)
    blocks = tuple(range(stages[0], depth))
    return {
        "router": "change",
        "blocks": blocks,
        "capacity": tuple((0.5, 0.25, 0.0)[(block >= stages[1]) + (block >= stages[2])] for block in blocks),
        "language": LanguageRouting(tokens="image"),
    }


@register_preset("evs")
def evs() -> dict[str, object]:
    """EVS, Bagrov et al., arXiv 2510.14624, for language models: a quarter of a video's tokens after its first frame,
    those that differ most from the frame before.

    The first layer compares embeddings by their cosine, as vLLM and SGLang do; the paper compares pixels. The share is
    the paper's q = 0.75, of later frames as there; the engines count the first frame in. Skipped tokens remain in the
    output of the last layer. For models that get videos as images, add `router={"images": True}`.
    """
    return {
        "router": "temporal",
        "blocks": "all",
        "capacity": 0.25,
        "language": LanguageRouting(tokens="image"),
    }


@register_preset("evenly-spread")
def evenly_spread(depth: int) -> dict[str, object]:
    """This library's training-free routing of language models: a quarter of the image tokens, evenly spread, from the
    second layer on.

    On a model of real weights, no score that was tried chooses better without training. Where a picture has more image
    tokens than the model was trained with, use fewer pixels first, or `language={"positions": "compact"}`; see the page
    on vision-language models.
    """
    return {
        "router": "stride",
        "blocks": drop_once(depth, after=1).blocks,
        "capacity": 0.25,
        "language": LanguageRouting(tokens="image"),
    }


@register_preset("distilled")
def distilled() -> dict[str, object]:
    """This library's learned router: gate 1 + 0.2 tanh, and a score that learns to predict importance.

    Importance is computed in training only, so inference needs no attention map.
    """
    return {"router": "linear", "gate": "tanh", "losses": {"importance": 0.25}}


@register_preset("gamma-mod")
def gamma_mod(depth: int) -> dict[str, object]:
    """Luo et al., arXiv 2410.13859, for language models: one score for all layers, normalised by a sigmoid.

    The score reads the output of the layer's first norm; the released two-class softmax equals the sigmoid of the
    difference of its two rows. All layers but the first three and the last are routed, as released; the paper selects
    them by `attention_ranks`. Capacity is 0.5 of the tokens that `protected_mask` does not protect: the released code
    protects the text after the image, the paper's best variant the question (`data.protected` in fine-tuning). The gate
    weighs the MLP branch, as released; the paper describes the layer, `gate_on="update"`. Rotary positions count kept
    tokens only, as released; `positions="original"` is closer to a pretrained model, and required for Qwen-VL. The loss
    weight is 0.01, summed over layers. In evaluation tokens above 0.005 are kept; the released code compares decoded
    tokens with 0.5, or runs all of them.
    """
    _check_depth("gamma-mod", depth, 5)
    return {
        # The difference of two rows with standard deviation 0.02.
        "router": score("linear", normalize=False, init_std=0.02 * 2**0.5, tied=True),
        "blocks": tuple(range(3, depth - 1)),
        "capacity": 0.5,
        "gate": "sigmoid",
        "losses": {"membership": 0.01},
        "language": LanguageRouting(
            tokens="all", scored="norm", inference_threshold=0.005, gate_on="mlp", positions="compact"
        ),
    }


@register_preset("videollm-mod")
def videollm_mod() -> dict[str, object]:
    """Wu et al., arXiv 2408.16730, for language models: a fifth of the tokens of each frame in every other layer.

    A frame is an image or a frame of a video; text is never skipped. The source leaves the gate open; here it is MoD's.
    """
    return {
        "router": score("linear", normalize=False),
        "gate": "linear",
        "capacity": 0.2,
        "language": LanguageRouting(tokens="span"),
    }


def _check_depth(name: str, depth: int, least: int) -> None:
    """Raise a ValueError if a model has no block besides those that a preset keeps dense."""
    if depth < least:
        raise ValueError(f"preset {name!r} keeps some blocks dense: depth must be at least {least}, got {depth}")
