"""Stores: processes that write at once, kills at any byte, damage, other versions and formats."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
import pickle
import signal
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmod.io import store as store_module
from mmod.io.store import Store, fingerprint
from tests.kit.processes import run_processes

IDENTITIES = [{"options": [[0.5, "block"]], "batch": number} for number in range(3)]
VALUES: list[Any] = [{"loss": 0.1 + 0.2}, ["é", None, float("inf")], 3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return filled(tmp_path / "below" / "store.jsonl")


def filled(path: Path) -> Path:
    store = Store(path)
    assert not path.parent.exists() or not path.exists(), "nothing is written before the first result"
    for identity, value in zip(IDENTITIES, VALUES):
        store.put(identity, value)
    return path


def read(path: Path) -> list[Any]:
    store = Store(path)
    return [store.get(identity) for identity in IDENTITIES]


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the results of a file."""
    return [json.loads(line[9:]) for line in path.read_bytes().splitlines()[1:]]


def with_checksum(record: Any) -> bytes:
    text = json.dumps(record).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


@pytest.mark.parametrize("name", [None, "store.jsonl"])
def test_a_result_is_computed_once_by_what_produced_it(tmp_path: Path, name: str | None) -> None:
    store = Store(name and tmp_path / name)
    calls = itertools.count(1)
    for identity in (*IDENTITIES, *IDENTITIES, {"batch": 0, "options": ((0.5, "block"),)}):
        assert store.once(identity, calls.__next__) == identity["batch"] + 1  # type: ignore[operator]
    assert next(calls) == 4
    assert store.get({"options": [[0.5, "block"]]}) is None
    store.put(IDENTITIES[0], None)
    assert store.once(IDENTITIES[0], lambda: pytest.fail("None is a result too")) is None


@dataclasses.dataclass
class Counts:
    kept: dict[str, torch.Tensor]
    images: int = 0


def test_values_are_returned_as_the_file_holds_them(tmp_path: Path) -> None:
    kept = torch.tensor([[True, False]])
    for path in (None, tmp_path / "store.jsonl"):
        store = Store(path)
        value = store.once(
            {}, lambda: {"pair": (1, np.float32(0.5)), 3: np.array([0.1]), "counts": Counts({"a": kept})}
        )
        for found in (value, store.get({}), pickle.loads(pickle.dumps(store)).get({})):
            assert found["pair"] == [1, 0.5]
            assert found["3"].dtype == np.float64
            assert found["counts"]["kept"]["a"].equal(kept)
    store.put({}, Counts({"a": kept}, 3))
    counts = Store(path).get({}, Counts)
    assert counts.images == 3
    assert counts.kept["a"].equal(kept)
    store.put({}, {"kept": []})
    with pytest.raises(ValueError, match=r"store\.jsonl' is damaged, or no store: TypeError: value\.kept must be"):
        store.get({}, Counts)
    with pytest.raises(TypeError, match="a store keeps plain values, arrays, tensors and dataclasses, got <object"):
        store.put({}, object())


def test_a_killed_process_goes_on_after_its_last_whole_result(path: Path) -> None:
    content = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        complete = max(0, sum(end <= size for end in ends) - 1)
        assert read(path) == VALUES[:complete] + [None] * (3 - complete)
        assert path.read_bytes() == content[:size], "reading writes nothing"
        store = Store(path)
        for identity, value in zip(IDENTITIES, VALUES):
            store.once(identity, partial(copy.copy, value))
        assert path.read_bytes().splitlines()[1:] == content.splitlines()[1:], "as if it had never been killed"


def _write_until_killed(path: Path, size: int) -> None:
    """Write results, each several times, and end within a write: after so many bytes in all."""
    left = size
    real = open

    class Dying:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = real(*args, **options)

        def __enter__(self) -> Dying:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, content: Any) -> int:
            nonlocal left
            written = self.file.write(content[:left])
            left -= written
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return int(written)

    def opened(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        return (Dying if set(mode) & set("wa") else real)(self, mode, *args, **options)

    Path.open = opened  # type: ignore[method-assign]
    store = Store(path)
    for number in itertools.count():
        store.put({"number": number % 7}, {"number": number, "values": np.arange(number % 50)})


def test_a_writer_that_is_killed_at_any_byte_loses_one_result_at_most(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    generator = np.random.default_rng(0)
    for size in [*generator.integers(1, 6000, 12).tolist(), 60, 10]:
        assert run_processes(_write_until_killed, path, size) == [-signal.SIGKILL]
        store = Store(path)
        found = [store.get({"number": number}) for number in range(7)]
        for number, value in enumerate(found):
            if value is not None:
                assert value["number"] % 7 == number
                assert value["values"].tolist() == list(range(value["number"] % 50))
        if size > 3000:
            assert None not in found
        store.put({"others": True}, 1)
        assert Store(path).get({"others": True}) == 1


def _write_many(path: Path) -> None:
    rank = int(os.environ["RANK"])
    store = Store(path)
    for number in range(40):
        store.put({"rank": rank, "number": number}, [rank, number])
        # Superseded again and again, under the other's feet.
        store.put({"rank": rank}, "x" * 100 + str(number))
        assert store.once({"both": number}, partial(int, number)) == number


def test_processes_write_into_one_store_at_once(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    mine = Store(path)
    assert run_processes(_write_many, path, world=2) == [0, 0]
    for store in (mine, Store(path)):
        for rank in range(2):
            assert store.get({"rank": rank}) == "x" * 100 + "39"
            assert [store.get({"rank": rank, "number": number}) for number in range(40)] == [
                [rank, number] for number in range(40)
            ]
        assert [store.get({"both": number}) for number in range(40)] == list(range(40))
    both = [record for record in lines(path) if "both" in record["identity"]]
    assert len(both) == 40, "what one has computed the other does not add"


def test_a_later_result_supersedes_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    store, reader = Store(path), Store(path)
    store.put({"other": True}, 0)
    for number in range(50):
        store.put({}, {"number": number, "values": np.ones(number)})
        assert reader.get({})["number"] == number
    assert reader.get({"other": True}) == 0
    before = path.read_bytes()
    store.put({}, {"number": 49, "values": np.ones(49)})
    assert path.read_bytes() == before, "the same result is not written again"


@given(st.data())
def test_every_changed_byte_is_refused_by_name(data: st.DataObject) -> None:
    import tempfile

    file = filled(Path(tempfile.mkdtemp()) / "store.jsonl")
    content = bytearray(file.read_bytes())
    # Without its last byte the last result is cut, and dropped.
    place = data.draw(st.integers(0, len(content) - 2))
    content[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"store\.jsonl' is damaged, or no store: .*\. Delete it or choose another"):
        Store(file)
    assert file.read_bytes() == bytes(content)


FORGED = {
    "no JSON": b"%08x {\n" % zlib.crc32(b"{"),
    "a list": with_checksum([]),
    "no value": with_checksum({"mmod": "1", "identity": {}}),
    "a key twice": b'%08x {"mmod": 1, "mmod": 2}\n' % zlib.crc32(b'{"mmod": 1, "mmod": 2}'),
}


@pytest.mark.parametrize("line", FORGED.values(), ids=FORGED)
def test_forged_lines_are_refused(path: Path, line: bytes) -> None:
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(ValueError, match=r"is damaged, or no store: result 4.*\. Delete it or choose another"):
        Store(path)


@pytest.mark.parametrize("content", [b"notes of mine", b"a,b\n1,2\n", b'{"a": 1}\n', bytes(range(256))])
def test_files_of_others_are_refused_and_stay(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "mine"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"mine' is damaged, or no store: .*Delete it or choose another file"):
        Store(file).put({}, 1)
    assert file.read_bytes() == content
    with pytest.raises(ValueError, match=r"is no regular file\. Delete it or choose another file"):
        Store(tmp_path)


def test_results_of_another_version_stay_and_are_not_read(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "__version__", "99.0")
    store = Store(path)
    assert "holds results of mmod " in (said := capsys.readouterr().out)
    assert said.count("\n") == 1
    assert "which stay in it: mmod 99.0 starts anew" in said
    assert store.get(IDENTITIES[0]) is None
    for number in range(9):
        store.put(IDENTITIES[0], number)
    assert Store(path).get(IDENTITIES[0]) == 8
    assert not capsys.readouterr().out, "said once"
    monkeypatch.undo()
    assert read(path) == VALUES


def test_times_of_another_machine_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.jsonl"
    Store(path).put({"models": ["dense"]}, [1.5], timed_on="cpu")
    assert Store(path).get({"models": ["dense"]}) is None
    assert Store(path).get({"models": ["dense"]}, timed_on="cpu") == [1.5]
    assert {"torch", "threads", "device", "processor"} <= lines(path)[0]["identity"]["environment"].keys()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert Store(path).get({"models": ["dense"]}, timed_on="cpu") is None


def test_a_removed_store_is_gone_and_begins_anew(path: Path) -> None:
    store = Store(path)
    store.remove()
    assert not path.exists()
    assert store.get(IDENTITIES[0]) is None
    store.put(IDENTITIES[1], 1)
    assert read(path) == [None, 1, None]


def test_a_fingerprint_tells_outputs_in_another_order_and_of_another_sign() -> None:
    x = torch.randn(4, 5, 3)
    others = [x, x.flip(0), x.flip(1), x.flip(2), -x, x.roll(1, 0), x.flatten(1), x[:3], x.half() * 1.001]
    assert len({fingerprint(other) for other in others}) == len(others)
    assert fingerprint(x) == fingerprint(x * (1 + 1e-12)) == fingerprint(x.clone())
    assert fingerprint(torch.arange(3) % 2) != fingerprint(torch.arange(3) % 3)
