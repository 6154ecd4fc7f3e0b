"""The roles that arguments of a block may have by their shapes, of which a trial shows the right one.

Axes: B images, N tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from mmod.adapters.base import Proof, has_tensors
from mmod.adapters.probe import BlockInputs
from mmod.blocks import MASKS
from mmod.plain import without

# Arguments that take the index of tokens which are not all of them.
INDEX_ARGUMENTS = ("position_mask",)
# Ways to give arguments their roles that are tried.
_ROLES = 32


def redrawn(inputs: BlockInputs) -> dict[str, object]:
    """Return the arguments of a trial, in which values of the two images differ, and no gate of zeros hides a block."""
    generator = torch.Generator().manual_seed(5)
    tokens = inputs.x_BND.shape[1]

    def redraw(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        of_images = len(leaf) == 2
        # Rows that images share are mostly rotary embeddings.
        has_rows = {tokens, tokens - inputs.seen.prefix} & {*leaf.shape}
        if leaf.is_floating_point() and (of_images or not has_rows):
            return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        is_numbers = of_images and leaf.ndim == 1 and leaf.dtype == torch.long
        if is_numbers and int(leaf[0]) == int(leaf[1]) > 0:
            # The number before one that is valid is valid.
            return leaf - torch.arange(2)
        return leaf

    if inputs.seen.boundaries:
        return dict(inputs.arguments)
    arguments = dict(inputs.arguments)
    for name, value in inputs.arguments.items():
        if name not in (*MASKS, *INDEX_ARGUMENTS):
            arguments[name] = tree_map(redraw, value)
    return arguments


def roles_of(base: Proof, inputs: BlockInputs) -> Iterator[Proof]:
    """Return the roles that arguments may have by their shapes, which leave open what has as many values as tokens."""
    tokens = inputs.x_BND.shape[1]
    lengths = {tokens: 0, tokens - inputs.seen.prefix: inputs.seen.prefix}
    arguments = {name: value for name, value in inputs.arguments.items() if has_tensors(value)}
    others = without(arguments, (base.mask, base.index_argument))
    options = [_possible_roles(value, base, lengths) for value in others.values()]
    numbers = itertools.product(*(range(len(roles)) for roles in options))
    for chosen in itertools.islice(sorted(numbers, key=sum), _ROLES):
        roles = {name: roles[number] for name, roles, number in zip(others, options, chosen)}
        prefixes = {role.prefix for role in roles.values() if role.rows}
        if len(prefixes) > 1:
            continue
        yield dataclasses.replace(
            base,
            rows=tuple(name for name, role in roles.items() if role.rows),
            images=tuple(name for name, role in roles.items() if role.images),
            shared=tuple(name for name, role in roles.items() if not role.rows and not role.images),
            rope_prefix=max(prefixes, default=0),
        )


class _Role(NamedTuple):
    """What an argument may be.

    Args:
        rows: It has a row for each token.
        images: It has a value for each image.
        prefix: Leading tokens without a row.
    """

    rows: bool
    images: bool
    prefix: int = 0


def _possible_roles(value: object, base: Proof, lengths: Mapping[int, int]) -> list[_Role]:
    """Return the roles of an argument; `lengths` are the leading tokens without a row, by the number of rows.

    What has a value for each token at this size, and runs unchanged on fewer tokens, has no rows: so that is tried
    before. One sequence has one candidate.
    """
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.ndim]
    roles: list[_Role] = []
    readings = [False]
    if not base.boundaries and all(len(leaf) == 2 for leaf in leaves):
        readings = [True, False]
    for images in readings:
        unchanged = _Role(False, images)
        prefix = _missing_rows(value, images, base.layout, lengths)
        if prefix is None:
            roles.append(unchanged)
            continue
        likely = [unchanged, _Role(True, images, prefix)]
        if base.boundaries:
            likely.reverse()
        roles += likely
    return roles


def _missing_rows(value: object, images: bool, layout: str, lengths: Mapping[int, int]) -> int | None:
    """Return the number of leading tokens without a row; None if the argument has no rows."""
    items = value if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(item, Tensor) and item.ndim > 1 for item in items):
        return None
    found = {lengths.get(_rows_of(item, images, layout)) for item in items}
    if len(found) != 1:
        return None
    return found.pop()


def _rows_of(item: Tensor, images: bool, layout: str) -> int:
    """Return how many rows a tensor has in a layout; 0 for none."""
    if layout != "batch" or (item.ndim == 2 and not images):
        return item.shape[-2]
    if images or len(item) == 1:
        return item.shape[1]
    return 0
