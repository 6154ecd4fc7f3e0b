"""Labels and captions of every kind: a defined meaning, or a message that names the value; never a silent class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmod.data.corrupt import UnusableError
from mmod.data.labels import Classes, ModelClasses, class_number, match_classes, rank_names, read_caption, read_classes

NAMES = st.text(st.sampled_from("aAbB019_ "), min_size=1, max_size=4)


@given(names=st.sets(NAMES, min_size=1, max_size=8))
def test_names_are_ranked_as_timm_ranks_folders_in_one_order_for_all_processes(names: set[str]) -> None:
    from timm.utils.misc import natural_key

    ranked = rank_names(names)
    keys = [natural_key(name) for name in ranked]
    assert keys == sorted(keys)
    assert list(ranked.values()) == list(range(len(names)))
    assert rank_names(sorted(names)) == rank_names(sorted(names, reverse=True)) == ranked


@given(known=st.lists(NAMES, min_size=1, max_size=8, unique=True), data=st.data())
def test_classes_of_a_model_are_matched_by_name_whatever_their_order(known: list[str], data: Any) -> None:
    model = ModelClasses({name: number for number, name in enumerate(known)}, "the run")
    names = data.draw(st.sets(st.sampled_from(known), min_size=1))
    classes = Classes(rank_names(names), len(names))
    matched = match_classes(classes, names, model, "the set")
    assert {name: matched.numbers[name] for name in names} == {name: known.index(name) for name in names}
    assert str(matched) == f"{len(names)} of {len(known)} classes, matched by name"
    matched.check_ranks(len(known) + 3)
    assert match_classes(classes, names, None, "the set") is classes


def test_classes_that_a_model_does_not_know_are_named() -> None:
    classes, model = Classes(rank_names("abx"), 3), ModelClasses({"a": 1, "b": 0}, "the run of 'r'")
    with pytest.raises(ValueError, match=r"^the set has classes that the run of 'r' does not name: x; it names a, b"):
        match_classes(classes, "abx", model, "the set")
    assert match_classes(classes, "abx", ModelClasses(model.numbers, "timm", required=False), "the set") is classes
    with pytest.raises(ValueError, match="names 3 classes, a, b, x, and the model has 10 outputs"):
        classes.check_ranks(10)
    classes.check_ranks(3)


@pytest.mark.parametrize("value", [0, 7, 3.0, True, np.int64(5), np.float32(2)])
def test_numbers_are_classes(value: Any) -> None:
    assert class_number(value) == int(value)
    assert type(class_number(value)) is int


@pytest.mark.parametrize("value", [-1, -1.0, 0.5, float("nan"), float("inf"), None, "cat", "3", [1], {"a": 1}, b"1"])
def test_other_values_are_no_class(value: Any) -> None:
    for names in (None, {"dog": 0}):
        with pytest.raises(ValueError, match=r"is no class|is not the name of a class"):
            class_number(value, names)
    assert class_number("dog", {"dog": 4}) == 4


@pytest.mark.parametrize("value", [None, "", " \n", 3, ["a"], {"raw": "a"}, float("nan"), "\ud800", "\ufeff \n"])
def test_a_caption_is_one_text_with_a_word(value: Any) -> None:
    with pytest.raises(UnusableError, match=r"no caption|not UTF-8"):
        read_caption(value)
    # Every character but the mark that Windows writes before a text.
    for caption in ("two words", "  two words \n", "two\r\nwords"):
        assert read_caption(caption) == read_caption(f"\ufeff{caption}") == caption


def test_files_of_class_names(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("sea\ncat\n\n")
    (tmp_path / "list.json").write_text('["sea", "cat"]')
    (tmp_path / "numbers.json").write_text('{"cat": 1, "sea": 0}')
    for name in ("names.txt", "list.json", "numbers.json"):
        assert read_classes(tmp_path / name) == {"sea": 0, "cat": 1}
    for content in ([], {}, [1], {"a": "b"}, {"a": -1}, {"a": True}, ["a", "a"], "a"):
        (tmp_path / "bad.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"bad\.json' (must name classes|names the class 'a' twice)"):
            read_classes(tmp_path / "bad.json")
    (tmp_path / "names.txt").write_text("sea\n \ncat")
    with pytest.raises(ValueError, match=r"names\.txt' names no class in line 2: remove the blank line"):
        read_classes(tmp_path / "names.txt")
    with pytest.raises(FileNotFoundError, match="no file of class names"):
        read_classes(tmp_path / "none.txt")
