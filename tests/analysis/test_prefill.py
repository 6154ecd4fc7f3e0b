"""FLOPs of a prefill against torch's own counter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import mmod
from mmod.adapters.transformers.cache_base import cache_of
from mmod.analysis import Prompt, flops
from mmod.studies.isoflop import training_flops
from tests.kit.counting import flop_counter
from tests.kit.cover import in_turn
from tests.kit.vlm_zoo import IMAGE, PATCHES, make_joint, make_language, prompt

SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim")
FAMILIES = ("glm4v", "gemma4_unified", "exaone4_5", "granite_docling", "paddleocr_vl", "ovis2")
CONFIGS = {
    "linear": mmod.RoutingConfig(router=mmod.score("linear", init_std=0.2), capacity=(0.5, 0.25), blocks=(1, 2)),
    "frames": mmod.preset("videollm-mod", capacity=0.34, blocks=(0, 3)),
    "shared": mmod.RoutingConfig(router=mmod.score("linear", init_std=0.2, tied=True), blocks="all"),
    "random": mmod.RoutingConfig(router="random", capacity=0.5),
    "frozen": mmod.RoutingConfig(router="stride", capacity=0, blocks=(1, 2), context="all"),
    "parts": mmod.RoutingConfig(
        router="stride",
        capacity=(0.5, 0, 0.5, 0),
        blocks="all",
        operator=("attention", "attention", "mlp", "block"),
        context=("kept", "all", "kept", "kept"),
    ),
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "method"),
    [("llava", "linear"), ("llava", "parts"), *in_turn(["llava-qwen2", "llava-next", *FAMILIES], CONFIGS)],
)
def test_counts_equal_those_of_torch(name: str, method: str) -> None:
    model: Any = mmod.route_(make_joint(name, attention="eager"), language=CONFIGS[method])
    batch = prompt(name, (2,))
    images, tokens = int((batch["input_ids"] == IMAGE).sum()), batch["input_ids"].shape[1]
    report = flops(model, Prompt(tokens - images, [images // 2] * 2))
    with flop_counter() as counter:
        cache = cache_of(model(**batch, logits_to_keep=1))
    counts = counter.get_flop_counts()
    for row in report.blocks:
        counted = sum(counts[f"{type(model).__name__}.{row.name}"].values())
        assert row.routed == counted, row.name
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    # Windows have dropped tokens.
    assert report.cache_bytes == held or name in ("exaone4_5", "gemma4_unified")
    assert str(report).splitlines()[0].startswith(f"a prompt of {tokens} tokens, {images} of images")


# A router, so that attention keeps its kernel, and one that reads the attention of the tower's block before.
TOWER = {
    "linear": mmod.RoutingConfig(router=mmod.score("linear", init_std=0.2), capacity=0.5, blocks=(1,)),
    "attention": mmod.RoutingConfig(router={"name": "attention", "importance": "mean"}, capacity=0.5, blocks=(1,)),
}
WHOLE = ("llava-next", "qwen3-vl", "internvl", "smolvlm", "gemma3-vision", "qwen2.5-vl", "glm4v")
PARTS = {
    "dense": {},
    "language": {"language": CONFIGS["linear"]},
    "image": {"image": TOWER["linear"]},
    "both": {"image": TOWER["attention"], "language": CONFIGS["linear"]},
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "parts"),
    [("llava", "both"), ("qwen2-vl", "both"), *in_turn(WHOLE, PARTS)],
)
def test_with_pixels_the_whole_model_is_counted(name: str, parts: str) -> None:
    # In fp64, attention shares no probabilities with importance.
    model: Any = make_joint(name).double()
    if PARTS[parts]:
        mmod.route_(model, **PARTS[parts])
    batch = prompt(name, (2,))
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    images, tokens = int((batch["input_ids"] == IMAGE).sum()), batch["input_ids"].shape[1]
    report = flops(model, Prompt(tokens - images, [images // 2] * 2, pixels=batch))
    with flop_counter() as counter:
        model(**batch, logits_to_keep=1)
    assert report.routed == counter.get_total_flops()
    assert report.vision is not None
    assert 0 < report.vision.dense < report.dense
    assert (report.vision.share < 1) == ("image" in PARTS[parts])
    assert str(report).startswith(f"a prompt of {tokens} tokens, {images} of images: {report.share:.3f} of the FLOPs")
    assert f" {report.routed / 1e6:,.2f} |" in str(report).splitlines()[-1]
    # The blocks of the tower have rows of their own, once.
    assert len({row.name for row in report.blocks}) == len(report.blocks)
    assert report.blocks[: len(report.vision.blocks)] == report.vision.blocks


@torch.no_grad()
def test_kept_tokens_of_windows_count_as_attending_to_all_of_their_image() -> None:
    model: Any = mmod.route_(make_joint("qwen2.5-vl"), image=mmod.RoutingConfig(router="linear", blocks="all"))
    batch = prompt("qwen2.5-vl", (2,))
    words = batch["input_ids"].shape[1] - 2 * PATCHES
    report = flops(model, Prompt(words, [PATCHES] * 2, pixels=batch))
    with flop_counter() as counter:
        model(**batch, logits_to_keep=1)
    # Two images of four kept patches, of 16 channels, in the blocks with windows.
    most = 4 * 4**2 * 16 * 2 * len(model.model.visual.blocks)
    assert 0 < report.routed - counter.get_total_flops() < most


@torch.no_grad()
def test_towers_whose_cost_follows_from_pixels_take_the_kept_shares() -> None:
    model: Any = mmod.route_(make_joint("llava"), image="pixelprune", language=CONFIGS["linear"])
    batch = prompt("llava", (1,))
    batch["pixel_values"][:] = batch["pixel_values"][..., :4, :4].repeat(1, 1, 3, 3)
    words = Prompt(batch["input_ids"].shape[1] - PATCHES, PATCHES, pixels=batch)
    with pytest.raises(ValueError, match=r"model\.vision_tower\S+ .*follows from the data: pass kept="):
        flops(model, words)
    with mmod.trace(model) as decisions:
        model(**batch)
    report = flops(model, words, decisions)
    assert report.vision is not None
    assert report.vision.share < 0.5
    with flop_counter() as counter:
        model(**batch, logits_to_keep=1)
    assert report.routed == counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3_vl_moe", "reads the values of its tokens, and FLOPs are counted from shapes alone"),
        (
            "qwen3_5",
            r"layers\.2 has linear attention, which caches no keys: count a batch by mmod\.flops\(model, batch\)",
        ),
    ],
)
def test_layers_whose_cost_shapes_do_not_tell_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        flops(make_joint(name), Prompt(20, (9,)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral"])
def test_products_of_experts_are_counted_as_those_of_single_tokens(name: str, dtype: torch.dtype) -> None:
    sizes = dict.fromkeys(("num_local_experts", "num_experts"), 4) | dict.fromkeys(SIZES, 16) | {"vocab_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(dtype)
    mmod.route_(model, mmod.RoutingConfig(router="linear", blocks=(1,), language=mmod.LanguageRouting(tokens="all")))
    dense = mmod.unroute_(copy.deepcopy(model))
    batch = {"input_ids": torch.arange(9)[None]}
    counted = []
    for experts in ("grouped_mm", "batched_mm"):
        model.set_experts_implementation(experts)
        dense.set_experts_implementation(experts)
        counted.append((flops(model, Prompt(9)), flops(dense, batch).blocks, training_flops(model, 9)))
    assert counted[0] == counted[1]
    # Two experts a token, with three matrices each.
    assert counted[0][0].blocks[0].routed > 2 * 9 * 2 * 3 * 16 * 16


def test_attention_by_any_kernel_counts_the_same() -> None:
    model: Any = mmod.route_(make_language("llama"), mmod.RoutingConfig(router="linear"))
    expected = flops(model, Prompt(9))
    for kernel in ("eager", "flash_attention_2", "flex_attention"):
        # Without the check for a device that has it.
        model.config._attn_implementation_internal = kernel
        assert flops(model, Prompt(9)) == expected
        assert model.config._attn_implementation == kernel


def test_a_model_that_shapes_cannot_run_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict.fromkeys((*SIZES, "num_local_experts"), 16) | {"vocab_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "layer_types": ["full_attention"]}
    own_cache = transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**sizes, **heads)).eval()
    with pytest.raises(ValueError, match=r"MiniMaxForCausalLM cannot read .*DynamicCache.*; count a batch by"):
        flops(own_cache, Prompt(9))
    model: Any = make_language("llama")
    for error in (AssertionError, RuntimeError):

        def fail(*_: object, error: type[Exception] = error, **__: object) -> None:
            raise error("no kernel")

        monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", fail)
        with pytest.raises(
            ValueError, match=r"cannot read a prompt by shapes alone: no kernel; count a batch by mmod\."
        ):
            flops(model, Prompt(9))


@torch.no_grad()
@pytest.mark.parametrize("importance", ["mean", "last_token"])
def test_importance_is_counted_where_it_is_spent(importance: str) -> None:
    """Attention in fp64 shares no probabilities with importance; in fp32 on a CPU only the last token's are spent."""
    config = mmod.RoutingConfig(router={"name": "attention", "importance": importance}, blocks=(1, 3))
    model: Any = mmod.route_(make_joint("llava", attention="sdpa"), language=config)
    batch = prompt("llava", (2,))
    images, tokens = int((batch["input_ids"] == IMAGE).sum()), batch["input_ids"].shape[1]
    for saves in (importance == "mean", False):
        report = flops(model, Prompt(tokens - images, [images // 2] * 2))
        with flop_counter() as counter:
            model(**batch, logits_to_keep=1)
        counts = counter.get_flop_counts()
        for row in report.blocks:
            counted = sum(counts[f"{type(model).__name__}.{row.name}"].values())
            assert row.routed - saves * row.importance == counted, row.name
        assert [row.importance > 0 for row in report.blocks] == [True, False, True, False]
        model.double()
        batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


@torch.no_grad()
@pytest.mark.parametrize(
    "router",
    ["diversity", {"name": "redundancy", "channels": 8}],
    ids=lambda router: str(router),
)
def test_products_of_all_pairs_are_counted(router: Any) -> None:
    config = mmod.RoutingConfig(router=router, blocks=(1, 2))
    model: Any = mmod.route_(make_joint("llava", attention="eager"), language=config)
    batch = prompt("llava", (2,))
    images, tokens = int((batch["input_ids"] == IMAGE).sum()), batch["input_ids"].shape[1]
    report = flops(model, Prompt(tokens - images, [images // 2] * 2))
    with flop_counter() as counter:
        model(**batch, logits_to_keep=1)
    for row in report.blocks[1:3]:
        counted = sum(counter.get_flop_counts()[f"{type(model).__name__}.{row.name}"].values())
        assert row.routed == counted, row.name
    assert report.blocks[1].router == 2 * tokens**2 * (8 if isinstance(router, dict) else 32)
    assert flops(model, Prompt(tokens)).blocks[1].router == 0, "nothing may be skipped"


def test_cache_share_is_the_kept_share() -> None:
    model = mmod.route_(make_joint("llava"), language=CONFIGS["linear"])
    report = flops(model, Prompt(5, PATCHES))
    kept = [5 + PATCHES, 5 + int(PATCHES * 0.5), 5 + int(PATCHES * 0.25), 5 + PATCHES]
    assert report.cache_share == pytest.approx(sum(kept) / (4 * (5 + PATCHES)))
    assert report.dense == flops(mmod.unroute_(model), Prompt(5, PATCHES)).routed
    assert report.share < 1


@pytest.mark.parametrize("protected", [0, 4, 10])
def test_protected_text_is_counted_as_kept(protected: int) -> None:
    model = mmod.route_(
        make_joint("llava"),
        language=mmod.RoutingConfig(router="linear", blocks=(1,), language=mmod.LanguageRouting(tokens="all")),
    )
    report = flops(model, Prompt(10, PATCHES, protected_tokens=protected))
    assert report.blocks[1].kept == protected + (10 + PATCHES - protected) // 2
    with pytest.raises(ValueError, match="protected_tokens=11"):
        flops(model, Prompt(10, PATCHES, protected_tokens=11))


@torch.no_grad()
def test_routers_that_peft_trains_copies_of_are_counted_once() -> None:
    peft = pytest.importorskip("peft")
    model = mmod.route_(make_joint("llava"), language=mmod.RoutingConfig(router="linear", capacity=0.5))
    routers = [row.router for row in flops(model, Prompt(3, 8)).blocks]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["router"]))
    assert [row.router for row in flops(wrapped, Prompt(3, 8)).blocks] == routers
    assert sum(routers) > 0


def test_of_text_one_token_runs_at_the_least() -> None:
    model = mmod.route_(make_language("llama"), mmod.RoutingConfig(router="linear", blocks=(1,), capacity=0.01))
    with mmod.trace(model) as decisions:
        model(input_ids=torch.arange(10)[None])
    (routing,) = decisions.values()
    assert flops(model, Prompt(10)).blocks[1].kept == int(routing.keep_BN.sum()) == 1


def test_thresholds_need_the_kept_share() -> None:
    model = mmod.route_(make_language("llama"), mmod.RoutingConfig(router="linear", select="threshold"))
    with pytest.raises(ValueError, match="pass kept="):
        flops(model, Prompt(10))
    assert flops(model, Prompt(10), kept=0.5).blocks[1].kept == 5
    with pytest.raises(ValueError, match="at least one token"):
        flops(model, Prompt(0))
    for wrong in ({"text_tokens": -3}, {"text_tokens": 2.5}, {"image_tokens": [4, -1]}, {"protected_tokens": -1}):
        with pytest.raises((TypeError, ValueError), match=f"^{next(iter(wrong))} must be "):
            Prompt(**{"text_tokens": 10, **wrong})
    with mmod.trace(model) as decisions:
        model(input_ids=torch.arange(10)[None])
    shares = [int(routing.keep_BN.sum()) for routing in decisions.values()]
    counted = [row.kept for row in flops(model, Prompt(10), kept=decisions).blocks if row.name in decisions]
    assert counted == shares
    for kept in (3, "half"):
        with pytest.raises((TypeError, ValueError), match=r"^the kept share of \S+ must be "):
            flops(model, Prompt(10), kept)
    for fixed in (make_language("llama"), mmod.route_(make_language("llama"), mmod.RoutingConfig())):
        with pytest.raises(ValueError, match=r"^leave kept out: it is for models that decide by a threshold"):
            flops(fixed, Prompt(10), 0.07)
    with mmod.trace(fixed) as decisions:
        fixed(input_ids=torch.arange(10)[None])
    assert flops(fixed, Prompt(10), kept=decisions) == flops(fixed, Prompt(10))


def test_a_prompt_counts_no_vision_tower_and_says_so() -> None:
    model = mmod.route_(make_joint("llava"), image="pixelprune")
    assert "1.000 of the language model's FLOPs (2 per multiply-add; no vision tower" in str(flops(model, Prompt(9, 4)))
    with pytest.raises(ValueError, match=r"this LlamaForCausalLM has no vision tower: leave pixels out"):
        flops(make_language("llama"), Prompt(9, 4, pixels=prompt("llava", (1,))))
