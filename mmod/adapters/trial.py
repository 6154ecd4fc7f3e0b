"""A proof by trial that blocks can run on some of their tokens, instead of a list of classes that do.

A copy of every block with random weights runs in fp32 on the CPU. Nothing of the user's model runs or changes.

Axes: B images, N tokens, K tokens of a trial, D channels.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mmod.adapters.base import MASKED, Proof
from mmod.adapters.halves import Attended, Branches, find_branches, is_close, shapes_inside, watch_attention
from mmod.adapters.probe import LAYOUTS, BlockInputs, copy_with, runnable
from mmod.adapters.proven import call_of, outer_mixins
from mmod.adapters.roles import INDEX_ARGUMENTS, redrawn, roles_of
from mmod.blocks import KEY_BIAS, MASKS, Arguments, Shell, as_one_sequence, convert, host_class, parameters_of
from mmod.blocks.converted import ConvertedBlock
from mmod.blocks.span import BlockState
from mmod.io.tensors import raw_bytes
from mmod.random_state import drawn_from
from mmod.routing import Kept, Routing

# Patches of a trial, of which some run alone.
PATCHES = 12
ALONE = 5
# Passes of a trial in training, in which some images may be dropped.
DRAWS = 16
_PLAIN = (str, int, float, bool, type(None), type)
# Why a block may not run on some of its tokens.
_POSITIONS = (
    ", because it computes with their positions: by windows, a bias for each pair of positions, a convolution, layers "
    "across tokens, or rotary positions that it makes itself"
)


def prove(inputs: BlockInputs, blocks: Mapping[str, nn.Module], title: str) -> Proof:
    """Return how the blocks of a model are called, after a trial of each.

    Raises:
        ValueError: A block lacks a property, or blocks differ in how they are called.
    """
    proofs: dict[str, Proof] = {}
    alike: dict[tuple[object, ...], list[str]] = {}
    for key, block in blocks.items():
        alike.setdefault(settings_of(block), []).append(key)
    for keys in alike.values():
        # What stochastic depth does shows where it drops most.
        key = max(keys, key=lambda key: drop_rate(blocks[key]))
        block = blocks[key]
        name = f"{inputs.seen.blocks}.{key}"
        try:
            proofs[name] = _prove_block(inputs, block)
        except _Refused as refusal:
            raise ValueError(f"cannot route {title}: {name} ({host_class(block).__name__}) {refusal}") from None
    first, *others = proofs
    for name in others:
        if proofs[name] != proofs[first]:
            raise ValueError(
                f"cannot route {title}: {first} and {name} differ in how they are called, so what a span shares would "
                "not fit both"
            )
    return dataclasses.replace(proofs[first], divides=any(proof.divides for proof in proofs.values()))


def drop_rate(block: nn.Module) -> float:
    """Return the sum of the rates of stochastic depth in a block, which grow with its depth."""
    return sum(float(getattr(module, "drop_prob", None) or 0) for module in block.modules())


class _Refused(ValueError):
    """Says which property a block lacks.

    Args:
        passed: Number of properties that were shown before.
    """

    def __init__(self, message: str, passed: int = 0) -> None:
        super().__init__(message)
        self.passed = passed


def _comparable(value: object) -> object:
    """Return a value that equals that of another block with the same behaviour; other objects are themselves alone.

    Objects of Python's own making with plain attributes, such as the attention processors of diffusers, are these.
    """
    if isinstance(value, (tuple, list)):
        return tuple(map(_comparable, value))
    if isinstance(value, _PLAIN):
        return value
    attributes = getattr(value, "__dict__", {"": value})
    is_plain = all(isinstance(item, _PLAIN) for item in attributes.values())
    if is_plain and type(value).__new__ is object.__new__:
        return type(value), tuple(attributes.items())
    return id(value)


def settings_of(block: nn.Module) -> tuple[object, ...]:
    """Return what two blocks with the same behaviour share: classes, attributes, shapes of weights, and buffers."""
    settings: list[object] = []
    for name, module in block.named_modules():
        settings += [name, host_class(module)]
        for key, value in vars(module).items():
            # The rate of stochastic depth grows with depth.
            if key[0] == "_" or key in ("training", "mod_state", "drop_prob"):
                continue
            settings += [key, _comparable(value)]
    for name, weight in block.named_parameters():
        settings += [name, tuple(weight.shape)]
    for name, buffer in block.named_buffers():
        raw = None
        # Values on the meta device are unknown.
        if not buffer.is_meta:
            raw = bytes(raw_bytes(buffer))
        settings += [name, tuple(buffer.shape), raw]
    return tuple(settings)


def _prove_block(inputs: BlockInputs, block: nn.Module) -> Proof:
    trial = random_copy(block)
    signature = parameters_of(block)
    inputs = dataclasses.replace(inputs, arguments=redrawn(inputs))
    index_argument = next((name for name in INDEX_ARGUMENTS if name in signature), "")
    base = dataclasses.replace(inputs.seen, index_argument=index_argument)
    if base.boundaries:
        base = next(roles_of(base, inputs))
    x, arguments = _as_host(base, inputs.x_BND, inputs.arguments)
    seen: list[Attended] = []
    output = _run_on_all(trial, x, arguments, seen)
    _check_output(output, x, arguments)
    base = dataclasses.replace(
        base,
        fused=bool(seen) and all(attended.fused for attended in seen),
        attention_calls=max(sum(attended.fused for attended in seen), 1),
        in_tuple=isinstance(output, tuple),
    )
    proof = _first_that_passes(_candidates(base, signature, inputs), trial, inputs, seen)
    x_BND = inputs.x_BND
    # Arguments with a row for each token fit all tokens only.
    if not proof.rows:
        x_BND = x_BND[:, : inputs.seen.prefix + PATCHES]
    x, arguments = _as_host(proof, x_BND, inputs.arguments)
    branches = find_branches(trial, x, arguments, proof.rows, proof.cross)
    return dataclasses.replace(proof, **vars(branches), divides=_divides(trial, branches, x, arguments))


def _run_on_all(trial: nn.Module, x: Tensor, arguments: Arguments, seen: list[Attended]) -> object:
    """Return what the copy of a block returns for all tokens that its model passes to it, and note its attention."""
    torch.default_generator.manual_seed(0)
    try:
        with watch_attention(seen), torch.no_grad():
            return trial(x, **arguments)
    # A host may raise anything where the model was called with too little, or with images of another size.
    except Exception as error:
        raise _Refused(
            f"does not run on tokens {tuple(x.shape)}: {error}. Give an example of all that the model's forward takes: "
            "pass tokens=mmod.Tokens(example=...)"
        ) from error


def _first_that_passes(
    candidates: Iterable[Proof], trial: nn.Module, inputs: BlockInputs, seen: list[Attended]
) -> Proof:
    """Return the first way to call a block that passes the trial, with what the trial shows."""
    refusals = []
    for candidate in candidates:
        try:
            _check_form(candidate)
            return _Trial(candidate, trial, inputs, seen).check()
        except _Refused as refusal:
            refusals.append(refusal)
    # The candidate that got furthest tells most.
    raise max(refusals, key=lambda refusal: refusal.passed)


def _as_host(proof: Proof, x_BND: Tensor, arguments: Arguments) -> tuple[Tensor, Arguments]:
    """Return tokens and arguments as the host's model passes them; several images of one sequence as one image."""
    if proof.boundaries:
        return as_one_sequence(proof, x_BND, arguments)
    return x_BND, arguments


def _check_output(output: object, x: Tensor, arguments: Arguments) -> None:
    outputs = output if isinstance(output, tuple) else (output,)
    shapes = [tuple(value.shape) for value in outputs if isinstance(value, Tensor)]
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    given = [tuple(tensor.shape) for tensor in tensors if tensor.ndim == 3]
    if shapes[:1] != [tuple(x.shape)] or {*shapes[1:]} & {*given}:
        like = "Stages that merge patches, as in Swin, work on the grid of all tokens"
        if {*shapes} & {*given}:
            like = "Double-stream blocks, as in FLUX, SD3 and Qwen-Image, change the text too"
        returned = ", ".join(map(str, shapes)) or type(output).__name__
        raise _Refused(
            f"returns {returned} for tokens {tuple(x.shape)}: it must return the tokens alone, all of them and in "
            f"their order. {like}"
        )


def _check_form(proof: Proof) -> None:
    """Raise `_Refused` for forms that no mixin around the block gives."""
    forms = list(outer_mixins(proof))
    if proof.suffix:
        forms += [f"{name} with a row for each token" for name in proof.rows]
    if len(forms) > 1:
        raise _Refused(f"has {' and '.join(forms)}, and a block may have only one of them")
    if proof.boundaries and not proof.fused:
        raise _Refused(
            "computes attention without scaled_dot_product_attention, so images in one sequence cannot be told apart "
            "in it: load the model with attn_implementation='sdpa'"
        )


def _candidates(base: Proof, signature: Mapping[str, inspect.Parameter], inputs: BlockInputs) -> Iterator[Proof]:
    """Return the ways in which a block may be called, the fastest first."""
    if base.boundaries:
        yield dataclasses.replace(base, mask=KEY_BIAS)
        return
    masks = [name for name in MASKS if name in signature]
    for layout in LAYOUTS:
        for mask in (*masks, ""):
            for candidate in roles_of(dataclasses.replace(base, mask=mask, layout=layout), inputs):
                # Without rows, layouts are one.
                if candidate.rows or layout == LAYOUTS[0]:
                    yield candidate


def random_copy(block: nn.Module) -> nn.Module:
    """Return a copy of a block on the CPU in fp32, dense and without hooks, with all of its weights drawn at random.

    A trial of weights as they are would show nothing of a bias that begins at zero.

    Raises:
        ValueError: A buffer is on the meta device, so its values are unknown.
    """
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, object] = {}
    for name, buffer in block.named_buffers():
        if buffer.is_meta:
            raise _Refused(f"has its buffer {name} on the meta device: load its weights before it is routed")
        memo[id(buffer)] = runnable(buffer).clone()
    for weight in block.parameters():
        if weight.is_floating_point() and type(weight.data) is Tensor:
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            if weight.ndim > 1:
                # Outputs of linear layers keep the size of their inputs.
                drawn = drawn / weight.shape[1:].numel() ** 0.5
            else:
                # Scales and biases are drawn around a half.
                drawn = 0.5 + drawn / 2
            memo[id(weight)] = nn.Parameter(drawn, requires_grad=False)
    trial = copy_with(block, memo)
    for module in trial.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) not in (None, *MASKED):
            # Flash attention does not run on a CPU; the copy has a config of its own.
            config._attn_implementation = MASKED[0]
    return trial


def _divides(block: nn.Module, branches: Branches, x: Tensor, arguments: Arguments) -> bool:
    """Return whether a branch of a block runs on fewer images or tokens in training than in evaluation, see `Proof`."""
    # Batch norms learn in training.
    trained = copy.deepcopy(block)
    names = [name for name in (branches.attention, branches.mlp) if name]
    expected = shapes_inside(trained, x, arguments, names)
    trained.train()
    torch.default_generator.manual_seed(0)
    for _ in range(DRAWS):
        before = drawn_from()
        try:
            shapes = shapes_inside(trained, x, arguments, names)
        # What does not run in training will say so there.
        except Exception:
            return False
        if shapes != expected:
            return True
        if drawn_from() == before:
            break
    return False


class _TrialBlock(ConvertedBlock):
    """Mixin of the block of a trial, which has what methods add."""

    mod_added_modules = ("mod_added",)


class _Added(nn.Module):
    """Stands for a module that a method adds to a block, and that the block's own code must not call."""

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse the block."""
        raise _Refused(
            "runs whatever modules it contains, so it would run the router that a method adds as one of them: let it "
            "iterate over itself, as nn.Sequential does, or name the modules that it runs"
        )


class _Trial:
    """Runs the copy of a block on some of the tokens that its model passes to it."""

    def __init__(self, proof: Proof, block: nn.Module, inputs: BlockInputs, seen: list[Attended]) -> None:
        self.proof = proof
        self.seen = seen
        self.call = call_of(proof, block)
        self.block: Any = copy.copy(block)
        vars(self.block)["_modules"] = dict(block._modules)
        convert(self.block, _TrialBlock, BlockState(call=self.call), Shell(inner=self.call.shell.inner))
        self.block.mod_added = _Added()
        self.arguments = self.call.bind((), inputs.arguments)
        generator = torch.Generator().manual_seed(1)
        patches = inputs.patches
        count = min(PATCHES, patches)
        # Other patches for each image, not in their order.
        chosen = [torch.randperm(patches, generator=generator)[:count] + proof.prefix for _ in range(2)]
        first = torch.arange(proof.prefix)
        self.index_BK = torch.stack([torch.cat([first, patches_K]) for patches_K in chosen])
        # What a model passes on may be small, or equal for many tokens.
        self.x_BND = torch.randn(inputs.x_BND.shape, generator=generator, dtype=torch.float32)

    @torch.no_grad()
    def run(self, index_BK: Tensor, valid_BK: Tensor | None = None) -> Tensor:
        """Return the block's output for some tokens; those that are not valid are hidden as keys."""
        routing = Routing(Kept(index_BK, valid_BK), torch.zeros(self.x_BND.shape[:2]))
        index_BKD = index_BK.unsqueeze(-1).expand(-1, -1, self.x_BND.shape[-1])
        z_BKD = self.x_BND.gather(1, index_BKD)
        arguments = dict(self.call.select_tokens(self.arguments, self.x_BND, routing))
        # Blocks may draw in evaluation too.
        torch.default_generator.manual_seed(0)
        try:
            y: Tensor = self.block.mod_run_host(z_BKD, **arguments)
        except _Refused:
            raise
        # A host may raise anything on a number of tokens that it was not made for.
        except Exception as error:
            if valid_BK is not None:
                # It ran on as many tokens before, when none was hidden.
                raise _Refused(f"does not run with tokens hidden from attention: {error}", 2) from error
            raise _Refused(
                f"does not run on {index_BK.shape[1]} of its {self.x_BND.shape[1]} tokens{_POSITIONS}: {error}"
            ) from error
        return y

    def check(self) -> Proof:
        """Return the proof, with what the trial shows; raise `_Refused` with the property that the block lacks."""
        index_BK = self.index_BK
        y_BKD = self.run(index_BK)
        cross = self._find_cross()
        if cross:
            calls = max(self.proof.attention_calls - len(cross), 1)
            self.proof = dataclasses.replace(self.proof, cross=cross, attention_calls=calls)
            self.call = call_of(self.proof, self.block)
            self.block.mod_state.call = self.call
        if self.proof.index_argument:
            with torch.no_grad():
                y_BND = self.block.mod_run_host(self.x_BND, **self.arguments)
            index_BN = torch.arange(self.x_BND.shape[1]).expand(2, -1)
            lacks = f"does not take the index of each token as {self.proof.index_argument}"
            self._compare(self.run(index_BN), y_BND, lacks, 0)
        # The order of tokens shows whatever attention reads of their positions: windows, biases, convolutions. That of
        # all patches of an image, because a window shows only where there are more tokens than it holds.
        tokens = self.x_BND.shape[1]
        prefix = self.proof.prefix
        last = tokens - self.proof.suffix
        order = torch.randperm(last - prefix, generator=torch.Generator().manual_seed(4)) + prefix
        order = torch.cat([torch.arange(prefix), order, torch.arange(last, tokens)])
        y_1ND = self._alone(0, torch.arange(tokens).unsqueeze(0))
        lacks = f"gives all {tokens} tokens in another order another result{_POSITIONS}"
        self._compare(self._alone(0, order.unsqueeze(0)), y_1ND[:, order], lacks, 1)
        alone = prefix + ALONE
        valid_BK = (torch.arange(index_BK.shape[1]) < alone).expand_as(index_BK)
        lacks = (
            "gives some tokens another result where the others are hidden from attention than where they are left out: "
            "tokens reach each other by another way than attention"
        )
        left_BKD = self.run(index_BK[:, :alone])
        shown_BKD = self.run(index_BK, valid_BK)[:, :alone]
        self._compare(left_BKD, shown_BKD, lacks, 2)
        # A batch norm, or attention over a batch, shows in an image that is not beside the other.
        images = [self._alone(image, index_BK[image : image + 1]) for image in range(2)]
        self._compare(torch.cat(images), y_BKD, "gives an image another result in another batch", 3)
        return self.proof

    def _compare(self, actual: Tensor, expected: Tensor, lacks: str, passed: int) -> None:
        """Refuse the block by what it lacks, after a number of passed properties, unless two outputs are equal."""
        if not is_close(actual, expected):
            raise _Refused(lacks, passed)

    def _find_cross(self) -> tuple[int, ...]:
        """Return which calls of attention have the same keys for any number of tokens: those over a text."""
        if len(self.seen) < 2:
            return ()
        few: list[Attended] = []
        with watch_attention(few):
            self.run(self.index_BK[:, : self.proof.prefix + ALONE])
        if len(few) != len(self.seen):
            return ()
        cross = []
        for number, (one, other) in enumerate(zip(few, self.seen)):
            # As many keys for few tokens as for all.
            if one.shape[-1] == other.shape[-1]:
                cross.append(number)
        return tuple(cross)

    def _alone(self, image: int, index_1K: Tensor) -> Tensor:
        """Return the output for some tokens of one image, beside itself: so both draw what they draw together."""
        twice = torch.tensor([image, image])
        alone = copy.copy(self)
        alone.x_BND = self.x_BND[twice]
        alone.arguments = self.call.narrow_images(self.arguments, twice, 2)
        return alone.run(index_1K.expand(2, -1))[image : image + 1]
