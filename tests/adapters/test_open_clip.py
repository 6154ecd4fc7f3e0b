"""Routed towers of every open_clip architecture: exact where they must be, and independent of batch and padding."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from open_clip.transformer import CustomResidualAttentionBlock
from torch import Tensor, nn

import mmod
from mmod import RoutingConfig
from mmod.blocks import RoutedBlock, host_class
from tests.kit.clip_zoo import CONTEXT, TEXT_ONLY, embed, make_captions, make_clip, make_images
from tests.kit.interrupts import Interrupt

# The dense tower's embedding does not depend on what follows the end of a caption.
CAUSAL = ("ViT-B-32", "ViT-H-14-worldwide", "EVA02-B-16", "vit_medium_patch16_gap_256", "custom-blocks")
COCA = ("coca_ViT-B-32", "coca_base")
ROUTED = [
    RoutingConfig(router="attention", capacity=0.5),
    RoutingConfig(router=mmod.score("linear", init_std=0.5), capacity=0.3),
    RoutingConfig(router="attention", select=mmod.Threshold(1.0)),
    RoutingConfig(router="norm", capacity=0.5, context="all"),
]


def ids(value: RoutingConfig | str) -> str:
    return value if isinstance(value, str) else f"{value.router.name}-{value.select}-{value.context}"


def outputs(model: nn.Module, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return embed(model, images, captions)


@pytest.mark.parametrize("name", COCA)
def test_captions_of_a_decoder_equal_dense(name: str) -> None:
    model, images, captions = make_clip(name), make_images(name), make_captions(name)
    with torch.no_grad():
        dense = model(images, captions)["logits"]
        routed = mmod.route_(model, RoutingConfig(capacity=1.0))(images, captions)["logits"]
    # What a decoder says after the end of a caption is never read.
    valid = captions[:, 1:] != 0
    torch.testing.assert_close(routed[valid], dense[valid], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("router", ["linear", "attention"])
@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-16-SigLIP", "coca_ViT-B-32"])
@torch.no_grad()
def test_a_text_tower_may_be_interrupted_between_any_modules(name: str, router: str) -> None:
    model = mmod.route_(make_clip(name), text=RoutingConfig(router=router, capacity=0.5, blocks=(2, 3)))
    captions, others = make_captions(name), make_captions(name, seed=1)
    expected = model.encode_text(captions)
    with Interrupt() as counted:
        model.encode_text(captions)
    for at in range(1, counted.places + 1, 7):
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            model.encode_text(others)
        assert torch.equal(model.encode_text(captions), expected), at


@pytest.mark.parametrize("config", ROUTED, ids=ids)
@pytest.mark.parametrize("name", CAUSAL)
def test_embeddings_do_not_depend_on_padding(name: str, config: RoutingConfig) -> None:
    model, captions = mmod.route_(make_clip(name), text=config), make_captions(name)
    other = captions.clone()
    for row, length in zip(other, (3, 7)):
        row[length:] = torch.arange(10, 10 + CONTEXT - length)
    with torch.no_grad():
        actual, expected = model.encode_text(other, normalize=True), model.encode_text(captions, normalize=True)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", [*CAUSAL, *COCA])
def test_start_and_end_run_and_padding_does_not(name: str) -> None:
    model, captions = make_clip(name), make_captions(name)
    mmod.route_(model, text=RoutingConfig(router="random", capacity=0.5))
    with torch.no_grad(), mmod.trace(model) as traced:
        model.encode_text(captions)
    for routing in traced.values():
        for kept, length in zip(routing.keep_BN, (3, 7, CONTEXT)):
            pooled = CONTEXT if name in COCA else length - 1
            assert kept[0]
            assert kept[pooled]
            # Published CoCa weights let the class token see one place behind a caption.
            behind = kept[length + 1 : pooled] if name in COCA else kept[length:]
            assert not behind.any()
            if name not in COCA:
                assert kept.sum() == max(2, length // 2)


def pairs_of(block: nn.Module, attn_mask: Tensor | None, sample: int, queries: Tensor, keys: Tensor) -> dict[str, Any]:
    if attn_mask is None:
        return {}
    if attn_mask.ndim == 3:
        heads = block.attn.num_heads
        return {"attn_mask": attn_mask[sample * heads : (sample + 1) * heads][:, queries][:, :, keys]}
    return {"attn_mask": attn_mask[queries][:, keys]}


@pytest.mark.parametrize("config", ROUTED[:3], ids=ids)
@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-L-14-CLIPA", "coca_ViT-B-32", "custom-blocks"])
def test_kept_tokens_are_computed_as_if_they_were_alone(name: str, config: RoutingConfig) -> None:
    model, images, captions = mmod.route_(make_clip(name), config), make_images(name), make_captions(name)
    recorded: dict[str, tuple[Tensor, Tensor | None, Tensor]] = {}

    def remember(block_name: str) -> Any:
        return lambda _, args, kwargs, out: recorded.update({block_name: (args[0], kwargs.get("attn_mask"), out)})

    for block_name, block in mmod.routed_blocks(model).items():
        block.register_forward_hook(remember(block_name), with_kwargs=True)
    with torch.no_grad(), mmod.trace(model) as traced:
        embed(model, images, captions)
        for block_name, routing in traced.items():
            block = model.get_submodule(block_name)
            x_BND, mask, y_BND = recorded[block_name]
            for sample, keep in enumerate(routing.keep_BN):
                kept = keep.nonzero().squeeze(1)
                alone = x_BND[sample : sample + 1, kept]
                expected = host_class(block).forward(block, alone, **pairs_of(block, mask, sample, kept, kept))[0]
                if routing.gate_BK is not None:
                    gate = torch.zeros(len(keep)).scatter(0, routing.kept.index_BK[sample], routing.gate_BK[sample])[
                        kept
                    ]
                    expected = torch.lerp(alone[0], expected, gate.unsqueeze(1))
                torch.testing.assert_close(y_BND[sample, kept], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-L-14-CLIPA", "coca_ViT-B-32", "custom-blocks"])
def test_importance_is_the_mean_of_the_map(name: str) -> None:
    model = mmod.route_(
        make_clip(name), RoutingConfig(capacity=0.5, blocks=(1,), router={"name": "attention", "importance": "mean"})
    )
    maps: dict[str, Tensor] = {}

    def remember(block_name: str) -> Any:
        def hook(block: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], _: object) -> None:
            x, mask = block.ln_1(args[0]), kwargs.get("attn_mask")
            q, k = torch.nn.functional.linear(x, block.attn.in_proj_weight, block.attn.in_proj_bias).chunk(3, -1)[:2]
            heads = block.attn.num_heads
            q, k = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k))
            if isinstance(block, CustomResidualAttentionBlock):
                q, k = block.attn.ln_q(q), block.attn.ln_k(k)
            score = q @ k.mT / q.shape[-1] ** 0.5
            if mask is not None:
                score = score + (mask if mask.ndim == 2 else mask.unflatten(0, (-1, heads)))
            maps[block_name] = score.softmax(-1)

        return hook

    for block_name in ("visual.transformer.resblocks.", "transformer.resblocks."):
        prefix = "text." if hasattr(model, "text") and not block_name.startswith("visual") else ""
        block = model.get_submodule(f"{prefix}{block_name}0")
        block.register_forward_hook(remember(f"{prefix}{block_name}1"), with_kwargs=True)
    captions = make_captions(name)
    with torch.no_grad(), mmod.trace(model) as traced:
        embed(model, make_images(name), captions)
    for block_name, routing in traced.items():
        attention_BN = maps[block_name].mean(1)
        valid_BN = torch.ones_like(routing.keep_BN)
        if not block_name.startswith("visual") and name != "ViT-L-14-CLIPA":
            valid_BN = routing.tokens.valid_BN
        expected = (attention_BN * valid_BN.unsqueeze(-1)).sum(1) / valid_BN.sum(1, keepdim=True)
        torch.testing.assert_close(routing.importance_BN, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_a_tower_that_cannot_be_routed_does_not_keep_the_other_from_it(name: str) -> None:
    model = make_clip(name)
    with pytest.raises(ValueError, match="cannot route"):
        mmod.route_(model, RoutingConfig())
    assert not mmod.is_routed(model)
    mmod.route_(model, text=RoutingConfig(capacity=0.5))
    assert all("visual" not in block for block in mmod.routed_blocks(model))
    with torch.no_grad():
        assert torch.isfinite(model.encode_text(make_captions(name))).all()


def test_towers_have_settings_of_their_own() -> None:
    learned, read = RoutingConfig(router="linear", capacity=0.25), RoutingConfig(capacity=0.5, blocks=(3,))
    model = mmod.route_(make_clip("ViT-B-32"), image=learned, text=read)
    assert mmod.routing_config(model, "image") == learned
    assert mmod.routing_config(model, "text") == read
    with pytest.raises(ValueError, match="image and text were routed differently"):
        mmod.routing_config(model)
    assert mmod.capacities(model) == {
        "transformer.resblocks.3": 0.5,
        "visual.transformer.resblocks.1": 0.25,
        "visual.transformer.resblocks.3": 0.25,
    }
    mmod.set_capacity_(model, {"transformer.resblocks.3": 0.75})
    assert mmod.capacities(model)["transformer.resblocks.3"] == 0.75
    mmod.set_capacity_(model, 1.0)
    assert set(mmod.capacities(model).values()) == {1.0}


@pytest.mark.parametrize("name", ["gradual", "pixelprune"])
def test_a_preset_for_images_says_how_to_route_the_image_tower_alone(name: str) -> None:
    model = make_clip("ViT-B-32")
    with pytest.raises(ValueError, match=r"reads text|rows and columns") as refused:
        mmod.route_(model, name)
    assert str(refused.value).endswith("This is part 'text': `mmod.route_(model, image=...)` leaves it dense")
    assert not mmod.is_routed(model)
    mmod.route_(model, image=name)


def test_one_tower_alone_and_the_other_later() -> None:
    model = mmod.route_(make_clip("ViT-B-32"), RoutingConfig(capacity=0.5), text=None)
    assert all(block.startswith("visual") for block in mmod.routed_blocks(model))
    mmod.route_(model, text=RoutingConfig(capacity=0.25))
    assert mmod.routing_config(model, "image").capacity == 0.5
    assert mmod.routing_config(model, "text").capacity == 0.25
    tower = mmod.route_(make_clip("ViT-B-16-SigLIP").visual, mmod.RoutingConfig())
    assert list(mmod.routed_blocks(tower)) == ["trunk.blocks.1", "trunk.blocks.3"]
    text = mmod.route_(make_clip("coca_base").text, mmod.RoutingConfig())
    assert isinstance(text.transformer.resblocks[1], RoutedBlock)


def test_capacity_of_an_unprotected_caption() -> None:
    model = mmod.route_(make_clip("ViT-B-32"), text=RoutingConfig(router="random", capacity=0.01, protect_prefix=False))
    with torch.no_grad(), mmod.trace(model) as traced:
        model.encode_text(make_captions("ViT-B-32"))
    assert all((routing.keep_BN.sum(1) == 1).all() for routing in traced.values())


@pytest.mark.parametrize("config", [ROUTED[0], ROUTED[1]], ids=ids)
def test_copies_read_the_captions_of_their_own_calls(config: RoutingConfig) -> None:
    model, images, captions = make_clip("ViT-B-32"), make_images("ViT-B-32"), make_captions("ViT-B-32")
    mmod.route_(model, config)
    expected = outputs(model, images, captions)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        outputs(model, images, captions.flip(0))
        assert all(torch.equal(*pair) for pair in zip(outputs(other, images, captions), expected))


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({"vision": RoutingConfig()}, ValueError, "no part vision; it has image, text"),
        ({"image": None, "text": None}, ValueError, "a part .image or text. may have its own"),
        ({"text": 0.5}, TypeError, "text must be a RoutingConfig, got 0.5"),
        ({"image": RoutingConfig(blocks=(9,))}, ValueError, "each once, got .9."),
        ({"text": RoutingConfig(blocks="all")}, ValueError, "keep block 0 dense"),
    ],
)
def test_wrong_parts_leave_the_model_as_it_was(parts: dict[str, Any], error: type[Exception], message: str) -> None:
    model = make_clip("ViT-B-32")
    with pytest.raises(error, match=message):
        mmod.route_(model, **parts)
    assert not mmod.is_routed(model)
    assert type(model.token_embedding) is nn.Embedding


@pytest.mark.parametrize("name", ["ViT-B-32", "custom-blocks", "coca_ViT-B-32"])
def test_captions_know_the_names_of_blocks_in_the_full_model(name: str) -> None:
    model = make_clip(name)
    stack = mmod.adapters.find_stacks(model)["text"]
    assert stack.captions is not None
    _, *names = stack.captions.names
    assert [model.get_submodule(block) for block in names] == list(stack.blocks)


def test_wrong_use_says_what_is_wrong() -> None:
    model = mmod.route_(make_clip("ViT-B-32"), mmod.RoutingConfig())
    block = model.transformer.resblocks[1]
    with pytest.raises(RuntimeError, match="needs token ids"):
        block(torch.randn(2, CONTEXT, 48))
    with pytest.raises(ValueError, match=r"got 'k_x', .* known are attn_mask"):
        model.visual.transformer.resblocks[1](torch.randn(2, 5, 48), torch.randn(2, 5, 48))
    last = make_clip("ViT-B-32")
    last.visual.transformer.batch_first = False
    with pytest.raises(ValueError, match="must have a transformer of open_clip with batch_first=True"):
        mmod.route_(last, mmod.RoutingConfig())
    with pytest.raises(ValueError, match="MultimodalTransformer"):
        mmod.route_(make_clip("coca_base").text_decoder, mmod.RoutingConfig())


def test_hugging_face_text_towers_are_refused() -> None:
    from open_clip.hf_model import HFTextEncoder
    from transformers import RobertaConfig

    config = RobertaConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=64
    )
    model = make_clip("ViT-B-16-SigLIP")
    model.text = HFTextEncoder("roberta-base", 48, config=config, pooler_type="mean_pooler", pretrained=False)
    with pytest.raises(ValueError, match=r"tower HFTextEncoder.* image=config"):
        mmod.route_(model, mmod.RoutingConfig())
    mmod.route_(model, image=RoutingConfig())
    assert len(mmod.routed_blocks(model)) == 2
