"""A dense model on a batch: its loss, the attention that tokens receive, and its entropy at each token.

Axes: B images, N tokens, D channels, C classes or tokens of a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmod.adapters import adapted_model, find_library, find_stack
from mmod.audits.choices import DENSE_ATTENTION, REFERENCE_ENTROPY
from mmod.ops.capture import capture_importance
from mmod.ops.intercept import inside
from mmod.routing import Routing


class Reference(NamedTuple):
    """A dense model's loss per image (B,), and by condition and block what it says of tokens (B, N)."""

    loss_B: Tensor
    tokens: Mapping[str, Mapping[str, Tensor]]


def consult(
    model: nn.Module, evaluated: Callable[[], Tensor], learned: Mapping[str, Routing], conditions: Collection[str]
) -> Reference:
    """Run a dense model on a batch, once, and return what the conditions need."""
    captured: dict[str, capture_importance] = {}
    if DENSE_ATTENTION in conditions:
        modules = dict(model.named_modules())
        for name, routing in learned.items():
            # A block that the dense model lacks is refused below, by what it has not captured.
            if name in modules:
                captured[name] = capture_importance(getattr(routing.tokens, "valid_BN", None))
    entropies: list[Tensor] = []
    with ExitStack() as stack:
        stack.enter_context(inside([(modules[name], capture) for name, capture in captured.items()]))
        if REFERENCE_ENTROPY in conditions:
            entropies = stack.enter_context(token_entropy(model))
        loss_B = evaluated()
    # Of the last pass, if the evaluation runs the model several times.
    entropy_BN = entropies[-1] if entropies else None
    values = {
        DENSE_ATTENTION: {name: capture.importance_BN for name, capture in captured.items()},
        REFERENCE_ENTROPY: dict.fromkeys(learned, entropy_BN),
    }
    tokens: dict[str, dict[str, Tensor]] = {}
    for condition in values.keys() & set(conditions):
        for name, routing in learned.items():
            value_BN = values[condition].get(name)
            if value_BN is None or value_BN.shape != routing.score_BN.shape:
                raise ValueError(
                    f"the dense model has no {condition} of the {routing.score_BN.shape[1]} tokens in {name}: give the "
                    f"one that the routed model was made from, or leave {condition!r} out of `conditions`"
                )
            tokens.setdefault(condition, {})[name] = value_BN
    return Reference(loss_B, tokens)


@contextmanager
def token_entropy(model: nn.Module) -> Iterator[list[Tensor]]:
    """Record the entropy of a model's predictions at each token, in forward passes inside the block.

    A language model or a classifier of patches predicts at each token. The head of an image classifier predicts for
    one image: it is given each token's final state in the place of a whole image.
    """
    host: Any = adapted_model(model)
    entropies: list[Tensor] = []

    def read(_: nn.Module, inputs: tuple[object, ...], answer: Any) -> None:
        entropies.append(_entropy(answer.logits))

    if find_library(model) == "transformers" and host.get_output_embeddings() is not None:
        with host.register_forward_hook(read):
            yield entropies
    elif find_library(model) == "timm" and bool(getattr(host, "num_classes", 0)):
        with _head_watched(host, entropies):
            yield entropies
    else:
        raise ValueError(
            f"{type(host).__name__} has no head that answers for single tokens, as language models of transformers and "
            f"classifiers of timm have: leave {REFERENCE_ENTROPY!r} out of `conditions`"
        )


@contextmanager
def _head_watched(host: Any, entropies: list[Tensor]) -> Iterator[None]:
    """Record the entropies of what a classifier's own head makes of each token."""
    head = host.forward_head
    prefix = find_stack(host).prefix

    def forward_head(x_BND: Tensor, *args: object, **kwargs: object) -> Tensor:
        # An image of that token alone, whichever of its tokens the head reads.
        alone = x_BND.flatten(0, 1).unsqueeze(1).expand(-1, prefix + 1, -1)
        answer = head(alone)
        logits = answer[:, -1] if answer.ndim == 3 else answer
        entropies.append(_entropy(logits).view(x_BND.shape[:2]))
        return head(x_BND, *args, **kwargs)

    # The host calls it by name; an attribute of its own stands before the method of its class.
    host.forward_head = forward_head
    try:
        yield
    finally:
        del host.forward_head


def _entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each answer in nats, given logits (..., C)."""
    return torch.special.entr(logits.float().softmax(-1)).sum(-1)
