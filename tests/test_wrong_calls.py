"""Wrong calls of the public functions name the value and the valid ones, and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

import mmod
from mmod.analysis.style import new_figure, save_picture
from mmod.config.parts import Gate
from mmod.io.records import record_config
from mmod.lab import Experts
from mmod.methods import Exit, Merge, Prune
from mmod.planning import falling, ratio_decay
from tests.kit.own_vits import make_own
from tests.kit.vlm_zoo import make_language

Call = Callable[[Any], object]
LINEAR = mmod.RoutingConfig(router="linear")
PLAIN: dict[str, Any] = {"select": "topk", "gate": "identity", "losses": {}}
SHARED = {"name": "linear", "shared": True}
CONFIGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"blocks": "lates"}, ValueError, "got 'lates'; near ones: late$"),
    ({"skipped": "merged"}, ValueError, "got 'merged'; near ones: merge$"),
    ({"ratio": 0.5}, TypeError, "has no field 'ratio'; near ones: capacity; "),
    (
        {"router": {"name": "duplicate", "cel": 2}},
        ValueError,
        "^unknown option of router 'duplicate': cel; near ones: cell; ",
    ),
    ({"capacity": torch.rand(2)}, TypeError, r"capacity must be .*, got Tensor \(2,\)$"),
    ({"ruoter": "norm"}, TypeError, "Config has no field 'ruoter'; near ones: router;"),
    ({"capacity": "0.5"}, TypeError, r"capacity must be a number in \[0, 1\].*, got '0.5'"),
    ({"router": mmod.Score}, TypeError, "must be a name, a score or a function, got <class"),
    (
        {"router": "atention"},
        ValueError,
        "router 'atention' is unknown; near ones: attention; .*'norm'.*register_score",
    ),
    ({"capacity": -0.5}, ValueError, r"a number in \[0, 1\] or several .*, got -0.5"),
    ({"blocks": "odd"}, ValueError, "one of 'every_other', 'late', 'all' or several values"),
    ({"blocks": (), "depth": 4}, ValueError, r"no block is left to route among 4: name some in blocks"),
    ({"blocks": (1, 1), "depth": 4}, ValueError, r"ascending numbers from 0 to 3, .*\[1, 1\]"),
    *(
        ({"blocks": blocks}, ValueError, r"must be ascending numbers from 0 to \d, each once, got \[")
        for blocks in ((1, 1), (2, 1), (-1, 2))
    ),
    ({"select": "top-k"}, ValueError, "one of 'topk', 'threshold', got 'top-k'"),
    ({"select": {"name": "topk", "max_tokens": 4}}, ValueError, "no options, got max_tokens"),
    ({"gate": "relu"}, ValueError, "'tanh', 'step', got 'relu'"),
    ({"gate": "tanh"}, ValueError, "gate 'tanh' needs a score that learns"),
    ({"gate": "identity", "router": "attention", "losses": {"membership": 1.0}}, ValueError, "'attention' does not"),
    ({"router": "linear", "gate": "identity", "losses": {"load": 1.0}}, ValueError, "losses.load needs gate 'linear'"),
    (
        {"router": "linear", "gate": "identity", "losses": {"load": 0.0}},
        ValueError,
        "mapping of names to a number above 0",
    ),
    ({"router": "linear", "gate": "identity", "losses": {"bce": 1.0}}, ValueError, "'capacity', 'importance', 'load'"),
    (
        {"router": "linear", "skipped": "scale", "gate": "step", "select": mmod.Threshold(0.5), "context": "all"},
        ValueError,
        "gate 'linear', 'sigmoid' or 'tanh'",
    ),
    ({"language": "all"}, TypeError, "must be options of LanguageRouting, got 'all'"),
    ({"skipped": "drop"}, ValueError, "skipped must be one of 'pass', 'scale', 'follow', 'merge', got 'drop'"),
    ({"skipped": "scale"}, ValueError, "skipped='scale' needs operator='block' and gate 'linear'"),
    ({"skipped": "merge", "operator": "mlp"}, ValueError, "skipped='merge' needs context='kept' and operator='block'"),
    ({"skipped": "follow", "context": "all"}, ValueError, "needs context='kept' and operator='block'"),
    ({"skipped": {"name": "follow", "before": "mlp"}}, ValueError, "skipped='follow' has no options, got before"),
    ({"skipped": {"before": "norm"}}, ValueError, "skipped.before must be one of 'block', 'mlp', got 'norm'"),
    ({"skipped": {"before": "mlp"}, "router": "norm"}, ValueError, "shares its score between blocks, got 'norm'"),
    ({"skipped": {"before": "mlp"}, "router": "linear"}, ValueError, "shares its score between blocks, got 'linear'"),
    ({"router": SHARED, "skipped": "merge"}, ValueError, "router.shared of 'linear' needs skipped='pass' or 'scale'"),
    ({"router": SHARED, "losses": {"importance": 0.1}}, ValueError, "router.shared of 'linear' needs skipped="),
    ({"router": {"name": "duplicate", "tolerance": 256}}, ValueError, "tolerance"),
    ({"router": {"name": "duplicate", "cell": 1}}, ValueError, "cell"),
    ({"router": {"name": "duplicate", "std": 0.0}}, ValueError, "std"),
    ({"router": {"name": "duplicate", "std": (0.5, -1.0)}}, ValueError, "std"),
    ({"router": {"name": "cells", "side": 1}}, ValueError, "side"),
    ({"operator": "head"}, ValueError, "operator must be"),
    ({"operator": "mlp", "context": "all"}, ValueError, "context='kept'"),
    ({"operator": "mlp", "skipped": "scale"}, ValueError, "operator='block'"),
    ({"operator": "attention", "router": "linear", "language": {"gate_on": "mlp"}}, ValueError, "gate_on"),
    ({"context": "all", "language": {"positions": "compact"}}, ValueError, "compact"),
    ({"language": {"tokens": 0}}, ValueError, r"language\.tokens"),
    ({"language": {"tokens": "text"}}, ValueError, r"language\.tokens"),
    ({"language": {"tokens": "span"}, "select": "threshold"}, ValueError, r"language\.tokens"),
    ({"language": {"tokens": 2}, "select": "threshold"}, ValueError, r"language\.tokens"),
    ({"language": {"gate_on": "mlp"}, "router": "linear", "gate": "identity"}, ValueError, r"language\.gate_on"),
    ({"language": {"inference_threshold": 1.0}, "router": "linear"}, ValueError, r"language\.inference_threshold"),
    (
        {"language": {"inference_threshold": 0.5}, "router": "linear", "select": "threshold"},
        ValueError,
        r"language\.inference_threshold",
    ),
    ({"language": {"predictor": True}, "router": "linear"}, ValueError, r"language\.predictor"),
    ({"language": {"positions": "none"}}, ValueError, r"language\.positions"),
    ({"depth": 10**400}, ValueError, r"depth must be an integer in \[1, 100000\] or null, got 1000"),
    ({"depth": 10**5000}, ValueError, "depth must be an integer in"),
    ({"depth": "4"}, TypeError, "depth must be an integer in .*, got '4'"),
    ({"protect_prefix": "no"}, TypeError, "protect_prefix must be true or false, got 'no'"),
]


def repeated() -> torch.nn.Module:
    """Return a model of which one block runs twice in a row."""
    model = timm.create_model("test_vit")
    model.blocks[3] = model.blocks[2]
    return model


CALLS: list[tuple[Call, type[Exception], str]] = [
    (lambda m: mmod.route_("vit"), TypeError, "must be a torch.nn.Module, got 'vit'"),
    (
        lambda m: mmod.route_(repeated(), "gradual"),
        ValueError,
        r"blocks\.2 and blocks\.3 are one module.* a copy",
    ),
    (lambda m: mmod.apply_(repeated(), Merge(r=2)), ValueError, r"blocks\.2 and blocks\.3 are one module"),
    (
        lambda m: mmod.route_(repeated(), mmod.RoutingConfig(blocks=(2,))),
        ValueError,
        r"blocks\.2 and blocks\.3 are one module.* a copy",
    ),
    (lambda m: mmod.route_(repeated(), "a-mod"), ValueError, r"blocks\.2 and blocks\.3 are one module.* a copy"),
    (
        lambda m: mmod.flops(torch.nn.DataParallel(m), 160),
        ValueError,
        r"Pass the model inside a wrapper \(model\.module\)",
    ),
    (lambda m: mmod.flops(torch.compile(m), 160), ValueError, r"or a compiled one \(model\._orig_mod\)"),
    (lambda m: mmod.save_pretrained(m, None), TypeError, "folder must be a text or a Path, got None"),
    (lambda m: mmod.load_pretrained(None), TypeError, "folder must be a text or a Path, got None"),
    (
        lambda m: mmod.load_pretrained("x", "gpu"),
        ValueError,
        "'cuda' or another torch device, got 'gpu'",
    ),
    (lambda m: mmod.load_pretrained("x", 3.5), TypeError, r"device must be a text or a device, got 3\.5"),
    (lambda m: mmod.load_pretrained("x", "cuda:99"), ValueError, "'cuda:99' was asked for and torch sees"),
    (
        lambda m: mmod.save_pretrained(mmod.route_(timm.create_model("test_vit").to("meta"), LINEAR), "nowhere"),
        ValueError,
        r"or have no values: cls_token \(on the meta device\)",
    ),
    (lambda m: mmod.route_(m.state_dict()), TypeError, "got a mapping of .* names: build the model first"),
    (lambda m: mmod.flops({"model": m}, 160), TypeError, "got a mapping of 1 names: build the model first"),
    (lambda m: mmod.to_all_tokens(torch.rand(1, 5, 64), None), TypeError, "routing must be a block's decision, .*None"),
    (lambda m: mmod.to_all_tokens([0.5], None), TypeError, r"values must be a tensor, got \[0\.5\]"),
    (lambda m: mmod.route_(m, "attention"), TypeError, "must be a RoutingConfig, got 'attention'"),
    (lambda m: mmod.route_(m, "gradul"), ValueError, "preset 'gradul' is unknown; near ones: gradual"),
    (lambda m: mmod.route_(m, preset="gradul"), ValueError, "preset 'gradul' is unknown; near ones: gradual"),
    (lambda m: mmod.apply_(m, "gradul"), ValueError, "preset 'gradul' is unknown; near ones: gradual"),
    (lambda m: mmod.route_(m, "gradual", vision="gradual"), ValueError, "no part vision; it has image$"),
    (lambda m: mmod.route_(m, "A-MoD"), ValueError, "preset 'A-MoD' is unknown; near ones: a-mod"),
    (lambda m: mmod.Gate("sigmod"), ValueError, "got 'sigmod'; near ones: sigmoid"),
    (lambda m: mmod.RoutingConfig.from_dict({"keep": 0.5}), ValueError, "option keep; near ones: capacity; "),
    (lambda m: mmod.RoutingConfig.from_dict({"prune": 1}), ValueError, r"in a config methods: \[\{kind: merge, r"),
    (lambda m: mmod.apply_(m, {"kind": "ToMe"}), ValueError, "'ToMe' is unknown; near ones: merge; "),
    (lambda m: mmod.score("attention", tolerance=6), ValueError, "it belongs to the score 'duplicate', pass "),
    (lambda m: mmod.route_(m, image="gradul"), ValueError, "preset 'gradul' is unknown; near ones: gradual"),
    (lambda m: mmod.route_(m, preset="gradual"), ValueError, r"^call mmod.route_\(model, 'gradual'\): "),
    (lambda m: mmod.route_(m, "gradual", capacity=2), ValueError, r"^capacity must be a number in \[0, 1\], got 2"),
    (lambda m: mmod.route_(m, "gradual", capacty=0.5), ValueError, "option capacty; near ones: capacity"),
    (lambda m: mmod.route_(m, "pixelprune", cell=8), ValueError, r"pass router=mmod\.score\('duplicate', cell=8\)$"),
    (lambda m: mmod.preset("mod", mean=0.5), ValueError, "option mean: it belongs to preset 'gradual'$"),
    (lambda m: Prune(r=8), TypeError, "^Prune has no field 'r'; .*; it is a field of .*Merge"),
    (lambda m: mmod.apply_(m, {"kind": "prune", "r": 8}), ValueError, "'prune': r; .*; it is a field of .*Merge"),
    (
        lambda m: mmod.route_(m),
        ValueError,
        r"a part \(image\) may have its own, as mmod\.route_\(model, image='gradual'\)$",
    ),
    (lambda m: mmod.preset("mod", scale=0.1), ValueError, r"to gate, pass gate=\{'name': 'linear', 'scale': 0\.1\}$"),
    (lambda m: mmod.preset("a-mod", before="mlp"), ValueError, r"pass skipped=\{'before': 'mlp'\}$"),
    (
        lambda m: mmod.preset("pixelprune-language", tolerance=6),
        ValueError,
        r"score 'duplicate', pass router=mmod\.score\('duplicate', cell=None, tolerance=6\)$",
    ),
    (
        lambda m: mmod.RoutingConfig.from_dict({"router": "norm", "seed": 3}),
        ValueError,
        r"the score 'random', pass router=mmod\.score\('random', seed=3\)$",
    ),
    (lambda m: mmod.route_(m, capacity=2), ValueError, r"^capacity must be a number in \[0, 1\]"),
    (lambda m: mmod.route_(m, "gamma-mod"), ValueError, "no layer of a language model: .* for images are 'a-mod', "),
    (lambda m: mmod.route_(m, language="gamma-mod"), ValueError, "no part language; it has image$"),
    (lambda m: mmod.route_(m, text=mmod.RoutingConfig()), ValueError, "no part text; it has image"),
    (lambda m: mmod.route_(m, mmod.RoutingConfig(blocks=(99,))), ValueError, r"from 0 to 5, each once, got \[99"),
    (lambda m: mmod.route_(m, mmod.RoutingConfig(capacity=(0.5, 0.2))), ValueError, "one capacity or as many, got 2"),
    (
        lambda m: mmod.route_(
            m, mmod.RoutingConfig(router="redundancy", skipped="merge", blocks=(1, 2), capacity=(0.3, 0.6))
        ),
        ValueError,
        r"skipped='merge' lets capacity fall from block to block and not rise: 0\.3 in blocks\.1, 0\.6 in the next",
    ),
    (lambda m: mmod.route_(m, mmod.RoutingConfig(blocks=(1,), depth=3, router="norm")), ValueError, "3 blocks, .* has"),
    (lambda m: mmod.apply_(m, Merge), TypeError, "must be a method of mmod.methods.*Merge"),
    (lambda m: mmod.apply_(m, torch.rand(2, 3)), TypeError, r"or a RoutingConfig, got Tensor \(2, 3\)$"),
    (lambda m: mmod.route_(m, torch.rand(2, 3)), TypeError, r"must be a RoutingConfig, got Tensor \(2, 3\), or"),
    (lambda m: mmod.route_(m, mmod.RoutingConfig(), tokens=torch.rand(2, 3)), TypeError, r"a mmod.Tokens, got Tensor"),
    (lambda m: mmod.flops(m, {"x": {"y": [3]}}), ValueError, r"input_size must be .*, got {'x': {'y': \[3\]}}$"),
    (lambda m: mmod.flops(m, torch.rand(2, 3, 160, 160)), ValueError, r"160, 160\): pass \(3, 160, 160\)$"),
    (lambda m: Prune(kep=0.5), TypeError, "^Prune has no field 'kep'; near ones: keep; valid ones are keep, blocks"),
    (lambda m: Gate("tanh", scael=1), TypeError, "^Gate has no field 'scael'; near ones: scale; valid ones are name, "),
    (lambda m: mmod.apply_(m, {"r": 8}), ValueError, "must be one of 'channels', .*, got None"),
    (lambda m: mmod.apply_(m, {"kind": "tome"}), ValueError, "'tome' is unknown; near ones: merge; .*'prune'"),
    (lambda m: mmod.apply_(m, {"kind": "merge", "q": 8}), ValueError, "field of method 'merge': q; valid ones are r"),
    (lambda m: mmod.apply_(m, {"kind": "merge", "r": None}), TypeError, "method.r must be an integer .*got None"),
    (lambda m: mmod.apply_(m, {"kind": "routing"}), ValueError, "'routing' needs parts"),
    (lambda m: mmod.apply_(m, {"kind": "routing", "parts": {}}), ValueError, "at least one part"),
    (lambda m: mmod.apply_(m, {"kind": "routing", "parts": 3}), TypeError, "method.parts must be a mapping"),
    (lambda m: mmod.apply_(m, Merge(r=(1, 2))), ValueError, "one number per block, 6, got 2"),
    (lambda m: mmod.apply_(m, Experts(choice="score")), ValueError, "choice='score' is for language models"),
    (lambda m: Exit(confidence=90), ValueError, r"method.confidence must be a number in \(0, 1\], got 90"),
    (lambda m: Merge(r=2.5), TypeError, "method.r must be an integer .* got 2.5"),
    (lambda m: Prune(blocks=3), TypeError, "method.blocks must be several values, each an integer .*, got 3"),
    (lambda m: Exit(blocks=(1.5,)), TypeError, r"method.blocks .* got \(1.5,\)"),
    (lambda m: mmod.RoutingConfig.from_dict({"capcity": 1}), ValueError, "option capcity; near ones: capacity"),
    (lambda m: mmod.Threshold(min_tokens=5, max_tokens=4), ValueError, r"at least min_tokens \(5\), got 4"),
    (lambda m: mmod.Threshold(min_tokens=-1), ValueError, "min_tokens must be an integer of at least 0, got -1"),
    (lambda m: mmod.RoutingConfig(router=sum).to_dict(), ValueError, "router is a function cannot be saved"),
    (lambda m: mmod.route_(m, mmod.RoutingConfig(blocks="all")), ValueError, "block 0 needs .* of a dense block"),
    (
        lambda m: mmod.route_(torch.nn.Linear(2, 2), mmod.RoutingConfig()),
        ValueError,
        "supported are models of open_clip",
    ),
    (lambda m: mmod.route_(m, 0.5), TypeError, r"config must be a RoutingConfig, got 0\.5, or the name of"),
    (lambda m: mmod.route_(m, Merge(r=8)), TypeError, r"got Merge\(r=8.*; a method goes to mmod\.apply_$"),
    (lambda m: mmod.route_(m, mmod.preset("gradual", start=6)), ValueError, "start=6 keeps all .* at least 7, got 6$"),
    (lambda m: mmod.preset("gradual", depth=1), ValueError, "start=1 keeps all blocks dense: depth must be at least 2"),
    (lambda m: mmod.unroute_(m), ValueError, r"nothing in this VisionTransformer is routed: .* first$"),
    (
        lambda _: mmod.unroute_(mmod.apply_(timm.create_model("test_vit"), Merge(r=8))),
        ValueError,
        r"is routed: .* first; mmod\.undo_ undoes its merge$",
    ),
    (lambda m: mmod.preset("gradul"), ValueError, "'gradul' is unknown; near ones: gradual"),
    (lambda m: mmod.set_capacity_(m, 0.5), ValueError, "nothing in this VisionTransformer is routed"),
    (
        lambda m: mmod.route_(m, "gradual", weight=0.5),
        ValueError,
        r"no part weight; .* mmod\.preset\('gradual', \.\.\.\)",
    ),
    (lambda m: mmod.route_(m, None), ValueError, "nothing to route: name a preset, such as 'gradual'"),
    (
        lambda m: mmod.route_(m, "tome"),
        ValueError,
        r"^preset 'tome' is unknown; .* mmod\.apply_\(model, mmod\.methods\.Merge.*: \[{kind: merge, r: 8}\]; valid",
    ),
    (lambda m: mmod.apply_(m, "merge"), ValueError, r"^preset 'merge' is unknown; ToMe, .* are methods: mmod\.apply_"),
    (lambda m: mmod.apply_(m, "Prune"), ValueError, r"^preset 'Prune' is unknown; .* are methods: mmod\.apply_"),
    (lambda m: mmod.route_(m, "evenly-spread"), ValueError, r"remove language\.tokens, or the preset that sets it"),
    (lambda m: mmod.score("duplicate", std=(58, 57, 57)), ValueError, r"std must be .* in \(0, 1\].*58"),
    (lambda m: mmod.flops(m, 70), ValueError, r"this VisionTransformer cannot take image \(3, 70, 70\): "),
    (lambda m: mmod.flops(make_own("einsum"), 40), ValueError, r"this OwnViT cannot take image \(3, 40, 40\): "),
    (lambda m: mmod.advise(m, None), TypeError, r"batches must be a list or a loader of batches, got a NoneType$"),
    (lambda m: mmod.search_plan(m, None, 0.5), TypeError, "a list or a loader of batches, got a NoneType$"),
    (lambda m: mmod.planning.attention_ranks(m, None), TypeError, "a list or a loader of batches, got a NoneType$"),
    (lambda m: mmod.attention_ranks(m, []), ValueError, "batches is empty"),
    (lambda m: mmod.attention_ranks(m, [], part="text"), ValueError, "one of image; got 'text'"),
    (lambda m: mmod.attention_ranks(m, ["a text"]), TypeError, "keyword arguments, or one tensor, got str"),
    (lambda m: mmod.plan_divergence(m, ["a text"], LINEAR), TypeError, "keyword arguments, or one tensor, got str"),
    (lambda m: mmod.advise(m, torch.rand(2, 3, 8, 8)), TypeError, r"got a Tensor alone: put it into a list"),
    (
        lambda m: mmod.advise(m, [(torch.rand(2, 3, 8, 8), torch.eye(2))]),
        TypeError,
        r"an index of a class for each of 2 images, got",
    ),
    (lambda m: mmod.advise(m, [torch.rand(2, 3, 9, 9)]), ValueError, r"cannot run on images of shape \(2, 3, 9, 9\): "),
    (lambda m: mmod.save_pretrained(m, "nowhere"), ValueError, "no method changed this VisionTransformer"),
    (lambda m: mmod.preset("mindskip", 4, select="topk"), ValueError, "needs select='threshold'"),
    (lambda m: mmod.preset("mindskip", 4, **PLAIN), ValueError, "without min_tokens"),
    (lambda m: mmod.preset("mindskip", 4, select=mmod.Threshold(0.5, min_tokens=1)), ValueError, "without min_tokens"),
    (lambda m: mmod.preset("mindskip", 4, context="all"), ValueError, "context='kept'"),
    (lambda m: mmod.preset("mindskip", 4, router={"per": "token"}), ValueError, "a score for the whole sequence"),
    (lambda m: mmod.preset("mindskip", 4, router={"per": "image"}), ValueError, "'token', 'sequence'"),
    (lambda m: mmod.preset("mindskip", 4, router="norm", losses={}), ValueError, "needs a score that learns"),
    (lambda m: ratio_decay(1), ValueError, "at least 2 blocks, got depth 1"),
    (lambda m: ratio_decay(4, floor=0.0), ValueError, "0 < floor <= ceiling <= 1, got 0.0"),
    (lambda m: ratio_decay(4, shape="sine"), ValueError, "shape must be one of 'cosine', 'linear', got 'sine'"),
    (lambda m: falling(5, steps=5), ValueError, r"steps must be an integer in \[1, 4\], got 5"),
    (lambda m: falling(6, start=3, steps=4), ValueError, r"steps must be an integer in \[1, 3\], got 4"),
    (lambda m: falling(6, start=6), ValueError, "start=6 keeps all blocks dense: depth must be at least 7, got 6"),
    (lambda m: falling(12, mean=0.4), ValueError, r"mean must be a number in \(0.4, 1\], got 0.4"),
    (lambda m: falling(12, mean=1.2), ValueError, "got 1.2"),
    (lambda m: mmod.flops(m, mmod.Prompt(4)), ValueError, "this VisionTransformer has no language part"),
    (lambda m: mmod.register_preset(3)(dict), TypeError, "passed to mmod.register_preset must be a text, got 3"),
    (lambda m: mmod.register_loss("loss")("f"), TypeError, "mmod.register_loss decorates .* got 'f'"),
    (lambda m: mmod.register_score("score")(Merge), TypeError, "derived from mmod.Score .*Merge"),
    (lambda m: mmod.methods.register_method("merge")(Prune), ValueError, "Merge already; choose another name"),
]


@pytest.mark.parametrize(("fields", "error", "message"), CONFIGS, ids=range(len(CONFIGS)))
def test_a_config_that_cannot_be_says_what_is_valid(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mmod.RoutingConfig(**fields)


@pytest.mark.parametrize(("call", "error", "message"), CALLS, ids=range(len(CALLS)))
def test_a_wrong_call_says_what_is_valid_and_changes_nothing(call: Call, error: type[Exception], message: str) -> None:
    model = timm.create_model("test_vit")
    classes, keys = [type(module) for module in model.modules()], list(model.state_dict())
    with pytest.raises(error, match=message):
        call(model)
    assert [type(module) for module in model.modules()] == classes
    assert list(model.state_dict()) == keys
    assert not hasattr(model, "mod_methods")


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: timm.create_model("test_vit"), "blocks"),
        (lambda: make_own("einsum"), "stages"),
        (lambda: make_own("norms behind, named blocks"), "stages"),
        (lambda: make_language("llama"), "model.layers"),
    ],
    ids=["timm", "own", "named", "decoder"],
)
def test_a_model_with_a_compiled_block_is_refused_with_its_name(
    make: Callable[[], torch.nn.Module], path: str, number: int
) -> None:
    model = make()
    blocks = model.get_submodule(path)
    blocks[number] = torch.compile(blocks[number])
    key = list(blocks._modules)[number]
    with pytest.raises(ValueError, match=rf"its {path}\.{key} is compiled\. Route or change a model first"):
        mmod.route_(model, mmod.RoutingConfig(router="norm"))
    assert not mmod.is_routed(model)


def test_a_compiled_head_stands_for_no_other_mistake() -> None:
    model = timm.create_model("test_vit")
    model.head = torch.nn.Sequential(torch.compile(model.head))
    with pytest.raises(ValueError, match=r"^blocks must be ascending numbers from 0 to 5, each once, got \[99\]"):
        mmod.route_(model, mmod.RoutingConfig(blocks=(99,)))


def test_wrong_calls_on_a_routed_model_leave_it_routed() -> None:
    model, images = mmod.route_(timm.create_model("test_vit"), mmod.RoutingConfig()).eval(), torch.randn(1, 3, 160, 160)
    by_threshold = mmod.route_(timm.create_model("test_vit"), mmod.RoutingConfig(select="threshold"))
    with torch.no_grad():
        expected = model(images)
        for call, error, message in [
            (
                lambda: mmod.route_(model, mmod.RoutingConfig()),
                ValueError,
                r"mmod\.undo_ first, or mmod\.set_capacity_",
            ),
            (lambda: mmod.route_(model, "tread"), ValueError, r"already routed; call mmod\.undo_ first"),
            (lambda: mmod.set_capacity_(model, -1), ValueError, r"in \[0, 1\], got -1"),
            (lambda: mmod.apply_(model, Merge()), ValueError, "changed by routing, which 'merge' cannot follow"),
            (lambda: mmod.set_capacity_(model, "0.5"), TypeError, "capacity must be a number in .*, got '0.5'"),
            (lambda: mmod.set_capacity_(model, [0.5]), ValueError, "3 blocks are routed, got 1 capacities"),
            (lambda: mmod.set_capacity_(model, {"blocks.0": 0.5}), ValueError, "routed are blocks.1, blocks.3"),
            (lambda: mmod.routing_config(model, "text"), ValueError, "'text' .* routed are image"),
            (
                lambda: mmod.flops(model, 160, kept=0.5),
                ValueError,
                "leave kept out: .* threshold.*Only a trace, kept=decis",
            ),
            (
                lambda: model.blocks[1](torch.randn(1, 4, 64), rope=torch.zeros(4, 8)),
                ValueError,
                "got 'rope', of which no trial showed .* known are attn_mask",
            ),
            (
                lambda: (model.blocks[0](torch.randn(2, 10, 64)), model.blocks[1](torch.randn(2, 12, 64))),
                ValueError,
                "the sequence changed between the two blocks",
            ),
            (lambda: mmod.set_capacity_(by_threshold, 0.5), ValueError, "reach a threshold, so no capacity applies"),
            (lambda: mmod.freeze_dense_(model), ValueError, "router 'attention' has no parameters"),
            (
                lambda: mmod.load_pretrained("nowhere"),
                FileNotFoundError,
                "there is no folder 'nowhere' here: name one that save_pretrained wrote",
            ),
        ]:
            with pytest.raises(error, match=message):
                call()
            assert torch.equal(model(images), expected)
    assert mmod.capacities(mmod.set_capacity_(model, np.float32(0.25))) == dict.fromkeys(
        mmod.routed_blocks(model), 0.25
    )


def save_language_model(folder: Path) -> None:
    config = mmod.RoutingConfig(router="norm", language={"tokens": "all"})  # type: ignore[arg-type]
    mmod.route_(make_language("llama"), language=config).save_pretrained(folder)  # type: ignore[operator]


SAVED: list[Callable[[Path], object]] = [
    lambda folder: mmod.save_pretrained(mmod.route_(timm.create_model("test_vit"), mmod.RoutingConfig()), folder),
    save_language_model,
    lambda folder: record_config(folder / "inside", {}, file="record.json", kind="a report"),
    lambda folder: save_picture(folder, "picture", new_figure(1, 1)),
]


@pytest.mark.parametrize("save", SAVED, ids=range(len(SAVED)))
def test_a_file_in_the_place_of_a_folder_is_named_and_kept(save: Callable[[Path], object], tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with pytest.raises(FileExistsError, match=r"taken' is a file, and a folder is needed there: name another folder"):
        save(taken)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
