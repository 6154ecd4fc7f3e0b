"""The script that replays advice on parts of photographs, on recorded scores and on a small model."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from mmod.analysis.statistics import Estimate
from mmod.io.store import STORE
from scripts import advice_halves
from scripts.advice_halves import Recorded, advice_from, outcome, replay
from tests.kit.fitted import few_series, fit_roughly


def recorded(**shares: float) -> Recorded:
    """Return 400 photographs, and candidates twice as fast as the dense model that lose some shares of them."""
    generator = np.random.default_rng(3)
    scores = {"dense": np.ones(400)}
    for name, share in shares.items():
        scores[name] = generator.permutation(np.arange(400) >= share * 400).astype(float)
    return Recorded(scores, {name: [2.0 if name == "dense" else 1.0] * 5 for name in scores})


def test_what_loses_nothing_is_advised_and_right() -> None:
    for count, tolerance, *shares in replay(recorded(free=0.0, dear=0.5), 200, draws=5):
        # No interval of 200 photographs excludes a loss of 1 point.
        assert count == 200
        assert shares == ([0, None, 0] if tolerance == 1 else [100, 100, 0])


def test_advice_is_wrong_where_all_photographs_disagree() -> None:
    some = recorded(lossy=0.1)
    # Advice from those photographs that are not lost.
    places = np.argsort(-some.scores["lossy"], kind="stable")[:200]
    # Without a tolerance for any loss, no number of photographs is enough.
    strict = advice_from(some, places)
    assert outcome(strict, some) == (False, True, False, True)
    advice = dataclasses.replace(strict, tolerance=0.02)
    assert advice.best is not None
    assert advice.best.name == "lossy"
    assert outcome(advice, some) == (True, False, True, True)
    assert outcome(dataclasses.replace(advice, tolerance=0.1), some) == (True, True, True, True)
    # What keeps the dense model is too slow where a recipe loses less than the tolerance.
    worse = dataclasses.replace(advice.rows[0], score=Estimate(0.5, 0.4, 0.6))
    assert outcome(dataclasses.replace(advice, rows=(worse,), tolerance=0.2), some) == (False, True, True, False)


def test_a_small_model_is_evaluated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit_roughly(monkeypatch)
    few_series(monkeypatch, "gradual", "smaller-image")
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("cats", "dogs", "hens"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(3):
                pixels = generator.integers(0, 255, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.png")
    settings = {"MODEL": "test_vit", "BLOCKS": 6, "SIDE": 64, "COUNTS": (4,), "DRAWS": 2, "ROUNDS": 1}
    for name, value in settings.items():
        monkeypatch.setattr(advice_halves, name, value)
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=224, dynamic_img_size=True, num_classes=0)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    result = tmp_path / "result"
    monkeypatch.setattr(
        "sys.argv", ["advice_halves.py", str(tmp_path), str(tmp_path / "weights.safetensors"), str(result)]
    )
    advice_halves.main()
    store = (result / STORE).read_bytes()
    advice_halves.main()
    assert (result / STORE).read_bytes() == store
    table = json.loads((result / "table.json").read_text())
    assert [row[:2] for row in table["rows"]] == [[4, 1], [4, 2], [4, 5], [4, 10]]
