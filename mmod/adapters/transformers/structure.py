"""Which tokens of a language model's inputs are padding, which samples share a row, and whether attention is causal.

Every part of mmod that needs this reads it here, so that all parts see the same structure.
Axes: B samples, N tokens, L columns of an attention mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.adapters.transformers.cache_base import cache_of
from mmod.adapters.transformers.masks import first_column, valid_tokens
from mmod.blocks import Arguments
from mmod.ops.views import is_visible
from mmod.values import IGNORED


class Structure(NamedTuple):
    """The structure of a language model's inputs.

    Args:
        valid_BN: False at padding (B, N).
        segment_BN: Sample of each token, from 0, in rows that pack several samples (B, N); None where none does.
        causal: Attention is causal over the valid tokens.
        past: Number of cached tokens before.
    """

    valid_BN: Tensor
    segment_BN: Tensor | None
    causal: bool
    past: Tensor | int


def source_of(arguments: Arguments) -> Tensor:
    """Return the ids (B, N) or the embeddings (B, N, D) passed to a language model."""
    source: Tensor | None = arguments.get("input_ids")
    if source is None:
        source = arguments.get("inputs_embeds")
    if source is None:
        raise ValueError("pass input_ids or inputs_embeds")
    return source


def sees_both_ways(config: object) -> bool:
    """Return whether a config makes the attention of a language model bidirectional."""
    # Gemma 4 lets "vision" tokens alone see both ways, by its own mask.
    both_ways = getattr(config, "use_bidirectional_attention", False) in (True, "all")
    return both_ways or not getattr(config, "is_causal", True)


def uses_cache(arguments: Arguments, config: object) -> bool:
    """Return whether a language model fills a cache, one that it got or one of its own."""
    use_cache = arguments.get("use_cache")
    if use_cache is None:
        use_cache = getattr(config, "use_cache", False)
    return bool(use_cache) or cache_of(arguments) is not None


def read_structure(arguments: Arguments, source: Tensor, past: Tensor | int, config: Any) -> Structure:
    """Return the structure of inputs.

    Args:
        arguments: Arguments of a language model or of one of its layers, by name.
        source: Its ids (B, N) or tokens (B, N, D).
        past: Number of cached tokens.
        config: The config of the language model.
    """
    mask = arguments.get("attention_mask")
    if isinstance(mask, Mapping):
        mask = mask.get("full_attention", next(iter(mask.values())))
    valid_BN = valid_tokens(mask, source, past)
    tokens = source.shape[1]
    if tokens == 1:
        segment_BN = None
    elif isinstance(mask, Tensor) and mask.ndim == 4:
        segment_BN = _segments_of_mask(mask, valid_BN, past)
        if segment_BN is not None and mask.dtype == torch.bool and config._attn_implementation == "eager":
            raise ValueError(
                "eager attention adds a bool mask to its scores, which separates no samples: pass a float mask, 0 "
                "where a pair attends and torch.finfo(dtype).min elsewhere, or load with attn_implementation='sdpa'"
            )
    else:
        _check_zero_or_one(mask)
        segment_BN = _segments_of_positions(arguments, mask, config)
    _check_boundaries(arguments, segment_BN, source, config)
    # A window hides earlier tokens only where there are more than it holds.
    window = getattr(config, "sliding_window", None)
    is_causal = pads_only(mask) and not sees_both_ways(config) and (window is None or tokens <= window)
    return Structure(valid_BN, segment_BN, segment_BN is None and is_causal, past)


def read_prompt(labels_BN: Tensor, image_BN: Tensor, segment_BN: Tensor | None) -> Tensor:
    """Return which tokens are of a prompt (B, N): those before the first labelled one behind the sample's last image.

    Args:
        labels_BN: Ids to predict, -100 at tokens that the loss ignores (B, N).
        image_BN: True at image tokens (B, N).
        segment_BN: Sample of each token in rows that pack several (B, N).

    Example:
        >>> labels = torch.tensor([[7, -100, -100, -100, 5, -100]])
        >>> read_prompt(labels, torch.tensor([[False, True, True, False, False, False]]), None).tolist()
        [[True, True, True, True, False, False]]
    """
    samples, tokens = image_BN.shape
    position_BN = torch.arange(tokens, device=image_BN.device).expand(samples, -1)
    if segment_BN is None:
        sample_BN = torch.zeros_like(position_BN)
        count = 1
    else:
        sample_BN = segment_BN
        count = int(segment_BN.max()) + 1
    image_BN = position_BN.masked_fill(~image_BN, -1)
    last_BS = position_BN.new_full((samples, count), -1).scatter_reduce(1, sample_BN, image_BN, "amax")
    answers_BN = (labels_BN.to(position_BN.device) != IGNORED) & (position_BN > last_BS.gather(1, sample_BN))
    answer_BN = position_BN.masked_fill(~answers_BN, tokens)
    first_BS = position_BN.new_full((samples, count), tokens).scatter_reduce(1, sample_BN, answer_BN, "amin")
    return position_BN < first_BS.gather(1, sample_BN)


def pads_only(mask: object) -> bool:
    """Return whether a mask hides nothing but padding."""
    return mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)


def _segments_of_mask(mask: Tensor, valid_BN: Tensor, past: Tensor | int) -> Tensor | None:
    """Return the sample of each token, from a mask of pairs (1 or B, H, N, L): tokens that attention connects.

    A prefix or a tree connects all tokens of a row; a block-diagonal mask connects those of each block.
    """
    samples, tokens = valid_BN.shape
    device = valid_BN.device
    visible_BNL = is_visible(mask).any(dim=1)
    valid_BN = valid_BN.to(mask.device)
    new = past - first_column(mask.shape[-1], past + tokens) + torch.arange(tokens, device=mask.device)
    pairs_BNN = visible_BNL.index_select(2, new) & valid_BN.unsqueeze(1) & valid_BN.unsqueeze(2)
    if not isinstance(past, int) or past:
        # Tokens that see cached ones are connected by them.
        before_L = torch.arange(mask.shape[-1], device=mask.device) < new[0]
        continues_BN = (visible_BNL & before_L).any(dim=2)
        pairs_BNN = pairs_BNN | (continues_BN.unsqueeze(1) & continues_BN.unsqueeze(2))
    label_BN = _components(pairs_BNN)
    begins_BN = (label_BN == torch.arange(tokens, device=mask.device)) & valid_BN
    if bool((begins_BN.sum(dim=1) <= 1).all()):
        return None
    # Samples are numbered by their first tokens; padding in front of all counts to the first one.
    number_BN = (begins_BN.cumsum(dim=1) - 1).clamp(min=0)
    return number_BN.gather(1, label_BN).expand(samples, -1).to(device)


def _components(pairs_BNN: Tensor) -> Tensor:
    """Return the first token that each token is connected with (B, N), for pairs of query and key (B, N, N)."""
    samples, tokens, _ = pairs_BNN.shape
    index_N = torch.arange(tokens, device=pairs_BNN.device, dtype=torch.int32)
    pairs_BNN = pairs_BNN | (index_N.unsqueeze(1) == index_N)
    label_BN = index_N.expand(samples, -1)
    while True:
        first_BN = torch.where(pairs_BNN, label_BN.unsqueeze(1), tokens).amin(dim=2)
        first_BN = torch.where(pairs_BNN, first_BN.unsqueeze(2), tokens).amin(dim=1)
        # A token takes over what its first one has found, which halves the remaining way.
        first_BN = first_BN.gather(1, first_BN.long())
        if torch.equal(first_BN, label_BN):
            return label_BN.long()
        label_BN = first_BN


def _segments_of_positions(arguments: Arguments, mask: Tensor | None, config: Any) -> Tensor | None:
    """Return the sample of each token if positions show that rows are packed, as transformers reads them."""
    position_BN = arguments.get("position_ids")
    if cache_of(arguments) is not None or mask is not None or not isinstance(position_BN, Tensor):
        return None
    if position_BN.ndim != 2 or bool((position_BN.diff(dim=1) == 1).all()):
        return None
    if "flash" in config._attn_implementation:
        raise ValueError("flash attention needs the positions of packed samples, which routing removes: use sdpa")
    if uses_cache(arguments, config):
        # With a cache, transformers separates no samples. Positions that only leap forward may mean one long text.
        if bool((position_BN.diff(dim=1) <= 0).any()):
            raise ValueError(
                "position_ids restart, so rows are packed with several samples, which transformers separates only "
                "without a cache: pass use_cache=False, or a block-diagonal attention mask (B, 1, N, N)"
            )
        return None
    return F.pad((position_BN.diff(dim=1) != 1).cumsum(1), (1, 0))


def _check_zero_or_one(mask: object) -> None:
    """Refuse a mask (B, N) that numbers the samples of a row."""
    if isinstance(mask, Tensor) and mask.dtype != torch.bool and mask.numel() and int(mask.max()) > 1:
        raise ValueError(
            f"attention_mask has values up to {int(mask.max())}: transformers reads them all as 1, so packed samples "
            "would be one. Pass position_ids that restart with use_cache=False and no attention_mask, or a "
            "block-diagonal attention mask (B, 1, N, N)"
        )


def _check_boundaries(arguments: Arguments, segment_BN: Tensor | None, source: Tensor, config: Any) -> None:
    """Refuse boundaries of packed samples that only flash attention reads."""
    boundaries = arguments.get("cu_seq_lens_q")
    if boundaries is None or "flash" in config._attn_implementation:
        return
    token_T = torch.arange(source.shape[0] * source.shape[1], device=source.device)
    sample_BN = torch.bucketize(token_T, boundaries.to(source.device)[1:], right=True).view(source.shape[:2])
    if segment_BN is None:
        segment_BN = torch.zeros_like(sample_BN)
    else:
        segment_BN = segment_BN.to(source.device)
    if not torch.equal(sample_BN.diff(dim=1) != 0, segment_BN.diff(dim=1) != 0):
        raise ValueError(
            f"cu_seq_lens_q separates packed samples for flash attention only, and this model attends by "
            f"{config._attn_implementation!r}: pass position_ids that restart at each sample, with use_cache=False"
        )
