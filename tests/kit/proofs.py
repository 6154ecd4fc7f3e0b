"""Trials of blocks that are made once for all models of the same settings, weights and code.

Tests make the same few models again and again, and each model is tried anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import pickle
from collections.abc import Iterable
from types import FunctionType

import torch
from torch import Tensor, nn

from mmod.adapters import roles, trial
from mmod.adapters.base import Proof
from mmod.adapters.probe import BlockInputs

_prove_block = trial._prove_block
_PROOFS: dict[tuple[object, ...], Proof] = {}


class _Read(pickle.Pickler):
    """Writes all that a trial reads: attributes and tensors by value, and the code of classes and functions."""

    def __init__(self) -> None:
        self.written = io.BytesIO()
        # Without repetitions, in the order of their first use.
        self.code: dict[object, None] = {}
        super().__init__(self.written)

    def persistent_id(self, value: object) -> object:
        """Return what is written for a tensor; note code, which is written by its name alone."""
        if isinstance(value, Tensor):
            if value.is_meta:
                return tuple(value.shape), str(value.dtype)
            raw = value.detach().contiguous().flatten().view(torch.uint8).numpy()
            return type(value), tuple(value.shape), str(value.dtype), hashlib.sha256(raw).digest()
        if isinstance(value, type) and value not in self.code:
            self.code[value] = None
            for base in value.__mro__:
                self._note(vars(base).values())
        self._note([value])
        return None

    def _note(self, values: Iterable[object]) -> None:
        for value in values:
            if isinstance(value, FunctionType):
                # A test may exchange it in place.
                self.code |= {value: None, value.__code__: None}


def _prove_once(inputs: BlockInputs, block: nn.Module) -> Proof:
    read = _Read()
    # Of the tokens a trial takes the shape alone.
    redrawn = dataclasses.replace(inputs, x_BND=torch.empty_like(inputs.x_BND, device="meta"))
    redrawn = dataclasses.replace(redrawn, arguments=roles.redrawn(inputs))
    try:
        # A copy has weights that are drawn alike for all models, and no hooks.
        read.dump((trial.random_copy(block), redrawn))
    # Objects may raise anything: a lock, a class inside a function, a tensor without numbers.
    except Exception:
        return _prove_block(inputs, block)
    key = (hashlib.sha256(read.written.getbuffer()).digest(), *read.code)
    if key not in _PROOFS:
        _PROOFS[key] = _prove_block(inputs, block)
    return _PROOFS[key]


def prove_once() -> None:
    """Let blocks of equal models be tried once in this process, and in those that are forked from it."""
    trial._prove_block = _prove_once
