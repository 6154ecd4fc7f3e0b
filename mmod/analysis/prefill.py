"""FLOPs of a language model's prefill and of its training on a text, from counts of tokens alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

from torch import nn

from mmod.adapters import find_stacks, used_parameters
from mmod.analysis.counting import by_data
from mmod.analysis.flop_report import REST, BlockFlops, PrefillFlops
from mmod.analysis.tracing import Trace
from mmod.blocks import ImportanceBlock, Mixin, RoutedBlock, model_hooks
from mmod.config import CHANGE, RoutingConfig
from mmod.methods.base import deciding_together
from mmod.methods.route import Route
from mmod.routing.decoder import Predictor
from mmod.routing.groups import kept_in_group
from mmod.values import check_fields, check_module, check_value


class _Cost(NamedTuple):
    """FLOPs of a multiplication with weights, in attention, and with a predictor's first weights, whose input has no
    gradient.
    """

    weights: int
    pairs: int
    stopped: int


@runtime_checkable
class _Groups(Protocol):
    """A hook of a language model that says which tokens may be skipped, "image" or "all", and how it is routed."""

    tokens: str
    config: RoutingConfig


_FORWARD = _Cost(2, 2, 2)
# A backward pass has two products for each with weights. Attention has five for two, since it computes the scores
# again instead of storing them.
_STEP = _Cost(6, 7, 4)


@dataclass(frozen=True)
class Prompt:
    """Numbers of tokens of a prompt, whose prefill `mmod.flops` counts in a language model.

    Which tokens a routed layer may skip follows from their kinds alone, so that no ids are needed.

    Args:
        text_tokens: Text tokens.
        image_tokens: Image tokens, or those of each image or frame. The router "temporal" takes them as frames of one
            video.
        protected_tokens: Text tokens that `protected_mask` keeps where text may be skipped.

    Example:
        >>> Prompt(text_tokens=40, image_tokens=(576, 576)).tokens
        1192
    """

    text_tokens: Annotated[int, "[0, inf)"]
    image_tokens: Annotated[int | tuple[int, ...], "[0, inf)"] = 0
    protected_tokens: Annotated[int, "[0, inf)"] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tokens < 1:
            raise ValueError("a prompt needs at least one token")
        if self.protected_tokens > self.text_tokens:
            raise ValueError(
                f"protected_tokens={self.protected_tokens} must lie between 0 and text_tokens={self.text_tokens}"
            )

    @property
    def images(self) -> tuple[int, ...]:
        """Tokens of each image."""
        return (self.image_tokens,) if isinstance(self.image_tokens, int) else self.image_tokens

    @property
    def tokens(self) -> int:
        """Number of all tokens."""
        return self.text_tokens + sum(self.images)


def count_prefill(
    model: nn.Module, prompt: Prompt, kept: float | Mapping[str, float] | Trace | None = None
) -> PrefillFlops:
    """Count the FLOPs of one prefill in a language model, dense and routed, from its layers alone; see `mmod.flops`.

    Nothing runs: attention counts all computed pairs of queries and keys, as `torch.utils.flop_counter` does, and a
    kernel that skips the masked half spends less. Vision tower and projector are not counted.
    """
    check_read(model, kept)
    if isinstance(kept, Trace):
        kept = _shares_of_free(model, kept) if by_data(model) else None
    check_value("kept", kept, float | Mapping[str, float] | None, "[0, 1]")
    return _Counter(model, _FORWARD, prompt, kept).count()


def check_read(model: nn.Module, kept: object) -> None:
    """Raise a ValueError if kept shares are given for a model whose cost follows from its config alone.

    A trace is of that model, and says the same.
    """
    if kept is not None and not isinstance(kept, Trace) and not by_data(model):
        raise ValueError(
            "leave kept out: it is for models that decide by a threshold, whose cost follows from the data; this one's "
            "follows from its config. A trace of any model may stand in its place: kept=decisions"
        )


def _shares_of_free(model: nn.Module, decisions: Trace) -> dict[str, float]:
    """Return the share that each routed block kept of the tokens that it may skip."""
    shares = {}
    for name, routing in decisions.items():
        block = model.get_submodule(name)
        if isinstance(block, RoutedBlock):
            free_BN = routing.tokens.free(routing.score_BN, block.router.prefix)
            shares[name] = float((routing.keep_BN & free_BN).sum() / free_BN.sum().clamp(min=1))
    return shares


def training_flops(model: nn.Module, tokens: int) -> int:
    """Count the FLOPs of training on a text: forward and backward pass, with the logits of every token.

    A product with weights counts three times that of its forward pass, attention three and a half times. Importance
    has no gradient and counts once; a predictor passes none to its input.
    """
    # Training takes the top-k, whatever decides in evaluation.
    with deciding_together(model):
        counts = _Counter(model, _STEP, Prompt(tokens)).count()
    # A prefill has the logits of its last token alone, training those of every token.
    return counts.routed + (tokens - 1) * counts.rest.routed


class _Counter:
    """Counts one prompt; `kept` are the shares that are kept where they follow from the data."""

    def __init__(
        self,
        model: nn.Module,
        cost: _Cost,
        prompt: Prompt,
        kept: float | Mapping[str, float] | None = None,
    ) -> None:
        check_module(model)
        stack = find_stacks(model).get("language")
        if stack is None:
            raise ValueError(f"this {type(model).__name__} has no language part")
        self.model = model
        self.stack = stack
        self.cost = cost
        self.images = prompt.images
        self.kept = kept
        self.tokens = prompt.tokens
        groups = [hook for hook in model_hooks(model) if isinstance(hook, _Groups)]
        # Tokens that may be skipped: those of each image, or all of the prompt.
        self.text_is_free = bool(groups) and groups[0].tokens == "all"
        self.free = (self.tokens - prompt.protected_tokens,) if self.text_is_free else prompt.images
        if groups and groups[0].config.router.reads_frames:
            # The first frame is never skipped.
            self.free = prompt.images[1:]

    def count(self) -> PrefillFlops:
        """Return the FLOPs of all layers, and of the logits of one token."""
        rows = tuple(map(self._row, self.stack.names, self.stack.blocks))
        # All causal language models of transformers name their output layer so.
        heads = [module for name, module in self.model.named_modules() if name.rpartition(".")[2] == "lm_head"]
        head = sum(self.cost.weights * self.stack.dim * int(module.out_features) for module in heads)
        block = self.stack.blocks[0]
        weight = next(weight for weight in block.parameters() if weight.is_floating_point())
        widths = {_key_width(layer.get_submodule("self_attn")) for layer in self.stack.blocks}
        if len(widths) > 1:
            raise ValueError(
                f"layers of this {type(self.model).__name__} cache keys of different widths, {sorted(widths)}: count a "
                "batch by mmod.flops(model, batch)"
            )
        # A key and a value for each token.
        cached = 2 * widths.pop() * weight.element_size()
        return PrefillFlops(rows, BlockFlops(REST, 0, 0, head, head), self.tokens, sum(self.images), cached)

    def _row(self, name: str, block: nn.Module) -> BlockFlops:
        inner_methods = _methods_besides_routing(block)
        _check_countable(name, block)
        attention: Any = block.get_submodule("self_attn")
        width = int(attention.config.num_attention_heads) * int(attention.head_dim)
        sizes = _sizes_of_host(block)
        in_attention = sum(size for name, size in sizes.items() if name.startswith("self_attn"))
        keys_and_values = 2 * self.stack.dim * _key_width(attention)

        def layer(queries: int, keys: int, rows: int) -> int:
            """Count attention of some queries to some keys, and the MLP of some rows."""
            projections = queries * (in_attention - keys_and_values) + keys * keys_and_values
            in_mlp = rows * (sum(sizes.values()) - in_attention)
            # Each pair takes part in two products: that of query and key, and that of probability and value.
            return self.cost.weights * (projections + in_mlp) + 2 * self.cost.pairs * queries * keys * width

        tokens = self.tokens
        kept = queries = keys = rows = tokens
        router = 0
        importance = 0
        if isinstance(block, RoutedBlock):
            # Tokens that may not be skipped are all kept.
            kept += self._kept(name, block) - sum(self.free)
            router = self._router_flops(block)
            config = block.router.config
            queries = tokens if config.operator == "mlp" else kept
            keys = tokens if config.context == "all" else queries
            rows = tokens if config.operator == "attention" else kept
        elif isinstance(block, ImportanceBlock) and not block.mod_state.span.for_loss:
            viewers = {CHANGE: 0, "last_token": 1}.get(block.mod_state.importance, tokens)
            importance = 2 * viewers * tokens * width
        for module in inner_methods:
            router += rows * sum(map(self._deciding, module.choosing_modules()))
            rows = module.rows_of(rows)
        dense = layer(tokens, tokens, tokens)
        routed = layer(queries, keys, rows) + router + importance
        return BlockFlops(name, tokens, kept, dense, routed, router, importance, keys)

    def _kept(self, name: str, block: RoutedBlock) -> int:
        """Return how many of the tokens that may be skipped a block keeps."""
        config = block.router.config
        capacity = block.router.capacity
        free = self.free
        if block.cost_follows_data:
            share = self.kept.get(name) if isinstance(self.kept, Mapping) else self.kept
            if share is None:
                raise ValueError(
                    f"what {name} keeps follows from the data: pass kept, the share of tokens that it keeps, or a "
                    "trace of a representative prompt"
                )
            return int(sum(free) * share)
        if isinstance(config.language.frames, int):
            # Frames of equal length, each with its own top-k.
            free = (config.language.frames,) * (sum(free) // config.language.frames)
        elif config.language.frames is None:
            free = (sum(free),)
        if self.text_is_free:
            return sum(kept_in_group(number, capacity, strict=False) for number in free)
        # Not refused where it keeps none, as a pass does: searches ask for any capacity.
        return sum(number * capacity.numerator // capacity.denominator for number in free)

    def _router_flops(self, block: RoutedBlock) -> int:
        """Return what a block spends on its score, and on its predictor."""
        score = block.router.config.router
        state = block.mod_state
        dim = self.stack.dim
        per_token = self._deciding(block.router)
        if score.tied:
            # The weight that all layers share lies in the model, and is no parameter of the router.
            per_token += self.cost.weights * dim
        flops = self.tokens * per_token
        # A score that blocks share is computed by the first of them, and carries no gradient.
        computes_score = not score.shared or state.span is None or state.position == 0
        if score.compares and computes_score and sum(self.free) > 0:
            # Two operations for each product, by each pair of tokens.
            flops += 2 * self.tokens**2 * (score.channels or dim)
        return flops

    def _deciding(self, module: nn.Module) -> int:
        """Return the FLOPs that a router or predictor spends on one token."""
        predictors = (predictor for predictor in module.modules() if isinstance(predictor, Predictor))
        stopped = {id(predictor.hidden.weight) for predictor in predictors}
        weights = [weight for weight in used_parameters(module).values() if weight.ndim > 1]
        flops = 0
        for weight in weights:
            per_weight = self.cost.stopped if id(weight) in stopped else self.cost.weights
            flops += per_weight * weight.numel()
        return flops


def _methods_besides_routing(block: nn.Module) -> list[Mixin]:
    """Return the modules of a block that another method than routing changed.

    Raises:
        ValueError: The block itself is one of them, as a layer that is run several times.
    """
    changed = [module for module in block.modules() if isinstance(module, Mixin)]
    others = [module for module in changed if not isinstance(module.mod_method, Route)]
    if any(module is block for module in others):
        raise ValueError("layers that are shared are counted as a whole: mmod.flops(model, {'input_ids': ids})")
    return others


def _modules_of_host(block: nn.Module) -> dict[str, nn.Module]:
    """Return the modules in a block by their name, without those that methods added."""
    added: set[nn.Module] = set()
    for module in block.modules():
        for name, child in module.named_children():
            if isinstance(module, Mixin) and name in module.added_modules:
                added.update(child.modules())
    return {name: module for name, module in block.named_modules() if module not in added}


def _sizes_of_host(block: nn.Module) -> dict[str, int]:
    """Return the weights of each linear layer in a block by its name, without those that methods added."""
    modules = _modules_of_host(block).items()
    return {name: m.in_features * m.out_features for name, m in modules if isinstance(m, nn.Linear)}


def _check_countable(name: str, block: nn.Module) -> None:
    """Raise a ValueError if a layer multiplies tokens by more than linear layers and pairs of queries and keys."""
    reason = _reason_against(block)
    if reason:
        raise ValueError(
            f"{name} {reason}, which counts of tokens do not cover: count a batch by mmod.flops(model, batch)"
        )


def _reason_against(block: nn.Module) -> str:
    """Return why counts of tokens do not cover a layer, or nothing if they do."""
    attention = block._modules.get("self_attn")
    if attention is None:
        return "has linear attention"
    if not any(hasattr(attention, keys) for keys in ("k_proj", "qkv_proj")):
        return "does not compute keys by one linear layer"
    for name, module in _modules_of_host(block).items():
        axes = max((weight.ndim for weight in module.parameters(recurse=False)), default=0)
        if axes > 1 and not isinstance(module, nn.Linear):
            return f"has weights in {name}, which is no linear layer"
    return ""


def _key_width(attention: Any) -> int:
    """Return the features of a token's keys in one layer, as many as those of its values."""
    keys = attention._modules.get("k_proj")
    if keys is not None:
        return int(keys.out_features)
    return int(attention.config.num_key_value_heads) * int(attention.head_dim)
