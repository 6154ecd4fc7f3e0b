import ast
import errno
import json
import math
import re
from pathlib import Path

import pytest
import torch

import mmod
from mmod.io.files import (
    DamagedFileError,
    UnwrittenError,
    locked,
    near_paths,
    parse_json,
    read_json_object,
    replacing,
    write_atomically,
    write_json,
    writing,
)
from mmod.io.tables import write_csv
from mmod.io.tensors import check_complete, read_tensors, write_tensors
from tests.kit.disk import small_disk


@pytest.mark.parametrize("shared", [False, True])
def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "old")

    def write_half() -> None:
        with replacing(path, shared=shared) as partial:
            partial.write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_no_part_of_the_next_folder(tmp_path: Path) -> None:
    left = tmp_path / ".set.partial"
    left.mkdir()
    (left / "old").touch()
    with replacing(tmp_path / "set") as partial:
        partial.mkdir()
        (partial / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["set", "new"]


def test_a_folder_with_files_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"), replacing(tmp_path):
        pass
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_numbers_that_are_none_are_null_in_json_and_empty_in_tables(tmp_path: Path) -> None:
    values = {"a": [1.0, math.nan, (math.inf, 2)], "b": {"c": -math.inf, "d": "nan"}}
    write_json(tmp_path / "values.json", values)
    text = (tmp_path / "values.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [1.0, None, [None, 2]], "b": {"c": None, "d": "nan"}}
    write_csv(tmp_path / "rows.csv", [{"a": math.nan, "b": 0.5}])
    assert (tmp_path / "rows.csv").read_text() == "a,b\n,0.5\n"


# What writes JSON of another form: a store's own lines, texts with a checksum, users' records, other libraries' files.
_OTHER_JSON = {
    "adapters/transformers/saving.py",
    "data/convert/conversations.py",
    "data/readers/lengths.py",
    "data/readers/shard_files.py",
    "data/synthetic/questions.py",
    "io/store.py",
    "opening/open_clip.py",
    "pretrained.py",
    "training/chat/loop.py",
}


def test_files_of_json_have_one_writer() -> None:
    package = Path(mmod.__file__).parent
    writers = set()
    for path in package.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                called = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
                writes = any(re.search(r"write_(atomically|text|bytes)$|\.write$|_append$", name) for name in called)
                if ("json.dumps" in called and writes) or "json.dump" in called:
                    writers.add(str(path.relative_to(package)))
    assert writers <= {"io/files.py", *_OTHER_JSON}


def test_text_that_utf8_cannot_hold_is_escaped(tmp_path: Path) -> None:
    write_atomically(tmp_path / "names.csv", "caf\u00e9 \udcff")
    assert (tmp_path / "names.csv").read_bytes() == b"caf\xc3\xa9 \\udcff"


def test_tied_and_strided_tensors_are_written_in_full(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    state = {"a": base, "b": base, "row": base[1], "turned": base.T}
    write_tensors(tmp_path / "x", state)
    assert all(torch.equal(value, state[name]) for name, value in read_tensors(tmp_path / "x")[0].items())
    for content in (b"", (tmp_path / "x").read_bytes()[:-1]):
        (tmp_path / "y").write_bytes(content)
        with pytest.raises(DamagedFileError, match="y' is no complete safetensors file"):
            read_tensors(tmp_path / "y")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "c": 2, "a": 3}}]'])
def test_a_key_twice_is_refused_at_any_depth(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="plan: the key 'a' occurs twice"):
        parse_json(text, "plan")
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json: the key 'a' occurs twice"):
        read_json_object(tmp_path / "x.json")
    assert parse_json('{"a": {"a": 1}, "b": [{"a": 2}, {"a": 3}]}', "plan")["b"][1] == {"a": 3}


def test_a_full_disk_is_named_and_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with small_disk(20_000):
        with pytest.raises(
            UnwrittenError, match=rf"'{path}' could not be written: .* MB are free.*nothing was written"
        ):
            write_atomically(path, bytes(400_000))
        assert not list(tmp_path.iterdir())
        write_atomically(path, bytes(40))
        before = path.read_bytes()
        with pytest.raises(UnwrittenError, match=rf"'{path}' could not be written: .*'{path}' is kept as it was"):
            write_atomically(path, bytes(400_000))
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("place", ["/proc", "/proc/a/b", "file", "file/a/b"])
def test_a_folder_that_cannot_be_written_is_not_taken_for_a_locked_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, wait: bool
) -> None:
    if place.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("this system has no folder in which nobody can make a file")
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    parent = Path(place).absolute()
    with (
        pytest.raises(UnwrittenError, match=rf"'{parent}/run' could not be written: .*make '{parent}' a folder that"),
        locked(f"{place}/run", wait=wait),
    ):
        raise AssertionError("locked")
    # As advised.
    Path("file").unlink()
    with locked("file/a/b/run", wait=wait):
        assert Path("file/a/b").is_dir()


def test_errors_of_other_kinds_stay_as_they_are(tmp_path: Path) -> None:
    for error in (ValueError("no"), OSError(errno.ENOENT, "none", "x"), RuntimeError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, writing(tmp_path / "x"):
            raise error
        assert caught.value is error


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth"])
def test_a_file_that_is_cut_short_is_found_without_reading_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / "below" / name
    path.parent.mkdir()
    state = {"x": torch.zeros(1000)}
    write_tensors(path, state) if path.suffix == ".safetensors" else torch.save(state, path)
    (tmp_path / "notes.txt").write_text("mine")
    check_complete(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedFileError, match=rf"'{path}' is "):
        check_complete(tmp_path)


def test_a_missing_path_has_those_beside_it_that_have_a_near_name(tmp_path: Path) -> None:
    (tmp_path / "saved-vit").mkdir()
    (tmp_path / "questions.json").write_text("[]")
    assert near_paths(tmp_path / "savedvit") == f"; near ones: {tmp_path / 'saved-vit'}"
    assert near_paths(str(tmp_path / "question.json")) == f"; near ones: {tmp_path / 'questions.json'}"
    # A long path in common makes no name near.
    assert near_paths(tmp_path / "x") == ""
    assert near_paths(tmp_path / "missing" / "saved-vit") == ""
    # Of the other type than it is read as.
    assert near_paths(tmp_path / "saved-vit") == "; it is a folder"
    assert near_paths(tmp_path / "questions.json") == "; it is a file"


@pytest.mark.parametrize(
    ("text", "message"), [("", "it is empty"), (" \n", "it is empty"), ("[1,", "cut off at its end")]
)
def test_json_that_is_none_says_what_is_missing(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^file is no JSON: .*{message}"):
        parse_json(text, "file")
