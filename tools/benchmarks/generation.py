"""Benchmark of prefill and decoding: a routed vision-language model beside the dense one.

Axes: B prompts, N tokens, P image tokens, D channels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from mmod.analysis.counting import needed_shares
from mmod.analysis.flop_count import flops
from mmod.analysis.prefill import Prompt
from mmod.analysis.timing import Spread, interleave, ratios
from mmod.analysis.tracing import trace
from mmod.config import PRESETS, RoutingConfig
from mmod.io.tables import Column
from mmod.lab.thresholds import threshold_between
from mmod.methods.route import routed_blocks
from mmod.model import route_
from mmod.planning import preset
from mmod.routing import Routing, TokenGroups
from mmod.values import check_distinct
from tools.benchmarks.checks import WrongOutputError, check_close, ungated
from tools.benchmarks.report import HIDDEN, Row, Runs, TimedOptions

TOLERANCE = 1e-4
# Two small words, so that no id of a word is that of the image token.
_SPECIAL = 3


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(TimedOptions):
    """A LLaVA of random weights, dense and routed by each preset, interleaved.

    The language model is a Llama with heads of 64 channels. Its prefill takes `input_ids` and precomputed image
    features and returns the logits of the last token; no vision tower runs.

    Args:
        presets: Names of `mmod.preset`. Thresholds are set so that the capacity is kept.
        image_tokens: Image tokens of a prompt.
        text_tokens: Text tokens of a prompt, before and behind the image.
        batch_sizes: Prompts per call.
        hidden: Channels of a token, a multiple of 64.
        intermediate: Channels of the MLP; None means 11/4 of `hidden`.
        layers: Decoder layers.
        vocabulary: Tokens the model knows.
        attention: transformers' attention implementation.
        train: Time a training step on the same prompts, too.
        dtype: Type of weights and features. Outputs are checked in float32.
    """

    presets: list[str] = field(default_factory=lambda: ["p-mod", "gamma-mod", "a-mod"])
    image_tokens: Annotated[list[int], "[1, inf)"] = field(default_factory=lambda: [576, 2880])
    text_tokens: Annotated[int, "[1, inf)"] = 48
    batch_sizes: Annotated[list[int], "[1, inf)"] = field(default_factory=lambda: [1, 4])
    hidden: int = 256
    intermediate: int | None = None
    layers: int = 8
    vocabulary: int = 1000
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    train: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    out: str = "runs/benchmark_generation"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_distinct(self, "presets", "image_tokens", "batch_sizes")
        for name in self.presets:
            PRESETS.check(name)
        if self.hidden < 64 or self.hidden % 64:
            raise ValueError(f"hidden must be a multiple of 64, the channels of a head, got {self.hidden}")

    def runs(self) -> Runs:
        """Return a run for every number of image tokens and batch size."""
        calls: dict[str, Callable[[], list[Row]]] = {}
        for tokens, batch in itertools.product(self.image_tokens, self.batch_sizes):
            calls[f"{tokens} image tokens, batch {batch}"] = functools.partial(_run, self, tokens, batch)
        title = f"LLaVA, {self.layers} layers of width {self.hidden}, {self.attention}, {self.dtype}"
        return Runs(title, COLUMNS, calls)


COLUMNS: dict[str, Column] = {
    "image_tokens": ("image tokens", ""),
    "batch_size": ("batch", ""),
    "preset": ("preset", ""),
    "dense_ms": ("dense prefill ms", ".1f"),
    "routed_ms": ("prefill ms", ".1f"),
    "speedup": ("speed-up", "[.3f"),
    "flop_speedup": ("FLOP speed-up", ".3f"),
    "of_flops": ("speed-up / FLOP speed-up", ".3f"),
    "slots": ("cached per layer", ".1f"),
    "cache_share": ("cache share", ".4f"),
    "dense_rate": ("dense tokens/s", ".1f"),
    "rate": ("tokens/s", ".1f"),
    "decode": ("decoding / dense speed", "[.3f"),
    "train": ("training speed-up", "[.3f"),
    "train_of_flops": ("training speed-up / FLOP speed-up", ".3f"),
    **dict.fromkeys(("rounds", "dense_step_ms", "step_ms", "train_flop_speedup"), HIDDEN),
}
"""Columns of one routed model in one run. Ratios are taken round by round.

Decoding is compared with the dense model at as many cached tokens. In training other tokens may be kept, so that its
FLOPs differ."""


class GenerationModels:
    """A dense model, None by name, and routed ones of the same weights with one batch of prompts."""

    def __init__(self, config: GenerationConfig, image_tokens: int, batch_size: int) -> None:
        self.config = config
        self.image_tokens = image_tokens
        self.samples = batch_size
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
            vocab_size=config.vocabulary + 1,
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            intermediate_size=config.intermediate or config.hidden * 11 // 4,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            max_position_embeddings=2 * self.ids_BN.shape[1],
        )
        vision = CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        )
        llava = LlavaConfig(text_config=text, vision_config=vision, image_token_index=self.image_id)
        llava._attn_implementation = config.attention
        torch.manual_seed(config.seed)
        with torch.device(config.device):
            return LlavaForConditionalGeneration(llava).eval()

    def _route(self, model: nn.Module, routing: RoutingConfig) -> nn.Module:
        """Route a model; thresholds are set on the prompts, layer by layer."""
        route_(model, language=routing)
        for name, block in routed_blocks(model).items():
            router = block.router
            if routing.select == "topk" and routing.language.inference_threshold is None:
                continue
            # With the thresholds of the layers before, whose decisions change the scores of this one.
            with trace(model) as decisions, torch.no_grad():
                self._call(model)
            groups = decisions[name].tokens
            assert isinstance(groups, TokenGroups)
            level = torch.sigmoid(decisions[name].score_BN)[groups.free_BN]
            threshold = threshold_between(level, int(len(level) * router.capacity))
            if routing.select == "topk":
                router.config = router.config.replace(language={"inference_threshold": threshold})
            else:
                router.config = router.config.replace(select={"threshold": threshold})
        return model

    def _call(self, model: Any, more_BN: Tensor | None = None, use_cache: bool = True) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        ids_BN = self.ids_BN if more_BN is None else torch.cat([self.ids_BN, more_BN], dim=1)
        outputs = {"image": BaseModelOutputWithPooling(pooler_output=list(self.features_BPD))}  # type: ignore[arg-type]
        return model(input_ids=ids_BN, mm_encoder_outputs=outputs, use_cache=use_cache, logits_to_keep=1)

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
        """Return the FLOPs of the dense model's training step over those of a routed one."""
        model = self.models[name]
        with trace(model.train()) as decisions:
            self._call(model, use_cache=False)
        model.eval()
        return self._flop_speedup(model, decisions)

    def decoder(self, name: str, dense: bool) -> Callable[[], Any]:
        """Return a function that decodes a token of every prompt after a routed model's prefill.

        `dense` decodes with the dense model, whose cache is filled to the same mean length.
        """
        from mmod.adapters.transformers.cache_base import CACHE, cache_of

        model = self.models[name]
        cache = cache_of(self.prefill(name))
        if dense:
            # Which words fill the cache has no influence on time, so they are one word repeated.
            length = round(sum(layer.keys.shape[2] for layer in cache.layers) / len(cache.layers))
            model = self.models[None]
            words_BN = self.words_B1.expand(-1, length)
            cache = cache_of(model(input_ids=words_BN, use_cache=True, logits_to_keep=1))
        return lambda: model(input_ids=self.words_B1, **{CACHE: cache}, use_cache=True, logits_to_keep=1)

    def cached(self, name: str) -> dict[str, float]:
        """Return the columns of a routed model's prefill that need no time: its cache, and its FLOPs."""
        from mmod.adapters.transformers.cache_base import cache_of

        with trace(self.models[name]) as decisions:
            cache = cache_of(self.prefill(name))
        tokens = self.ids_BN.shape[1]
        layers = self.config.layers
        slots = [tokens] * layers
        for block, routing in decisions.items():
            slots[int(block.rpartition(".")[2])] = routing.kept.index_BK.shape[1]
        routed = _bytes(cache)
        dense = _bytes(cache_of(self.prefill(None)))
        if routed * tokens * layers != dense * sum(slots):
            raise WrongOutputError(f"{name} caches {routed} bytes, {sum(slots)} of {tokens * layers} slots of {dense}")
        share = routed / dense
        flop_speedup = self._flop_speedup(self.models[name], decisions)
        return {"slots": sum(slots) / layers, "cache_share": share, "flop_speedup": flop_speedup}

    def _flop_speedup(self, model: nn.Module, decisions: Mapping[str, Routing]) -> float:
        kept = {block: _share(routing) for block, routing in decisions.items()}
        prompt = Prompt(self.config.text_tokens, self.image_tokens)
        return 1 / flops(model, prompt, needed_shares(model, kept)).share

    @torch.no_grad()
    def check(self) -> None:
        """Check every routed model; before `to`."""
        from mmod.adapters.transformers.cache_base import CACHE, cache_of

        dense = self._call(self.models[None]).logits
        for name in self.config.presets:
            plain = preset_config(name, self.config.layers)
            language = {"inference_threshold": None, "positions": "original", "gate_on": "update"}
            everything = ungated(plain, capacity=1.0, losses={}, language=language)
            full = route_(self._make(), language=everything)
            what = f"{name} at capacity 1 and gate 1 against dense"
            check_close(what, self._call(full).logits, dense, TOLERANCE)
            if self.config.train:
                pairs = zip(self._gradients(full), self._gradients(self.models[None]), strict=True)
                for gradient, expected in pairs:
                    check_close(f"gradients of {what}", gradient, expected, TOLERANCE)
            model = self.models[name]
            if plain.router.name == "attention":
                # Importance counts the attention of the word, too; the cache is the same whatever chooses.
                model = route_(self._make(), language=plain.replace(router="stride"))
            cache = cache_of(self._call(model))
            step = model(input_ids=self.words_B1, **{CACHE: cache}, use_cache=True).logits
            once = self._call(model, self.words_B1, use_cache=False).logits
            check_close(f"{name}, prefill and decoding against one pass", step, once, TOLERANCE)

    @torch.enable_grad()
    def _gradients(self, model: nn.Module) -> list[Tensor]:
        parameters = []
        for name, parameter in model.named_parameters():
            if ".language_model.layers." in name and ".router." not in name:
                parameters.append(parameter)
        loss = self._call(model, use_cache=False).logits.square().mean()
        return list(torch.autograd.grad(loss, parameters))

    def to(self, dtype: torch.dtype) -> None:
        """Change the type of weights and features."""
        self.features_BPD = self.features_BPD.to(dtype)
        for model in self.models.values():
            model.to(dtype)


def preset_config(name: str, layers: int) -> RoutingConfig:
    """Return a preset for a model of some depth that skips image tokens only."""
    return preset(name, depth=layers, language={"tokens": "image"})


def _share(routing: Routing) -> float:
    groups = routing.tokens
    assert isinstance(groups, TokenGroups)
    free_BN = groups.free_BN
    return float((routing.keep_BN & free_BN).sum() / free_BN.sum())


def _bytes(cache: Any) -> int:
    return sum(int(layer.keys.nbytes) + int(layer.values.nbytes) for layer in cache.layers)


@torch.no_grad()
def _run(config: GenerationConfig, image_tokens: int, batch_size: int) -> list[Row]:
    models = GenerationModels(config, image_tokens, batch_size)
    models.check()
    models.to(getattr(torch, config.dtype))
    time = functools.partial(
        interleave, seconds=config.seconds, rounds=config.rounds, device=torch.device(config.device), seed=config.seed
    )
    prefill = time({name: functools.partial(models.prefill, name) for name in (None, *config.presets)})
    train = time({name: functools.partial(models.train_step, name) for name in prefill}) if config.train else None
    rows = []
    for name in config.presets:
        cached = models.cached(name)
        # A step takes a fraction of a prefill, so that many more of them fit into the same time.
        steps = time({"dense": models.decoder(name, dense=True), "routed": models.decoder(name, dense=False)})
        speedup = ratios(prefill[None], prefill[name])
        dense_step = Spread.of(steps["dense"])
        step = Spread.of(steps["routed"])
        row = {
            "preset": name,
            "image_tokens": image_tokens,
            "batch_size": batch_size,
            "rounds": len(prefill[name]),
            "dense_ms": Spread.of(prefill[None]),
            "routed_ms": Spread.of(prefill[name]),
            "speedup": speedup,
            **cached,
            "of_flops": speedup.median / cached["flop_speedup"],
            "dense_step_ms": dense_step,
            "step_ms": step,
            "dense_rate": 1e3 * batch_size / dense_step.median,
            "rate": 1e3 * batch_size / step.median,
            "decode": ratios(steps["dense"], steps["routed"]),
        }
        if train is not None:
            faster = ratios(train[None], train[name])
            fewer = models.train_flop_speedup(name)
            row |= {"train": faster, "train_flop_speedup": fewer, "train_of_flops": faster.median / fewer}
        rows.append(row)
    return rows
