"""Configs stand on others: how they meet, what is refused, and what those that are shipped repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mmod.config.parse import stack_configs
from mmod.io.configs import config_names, existing_config
from mmod.io.records import flatten
from mmod.io.yaml import merged, parse_yaml, read_yaml
from mmod.training import TrainConfig


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_a_file_changes_what_its_bases_say(tmp_path: Path) -> None:
    write(tmp_path, one="{a: 1, b: {c: 2, d: 3}, e: [1, 2], f: {g: 0}, h: null}")
    write(tmp_path, two="{a: 5, b: {i: 6}}", top="base: [one.yaml, two.yaml]\nb: {c: 7}\ne: [3]\nf: null\nj: null")
    assert read_yaml(tmp_path / "top.yaml") == {"a": 5, "b": {"c": 7, "d": 3, "i": 6}, "e": [3], "h": None, "j": None}
    write(tmp_path, again="base: top.yaml\nh: 1\nf: {k: 1}")
    assert read_yaml(tmp_path / "again.yaml")["f"] == {"k": 1}


def test_a_base_is_a_file_beside_or_a_shipped_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, mine="base: digits/dense\nepochs: 1")
    assert read_yaml(tmp_path / "mine.yaml") == {**read_yaml("digits/dense"), "epochs": 1}
    (tmp_path / "below").mkdir()
    write(tmp_path / "below", deep="base: ../mine.yaml")
    monkeypatch.chdir(tmp_path / "below")
    assert read_yaml("deep.yaml")["epochs"] == 1
    # Where the program was started does not decide what a base is.
    write(tmp_path, other="base: deep.yaml")
    with pytest.raises(FileNotFoundError, match=r"other\.yaml': no base 'deep\.yaml', at '.*deep\.yaml' or in"):
        read_yaml(tmp_path / "other.yaml")


def test_cycles_and_what_is_no_base_are_refused_with_the_path(tmp_path: Path) -> None:
    write(tmp_path, a="base: b.yaml", b="base: [c.yaml]", c="base: b.yaml", d="base: {e: 1}", e="base: [1]")
    with pytest.raises(ValueError, match=r"a base of itself: \S*b\.yaml -> \S*c\.yaml -> \S*b\.yaml; remove"):
        read_yaml(tmp_path / "a.yaml")
    for name in "de":
        with pytest.raises(ValueError, match=rf"{name}\.yaml': base must be a file or a name"):
            read_yaml(tmp_path / f"{name}.yaml")


def test_one_base_may_be_reached_twice(tmp_path: Path) -> None:
    write(tmp_path, root="a: 1", x="base: root.yaml\nb: 2", y="base: root.yaml\nc: 3", top="base: [x.yaml, y.yaml]")
    assert read_yaml(tmp_path / "top.yaml") == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize(
    ("fields", "changes", "result"),
    [
        ({"dense": {"a": 1}}, {"dense": {"base": "x"}}, {"dense": {"base": "x"}}),
        ({"dense": {"base": "y", "a": 1}}, {"dense": {"base": "x", "b": 2}}, {"dense": {"base": "x", "b": 2}}),
        # The same config, of which further keys differ.
        ({"dense": {"base": "x", "a": 1}}, {"dense": {"base": "x", "b": 2}}, {"dense": {"base": "x", "a": 1, "b": 2}}),
        ({"then": {"dense": {"a": 1}}}, {"then": {"dense": {"base": "x"}}}, {"then": {"dense": {"base": "x"}}}),
        # A key of other mappings, such as the options of a user's data.
        (
            {"data": {"options": {"a": 1}}},
            {"data": {"options": {"base": "x"}}},
            {"data": {"options": {"a": 1, "base": "x"}}},
        ),
    ],
)
def test_another_base_replaces_a_config_and_is_any_key_elsewhere(
    fields: dict[str, Any], changes: dict[str, Any], result: dict[str, Any], tmp_path: Path
) -> None:
    assert merged(fields, changes) == result
    write(tmp_path, below=yaml.safe_dump(fields), above=yaml.safe_dump({"base": "below.yaml", **changes}))
    assert read_yaml(tmp_path / "above.yaml") == result


def test_command_lines_stack_configs(tmp_path: Path) -> None:
    write(tmp_path, short="epochs: 1\nmodel: {args: {depth: 2}}\nrouting: {blocks: [1]}")
    command = ["digits/a-mod", "--optim.lr", "2e-4", "--config", str(tmp_path / "short.yaml"), "--epochs=3"]
    fields, options = stack_configs(command)
    assert fields == merged(read_yaml("digits/a-mod"), read_yaml(tmp_path / "short.yaml"))
    assert options == ["--optim.lr", "2e-4", "--epochs=3"]
    config = TrainConfig.load(command[0], command[1:])
    assert (config.epochs, config.optim.lr, config.optim.opt) == (3, 2e-4, "muon")
    assert config.model.args["depth"] == 2
    assert config.model.args["embed_dim"] == 64
    assert config.routing == {"preset": "a-mod", "capacity": 0.5, "blocks": [1]}
    assert TrainConfig.load("digits/a-mod", [f"--config={tmp_path / 'short.yaml'}"]).epochs == 1
    with pytest.raises(ValueError, match="expected one argument"):
        stack_configs(["digits/a-mod", "--config"])
    assert stack_configs(["--help"]) == (None, ["--help"])


def test_shipped_configs_repeat_nothing_of_their_bases() -> None:
    levels = {}
    repeated = {}
    for name in config_names():
        path = existing_config(name)
        fields = own_fields(path)
        levels[name] = 0
        while (base := own_fields(path).get("base")) is not None:
            path = path.parent / base
            levels[name] += 1
            assert path.is_file(), name
        if "base" in fields:
            base = flatten(read_yaml(existing_config(name).parent / fields.pop("base")))
            repeated[name] = [key for key, value in flatten(fields).items() if key in base and base[key] == value]
    # A reader of a config opens two others at most.
    assert {name: level for name, level in levels.items() if level > 2} == {}
    assert {name: keys for name, keys in repeated.items() if keys} == {}


def own_fields(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = parse_yaml(path.read_text(), str(path))
    return fields
