"""Early exit: images with a confident prediction skip the remaining blocks.

Axes: B images, N tokens, D channels, C classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from mmod.adapters import BlockStack
from mmod.adapters.base import NamedArguments
from mmod.adapters.head import HeadCopy, find_head, logits_of
from mmod.blocks import BlockOwner, BlockState, Deciding, Span, convert, name_arguments, positional_names
from mmod.blocks.calls import StackCall
from mmod.blocks.converted import ConvertedBlock, check_once
from mmod.config.plan import blocks_or_quarters
from mmod.methods.base import Method, register_method
from mmod.ops.backend import check_counts
from mmod.routing import Kept, Routing

# The modules of timm's models that `reset_classifier` replaces.
_CLASSIFIER = ("head", "head_dist")


@register_method("exit")
@dataclass(frozen=True)
class Exit(Method):
    """Early exit after some blocks, each with a separate head.

    In evaluation, an image exits where its head's largest probability reaches the confidence. The remaining images are
    gathered, so later blocks cost less. In training, images are assigned to the exits and the final head in turn, so
    that any recipe trains all heads equally. An exit has a copy of the norm, pooling and classifier behind the model's
    blocks. Images exit in a call of the model only: `forward_features` and `forward_intermediates` run all blocks on
    all images.

    Args:
        confidence: Probability at which an image exits, a share of 1.
        blocks: Numbers of the blocks that an exit follows; None takes those after each quarter of the depth, (3, 6, 9)
            of 12.

    Source: BranchyNet, Teerapittayanon et al., arXiv 1709.01686.

    Example:
        >>> import timm, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit"), Exit(confidence=0.5, blocks=(1, 3)))
        >>> [name for name, _ in model.named_modules() if name.endswith("exit")]
        ['blocks.1.exit', 'blocks.3.exit']
    """

    added: ClassVar[tuple[str, ...]] = (".exit.",)
    confidence: Annotated[float, "(0, 1]"] = 0.9
    blocks: Annotated[tuple[int, ...] | None, "[0, inf)"] = None

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the model classifies and has blocks after each exit."""
        blocks = blocks_or_quarters(self.blocks, len(stack.blocks))
        if blocks[-1] == len(stack.blocks) - 1:
            raise ValueError(
                f"an exit after the last block saves nothing: blocks must be below {len(stack.blocks) - 1}"
            )
        find_head(model, stack)

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Add a copy of the model's head to every exit block, and make the model gather the logits of all exits."""
        blocks = blocks_or_quarters(self.blocks, len(stack.blocks))
        head = find_head(model, stack)
        turns = {index: turn for turn, index in enumerate(blocks)}
        first = blocks[0]
        span = Span(stack.calls, stack.names[first:])
        for index, block in enumerate(stack.blocks[first:], first):
            call = stack.call_of(block, None)
            assert isinstance(call, NamedArguments)
            turn = turns.get(index, 0)
            state = ExitState(
                call=call, span=span, position=index - first, number=index, turn=turn, turns=len(blocks) + 1
            )
            convert(block, ExitBlock, state, call.shell)
            if index in turns:
                block.exit = HeadCopy(head)
        stack.own_(model, ExitModel)


@dataclass(eq=False, kw_only=True)
class ExitState(BlockState):
    """Plain state of a block with an exit, or after one.

    Args:
        turn: Number of the exit that follows the block; 0 also where none does.
        turns: Number of exits, including the final head.
    """

    call: NamedArguments
    span: Span
    turn: int
    turns: int


class ExitCall(StackCall):
    """A call of an early-exit model.

    Attributes:
        inputs: The arguments of the model, in order and by name, which its heads take too.
        total: Number of images.
        last_block: Number of the block that ran last; -1 for none.
        index_B: Batch indices of the remaining images; None for all.
        answers: Batch indices of the images that exited, and what their head returned, by exit.
    """

    def __init__(self, outer: StackCall) -> None:
        super().__init__(outer)
        self.inputs: tuple[tuple[object, ...], Mapping[str, object]] = ((), {})
        self.total = 0
        self.last_block = -1
        self.index_B: Tensor | None = None
        self.answers: list[tuple[Tensor, object]] = []

    def enter(self, x_BND: Tensor, number: int) -> None:
        """Note that a block runs on the remaining images."""
        # Compilers would guard on the number of each block.
        if not torch.compiler.is_compiling():
            remaining = self.total if self.index_B is None else self.index_B.shape[0]
            if number <= self.last_block or (self.last_block >= 0 and x_BND.shape[0] != remaining):
                raise RuntimeError(
                    "a block of an early-exit model got other images than the running call of the model has left, or "
                    "ran twice or after a later one: call the model itself on a second batch, as in a hook, which "
                    "keeps their images apart, and run each block once, in the order of the model"
                )
            self.last_block = number
        if self.index_B is None:
            self.total = x_BND.shape[0]

    def inputs_of(self, index_B: Tensor) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the arguments of the model for some images: tensors with a row for each image, narrowed to these.

        What stands in a tuple, list or mapping is passed whole, because a first axis may be another there.
        """
        args, kwargs = self.inputs
        if index_B.shape[0] == self.total:
            return args, dict(kwargs)

        def narrow(value: object) -> object:
            if isinstance(value, Tensor) and value.ndim and value.shape[0] == self.total:
                return value.index_select(0, index_B)
            return value

        return tuple(map(narrow, args)), {name: narrow(value) for name, value in kwargs.items()}

    def whole(self, rows: Tensor) -> Tensor:
        """Return rows of the remaining images as those of all, zeros for images that exited."""
        if self.index_B is None or rows.shape[0] == self.total:
            return rows
        return rows.new_zeros(self.total, *rows.shape[1:]).index_copy(0, self.index_B, rows)

    def gather(self, output: object) -> object:
        """Return the output for all images, from the model's, which is right for those that remained to the end."""
        leaves, form = tree_flatten(output)
        for index_B, answer in self.answers:
            parts, other = tree_flatten(answer)
            if form != other:
                raise ValueError(
                    "early exit returns tensors with one row for each image, such as logits: call the model without "
                    "output_hidden_states and output_attentions"
                )
            # The last block, which returns rows of all images, may have been removed from the model.
            # Beside rows, a dict may hold a loss of None.
            leaves = [
                _with_rows(self.whole(rows), index_B, part) if isinstance(rows, Tensor) else rows
                for rows, part in zip(leaves, parts)
            ]
        return tree_unflatten(leaves, form)


class ExitBlock(Deciding, ConvertedBlock):
    """Mixin of a block with an exit, or after one."""

    mod_state: ExitState
    mod_method: Exit
    exit: HeadCopy
    mod_added_modules = ("exit",)

    @property
    def mod_cost_follows_data(self) -> bool:
        """The cost depends on the data: images that exited cost nothing."""
        return True

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Run the host's block on tokens (B, N, D), and return those of the remaining images."""
        check_once(self, x)
        state = self.mod_state
        call = state.span.calls.value.running
        if not isinstance(call, ExitCall):
            # Outside a call of the model no image exits.
            self._mod_trace(x, x.shape[0], None)
            if x.shape[0]:
                return super().forward(x, *args, **kwargs)
            return x
        call.enter(x, state.number)
        self._mod_trace(x, call.total, call.index_B)
        y = x
        # Not every host supports an empty batch.
        if x.shape[0]:
            if x.shape[0] < call.total:
                assert call.index_B is not None
                kwargs = state.call.narrow_images(state.call.bind(args, kwargs), call.index_B, call.total)
                args = ()
            y = super().forward(x, *args, **kwargs)
        if state.ends:
            # The code behind the blocks may read masks of all images.
            return call.whole(y)
        if "exit" in self._modules and y.is_meta:
            # On meta, FLOPs are counted as if no image exited.
            self.exit(y, *call.inputs)
        elif "exit" in self._modules and y.shape[0]:
            y = self._mod_leave(y, call)
        return y

    def _mod_trace(self, x_BND: Tensor, total: int, index_B: Tensor | None) -> None:
        """Record which images the block runs on, if a trace asks for it."""
        if not self.mod_record.traced:
            return
        runs_B1 = torch.full((total, 1), index_B is None, device=x_BND.device)
        if index_B is not None:
            runs_B1[index_B] = True
        # A decision about images, each of which is one token here.
        kept = Kept(torch.zeros_like(runs_B1, dtype=torch.long), runs_B1)
        self.mod_record.keep("", Routing(kept, runs_B1.float()))

    @torch.compiler.disable(
        reason="early exit: how many images remain depends on the data. Compile the model without fullgraph=True"
    )
    def _mod_leave(self, y_BND: Tensor, call: ExitCall) -> Tensor:
        """Store the answers for the images that exit, and return the tokens of the others."""
        if call.index_B is None:
            call.index_B = torch.arange(y_BND.shape[0], device=y_BND.device)
        index_B = call.index_B
        if self.training:
            # By the place in the batch, whatever the confidence: every head sees images of all kinds.
            leaves_B = (index_B % self.mod_state.turns).eq(self.mod_state.turn)
            answer = self.exit(y_BND[leaves_B], *call.inputs_of(index_B[leaves_B]))
        else:
            output = self.exit(y_BND, *call.inputs_of(index_B))
            logits = logits_of(output)
            # In half precision, 0.999 would be 1.
            dtype = torch.promote_types(logits.dtype, torch.float32)
            sure = logits.detach().softmax(dim=-1, dtype=dtype).amax(dim=-1)
            if sure.ndim > 1:
                # There are logits for every token: an image is as sure as its tokens on average.
                sure = sure.flatten(1).mean(dim=1)
            leaves_B = sure >= self.mod_method.confidence
            answer = tree_map_only(Tensor, lambda rows: rows[leaves_B], output)
        call.answers.append((index_B[leaves_B], answer))
        call.index_B = index_B[~leaves_B]
        return y_BND[~leaves_B]


def _with_rows(whole: Tensor, index_B: Tensor, part: Tensor) -> Tensor:
    """Return what a model returns for all images, in which some have what their exit returned."""
    if whole.shape[1:] != part.shape[1:]:
        raise ValueError(
            f"the model's head returns {tuple(whole.shape[1:])} per image, and its exits {tuple(part.shape[1:])}: "
            "change the number of classes by model.reset_classifier, which changes the exits too"
        )
    return whole.index_copy(0, index_B, part)


class ExitModel(BlockOwner):
    """Mixin of a model with exits: a call returns each image's output, from the exit at which the image left."""

    mod_optional = False
    mod_running = ("forward",)

    @classmethod
    def mod_complete(cls, converted: type[nn.Module], host: type[nn.Module]) -> None:
        """Let the exits of a timm model have its classes."""
        super().mod_complete(converted, host)
        if hasattr(host, "reset_classifier"):
            converted.reset_classifier = _as_reset(converted, host.reset_classifier)  # type: ignore[attr-defined]

    def mod_new_call(self, name: str, outer: StackCall) -> StackCall:
        """Return a call in which images exit."""
        return ExitCall(outer)

    def mod_run_in_call(
        self, name: str, run: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Return the model's output for all images, each from the exit that it took.

        Labels are kept from the model; its loss is computed here, from the logits of all images.
        """
        check_counts("early exits", "the number of remaining images")
        named = name_arguments(positional_names(self), args, kwargs)
        labels = named.get("labels")
        if labels is not None:
            kwargs = {**named, "labels": None}
            args = ()

        def run_and_gather(*args: object, **kwargs: object) -> object:
            call = self.mod_owner.calls.value.running
            assert isinstance(call, ExitCall)
            call.inputs = (args, kwargs)
            return call.gather(run(*args, **kwargs))

        output = super().mod_run_in_call(name, run_and_gather, args, kwargs)
        if labels is None:
            return output
        return _with_loss(self, output, labels)


def _with_loss(model: Any, output: Any, labels: Tensor) -> object:
    """Return the output of a model of transformers with its loss."""
    loss = model.loss_function(labels, logits_of(output), model.config)
    if isinstance(output, tuple):
        return (loss, *output)
    output["loss"] = loss
    return output


def _as_reset(converted: type[nn.Module], host_reset: Callable[..., object]) -> Callable[..., object]:
    """Return timm's `reset_classifier` as one that gives each exit a copy of the new classifier."""

    @functools.wraps(host_reset)
    def reset_classifier(self: Any, num_classes: int, *args: object, **kwargs: object) -> None:
        if not num_classes:
            raise ValueError("early exit needs class probabilities: call mmod.undo_ before reset_classifier(0)")
        super(converted, self).reset_classifier(num_classes, *args, **kwargs)
        for head in self.modules():
            if isinstance(head, HeadCopy):
                head.copy_modules(name for name in _CLASSIFIER if name in head._modules)

    return reset_classifier
