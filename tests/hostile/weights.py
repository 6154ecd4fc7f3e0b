"""Hostile weights, saved models and states of audits."""

from __future__ import annotations

import base64
import functools
import io
import json
import pickle
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch

import mmod
from mmod.io.tensors import read_tensors, write_tensors
from mmod.opening.weights import load_weights, read_weights
from mmod.training.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from mmod.training.image.evaluate import evaluate
from tests.hostile import Case
from tests.kit import bad_configs as configs
from tests.kit import interrupted_audit as audits
from tests.kit.bad_files import (
    IMAGES,
    NO_JSON,
    Payload,
)
from tests.kit.saved_models import CHANGES, edit


@functools.lru_cache
def _state() -> dict[str, torch.Tensor]:
    return timm.create_model("test_vit").state_dict()


def _nan_weights(place: str, value: float, _: Any) -> Any:
    """Load weights that are not finite, and evaluate the model on one image."""
    state = {name: tensor.clone() for name, tensor in _state().items()}
    state[place].view(-1)[0] = value
    write_tensors("model.safetensors", state)
    model = timm.create_model("test_vit")
    load_weights(model, read_weights("model.safetensors"), "model.safetensors")

    class Stream:
        steps_per_epoch = 1

        def batches(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            yield torch.ones(1, 3, 160, 160), torch.zeros(1, dtype=torch.int64)

    return evaluate(model, Stream())  # type: ignore[arg-type]


def weight_cases() -> Iterator[Case]:
    def read(name: str, write: Callable[[Path], Any], _: Any) -> Any:
        write(Path(name).absolute())
        return read_weights(name)

    def fit(change: Callable[[dict[str, Any]], Any], _: Any) -> Any:
        state = dict(_state())
        change(state)
        write_tensors("model.safetensors", state)
        load_weights(timm.create_model("test_vit"), read_weights("model.safetensors"), "model.safetensors")

    def resume(damage: Callable[[Path], Any], _: Any) -> Any:
        parts = Checkpoint({"a": torch.zeros(64)}, {"a": torch.zeros(64)}, {"optimizer": {}})
        path = save_checkpoint(Path("checkpoints"), 1, 2, parts)
        damage(path)
        return load_checkpoint(path, averaged=True)

    # Built here, because each case is a new process.
    _state()
    for number, (name, write, message) in enumerate(configs.WEIGHTS):
        says = rf"'{name}'.*{message}"
        yield Case("weights", f"{name} {number}", "refused", functools.partial(read, name, write), says)
    for name, data in IMAGES.items():
        for file in ("model.safetensors", "model.pt"):
            write_data = functools.partial(_write, data)
            reader = functools.partial(read, file, write_data)
            yield Case("weights", f"{file}: {name}", "refused", reader, re.escape(file))
    for name, header in _HEADERS.items():
        data = len(header).to_bytes(8, "little") + header + bytes(16)
        write_data = functools.partial(_write, data)
        reader = functools.partial(read, "model.safetensors", write_data)
        yield Case("weights", f"safetensors: {name}", "refused", reader, r"model\.safetensors")
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "a name is missing": lambda state: state.pop("norm.weight"),
        "no names": lambda state: state.clear(),
        "a name too many": lambda state: state.update(other=torch.zeros(1)),
        "10,000 names too many": lambda state: state.update({f"n{i}": torch.zeros(1) for i in range(10_000)}),
        "another shape": lambda state: state.update({"norm.weight": torch.zeros(3)}),
        "a scalar": lambda state: state.update({"norm.weight": torch.zeros(())}),
        "no values": lambda state: state.update({"norm.weight": torch.zeros(0)}),
        "other classes": lambda state: state.update({"head.weight": torch.zeros(7, 64), "head.bias": torch.zeros(7)}),
    }
    for name, change in changes.items():
        yield Case("weights", name, "refused", functools.partial(fit, change), r"model\.safetensors")
    for place in ("patch_embed.proj.weight", "norm.bias", "head.weight"):
        for value in (float("nan"), float("inf")):
            reader = functools.partial(_nan_weights, place, value)
            yield Case("weights", f"{place} holds {value}", "refused", reader, "a finite number")
    damages: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda data: b"",
        "cut": lambda data: data[: len(data) // 2],
        "a byte less": lambda data: data[:-1],
        "a pickle": lambda data: pickle.dumps(Payload()),
        "zeros": lambda data: bytes(len(data)),
    }
    for part in ("model.safetensors", "ema.safetensors", "training.pt"):
        for name, damage in damages.items():
            reader = functools.partial(resume, functools.partial(_damage, part, damage))
            yield Case("weights", f"checkpoint, {part}: {name}", "refused", reader, re.escape(part))
        reader = functools.partial(resume, functools.partial(_remove, part))
        yield Case("weights", f"checkpoint without {part}", "refused", reader, re.escape(part))


def _write(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def _damage(part: str, damage: Callable[[bytes], bytes], folder: Path) -> None:
    (folder / part).write_bytes(damage((folder / part).read_bytes()))


def _remove(part: str, folder: Path) -> None:
    (folder / part).unlink()


_TENSOR = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
_HEADERS = {
    "no JSON": b"{",
    "a list": b"[]",
    "lists 10,000 deep": b"[" * 10_000 + b"]" * 10_000,
    "a shape beyond memory": json.dumps({"a": {**_TENSOR, "shape": [1 << 62, 1 << 62]}}).encode(),
    "a negative shape": json.dumps({"a": {**_TENSOR, "shape": [-4]}}).encode(),
    "offsets beyond the file": json.dumps({"a": {**_TENSOR, "data_offsets": [0, 1 << 40]}}).encode(),
    "offsets backwards": json.dumps({"a": {**_TENSOR, "data_offsets": [16, 0]}}).encode(),
    "tensors that overlap": json.dumps({"a": _TENSOR, "b": _TENSOR}).encode(),
    "an unknown type": json.dumps({"a": {**_TENSOR, "dtype": "F7"}}).encode(),
    "broken UTF-8": b'{"\xff": %s}' % json.dumps(_TENSOR).encode(),
    "bytes that no tensor has": json.dumps({"a": {**_TENSOR, "shape": [2], "data_offsets": [0, 8]}}).encode(),
}


@functools.lru_cache
def _saved() -> dict[str, bytes]:
    """Return the files of a saved model."""
    model = mmod.route_(timm.create_model("test_vit"), mmod.RoutingConfig(router="linear", blocks=(2, 4)))
    with tempfile.TemporaryDirectory() as folder:
        mmod.save_pretrained(model, folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def saved_model_cases() -> Iterator[Case]:
    def load(change: Callable[[Path], Any], _: Any) -> Any:
        Path("model").mkdir()
        for name, data in _saved().items():
            Path("model", name).write_bytes(data)
        change(Path("model"))
        return mmod.load_pretrained("model")

    def edited(change: Any, folder: Path) -> None:
        edit(folder, change)

    def rewritten(data: bytes, folder: Path) -> None:
        (folder / "mmod.json").write_bytes(data)

    def scaled(folder: Path) -> None:
        config = json.loads((folder / "mmod.json").read_text())
        config["methods"][0]["capacities"][0] = 1.0
        (folder / "mmod.json").write_text(json.dumps(config))

    def swapped(folder: Path) -> None:
        state, _ = read_tensors(folder / "model.safetensors")
        write_tensors(folder / "model.safetensors", state)

    _saved()
    names = r"model|mmod\.json|router|methods"
    for number, (change, message) in enumerate(CHANGES):
        reader = functools.partial(load, functools.partial(edited, change))
        yield Case("saved models", f"change {number}", "refused", reader, message)
    for name, value in _SETTINGS.items():
        change = functools.partial(_settled, name, value)
        reader = functools.partial(load, functools.partial(edited, change))
        says = f"{names}|{name.split('.')[-1]}"
        yield Case("saved models", f"{name} is {str(value)[:30]!r}", "refused", reader, says)
    for name, data in NO_JSON.items():
        reader = functools.partial(load, functools.partial(rewritten, data))
        yield Case("saved models", f"mmod.json: {name}", "refused", reader, names)
    yield Case("saved models", "a config of its own", "refused", functools.partial(load, scaled), "set_capacity_")
    yield Case("saved models", "weights without a header", "refused", functools.partial(load, swapped), names)
    yield Case("saved models", "no files", "refused", functools.partial(load, shutil.rmtree), names)


def _settled(name: str, value: Any, config: dict[str, Any], weights: Any) -> None:
    group: Any = config
    *parents, last = name.split(".")
    for parent in parents:
        group = group[int(parent) if parent.isdecimal() else parent]
    group[last] = value


_SETTINGS: dict[str, Any] = {
    "library": "os",
    "methods": [{"kind": "no such method"}],
    "methods.0.parts": 3,
    "methods.0.parts.image": {"router": "os.system"},
    "methods.0.parts.image.capacity": 3,
    "methods.0.parts.image.blocks": [99],
    "model.architecture": "../../etc/passwd",
    "model.architecture ": "hf-hub:a/b",
    "model": {},
}


@functools.lru_cache
def _half_done() -> bytes:
    """Return the file of an audit that was interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "partial.json"
        try:
            mmod.audit(**audits.options(), evaluate=audits.stopping(58), store=file)
        except audits.Stopped:
            return file.read_bytes()
    raise AssertionError("the audit ended")


def audit_cases() -> Iterator[Case]:
    def resume(damage: Callable[[bytes], bytes], _: Any) -> Any:
        damaged = damage(_half_done())
        assert damaged != _half_done()
        Path("partial.json").write_bytes(damaged)
        try:
            return mmod.audit(**audits.options(), store="partial.json")
        finally:
            assert Path("partial.json").read_bytes() == damaged, "what was there stays"

    def objects(values: Any) -> None:
        file = io.BytesIO()
        np.save(file, np.array([Payload()], object), allow_pickle=True)
        packed = base64.b64encode(zlib.compress(file.getvalue())).decode()
        audits.first_array(values)["$tensor"] = packed

    _half_done()
    # Those that are forged fit their checksum, as an attacker's would.
    damages = {**audits.DAMAGES, "an array of objects": audits.forged(objects)}
    says = r"partial\.json' is .*\. Delete it or choose another file$"
    for name, damage in damages.items():
        yield Case("audits", name, "refused", functools.partial(resume, damage), says)
