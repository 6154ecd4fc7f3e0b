"""Options change the plain fields of a config at any depth, and their values are read as their types ask."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from mmod.config.parse import parse_config
from mmod.io.options import split_options, with_options
from mmod.plain import from_plain
from tools.benchmarks.command import MODES, config_class


@dataclass
class Group:
    rate: float = 0.1
    pair: tuple[float, float] | None = None


@dataclass
class Config:
    name: str = "a"
    level: str | None = None
    group: Group = field(default_factory=Group)
    other: Group | None = None
    free: dict[str, Any] = field(default_factory=dict)
    dense: str | dict[str, Any] = "none"


def changed(words: str, fields: dict[str, Any] | None = None) -> Config:
    return from_plain(Config, with_options(fields or {}, split_options(words.split()), Config))


def test_a_text_stays_a_text_and_other_values_are_yaml() -> None:
    for text in ("2024", "no", "null", "2024-01-01", "[1", "{split}"):
        assert changed(f"--name={text}").name == text
    assert changed("--level null").level is None
    assert changed("--level 2024").level == "2024"
    assert changed("--group.rate 1e-4 --free.rate 1e-4 --free.day 2024-01-01") == Config(
        group=Group(1e-4), free={"rate": 1e-4, "day": "2024-01-01"}
    )
    assert isinstance(changed("--group.rate=1").group.rate, float)
    # As the message on an unquoted one advises.
    assert changed("--free.a='yes' --free.b=true").free == {"a": "yes", "b": True}


def test_a_bracket_that_is_not_closed_is_said_to_be_missing() -> None:
    words = {
        "--free={preset:gradual": "--free: '{preset:gradual' lacks a closing }",
        "--group={rate:1": "--group: '{rate:1' lacks a closing }",
        "--free=[1,[2]": r"--free: '[1,[2]' lacks a closing ]",
        "--dense={base:x": "--dense: '{base:x' lacks a closing }",
        "--group.pair=[1,2": r"--group.pair: '[1,2' lacks a closing ]",
    }
    for line, message in words.items():
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            changed(line)


def test_a_text_that_begins_with_a_bracket_is_a_text_where_anything_is_valid() -> None:
    for text in ("[^[]+proj", "[INST", "{{", "[INST hello"):
        assert from_plain(Config, with_options({}, [("free.a", text)], Config)).free == {"a": text}
    assert changed("--free.a=[1,[2]]").free == {"a": [1, [2]]}


def test_mappings_merge_key_by_key_as_in_files_and_an_empty_one_empties() -> None:
    fields = {"group": {"rate": 0.5}, "free": {"a": {"b": 1, "c": 2}, "d": 3}}
    assert changed("--group.pair=[1,2] --free.a.b=4", fields) == Config(
        group=Group(0.5, (1.0, 2.0)), free={"a": {"b": 4, "c": 2}, "d": 3}
    )
    assert changed('--group={"pair":[1,2]}', fields).group == Group(0.5, (1.0, 2.0))
    assert changed('--free={"a":{"b":4},"e":5}', fields).free == {"a": {"b": 4, "c": 2}, "d": 3, "e": 5}
    for words in ("--free={}", "--free={} --free.a.b=4", '--free={"e":5} --free={} --free={"a":{"b":4}}'):
        assert changed(words, fields).free == ({} if words == "--free={}" else {"a": {"b": 4}})
    assert changed("--other.rate=2", fields).other == Group(2.0)
    # Fields that are written out would leave nothing of a preset.
    assert changed('--free={"preset":"p"}', fields).free == {"preset": "p"}
    assert changed('--free={"preset":"p"} --free={"preset":"q","b":1}').free == {"preset": "q", "b": 1}


@pytest.mark.parametrize("words", ["--dense p.yaml --dense.a.b 1", "--dense.a.b 1 --dense p.yaml"])
def test_keys_change_the_config_that_a_path_names_in_any_order(words: str) -> None:
    assert (
        changed(words).dense == changed("--dense.a.b 1", {"dense": "p.yaml"}).dense == {"base": "p.yaml", "a": {"b": 1}}
    )
    assert changed("--dense.base p.yaml", {"dense": {"base": "p.yaml", "a": 1}}).dense == {"base": "p.yaml", "a": 1}
    assert changed("--dense.base q.yaml", {"dense": {"base": "p.yaml", "a": 1}}).dense == {"base": "q.yaml"}
    # A path that comes later is another config.
    assert changed(f"{words} --dense q.yaml").dense == {"base": "q.yaml", "a": {"b": 1}}
    assert changed('--group.rate=1 --group={"rate":2}').group == Group(1.0)


@pytest.mark.parametrize("words", ["name", "--name", "--name --level", "--free.a.b"])
def test_what_is_no_option_with_a_value_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"unrecognized arguments|expected one argument"):
        changed(words)


@pytest.mark.parametrize("mode", MODES)
def test_help_of_every_benchmark_names_its_keys(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_config(["--help"], config_class(mode))
    assert end.value.code == 0
    assert "  --out\n" in capsys.readouterr().out
