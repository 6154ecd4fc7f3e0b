"""Routing configs by the name of the method that proposed them."""

from __future__ import annotations

from typing import Any

from mmod.config import RoutingConfig
from mmod.planning.schedules import ratio_decay
from mmod.values import one_of

PRESETS = ("mod", "a-mod", "p-mod", "modification", "distilled", "gamma-mod", "videollm-mod")


def preset(name: str, depth: int | None = None, **changes: Any) -> RoutingConfig:
    """Return the routing config of a published method, or this library's recommended learned router.

    - "mod": Raposo et al., arXiv 2404.02258. A linear score of the raw tokens is its own gate (Eq. 1), capacity 0.125
      in every other block. Causal sampling's auxiliary loss is left out: image models see all tokens, so top-k needs
      none. A language model needs `inference_threshold=0.5` with the loss "membership" to generate; `predictor=True` is
      the paper's second way. The score starts around 1 instead of around 0, so that a pretrained model starts from its
      own function.
      Trained from scratch the raw gate is known to diverge (Mixture-of-Recursions, arXiv 2507.10524, table 13); use
      `preset("mod", gate="sigmoid", gate_scale=0.1)` there.
    - "a-mod": Gadhikar et al., arXiv 2412.20875. Importance of the preceding dense block, no gate, no parameter,
      capacity 0.5 in every other block. The paper leaves open whether the class token is protected; here it is.
    - "p-mod": Zhang et al., arXiv 2412.04449. Linear score with bias of the raw tokens, both starting at zero, gate
      1 + 0.2 tanh, capacity falling over depth by a shifted cosine between 0.85 and 0.15, so it needs `depth`. Skipped
      tokens are multiplied by the gate, as in paper and code. For kept tokens the paper weighs the block's output and
      the code its MLP branch; here the gate weighs the whole update, which both agree with while it is 1. In language
      models `gate_on="mlp"` is the code's way; only image tokens are scored, weighed or skipped there.
    - "modification": Zhang et al., arXiv 2410.14268. Threshold 0.5 on a sigmoid score, which is also the gate, and the
      load penalty at 0.01. The paper gates the attention and MLP outputs one by one, `gate_on="branches"` in language
      models; here the gate weighs their sum.
    - "gamma-mod": Luo et al., arXiv 2410.13859, for language models; it needs `depth`. One score for all layers, of
      what each layer's first norm returns, squashed by a sigmoid (the released two-class softmax is the sigmoid of the
      difference of its two rows). All layers but the first three and the last, as released; the paper chooses them by
      `attention_ranks`. Capacity 0.5 of the tokens that `protected_mask` leaves free: the released code protects
      whatever follows the image, the paper's best variant the question (`data.protected` in fine-tuning). The gate
      weighs the MLP branch as released; the paper's text describes the whole layer, `gate_on="update"`. Rotary
      positions are counted among kept tokens as released; `positions="original"` is nearer to a pretrained model, and
      the only way in Qwen-VL. The loss is 0.01, summed over layers. In evaluation tokens above 0.005 are kept;
      the released code compares decoded tokens with 0.5 or runs them all.
    - "videollm-mod": Wu et al., arXiv 2408.16730, for language models: a fifth of the tokens of each frame, an
      image or a frame of a video, in every other layer, text never skipped. The source leaves the gate open; here it is
      MoD's.
    - "distilled": this library's learned router. Gate 1 + 0.2 tanh, and a score that is also trained to select what
      importance would select. Importance is computed in training only, so inference needs no attention map.

    Args:
        name: One of the names above.
        depth: Number of blocks of the model; needed by "p-mod" and "gamma-mod".
        changes: Fields of `RoutingConfig` to set differently.

    Raises:
        ValueError: Unknown name or field, or no depth where one is needed.

    Example:
        >>> preset("a-mod", capacity=0.25).capacity
        0.25
    """
    one_of("preset", name, PRESETS)
    if name == "mod":
        fields: dict[str, Any] = {"router": "linear", "gate": "linear", "capacity": 0.125, "normalize": False}
    elif name == "a-mod":
        fields = {"router": "attention", "capacity": 0.5}
    elif name == "p-mod":
        fields = {"router": "linear", "gate": "tanh", "gate_scale": 0.2, "reweight_skipped": True, "bias": True}
        fields |= {"normalize": False, "init_std": 0.0}
        if not {"capacity", "blocks"} <= set(changes):
            fields |= _decaying(depth)
    elif name == "modification":
        fields = {"router": "linear", "gate": "sigmoid", "select": "threshold", "threshold": 0.5}
        fields |= {"losses": {"load": 0.01}}
    elif name == "gamma-mod":
        fields = _gamma(depth)
    elif name == "videollm-mod":
        fields = {"router": "linear", "gate": "linear", "capacity": 0.2, "normalize": False, "tokens": "image"}
        fields |= {"frames": "span"}
    else:
        fields = {"router": "linear", "gate": "tanh", "losses": {"importance": 0.25}}
    return RoutingConfig.from_dict({**fields, **changes})


def _decaying(depth: int | None) -> dict[str, Any]:
    if depth is None:
        raise ValueError("preset 'p-mod' sets capacity by depth: give depth=len(model.blocks), or capacity and blocks")
    plan = ratio_decay(depth)
    return {"blocks": plan.blocks, "capacity": plan.capacities}


def _gamma(depth: int | None) -> dict[str, Any]:
    if depth is None or depth < 5:
        raise ValueError(f"preset 'gamma-mod' keeps the first three layers and the last dense: give depth, got {depth}")
    blocks = tuple(range(3, depth - 1))
    return {
        "router": "linear",
        "blocks": blocks,
        "capacity": 0.5,
        "tokens": "all",
        "gate": "sigmoid",
        "gate_on": "mlp",
        "normalize": "block",
        "shared": True,
        "positions": "compact",
        # Two rows of standard deviation 0.02, subtracted.
        "init_std": 0.02 * 2**0.5,
        "losses": {"membership": 0.01},
        "inference_threshold": 0.005,
    }
