"""The models that a benchmark of generation times, their prompts, and the checks they must pass first.

Axes: B prompts, N tokens, P image tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmod.analysis.calibrate import between
from mmod.analysis.prefill import prefill_flops
from mmod.analysis.trace import trace
from mmod.benchmarks.generation.config import GenerationConfig
from mmod.benchmarks.oracle import WrongOutputError, check_close
from mmod.config import RoutingConfig
from mmod.model import route_, routed_blocks
from mmod.planning import preset

TOLERANCE = 1e-4
# Two small words, so that no id of a word is that of the image token.
_SPECIAL = 3


class Cached(NamedTuple):
    """Cost of a routed prefill and size of its cache.

    Args:
        slots: Tokens cached by a layer of the longest prompt, mean over layers.
        share: Bytes cached over those of the dense model.
        flop_speedup: FLOPs of the dense prefill over those of the routed one.
    """

    slots: float
    share: float
    flop_speedup: float


class GenerationModels:
    """A dense model, None by name, and routed ones of the same weights with one batch of prompts.

    Args:
        config: What to time.
        image_tokens: Image tokens of a prompt.
        batch_size: Prompts.
    """

    def __init__(self, config: GenerationConfig, image_tokens: int, batch_size: int) -> None:
        self.config, self.image_tokens, self.samples = config, image_tokens, batch_size
        self.image_id = config.vocabulary
        generator = torch.Generator().manual_seed(config.seed + 1)
        tokens = config.text_tokens + image_tokens
        ids_BN = torch.randint(_SPECIAL, self.image_id, (batch_size, tokens), generator=generator)
        # Most text follows the image, as a question does.
        before = config.text_tokens // 4
        ids_BN[:, before : before + image_tokens] = self.image_id
        self.ids_BN = ids_BN.to(config.device)
        self.words_B1 = torch.randint(_SPECIAL, self.image_id, (batch_size, 1), generator=generator).to(config.device)
        features = torch.randn(batch_size, image_tokens, config.hidden, generator=generator)
        self.features_BPD = (0.02 * features).to(config.device)
        self.models: dict[str | None, Any] = {None: self._make()}
        for name in config.presets:
            self.models[name] = self._route(self._make(), preset_config(name, config.layers))

    def _make(self) -> Any:
        from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

        config = self.config
        heads = config.hidden // 64
        text = LlamaConfig(
            vocab_size=config.vocabulary + 1, hidden_size=config.hidden, num_hidden_layers=config.layers,
            intermediate_size=config.intermediate or config.hidden * 11 // 4, num_attention_heads=heads,
            num_key_value_heads=heads, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            max_position_embeddings=2 * self.ids_BN.shape[1],
        )  # fmt: skip
        vision = CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        )
        whole = LlavaConfig(text_config=text, vision_config=vision, image_token_index=self.image_id)
        whole._attn_implementation = config.attention
        torch.manual_seed(config.seed)
        with torch.device(config.device):
            return LlavaForConditionalGeneration(whole).eval()

    def _route(self, model: nn.Module, routing: RoutingConfig) -> nn.Module:
        """Route a model; thresholds are set on the prompts, layer by layer."""
        route_(model, language=routing)
        for name, block in routed_blocks(model).items():
            router = block.router
            if routing.select == "topk" and routing.language.inference_threshold is None:
                continue
            with trace(model) as decisions, torch.no_grad():
                self._call(model)
            groups = decisions[name].groups
            assert groups is not None
            level = torch.sigmoid(decisions[name].score_BN)[groups.free_BN]
            threshold = between(level, int(len(level) * router.capacity))
            if routing.select == "topk":
                router.config = router.config.replace(language={"inference_threshold": threshold})
            else:
                router.config = router.config.replace(select={"threshold": threshold})
        return model

    def _call(self, model: Any, more_BN: Tensor | None = None, use_cache: bool = True) -> Any:
        ids_BN = self.ids_BN if more_BN is None else torch.cat([self.ids_BN, more_BN], dim=1)
        features = SimpleNamespace(pooler_output=list(self.features_BPD))
        return model(
            input_ids=ids_BN, mm_encoder_outputs={"image": features}, use_cache=use_cache, logits_to_keep=1
        )  # fmt: skip

    def prefill(self, name: str | None) -> Any:
        """Read the prompts with one of the models, into an empty cache."""
        return self._call(self.models[name])

    @torch.enable_grad()
    def train_step(self, name: str | None) -> None:
        """Go forward and backward with one of the models, from the loss of the last token."""
        model = self.models[name].train()
        logits = self._call(model, use_cache=False).logits
        logits.float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        model.eval()

    def train_flop_speedup(self, name: str) -> float:
        """Return the FLOPs of the dense model's training step over those of a routed one, which may keep others."""
        model = self.models[name]
        with trace(model.train()) as decisions:
            self._call(model, use_cache=False)
        model.eval()
        return self._flop_speedup(model, decisions)

    def decoder(self, name: str, dense: bool) -> Callable[[], Any]:
        """Return what decodes a token of every prompt whenever it is called.

        Args:
            name: The routed model whose cache length counts.
            dense: Decode with the dense model, whose cache is filled to the same mean length.
        """
        model, cache = self.models[name], self.prefill(name).past_key_values
        if dense:
            length = round(sum(layer.keys.shape[2] for layer in cache.layers) / len(cache.layers))
            model = self.models[None]
            words_BN = self.words_B1.expand(-1, length)
            cache = model(input_ids=words_BN, use_cache=True, logits_to_keep=1).past_key_values
        return lambda: model(input_ids=self.words_B1, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def cached(self, name: str) -> Cached:
        """Return what a routed model's prefill costs and caches.

        Raises:
            WrongOutputError: The cache holds other bytes than its slots' share of the dense one's.
        """
        with trace(self.models[name]) as decisions:
            cache = self.prefill(name).past_key_values
        tokens, layers = self.ids_BN.shape[1], self.config.layers
        slots = [tokens] * layers
        for block, routing in decisions.items():
            slots[int(block.rpartition(".")[2])] = routing.index_BK.shape[1]
        held, whole = _bytes(cache), _bytes(self.prefill(None).past_key_values)
        if held * tokens * layers != whole * sum(slots):
            raise WrongOutputError(f"{name} caches {held} bytes, {sum(slots)} of {tokens * layers} slots of {whole}")
        return Cached(sum(slots) / layers, held / whole, self._flop_speedup(self.models[name], decisions))

    def _flop_speedup(self, model: nn.Module, decisions: Mapping[str, Any]) -> float:
        kept = {block: _share(routing) for block, routing in decisions.items()}
        report = prefill_flops(model, self.config.text_tokens, self.image_tokens, kept)
        return report.dense / report.routed

    @torch.no_grad()
    def check(self) -> None:
        """Check every routed model; before `to`.

        Raises:
            WrongOutputError: At capacity 1 and gate 1 one differs from the dense model, or prefill and decoding
                differ from one pass over prompt and word.
        """
        dense = self._call(self.models[None]).logits
        for name in self.config.presets:
            plain = preset_config(name, self.config.layers)
            language = {"inference_threshold": None, "positions": "original", "gate_on": "update"}
            everything = plain.replace(gate="identity", select="topk", capacity=1.0, losses={}, language=language)
            whole = route_(self._make(), language=everything)
            what = f"{name} at capacity 1 and gate 1 against dense"
            check_close(what, self._call(whole).logits, dense, TOLERANCE)
            if self.config.train:
                pairs = zip(self._gradients(whole), self._gradients(self.models[None]), strict=True)
                for own, expected in pairs:
                    check_close(f"gradients of {what}", own, expected, TOLERANCE)
            model = self.models[name]
            if plain.router.name == "attention":
                # Importance counts the attention of the word, too; the cache is the same whatever chooses.
                model = route_(self._make(), language=plain.replace(router="stride"))
            cache = self._call(model).past_key_values
            step = model(input_ids=self.words_B1, past_key_values=cache, use_cache=True).logits
            once = self._call(model, self.words_B1, use_cache=False).logits
            check_close(f"{name}, prefill and decoding against one pass", step, once, TOLERANCE)

    @torch.enable_grad()
    def _gradients(self, model: nn.Module) -> list[Tensor]:
        """Return the gradients of the layers' own parameters."""
        named = [(n, p) for n, p in model.named_parameters() if ".language_model.layers." in n and ".router." not in n]
        loss = self._call(model, use_cache=False).logits.square().mean()
        return list(torch.autograd.grad(loss, [parameter for _, parameter in named]))

    def to(self, dtype: torch.dtype) -> None:
        """Change the type of weights and features."""
        self.features_BPD = self.features_BPD.to(dtype)
        for model in self.models.values():
            model.to(dtype)


def preset_config(name: str, layers: int) -> RoutingConfig:
    """Return a preset for a model of some depth that skips image tokens, whatever else it could skip."""
    return preset(name, depth=layers, language={"tokens": "image"})


def _share(routing: Any) -> float:
    free_BN = routing.groups.free_BN
    return float((routing.keep_BN & free_BN).sum() / free_BN.sum())


def _bytes(cache: Any) -> int:
    return sum(each.numel() * each.element_size() for layer in cache.layers for each in (layer.keys, layer.values))
