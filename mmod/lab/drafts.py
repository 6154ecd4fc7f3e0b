"""Self-speculative decoding: a routed language model drafts, and its full pass over all tokens verifies."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

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
        >>> import mmod, torch
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
