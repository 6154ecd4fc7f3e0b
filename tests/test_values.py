"""Strict values: finite tensors, plain values of files, and numbers of other libraries."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import pytest
import torch

import mmod
from mmod.plain import from_plain
from mmod.values import Checked, check_finite, check_value


@dataclass
class Point:
    name: str
    place: tuple[int, float] = (0, 0.0)


@dataclass
class Places(Checked):
    rows: Sequence[int] = ()
    chosen: frozenset[int] = frozenset()


@dataclass
class Schedule(Checked, group="schedule"):
    steps: Annotated[int | None, "[1, inf)"] = None
    rates: Annotated[tuple[float, ...], 0, "(0, 1]"] = (0.5,)
    shape: Annotated[str, ("linear", "cosine")] = "cosine"


@dataclass
class LongSchedule(Schedule):
    steps: int | None = 1000
    shape: Annotated[str, ("linear",)] = "linear"


@dataclass
class Line:
    points: tuple[Point, ...]
    end: Point | None = None
    weights: dict[str, list[float]] = field(default_factory=dict)
    width: float = 1.0


def test_plain_values_become_dataclasses_and_tuples() -> None:
    values = {
        "points": [{"name": "a", "place": [1, 0.5]}, {"name": "b"}],
        "end": {"name": "c"},
        "weights": {"a": [0.5]},
    }
    line = Line((Point("a", (1, 0.5)), Point("b")), Point("c"), {"a": [0.5]})
    assert from_plain(Line, json.loads(json.dumps(values))) == line
    assert from_plain(Line, {"points": [], "end": None}) == Line(())
    assert isinstance(from_plain(Line, {"points": [], "width": 2}).width, float)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([1], TypeError, r"a config file must be a mapping of keys to values, got \[1\]"),
        ({}, ValueError, "required: points"),
        (
            {"points": [], "width": "1", "weights": 3},
            ValueError,
            r"^2 mistakes: \(1\) width must .*; \(2\) weights must",
        ),
        (
            {"colour": 1, "end": {"name": 2, "sides": 3}},
            ValueError,
            r"4 mistakes: \(1\) unknown config key 'colour'.*; \(2\) unknown config key 'end.sides'.*; "
            r"\(3\) end.name must be .*; \(4\) keys that are required: points",
        ),
        ({"points": [], "colour": 1}, ValueError, "unknown config key 'colour'; valid keys at the top level: end"),
        (
            {"points": [], "widht": 1, "colour": 2},
            ValueError,
            r"keys 'widht' \(near ones: width, weights\), 'colour'; valid keys at the top level: end, [^;]*$",
        ),
        ({"points": [], "ned": None}, ValueError, "unknown config key 'ned'; near ones: end; valid keys"),
        ({"points": [], "sides": 3}, ValueError, "unknown config key 'sides'; valid keys"),
        ({"points": [], "name": "a"}, ValueError, r"unknown config key 'name'; near ones: end.name; valid keys"),
        ({"points": [{"place": [1, 2]}]}, ValueError, r"required: points\[0\].name"),
        ({"points": [{"name": 3}]}, TypeError, r"points\[0\].name must be a text, got 3"),
        ({"points": [{"name": "a", "place": [1]}]}, ValueError, r"points\[0\].place must be 2 values"),
        ({"points": [], "weights": {"a": [float("nan")]}}, ValueError, "weights must be a mapping"),
        ({"points": [], "end": "c"}, TypeError, "end must be a Point or null, got 'c'"),
    ],
)
def test_plain_values_are_strict(values: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_plain(Line, values)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_finite_tensors_are_of_floating_point(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"images must be floating-point numbers, got {dtype}"):
        check_finite("images", torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_tensor_with_one_value_that_is_not_finite_is_refused(dtype: torch.dtype, bad: float) -> None:
    images = torch.zeros(2, 3, dtype=dtype)
    check_finite("images", images)
    images[1, 2] = bad
    with pytest.raises(ValueError, match="images must be finite, got 1 of 6 values that are NaN or infinite"):
        check_finite("images", images)


def test_configs_turn_numbers_of_numpy_into_numbers_that_files_hold() -> None:
    config = mmod.RoutingConfig(
        router=mmod.score("random", seed=np.int64(3)), blocks=(*np.arange(1, 3),), capacity=(*np.float32([0.5, 0.25]),)
    )
    plain = json.loads(json.dumps(config.to_dict()))
    assert (plain["blocks"], plain["capacity"], plain["router"]["seed"]) == ([1, 2], [0.5, 0.25], 3)
    assert mmod.RoutingConfig.from_dict(plain) == config
    plan = mmod.RoutingConfig(blocks=(*np.arange(2),), capacity=(0.5, np.float64(0.5)), depth=np.int32(4))
    assert json.loads(json.dumps(plan.to_dict()))["depth"] == 4


def test_a_range_is_as_good_as_its_numbers_and_signatures_are_those_of_the_fields() -> None:
    assert mmod.RoutingConfig(blocks=range(1, 4)) == mmod.RoutingConfig(blocks=(1, 2, 3))
    names = [field.name for field in dataclasses.fields(mmod.RoutingConfig)]
    assert list(inspect.signature(mmod.RoutingConfig).parameters) == names


def test_containers_without_known_items_are_checked_by_their_class() -> None:
    assert Places((1, 2), frozenset([3])).rows == (1, 2)
    with pytest.raises(TypeError, match="chosen must be a frozenset, got 3"):
        Places(chosen=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        (Schedule, "steps", 0, "schedule.steps must be an integer of at least 1 or null, got 0"),
        (Schedule, "rates", (0.5, 0.0), r"schedule.rates must be several values, each a number in \(0, 1\], got"),
        (Schedule, "shape", "step", "schedule.shape must be one of 'linear', 'cosine', got 'step'"),
        (LongSchedule, "steps", 0, "schedule.steps must be an integer of at least 1 or null, got 0"),
        (LongSchedule, "rates", (2.0,), r"schedule.rates must be several values, each a number in \(0, 1\], got"),
        (LongSchedule, "shape", "cosine", "schedule.shape must be 'linear', got 'cosine'"),
    ],
)
def test_limits_in_annotations_hold_also_for_fields_declared_again(
    kind: type[Schedule], field: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**{field: value})


def test_a_value_alone_is_said_to_need_brackets_where_several_are_taken() -> None:
    with pytest.raises(TypeError, match=r"got 0\.7; write \[0\.7\], in quotes on a command line$"):
        check_value("budgets", 0.7, list[float] | None)
    with pytest.raises(TypeError, match=r"got 'x'$"):
        check_value("budgets", "x", list[float] | None)
    with pytest.raises(TypeError, match=r"got None$"):
        check_value("budgets", None, list[float])


def test_an_integer_too_long_to_be_written_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"steps must be an integer in \[0, 10\], got a int too long to be written"):
        check_value("steps", 10**5000, int, "[0, 10]")


@pytest.mark.parametrize(
    ("value", "limit", "advice"),
    [
        (50, "[0, 1)", "; write 0.5 if 50 % is meant"),
        (2.5, "(0, 1)", "; write 0.025 if 2.5 % is meant"),
        (100, "[0, 1]", "; write 1 if 100 % is meant"),
        (42, "(0.4, 1]", "; write 0.42 if 42 % is meant"),
        (30, "(0.4, 1]", ""),
        # A share that is refused too.
        (100, "[0, 1)", ""),
        (100, "(0, 1)", ""),
        (101, "[0, 1]", ""),
        # A slip, and no share.
        (1.5, "[0, 1]", ""),
        (2, "(0, 1)", ""),
        (-0.5, "[0, 1]", ""),
        (50, "[0, 2]", ""),
    ],
)
def test_a_percentage_is_told_the_share_that_is_valid(value: float, limit: str, advice: str) -> None:
    with pytest.raises(ValueError, match=r"^share must be ") as caught:
        check_value("share", value, float, limit)
    assert str(caught.value).endswith(f"in {limit}, got {value}{advice}")
    if advice:
        check_value("share", float(advice.split()[2]), float, limit)
