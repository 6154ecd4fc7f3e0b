"""Every method keeps the contract: it is traced, counted, saved, described on a card, combined and undone."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import timm
import torch
from torch import nn

import mmod
from mmod.analysis.counting import meta_copy, pass_flops
from mmod.blocks import Deciding, Mixin, convert, is_converted, modules_of
from mmod.lab import Channels, Experts, Recursions
from mmod.methods import METHODS, Exit, Merge, Method, Prune, Resize, methods_of
from mmod.methods.base import register_method
from mmod.registry.hub import model_card
from mmod.studies.candidates import baselines_of
from mmod.studies.kind_configs import ImageStudyConfig
from mmod.studies.runs import run_config_of
from mmod.training import evaluate
from tests.kit.counting import flop_counter
from tests.kit.engine_worker import TensorStream, run, tiny_config
from tests.kit.vision_zoo import make_vision
from tests.kit.vlm_zoo import make_joint, make_language
from tests.kit.zoo import make_model

CHANGES: dict[str, list[Any]] = {
    "routing": [mmod.RoutingConfig(capacity=0.5)],
    "threshold": [mmod.RoutingConfig(router="linear", select={"threshold": 0.5})],
    "merge": [Merge(r=4)],
    "prune": [Prune(keep=0.5, blocks=(1, 3))],
    "exit": [Exit(confidence=0.002, blocks=(1, 3))],
    "experts": [Experts(experts=2, capacity=0.5)],
    "staged": [Experts(experts=2), mmod.RoutingConfig(router="linear", capacity=0.5)],
    "recursions": [Recursions(recursions=2)],
    "resize": [Resize(size=80)],
    "channels": [Channels(divisor=8)],
}
FEW: dict[str, Any] = {"layers": (2, 1, 1, 1), "channels": (64, 64, 64, 64)}
RESNET = partial(timm.create_model, "resnet18", **FEW)
SIDE = 96
IMAGES = torch.randn(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "channels":
        return timm.create_model("resnet18", layers=(2, 1, 1, 2), channels=(16, 32, 32, 64), num_classes=10).eval()
    return timm.create_model("test_vit", dynamic_img_size=True).eval()


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_what_is_saved_has_flops_a_trace_and_a_card(name: str, tmp_path: Path) -> None:
    model = make(name)
    dense, keys, cost = model(IMAGES), list(model.state_dict()), mmod.flops(model, SIDE).dense
    for change in CHANGES[name]:
        mmod.apply_(model, change)
    assert [method.kind for method in methods_of(model)] == [
        getattr(change, "kind", "routing") for change in CHANGES[name]
    ]
    with mmod.trace(model) as decisions:
        expected = model(IMAGES)
    # Decisions are recorded for traces alone, and change nothing.
    assert torch.equal(model(IMAGES), expected)
    assert list(decisions) == decisions.names
    assert all(routing.keep_BN.shape[0] == len(IMAGES) for routing in decisions.values())
    report = mmod.flops(model, SIDE, **({"kept": decisions} if name in ("exit", "threshold") else {}))
    assert report.dense == cost
    assert report.share != 1
    mmod.save_pretrained(model, tmp_path)
    loaded = mmod.load_pretrained(tmp_path)
    assert torch.equal(loaded(IMAGES), expected)
    card = str(model_card(model, "somebody/model", report))
    assert all(f"## Method: {method.kind}" in card for method in methods_of(model))
    mmod.undo_(model)
    assert torch.equal(model(IMAGES), dense)
    assert list(model.state_dict()) == keys
    # A dense model stays as it is.
    assert mmod.undo_(model) is model
    with mmod.trace(model) as decisions:
        assert torch.equal(model(IMAGES), dense)
    assert not decisions


@pytest.mark.parametrize("name", [name for name in CHANGES if name not in ("exit", "threshold")])
@torch.no_grad()
def test_flops_are_those_that_run(name: str) -> None:
    model = make(name)
    for change in CHANGES[name]:
        mmod.apply_(model, change)
    with flop_counter() as counter:
        model(IMAGES[:1])
    report = mmod.flops(model, SIDE)
    assert pass_flops(model.to("meta"), {"image": IMAGES[:1].to("meta")}) == report.routed
    # Attention in fp32 on a CPU shares its probabilities with importance.
    assert counter.get_total_flops() == pytest.approx(report.routed - report.importance, rel=2e-3)


@torch.no_grad()
def test_images_that_leave_early_cost_nothing_afterwards() -> None:
    model = mmod.apply_(make("exit"), Exit(confidence=1e-9, blocks=(1, 3)))
    with mmod.trace(model) as decisions:
        model(IMAGES)
    assert decisions.kept_shares() == {
        "blocks.1": 1.0,
        **dict.fromkeys(["blocks.2", "blocks.3", "blocks.4", "blocks.5"], 0.0),
    }
    report = mmod.flops(model, SIDE, kept=decisions)
    assert [row.routed for row in report.blocks[2:]] == [0, 0, 0, 0]
    with pytest.raises(ValueError, match=r"blocks\.1.* follows from the data: pass kept="):
        mmod.flops(model, SIDE)


@torch.no_grad()
def test_tokens_that_are_left_are_those_of_the_trace() -> None:
    for method in (Merge(r=(0, 6, 0, 6, 0, 0)), Prune(keep=0.5, blocks=(1, 3), fuse=False)):
        model = mmod.apply_(make("merge"), method)
        lengths: list[int] = []
        for index in (2, 4):
            # A hook on the block itself would get the full grid.
            model.blocks[index].norm1.register_forward_pre_hook(
                lambda _, args, lengths=lengths: lengths.append(args[0].shape[1])
            )
        with mmod.trace(model) as decisions:
            model(IMAGES)
        assert [
            int(routing.keep_BN.sum(1)[0]) for routing in decisions.values() if not bool(routing.keep_BN.all())
        ] == lengths
        # What was dropped or merged earlier stays so.
        first, second = (routing.keep_BN for routing in decisions.values())
        assert not bool((second & ~first).any())


@pytest.mark.parametrize("name", ["routing", "merge", "recursions", "channels"])
@torch.no_grad()
def test_a_trace_goes_on_after_one_inside_it(name: str) -> None:
    model = make(name)
    for change in CHANGES[name]:
        mmod.apply_(model, change)
    masks = []
    for images in IMAGES.split(1):
        with mmod.trace(model) as decisions:
            model(images)
        masks.append({place: routing.keep_BN for place, routing in decisions.items()})
    seen = []
    with mmod.trace(model) as around:
        model(IMAGES[:1])
        with mmod.trace(model) as inside:
            assert not inside
        seen.append(dict(around))
        for takes in (False, True):
            with mmod.trace(model) as inside:
                model(IMAGES[1:2])
                if takes:
                    inside.take()
            seen.append(dict(around))
        model(IMAGES[2:])
    seen.append(dict(around))
    for actual, expected in zip(seen, (masks[0], masks[1], masks[1], masks[2]), strict=True):
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[place].keep_BN, keep_BN) for place, keep_BN in expected.items())


class Halved(Mixin):
    """Mixin of an MLP that halves its output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the update of tokens (B, N, D)."""
        return super().forward(x) / 2


@pytest.fixture
def half() -> Iterator[type[Method]]:
    """A method as another package adds it: of timm's ViTs and of decoders, before routing and after experts."""

    @register_method("half")
    @dataclasses.dataclass(frozen=True)
    class Half(Method):
        follows: ClassVar = ("experts",)
        decoders: ClassVar = True
        recomputes: ClassVar = True
        block: Annotated[int, "[0, inf)"] = 0

        def precedes(self, kind: str) -> bool:
            return kind == "routing"

        def check(self, model: nn.Module, stack: Any) -> None:
            if self.block >= len(stack.blocks):
                raise ValueError(f"block={self.block}: the model has {len(stack.blocks)}")

        def change(self, model: nn.Module, stack: Any) -> None:
            convert(stack.blocks[self.block].mlp, Halved, None)

    yield Half
    METHODS._entries.pop("half")


def test_a_method_from_outside_is_one_class(half: Any, tmp_path: Path) -> None:
    model = make("half")
    with torch.no_grad():
        dense = model(IMAGES)
        mmod.apply_(model, {"kind": "half", "block": 2})
        expected = model(IMAGES)
        assert not torch.equal(expected, dense)
        with mmod.trace(model) as decisions:
            model(IMAGES)
        assert not decisions
        report = mmod.flops(model, SIDE)
        assert report.share == 1
        assert '"block": 2' in str(model_card(model, "somebody/model", report))
        assert torch.equal(torch.export.export(model, (IMAGES,)).module()(IMAGES), expected)
        mmod.save_pretrained(model, tmp_path)
        assert torch.equal(mmod.load_pretrained(tmp_path)(IMAGES), expected)
        mmod.route_(model, mmod.RoutingConfig())
        assert [method.kind for method in methods_of(model)] == ["half", "routing"]
        assert torch.equal(mmod.unroute_(model)(IMAGES), expected)
        assert torch.equal(mmod.undo_(model)(IMAGES), dense)
    with pytest.raises(ValueError, match="the model has 6"):
        mmod.apply_(model, half(9))
    with pytest.raises(ValueError, match=r"method.block must be an integer of at least 0, got -1"):
        half(-1)
    assert not methods_of(model)
    with pytest.raises(ValueError, match="choose another name"):
        register_method("half")(Merge)


@torch.no_grad()
def test_a_decoder_saves_all_of_its_methods(half: Any, tmp_path: Path) -> None:
    model, words = make_language("llama").eval(), {"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}
    dense = model(**words).logits
    experts = Experts(experts=2, choice="score", blocks=(0,))
    for method in (experts, half(1), mmod.RoutingConfig(language={"tokens": "all"})):
        mmod.apply_(model, method)
    expected = model(**words).logits
    model.save_pretrained(tmp_path)
    loaded = mmod.load_pretrained(tmp_path)
    assert [method.kind for method in methods_of(loaded)] == ["experts", "half", "routing"]
    assert torch.equal(loaded(**words).logits, expected)
    assert torch.equal(mmod.undo_(model)(**words).logits, dense)


def test_a_method_from_outside_is_trained_evaluated_and_studied(half: Any, tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1, methods=[{"kind": "half"}], grad_checkpointing=True)
    result = run(config)
    model = mmod.load_pretrained(tmp_path / "run" / "model")
    assert methods_of(model) == (half(),)
    assert evaluate(model, TensorStream(8, seed=None)) == result.evaluation
    baselines = {"half": {0.5: {"kind": "half", "block": 1}}}
    study = ImageStudyConfig(output="", dense={}, baselines=baselines, finetune={"epochs": 1})
    (candidate,) = baselines_of(study)
    assert run_config_of(candidate, config).applied == (half(1),)


@torch.no_grad()
def test_each_method_restores_its_own_modules_alone(half: Any) -> None:
    model = make("half")
    dense = model(IMAGES)
    # Its block is routed, and the dense one in front of it observed.
    mmod.apply_(model, half(1))
    halved = model(IMAGES)
    mmod.route_(model, mmod.RoutingConfig(blocks="late", operator="attention", capacity=0.5))
    assert modules_of(model, "half") == [model.blocks[1].mlp]
    routed = [module for module in model.modules() if is_converted(module) and module is not model.blocks[1].mlp]
    assert routed == modules_of(model, "routing")
    mmod.unroute_(model)
    assert [module for module in model.modules() if is_converted(module)] == [model.blocks[1].mlp]
    assert torch.equal(model(IMAGES), halved)
    mmod.route_(model, mmod.RoutingConfig())
    half.restore(half(1), model)
    assert not modules_of(model, "half")
    assert mmod.is_routed(model)
    assert torch.equal(mmod.unroute_(model)(IMAGES), dense)


@pytest.mark.parametrize("name", CHANGES)
def test_every_module_of_a_method_knows_it(name: str) -> None:
    model = make(name)
    for change in CHANGES[name]:
        mmod.apply_(model, change)
    kinds = {method.kind for method in methods_of(model)}
    mixins = [module for module in model.modules() if isinstance(module, Mixin)]
    assert {module.mod_method.kind for module in mixins} == kinds
    assert all(isinstance(module, Mixin) for module in model.modules() if is_converted(module))
    assert any(isinstance(module, Deciding) for module in mixins) == (name != "resize")


def test_mixins_do_not_replace_each_other(half: Any) -> None:
    model = mmod.apply_(make("half"), half(1))
    mlp = model.blocks[1].mlp
    with pytest.raises(ValueError, match="was converted by the method 'half', so Other cannot convert it"):
        convert(mlp, type("Other", (Mixin,), {}), None)
    # One that no method put there.
    convert(model.norm, type("Own", (Mixin,), {}), None)
    with pytest.raises(ValueError, match="was converted, so Other cannot convert it"):
        convert(model.norm, type("Other", (Mixin,), {}), None)
    with pytest.raises(TypeError, match=r"Plain must derive from mmod\.blocks\.Mixin"):
        convert(model.blocks[0].mlp, type("Plain", (nn.Module,), {}), None)
    convert(model.blocks[2].attn, Untouched, None)
    for index, operator in ((1, "mlp"), (2, "attention")):
        with pytest.raises(ValueError, match=rf"operator='{operator}'.* is not possible in blocks\.{index}"):
            mmod.route_(model, mmod.RoutingConfig(router="linear", operator=operator, blocks=(index,)))
    assert modules_of(model, "half") == [mlp]


def test_a_norm_and_an_attention_of_another_method_stay(half: Any) -> None:
    model = make("half")
    block = model.blocks[1]
    place = {"norm1": block, "attn": model.blocks[0]}
    for name, owner in place.items():
        convert(owner.get_submodule(name), Untouched, None)
    model.mod_methods = (half(0),)
    with torch.no_grad():
        dense = model(IMAGES)
        mmod.route_(model, mmod.RoutingConfig(blocks=(1,), capacity=0.5))
        model(IMAGES)
        assert torch.equal(mmod.unroute_(model)(IMAGES), dense)
    assert all(isinstance(owner.get_submodule(name), Untouched) for name, owner in place.items())


class Untouched(Mixin):
    """Mixin that changes nothing."""


Maker = Callable[[], nn.Module]
REFUSED: list[tuple[str | Maker, dict[str, Any], str]] = [
    ("test_vit", {"kind": "prune", "keep": 0}, r"keep must be a number in \(0, 1\]"),
    ("test_vit", {"kind": "prune", "by": "patch"}, "'auto', 'class_token', 'mean'"),
    ("test_vit", {"kind": "prune", "blocks": [2, 1]}, "blocks must be ascending"),
    ("test_vit", {"kind": "prune", "blocks": [9]}, "from 0 to 5"),
    ("vit_medium_patch16_gap_240", {"kind": "prune", "by": "class_token"}, "has no class token"),
    ("test_vit", {"kind": "merge", "r": -1}, "r must be"),
    ("vit_small_patch16_18x2_224", {"kind": "merge", "r": 2}, "attention and MLP cannot run separately"),
    ("beit_base_patch16_224", {"kind": "merge", "r": 2}, "bias for each pair of positions"),
    ("vit_dlittle_patch16_reg1_gap_256", {"kind": "merge", "r": 2}, "attends 2 times"),
    (partial(make_language, "llama"), {"kind": "merge", "r": 2}, "supports models of images, .* one that takes none"),
    ("test_vit", {"kind": "exit", "confidence": 0.5, "blocks": [5]}, "saves nothing"),
    ("vit_tiny_patch16_224", {"kind": "resize", "size": 32}, "dynamic_img_size=True"),
    ("test_vit", {"kind": "resize", "size": 40}, "no multiple of 16, the side of a patch"),
    (partial(make_vision, "aimv2"), {"kind": "resize", "size": 32}, "takes images of a fixed size"),
    (partial(make_vision, "siglip2"), {"kind": "resize", "size": 32}, "takes more than images"),
    (partial(make_vision, "videomae"), {"kind": "resize", "size": 32}, "takes more than images"),
    (partial(make_vision, "mae"), {"kind": "resize", "size": 32}, "takes more than images"),
    (RESNET, {"kind": "channels", "divisor": 0}, "divisor"),
    (RESNET, {"kind": "channels", "divisor": 48}, "must divide the 64 channels of layer1.1, and leave a multiple of 1"),
    (RESNET, {"kind": "channels", "into": "last"}, "into"),
    (partial(timm.create_model, "resnet50", **FEW), {"kind": "channels", "divisor": 128}, "leave a multiple of 4"),
    (partial(timm.create_model, "seresnet18", **FEW), {"kind": "channels"}, "cannot be narrowed"),
    (partial(timm.create_model, "resnext50_32x4d", **FEW), {"kind": "channels"}, "cannot be narrowed"),
    (partial(timm.create_model, "test_resnet"), {"kind": "channels"}, "no stage"),
    (
        partial(timm.create_model, "res2net50_26w_4s", **FEW),
        {"kind": "channels"},
        "supported are BasicBlock and Bottleneck with",
    ),
    ("test_vit", {"kind": "channels"}, "supports timm ResNets, got a VisionTransformer"),
    ("test_vit", {"kind": "experts", "capacity": 5.0}, "at most the number of experts"),
    ("test_vit", {"kind": "experts", "experts": 0}, "experts"),
    ("test_vit", {"kind": "experts", "choice": "both"}, "choice"),
    (partial(make_language, "llama"), {"kind": "experts", "choice": "tokens"}, "set capacity=None"),
    ("test_vit", {"kind": "experts", "capacity": None}, "experts fill all"),
    ("test_vit", {"kind": "experts", "choice": "score"}, "all tokens of an image are known at once"),
    ("naflexvit_base_patch16_gap", {"kind": "experts"}, "may be padding"),
    (partial(make_vision, "videomae"), {"kind": "experts"}, "has no module that computes its MLP alone"),
    (partial(make_vision, "yolos"), {"kind": "experts"}, "has no module that computes its MLP alone"),
    (
        partial(make_joint, "llava"),
        {"kind": "experts"},
        "name a part of this LlavaForConditionalGeneration, one of language, image; got None",
    ),
    ("test_vit", {"kind": "recursions", "recursions": 3}, "6 blocks without .* are 4, which recursions=3 must"),
    ("test_vit", {"kind": "recursions", "first": 4, "last": 2}, "are 0"),
    ("test_vit", {"kind": "recursions", "keys": "all"}, "keys"),
    ("test_vit", {"kind": "recursions", "choice": "score"}, "is for language models: all tokens of an image are known"),
    ("vit_small_patch16_rope_mixed_224", {"kind": "recursions"}, "have different rotary positions"),
    ("naflexvit_base_patch16_gap", {"kind": "recursions"}, "may be padding"),
    (partial(make_language, "gemma2"), {"kind": "recursions", "recursions": 2}, "attend in different ways"),
    (
        partial(make_joint, "llava"),
        {"kind": "recursions", "recursions": 2},
        "name a part of this LlavaForConditionalGeneration, one of language, image; got None",
    ),
]


@pytest.mark.parametrize(("model", "values", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_method_that_a_model_cannot_have_is_refused_and_changes_nothing(
    model: str | Maker, values: dict[str, Any], message: str
) -> None:
    changed = make_model(model) if isinstance(model, str) else model()
    classes, keys = [type(module) for module in changed.modules()], list(changed.state_dict())
    with pytest.raises(ValueError, match=message):
        mmod.apply_(changed, values)
    assert [type(module) for module in changed.modules()] == classes
    assert list(changed.state_dict()) == keys
    assert not methods_of(changed)


class Recent(OrderedDict):
    """A cache of as many entries as it is told, which moves those that are read to its end."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __getitem__(self, key: object) -> Any:
        self.move_to_end(key)
        return super().__getitem__(key)

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)
        if len(self) > self.size:
            self.popitem(last=False)


def test_a_table_of_a_models_own_class_is_left_alone() -> None:
    model: Any = make("routing")
    model.recent = Recent(2)
    model.recent["first"] = model.recent["second"] = 1
    with pytest.raises(ValueError, match="needs the importance"):
        mmod.route_(model, mmod.RoutingConfig(router="attention", blocks="all"))
    mmod.route_(model, mmod.RoutingConfig(router="attention", blocks="late"))
    assert list(model.recent) == ["first", "second"]


def test_an_empty_table_is_copied_with_its_attributes() -> None:
    model: Any = make("routing")
    model.weights = OrderedDict()
    model.weights.note = "kept"
    assert meta_copy(model).weights.note == "kept"


def test_every_method_of_this_package_is_no_preset() -> None:
    kinds = [kind for kind in METHODS if METHODS[kind].__module__.startswith("mmod.") and kind != "routing"]
    assert len(kinds) >= 7
    for kind in kinds:
        with pytest.raises(ValueError, match=f"^preset '{kind}' is unknown; .*ToMe, pruning and the like are methods"):
            mmod.preset(kind)
