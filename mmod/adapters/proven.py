"""How blocks of an unknown class are called, as a trial showed it.

Axes: B images, N tokens, K slots per image.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from mmod.adapters.base import BlockStack, NamedArguments, Proof
from mmod.blocks import (
    WINDOWS,
    FlatBlock,
    FormBlock,
    GridSource,
    InterceptedBlock,
    Mixin,
    SegmentsBlock,
    SequenceImages,
    Shell,
    StackCalls,
    grid_of_map,
    parameters_of_block,
)
from mmod.threads import PerThread


def call_of(proof: Proof, block: nn.Module, sequence: SequenceImages | None = None) -> NamedArguments:
    """Return how a proven block is called.

    Args:
        sequence: See `NamedArguments`.
    """
    form = proof.form
    if sequence is not None:
        form["rows"] = (*proof.rows, WINDOWS)
    # Modules of transformers share a config, which a user may change after routing: it is read in each pass.
    configs = [getattr(module, "config", None) for module in block.modules()]
    inner: type[Mixin] = InterceptedBlock
    if proof.layout in ("flat", "bare"):
        inner = FlatBlock
    return NamedArguments(
        **form,
        **proof.options(block, proof.dim),
        parameters=parameters_of_block(block),
        attention_config=next((config for config in configs if hasattr(config, "_attn_implementation")), None),
        sequence=sequence,
        # A host that takes the index of tokens passes none for all of them.
        narrows_always=bool(proof.index_argument),
        shell=Shell(outer=next(iter(outer_mixins(proof).values()), None), inner=inner),
    )


def outer_mixins(proof: Proof) -> dict[str, type[Mixin]]:
    """Return the mixins in front of a method's that a block needs, by what it has; only one can be there."""
    forms = {
        "tokens at the end that are no patches": (proof.suffix, FormBlock),
        "all images in one sequence": (proof.boundaries, SegmentsBlock),
        "tokens that come by name": (proof.tokens, FormBlock),
        "a tuple of tokens and more": (proof.in_tuple, FormBlock),
    }
    return {what: mixin for what, (has_it, mixin) in forms.items() if has_it}


def stack_of(proof: Proof, model: nn.Module, host: str) -> BlockStack:
    """Return the proven blocks of a model; `host` is as in `BlockStack`."""
    block_list: Any = model.get_submodule(proof.blocks)
    calls = PerThread(StackCalls)
    if proof.suffix:
        # Tokens at the end are brought to the front around each block, so blocks cannot pass on rows.
        host = ""
    windows = None
    if proof.windows:
        windows = SequenceImages(calls)
    grid = None
    if proof.projection:
        try:
            projection = model.get_submodule(proof.projection)
        except AttributeError as error:
            raise ValueError(
                f"this {type(model).__name__} has no module {proof.projection!r}, which the model that was saved had"
            ) from error
        grid = GridSource(projection, grid_of_map)
    return BlockStack(
        block_list=proof.blocks,
        blocks=tuple(block_list),
        prefix=proof.prefix + proof.suffix,
        dim=proof.dim,
        call_of=lambda block, config: call_of(proof, block, windows),
        calls=calls,
        class_token=proof.prefix > 0,
        host=host,
        grid=grid,
        windows=windows,
        proof=proof,
        # torchvision's are `encoder_layer_0` and so on.
        keys=tuple(block_list._modules),
    )
