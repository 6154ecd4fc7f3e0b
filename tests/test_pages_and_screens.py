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
from PIL import Image
from transformers.vision_utils import get_vision_window_index

import mmod
from mmod.io.store import STORE, Store
from scripts.doc_tables import markdown
from scripts.pages_and_screens import __main__ as commands
from scripts.pages_and_screens import drawn, study, tuned, wide
from scripts.pages_and_screens.browser import CLASSES, labels_of, shown_by
from scripts.pages_and_screens.duplicates import FORMS, differences, shares, whole_groups
from scripts.pages_and_screens.picture import shown
from scripts.pages_and_screens.rows import DENSE, Row, by_mutual_pairs, duplicate, kept_patches, mutual_pairs, rows
from scripts.photo_attempts import patches_of
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


def test_a_picture_of_one_colour_is_duplicates_but_for_its_first_patch() -> None:
    for change in FORMS.values():
        exact, groups, near, _ = shares(change(Image.new("RGB", (56, 56), (10, 200, 30))))
        assert exact == near == 1 - 1 / round(1 / (1 - exact))
        assert groups < exact
    assert whole_groups(np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1]], bool)).tolist() == [[False]]


def test_later_classes_win_and_boxes_are_cut_at_the_edges() -> None:
    boxes = [["title", 2.2, 1, 9, 2], ["link", -5, -5, 3, 3], ["table", 0, 0, 4, 1]]
    shown = [[CLASSES[value] for value in row] for row in shown_by(boxes, 4, 4)]
    assert shown[0] == ["table", "table", "table", "table"]
    assert shown[1] == ["link", "link", "title", "title"]
    assert shown[3] == ["blank"] * 4


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


def test_pairs_are_merged_before_the_third_block_alone() -> None:
    model = tower()
    images = torch.randn(1, 3, SIDE, SIDE)
    with torch.inference_mode():
        dense = patches_of(model)(images)
        assert by_mutual_pairs(model)(images).shape == dense.shape
        model.blocks = model.blocks[:2]
        torch.testing.assert_close(by_mutual_pairs(model)(images), patches_of(model)(images))


def test_every_row_answers_each_patch() -> None:
    image = study.from_canvas(drawn.page(0, SIDE, SIDE)).image
    model = tower()
    with torch.inference_mode():
        for name, row in rows().items():
            feature_ND = study.features(row.make(model), row, image)
            assert feature_ND.shape == (64, 48), name
            assert feature_ND.isfinite().all(), name


@pytest.mark.parametrize("skipped", ["merge", "follow"])
def test_without_duplicates_the_tower_is_dense(skipped: str) -> None:
    image = study.from_canvas(drawn.screen(0, SIDE, SIDE)).image
    model = tower()
    with torch.inference_mode():
        actual = duplicate(skipped, tolerance=-1.0).make(model)(image)
        torch.testing.assert_close(actual, patches_of(model)(image))


def test_one_patch_of_each_cell_of_a_plain_picture_is_kept() -> None:
    plain = study.example(Image.new("RGB", (SIDE, SIDE), (10, 200, 30)), np.zeros((SIDE, SIDE), np.uint8)).image
    assert kept_patches(plain[0], 0.0, 4).nonzero().tolist() == [[0, 0], [0, 4], [4, 0], [4, 4]]
    assert duplicate(cell=None).kept(plain) == 1 / 64


def test_patches_that_are_left_out_are_orange() -> None:
    pixel_RC3 = np.asarray(shown(Image.new("RGB", (SIDE, SIDE), "white")).convert("RGB"))
    orange = (np.abs(pixel_RC3.astype(int) - [253, 203, 158]).max(axis=2) < 12).mean(axis=0)
    assert orange[: SIDE * 3 // 4].max() == 0
    assert orange[SIDE * 3 // 4 + 20 :].max() > 0.1


def test_a_head_on_separable_features_is_right() -> None:
    label_N = torch.arange(60) % 3 + 2
    feature_ND = torch.eye(5)[label_N] + 0.1 * torch.rand(60, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(study.fitted(feature_ND, label_N)(feature_ND), label_N)


def test_windows_are_cut_from_photographs_with_their_labels(tmp_path: Path) -> None:
    canvas = drawn.screen(1, 280, 280)
    canvas.picture.save(tmp_path / "000-test.png")
    Image.fromarray(canvas.label_HW).save(labels_of(tmp_path / "000-test.png"))
    (example,) = study.Windows([tmp_path / "000-test.png"], 280, 280)
    expected = study.from_canvas(canvas)
    assert torch.equal(example.image, expected.image)
    assert torch.equal(example.label_HW, expected.label_HW)
    assert study.Windows([tmp_path / "000-test.png"], 140, 140)[0].label_HW.shape == (10, 10)


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


def test_towers_are_tuned_behind_the_blocks_that_stay() -> None:
    pages = [study.from_canvas(drawn.page(seed, SIDE, SIDE)) for seed in range(2)]
    head = study.Head(torch.arange(7), torch.zeros(48, 7), torch.zeros(7))
    for arm in tuned.ARMS:
        model = tower()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        tuned.run(model, arm, head, pages, pages)
        changed = {name.split(".")[1] for name, value in model.named_parameters() if not value.equal(before[name])}
        assert changed >= {"2", "3", "4", "5"}
        assert not changed & {"0", "1", "proj"}


def test_a_row_that_is_dense_differs_in_nothing(tmp_path: Path) -> None:
    pages = [study.from_canvas(drawn.page(seed, 2 * SIDE, 2 * SIDE)) for seed in range(4)]
    examples = study.Examples("pages", pages[:2], pages[2:])
    table = {DENSE: Row(patches_of), "again": Row(patches_of)}
    store = Store(tmp_path / "store.jsonl")
    with torch.inference_mode():
        study.evaluate(store, examples, table, tower())
    for number in range(2):
        dense, again = (store.get(study.identity("pages", row, number)) for row in table)
        assert torch.equal(dense["confusion"], again["confusion"])
        assert dense["confusion"].sum() == 256


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
