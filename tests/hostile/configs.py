"""Hostile configs, command lines, plans, notes and tables."""

from __future__ import annotations

import functools
import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from mmod.config import RoutingConfig
from mmod.config.parse import parse_config
from mmod.data.convert.pairs import PairsConversion, convert_pairs
from mmod.data.corrupt import CorruptReport
from mmod.data.readers.shards import ShardSource
from mmod.io.records import record_config
from mmod.training import TrainConfig
from mmod.training.engine.run_folder import read_fit
from mmod.training.image.evaluate import EvalResult
from tests.hostile import Case
from tests.kit import bad_configs as configs
from tests.kit.bad_files import (
    END,
    NO_JSON,
    PNG,
    TABLES,
    Payload,
    body,
)


def config_cases() -> Iterator[Case]:
    def load(text: bytes, kind: Any, _: Any) -> Any:
        Path("config.yaml").write_bytes(text)
        return kind.load("config.yaml")

    base = configs.BASE
    texts: dict[str, Any] = {
        "lists 10,000 deep": base + "routing: " + "[" * 10_000 + "]" * 10_000,
        "maps 10,000 deep": base + "".join(f"{' ' * depth}a:\n" for depth in range(10_000)),
        "an alias of itself": "a: &a {b: *a}\n",
        "an anchor alone": base + "epochs: &a 1\nseed: *a\n",
        "a key twice, quoted": base + "epochs: 1\n'epochs': 2\n",
        "a key twice in a list": base + "routing: [{a: 1, a: 2}]\n",
        "UTF-16 that is cut": base.encode("utf-16")[:-1],
        "Latin-1": base.encode() + b"# \xe9\n",
        "half a letter": base.encode() + b"output: \xc3",
        "a surrogate": base.encode() + b"output: \xed\xa0\x80\n",
        "a byte 0": base.encode() + b"seed: \x00\n",
        "a pickle": pickle.dumps(Payload()),
        "zeros": bytes(4096),
        "an image": PNG,
        "10 MB for a name": base + f"tensorboard: {'a' * 10**7}\n",
        "10 MB for a key": base + f"{'a' * 10**7}: 1\n",
        "a python object": base + "seed: !!python/object/new:os.system [touch ran]\n",
        "a python name": base + "seed: !!python/name:os.system\n",
        "bytes": base + "output: !!binary aGVsbG8=\n",
        "a set": base + "data: !!set {a, b}\n",
        "a date": base + "seed: 2024-01-01\n",
        "a base that is none": "base: 3\n" + base,
        "a base that is missing": "base: nowhere.yaml\n" + base,
        "a base of itself": "base: config.yaml\n" + base,
        "a base elsewhere": "base: ../../../../etc/passwd\n" + base,
        "a base that has no end": "base: /dev/zero\n" + base,
    }
    for name, text in texts.items():
        data = text if isinstance(text, bytes) else text.encode()
        says = "config.yaml|optim|required|valid|seed|epochs|output|data|passwd"
        yield Case("configs", name, "refused", functools.partial(load, data, TrainConfig), says)
    for number, (text, message) in enumerate(configs.FILES):
        read = functools.partial(load, text.encode(), TrainConfig)
        yield Case("configs", f"text {number}", "refused", read, re.escape(message))
    for kind, fields in configs.KINDS.items():
        for key, hint in configs.fields_of(kind):
            type_ = configs.basic_type(hint)
            numbers = (configs.NAN, configs.INF, -configs.INF) if type_ in (int, float) else ()
            for value in (configs.FOREIGN[type_], *numbers):
                text = yaml.safe_dump(configs.nested(fields, {key: value})).encode()
                name = f"{kind.__module__.split('.')[-2]}: {key} is {value!r}"
                says = rf"{re.escape(key)}.* must be .*got {re.escape(repr(value))}"
                yield Case("configs", name, "refused", functools.partial(load, text, kind), says)
    for kind, changes, message in configs.REFUSED:
        text = yaml.safe_dump(configs.nested(configs.KINDS[kind], changes)).encode()
        name = f"{kind.__module__.split('.')[-2]}: {changes}"
        yield Case("configs", name, "refused", functools.partial(load, text, kind), re.escape(message))


def option_cases() -> Iterator[Case]:
    def parse(options: list[str], _: Any) -> Any:
        Path("config.yaml").write_text(configs.BASE)
        return parse_config(["config.yaml", *options], TrainConfig)

    for options, message in configs.OPTIONS:
        read = functools.partial(parse, options)
        yield Case("command lines", " ".join(options), "refused", read, rf"^error: .*{re.escape(message)}")


def plan_cases() -> Iterator[Case]:
    def load(data: bytes, _: Any) -> Any:
        Path("plan.json").write_bytes(data)
        return RoutingConfig.load("plan.json")

    sound = {"blocks": [1, 2], "capacity": [0.5, 0.25], "depth": 4}
    wrong: dict[str, list[Any]] = {
        "blocks": [[], None, 3, "12", [1, 1], [2, 1], [-1, 1], [1, 4], [1.5, 2], [[1], 2], [True, 2], [1 << 80, 2]],
        "capacity": [[], [0.5], [2, 1], [-1, 0], ["a", 1], [float("nan"), 1], [float("inf"), 1], None],
        "depth": [0, -4, 1.5, "4", True, [4], 1 << 80],
        "operator": [["block"], ["tail", "block"], "tail", [1, 2], {"a": 1}],
        "context": [["all", "none"], [None, "all"]],
        "router": ["os.system", 3, {"name": "linear", "bias": 3}, {"name": ["linear"]}, ["linear"]],
        "gate": ["sigmoid", {"name": "tanh"}],
        "protect_prefix": [3, "yes", None],
        "extra": [1],
    }
    for key, values in wrong.items():
        for value in values:
            data = json.dumps({**sound, key: value}).encode()
            name = f"{key} is {json.dumps(value)[:40]}"
            yield Case("plans", name, "refused", functools.partial(load, data), rf"plan\.json.*{key}")
    texts = {
        **NO_JSON,
        "a key twice": b'{"blocks": [1], "blocks": [2], "capacity": [0.5], "depth": 4}',
        "maps 10,000 deep": b'{"a": ' * 10_000 + b"1" + b"}" * 10_000,
    }
    for name, data in texts.items():
        yield Case("plans", name, "refused", functools.partial(load, data), r"plan\.json")


def note_cases() -> Iterator[Case]:
    def result(text: bytes, _: Any) -> Any:
        Path("result.json").write_bytes(text)
        return read_fit(Path(), EvalResult)

    def claim(file: str, text: bytes, _: Any) -> Any:
        Path(file).write_bytes(text)
        try:
            return record_config(".", {"a": 1}, file=file, kind="a run")
        finally:
            assert Path(file).read_bytes() == text, "what others wrote stays"

    def index(change: Callable[[bytes], bytes], _: Any) -> Any:
        Path("0.tar").write_bytes(body({"7.png": PNG, "7.cls": b"7"}) + END)
        ShardSource("0.tar", CorruptReport())
        note = Path(".0.tar.cls.index")
        note.write_bytes(change(note.read_bytes()))
        assert ShardSource("0.tar", CorruptReport()).read(0, "L")[1] == 7

    notes = {"a list": b"[]", "no keys": b"{}", "a number": b"3", "other keys": b'{"evaluation": {"x": 1}}'}
    for name, text in {**NO_JSON, **notes, "a key twice": b'{"a": 1,\n"a": 2}'}.items():
        if text:
            says = r"result\.json' is no result of a finished run"
            yield Case("notes", f"result: {name}", "refused", functools.partial(result, text), says)
            for file in ("config.json", "config.yaml"):
                yield Case("notes", f"{file}: {name}", "refused", functools.partial(claim, file, text), rf"{file}|'\.'")
    head = b'{"version": 1, "size": 12800, "tag": null, "samples": %d, "faults": %s}\n'
    for name, change in {
        "empty": lambda data: b"",
        "cut": lambda data: data[:-8],
        "no JSON": lambda data: b"{" + data,
        "a list": lambda data: b"[]\n",
        "zeros": lambda data: bytes(len(data)),
        "a pickle": lambda data: pickle.dumps(Payload()),
        "offsets beyond the shard": lambda data: data[:-32] + b"\x7f" * 32,
        "negative offsets": lambda data: data[:-32] + b"\xff" * 32,
        "offsets whose sum overflows": lambda data: data[:-32] + (b"\xff" * 7 + b"\x7f") * 4,
        "a sample too many": lambda data: data + data[-32:],
        "faults that are numbers": lambda data: head % (1, b"[1]") + data[-32:],
        "lists 10,000 deep": lambda data: b"[" * 10_000 + b"]" * 10_000 + b"\n",
        "another version": lambda data: data.replace(b'"version": 1', b'"version": 9'),
    }.items():
        yield Case("notes", f"index: {name}", "read", functools.partial(index, change))


def table_cases() -> Iterator[Case]:
    def convert(name: str, data: bytes, _: Any) -> Any:
        Path(name).write_bytes(data)
        try:
            return convert_pairs(PairsConversion(name, "out"), progress=False)
        finally:
            assert not Path("out").exists(), "nothing is converted"

    for name, data in TABLES.items():
        yield Case("tables", name, "refused", functools.partial(convert, name, data), rf"^'{re.escape(name)}'.* \S")
    for name, data in NO_JSON.items():
        says = r"'t\.json' is no (JSON: |text in UTF-8)"
        yield Case("tables", f"t.json: {name}", "refused", functools.partial(convert, "t.json", data), says)
