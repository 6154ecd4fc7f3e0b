"""What every change promises on every kind of host, from nothing to do to undoing it.

A method, or a way to route, is a row of `CHANGES`; a kind of model stands in `LIBRARIES`. What a change computes is
compared with slow definitions in tests of its own.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod import RoutingConfig
from mmod.adapters import find_stacks
from mmod.adapters.tokens import declared, proofs_of
from mmod.lab import Experts, Recursions
from mmod.methods import Exit, Merge, Method, Prune, methods_of
from tests.kit import clip_zoo, zoo
from tests.kit.conditioned_zoo import CONDITIONED
from tests.kit.hosts import Host, of_clip, of_conditioned, of_joint, of_language, of_own, of_timm, of_vision
from tests.kit.own_vits import ROUTED
from tests.kit.vision_zoo import VISION_ZOO
from tests.kit.vlm_zoo import APART, JOINT, LANGUAGE

LEARNED = mmod.score("linear", init_std=0.3)
LATE: dict[str, Any] = {"blocks": (1, 2, 3), "capacity": 0.5}
# A change, and the same with nothing to do.
CHANGES: dict[str, tuple[RoutingConfig | Method, RoutingConfig | Method]] = {
    name: (config, config.replace(capacity=1.0, gate="identity"))
    for name, config in {
        "attention": RoutingConfig(router="attention", **LATE),
        "linear": RoutingConfig(router=LEARNED, **LATE),
        "change": RoutingConfig(router="change", **LATE),
        "merge": RoutingConfig(router="redundancy", skipped="merge", **LATE),
        "follow": RoutingConfig(router="attention", skipped="follow", **LATE),
        "context": RoutingConfig(router="norm", context="all", **LATE),
        "mlp": RoutingConfig(router="random", operator="mlp", **LATE),
        "attention alone": RoutingConfig(router="stride", operator="attention", **LATE),
        "gradual": mmod.preset("gradual"),
    }.items()
}
CHANGES |= {
    "threshold": (
        RoutingConfig(router=LEARNED, select=mmod.Threshold(0.5), blocks=(1, 2)),
        RoutingConfig(router=LEARNED, select=mmod.Threshold(0.0), gate="identity", blocks=(1, 2)),
    ),
    "whole images": (
        RoutingConfig(
            router=mmod.score("linear", per="sequence", init_std=0.3),
            select=mmod.Threshold(0.5),
            gate="step",
            blocks=(1, 3),
        ),
        RoutingConfig(
            router=mmod.score("linear", per="sequence"), select=mmod.Threshold(0.0), gate="step", blocks=(1, 3)
        ),
    ),
    "Prune": (Prune(0.6, (0, 2)), Prune(1.0, (0, 2))),
    "Prune by mean": (Prune(0.6, (1, 3), fuse=False, by="mean"), Prune(1.0, (1, 3), fuse=False, by="mean")),
    "Merge": (Merge(3), Merge(0)),
    "Exit": (Exit(0.2, (0, 2)), Exit(1.0, (0, 2))),
    "Experts": (Experts(experts=2, blocks=(1, 3)), Experts(experts=2, capacity=2.0)),
}
# Experts are copies at first, and the softmax of one depth is 1.
ALIKE = Experts(experts=2, choice="tokens", capacity=None, normalize=True)
ONCE = Recursions(recursions=1, choice="tokens", adds="change")
CHANGES |= {
    "Experts of tokens": (Experts(experts=2, choice="tokens", capacity=None, idle=1, blocks=(1, 3)), ALIKE),
    "Experts by score": (Experts(experts=3, choice="score", capacity=0.75, idle=1), ALIKE),
    "Experts by predictor": (Experts(experts=3, choice="predictor", capacity=1.5, idle=1), ALIKE),
    "Recursions": (Recursions(recursions=2), ONCE),
    "Recursions of tokens": (Recursions(recursions=2, choice="tokens", keys="first"), ONCE),
    "Recursions by three": (Recursions(recursions=3, adds="change"), ONCE),
    "Recursions by predictor": (Recursions(recursions=2, choice="predictor"), ONCE),
}
LIBRARIES: dict[str, dict[str, Host]] = {
    "timm": {name: of_timm(name) for name in zoo.ZOO},
    "open_clip": {name: of_clip(name) for name in clip_zoo.ZOO},
    "transformers": {name: of_vision(name) for name in VISION_ZOO},
    "own": {name: of_own(name) for name in ROUTED},
    "conditioned": {name: of_conditioned(name) for name in CONDITIONED},
    "language": {name: of_language(name) for name in LANGUAGE},
    # Of Qwen 3.5, tests/adapters route the layers that have attention; a picture of Molmo 2 is no sample of its batch.
    "joint": {name: of_joint(name) for name in (*JOINT, *APART) if name not in ("qwen3_5", "molmo2")},
}
# What decoders have no place for, in which no token joins another, and no text is known as a whole.
IN_TOWERS = ("merge", "follow", "gradual", "whole images", "Prune", "Prune by mean", "Merge", "Exit", "Experts")
IN_TOWERS += ("Recursions", "Recursions by three")
IN_DECODERS = ("Experts by score", "Experts by predictor", "Recursions by predictor")
EXPERTS = tuple(name for name in CHANGES if name.startswith("Experts"))
# Blocks of a cycle take the place of others.
RECURSIONS = tuple(name for name in CHANGES if name.startswith("Recursions"))
# What models of a library have no place for: most have no classes, and a part of two is named first.
UNFIT: dict[str, tuple[str, ...]] = {
    "language": IN_TOWERS,
    "joint": (*IN_TOWERS, *EXPERTS, *RECURSIONS),
    "kimi_k25": ("context",),
    # Models of four or six blocks, and of five.
    "timm": (*IN_DECODERS, "Recursions by three"),
    "open_clip": ("Exit", *EXPERTS, *RECURSIONS),
    "transformers": ("Exit", "context", *IN_DECODERS, "Recursions", "Recursions of tokens"),
    "own": ("Exit", "context", *IN_DECODERS, "Recursions", "Recursions of tokens"),
    "conditioned": ("Exit", "context", *IN_DECODERS, "Recursions", "Recursions of tokens"),
    # Branches that are parallel, or whose residual sums stand in the block's own forward or inside the MLP.
    "vit_small_patch16_18x2_224": ("mlp", "attention alone", "gradual", "Prune", "Prune by mean", "Merge"),
    "vit_base_patch16_xp_224": ("mlp", "attention alone", "gradual", "Prune", "Prune by mean", "Merge", *EXPERTS),
    "vit_base_patch16_rpn_224": ("mlp", "attention alone"),
    "custom-blocks": ("attention alone",),
    "wan": ("attention alone",),
    "wan, times of tokens": ("attention alone",),
    # Keys of several maps.
    "vit_dlittle_patch16_reg1_gap_256": ("Prune", "Prune by mean", "Merge"),
    # A bias for each pair of positions.
    "beit_base_patch16_224": ("Prune", "Prune by mean", "Merge"),
    "parallel branches": ("gradual", "Prune", "Prune by mean", "Merge"),
    "rotary video": ("gradual", "mlp", "attention alone", "Prune", "Prune by mean", "Merge"),
    # Some of its tokens may be padding.
    "naflexvit_base_patch16_gap": (*EXPERTS, *RECURSIONS),
    "naflexvit_base_patch16_par_gap": (*EXPERTS, *RECURSIONS),
    # Layers or rotary positions that differ from block to block.
    **dict.fromkeys(("gemma2", "gemma3"), RECURSIONS),
    "vit_small_patch16_rope_mixed_224": RECURSIONS,
    "videomae": ("mlp", *EXPERTS),
    "yolos": ("mlp", *EXPERTS),
}
# Eager attention in fp32, and products of experts that take no float64.
SINGLE = ("gemma2", "gemma4", "gemma4_unified", "kimi_k25", "qwen3_vl_moe")

# Parts of the names of weights that are no router's.
ADDED = {"Exit": (".exit.",), **dict.fromkeys(EXPERTS, (".others.", ".router.", ".predictors."))}


def fits(library: str, name: str, change: str) -> bool:
    return change not in UNFIT.get(library, ()) and change not in UNFIT.get(name, ())


def cases(few: int = 1, unfit: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
    """Return each host with a change that fits it, of libraries with fewer hosts than changes with `few`.

    Changes that were drawn least in the library come first.
    """
    chosen = []
    for library, hosts in LIBRARIES.items():
        times = few if len(hosts) < 10 else 1
        drawn: Counter[str] = Counter()
        for name in hosts:
            fitting = [change for change in CHANGES if change not in unfit and fits(library, name, change)]
            turn = sorted(fitting, key=drawn.__getitem__)[:times]
            drawn.update(turn)
            chosen += [(library, name, change) for change in turn]
    return chosen


# What a cycle must hand each recursion for the rows that are left: rotary positions, a bias of pairs; registers stay.
POSITIONED = ("eva02_tiny_patch14_224", "vit_small_patch16_dinov3", "beit_base_patch16_224")
IN_CYCLES = {
    "Recursions": (*POSITIONED, "vit_small_patch14_reg4_dinov2"),
    "Recursions of tokens": (*POSITIONED, "vit_base_patch16_rpn_224"),
}
PROMISED = cases(few=2)
PROMISED += [("timm", name, change) for change, names in IN_CYCLES.items() for name in names]


def test_each_change_is_drawn_in_each_library_that_it_fits() -> None:
    drawn = {(library, change) for library, _, change in PROMISED}
    for library, hosts in LIBRARIES.items():
        for change in CHANGES:
            is_drawn = (library, change) in drawn
            assert is_drawn == any(fits(library, name, change) for name in hosts), (library, change)


@torch.no_grad()
def run(host: Host, model: nn.Module, samples: Sequence[Any]) -> Tensor:
    return torch.cat([output.flatten() for output in host.outputs(model, samples)])


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 2e-5 if expected.dtype == torch.float32 else 1e-6
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


class Untouched:
    """A dense model and all that must come back when a change is undone."""

    def __init__(self, model: nn.Module) -> None:
        self.state = {key: value.clone() for key, value in model.state_dict().items()}
        self.classes = [type(module) for module in model.modules()]
        self.attributes = [set(vars(module)) for module in model.modules()]

    def check(self, model: nn.Module) -> None:
        assert [type(module) for module in model.modules()] == self.classes
        assert [set(vars(module)) for module in model.modules()] == self.attributes
        state = model.state_dict()
        assert list(state) == list(self.state)
        assert all(torch.equal(value, self.state[key]) for key, value in state.items())


@contextmanager
def watched(blocks: Sequence[nn.Module]) -> Iterator[set[int]]:
    """Collect the numbers of tokens that whoever looks at blocks finds."""
    seen: set[int] = set()

    def look(_: nn.Module, args: Any, output: Any) -> None:
        seen.add((output[0] if isinstance(output, tuple) else output).shape[1])

    handles = [block.register_forward_hook(look) for block in blocks]
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(("library", "name", "change"), PROMISED)
def test_a_change_keeps_its_promises(
    library: str, name: str, change: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    host = LIBRARIES[library][name]
    model: Any = host.make()
    if name not in SINGLE:
        model = model.double()
    samples = host.samples(2)
    dense = run(host, model, samples)
    with declared(model, host.tokens):
        blocks = find_stacks(model)[next(iter(host.parts))].blocks
    before = Untouched(model)
    method, idle = CHANGES[change]
    host.apply(model, idle)
    close(run(host, model, samples), dense)
    mmod.undo_(model)
    before.check(model)
    host.apply(model, method)
    if change not in RECURSIONS:
        loading = model.load_state_dict(before.state, strict=False)
        assert not loading.unexpected_keys
        parts = ADDED.get(change, (".router.",))
        assert all(any(part in key for part in parts) for key in loading.missing_keys)
        assert change != "attention" or not loading.missing_keys
    together = run(host, model, samples)
    # Images may leave behind the last exit alone, and all of them may run.
    assert change in ("Exit", "whole images") or not torch.allclose(together, dense, rtol=0, atol=1e-3)
    close(torch.cat([run(host, model, [sample]) for sample in samples]), together)
    # In inference, and where it learns.
    with watched(blocks[:-1]) as seen:
        close(run(host, model, samples), together)
        close(torch.cat([output.detach().flatten() for output in host.outputs(model, samples)]), together)
    # A head that pools what is left reads the rows of the last block, and in a cycle tokens run alone.
    assert change in RECURSIONS or len(seen) == 1
    assert torch.equal(run(host, copy.deepcopy(model), samples), together)
    if library in ("timm", "own"):
        assert torch.equal(run(host, pickle.loads(pickle.dumps(model)), samples), together)
    loaded = host.reload(model, tmp_path)
    assert proofs_of(loaded) == proofs_of(model)
    assert [kind.kind for kind in methods_of(loaded)] == [kind.kind for kind in methods_of(model)]
    assert not isinstance(method, Method) or methods_of(loaded) == (method,)
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())
    close(run(host, loaded, samples), together)
    mmod.undo_(model)
    before.check(model)
    assert torch.equal(run(host, model, samples), dense)
    undone = run(host, mmod.undo_(loaded), samples)
    assert undone.isfinite().all()
    # Blocks that a cycle replaced are not saved.
    if change not in RECURSIONS:
        close(undone, dense)
    # Class tokens and registers are not taken for prompts.
    assert not any("learned prompts" in str(warning.message) for warning in recwarn)


def recompute_(model: Any) -> None:
    """Let a model of any library recompute its blocks in the backward pass."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    else:
        model.set_grad_checkpointing()


LEARNING = cases(unfit=("whole images", *EXPERTS, *RECURSIONS))
LEARNING += [("timm", "vit_tiny_patch16_224", "whole images"), ("timm", "eva02_tiny_patch14_224", "Experts")]


def recomputes(library: str, name: str, change: str) -> bool:
    """Return whether a model can recompute its blocks, and whether the rows of a change stay.

    open_clip's custom blocks fail in it when they are dense; joint models recompute the layers of language models.
    Yolos adds positions between its layers, so a span's blocks are recomputed on new tensors.
    """
    unable = ("custom-blocks", "own dit", "own video", "rotary video", "yolos")
    leaves = ("Exit", "Prune", "Prune by mean", "Merge")
    return library not in ("own", "joint") and name not in unable and change not in leaves


@pytest.mark.parametrize(("library", "name", "change"), LEARNING)
def test_every_weight_learns_that_did_in_the_dense_model_and_the_same_recomputed(
    library: str, name: str, change: str
) -> None:
    host = LIBRARIES[library][name]
    model: Any = (host.make().double() if library == "timm" else host.make()).train()
    samples = host.samples(3)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        torch.stack([output.square().mean() for output in host.outputs(model, samples)]).sum().backward()
        return {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}

    expected = {key for key, gradient in gradients().items() if gradient.any()}
    # Whatever a first call has drawn: a router that keeps nothing by its threshold learns nothing.
    torch.manual_seed(0)
    host.apply(model, CHANGES[change][0])
    kept = gradients()
    # Experts that no token chose learn nothing.
    routers = {key for key, _ in model.named_parameters() if ".router." in key}
    learning = {key for key, gradient in kept.items() if gradient.any()}
    assert change in EXPERTS or expected | routers <= learning
    if recomputes(library, name, change):
        recompute_(model)
        again = gradients()
        assert again.keys() == kept.keys()
        for key, gradient in kept.items():
            torch.testing.assert_close(again[key], gradient, rtol=1e-4, atol=1e-6, msg=key)


SECOND: dict[str, Any] = {"blocks": (1,), "capacity": 0.5}
TRACED: list[tuple[str, str, RoutingConfig | Method]] = [
    ("conditioned", "own video", RoutingConfig(router=LEARNED, **SECOND)),
    ("transformers", "dinov3", RoutingConfig(router="attention", **SECOND)),
    ("timm", "vit_tiny_patch16_224", mmod.preset("gradual", blocks=(0, 1), capacity=(0.8, 0.4))),
    ("timm", "vit_tiny_patch16_224", Prune(0.6, (1,), fuse=False, by="mean")),
    ("timm", "vit_tiny_patch16_224", Merge(3)),
    ("own", "layers of torch", Merge(3)),
    ("own", "layers of torch", RoutingConfig(router="attention")),
]


@pytest.mark.parametrize(("library", "name", "change"), TRACED)
@torch.no_grad()
def test_a_changed_model_is_one_graph(library: str, name: str, change: RoutingConfig | Method) -> None:
    torch._dynamo.reset()
    host = LIBRARIES[library][name]
    model: Any = host.make()
    with declared(model, host.tokens):
        path = find_stacks(model)[next(iter(host.parts))].names[0].rpartition(".")[0]
    # What is traced grows with the depth.
    del model.get_submodule(path)[2:]
    samples = host.samples(2)
    expected = run(host, host.apply(model, change), samples)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(run(host, compiled, samples), expected)
