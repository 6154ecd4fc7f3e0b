"""Each method in each format: exported, in ONNX, in half precision and quantized it is the eager model, or refuses."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import mmod
from mmod.lab import Experts, Recursions
from tests.kit.cover import in_turn
from tests.kit.method_zoo import EVERY
from tests.kit.vlm_zoo import make_language

# What each refuses to export: shapes depend on the data.
REFUSED = {
    "exit": "early exits cannot be exported",
    "experts-unlimited": "experts without slots cannot be exported",
    "recursions-tokens": "depths of tokens cannot be exported",
}
# Operations that ONNX has in another form: sums and copies of rows by index. What is traced grows with the depth.
IN_ONNX = {"merge-mean": {"depth": 1}, "experts-tokens": {"depth": 1}}
# What no model above has: two methods, tokens that are fused, a cycle with all patches, channels.
EXPORTED: dict[str, dict[str, Any]] = {"staged": {}, "prune-fused": {}, "recursions-first": {}, "channels-own": {}}
BATCHES = (1, 2, 5)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 64, 64, generator=torch.Generator().manual_seed(batch))


def sizes() -> tuple[dict[int, Any]]:
    return ({0: Dim("batch", min=1, max=64)},)


@pytest.mark.parametrize("name", EXPORTED)
def test_exports_with_a_dynamic_batch(name: str) -> None:
    model = EVERY[name](**EXPORTED[name])
    program = torch.export.export(model, (images(2),), dynamic_shapes=sizes(), strict=False).module()
    for batch in BATCHES:
        torch.testing.assert_close(program(images(batch)), model(images(batch)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", IN_ONNX)
def test_onnx_runtime_computes_the_same(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model: Any = EVERY[name](**IN_ONNX[name])
    file = str(tmp_path / "model.onnx")
    if hasattr(model, "pos_embed"):
        # Patches of a plain image are then equal, and every choice among them is a tie.
        model.pos_embed.zero_()
    torch.onnx.export(model, (images(2),), file, dynamo=True, dynamic_shapes=sizes(), verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for x in (*map(images, BATCHES), torch.full((2, 3, 64, 64), 0.3)):
        (answer,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(answer), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_data_dependent_shapes_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{REFUSED[name]}.* depends on the data"):
        torch.export.export(EVERY[name](), (images(2),), dynamic_shapes=sizes(), strict=False)


def test_onnx_says_what_the_export_refused(tmp_path: Path) -> None:
    with pytest.raises(torch.onnx.errors.OnnxExporterError) as raised:
        torch.onnx.export(EVERY["exit"](), (images(2),), str(tmp_path / "model.onnx"), dynamo=True, verbose=False)
    messages, error = [], raised.value
    while error is not None:
        messages.append(str(error))
        error = error.__cause__
    assert any(REFUSED["exit"] in message for message in messages)
    assert not list(tmp_path.iterdir())


# Rounding of weights and states, in standard deviations of the answers.
TOLERANCES = {torch.bfloat16: 0.06, torch.float16: 0.01}


@pytest.mark.parametrize(("name", "dtype"), in_turn(EVERY, TOLERANCES), ids=str)
def test_half_precision_is_the_same_up_to_rounding(name: str, dtype: torch.dtype) -> None:
    model = EVERY[name]()
    expected = copy.deepcopy(model).double()(images(3).double())
    answers = model.to(dtype)(images(3).to(dtype))
    assert answers.dtype == dtype
    assert (answers.double() - expected).abs().max() < TOLERANCES[dtype] * expected.std()


def quantize(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize("name", EVERY)
def test_quantized_layers_are_the_same_up_to_rounding(name: str) -> None:
    model = EVERY[name]()
    expected, answers = model(images(3)), quantize(copy.deepcopy(model))(images(3))
    assert (answers - expected).abs().max() < 0.25 * expected.std()


TEXTS: dict[str, Any] = {"language": {"tokens": "all"}}
DECODERS: dict[str, Any] = {
    "kept": mmod.RoutingConfig(router="norm", **TEXTS),
    "all": mmod.RoutingConfig(router="norm", context="all", **TEXTS),
    "mlp": mmod.RoutingConfig(router="norm", operator="mlp", **TEXTS),
    "experts": Experts(experts=2),
    "experts-tokens": Experts(experts=2, choice="tokens", capacity=None),
    "experts-predictor": Experts(experts=2, choice="predictor"),
    "recursions": Recursions(recursions=2),
    "recursions-first": Recursions(recursions=2, choice="tokens", keys="first"),
    "recursions-predictor": Recursions(recursions=2, choice="predictor"),
}


@pytest.mark.parametrize("name", DECODERS)
def test_quantized_decoders_are_changed_in_either_order(name: str) -> None:
    words = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    model = make_language("llama", num_hidden_layers=4).eval()
    outputs = []
    for quantized_first in (True, False):
        changed = quantize(copy.deepcopy(model)) if quantized_first else copy.deepcopy(model)
        torch.manual_seed(1)
        changed = mmod.apply_(changed, DECODERS[name]).eval()
        outputs.append((changed if quantized_first else quantize(changed))(words).logits)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("choice", ["score", "predictor"])
def test_recursions_of_single_tokens_are_not_exported(choice: str) -> None:
    model = mmod.apply_(make_language("llama", num_hidden_layers=4), Recursions(choice=choice)).eval()
    words = {"input_ids": torch.tensor([[3, 1, 4, 1, 5]]), "use_cache": False}
    with pytest.raises(ValueError, match=r"recursions of single tokens cannot be exported.* depends on the data"):
        torch.export.export(model, (), words, strict=False)
