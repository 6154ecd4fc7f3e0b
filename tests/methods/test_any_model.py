"""Methods on models that mmod knows by structure alone, and on open_clip's own blocks."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import mmod
from mmod.adapters import find_stack
from mmod.blocks import parameters_of
from mmod.lab import Recursions
from mmod.methods import Exit, Merge, Method, Prune, Resize, undo_
from tests.kit import own_vits
from tests.kit.clip_zoo import make_captions, make_clip
from tests.kit.conditioned_zoo import DIM, AdaLNBlock
from tests.kit.cover import in_turn
from tests.kit.own_vits import GRID, ROUTED, OwnBlock, OwnViT, make_own, make_own_images
from tests.kit.vision_zoo import VISION_ZOO, make_pixels, make_vision, only, output_of
from tests.kit.zoo import make_images, make_model

TIMM = "test_vit"
REDUCING: dict[str, Method] = {"prune": Prune(0.6, (0, 2)), "merge": Merge(3)}


def make(name: str) -> Any:
    return (make_own(name) if name in ROUTED else make_vision(name)).double()


def inputs_of(name: str, batch: int = 3) -> dict[str, Any]:
    if name == TIMM:
        inputs: dict[str, Any] = {"x": make_images(name, batch)}
    else:
        inputs = {"images": make_own_images(batch)} if name in ROUTED else make_pixels(name, batch)
    floats = {
        key: value.double() for key, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()
    }
    return {**inputs, **floats}


@torch.no_grad()
def run(model: Any, inputs: dict[str, Any], **options: Any) -> Tensor:
    outputs = model(**inputs, **options)
    return outputs.flatten(1) if isinstance(outputs, Tensor) else output_of(outputs)


def state_of(model: nn.Module) -> tuple[list[str], list[type]]:
    return list(model.state_dict()), [type(module) for module in model.modules()]


@pytest.mark.parametrize(("name", "method"), in_turn(VISION_ZOO, ["prune", "merge"]))
@torch.no_grad()
def test_collected_states_are_the_full_grid(name: str, method: str) -> None:
    model, inputs = make(name), inputs_of(name, 2)
    dense = model(**inputs, output_hidden_states=True)
    REDUCING[method].apply_(model)
    expected = run(model, inputs)
    outputs = model(**inputs, output_hidden_states=True)
    assert [x.shape for x in outputs.hidden_states] == [x.shape for x in dense.hidden_states]
    torch.testing.assert_close(output_of(outputs), expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_images_of_clip_are_grouped_and_captions_are_not() -> None:
    model, captions = make_clip("ViT-B-32"), make_captions("ViT-B-32")
    text = model.encode_text(captions)
    mmod.route_(model, image="gradual")
    assert torch.equal(model.encode_text(captions), text)
    with pytest.raises(ValueError, match="only tokens of images can be grouped"):
        mmod.route_(undo_(model), text="gradual")


@pytest.mark.parametrize("name", ["ViT-B-32", "custom-blocks"])
@torch.no_grad()
def test_halves_of_clip_are_the_block(name: str) -> None:
    model = make_clip(name).double()
    for tower in (model.visual, getattr(model, "text", model)):
        block: Any = tower.transformer.resblocks[1]
        x_BND = torch.randn(2, 9, 48, dtype=torch.float64)
        mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)
        attended = x_BND + block.ls_1(getattr(block, "ln_attn", nn.Identity())(attend(block, x_BND, mask)))
        expected = attended + block.ls_2(block.mlp(block.ln_2(attended)))
        stack = mmod.adapters.find_stacks(model)["image" if tower is model.visual else "text"]
        actual = halves_of(stack, block, x_BND, mask)
        for one, other in zip(actual, (attended, expected)):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def attend(block: Any, x_BND: Tensor, mask: Tensor) -> Tensor:
    normed = block.ln_1(x_BND)
    return block.attention(normed, attn_mask=mask) if hasattr(block, "attention") else block.attn(normed, mask)


def halves_of(stack: Any, block: Any, x_BND: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens after the attention and after the MLP of a block, each run alone."""
    from mmod.blocks import convert, make_halves
    from mmod.blocks.branches import Inner
    from mmod.blocks.converted import ConvertedBlock
    from mmod.threads import PerThread

    call = stack.call_of(block, None)
    inner = PerThread(Inner)
    convert(block, ConvertedBlock, State(inner, call))
    make_halves(block, call, inner)
    attended = call.halves.attend(block, x_BND, {"attn_mask": mask})
    return attended, call.halves.feed(block, attended, {})


@dataclasses.dataclass
class State:
    inner: Any
    call: Any


def _classifier(name: str, config: str, **changes: Any) -> Any:
    small: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 64,
        "patch_size": 8,
    }
    if "CLIP" in name or "Siglip" in name:
        text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        if "Siglip2" in name:
            small = {**{key: value for key, value in small.items() if key != "image_size"}, "num_patches": 64}
        small = {"vision_config": small, "text_config": text}
    return getattr(transformers, name)(getattr(transformers, config)(**small, num_labels=7, **changes))


CLASSIFIERS = {
    TIMM: lambda: make_model(TIMM),
    "vit": lambda: make_vision("vit"),
    "dinov2": lambda: make_vision("dinov2"),
    "videomae": lambda: make_vision("videomae"),
    "own softmax": lambda: make_own("own softmax"),
    "deit with teacher": lambda: _classifier("DeiTForImageClassificationWithTeacher", "DeiTConfig"),
    "clip classifier": lambda: _classifier("CLIPForImageClassification", "CLIPConfig"),
    "siglip classifier": lambda: _classifier("SiglipForImageClassification", "SiglipConfig"),
    "siglip2": lambda: _classifier("Siglip2ForImageClassification", "Siglip2Config"),
}
EXITS = (0, 2)


def make_classifier(name: str) -> Any:
    torch.manual_seed(0)
    model = CLASSIFIERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().eval()


def logits_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    outputs = model(**inputs)
    return outputs if isinstance(outputs, Tensor) else outputs["logits"]


@pytest.mark.parametrize("name", CLASSIFIERS)
@torch.no_grad()
def test_images_leave_any_classifier_where_they_are_sure(name: str) -> None:
    """A slow definition: a dense model that ends behind each exit, with the exit's own modules."""
    dense, inputs = make_classifier(name), inputs_of(name, 4)
    expected, state = logits_of(dense, inputs), state_of(dense)
    model = Exit(1.0, EXITS).apply_(copy.deepcopy(dense))
    torch.testing.assert_close(logits_of(model, inputs), expected, rtol=0, atol=1e-13)
    assert type(model).__name__ == type(dense).__name__ or name in ROUTED
    ends = []
    for block in EXITS:
        short = copy.deepcopy(dense)
        block_list = short.get_submodule(find_stack(dense).names[0].rpartition(".")[0])
        del block_list[block + 1 :]
        ends.append(logits_of(short, inputs))
    sure = [values.softmax(dim=-1).amax(dim=-1) for values in ends]
    # Half of the images leave at the first exit.
    confidence = float(sure[0].sort().values[1:3].mean())
    undo_(model)
    Exit(confidence, EXITS).apply_(model)
    actual = logits_of(model, inputs)
    for image in range(4):
        left = [values for values, sureness in zip(ends, sure) if sureness[image] >= confidence]
        wanted = left[0] if left else expected
        torch.testing.assert_close(actual[image], wanted[image], rtol=0, atol=1e-12)
        torch.testing.assert_close(logits_of(model, only(inputs, image))[0], wanted[image], rtol=0, atol=1e-12)
    assert torch.equal(logits_of(copy.deepcopy(model), inputs), actual)
    undo_(model)
    assert state_of(model) == state
    assert torch.equal(logits_of(model, inputs), expected)


@pytest.mark.parametrize("name", ["vit", "clip classifier"])
def test_every_exit_of_a_model_of_transformers_learns_by_its_loss(name: str) -> None:
    model, inputs = Exit(0.9, EXITS).apply_(make_classifier(name)).train(), inputs_of(name, 6)
    labels = torch.arange(6)
    outputs = model(**inputs, labels=labels)
    torch.testing.assert_close(outputs.loss, nn.functional.cross_entropy(outputs.logits, labels))
    outputs.loss.backward()
    exits = [weight.grad for key, weight in model.named_parameters() if ".exit.classifier." in key]
    assert exits
    assert all(grad is not None and grad.any() for grad in exits)
    loss, logits = model(**inputs, labels=labels, return_dict=False)
    assert loss.ndim == 0
    assert logits.shape == (6, 7)
    with pytest.raises(ValueError, match="without output_hidden_states"):
        model(**inputs, output_hidden_states=True)


@pytest.mark.parametrize("name", ["siglip", "yolos", "dinov2 backbone", "dpt on dinov2", "ViT-B-32"])
def test_models_without_classes_have_no_exits(name: str) -> None:
    model = make_clip(name) if name == "ViT-B-32" else make(name)
    state = state_of(model)
    with pytest.raises(ValueError, match=r"is no classifier|no input reached the head"):
        Exit(0.5, EXITS).apply_(model)
    assert state_of(model) == state


@pytest.mark.parametrize("name", ["dinov2 backbone", "dpt on dinov2"])
def test_blocks_that_run_in_cycles_have_no_states_to_collect(name: str) -> None:
    model = Recursions(recursions=3).apply_(make(name))
    with pytest.raises(ValueError, match="hidden states of layers are not defined"):
        run(model, inputs_of(name))


@pytest.mark.parametrize("name", ["vit", "dinov2 backbone", "siglip", "mlcd"])
@torch.no_grad()
def test_resized_images_are_those_that_the_model_gets(name: str) -> None:
    model, inputs = make(name), inputs_of(name, 2)
    dense, state = run(model, inputs), state_of(model)
    images = inputs["pixel_values"]
    Resize(32).apply_(model)
    small = nn.functional.interpolate(images, size=(32, 32), mode="bicubic", antialias=True)
    actual = run(model, inputs)
    positional = model(images)
    assert torch.equal(output_of(positional), actual)
    assert mmod.flops(model, 64).share < 1
    undo_(model)
    options = {} if name.startswith("dino") else {"interpolate_pos_encoding": True}
    assert torch.equal(run(model, {"pixel_values": small}, **options), actual)
    assert state_of(model) == state
    assert torch.equal(run(model, inputs), dense)


class Resampling(OwnViT):
    """A model of images of any size, as the refusal of one size advises."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.patchify(images)
        places = self.places.transpose(1, 2).unflatten(2, (GRID, GRID))
        x = x + nn.functional.interpolate(places, size=x.shape[2:], mode="bicubic")
        x = torch.cat([self.special.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], dim=1)
        for stage in self.stages:
            x = stage(x)
        return self.classes(self.final(x).mean(dim=1))


def test_a_model_of_one_size_is_told_what_helps() -> None:
    with pytest.raises(ValueError, match=r"let its forward resample the position embeddings .*interpolate\. It"):
        Resize(32).apply_(make("own softmax"))
    model = Resize(32).apply_(Resampling(lambda _: OwnBlock()).eval())
    images = make_own_images(2)
    small = nn.functional.interpolate(images, size=(32, 32), mode="bicubic", antialias=True)
    with torch.no_grad():
        resized = model(images)
        assert torch.equal(model(images=images), resized)
        with pytest.raises(TypeError, match="got multiple values for argument 'images'"):
            model(images, images=images)
        assert torch.equal(resized, undo_(model)(small))


class AnyArguments(Resampling):
    """A forward behind a decorator that shows no names."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs)


class AnyInputs(Resampling):
    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(*inputs)


class OnlyPositional(Resampling):
    def forward(self, x: Tensor, /) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("model_class", [AnyArguments, AnyInputs, OnlyPositional])
@torch.no_grad()
def test_images_without_a_name_reach_the_blocks(model_class: type[OwnViT]) -> None:
    torch.manual_seed(0)
    model = model_class(lambda _: OwnBlock()).eval()
    images = make_own_images(2)
    small = nn.functional.interpolate(images, size=(32, 32), mode="bicubic", antialias=True)
    dense, dense_small = model(images), model(small)
    for example in (None, images, (images,)):
        undo_(mmod.route_(model, "gradual", tokens=mmod.Tokens("stages", example=example)))
    Resize(32).apply_(model)
    assert torch.equal(model(images), dense_small)
    undo_(model)
    # A threshold of 1 that no image passes: the head runs on all images.
    Exit(1.0, (2,)).apply_(model)
    torch.testing.assert_close(model(images), dense)


class Conditioned(Resampling):
    """A forward behind a decorator, that takes more than images."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("prior", None)
        return super().forward(*args, **kwargs)


@torch.no_grad()
def test_images_by_a_name_that_the_forward_does_not_show_are_resized() -> None:
    torch.manual_seed(0)
    model = Conditioned(lambda _: OwnBlock()).eval()
    images, prior = make_own_images(2), torch.rand(2, 3, 8, 8)
    small = nn.functional.interpolate(images, size=(32, 32), mode="bicubic", antialias=True)
    expected = model(images=small)
    Resize(32).apply_(model)
    assert torch.equal(model(images=images), expected)
    assert torch.equal(model(prior=prior[:, 0], images=images), expected)
    # What is passed in order comes first.
    assert torch.equal(model(images, prior=prior), expected)
    with pytest.raises(ValueError, match=r"of this Conditioned .* of prior, images, 2 are tensors .* in order"):
        model(prior=prior, images=images)
    with pytest.raises(ValueError, match=r"of images, 0 are tensors"):
        model(images=[images])


class TimedClassifier(nn.Module):
    """A classifier of noisy images, whose blocks take the time of each."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, 4, 4)
        self.times = nn.Linear(1, DIM)
        self.blocks = nn.ModuleList(AdaLNBlock() for _ in range(3))
        self.head = nn.Linear(DIM, 5)

    def forward(self, image: Tensor, time: Tensor | None = None) -> Tensor:
        time = image.new_zeros(len(image)) if time is None else time
        c = self.times(time.unsqueeze(1))
        x = self.patches(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, c)
        logits: Tensor = self.head(x.mean(dim=1))
        return logits


@torch.no_grad()
def test_images_that_exit_leave_the_times_to_the_others() -> None:
    torch.manual_seed(0)
    model: Any = TimedClassifier().eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    inputs = {"image": torch.randn(4, 3, 16, 16), "time": torch.rand(4)}
    tokens = mmod.Tokens(example=inputs)
    logits: list[Tensor] = []
    mmod.apply_(model, Exit(1.0, (0,)), tokens=tokens)
    model.blocks[0].exit.register_forward_hook(lambda *call: logits.append(call[2]))
    model(**inputs)
    undo_(model)
    mmod.apply_(model, Exit(float(logits[0].softmax(-1).amax(-1).median()), (0,)), tokens=tokens)
    with mmod.trace(model) as decisions:
        together = model(**inputs)
    assert 0 < decisions["blocks.1"].keep_BN.sum() < 4
    alone = [model(**{name: value[row : row + 1] for name, value in inputs.items()}) for row in range(4)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-4)


class ScaledBlock(OwnBlock):
    """A block that may weigh what it adds."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if scale is None else x + scale * (y - x)


class ScaledClassifier(nn.Module):
    """A classifier whose blocks may weigh what they add."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, own_vits.DIM, 4, 4)
        self.head = nn.Linear(own_vits.DIM, 5)
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(3))

    def forward(self, image: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x) if scale is None else block(x, scale=scale)
        logits: Tensor = self.head(x.mean(dim=1))
        return logits


def test_an_argument_that_no_trial_showed_is_refused_where_images_have_left_alone() -> None:
    torch.manual_seed(0)
    model = ScaledClassifier().eval()
    image, scale = torch.randn(4, 3, 16, 16), torch.full((own_vits.DIM,), 0.5)
    expected = model(image, scale)
    tokens = mmod.Tokens("blocks", example={"image": image})
    mmod.apply_(model, Exit(1.0, (0,)), tokens=tokens)
    # In evaluation none leaves, and in training, one of two images does behind block 0.
    assert torch.equal(model(image, scale), expected)
    with pytest.raises(ValueError, match=r"got 'scale', .*kept; known are .*apply the method with tokens=mmod\.Tokens"):
        model.train()(image, scale)
    mmod.undo_(model.eval())
    tokens = mmod.Tokens("blocks", example={"image": image, "scale": scale})
    mmod.apply_(model, Exit(1.0, (0,)), tokens=tokens)
    assert torch.equal(model(image, scale), expected)
    torch.testing.assert_close(model.train()(image, scale)[1::2], expected[1::2])


def test_a_forward_may_be_an_object_without_a_hash() -> None:
    class Forward:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return x * scale

    class Scaled(nn.Module):
        forward = Forward()

    assert list(parameters_of(Scaled())) == ["scale"]


class BlockWithMethods(OwnBlock):
    """A block whose own methods have the names of functions of mmod, and an attribute that of a setting of mixins."""

    def __init__(self) -> None:
        super().__init__()
        self.title = "own"

    def forward(self, x: Tensor) -> Tensor:
        return self.check_once(self.check_tokens(super().forward(self._narrowed(self.as_node(x)))))

    def check_tokens(self, x: Tensor) -> Tensor:
        return 2 * x

    check_once = as_node = trace_as_node = _narrowed = check_tokens


@pytest.mark.parametrize("method", [mmod.RoutingConfig(), Exit(1.0, (0,))])
@torch.no_grad()
def test_methods_of_a_block_keep_their_names(method: Any) -> None:
    torch.manual_seed(0)
    model: Any = OwnViT(lambda _: BlockWithMethods())
    images, blocks = make_own_images(4), list(model.stages)
    expected = model(images)
    mmod.apply_(model, method)
    assert any(type(block) is not BlockWithMethods for block in blocks)
    assert all(torch.equal(block.check_tokens(images), 2 * images) for block in blocks)
    assert all(block.title == "own" for block in blocks)
    if isinstance(method, Exit):
        # In training, one of two images leaves behind the first block.
        torch.testing.assert_close(model.train()(images)[1::2], expected[1::2])


class PriorClassifier(OwnViT):
    """A classifier whose logits are scaled and shifted by a prior of its classes."""

    def forward(self, images: Tensor, prior: Any = None) -> Tensor:
        logits = super().forward(images)
        if isinstance(prior, dict):
            prior = prior["scale"], prior["shift"]
        return logits if prior is None else prior[0] * logits + prior[1]


@pytest.mark.parametrize("container", [tuple, list, dict])
@torch.no_grad()
def test_tensors_inside_an_argument_are_whole_where_images_exit(container: Any) -> None:
    torch.manual_seed(0)
    model: Any = PriorClassifier(lambda _: OwnBlock()).eval()
    scale, shift = torch.rand(10) + 0.5, torch.randn(10)
    prior = container({"scale": scale, "shift": shift} if container is dict else (scale, shift))
    # As many images as classes.
    images = make_own_images(10)
    expected = model(images, prior=prior)
    mmod.apply_(model, Exit(1.0, (1, 2, 3)))
    assert torch.equal(model(images, prior=prior), expected)
    # In training, the last of four images remains to the end.
    torch.testing.assert_close(model.train()(images, prior=prior)[3::4], expected[3::4])


class NamedAsOthers(OwnBlock):
    """A block with a module, a flag and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(own_vits.DIM)
        self.doubles = True

    def mix(self, x: Tensor) -> Tensor:
        return self.mixer(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = x + self.scale * self.mix(x)
        y = x + self.channels(self.second(x))
        return 2 * y if self.doubles else y


class NamedAsSteps(OwnBlock):
    """The same block, whose names are words for what a routed block does."""

    def __init__(self) -> None:
        super().__init__()
        self.gather = nn.LayerNorm(own_vits.DIM)
        self.record = True

    def attend(self, x: Tensor) -> Tensor:
        return self.mixer(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.gather(x)
        x = x + self.scale * self.attend(x)
        y = x + self.channels(self.second(x))
        return 2 * y if self.record else y


@pytest.mark.parametrize(
    "method",
    [
        mmod.RoutingConfig(router="linear"),
        mmod.RoutingConfig(router="attention", blocks=(1, 2)),
        mmod.RoutingConfig(router="redundancy", skipped="merge", blocks=(1, 2)),
        Exit(1.0, (0,)),
    ],
    ids=["alone", "span", "groups", "exit"],
)
@torch.no_grad()
def test_a_block_may_have_any_names(method: mmod.RoutingConfig | Method) -> None:
    images = make_own_images(2)
    outputs = []
    for block in (NamedAsOthers, NamedAsSteps):
        torch.manual_seed(0)
        model = OwnViT(lambda _, block=block: block()).eval()
        expected, state = model(images), state_of(model)
        mmod.apply_(model, method)
        outputs.append(model(images))
        undo_(model)
        assert state_of(model) == state
        assert torch.equal(model(images), expected)
    assert torch.equal(*outputs)


class Keeping(OwnViT):
    """A grey model that keeps what its blocks returned, and returns a dict as models of transformers do."""

    def __init__(self) -> None:
        super().__init__(lambda _: OwnBlock())
        self.patchify = nn.Conv2d(1, own_vits.DIM, 8, 8)
        self.kept: list[Tensor] = []

    def forward(self, images: Tensor) -> dict[str, Tensor | None]:  # type: ignore[override]
        for stage in self.stages:
            stage.last = None
        x = torch.cat([self.special.expand(len(images), -1, -1), self.patchify(images).flatten(2).mT + self.places], 1)
        for stage in self.stages:
            stage.last = x = stage(x)
        self.kept = [x]
        return {"logits": self.classes(x[:, 0]), "loss": None}


def test_a_model_that_keeps_what_a_pass_with_gradients_left_is_changed() -> None:
    images = torch.randn(3, 1, 64, 64)
    model = Keeping()
    model(images)
    mmod.route_(model, "a-mod")
    assert mmod.flops(model, 64).share < 1
    assert model.kept[0].requires_grad


def test_images_exit_from_a_model_whose_dict_has_no_loss() -> None:
    images = torch.randn(3, 1, 64, 64)
    model = Keeping().eval()
    expected = model(images)["logits"]
    output = mmod.apply_(model, mmod.methods.Exit(confidence=1.0))(images)
    torch.testing.assert_close(output["logits"], expected)
    assert output["loss"] is None
    model.train()
    assert model(images)["logits"].shape == expected.shape
