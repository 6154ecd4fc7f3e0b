"""How often is advice from some photographs right on all? `python scripts/advice_halves.py FOLDER FILE RESULT`.

FOLDER holds train/CLASS and test/CLASS, FILE the weights of timm's ViT-S/14 (DINOv2). A linear classifier of the first
11 blocks' features is fitted on the photographs for training. All candidates of `mmod.advise` are evaluated on those
for testing, by how often their top class is the dense model's, and timed in turns. Advice is then taken many times from
some of the photographs, drawn with replacement, and compared with what all of them say. RESULT takes a store,
from which the same command resumes, and the table. Caltech-101 at 140 pixels takes about 40 CPU minutes.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import timm.data
import torch
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torchvision.datasets import ImageFolder

from mmod.adapters import find_part
from mmod.analysis.table import DENSE, Look, Measured, Table, compare
from mmod.analysis.timing import sample_times
from mmod.io.jobs import Callback, Runner
from mmod.io.store import STORE, Store
from mmod.planning.advice import Advice
from mmod.planning.candidate import Candidate
from mmod.planning.choice import NOISE
from mmod.planning.early import BATCH, look_at, near_front
from mmod.planning.entrants import changed_models, evaluate_once, row_of
from mmod.planning.samples import AGREEMENT, FIRST_LOOK, Images, look_order
from mmod.planning.trials import ROUNDS
from mmod.planning.untrained import image_candidates
from scripts.doc_tables import markdown

MODEL = "vit_small_patch14_dinov2"
BLOCKS = 11
SIDE = 140
COUNTS = (256, 1024, 4096)
TOLERANCES = (0.01, 0.02, 0.05, 0.1)
DRAWS = 200
BATCH_SIZE = 8
# Advice may be this much slower than the fastest, and is right still.
SLOWER = 1.05
# Who passes over a recipe that loses so nearly the tolerance has lost little.
CLOSE = 0.005


class Recorded(NamedTuple):
    """What all candidates do on all photographs.

    Args:
        scores: Whether the top class is the dense model's, by candidate (N,).
        times: Milliseconds of a photograph by candidate and round, those of the dense model among them.
    """

    scores: dict[str, np.ndarray]
    times: dict[str, list[float]]


def advice_from(recorded: Recorded, places: np.ndarray) -> Advice:
    """Return what `mmod.advise` says of some photographs, whose scores are read instead of measured."""

    def evaluate(look: Look, callback: Callback = lambda share: None) -> Measured:
        scores = recorded.scores[look.name][places[look.part.start : look.part.stop]]
        return Measured({}, samples=len(scores), outcomes={AGREEMENT: scores})

    candidates = {name: Candidate(name) for name in recorded.scores if name != DENSE}
    table = Table()
    (dense,) = look_at([DENSE], 0, len(places))
    table.add(DENSE, 0, evaluate(dense))
    first = min(FIRST_LOOK, len(places))
    times = {BATCH: recorded.times}
    rounds = near_front(table, candidates, AGREEMENT, first, lambda: (times, 1.0))
    for _ in compare(table, rounds, evaluate, Runner(progress=False)):
        pass
    rows = tuple(row_of(table, AGREEMENT, candidate) for candidate in candidates.values())
    return Advice(rows, {}, AGREEMENT, None, 1.0, BATCH_SIZE, len(places), 0.0)


class Outcome(NamedTuple):
    """How advice turns out on all photographs.

    Args:
        named: Whether it tells to use a recipe.
        kept: Whether that recipe loses at most the tolerance.
        decided: Whether it names nothing as undecided.
        fastest: Whether no recipe that loses half a point less than the tolerance is more than 5 % faster.
    """

    named: bool
    kept: bool
    decided: bool
    fastest: bool


def outcome(advice: Advice, recorded: Recorded) -> Outcome:
    """Return how advice turns out on all photographs."""
    loss = {name: 1 - float(scores.mean()) for name, scores in recorded.scores.items()}
    speedup = {row.name: row.speedup.median for row in advice.rows if row.speedup.median >= NOISE}
    allowed = [speedup[name] for name in speedup if loss[name] <= advice.tolerance - CLOSE]
    best = advice.best
    speed = 1.0 if best is None else best.speedup.median
    return Outcome(
        best is not None,
        best is None or loss[best.name] <= advice.tolerance,
        not advice.undecided,
        max([1.0, *allowed]) <= SLOWER * speed,
    )


def replay(recorded: Recorded, count: int, draws: int) -> Iterator[list[Any]]:
    """Yield a row for each tolerance: how often advice from some photographs says "Use", and is right.

    Args:
        count: Number of photographs that each advice is taken from, drawn with replacement: all photographs stand for
            those that a user may have, and a drawn half would say the opposite of the other half.
    """
    total = len(recorded.scores[DENSE])
    generator = np.random.default_rng(0)
    outcomes: dict[float, list[Outcome]] = {tolerance: [] for tolerance in TOLERANCES}
    for _ in range(draws):
        given = advice_from(recorded, generator.integers(total, size=count))
        for tolerance, found in outcomes.items():
            found.append(outcome(dataclasses.replace(given, tolerance=tolerance), recorded))
    for tolerance, found in outcomes.items():
        named = [one.kept for one in found if one.named]
        wrong = [one for one in found if one.decided and not one.named and not one.fastest]
        yield [
            count,
            100 * tolerance,
            100 * len(named) / draws,
            _percent(named),
            100 * len(wrong) / draws,
        ]


def _percent(is_so: list[bool]) -> float | None:
    return 100 * sum(is_so) / len(is_so) if is_so else None


def photographs(folder: Path) -> tuple[Tensor, np.ndarray]:
    """Return the photographs (N, 3, H, W) of a folder of classes, and their classes (N,)."""
    transform = timm.data.create_transform(
        (3, SIDE, SIDE), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), crop_pct=1.0, interpolation="bicubic"
    )
    images = ImageFolder(str(folder), transform)
    return torch.stack([image for image, _ in images]), np.array(images.targets)


def backbone(weights: Path) -> Any:
    """Return the model without a classifier."""
    model = timm.create_model(MODEL, depth=BLOCKS, img_size=224, dynamic_img_size=True, num_classes=0).eval()
    state = {name: value for name, value in load_file(weights).items() if not name.startswith(f"blocks.{BLOCKS}.")}
    model.load_state_dict(state)
    model.set_input_size(img_size=(SIDE, SIDE))
    return model


def fit_classifier(model: Any, folder: Path) -> dict[str, Tensor]:
    """Return weight and bias of a linear classifier of the photographs of a folder."""
    pixels, labels = photographs(folder)
    with torch.no_grad():
        features = torch.cat([model(chunk) for chunk in pixels.split(32)]).numpy()
    scaler = StandardScaler().fit(features)
    regression = LogisticRegression(C=0.01, max_iter=1000, tol=1e-3).fit(scaler.transform(features), labels)
    # The scaling of the features becomes a part of the linear layer.
    weight = regression.coef_ / scaler.scale_
    bias = regression.intercept_ - weight @ scaler.mean_
    return {"weight": torch.from_numpy(weight).float().contiguous(), "bias": torch.from_numpy(bias).float()}


def classifier(weights: Path, folder: Path, file: Path) -> Any:
    """Return the model with a linear classifier, which is fitted once and kept in a file."""
    model = backbone(weights)
    if not file.exists():
        save_file(fit_classifier(model, folder), file)
    head = load_file(file)
    model.reset_classifier(len(head["bias"]))
    model.head.load_state_dict(head)
    return model.eval()


def record(folder: Path, weights: Path, result: Path) -> Recorded:
    """Evaluate and time all candidates on the photographs for testing."""
    store = Store(result / STORE)
    identity = {"photographs": str(folder), "weights": str(weights)}
    recorded = store.get(identity, timed_on="cpu")
    if recorded is not None:
        return Recorded(*recorded)
    model = classifier(weights, folder / "train", result / "classifier.safetensors")
    pixels, labels = photographs(folder / "test")
    part, stack = find_part(model)
    with torch.no_grad():
        samples = Images(model, part, stack.prefix, pixels, None, BATCH_SIZE)
        right = samples.dense_outputs()[:, 0].argmax(-1).numpy() == labels[look_order(len(labels)).numpy()]
        print(f"dense: {100 * float(right.mean()):.1f} % right")
        candidates, unfitted = image_candidates(model, part, BLOCKS, samples.pixels[:1], samples.patches)
        entrants, refused = changed_models(model, samples, BLOCKS, candidates)
        refused |= unfitted
        assert not refused, refused
        scores = {}
        for look in look_at(entrants, 0, len(samples)):
            scores[look.name] = evaluate_once(store, entrants, look).outcomes[AGREEMENT]
        readings = {name: samples.readings(one.model) for name, one in entrants.items()}
        times = sample_times(readings, rounds=range(ROUNDS), device=torch.device("cpu"))[BATCH]
    store.put(identity, [scores, times], timed_on="cpu")
    return Recorded(scores, times)


def table_of_parts(recorded: Recorded) -> dict[str, Any]:
    """Return the table of the page."""
    rows = [row for count in COUNTS for row in replay(recorded, count, DRAWS)]
    columns = [
        "photographs",
        "tolerance, points",
        'says "Use", % of draws',
        "right when it does, %",
        "wrongly says that nothing pays, % of draws",
    ]
    commands = ["python scripts/advice_halves.py FOLDER FILE RESULT"]
    formats = ["{:,}", "{:g}", "{:.0f}", "{:.0f}", "{:.0f}"]
    return {"commands": commands, "columns": columns, "formats": formats, "rows": rows}


def main() -> None:
    """Evaluate all candidates, replay the advice and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    options.result.mkdir(parents=True, exist_ok=True)
    recorded = record(options.folder, options.weights, options.result)
    table = table_of_parts(recorded)
    (options.result / "table.json").write_text(json.dumps(table, indent=1))
    print(markdown(table))
    whole = advice_from(recorded, np.arange(len(recorded.scores[DENSE])))
    for row in whole.rows:
        print(f"{row.name}: {row.speedup.median:.2f} times as fast, loses {100 * row.loss} points")


if __name__ == "__main__":
    main()
