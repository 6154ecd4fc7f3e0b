"""Folders as studies and audits write them, of a model that is made in a moment."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

import mmod
from mmod.analysis.fronts import draw_tradeoff
from mmod.analysis.style import new_figure, svg_of
from mmod.analysis.tracing import draw_sample_maps
from mmod.audits import Comparisons, LabelledBatch
from mmod.io.tables import MarkdownTable
from mmod.studies.isoflop import draw, optima, told
from mmod.studies.report import write_outcome
from mmod.training.engine.health import FIGURES, evaluation_rows, write_rows
from tests.kit.planted import batches_of, plant

PAGE = [
    MarkdownTable([["model", "top-1 %"], ["dense", "90.0"], ["early exit", ""]]),
    "No significant difference between dense and a <b>&amp; b</b> (paired over 2 seeds, 95 % intervals).",
]
TITLE = "Top-1 accuracy against GFLOPs per image"
ROWS: list[dict[str, Any]] = [
    {"name": "dense", "series": "dense", "top1": 90.0, "gflops": 0.045},
    {"name": "a <b>& b</b>-0.5", "series": "a <b>& b</b>", "top1": 89.0, "gflops": 0.03, "note": "router: norm"},
    {"name": "early exit-0.25", "series": "early exit", "top1": 84.0, "gflops": 0.025},
]


def write_study(folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = {"routers": {"a <b>& b</b>": {"router": "norm"}}, "seeds": 2}
    record = {"config": config, "torch": "2", "points": [], "title": TITLE}
    write_outcome(folder, "tradeoff", record, ROWS, PAGE, {"tradeoff": draw_tradeoff(ROWS)})
    figure = new_figure(1, 1)
    figure.subplots().imshow(torch.rand(8, 8))
    (folder / "maps-a.svg").write_text(svg_of(figure))
    plans = folder / "seed0/searched.plans"
    plans.mkdir(parents=True)
    (plans / "flops-0.5.svg").write_text(svg_of(figure))
    return folder


def write_isoflop(folder: Path) -> Path:
    points = []
    for series, shift in (("dense", 2.0), ("mod", 1.9)):
        for size in (1e4, 3e4, 1e5):
            losses = {seed: {"loss": shift + 0.1 * seed + (math.log(size) - 10) ** 2} for seed in range(2)}
            facts = {
                "series": series,
                "size": f"s{size:g}",
                "budget": 1e9,
                "parameters": int(size),
                "forward": 2 * size,
            }
            points.append({**facts, "seeds": losses, "loss": losses[0]["loss"] + 0.05, "rate": 0.1, "steps": 9})
    folder.mkdir(parents=True)
    record = {"config": {}, "torch": "2", "points": points, "title": "Loss against parameters"}
    write_outcome(folder, "isoflop", record, points, told(points, optima(points)), {"isoflop": draw(points)})
    return folder


def write_audit(run: Path, router: object, blocks: tuple[int, ...] = (0, 1), capacity: object = 0.25) -> Path:
    model, batches = plant(router, blocks, capacity), batches_of(20, seed=0)
    labelled = [
        LabelledBatch(batch, {"class": [f"number {number}" for number in batch[1].tolist()]}) for batch in batches
    ]
    audit = mmod.audit(
        model,
        labelled,
        mmod.AuditConfig(draws=1, resamples=100, conditions=["random", "centre", "mean mask"], leave_one_out=1),
        Comparisons(baselines={"dense": mmod.unroute_(plant(router, blocks, capacity))}),
    )
    images = batches[0][0][:4]
    record = {
        "name": run.name,
        "command": f"mmod audit {run}",
        "environment": {"torch": torch.__version__},
        "audit": audit.to_dict(),
        "flops": mmod.flops(model, images.shape[1:]).to_dict(),
        "generation": None,
        "baseline_flops": {"dense": float(mmod.flops(model, images.shape[1:]).dense)},
    }
    (run / "audit").mkdir(parents=True)
    (run / "audit/maps.svg").write_text(svg_of(draw_sample_maps(model, images)))
    (run / "audit/audit.json").write_text(json.dumps(record))
    return run


def write_run(run: Path, steps: int = 3, blocks: int = 2) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    draws = torch.rand(steps, blocks, len(FIGURES), generator=torch.Generator().manual_seed(0)).tolist()
    write_rows(
        run,
        [
            {"step": 10 * step, "data": "train", "block": f"blocks.{block}", **dict(zip(FIGURES, draws[step][block]))}
            for step in range(steps)
            for block in range(blocks)
        ]
        + evaluation_rows(10 * steps, "val", {"blocks.0": 0.5}),
    )
    return run
