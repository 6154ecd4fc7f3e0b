"""Self-speculative decoding: a routed language model writes a draft, and all of its tokens in all layers verify it.

Axes: B samples, N tokens.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mmod.config import RoutingConfig, Threshold
from mmod.model import deciding_by, route_, routing_configs, unroute_

__all__ = ["DraftReport", "every_token", "full_pass", "judge_drafts"]

Model = TypeVar("Model", bound=nn.Module)


def every_token(model: nn.Module) -> AbstractContextManager[None]:
    """Let all tokens of a routed model run through all of its layers, at the weights that their gates give them.

    Args:
        model: A routed model. Passes in the context take no cache.

    Returns:
        A context manager.
    """
    return deciding_by(model, _all_kept)


def full_pass(model: Model) -> Model:
    """Return a routed language model in which every token runs through all layers, with the same weights.

    It verifies what the model drafts, in transformers' assisted generation:
    `full_pass(model).generate(**inputs, assistant_model=model)` returns what `full_pass(model).generate(**inputs)`
    does, wherever no two tokens have the same logit but for rounding. The model must have learned both passes
    (`elastic: true` in `mmod train text`), and each token must be decided alone (by threshold or with an
    `inference_threshold`).

    Args:
        model: A routed language model of transformers.

    Returns:
        A model of its own, in the mode of the one given. Parameters are shared: training one trains the other.

    Raises:
        ValueError: Nothing in the model is routed, or routing does not go with a threshold.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> draft = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=20, eos_token_id=None)).eval()
        >>> draft = route_(draft, RoutingConfig(router="linear", language={"inference_threshold": 0.5}))
        >>> full, prompt = full_pass(draft), torch.tensor([[3, 1, 4, 1, 5]])
        >>> words = full.generate(prompt, assistant_model=draft, max_new_tokens=6, do_sample=False, pad_token_id=0)
        >>> words.shape
        torch.Size([1, 11])
    """
    configs = {part: _all_kept(config) for part, config in routing_configs(model).items()}
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    whole = route_(unroute_(copy.deepcopy(model, shared)), **configs)
    # The predictor of what is kept, if any, has nothing to say in it.
    whole.load_state_dict(model.state_dict(keep_vars=True), strict=False, assign=True)
    return whole.train(model.training)


@dataclass(frozen=True)
class DraftReport:
    """What drafts of a routed model were worth.

    Args:
        new_tokens: Tokens generated.
        drafted: Tokens that were drafted.
        accepted: Those that the full pass agreed with.
        passes: Passes of the full model that verified them, the prompt's included; without drafts each token takes one.
        plain_seconds: Time of greedy generation by the full model, the least of some rounds.
        draft_seconds: The same with drafts.
        identical: Whether both gave the same tokens.
    """

    new_tokens: int
    drafted: int
    accepted: int
    passes: int
    plain_seconds: float
    draft_seconds: float
    identical: bool

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted; 0 where none was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def speedup(self) -> float:
        """Time without drafts over that with them."""
        return self.plain_seconds / self.draft_seconds

    def __str__(self) -> str:
        same = "the same tokens" if self.identical else "OTHER TOKENS, which rounding of equal logits may explain"
        return (
            f"{self.accepted} of {self.drafted} drafted tokens accepted ({self.acceptance:.3f}), {self.new_tokens} "
            f"tokens in {self.passes} full passes, {self.plain_seconds:.3f} s without drafts, "
            f"{self.draft_seconds:.3f} s with them ({self.speedup:.2f} times as fast), {same}"
        )


@torch.no_grad()
def judge_drafts(
    model: Any, input_ids: Tensor, new_tokens: int = 64, rounds: int = 3, draft_tokens: int | None = None
) -> DraftReport:
    """Generate greedily with the full pass of a routed model, with and without its own drafts.

    Args:
        model: A routed language model of transformers, in evaluation mode.
        input_ids: A prompt (1, N); transformers drafts for one sample.
        new_tokens: Tokens to generate.
        rounds: How often each way is timed; the first round also counts.
        draft_tokens: Tokens that are drafted before each full pass; None leaves transformers its own choice, up to 20
            and fewer where the draft is unsure.

    Returns:
        Acceptance, time, and whether the tokens are the same.

    Raises:
        ValueError: More than one prompt, or a model that `full_pass` refuses.
    """
    if input_ids.shape[0] != 1:
        raise ValueError(f"drafts are written for one sample, got a batch of {input_ids.shape[0]}")
    full = full_pass(model)
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    ways: dict[str, dict[str, Any]] = {"plain": {}, "draft": {"assistant_model": model}}
    seconds, tokens = {name: float("inf") for name in ways}, {}
    with _drafting(model, draft_tokens):
        with _counted(full) as verified, _counted(model) as drafted:
            tokens["draft"] = full.generate(**inputs, **options, assistant_model=model)
        for _ in range(rounds):
            for name, own in ways.items():
                start = time.perf_counter()
                tokens[name] = full.generate(**inputs, **options, **own)
                _wait(input_ids)
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return DraftReport(
        new_tokens=new_tokens,
        drafted=drafted[0],
        # Each pass also gives a token of its own.
        accepted=new_tokens - verified[0],
        passes=verified[0],
        plain_seconds=seconds["plain"],
        draft_seconds=seconds["draft"],
        identical=bool(torch.equal(tokens["plain"], tokens["draft"])),
    )


def _all_kept(config: RoutingConfig) -> RoutingConfig:
    """Return a config by which the same router keeps every token: each squashed score reaches 0."""
    return config.replace(select=Threshold(0.0), language={"inference_threshold": None, "predictor": False})


@contextmanager
def _drafting(model: Any, tokens: int | None) -> Iterator[None]:
    """Let a model draft a number of tokens at a time; its own settings, which drafting changes, are back afterwards."""
    own = copy.deepcopy(model.generation_config)
    if tokens is not None:
        # No draft ends early.
        fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
        model.generation_config.update(num_assistant_tokens=tokens, **fixed)
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _counted(model: nn.Module) -> Iterator[list[int]]:
    """Count the forward passes of a model."""
    count = [0]

    def add(*_: Any) -> None:
        count[0] += 1

    handle = model.register_forward_hook(add)
    try:
        yield count
    finally:
        handle.remove()


def _wait(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
