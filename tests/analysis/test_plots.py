"""Pictures show what they should."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import timm
import torch

import mmod
from mmod.analysis.maps import VEIL_OPACITY
from mmod.analysis.plots import draw_sample_maps, draw_tradeoff
from tests.kit.vlm_zoo import IMAGE, make_joint, prompt


@pytest.fixture
def traced() -> tuple[torch.Tensor, mmod.Trace]:
    model = mmod.route_(timm.create_model("test_vit", img_size=64).eval(), mmod.RoutingConfig(router="norm"))
    images = torch.rand(2, 3, 64, 64)
    with mmod.trace(model) as decisions, torch.no_grad():
        model(images)
    return images, decisions


def test_maps_keep_kept_patches_and_veil_the_rest(traced: tuple[torch.Tensor, mmod.Trace]) -> None:
    images, decisions = traced
    figure = decisions.plot(images, ["cat", "dog"])
    axes = np.array(figure.axes).reshape(2, 4)
    kept = decisions.maps(1, (4, 4))
    for row in range(2):
        original = axes[row, 0].images[0].get_array()
        assert np.allclose(original, images[row].permute(1, 2, 0))
        for column in range(3):
            shown = axes[row, column + 1].images[0].get_array()
            same = np.isclose(shown, original).all(axis=-1)
            mask = kept[column, row].repeat_interleave(16, 0).repeat_interleave(16, 1).numpy()
            assert (same == mask).all()
            contrast = np.ptp(shown[~mask]) / np.ptp(original[~mask])
            assert contrast == pytest.approx(1 - VEIL_OPACITY, abs=0.2)
    assert axes[0, 1].get_title().startswith("block 1\n")
    assert axes[1, 0].get_ylabel() == "dog"


def test_blocks_of_one_decision_share_a_map() -> None:
    routing = mmod.RoutingConfig(router="attention", blocks="late", capacity=0.5)
    model = mmod.route_(timm.create_model("test_vit", img_size=64).eval(), routing)
    images = torch.rand(2, 3, 64, 64)
    with mmod.trace(model) as decisions, torch.no_grad():
        model(images)
    names = list(decisions)
    assert len(names) > 1
    first, last = (name.split(".")[1] for name in (names[0], names[-1]))
    axes = decisions.plot(images).axes
    assert [axis.get_title().split("\n")[0] for axis in axes[:2]] == ["image", f"blocks {first} to {last}"]
    assert len(axes) == 4


def test_maps_take_grey_images(traced: tuple[torch.Tensor, mmod.Trace]) -> None:
    assert len(traced[1].plot(traced[0][:, :1]).axes) == 8


def test_normalised_images_are_shown_from_their_lowest_value_to_their_highest(
    traced: tuple[torch.Tensor, mmod.Trace],
) -> None:
    images, decisions = traced
    shown = decisions.plot(images * 4 - 2).axes[0].images[0].get_array()
    expected = (images - images.min()) / (images.max() - images.min())
    assert np.allclose(shown, expected[0].permute(1, 2, 0), atol=1e-6)


def test_maps_refuse_what_they_cannot_show(traced: tuple[torch.Tensor, mmod.Trace]) -> None:
    images, decisions = traced
    with pytest.raises(ValueError, match="decisions for 2 images, got 1"):
        decisions.plot(images[:1])
    with pytest.raises(ValueError, match="3 x 4 does not hold 16"):
        decisions.plot(images, grid=(3, 4))
    with pytest.raises(ValueError, match="2 images need as many labels, got 1"):
        decisions.plot(images, ["one"])


def rows(seeds: int = 3, **times: float) -> list[dict[str, Any]]:
    """Return eight models; times are milliseconds for each GFLOP by column."""
    return [
        {
            "name": series if series == "dense" else f"{series}-{capacity}",
            "series": series,
            "capacity": capacity,
            "gflops": 0.5 + capacity / 2,
            "top1": score,
            "top1_std": 0.5 if seeds > 1 else None,
            "seeds": seeds,
            **{column: (0.5 + capacity / 2) * factor for column, factor in times.items()},
        }
        for series, capacity, score in [
            ("dense", 1.0, 93.0),
            ("a-mod", 0.25, 91.0),
            ("a-mod", 0.5, 92.0),
            ("mod", 0.25, 90.0),
            ("mod", 0.5, 92.0),
            ("random", 0.25, 80.0),
            ("random", 0.5, 88.0),
            ("shallow", 0.55, 87.0),
        ]
    ]


TIMES = {"gflops": "GFLOPs per image", "latency_ms": "ms per image, batch 1", "latency_ms_b8": "ms per image, batch 8"}


def marks_of(axis: Any) -> list[Any]:
    return [line for line in axis.lines if (line.get_gid() or "").startswith("hint ")]


def test_tradeoff_has_a_panel_for_each_cost_that_was_measured() -> None:
    figure = draw_tradeoff(rows(latency_ms=10), costs=TIMES)
    assert [axis.get_xlabel() for axis in figure.axes] == ["GFLOPs per image", "ms per image, batch 1"]
    assert figure.axes[0].get_ylabel() == "top-1 accuracy in %"
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"dense", "a-mod", "mod", "random", "shallow"}
    assert "3 seeds" in figure.get_suptitle()
    assert "one seed" in draw_tradeoff(rows(seeds=1)).get_suptitle()


def test_tradeoff_names_all_models_and_no_name_lies_on_another_or_on_a_point() -> None:
    figure = draw_tradeoff(rows(latency_ms=10, latency_ms_b8=4), costs=TIMES)
    figure.draw_without_rendering()
    assert len(figure.axes) == 3
    for axis in figure.axes:
        texts = [text for text in axis.texts if text.get_text()]
        assert {text.get_text() for text in texts} == {row["name"] for row in rows()}
        names = [text.get_window_extent() for text in texts]
        points = [mark.get_window_extent() for mark in marks_of(axis)]
        assert len(points) == 8
        assert not any(one.overlaps(two) for one, two in itertools.combinations(names, 2))
        assert not any(name.overlaps(point) for name in names for point in points)
        room = axis.get_window_extent()
        assert all(room.x0 <= name.x0 and name.x1 <= room.x1 for name in names)


def test_series_have_one_colour_and_marker_in_all_panels_and_figures() -> None:
    figures = [draw_tradeoff(rows(latency_ms=10), costs=TIMES), draw_tradeoff(rows()[:3])]
    styles_of: dict[str, set[tuple[str, str]]] = {}
    for figure in figures:
        for axis in figure.axes:
            for mark in marks_of(axis):
                name = mark.get_gid().removeprefix("hint ").partition(":")[0].rpartition("-")[0] or "dense"
                styles_of.setdefault(name, set()).add((mark.get_color(), mark.get_marker()))
    assert set(styles_of) == {"dense", "a-mod", "mod", "random", "shallow"}
    assert all(len(styles) == 1 for styles in styles_of.values())


def test_many_models_are_named_where_one_points_at_them() -> None:
    many = rows() + [{**row, "name": f"{row['name']} {number}"} for row in rows() for number in range(2)]
    axis = draw_tradeoff(many).axes[0]
    assert not axis.texts
    assert len(marks_of(axis)) == 24


def test_tradeoff_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        draw_tradeoff([])
    with pytest.raises(ValueError, match="row 'dense' lacks top1"):
        draw_tradeoff([{"name": "dense", "series": "dense", "gflops": 1.0, "right": 3.0}])
    with pytest.raises(ValueError, match="no cost that all rows have: prefill_ms"):
        draw_tradeoff(rows(), costs={"prefill_ms": "ms"})


def test_samples_have_a_map_for_each_block() -> None:
    routing = mmod.RoutingConfig(router="norm", capacity=0.5)
    model = mmod.route_(timm.create_model("test_vit", img_size=64).eval(), routing)
    images = torch.randn(2, 3, 64, 64)
    axes = draw_sample_maps(model, images).axes
    blocks = [f"block {name.rpartition('.')[2]}" for name in mmod.routed_blocks(model)]
    assert [axis.get_title().partition("\n")[0] for axis in axes[: 1 + len(blocks)]] == ["image", *blocks]
    assert len(axes) == 2 * (1 + len(blocks))


def test_maps_of_images_among_text() -> None:
    model: Any = mmod.route_(
        make_joint("llava"), language=mmod.preset("mod", language={"tokens": "image"}, capacity=1 / 3)
    )
    batch = prompt("llava", (1, 0, 2))
    with mmod.trace(model) as decisions, torch.no_grad():
        model(**batch)
    image_BN = batch["input_ids"] == IMAGE
    maps = decisions.maps(0, (3, 3), image_BN)
    assert maps.shape[1:] == (3, 3, 3)
    for routing, kept in zip(decisions.values(), maps, strict=True):
        assert torch.equal(kept.flatten(), routing.keep_BN[image_BN])
        # A third of the first sample's 9 image tokens, and of the last one's 18.
        assert [int(kept[:1].sum()), int(kept[1:].sum())] == [3, 6]
    figure = decisions.plot(torch.rand(3, 3, 12, 12), prefix=0, grid=(3, 3), image_BN=image_BN)
    assert figure.axes[1].get_title().endswith("33% kept")
    with pytest.raises(ValueError, match="grids of 2 x 5 do not hold 27 image tokens"):
        decisions.maps(0, (2, 5), image_BN)


@pytest.mark.parametrize("size", [(64, 144), (96, 96), (32, 128)])
def test_samples_are_drawn_on_the_grid_of_their_pass(size: tuple[int, int]) -> None:
    model = timm.create_model("test_vit", img_size=64, dynamic_img_size=True).eval()
    mmod.route_(model, mmod.RoutingConfig(router="norm", blocks=(1,), capacity=0.5))
    images = torch.rand(1, 3, *size)
    with mmod.trace(model) as decisions, torch.no_grad():
        model(images)
    kept = decisions["blocks.1"].keep_BN[0, 1:].unflatten(0, (size[0] // 16, size[1] // 16))
    picture, shown = (axis.images[0].get_array() for axis in draw_sample_maps(model, images).axes)
    same = np.isclose(shown, picture).all(axis=-1)
    assert (same == kept.repeat_interleave(16, 0).repeat_interleave(16, 1).numpy()).all()


def test_a_trace_without_images_has_no_grid() -> None:
    model = mmod.route_(make_joint("llava"), language=mmod.RoutingConfig(router="norm"))
    with mmod.trace(model) as decisions:
        pass
    with pytest.raises(ValueError, match=r"pass rows and columns, grid=\(10, 10\)"):
        _ = decisions.grid
