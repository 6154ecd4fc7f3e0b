"""The study of pages and screens in its smallest form: drawn pictures and a random tower, without a browser."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from transformers.vision_utils import get_vision_window_index

import mmod
from mmod.io.store import STORE
from scripts.doc_tables import markdown
from scripts.pages_and_screens import __main__ as commands
from scripts.pages_and_screens import drawn, study, tuned, wide
from scripts.pages_and_screens.duplicates import differences, shares
from scripts.pages_and_screens.rows import DENSE, mutual_pairs, rows
from tests.kit.counting import flop_counter

SIDE = 112


def tower() -> Any:
    """A small random tower for images of any size."""
    torch.manual_seed(0)
    shape = {"img_size": SIDE, "embed_dim": 48, "num_heads": 3, "depth": 6, "num_classes": 0, "global_pool": ""}
    return timm.create_model("vit_small_patch14_dinov2", init_values=1.0, dynamic_img_size=True, **shape).eval()


def test_differences_are_those_of_a_slow_definition() -> None:
    rng = np.random.default_rng(0)
    pixel_RC3 = rng.integers(0, 3, (9, 11, 3)).astype(np.uint8) * rng.integers(0, 2, (9, 11, 1)).astype(np.uint8)
    actual = differences(pixel_RC3, 2)
    assert actual.shape == (4, 5)
    patch = {(y, x): pixel_RC3[2 * y : 2 * y + 2, 2 * x : 2 * x + 2].astype(float) for y in range(4) for x in range(5)}
    for (y, x), value in patch.items():
        neighbours = [patch[at] for at in ((y, x - 1), (y - 1, x), (y - 1, x - 1)) if at in patch]
        assert actual[y, x] == min((np.abs(value - other).max() for other in neighbours), default=255)


@pytest.mark.parametrize("make", [drawn.page, drawn.screen])
def test_drawn_pictures_are_the_same_again_and_labelled(make: Any) -> None:
    once, again = make(3), make(3)
    assert once.picture.tobytes() == again.picture.tobytes()
    assert 0.2 < shares(once.picture)[0] < 1
    example = study.from_canvas(once)
    assert example.label_HW.shape == (46, 34)
    assert len(example.label_HW.unique()) >= 3
    # Where nothing is drawn, pixels are of one colour.
    blank = np.asarray(once.picture)[once.label_HW == 0] if make is drawn.page else np.zeros((1, 3))
    assert (blank == blank[0]).mean() > 0.9


def test_mutual_pairs_are_each_others_nearest() -> None:
    x_BND = torch.randn(1, 30, 8, generator=torch.Generator().manual_seed(0))
    slot_N = mutual_pairs(x_BND)[0]
    unit = torch.nn.functional.normalize(x_BND[0, 1:].double(), dim=-1)
    likeness = (unit @ unit.T).fill_diagonal_(-2)
    nearest = likeness.argmax(1).tolist()
    expected = {(i, j) for i, j in enumerate(nearest) if nearest[j] == i and i < j}
    actual = {(i - 1, j - 1) for i in range(30) for j in range(i + 1, 30) if slot_N[i] == slot_N[j]}
    assert actual == expected
    assert sorted(set(slot_N.tolist())) == list(range(30 - len(expected)))


def test_every_row_answers_each_patch() -> None:
    image = study.from_canvas(drawn.page(0, SIDE, SIDE)).image
    model = tower()
    with torch.inference_mode():
        for name, row in rows().items():
            feature_ND = study.features(row.make(model), row, image)
            assert feature_ND.shape == (64, 48), name
            assert feature_ND.isfinite().all(), name


def test_the_commands_resume_and_write_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "COUNTED", 2)
    monkeypatch.setattr(commands, "DRAWN", (2 * SIDE, 2 * SIDE))
    monkeypatch.setattr(commands, "DRAWN_FITTED", 3)
    monkeypatch.setattr(commands, "DRAWN_TESTED", 2)
    monkeypatch.setattr(commands, "dinov2", lambda weights, depth: tower())
    monkeypatch.setattr("scripts.pages_and_screens.sources.PICTURES", {})

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["", *arguments])
        commands.main()

    run("count", str(tmp_path))
    sets = ["--sets", "drawn pages"]
    run("evaluate", str(tmp_path), "none", *sets, "--rows", DENSE, "MPM")
    written = (tmp_path / STORE).read_bytes()
    run("evaluate", str(tmp_path), "none", *sets, "--rows", DENSE, "MPM")
    assert (tmp_path / STORE).read_bytes() == written
    # Rows that are added later join the others.
    run("evaluate", str(tmp_path), "none", *sets, "--rows", DENSE, "0.5 of the side")
    assert (tmp_path / STORE).read_bytes().startswith(written)
    run("table", str(tmp_path))
    tables = json.loads((tmp_path / "tables.json").read_text())
    assert [row[:2] for row in tables["duplicates"]["rows"]] == [["drawn page", 2], ["drawn screen", 2]]
    names = [row[0] for row in tables["drawn-pages"]["rows"]]
    assert names == [DENSE, "MPM", "0.5 of the side", "0.5 of the side, a head of its own"]
    assert all(markdown(table) for table in tables.values())


def test_towers_are_tuned_in_the_form_in_which_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "DRAWN", (2 * SIDE, 2 * SIDE))
    monkeypatch.setattr(commands, "DRAWN_FITTED", 3)
    monkeypatch.setattr(commands, "DRAWN_TESTED", 2)
    monkeypatch.setattr(commands, "dinov2", lambda weights, depth: tower())
    monkeypatch.setattr(tuned, "SEEDS", (0, 1))
    monkeypatch.setattr(tuned, "STEPS", 4)
    for command in (["tune", str(tmp_path), "none", "--set", "drawn pages"], ["table", str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["", *command])
        commands.main()
    table = json.loads((tmp_path / "tables.json").read_text())["tuned-drawn-pages"]
    assert [row[0] for row in table["rows"]] == list(tuned.ARMS)
    assert markdown(table)
    written = (tmp_path / STORE).read_bytes()
    monkeypatch.setattr(sys, "argv", ["", "tune", str(tmp_path), "none", "--set", "drawn pages"])
    commands.main()
    assert (tmp_path / STORE).read_bytes() == written


def small_host(host: wide.Host) -> wide.Host:
    """Return a host with few channels, and no layers but those that are built."""

    def config() -> Any:
        made = host.config()
        text, vision = made.text_config, made.vision_config
        sizes = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
        text.update({**sizes, "head_dim": 64})
        text.rope_parameters["mrope_section"] = [8, 12, 12]
        vision.update({"hidden_size": 32, "intermediate_size": 1024, "num_heads": 2, "out_hidden_size": 128})
        return made

    made = config()
    built = {"tower": made.vision_config.depth, "language": made.text_config.num_hidden_layers}
    return host._replace(config=config, layers={part: built[part] for part in host.layers})


def test_a_screenshot_is_measured_in_models_of_full_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "HOSTS", {name: small_host(host) for name, host in wide.HOSTS.items()})
    folder = tmp_path / "screenshots 1x"
    folder.mkdir()
    for number in range(3):
        drawn.screen(number, 224, 224).picture.save(folder / f"{number:03d}.png")
    for command in ("wide", "wide", "table"):
        monkeypatch.setattr(sys, "argv", ["", command, str(tmp_path)])
        commands.main()
    size, *lines = json.loads((tmp_path / "tables.json").read_text())["wide"]["rows"]
    assert size[0] == "224 x 224 pixels"
    assert [line[1] for line in lines] == [196, 49, 256, 64]
    for _, _, kept, (dense, left), seconds, speed, *_ in lines:
        assert 0 < kept < 100
        assert left <= dense
        assert len(seconds) == 2
        assert speed > 0
    caches = [line[6] for line in lines if line[6] is not None]
    assert all(left < dense for dense, left in caches)


@pytest.mark.parametrize("name", wide.HOSTS)
@torch.no_grad()
def test_flops_and_kept_rows_are_those_of_the_model(name: str) -> None:
    host = small_host(wide.HOSTS[name])
    model = wide.make(host.config()).float()
    picture = drawn.screen(1, 280, 252).picture
    batch = wide.prompt(picture, host.patch)
    image_TN = batch["input_ids"] == wide.IMAGE
    others = {"tower": 0, "language": int((~image_TN).sum())}
    kept_of = wide.kept_rows(picture, host.patch)
    with flop_counter() as counter:
        model(**batch)
    counts = {module: sum(by_op.values()) for module, by_op in counter.get_flop_counts().items()}
    places = {"tower": "visual.blocks", "language": "language_model.layers"}
    for part, place in places.items():
        counted = [flops for module, flops in counts.items() if module.rpartition(".")[0].endswith(place)]
        assert wide.flops(host, part, torch.ones_like(kept_of[part]), others[part]) == pytest.approx(sum(counted))
    mmod.route_(model, **wide.ROUTES)
    with mmod.trace(model) as decisions:
        model(**batch)
    for part, place in places.items():
        keeps = [routing.keep_BN for module, routing in decisions.items() if place in module]
        assert len(keeps) == host.layers[part]
        of_images = [keep_BN[0] if part == "tower" else keep_BN[image_TN] for keep_BN in keeps]
        assert all(int(keep_N.sum()) == int(kept_of[part].sum()) for keep_N in of_images)
    vision = host.config().vision_config
    if hasattr(vision, "window_size"):
        # The decision is in the order of the windows.
        _, bound_W = get_vision_window_index(
            batch["image_grid_thw"], wide.MERGED, vision.window_size, vision.patch_size
        )
        keep_N = next(routing.keep_BN[0] for module, routing in decisions.items() if places["tower"] in module)
        lengths = [int(part_N.sum()) for part_N in keep_N.tensor_split(bound_W[1:-1].tolist())]
        assert len(lengths) > 4
        assert len(set(lengths)) > 1
        side = vision.window_size // vision.patch_size
        assert wide.pairs_in_windows(kept_of["tower"], side) == sum(length**2 for length in lengths)
