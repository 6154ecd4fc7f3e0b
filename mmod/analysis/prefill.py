"""FLOPs of a language model's prefill and of its training on a text, from counts of tokens alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from mmod.adapters import find_stacks
from mmod.analysis.flop_report import REST, BlockFlops, PrefillFlops
from mmod.blocks import ImportanceBlock, RoutedBlock, StandingModule, model_hooks
from mmod.methods.base import deciding_together
from mmod.routing.decoder import Predictor
from mmod.values import check_module


class _Cost(NamedTuple):
    """FLOPs of a multiplication with weights, in attention, and with a predictor's first weights, whose input has no
    gradient.
    """

    weights: int
    pairs: int
    stopped: int


class _Prompt(NamedTuple):
    """Counts of tokens, and the shares that are kept where they follow from the data."""

    text: int
    images: Sequence[int] = ()
    kept: float | Mapping[str, float] | None = None
    protected: int = 0

    @property
    def tokens(self) -> int:
        return self.text + sum(self.images)


_FORWARD = _Cost(2, 2, 2)
# A backward pass has two products for each with weights. Attention has five for two, since it computes the scores
# again instead of storing them.
_STEP = _Cost(6, 7, 4)


def prefill_flops(
    model: nn.Module,
    text_tokens: int,
    image_tokens: int | Sequence[int] = 0,
    kept: float | Mapping[str, float] | None = None,
    protected_tokens: int = 0,
) -> PrefillFlops:
    """Count the FLOPs of one prefill in the language model of a transformers model, dense and routed.

    One FLOP is one multiplication or one addition. Attention counts all computed pairs of queries and keys, as
    `torch.utils.flop_counter` does; a kernel that skips the masked half spends less. Vision tower and projector are not
    counted.

    Args:
        model: A model with a language part, routed or not.
        text_tokens: Text tokens of the prompt.
        image_tokens: Image tokens of the prompt, or those of each image.
        kept: For threshold routing, whose cost depends on the data: share kept of the tokens that may be skipped, for
            all routed layers or by module name.
        protected_tokens: Text tokens that `protected_mask` keeps where text may be skipped.

    Raises:
        ValueError: No language part, layers that are shared, no tokens, more protected tokens than text, or threshold
            routing without `kept`.
    """
    images = [image_tokens] if isinstance(image_tokens, int) else list(image_tokens)
    return _count(_FORWARD, model, _Prompt(text_tokens, images, kept, protected_tokens))


def training_flops(model: nn.Module, tokens: int) -> int:
    """Count the FLOPs of training on a text: forward and backward pass, with the logits of every token.

    A product with weights counts three times that of its forward pass, attention three and a half times. Importance
    has no gradient and counts once; a predictor passes none to its input.
    """
    # Training takes the top-k, whatever decides in evaluation.
    with deciding_together(model):
        counts = _count(_STEP, model, _Prompt(tokens))
    return counts.routed + (tokens - 1) * counts.rest.routed


def _count(cost: _Cost, model: nn.Module, prompt: _Prompt) -> PrefillFlops:
    check_module(model)
    stack = find_stacks(model).get("language")
    if stack is None:
        raise ValueError(f"this {type(model).__name__} has no language part")
    if prompt.tokens < 1:
        raise ValueError("a prompt needs at least one token")
    if not 0 <= prompt.protected <= prompt.text:
        raise ValueError(f"protected_tokens={prompt.protected} must lie between 0 and text_tokens={prompt.text}")
    hooks: list[Any] = [hook for hook in model_hooks(model) if hasattr(hook, "tokens")]
    free = [prompt.tokens - prompt.protected] if hooks and hooks[0].tokens == "all" else prompt.images
    rows = []
    for name, block in zip(stack.names, stack.blocks):
        kept, router = prompt.tokens, 0
        if isinstance(block, RoutedBlock):
            share = prompt.kept.get(name) if isinstance(prompt.kept, Mapping) else prompt.kept
            kept += _kept(name, block, free, share) - sum(free)
            router = _router_flops(cost, block, prompt.tokens, stack.dim, skips=sum(free) > 0)
        rows.append(_row(cost, name, block, prompt.tokens, kept, router, stack.dim))
    cached = _bytes_per_token(stack.blocks[0])
    heads = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "lm_head"]
    head = sum(cost.weights * stack.dim * int(module.out_features) for module in heads)
    return PrefillFlops(tuple(rows), BlockFlops(REST, 0, 0, head, head), prompt.tokens, sum(prompt.images), cached)


def _kept(name: str, block: RoutedBlock, free: Sequence[int], share: float | None) -> int:
    config, capacity = block.router.config, block.router.capacity
    if config.select != "topk" or config.language.inference_threshold is not None:
        if share is None:
            raise ValueError(f"what {name} keeps follows from the data: pass kept, the share of tokens it keeps")
        return int(sum(free) * share)
    if isinstance(config.language.frames, int):
        free = [config.language.frames] * (sum(free) // config.language.frames)
    elif config.language.frames is None:
        free = [sum(free)]
    return sum(number * capacity.numerator // capacity.denominator for number in free)


def _router_flops(cost: _Cost, block: RoutedBlock, tokens: int, dim: int, *, skips: bool) -> int:
    """Return what a block spends on its score, and on its predictor; `skips` is False where nothing can be skipped."""
    score, state = block.router.config.router, block.mod_state
    flops = tokens * _deciding(cost, block.router)
    if score.tied:
        flops += cost.weights * tokens * dim
    # A score that blocks share is computed by the first of them, and carries no gradient.
    if score.compares and skips and (not score.shared or state.writes or state.span is None):
        flops += 2 * tokens**2 * (score.compared_channels or dim)
    return flops


def _row(cost: _Cost, name: str, block: nn.Module, tokens: int, kept: int, router: int, dim: int) -> BlockFlops:
    standing = {place: module for place, module in block.named_modules() if isinstance(module, StandingModule)}
    if "" in standing:
        raise ValueError("layers that are shared are counted as a whole: mmod.flops(model, {'input_ids': ids})")
    attention: Any = block.get_submodule("self_attn")
    width = int(attention.config.num_attention_heads) * int(attention.head_dim)
    importance = 0
    operator, context = "block", "kept"
    if isinstance(block, RoutedBlock):
        operator, context = str(block.router.config.operator), str(block.router.config.context)
    elif isinstance(block, ImportanceBlock) and not block.mod_state.training_only:
        importance = 2 * (1 if block.mod_state.average == "last_token" else tokens) * tokens * width
    added = tuple(f"{place}.{name}" for place, module in standing.items() for name in module.added_modules)
    sizes = {
        place: module.in_features * module.out_features
        for place, module in block.named_modules()
        if isinstance(module, nn.Linear) and not place.startswith(("router", *added))
    }
    in_attention = sum(size for place, size in sizes.items() if place.startswith("self_attn"))
    keys_and_values = 2 * dim * _key_width(attention)

    def layer(queries: int, keys: int, rows: int) -> int:
        """Count attention of some queries to some keys, and the MLP of some rows."""
        projections = queries * (in_attention - keys_and_values) + keys * keys_and_values
        in_mlp = rows * (sum(sizes.values()) - in_attention)
        return cost.weights * (projections + in_mlp) + 2 * cost.pairs * queries * keys * width

    queries = tokens if operator == "mlp" else kept
    keys = tokens if context == "all" else queries
    rows = tokens if operator == "attention" else kept
    for module in standing.values():
        router += rows * sum(_deciding(cost, chooser) for chooser in module.choosing_modules())
        rows = module.rows_of(rows)
    routed = layer(queries, keys, rows)
    dense = layer(tokens, tokens, tokens)
    return BlockFlops(name, tokens, kept, dense, routed + router + importance, router, importance, keys)


def _deciding(cost: _Cost, module: nn.Module) -> int:
    """Return the FLOPs that a router or predictor spends on one token."""
    predictors = (predictor for predictor in module.modules() if isinstance(predictor, Predictor))
    stopped = {id(predictor.hidden.weight) for predictor in predictors}
    weights = [weight for weight in module.parameters() if weight.ndim > 1]
    return sum((cost.stopped if id(weight) in stopped else cost.weights) * weight.numel() for weight in weights)


def _key_width(attention: Any) -> int:
    """Return the features of a token's keys in one layer, as many as those of its values."""
    return int(attention.config.num_key_value_heads) * int(attention.head_dim)


def _bytes_per_token(block: nn.Module) -> int:
    """Return the bytes of one token's keys and values in a layer's cache."""
    weight = next(weight for weight in block.parameters() if weight.is_floating_point())
    return 2 * _key_width(block.get_submodule("self_attn")) * weight.element_size()
