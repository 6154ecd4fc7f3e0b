"""Models that mmod knows by structure alone: routed after a trial of their blocks, or refused by a property."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

import mmod
from mmod.adapters.base import Proof
from mmod.adapters.probe import light_copy
from mmod.adapters.tokens import proofs_of
from mmod.blocks.rows import Rows
from mmod.cli import main
from mmod.plain import from_plain
from tests.kit import proven_worker as worker
from tests.kit.clip_zoo import make_clip
from tests.kit.counting import flop_counter
from tests.kit.own_vits import DIM, REFUSED, ROUTED, Einsum, Mlp, OwnBlock, OwnViT, make_own, make_own_images
from tests.kit.processes import run_processes
from tests.kit.vision_zoo import VISION_ZOO, make_pixels, make_vision, output_of, table
from tests.kit.zoo import make_images, make_model

ALL = [*VISION_ZOO, *ROUTED]


def make(name: str) -> Any:
    return make_own(name) if name in ROUTED else make_vision(name)


def inputs_of(name: str, batch: int) -> dict[str, Any]:
    return {"images": make_own_images(batch)} if name in ROUTED else make_pixels(name, batch)


@torch.no_grad()
def run(model: Any, inputs: dict[str, Any]) -> Tensor:
    outputs = model(**inputs)
    return outputs.flatten(1) if isinstance(outputs, Tensor) else output_of(outputs)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(mmod.adapters.find_stack(model).blocks)


@pytest.mark.parametrize("name", ["vit", "dinov3", "mlcd", "videomae", "vjepa2", "own softmax", "sdpa, registers"])
def test_kept_tokens_run_as_if_the_others_were_not_there(name: str) -> None:
    """A slow definition: a block's copy on each image's kept rows alone."""
    model = make(name)
    inputs = inputs_of(name, 2)
    seen: dict[str, Any] = {}
    block = blocks_of(model)[2]

    def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen["x"], *seen["args"] = args
        seen["kwargs"] = kwargs
        seen["y"] = output[0] if isinstance(output, tuple) else output

    dense = copy.deepcopy(block)
    mmod.route_(model, mmod.RoutingConfig(router="norm", capacity=0.5, blocks=(2,)))
    with mmod.trace(model) as decisions:
        handle = block.register_forward_hook(keep, with_kwargs=True)
        run(model, inputs)
        handle.remove()
    (routing,) = decisions.values()
    call = block.mod_state.call
    for image, index_K in enumerate(routing.kept.index_BK):
        one = slice(image, image + 1)
        arguments = call.bind(tuple(seen["args"]), seen["kwargs"])
        narrowed = call.narrow_rows(arguments, index_K.unsqueeze(0))
        if name == "mlcd":
            narrowed["position_embeddings"] = tuple(rows[0] for rows in narrowed["position_embeddings"])
        with torch.no_grad():
            output = dense(seen["x"][one, index_K], **narrowed)
        expected = output[0] if isinstance(output, tuple) else output
        torch.testing.assert_close(seen["y"][one, index_K], expected, atol=1e-5, rtol=1e-4)
        skipped = torch.ones(seen["x"].shape[1], dtype=torch.bool).index_fill(0, index_K, False)
        assert torch.equal(seen["y"][image, skipped], seen["x"][image, skipped])


class _Settings(dict[str, Any]):
    """A mapping whose keys are attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


@pytest.mark.parametrize("refused", [False, True])
def test_a_trial_leaves_the_model_as_it_was(refused: bool) -> None:
    """With what its copy might share: empty containers, parametrized weights, and what a forward changes in place."""
    model = make_own("sdpa, registers").train()
    model.stages[2].eval()
    seen = torch.zeros(1)
    for block in model.stages:
        block.drop_path = nn.Sequential()
        block.settings = _Settings(steps=[0])
    nn.utils.parametrizations.weight_norm(next(one for one in model.stages[1].modules() if isinstance(one, nn.Linear)))
    model.stages[0].seen = seen

    def count(module: nn.Module, args: Any) -> None:
        module.stages[0].seen += 1
        module.stages[1].settings.steps[0] += 1

    # Not a hook, which the copy has none of.
    forward = type(model).forward
    model.__class__ = type(
        "Counting", (type(model),), {"forward": lambda self, images: (count(self, images), forward(self, images))[1]}
    )
    calls: list[object] = []
    model.stages[1].register_forward_hook(lambda *_: calls.append(1))
    before = {name: (type(one), one.training, set(vars(one))) for name, one in model.named_modules()}
    state = torch.random.get_rng_state()
    if refused:
        with pytest.raises(ValueError, match="blocks"):
            mmod.route_(model, mmod.RoutingConfig(router="stride", blocks=(9,)))
    else:
        mmod.undo_(mmod.route_(model, mmod.RoutingConfig(router="stride", blocks=(2,))))
    assert {name: (type(one), one.training, set(vars(one))) for name, one in model.named_modules()} == before
    assert float(seen) == model.stages[1].settings.steps[0] == 0
    assert not calls
    # Scores that learn are drawn where blocks are routed, and these have none.
    assert torch.equal(torch.random.get_rng_state(), state)
    run(model, {"images": make_own_images(2)})
    assert float(seen) == 1


@pytest.mark.parametrize("name", [name for name in ALL if name != "parallel branches"])
def test_the_halves_of_a_block_are_the_block(name: str, recwarn: pytest.WarningsRecorder) -> None:
    model = make(name)
    inputs = inputs_of(name, 2)
    expected = run(model, inputs)
    # With gradients, layers of torch run no kernels that the counter does not know.
    with flop_counter() as dense:
        model(**inputs)
    mmod.route_(model, mmod.preset("gradual", router="stride", capacity=1.0))
    actual = run(model, inputs)
    with flop_counter() as halved:
        model(**inputs)
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
    told = [str(warning.message) for warning in recwarn if "runs twice" in str(warning.message)]
    assert len(told) == (name == "attention in the block")
    # The halves cost what the block does, unless the attention runs in both.
    assert (halved.get_total_flops() == dense.get_total_flops()) == (not told)


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (mmod.preset("gradual"), 1),
        (mmod.preset("gradual", skipped={"before": "block"}), 0),
        (mmod.preset("a-mod"), 0),
        (mmod.methods.Merge(r=4), 1),
        (mmod.methods.Prune(keep=0.5, blocks=(1,)), 0),
    ],
)
def test_attention_that_runs_in_both_halves_is_told_once(
    method: Any, told: int, recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    name = "attention in the block"
    mmod.save_pretrained(mmod.apply_(make(name), method), tmp_path)
    mmod.load_pretrained(tmp_path, model=make(name))
    assert sum("compute their attention in their own forward" in str(warning.message) for warning in recwarn) == told


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("test_vit", mmod.preset("mod", capacity=0)),
        ("sdpa, registers", mmod.preset("mod", capacity=0)),
        ("test_vit", mmod.RoutingConfig(capacity=0, blocks=(1, 2), operator=("mlp", "block"))),
    ],
)
def test_one_capacity_of_zero_is_refused_where_whole_blocks_see_no_patch(
    name: str, config: mmod.RoutingConfig, tmp_path: Path
) -> None:
    def make_dense() -> Any:
        return make(name) if name in ROUTED else make_model(name)

    model = make_dense()
    before = {key: type(module) for key, module in model.named_modules()}
    for change in (mmod.route_, mmod.apply_):
        with pytest.raises(ValueError, match=r"no token but those .* kept: capacity must be in \(0, 1\]"):
            change(model, config)
        assert {key: type(module) for key, module in model.named_modules()} == before
    # A capacity that is set later is meant, and so is one of each block; both load again.
    mmod.set_capacity_(mmod.route_(model, config.replace(capacity=0.5)), 0)
    zeros = tuple(mmod.capacities(model).values())
    for method in (mmod.methods.Route({"image": config}, zeros), config.replace(capacity=zeros)):
        changed = mmod.apply_(make_dense(), method)
        mmod.save_pretrained(changed, tmp_path, overwrite=True)
        loaded = mmod.load_pretrained(tmp_path, **({"model": make_dense()} if name in ROUTED else {}))
        assert mmod.capacities(loaded) == mmod.capacities(model)
        assert set(zeros) == {0.0}


@pytest.mark.parametrize("changes", [{"context": "all"}, {"operator": "mlp"}])
def test_a_capacity_of_zero_works_where_blocks_see_the_patches(changes: dict[str, str]) -> None:
    model = mmod.route_(make_model("test_vit"), mmod.RoutingConfig(router="stride", capacity=0, **changes))
    assert set(mmod.capacities(model).values()) == {0.0}


@pytest.mark.parametrize("name", ["vit", "dinov2", "clip", "dinov3", "siglip"])
def test_collected_hidden_states_are_full_grids_and_change_nothing(name: str) -> None:
    model = mmod.route_(make(name), "gradual")
    inputs = inputs_of(name, 2)
    before = run(model, inputs)
    with torch.no_grad():
        every = model(**inputs, output_hidden_states=True)
        again = model(**inputs, output_hidden_states=True)
        # transformers leaves its hooks on the layers, and now collects one state alone.
        one = model(**inputs, output_hidden_states=[3])
    tokens = every.hidden_states[0].shape[1]
    assert [state.shape[1] for state in every.hidden_states] == [tokens] * 6
    assert all(torch.equal(a, b) for a, b in zip(every.hidden_states, again.hidden_states))
    torch.testing.assert_close(one.hidden_states[3], every.hidden_states[3], atol=1e-5, rtol=1e-4)
    for outputs in (every, one):
        torch.testing.assert_close(output_of(outputs), before, atol=1e-5, rtol=1e-4)
    assert torch.equal(run(model, inputs), before)


def test_blocks_of_transformers_pass_on_rows_where_nothing_reads_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write_back = Rows.write_back

    def counted(self: Rows, y_BKD: Tensor) -> Tensor:
        written.append(y_BKD.shape[1])
        return write_back(self, y_BKD)

    monkeypatch.setattr(Rows, "write_back", counted)
    model = mmod.route_(make("clip"), "gradual")
    inputs = inputs_of("clip", 2)
    counts = []
    for collected in (None, [2], True, None):
        written.clear()
        with torch.no_grad():
            model(**inputs, **({} if collected is None else {"output_hidden_states": collected}))
        counts.append(len(written))
    nothing, one, every, again = counts
    # Behind the last of four blocks alone; also behind one block that is read, before which its own attention writes.
    assert nothing == again == 1
    assert nothing < one < every


@pytest.mark.parametrize("name", ["norms behind, named blocks", "halves in sequence"])
def test_counted_blocks_are_named_as_in_the_model(name: str) -> None:
    model = mmod.route_(make(name), mmod.RoutingConfig(router="attention", capacity=0.5, blocks=[1, 3]))
    rows = mmod.flops(model, 64).blocks
    assert [row.name for row in rows] == [f"stages.{key}" for key, _ in model.stages.named_children()]
    assert [row.kept < row.tokens for row in rows] == [False, True, False, True, False]


def test_loading_reads_the_proof_instead_of_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mmod.route_(make("vit"), mmod.RoutingConfig(blocks=(2,))).save_pretrained(tmp_path)
    monkeypatch.setattr("mmod.adapters.tokens.read_inputs", None)
    assert list(mmod.routed_blocks(mmod.load_pretrained(tmp_path))) == ["vit.layers.2"]


def test_a_model_of_ones_own_class_is_saved_and_put_on_a_dense_one(tmp_path: Path) -> None:
    model = mmod.route_(make("einsum"), mmod.RoutingConfig(router="linear", capacity=0.5, blocks=(1, 3)))
    inputs = inputs_of("einsum", 2)
    mmod.save_pretrained(model, tmp_path)
    torch.manual_seed(7)
    dense: Any = ROUTED["einsum"]()
    # The same code under another name, as a class of a script that another script imports.
    dense.__class__ = type("Renamed", (OwnViT,), {})
    loaded = mmod.load_pretrained(tmp_path, model=dense)
    assert torch.equal(run(loaded, inputs), run(model, inputs))


def test_a_folder_of_ones_own_class_says_what_it_needs(tmp_path: Path) -> None:
    model = mmod.route_(make("einsum"), mmod.RoutingConfig(blocks=(1,)))
    folder = tmp_path / "model"
    mmod.save_pretrained(model, folder)
    with pytest.raises(ValueError, match=r"^the folder .*OwnViT, which mmod cannot build: .* model=dense\)$"):
        mmod.load_pretrained(folder)
    with pytest.raises(SystemExit, match=r"^error: the folder .*OwnViT, which mmod cannot build: .* model=dense\)$"):
        main(["evaluate", str(folder)])
    with pytest.raises(FileNotFoundError, match=f"it has no mmod.json. '{folder}' may be meant"):
        mmod.load_pretrained(tmp_path)
    saved = r"do not fit: saved from tests\.kit\.own_vits\.OwnViT"
    with pytest.raises(ValueError, match=f"{saved} with 5 blocks in 'stages', this Linear has 0 there"):
        mmod.load_pretrained(folder, model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match=f"{saved} with 5 blocks in 'stages', this OwnViT has 4 there"):
        mmod.load_pretrained(folder, model=OwnViT(lambda _: OwnBlock(), depth=4))
    other = OwnViT(lambda _: OwnBlock())
    other.tail = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=rf"{saved} without tail\.weight, tail\.bias, which this OwnViT has"):
        mmod.load_pretrained(folder, model=other)
    narrow = OwnViT(lambda _: OwnBlock(Einsum))
    narrow.classes = nn.Linear(DIM, 3)
    classes = [type(module) for module in narrow.modules()]
    with pytest.raises(ValueError, match=r"classes.bias has shape \(10,\), the model's is \(3,\)"):
        mmod.load_pretrained(folder, model=narrow)
    assert [type(module) for module in narrow.modules()] == classes
    del narrow.patchify
    with pytest.raises(ValueError, match="this OwnViT has no module 'patchify', which the model that was saved had"):
        mmod.load_pretrained(folder, model=narrow)


@pytest.mark.parametrize(
    ("field", "value"), [("prefix", "1"), ("rows", [1]), ("fused", 1), ("blocks", None), ("dim", True)]
)
def test_a_proof_of_a_file_is_checked(field: str, value: object) -> None:
    model = mmod.route_(make("vit"), mmod.RoutingConfig(blocks=(1,)))
    (proof,) = proofs_of(model).values()
    assert dataclasses.asdict(from_plain(Proof, json.loads(json.dumps(proof)))) == proof
    with pytest.raises(TypeError, match=field):
        from_plain(Proof, {**proof, field: value})
    with pytest.raises(ValueError, match="required: dim"):
        from_plain(Proof, {key: item for key, item in proof.items() if key != "dim"})


@pytest.mark.parametrize("name", REFUSED)
def test_a_stack_that_cannot_be_routed_is_refused_by_its_property(name: str) -> None:
    make_model, message = REFUSED[name]
    torch.manual_seed(0)
    model = make_model()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        mmod.route_(model, mmod.RoutingConfig())
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert model.training
    assert not mmod.is_routed(model)


class AllInRows(OwnViT):
    """A model whose blocks get the tokens of all images as rows."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2).flatten(0, 1)
        for stage in self.stages:
            x = stage(x)
        return x


def test_rows_of_all_images_are_no_map() -> None:
    with pytest.raises(
        ValueError, match=r"gets a tensor \(1568, 32\) for two images: .* \(images, tokens, channels\)$"
    ):
        mmod.route_(AllInRows(lambda _: OwnBlock()), mmod.RoutingConfig())


def test_a_light_copy_converts_no_weight_inside_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("sdpa, registers").bfloat16()
    converted: list[Tensor] = []

    def noted(tensor: Tensor) -> Tensor:
        converted.append(tensor)
        return tensor.float()

    monkeypatch.setattr("mmod.adapters.probe.runnable", noted)
    clone = light_copy(model, model.stages)
    inside = {id(weight) for weight in model.stages.parameters()}
    assert {id(tensor) for tensor in converted} == {id(weight) for weight in model.parameters()} - inside
    assert {weight.dtype for weight in clone.stages.parameters()} == {torch.bfloat16}
    assert clone.patchify.weight.dtype == torch.float32


def test_blocks_of_weights_that_begin_at_zero_are_tried_with_others() -> None:
    """LayerScale of zeros would hide everything that a block does."""
    make_model, message = REFUSED["windows"]
    model = make_model()
    with torch.no_grad():
        for block in model.stages:
            block.scale.zero_()
    with pytest.raises(ValueError, match=message):
        mmod.route_(model, mmod.RoutingConfig())


class TwoLists(OwnViT):
    """A model with a second, smaller list, and images of a shape that nothing tells."""

    def __init__(self) -> None:
        super().__init__(lambda _: OwnBlock())
        self.heads = nn.ModuleList([Mlp() for _ in range(2)])

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != (40, 72):
            raise ValueError(f"images of {tuple(images.shape[-2:])} pixels do not fit")
        x = self.patchify(images).flatten(2).transpose(1, 2)
        for stage in self.stages:
            x = stage(x)
        return x


def test_a_user_says_what_structure_does_not() -> None:
    model = TwoLists().eval()
    with pytest.raises(ValueError, match=r"no input reached the first of its stages.*mmod.Tokens\('stages', example="):
        mmod.route_(model, mmod.RoutingConfig())
    images = torch.randn(2, 3, 40, 72)
    config = mmod.RoutingConfig(router="norm", capacity=0.5, blocks=(1,))
    named = [(mmod.Tokens("stages", 9, example), 9) for example in (images, images.clone())]
    # A proof is kept while its blocks stay as they are, also where the next example is another tensor.
    for tokens, prefix in ((mmod.Tokens(example=images), 0), *named):
        mmod.route_(model, config, tokens=tokens)
        with torch.no_grad(), mmod.trace(model) as decisions:
            model(images)
        (routing,) = decisions.values()
        assert routing.kept.index_BK.shape == (2, 22)
        assert routing.kept.index_BK[:, :prefix].tolist() == [list(range(prefix))] * 2
        mmod.undo_(model)
    for known, library in ((make("vit"), "transformers"), (make_clip("ViT-B-32"), "open_clip")):
        with pytest.raises(ValueError, match=f"is one of {library}, whose blocks are found without it; leave it out"):
            mmod.route_(known, mmod.RoutingConfig(), tokens=mmod.Tokens("blocks"))
        assert not mmod.is_routed(known)
    for prefix in (45, -1):
        with pytest.raises(ValueError, match=rf"of the 45 tokens .* integer in \[0, 44\], got {prefix}"):
            mmod.route_(model, mmod.RoutingConfig(), tokens=mmod.Tokens("stages", prefix, images))
    with pytest.raises(TypeError, match=r"tokens must be a mmod\.Tokens, got 'stages'"):
        mmod.route_(model, mmod.RoutingConfig(), tokens="stages")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["dinov3", "sdpa, registers"])
@torch.no_grad()
def test_proven_models_are_exported(name: str) -> None:
    model = make(name)
    # What is traced grows with the depth.
    del model.get_submodule(mmod.adapters.find_stack(model).names[0].rpartition(".")[0])[2:]
    mmod.route_(model, mmod.RoutingConfig(router="linear", capacity=0.5, blocks=(1,)))
    inputs = inputs_of(name, 2)
    exported = torch.export.export(model, (), inputs).module()
    torch.testing.assert_close(run(exported, inputs), run(model, inputs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("routed_first", [True, False])
@pytest.mark.parametrize("name", ["dinov2", "siglip"])
def test_lora_goes_before_and_after_routing(name: str, routed_first: bool) -> None:
    model = make(name)
    inputs = inputs_of(name, 2)
    config = mmod.RoutingConfig(router="norm", capacity=0.5, blocks=(1, 2, 3))
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "fc1"], init_lora_weights=False)
    if routed_first:
        expected = run(mmod.route_(copy.deepcopy(model), config), inputs)
        adapted = peft.get_peft_model(mmod.route_(model, config), options)
    else:
        expected = run(mmod.route_(copy.deepcopy(model), config), inputs)
        adapted = mmod.route_(peft.get_peft_model(model, options), config)
    assert not torch.allclose(run(adapted, inputs), expected, atol=1e-4)
    with adapted.disable_adapter():
        torch.testing.assert_close(run(adapted, inputs), expected, atol=1e-6, rtol=1e-5)
    output_of(adapted(**inputs)).square().mean().backward()
    assert all(weight.grad is not None for key, weight in adapted.named_parameters() if "lora" in key and ".1." in key)


@pytest.mark.parametrize("name", ["vit", "dinov3", "mlcd", "videomae", "own softmax"])
def test_autocast_and_half_precision_at_capacity_1_are_those_of_the_dense_model(name: str) -> None:
    model = make(name)
    inputs = inputs_of(name, 2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(model, inputs)
    mmod.route_(model, mmod.RoutingConfig(router="attention", capacity=1.0, blocks=(1, 2, 3)))
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(model, inputs)
    torch.testing.assert_close(actual, expected, atol=0.05 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["vit", "clip", "dinov3"])
def test_implementations_of_attention_give_the_same_and_can_change(name: str, attention: str) -> None:
    model = make(name)
    model.set_attn_implementation(attention)
    inputs = inputs_of(name, 2)
    outputs = []
    for config in (mmod.preset("gradual"), mmod.RoutingConfig(router="norm", select=mmod.Threshold(0.9), blocks=(2,))):
        mmod.route_(model, config)
        outputs.append(run(model, inputs))
        model.set_attn_implementation("eager" if attention == "sdpa" else "sdpa")
        torch.testing.assert_close(run(model, inputs), outputs[-1], atol=1e-5, rtol=1e-4)
        mmod.undo_(model)
        model.set_attn_implementation(attention)


def test_an_attention_without_masks_says_so_where_a_mask_is_needed() -> None:
    model = mmod.route_(make("vit"), "gradual")
    call = mmod.routed_blocks(model)["vit.layers.2"].mod_state.call
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"'flash_attention_2' takes no bias of keys.*attn_implementation='sdpa'"):
        call.with_mask({}, torch.zeros(1, 1, 1, 4))
    assert call.with_mask({}, None) == {}
    model.config._attn_implementation = "flex_attention"
    mask = create_block_mask(lambda b, h, q, k: q >= 0, None, None, 4, 4, device="cpu")
    with pytest.raises(ValueError, match=r"'flex_attention' got a BlockMask as .* narrowed to kept.*='sdpa'"):
        call.bind((), {call.mask: mask})
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=r"got a bool as .*: pass a tensor or None, "):
        call.bind((), {call.mask: False})


def test_the_page_shows_what_the_trials_show() -> None:
    page = (Path(__file__).parents[2] / "docs/your_model.md").read_text()
    assert f"tests.kit.vision_zoo -->\n{table()}\n<!-- end" in page


def test_what_a_user_says_of_a_known_model_of_timm_counts() -> None:
    config = mmod.RoutingConfig(router="norm", capacity=0.5, blocks=(1,))
    with pytest.raises(ValueError, match="'blcks' is no ModuleList"):
        mmod.route_(make_model("test_vit"), config, tokens=mmod.Tokens("blcks"))
    model = mmod.route_(make_model("test_vit"), config, tokens=mmod.Tokens("blocks", prefix=5))
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(make_images("test_vit", 2))
    assert decisions["blocks.1"].kept.index_BK[:, :5].tolist() == [[0, 1, 2, 3, 4]] * 2
    mmod.set_capacity_(model, 0.25)
    assert list(mmod.capacities(model)) == ["blocks.1"]
    mmod.undo_(model)
    assert not proofs_of(model)


def test_a_split_model_trains_as_a_whole_one(tmp_path: Path) -> None:
    assert run_processes(worker.train_split, tmp_path, world=2) == [0, 0]
    for case in worker.CASES:
        actual = torch.load(tmp_path / f"{case}.pt")
        model = worker.routed(case)
        torch.testing.assert_close(actual["answer"], worker.answer_of(model, case))
        losses = [worker.loss_of(model, case, rank) for rank in range(2)]
        torch.testing.assert_close(actual["losses"], [loss.detach() for loss in losses])
        (sum(losses) / 2).backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        assert actual["gradients"].keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(actual["gradients"][name], gradient, rtol=1e-4, atol=1e-6)
