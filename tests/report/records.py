"""Folders as studies and audits write them, of a model that is made in a moment."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

import mmod
from mmod.analysis.plots import sample_maps
from mmod.analysis.style import new_figure, svg_of
from mmod.studies.isoflop.report import table, verdict
from mmod.training.engine.health import FIGURES, evaluated, write_rows
from tests.analysis.audit.planted import batches_of, plant

TABLE = """| model | top-1 % |
|:--|--:|
| dense | 90.0 |
| early exit | |

Paired over 2 seeds (95 % intervals), no significant difference between dense and a <b>&amp; b</b>.
"""
AXES = {
    "score": "top1",
    "measure": "top-1 accuracy",
    "costs": {"gflops": "GFLOPs per image", "latency_ms": "ms per image, batch 1", "prefill_ms": "never measured"},
}
COLUMNS = "name,series,capacity,seeds,top1,top1_std,gflops,latency_ms,latency_ms_b8"
ROWS = f"""{COLUMNS},to_dense/mean,to_dense/low,to_dense/high
dense,dense,1.0,2,90.0,0.5,0.045,2.0,3.0,,,
a <b>& b</b>-0.5,a <b>& b</b>,0.5,2,89.0,0.7,0.03,1.5,2.5,-1.0,-2.0,0.1
a <b>& b</b>-0.25,a <b>& b</b>,0.25,2,85.0,,0.02,1.0,2.0,-5.0,,
early exit-0.25,early exit,0.25,2,84.0,,0.025,1.0,2.0,-6.0,,
"""


def write_study(folder: Path) -> Path:
    folder.mkdir(parents=True)
    rivals = {"early exit": {"0.25": {"kind": "exit", "confidence": 0.8}}}
    config = {"routers": {"a <b>& b</b>": {"router": "norm"}}, "rivals": rivals, "seeds": 2}
    (folder / "tradeoff.json").write_text(json.dumps({"config": config, "torch": "2", "points": [], "picture": AXES}))
    (folder / "tradeoff.csv").write_text(ROWS)
    (folder / "tradeoff.md").write_text(TABLE)
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
    record = {"config": {"score": "loss"}, "torch": "2", "points": points}
    (folder / "isoflop.json").write_text(json.dumps(record))
    (folder / "isoflop.md").write_text(f"{table(points, 'loss')}\n\n{verdict(points, 'loss')}\n")
    return folder


def write_audit(run: Path, router: object, blocks: tuple[int, ...] = (0, 1), capacity: object = 0.25) -> Path:
    model, batches = plant(router, blocks, capacity), batches_of(40, seed=0)
    found = mmod.audit(
        model, batches, draws=1, resamples=100, conditions=["random", "centre", "mean mask"], leave_one_out=1,
        strata=lambda batch: {"class": [f"number {number}" for number in batch[1].tolist()]},
        beside={"dense": mmod.unroute_(plant(router, blocks, capacity))},
    )  # fmt: skip
    images = batches[0][0][:4]
    record = {
        "name": run.name,
        "command": f"mmod audit {run}",
        "environment": {"torch": torch.__version__},
        "audit": found.to_dict(),
        "flops": mmod.flops(model, images.shape[1:]).to_dict(),
        "generation": None,
        "beside_flops": {"dense": float(mmod.flops(model, images.shape[1:]).dense)},
    }
    (run / "audit").mkdir(parents=True)
    (run / "audit/maps.svg").write_text(svg_of(sample_maps(model, images).draw()))
    (run / "audit/audit.json").write_text(json.dumps(record))
    return run


def write_run(run: Path, steps: int = 3, blocks: int = 2) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    draws = torch.rand(steps, blocks, len(FIGURES), generator=torch.Generator().manual_seed(0)).tolist()
    write_rows(run, [
        {"step": 10 * step, "data": "train", "block": f"blocks.{block}", **dict(zip(FIGURES, draws[step][block]))}
        for step in range(steps) for block in range(blocks)
    ] + evaluated(10 * steps, "val", {"blocks.0": 0.5}))  # fmt: skip
    return run
