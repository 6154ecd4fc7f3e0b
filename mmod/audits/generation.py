"""Decisions of a language model token by token, compared with the top-k that it was trained with, as a text grows.

Axes: B texts, N tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.analysis.statistics import Estimate, normal_mean
from mmod.analysis.tracing import trace
from mmod.io.tables import MarkdownTable, table_of
from mmod.methods.route import routed_blocks
from mmod.routing.groups import assign_groups, select_within

_TEXTS = ("written", "generated")


@dataclass(frozen=True)
class Stretch:
    """One window of texts, in means over texts and over the routed blocks.

    Args:
        text: "written" by others, or "generated" by the model behind the first window of those.
        loss: Cross entropy in nats a token, each decided alone.
        agreement: Share of tokens that are decided as the top-k of the window decides, by the scores of the same pass.
        above_chance: Cohen's kappa of both decisions: their agreement from 0 (chance) to 1.
    """

    text: str
    first: int
    last: int
    loss: Estimate
    kept: Estimate
    agreement: Estimate
    above_chance: Estimate


@dataclass(frozen=True)
class Generation:
    """Decisions of a language model in long texts, token by token.

    Args:
        window: Tokens of a window in training.
        by: What decides: "predictor" or "score".
        decay: For each kind of text the agreement in the last window less that in the first.
    """

    window: int
    texts: int
    by: str
    stretches: list[Stretch]
    decay: dict[str, Estimate]

    def table(self) -> MarkdownTable:
        """Return the stretches as a table."""
        columns = {
            "text": ("text", ""),
            "tokens": ("tokens", ""),
            "loss": ("nats a token", ".3f"),
            "kept": ("kept", ".3f"),
            "agreement": ("as the top-k", ".3f"),
            "above_chance": ("above chance", ".2f"),
        }
        rows = [{**vars(row), "tokens": f"{row.first} to {row.last}"} for row in self.stretches]
        caption = (
            f"The {self.by} decides token by token, beside the top-k of windows of {self.window}; {self.texts} texts."
        )
        return table_of(columns, rows, caption)

    def __str__(self) -> str:
        decay = "; ".join(f"{change:+.3f} in {text} text" for text, change in self.decay.items())
        return f"{self.table()}\n\nFrom the first window to the last the agreement changes by {decay}."


@torch.no_grad()
def evaluate_generation(model: Any, tokens_BN: Tensor, window: int, seed: int = 0) -> Generation:
    """Compare the decisions of generation, token by token, with the top-k of training: how often do they agree?

    Both are compared on given texts, and on what the model writes after the first window of each. The top-k is taken
    within each window, as in training. Its scores are those of a pass that decides as generation does.

    Args:
        model: A routed language model of transformers, in evaluation mode, with an `inference_threshold`.
        tokens_BN: Texts; N is a multiple of `window`, twice or more.
        window: Tokens of a window in training.
        seed: Seed of the generated tokens.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import mmod
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=20, eos_token_id=None)).eval()
        >>> model = mmod.route_(model, mmod.RoutingConfig(router="linear", language={"inference_threshold": 0.5}))
        >>> result = evaluate_generation(model, torch.arange(40).view(2, 20) % 20, window=10)
        >>> [(stretch.text, stretch.first, stretch.last) for stretch in result.stretches]
        [('written', 0, 9), ('written', 10, 19), ('generated', 0, 9), ('generated', 10, 19)]
    """
    routers = [block.router for block in routed_blocks(model).values()]
    configs = [router.config for router in routers]
    if any(config.select != "topk" or config.language.inference_threshold is None for config in configs):
        raise ValueError(
            "agreement over a generation needs a model that takes the top-k in training and decides each token alone "
            "in generation: route it with language={'inference_threshold': 0.5}"
        )
    length = tokens_BN.shape[1]
    if window < 1 or length % window or length < 2 * window:
        raise ValueError(f"texts must be two windows of {window} tokens long or more, in whole windows, got {length}")
    prompt_BN = tokens_BN[:, :window]
    devices = [tokens_BN.device] if tokens_BN.is_cuda else []
    # The draws are the audit's own, and leave those of the program as they were.
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        # From the full distribution at temperature 1: text that is likely to the model itself.
        new = {"max_new_tokens": length - window, "min_new_tokens": length - window, "do_sample": True, "top_k": 0}
        mask = torch.ones_like(prompt_BN)
        generated_BN = model.generate(input_ids=prompt_BN, attention_mask=mask, pad_token_id=0, **new)
    stretches = []
    decay = {}
    for text, text_BN in zip(_TEXTS, (tokens_BN, generated_BN)):
        figures = _figures(model, text_BN, window)
        for number in range(length // window):
            means = {name: normal_mean(value_BW[:, number]) for name, value_BW in figures.items()}
            stretches.append(Stretch(text, number * window, (number + 1) * window - 1, **means))
        agreement_BW = figures["agreement"]
        decay[text] = normal_mean(agreement_BW[:, -1] - agreement_BW[:, 0])
    by = "score" if routers[0].predictor is None else "predictor"
    return Generation(window, len(tokens_BN), by, stretches, decay)


def _figures(model: nn.Module, tokens_BN: Tensor, window: int) -> dict[str, Tensor]:
    """Return the figures of each text and window, see `Stretch` (B, W) each."""
    with trace(model) as routings:
        logits = model(input_ids=tokens_BN, use_cache=False).logits[:, :-1].float()
    loss_BN = F.cross_entropy(logits.movedim(-1, 1), tokens_BN[:, 1:], reduction="none")
    # The first token of a text is foretold by nothing.
    loss_BN = F.pad(loss_BN, (1, 0), value=torch.nan)
    all_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
    groups = assign_groups(all_BN, all_BN, all_BN, frames=window)
    blocks = []
    for name, block in routed_blocks(model).items():
        routing = routings[name]
        # The top-k of training, applied to the scores of the pass that decides token by token.
        best = select_within(routing.score_BN, block.router.capacity, groups)
        best_BWL = best.among(tokens_BN.shape[1]).unflatten(1, (-1, window)).double()
        keep_BWL = routing.keep_BN.unflatten(1, (-1, window)).double()
        # Agreement by chance: both keep a token, or neither does, where they decide independently at their rates.
        kept_BW = keep_BWL.mean(2)
        best_BW = best_BWL.mean(2)
        agreement_BW = (keep_BWL == best_BWL).double().mean(2)
        chance_BW = kept_BW * best_BW + (1 - kept_BW) * (1 - best_BW)
        # A share of what chance leaves to be agreed on.
        blocks.append(torch.stack([kept_BW, agreement_BW, (agreement_BW - chance_BW) / (1 - chance_BW)]))
    kept_BW, agreement_BW, above_BW = torch.stack(blocks).mean(0)
    loss_BW = loss_BN.unflatten(1, (-1, window)).nanmean(2)
    return {"loss": loss_BW, "kept": kept_BW, "agreement": agreement_BW, "above_chance": above_BW}
