"""Self-speculative decoding: a routed language model drafts, and its full pass over all tokens verifies.

Axes: B samples, N tokens.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mmod.methods.route import Route, all_kept, routing_configs
from mmod.model import change_, copy_of, unroute_

Model = TypeVar("Model", bound=nn.Module)


def full_pass(model: Model) -> Model:
    """Return a routed language model in which all tokens run in all layers, with the same weights.

    It verifies the model's drafts in transformers' assisted generation:
    `full_pass(model).generate(**inputs, assistant_model=model)` returns the same tokens as
    `full_pass(model).generate(**inputs)`, except where two logits are equal up to rounding. The model must be trained
    for both passes (`elastic: true` in `mmod train text`), and tokens must be decided independently (by threshold, or
    with an `inference_threshold`).

    Args:
        model: A routed language model of transformers.

    Returns:
        A second model in the same mode, with shared parameters: training one trains the other.

    Example:
        >>> import mmod
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> draft = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=20, eos_token_id=None)).eval()
        >>> draft = mmod.route_(draft, mmod.RoutingConfig(router="linear", language={"inference_threshold": 0.5}))
        >>> full, prompt = full_pass(draft), torch.tensor([[3, 1, 4, 1, 5]])
        >>> words = full.generate(prompt, assistant_model=draft, max_new_tokens=6, do_sample=False, pad_token_id=0)
        >>> words.shape
        torch.Size([1, 11])
    """
    configs = {part: all_kept(config) for part, config in routing_configs(model).items()}
    # The copy shares all weights, since its keys are those of the routed model.
    full = change_(unroute_(copy_of(model)), Route(configs))
    # It has no predictor of the kept mask, so loading is not strict.
    full.load_state_dict(model.state_dict(keep_vars=True), strict=False, assign=True)
    return full.train(model.training)


@dataclass(frozen=True)
class DraftReport:
    """Acceptance and speed of a routed model's drafts.

    Args:
        accepted: Number of drafted tokens that the full pass accepted.
        passes: Forward passes of the full model, including prefill; without drafts there is one per token.
        plain_seconds: Time of greedy generation by the full model, the minimum over rounds.
        draft_seconds: The same with drafts.
        identical: Both generated the same tokens.
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
        """Time without drafts divided by time with drafts."""
        return self.plain_seconds / self.draft_seconds

    def __str__(self) -> str:
        same = "the same tokens" if self.identical else "OTHER TOKENS, which rounding of equal logits may explain"
        return (
            f"{self.accepted} of {self.drafted} drafted tokens accepted ({self.acceptance:.3f}), {self.new_tokens} "
            f"tokens in {self.passes} full passes, {self.plain_seconds:.3f} s without drafts, "
            f"{self.draft_seconds:.3f} s with them ({self.speedup:.2f} times as fast), {same}"
        )


@torch.no_grad()
def evaluate_drafts(
    model: Any, input_ids: Tensor, new_tokens: int = 64, rounds: int = 3, draft_tokens: int | None = None
) -> DraftReport:
    """Generate greedily with the full pass of a routed model, with and without its drafts.

    Args:
        model: A routed language model of transformers, in evaluation mode.
        input_ids: A prompt (1, N); transformers drafts for one sample.
        rounds: Number of timed rounds; the first one counts too.
        draft_tokens: Drafted tokens per full pass; None follows transformers, at most 20.
    """
    if input_ids.shape[0] != 1:
        raise ValueError(f"drafts need a batch of one sample, got {input_ids.shape[0]}")
    full = full_pass(model)
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    modes: dict[str, dict[str, Any]] = {"plain": {}, "draft": {"assistant_model": model}}
    seconds = {name: float("inf") for name in modes}
    tokens = {}
    with _drafting(model, draft_tokens):
        # A first run is counted and not timed; it warms up as well.
        with _counted(full) as full_passes, _counted(model) as drafts:
            tokens["draft"] = full.generate(**inputs, **options, assistant_model=model)
        for _ in range(rounds):
            for name, mode_options in modes.items():
                start = time.perf_counter()
                tokens[name] = full.generate(**inputs, **options, **mode_options)
                if input_ids.is_cuda:
                    torch.cuda.synchronize(input_ids.device)
                # The fastest of some rounds: noise only ever adds time.
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return DraftReport(
        new_tokens=new_tokens,
        drafted=len(drafts),
        # Every full pass also generates one token itself.
        accepted=new_tokens - len(full_passes),
        passes=len(full_passes),
        plain_seconds=seconds["plain"],
        draft_seconds=seconds["draft"],
        identical=bool(torch.equal(tokens["plain"], tokens["draft"])),
    )


@contextmanager
def _drafting(model: Any, tokens: int | None) -> Iterator[None]:
    """Set the number of drafted tokens, and restore the generation config, which drafting changes, afterwards."""
    previous = copy.deepcopy(model.generation_config)
    if tokens is not None:
        # No draft ends early.
        fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
        model.generation_config.update(num_assistant_tokens=tokens, **fixed)
    try:
        yield
    finally:
        model.generation_config = previous


@contextmanager
def _counted(model: nn.Module) -> Iterator[list[None]]:
    """Context in which a list gets an entry for every forward pass of a model."""
    passes: list[None] = []
    handle = model.register_forward_hook(lambda *_: passes.append(None))
    try:
        yield passes
    finally:
        handle.remove()
