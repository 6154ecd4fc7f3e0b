"""What holds for every method that adds weights: gradients reach them, and they are saved, loaded and undone."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import mmod
from mmod.lab import Channels, Experts, Recursions
from mmod.methods import Method, methods_of
from mmod.training import fit
from mmod.training.engine.evaluate import read_rows
from mmod.training.engine.kind import evaluation_data
from mmod.training.engine.start import create_models
from mmod.training.text.evaluate import evaluate_ways, score
from mmod.training.text.kind import TextKind
from tests.kit.cover import in_turn
from tests.kit.experts import DECODER_WAYS, STAGED, WAYS
from tests.kit.text_configs import text_config
from tests.kit.vlm_zoo import make_language, random_words
from tests.kit.zoo import make_images, make_model, perturb_

WHERE = [{"keys": keys, "adds": adds} for keys, adds in itertools.product(("kept", "first"), ("output", "change"))]
CHANNELS: list[dict[str, Any]] = [{}, {"into": "own", "adds": "change", "squeeze": 1}, {"chosen": "random"}]
# What is added does not depend on how ways meet; their definitions, in tests of their own, have all of them.
METHODS: list[tuple[str, Method]] = [
    *(("vit", Experts(experts=3, blocks=(0, 2), **way)) for way in WAYS),
    *(("vit", Recursions(choice=choice, **where)) for where, choice in in_turn(WHERE, ("topk", "tokens"))),
    *(("resnet", Channels(divisor=4, **way)) for way in CHANNELS),
    *(("llama", Experts(experts=3, **way)) for way in DECODER_WAYS),
    *(("llama", Recursions(choice=way, **where)) for where, way in in_turn(WHERE, ("score", "predictor", "tokens"))),
]
ROUTED = mmod.RoutingConfig(router="linear", capacity=0.25)
# Experts may be staged: kept tokens alone reach them, in every second way.
CASES = [(host, method, False) for host, method in METHODS]
CASES += [(host, method, True) for host, method in METHODS[::2] if isinstance(method, Experts)]
every_case = pytest.mark.parametrize(
    ("host", "method", "staged"), CASES, ids=[f"{host}-{method.kind}-{staged}" for host, method, staged in CASES]
)
# What methods add differs from one to the next; the last norm of a narrow block begins with zeros.
lively = partial(perturb_, parts=(".others.", ".router", ".predictor", "layer1.1.bn", "layer4.1.bn"))


def make(host: str) -> Any:
    if host == "llama":
        return make_language("llama", num_hidden_layers=6)
    if host == "vit":
        return make_model("test_vit")
    torch.manual_seed(0)
    return timm.create_model("resnet18", layers=(2, 1, 1, 2), channels=(16, 32, 32, 64), num_classes=7).eval()


def run(model: Any, host: str) -> Tensor:
    if host == "llama":
        return model(input_ids=random_words(4, 24)).logits
    images = make_images("test_vit", 4)
    return model(images if host == "vit" else images[..., :40, :40])


@every_case
def test_gradients_reach_all_that_was_added_under_autocast_too(host: str, method: Any, staged: bool) -> None:
    model = make(host)
    dense = set(model.state_dict())
    mmod.apply_(model, method)
    if staged:
        mmod.route_(model, STAGED if host == "llama" else ROUTED)
    lively(model).train()
    with torch.autocast("cpu", torch.bfloat16, enabled=host != "llama"):
        loss = run(model, host).square().mean()
    loss = loss + mmod.auxiliary_loss(model)
    if getattr(method, "choice", "topk") != "topk":
        with pytest.raises(RuntimeError, match="since its loss was last collected"):
            mmod.auxiliary_loss(model)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    # An expert that no token chooses learns nothing.
    unused = {name for name, gradient in gradients.items() if gradient is None}
    assert all(isinstance(method, Experts) and ".others." in name for name in unused)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values() if gradient is not None)
    if host != "llama":
        decides = [
            name for name in gradients if name not in dense and (".router" in name or ".selector.2.weight" in name)
        ]
        assert decides
        assert all(bool(gradients[name].abs().sum() > 0) for name in decides)


@pytest.mark.parametrize(("kind", "choice"), [("experts", "predictor"), ("recursions", "score")])
def test_both_losses_are_measured_and_training_goes_on_from_a_run(tmp_path: Path, kind: str, choice: str) -> None:
    fields = {"experts": {"experts": 2, "capacity": 0.5}, "recursions": {"recursions": 2}}[kind]
    method = {"kind": kind, "choice": choice, "membership": 0.1, **fields}
    config = text_config(tmp_path / "run", methods=[method], epochs=1)
    evaluation: Any = fit(config, progress=False).evaluation
    kept = {f"model.layers.{layer}.mlp.expert{number}": 0.25 for layer in range(4) for number in (1, 2)}
    assert evaluation.kept == (kept if kind == "experts" else {"model.layers.1.recursion2": 0.5})
    assert evaluation.causal_loss != evaluation.loss
    assert 0 < evaluation.mean_agreement <= 1
    start = {"config": None, "checkpoint": str(tmp_path / "run")}
    again, teacher = create_models(TextKind(text_config(tmp_path / "next", model=start, methods=[method])))
    assert kind == "experts" or teacher is None
    assert methods_of(again)[0] == methods_of(mmod.load_pretrained(tmp_path / "run" / "model"))[0]
    test = evaluation_data(TextKind(config), again)
    rows = read_rows(evaluate_ways, again, test)
    assert score(rows, again).loss == pytest.approx(evaluation.loss)
