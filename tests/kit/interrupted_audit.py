"""An audit that stops midway, and damages of the file that it leaves."""

from __future__ import annotations

import functools
import itertools
import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import mmod
from mmod.audits import SHIFTS, Comparisons, LabelledBatch, evaluate_classes
from tests.kit.zoo import make_images, make_model

NAME = "vit_tiny_patch16_224"
Batch = tuple[Tensor, Tensor]


class Stopped(Exception):
    """What cuts an audit."""


def batches(images: int, seed: int) -> list[Batch]:
    return list(zip(make_images(NAME, images, seed).split(3), (torch.arange(images) % 7).split(3)))


def labelled(batches: list[Batch]) -> list[LabelledBatch]:
    """Return batches with their classes as strata, and two kinds of tokens."""
    half = np.repeat(["upper", "lower"], [9, 8])
    return [
        LabelledBatch(
            batch, {"class": [str(n) for n in batch[1].tolist()]}, {"half": np.tile(half, (len(batch[0]), 1))}
        )
        for batch in batches
    ]


def options(**comparisons: Any) -> dict[str, Any]:
    """Return all that an audit can be asked for, with some other comparisons."""
    compared = {
        "positions_from": batches(5, seed=1),
        "reference": make_model(NAME),
        "shifts": {"noise": SHIFTS["noise"]},
        "others": {"other": batches(5, seed=2)},
        "baselines": {"random": mmod.route_(make_model(NAME), mmod.RoutingConfig(router="random"))},
    }
    return {
        "model": mmod.route_(make_model(NAME), mmod.RoutingConfig(router="linear", capacity=0.4, blocks=(1, 2))),
        "batches": labelled(batches(8, seed=0)),
        "comparisons": Comparisons(**{**compared, **comparisons}),
        "config": mmod.AuditConfig(leave_one_out=1, draws=1, resamples=100),
    }


def stopping(calls: int) -> Any:
    """Return an evaluation that evaluates so many times."""
    left = itertools.count(calls, -1)

    def evaluate(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        if not next(left):
            raise Stopped
        return evaluate_classes(model, batch)

    return evaluate


def first_array(value: Any) -> dict[str, str]:
    """Return the first array of a file's plain values."""
    if isinstance(value, dict) and set(value) == {"$tensor"}:
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(first_array, items)), {})


def changed(change: Callable[[Any], object], *, is_forged: bool = False) -> Callable[[bytes], bytes]:
    """Return what changes the plain values of a file's last result, and the checksum of a forged one."""

    def write(content: bytes) -> bytes:
        *before, line = content.splitlines()
        fields = json.loads(line[9:])
        change(fields["value"])
        text = json.dumps(fields).encode()
        check = b"%08x" % zlib.crc32(text) if is_forged else line[:8]
        return b"".join(b"%b\n" % row for row in (*before, b"%b %b" % (check, text)))

    return write


forged = functools.partial(changed, is_forged=True)
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "binary": lambda _: bytes(range(256)),
    "a list": lambda _: b"[]\n",
    "text of another file": lambda _: b'{"of": {}, "done": {}, "state": {}}\n',
    "no checksum": lambda content: content.splitlines()[0][9:] + b"\n",
    "another first image": changed(lambda values: values.update(first=999)),
    "a number is a text": changed(lambda values: values.update(first="two")),
    "a number is NaN": changed(lambda values: values.update(first=float("nan"))),
    "strata are short": changed(lambda values: values["labels"]["class"].pop()),
    "an array is another": changed(
        lambda values: first_array(values["decisions"]).update(first_array(values["outcomes"]))
    ),
    "no first image": forged(lambda values: values.pop("first")),
    "outcomes by another name": forged(lambda values: values.update(done=values.pop("outcomes"))),
    "decisions are a list": forged(lambda values: values.update(decisions=[])),
    "a part is missing": forged(lambda values: next(iter(values["decisions"].values())).pop("keep")),
    "a part is null": forged(lambda values: values.update(decisions=None)),
    "an array is text": forged(lambda values: first_array(values).update({"$tensor": "no array"})),
    "an array is cut": forged(
        lambda values: first_array(values).update({"$tensor": first_array(values)["$tensor"][:40]})
    ),
}
