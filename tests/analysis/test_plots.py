"""Pictures show what they should."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import timm
import torch

import mmod
from mmod.analysis.plots import CONTROLS, VEIL_OPACITY, draw_routing_maps, draw_tradeoff
from tests.adapters.vlm_zoo import IMAGE, make_joint, prompt


@pytest.fixture
def traced() -> tuple[torch.Tensor, mmod.Trace]:
    model = mmod.route_(timm.create_model("test_vit", img_size=64).eval(), mmod.RoutingConfig(router="norm"))
    images = torch.rand(2, 3, 64, 64)
    with mmod.trace(model) as decisions, torch.no_grad():
        model(images)
    return images, decisions


def test_maps_keep_kept_patches_and_veil_the_rest(traced: tuple[torch.Tensor, mmod.Trace]) -> None:
    images, decisions = traced
    figure = draw_routing_maps(images, decisions, prefix=1, grid=(4, 4), labels=["cat", "dog"])
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
    axes = draw_routing_maps(images, decisions, prefix=1, grid=(4, 4)).axes
    assert [axis.get_title().split("\n")[0] for axis in axes[:2]] == ["image", f"blocks {first} to {last}"]
    assert len(axes) == 4


def test_maps_take_grey_images(traced: tuple[torch.Tensor, mmod.Trace]) -> None:
    assert len(draw_routing_maps(traced[0][:, :1], traced[1], 1, (4, 4)).axes) == 8


def test_maps_refuse_what_they_cannot_show(traced: tuple[torch.Tensor, mmod.Trace]) -> None:
    images, decisions = traced
    with pytest.raises(ValueError, match="undo the normalisation"):
        draw_routing_maps(images * 4 - 2, decisions, 1, (4, 4))
    with pytest.raises(ValueError, match="decisions for 2 images, got 1"):
        draw_routing_maps(images[:1], decisions, 1, (4, 4))
    with pytest.raises(ValueError, match="3 x 4 does not hold 16"):
        draw_routing_maps(images, decisions, 1, (3, 4))
    with pytest.raises(ValueError, match="2 images need as many labels, got 1"):
        draw_routing_maps(images, decisions, 1, (4, 4), labels=["one"])


def rows(latency: bool, seeds: int) -> list[dict[str, Any]]:
    found = []
    for router, capacity, accuracy in [
        ("dense", 1.0, 93.0), ("attention", 0.25, 91.0), ("attention", 0.5, 92.0), ("linear", 0.25, 90.0),
        ("linear", 0.5, 92.0), ("random", 0.25, 80.0), ("random", 0.5, 88.0), ("shallow", 1.0, 87.0),
    ]:  # fmt: skip
        gflops = 0.5 + capacity / 2
        found.append(
            {
                "name": f"{router} {capacity}",
                "router": router,
                "capacity": capacity,
                "gflops": gflops,
                "latency_ms": 10 * gflops if latency else None,
                "accuracy_mean": accuracy,
                "accuracy_std": 0.5,
                "seeds": seeds,
            }
        )
    return found


def test_tradeoff_draws_every_series_with_its_name_and_errors() -> None:
    figure = draw_tradeoff(rows(latency=True, seeds=3))
    assert [axis.get_xlabel() for axis in figure.axes] == ["GFLOPs per image", "latency in ms"]
    for axis in figure.axes:
        texts = [text.get_text() for text in axis.texts]
        assert {"dense", "attention", "linear", "random", "shallow"} <= set(texts)
        assert {"0.25", "0.5"} <= set(texts)
        assert len(axis.containers) == 5
        assert all(container.has_yerr for container in axis.containers)
    data = {tuple(container[0].get_xdata()): container[0].get_ydata() for container in figure.axes[0].containers}
    assert (0.625, 0.75) in data
    colours = {container[0].get_color() for container in figure.axes[0].containers}
    assert len(colours) == 4, "controls share one colour"
    assert {"random", "shallow"} <= set(CONTROLS)


def test_tradeoff_without_latency_or_seeds() -> None:
    figure = draw_tradeoff(rows(latency=False, seeds=1))
    assert len(figure.axes) == 1
    assert not any(container.has_yerr for container in figure.axes[0].containers)
    assert "one seed" in figure.get_supxlabel()


def test_tradeoff_names_on_the_left_do_not_touch() -> None:
    close = [{**row, "accuracy_mean": 90.0} for row in rows(latency=False, seeds=1)]
    axis = draw_tradeoff(close).axes[0]
    low, high = axis.get_ylim()
    places = sorted(text.xy[1] for text in axis.texts if text.get_ha() == "right")
    assert all(b - a >= 0.05 * (high - low) for a, b in itertools.pairwise(places))


def test_many_series_are_named_in_a_legend_and_no_two_look_alike() -> None:
    own = rows(latency=True, seeds=3)
    many = own + [{**own[-1], "router": f"series {number}"} for number in range(20)]
    figure = draw_tradeoff(many)
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {row["router"] for row in many}
    assert not [text for text in figure.axes[0].texts if text.get_ha() == "right"]
    lines = [container[0] for container in figure.axes[0].containers]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(lines)


def test_tradeoff_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        draw_tradeoff([])
    with pytest.raises(ValueError, match=r"row 'dense 1\.0' lacks gflops, seeds"):
        draw_tradeoff([{k: v for k, v in rows(True, 1)[0].items() if k not in ("gflops", "seeds")}])


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
    figure = draw_routing_maps(torch.rand(3, 3, 12, 12), decisions, 0, (3, 3), image_BN=image_BN)
    assert figure.axes[1].get_title().endswith("33% kept")
    with pytest.raises(ValueError, match="grids of 2 x 5 do not hold 27 image tokens"):
        decisions.maps(0, (2, 5), image_BN)
