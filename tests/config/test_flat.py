"""Configs in the form of mmod 0.1, in which the options of all parts stood side by side."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import mmod
from mmod import Gate, LanguageRouting, RoutingConfig, Threshold
from mmod.config.flat import FLAT

# What mmod 0.1 made of presets and keywords, and saved.
SAVED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "flat_configs.json").read_text())


@pytest.mark.parametrize("case", SAVED, ids=lambda case: f"{case['preset']}-{'-'.join(case['changes'])}")
def test_saved_configs_are_those_that_the_same_words_make(case: dict[str, Any]) -> None:
    read = RoutingConfig.from_dict(case["saved"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made = mmod.preset(case["preset"], **case["changes"]) if case["preset"] else RoutingConfig(**case["changes"])
    assert read == made
    assert RoutingConfig.from_dict(json.loads(json.dumps(read.to_dict()))) == read
    for name, part in FLAT.items():
        options, key = read.to_dict()[part], name.removeprefix("gate_") if part == "gate" else name
        if isinstance(options, dict) and key in options:
            assert options[key] == (False if case["saved"][name] == "block" else case["saved"][name])
    assert (read.language.scored == "norm") == (case["saved"]["normalize"] == "block")


def test_options_beside_the_parts_are_deprecated_in_code_alone() -> None:
    with pytest.warns(DeprecationWarning, match=r"threshold is an option of select, gate_scale is an option of gate"):
        former = RoutingConfig(router="linear", select="threshold", threshold=0.3, gate_scale=0.1)
    assert former == RoutingConfig(router="linear", select=Threshold(0.3), gate=Gate("tanh", 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RoutingConfig.from_dict({"router": "linear", "gate_scale": 0.1, "tokens": "all"}) == RoutingConfig(
            router="linear", gate=Gate(scale=0.1), language=LanguageRouting(tokens="all")
        )


def test_a_mapping_changes_options_of_a_part_and_a_value_replaces_it() -> None:
    config = mmod.preset("p-mod", depth=6, gate={"scale": 0.1}, language={"gate_on": "mlp"})
    assert config.gate == Gate("tanh", 0.1, reweight_skipped=True)
    assert config.replace(language={"tokens": "all"}).language == LanguageRouting(gate_on="mlp", tokens="all")
    assert config.replace(gate="sigmoid").gate == Gate("sigmoid")
    assert config.replace(router={"bias": False}).router == mmod.score("linear", normalize=False, init_std=0.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gate": {"skale": 1}}, "unknown option of gate skale; valid ones are name, scale, reweight_skipped"),
        ({"router": {"name": "linear", "seed": 1}}, "unknown option of router seed; valid ones are normalize, bias"),
        ({"select": {"threshold": "x"}}, "threshold must be a finite number, got 'x'"),
        ({"language": 3}, "language must be a name or options of LanguageRouting, got 3"),
        ({"select": "topk", "max_tokens": 3}, "belong to select='threshold'"),
        ({"router": "linear", "normalize": "none"}, "router.normalize must be true or false, got 'none'"),
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
    ],
)
def test_options_of_parts_are_strict(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        RoutingConfig.from_dict(fields)
