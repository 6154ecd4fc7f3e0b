"""The health of routers while they train: planted collapses are told once, and healthy routers are left in peace."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import mmod
from mmod.routing import DecoderRouter, Router, assign_groups
from mmod.training.engine.health import FIGURES, RouterHealth, _advice, figures_of, logged_figures, rows_of_logs
from tests.kit.engine_worker import run, tiny_config

STEPS = 5


def content(x_BND: Tensor) -> Tensor:
    return x_BND.sum(2)


def constant(x_BND: Tensor) -> Tensor:
    return 0.0 * x_BND.sum(2) + 3.0


def position(x_BND: Tensor) -> Tensor:
    return 0.0 * x_BND.sum(2) + torch.arange(x_BND.shape[1]) % 5


def high(x_BND: Tensor) -> Tensor:
    return x_BND.sum(2).tanh() + 2.0


def trained(config: mmod.RoutingConfig, *, images: int = 4) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of some steps of a small model on noise, and what was warned of."""
    torch.manual_seed(0)
    model = mmod.route_(timm.create_model("test_vit", num_classes=3, img_size=112), config).train()
    health, rows = RouterHealth(model), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, STEPS + 1):
            loss = model(torch.randn(images, 3, 112, 112)).square().mean()
            loss = loss + (mmod.auxiliary_loss(model) if config.losses else 0.0)
            health.read()
            loss.backward()
            rows += health.take(step)
            assert health.take(step) == []
    return rows, [str(warning.message) for warning in caught]


def routed(router: str | Callable[..., Tensor], **fields: Any) -> mmod.RoutingConfig:
    return mmod.RoutingConfig(router=router, **{"capacity": 0.3, "blocks": (1, 3), **fields})


STEP = {"context": "all", "select": mmod.Threshold(0.5)}
LOAD_ALONE = {"select": mmod.Threshold(0.5), "gate": "sigmoid", "losses": {"load": 0.01}}


@pytest.mark.parametrize(
    ("config", "says", "advises"),
    [
        (routed(constant), "its scores are the same for all tokens", "router='attention'"),
        (routed(constant, losses={"membership": 0.1}), "its scores are the same", r"losses\.membership"),
        (routed(position), "keeps the same positions in every image", "router='stride'"),
        (routed(high, **LOAD_ALONE), "keeps nearly all tokens", r"losses\.load alone may not"),
        (routed(high, **STEP, gate="step"), "keeps nearly all tokens", r"Raise select\.threshold"),
        (routed(high, select=mmod.Threshold(0.99)), "keeps hardly any", r"Lower select\.threshold"),
        (routed(content, gate="identity"), "no score has a gradient", "gate='identity' .*: set 'tanh', 'sigmoid'"),
        (routed(content, gate=mmod.Gate("tanh", 0.0)), "no score has a gradient", "gate='tanh' of scale 0"),
    ],
)
def test_a_planted_collapse_is_told_once_for_each_block(config: mmod.RoutingConfig, says: str, advises: str) -> None:
    rows, messages = trained(config)
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    assert len(messages) == len(blocks) > 0
    for name, text in zip(blocks, messages):
        assert text.startswith(f"the router of {name} has collapsed: since step 1 ")
        assert says in text
        assert re.search(advises, text)


@pytest.mark.parametrize("reason", ["scores", "positions", "all", "nothing"])
@pytest.mark.parametrize("router", ["attention", "norm"])
def test_routers_that_do_not_learn_are_not_told_to_set_losses(router: str, reason: str) -> None:
    advice = _advice(reason, routed(router, select=mmod.Threshold(0.5)))
    assert "losses" not in advice
    assert "router='attention' needs" not in advice


@pytest.mark.parametrize(
    "config",
    [
        routed("linear"),
        # No gradient reaches the last block, of whose tokens only the class token is read.
        routed("linear", blocks=(1, 5)),
        routed(content, gate="linear"),
        routed("linear", gate="identity", losses={"membership": 0.1}),
        routed("attention"),
        routed("norm"),
        routed("random"),
        routed("stride"),
        routed("redundancy", skipped="merge"),
        routed(content, select=mmod.Threshold(0.5), gate="sigmoid"),
        routed(content, **STEP, gate="step"),
        routed("linear", capacity=1.0, blocks=(1,)),
        routed("linear", capacity=(0.0, 0.0)),
    ],
)
def test_a_healthy_router_gives_no_warning(config: mmod.RoutingConfig) -> None:
    rows, messages = trained(config)
    assert messages == []
    assert [row["step"] for row in rows if row["block"] == "blocks.1"] == list(range(1, STEPS + 1))


def test_figures_say_what_was_planted() -> None:
    kept = {name: trained(routed(name))[0][-1] for name in ("stride", "random", "linear")}
    assert kept["stride"]["same_positions"] == pytest.approx(1.0)
    assert abs(kept["random"]["same_positions"]) < 0.2
    assert kept["stride"]["gradient"] is kept["stride"]["gate"] is None
    # The gate of kept tokens alone reaches the loss; a loss on all scores reaches all of them.
    assert kept["linear"]["gradient"] == pytest.approx(30 / 100, abs=0.02)
    with_loss = trained(routed("linear", losses={"membership": 0.1}))[0]
    assert all(row["gradient"] == 1.0 for row in with_loss)
    assert all(row["kept"] == pytest.approx(0.3, abs=0.01) for row_of_block in kept.values() for row in [row_of_block])


@pytest.mark.parametrize("images", [1, 2, 5])
@pytest.mark.parametrize("tokens", [3, 8])
def test_agreement_of_positions_counts_pairs_of_images(images: int, tokens: int) -> None:
    torch.manual_seed(images)
    router = Router(mmod.RoutingConfig(router="norm"), dim=4, block=0, capacity=0.5, prefix=1)
    routing = router(torch.randn(images, tokens, 4))
    figures, free = figures_of(routing, router), routing.free(1)
    keep = [set(row.nonzero().flatten().tolist()) for row in routing.keep_BN & free]
    pairs = [(i, j) for i in range(images) for j in range(images) if i != j]
    kept = sum(len(keep[i]) for i, _ in pairs)
    if not kept:
        assert figures["same_positions"] is None
        return
    again, chance = sum(len(keep[i] & keep[j]) for i, j in pairs) / kept, sum(map(len, keep)) / int(free.sum())
    assert figures["same_positions"] == pytest.approx((again - chance) / (1 - chance))
    assert figures["load"] == pytest.approx(chance)
    assert figures["spread"] == pytest.approx(float(routing.score_BN[:, 1:].std(1, correction=0).mean()), rel=1e-5)


def test_tokens_of_groups_are_counted_by_their_order() -> None:
    router = DecoderRouter(mmod.RoutingConfig(router=position), dim=4, block=0, capacity=0.5)
    free = torch.tensor([[False, True, True, True, True, False], [True, True, True, True, False, False]])
    valid = torch.tensor([[True] * 6, [True] * 5 + [False]])
    routing = router(torch.randn(2, 6, 4), tokens=assign_groups(free, free & valid, valid))
    figures = figures_of(routing, router)
    assert figures["kept"] == figures["load"] == pytest.approx(0.5)
    assert figures["same_positions"] is not None


def test_rows_survive_logs() -> None:
    rows, _ = trained(routed("linear"))
    logs = [
        {"step": step, "loss": 1.0, **logged_figures([row for row in rows if row["step"] == step])} for step in (1, 2)
    ]
    assert rows_of_logs(logs) == [row for row in rows if row["step"] < 3]
    assert list(rows[0]) == ["step", "data", "block", *FIGURES]


def test_a_run_writes_training_and_evaluation_by_block(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 2, "log_every": 2, "ema": {"decay": 0.9}}
    result = run(tiny_config(output=tmp_path / "run", routing={"router": "linear", "capacity": 0.5}, **options))
    with (tmp_path / "run/routers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["data"] for row in rows} == {"train", "val", "ema"}
    assert sorted({int(row["step"]) for row in rows if row["data"] == "train"}) == [2, 4, 6, 8, 10, 12]
    last = {row["block"]: float(row["kept"]) for row in rows if row["data"] == "val" and row["step"] == "12"}
    assert last == pytest.approx(result.evaluation.kept, rel=1e-5)
    assert not any(name.startswith("kept/") for row in result.history for name in row)
