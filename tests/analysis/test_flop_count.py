"""FLOPs and activation memory against torch's own counter and hand-computed cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn

import mmod
from mmod.analysis import flops, trace
from mmod.analysis.counting import _WithoutMaps
from mmod.analysis.memory import ActivationMemory
from tests.kit import clip_zoo, towers
from tests.kit.conditioned_zoo import CONDITIONED, DEPTH, make_conditioned, run, tokens_of
from tests.kit.counting import flop_counter
from tests.kit.cover import in_turn
from tests.kit.quantized import quantize_
from tests.kit.vlm_zoo import make_joint
from tests.kit.zoo import make_images, make_model

# Small versions of every kind of block that can be routed: name, image side, further arguments.
MODELS = {
    "vit": ("vit_tiny_patch16_224", 64, {"depth": 4}),
    "vit-patch32": ("vit_small_patch32_224", 96, {"depth": 2}),
    "deit": ("deit_tiny_patch16_224", 64, {"depth": 2}),
    "deit-distilled": ("deit_tiny_distilled_patch16_224", 64, {"depth": 2}),
    "deit3-layerscale": ("deit3_small_patch16_224", 64, {"depth": 2}),
    "registers": ("vit_small_patch14_reg4_dinov2", 56, {"depth": 2}),
    "swiglu": ("vit_giant_patch14_dinov2", 56, {"depth": 2, "embed_dim": 192, "num_heads": 3}),
    "siglip-attention-pool": ("vit_base_patch16_siglip_224", 64, {"depth": 2, "embed_dim": 192, "num_heads": 3}),
    "aimv2": ("aimv2_large_patch14_224", 56, {"depth": 2, "embed_dim": 192, "num_heads": 3}),
    "qk-norm": ("vit_tiny_patch16_224", 64, {"depth": 2, "qk_norm": True}),
    "parallel-scaling": ("vit_base_patch16_xp_224", 64, {"depth": 2, "embed_dim": 192, "num_heads": 3}),
    "parallel-things": ("vit_small_patch16_18x2_224", 64, {"depth": 2, "embed_dim": 192, "num_heads": 3}),
    "post-norm": ("vit_base_patch32_plus_256", 64, {"depth": 2, "embed_dim": 192, "num_heads": 3}),
    "eva": ("eva02_tiny_patch14_224", 56, {"depth": 2}),
    "eva-post-norm": ("eva02_small_patch14_224", 56, {"depth": 2, "use_post_norm": True}),
    "dinov3": ("vit_small_patch16_dinov3", 64, {"depth": 2}),
    "pe": ("vit_pe_core_tiny_patch16_384", 64, {"depth": 2}),
    "rope-mixed": ("vit_small_patch16_rope_mixed_224", 64, {"depth": 2}),
    "rope-axial": ("vit_small_patch16_rope_224", 64, {"depth": 2}),
    "beit-shared-bias": (
        "beit_base_patch16_224",
        64,
        {"depth": 2, "use_rel_pos_bias": False, "use_shared_rel_pos_bias": True, "embed_dim": 192, "num_heads": 3},
    ),
    "naflexvit": ("naflexvit_base_patch16_gap", 64, {"depth": 2, "embed_dim": 192, "num_heads": 3}),
    "naflexvit-rope": ("naflexvit_base_patch16_par_gap", 64, {"depth": 2, "embed_dim": 192, "num_heads": 3}),
}


def make(case: str) -> tuple[torch.nn.Module, int]:
    name, side, arguments = MODELS[case]
    if not name.startswith("naflex"):
        arguments = {"img_size": side, **arguments}
    return timm.create_model(name, num_classes=10, **arguments).eval(), side


def counted(model: torch.nn.Module, side: int, image: torch.Tensor | None = None) -> int:
    with flop_counter() as counter:
        model(torch.rand(1, 3, side, side) if image is None else image)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("case", "way"), in_turn(MODELS, [("attention", "kept"), ("linear", "kept"), ("linear", "all")])
)
def test_equals_torchs_counter_dense_and_routed(case: str, way: tuple[str, str]) -> None:
    model, side = make(case)
    dense = flops(model, side)
    assert dense.dense == dense.routed
    assert dense.dense == pytest.approx(counted(model, side), rel=0.005)
    mmod.route_(model, mmod.RoutingConfig(router=way[0], capacity=0.5, context=way[1]))
    report = flops(model, side)
    assert report.routed == pytest.approx(counted(model, side), rel=0.005)
    assert report.dense == dense.dense
    assert report.routed < report.dense


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_count_is_the_same_in_every_mode_of_gradients(mode: Callable[[], Any]) -> None:
    model, side = make("vit")
    mmod.route_(model, mmod.RoutingConfig(capacity=0.5))
    language = make_joint("llava")
    expected = [flops(model, side), flops(language, mmod.Prompt(5, 9))]
    with mode():
        assert [flops(model, side), flops(language, mmod.Prompt(5, 9))] == expected


def test_attention_written_out_is_counted_too() -> None:
    model, side = make("vit")
    for block in model.blocks:
        block.attn.fused_attn = False
    assert flops(model, side).dense == counted(model, side) == flops(make("vit")[0], side).dense


CONFIGS: dict[str, dict[str, object]] = {
    "every-other": {},
    "late": {"blocks": "late"},
    "mean": {"router": {"name": "attention", "importance": "mean"}},
    "class-token": {"router": {"name": "attention", "importance": "class_token"}},
    "all": {"context": "all"},
    "attention": {"operator": "attention"},
    "mlp": {"operator": "mlp"},
    "mixed": {"blocks": (1, 2, 3), "operator": ("block", "mlp", "attention"), "context": ("all", "kept", "all")},
    "follow": {"skipped": "follow"},
    "merge": {"skipped": "merge"},
    "observes": {"skipped": {"name": "merge", "before": "mlp"}},
    "observes-once": {"skipped": {"name": "merge", "before": "mlp"}, "blocks": "late"},
    "observes-class-token": {
        "skipped": {"name": "merge", "before": "mlp"},
        "router": {"name": "attention", "importance": "class_token"},
    },
}


@pytest.mark.parametrize(
    ("case", "method"),
    [
        *[("vit", method) for method in CONFIGS],
        *zip(["deit-distilled", "registers"] * 2, ["mean", "class-token", "mixed", "observes-class-token"]),
    ],
)
def test_importance_is_what_shared_probabilities_save(case: str, method: str) -> None:
    """Attention in fp64 computes the map once more for importance; in fp32 on a CPU it shares its own."""
    name, side, changes = MODELS[case]
    model = timm.create_model(name, **{**changes, "img_size": side, "depth": 4, "num_classes": 10}).eval()
    mmod.route_(model, mmod.RoutingConfig(capacity=0.5, **CONFIGS[method]))
    report, image = flops(model, side), torch.rand(1, 3, side, side)
    with torch.no_grad():
        shared, twice = counted(model, side, image), counted(model.double(), side, image.double())
    assert report.routed == pytest.approx(twice, rel=0.001)
    saved = 0 if "class_token" in CONFIGS[method].values() else report.importance
    assert report.routed - saved == pytest.approx(shared, rel=0.001)
    assert report.importance > 0


def test_a_block_by_hand() -> None:
    model, side = make("vit")
    report = flops(mmod.route_(model, mmod.RoutingConfig(router="linear", capacity=0.5)), side)
    dim, tokens, kept = 192, 17, 8

    def block(n: int) -> int:
        return 2 * n * dim * (3 * dim + dim + 8 * dim) + 4 * n * n * dim

    routed = report.blocks[1]
    assert (routed.name, routed.tokens, routed.kept) == ("blocks.1", tokens, kept)
    assert routed.dense == block(tokens)
    assert routed.router == 2 * tokens * dim
    assert routed.routed == block(kept) + routed.router
    assert report.blocks[0].importance == 0
    mmod.unroute_(model)
    to_all = flops(mmod.route_(model, mmod.RoutingConfig(router="linear", context="all")), side).blocks[1]
    block_flops = 2 * kept * dim * (dim + dim + 8 * dim) + 4 * kept * tokens * dim
    assert to_all.routed == block_flops + 2 * tokens * dim * 2 * dim + to_all.router
    importance = flops(mmod.route_(make("vit")[0], mmod.RoutingConfig()), side).blocks[0].importance
    assert importance == 2 * tokens * tokens * dim


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3"])
@pytest.mark.parametrize("first", [True, False])
def test_quantized_weights_are_counted_by_their_shapes(name: str, first: bool) -> None:
    plain, model = (mmod.route_(make_model(name), mmod.RoutingConfig(capacity=0.5)) for _ in range(2))
    if first:
        model = make_model(name)
        quantize_(model)
        mmod.route_(model, mmod.RoutingConfig(capacity=0.5))
    else:
        quantize_(model)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(1, 3, 64, 64)), plain(torch.ones(1, 3, 64, 64)), atol=1, rtol=1)
    assert flops(model, 64) == flops(plain, 64)


def test_the_model_is_left_alone() -> None:
    model, side = make("rope-mixed")
    mmod.route_(model, mmod.RoutingConfig())

    def left() -> list[object]:
        places = [(name, value.data_ptr(), value.device.type) for name, value in model.state_dict().items()]
        return [places, [(*module._forward_hooks, *module._forward_pre_hooks) for module in model.modules()]]

    before = left()
    flops(model, side)
    assert left() == before
    assert all(block.mod_state.routing is None for block in mmod.routed_blocks(model).values())


@pytest.mark.parametrize("average", [ModelEmaV2, ModelEmaV3])
def test_a_moving_average_costs_what_its_model_does(average: Callable[[nn.Module], nn.Module]) -> None:
    """ModelEmaV3 holds a generator of random numbers, whose state is a tensor."""
    model = mmod.route_(make_model("vit_tiny_patch16_224"), mmod.RoutingConfig(capacity=0.25))
    averaged, alone = mmod.flops(average(model), 64), mmod.flops(model, 64)
    assert (averaged.dense, averaged.routed) == (alone.dense, alone.routed)


def test_threshold_needs_what_was_kept() -> None:
    model, side = make("vit")
    mmod.route_(model, mmod.RoutingConfig(router="norm", select=mmod.Threshold(1.0)))
    with pytest.raises(ValueError, match=r"blocks\.1 and .* pass kept="):
        flops(model, side)
    with pytest.raises(ValueError, match=r"names no share for blocks\.3; it names blocks\.1"):
        flops(model, side, kept={"blocks.1": 0.5})
    with trace(model) as nothing, pytest.raises(ValueError, match=r"for blocks\.1 and 1 more; it is empty: run the"):
        flops(model, side, kept=nothing)
    with pytest.raises(ValueError, match=r"must be a number in \[0, 1\], got 2"):
        flops(model, side, kept=2.0)
    with pytest.raises(TypeError, match=r"kept share of blocks\.1 must be a number in \[0, 1\], got 'half'"):
        flops(model, side, kept="half")
    image = torch.rand(1, 3, side, side)
    with trace(model) as decisions, torch.no_grad():
        model(image)
    traced = flops(model, side, kept=decisions)
    slots = {name: int(routing.keep_BN.sum()) for name, routing in decisions.items()}
    assert {row.name: row.kept for row in traced.blocks if row.name in slots} == slots
    assert traced.routed == counted(model, side, image)
    assert flops(model, side, kept=0.5).blocks[1].kept == 8


def test_slots_of_a_static_threshold_run_empty_too() -> None:
    model, side = make("vit")
    mmod.route_(model, mmod.RoutingConfig(router="norm", select=mmod.Threshold(100.0, max_tokens=8)))
    with torch.no_grad(), trace(model) as decisions:
        counted_flops = counted(model, side)
    assert int(decisions["blocks.1"].keep_BN.sum()) == 1
    report = flops(model, side, kept=decisions)
    assert report.blocks[1].kept == 8
    assert report.routed == counted_flops


@pytest.mark.parametrize("operator", ["block", "mlp"])
def test_blocks_that_keep_nothing_cost_their_router_alone(operator: str) -> None:
    model, side = make("vit")
    config = mmod.RoutingConfig(
        router=mmod.score("linear", init_std=0.0), select=mmod.Threshold(1.0), operator=operator, protect_prefix=False
    )
    mmod.route_(model, config)
    with torch.no_grad(), trace(model) as decisions:
        counted_flops = counted(model, side)
    report = flops(model, side, kept=decisions)
    assert report.blocks[1].kept == 0
    assert report.routed == counted_flops


@pytest.mark.parametrize("name", CONDITIONED)
def test_arguments_by_name_are_the_example_by_which_blocks_are_found(name: str) -> None:
    model = make_conditioned(name)
    inputs = CONDITIONED[name].inputs(2)
    with flop_counter() as counter:
        run(model, inputs)
    dense = flops(model, inputs)
    assert dense.dense == dense.routed == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert len(dense.blocks) == DEPTH
    mmod.route_(model, "tread", tokens=tokens_of(name))
    assert flops(model, inputs).routed == dense.dense
    report = flops(model.train(), inputs)
    assert report.dense == dense.dense > report.routed
    assert [row.name for row in report.blocks] == [row.name for row in dense.blocks]


def test_errors_name_what_is_wrong() -> None:
    model, side = make("vit")
    mmod.route_(model, mmod.RoutingConfig())
    with mmod.trace(model) as decisions:
        model(torch.zeros(1, 3, side, side))
    assert flops(model, side, kept=decisions) == flops(model, side)
    with pytest.raises(ValueError, match=r"input_size must be .* got Tensor \(2, 3, 32, 32\)") as error:
        flops(model, torch.zeros(2, 3, 32, 32))  # type: ignore[arg-type]
    assert len(str(error.value)) < 320


def make_dual(config: type[Any], model: type[Any]) -> torch.nn.Module:
    """Return a model of transformers with two towers."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    vision = {**sizes, "image_size": 64, "patch_size": 16}
    text = {**sizes, "vocab_size": 99, "max_position_embeddings": 8}
    return model(config(vision_config=vision, text_config=text)).eval()


# A model of several parts, the routed part in mmod's words, the module that it is, and what that takes.
PARTS: dict[str, tuple[Callable[[], torch.nn.Module], str, Callable[[Any], Any], Any]] = {
    "CLIP of transformers": (
        lambda: make_dual(transformers.CLIPConfig, transformers.CLIPModel),
        "image",
        lambda model: model.vision_model,
        64,
    ),
    "SigLIP of transformers": (
        lambda: make_dual(transformers.SiglipConfig, transformers.SiglipModel),
        "image",
        lambda model: model.vision_model,
        64,
    ),
    "LLaVA": (lambda: make_joint("llava"), "image", towers.tower_of, 12),
    "CLIP of open_clip": (lambda: clip_zoo.make_clip("ViT-B-32"), "image", lambda model: model.visual, 64),
    "timm's tower in open_clip": (lambda: clip_zoo.make_clip("EVA02-B-16"), "image", lambda model: model.visual, 56),
    "text tower of open_clip": (
        lambda: clip_zoo.make_clip("ViT-B-16-SigLIP"),
        "text",
        lambda model: model.text,
        {"text": clip_zoo.make_captions("ViT-B-16-SigLIP", (7,))},
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_routed_model_is_counted_as_the_part_routed_alone(name: str) -> None:
    make_whole, part, tower_of, size = PARTS[name]
    model, other = make_whole(), make_whole()
    config = mmod.RoutingConfig(router="linear", blocks=(0, 1), capacity=(0.75, 0.25))
    alone = tower_of(other)
    dense = flops(alone, size).dense
    mmod.route_(alone, config)
    mmod.route_(model, **{part: config})
    report = flops(tower_of(model), size)
    assert report == flops(alone, size)
    assert report.dense == dense
    assert report.routed < dense
    assert [row.kept < row.tokens for row in report.blocks[:2]] == [True, True]
    with pytest.raises(ValueError, match=r"is a part of a changed model: call mmod\.undo_ on that model"):
        mmod.undo_(tower_of(model))


@pytest.mark.parametrize(
    "method", [mmod.methods.Merge(r=1), mmod.methods.Prune(keep=0.5, blocks=(1,)), mmod.lab.Recursions()]
)
def test_a_part_is_counted_with_any_method(method: mmod.methods.Method) -> None:
    model, other = (make_dual(transformers.CLIPConfig, transformers.CLIPModel) for _ in range(2))
    mmod.apply_(model, method)
    mmod.apply_(other.vision_model, method)
    report = flops(model.vision_model, 64)
    assert report == flops(other.vision_model, 64)
    assert report.share < 1 or report.added_parameters < 0


def test_a_tower_that_reads_the_values_of_sizes_is_refused() -> None:
    tower = towers.tower_of(make_joint("qwen2.5-vl"))
    with pytest.raises(ValueError, match=r"reads the values of hidden_states, grid_thw, and FLOPs are counted from"):
        flops(tower, towers.images("qwen2.5-vl", (0,)))


def test_an_operation_without_shapes_is_named() -> None:
    library = torch.library.Library("without_shapes", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CPU")
    model = make_model("vit_tiny_patch16_224")
    model.norm.register_forward_pre_hook(lambda _, inputs: torch.ops.without_shapes.twice(*inputs))
    with pytest.raises(ValueError, match="runs without_shapes::twice, and FLOPs are counted from shapes alone"):
        flops(model, 64)


def test_a_model_that_cannot_be_routed_is_counted_as_a_whole() -> None:
    model = timm.create_model("resnet18").eval()
    report = flops(model, 64)
    assert report.blocks == ()
    assert report.routed == report.dense == counted(model, 64, torch.rand(1, 3, 64, 64))


def test_products_in_any_form_are_counted_or_refused() -> None:
    model, side = make("vit")
    before = flops(model, side).dense
    weight = torch.empty(192, 192)
    model.norm = torch.nn.Module()
    model.norm.forward = lambda x: torch.einsum("bnd,de->bne", x, weight.to(x.device))
    assert flops(model, side).dense == before + 2 * 17 * 192 * 192
    model.norm.forward = lambda x: torch.nn.functional.bilinear(x, x, x.new_empty(192, 192, 192))
    with pytest.raises(ValueError, match="cannot count the FLOPs of bilinear"):
        flops(model, side)


def test_a_report_is_saved_and_says_what_was_added() -> None:
    report = flops(mmod.route_(make("vit")[0], mmod.RoutingConfig(router="linear")), 64)
    assert f"{report.parameters:,} parameters, {2 * 192:+,} against the dense model" in str(report)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["routed"] == sum(row["routed"] for row in plain["blocks"]) + plain["rest"]["routed"]
    assert type(report).from_dict(plain) == report


def test_memory_follows_what_is_held() -> None:
    x, weight = torch.zeros(4, 256, device="meta"), torch.zeros(256, 256, device="meta", requires_grad=True)
    with ActivationMemory([x, weight]) as memory:
        y = torch.relu(x @ weight.t())
    kilobyte = 4 * 256
    assert memory.peak == 2 * 4 * kilobyte
    assert memory.live == 4 * kilobyte, "relu saves its result alone"
    del y
    assert memory.live == 0


@pytest.mark.parametrize("name", ["test_vit3", "naflexvit_base_patch16_gap", "vit_so150m_patch16_reg4_gap_256"])
def test_memory_is_that_of_a_pass_that_runs_every_operation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = make_model(name).to("meta"), make_images(name, 1).to("meta")
    monkeypatch.setattr("mmod.analysis.counting._OUTCOMES", {})
    report = flops(model, tuple(images.shape[1:]))
    assert flops(model, tuple(images.shape[1:])) == report, "now nearly all operations are known"
    with torch.no_grad(), _WithoutMaps(), ActivationMemory([images, *model.parameters(), *model.buffers()]) as memory:
        model(images)
    assert report.activation_bytes == memory.peak


def test_routing_saves_memory_for_training() -> None:
    report = flops(mmod.route_(make("vit")[0], mmod.RoutingConfig(capacity=0.125)), 64)
    assert 0 < report.training_bytes < report.dense_training_bytes
    assert report.activation_bytes < report.training_bytes


NO_SIZES = [64.5, "160", 0, None, (64,), (3, 64, 6.4), {"x": None}, torch.zeros(3)]


@pytest.mark.parametrize("size", [150, (3, 160, 150), (1, 160, 160), (3, 160), *NO_SIZES])
def test_images_that_a_model_cannot_take_are_refused_in_one_line(size: object) -> None:
    model = timm.create_model("test_vit")
    is_no_size = any(size is other for other in NO_SIZES)
    message = r"input_size must be \(channels, height, width\), .* or arguments by name"
    with pytest.raises(ValueError, match=message if is_no_size else "cannot take image") as error:
        mmod.flops(model, size)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_reports_and_traces_say_what_matters_first() -> None:
    model = mmod.route_(timm.create_model("test_vit"), mmod.RoutingConfig(router="norm")).eval()
    report = flops(model, 160)
    first, second = str(report).splitlines()[:2]
    assert first.startswith(f"{report.share:.3f} of the dense FLOPs")
    assert second == f"3 of 6 blocks compute {50 / 101:.3f} of their tokens"
    with trace(model) as decisions:
        model(torch.rand(1, 3, 160, 160))
    assert repr(decisions) == str(decisions)
    for shown in (report, decisions):
        assert shown._repr_markdown_() == str(shown)
        assert "| blocks.5 " in str(shown)
