"""Training on text: continued runs, starting weights, teachers, elastic steps and what is left in the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import mmod
from mmod.training import fit
from mmod.training.engine.kind import create
from mmod.training.engine.start import create_models
from mmod.training.text.config import TrainConfig
from mmod.training.text.kind import TextKind
from mmod.training.text.task import TextTask
from tests.kit.engine_worker import weights
from tests.kit.text_configs import LLAMA, PREDICTOR, SCORE, text_config

ROOT = Path(__file__).parents[3]


def quiet(output: Path, **changes: Any) -> Any:
    return fit(text_config(output, **changes), progress=False)


@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_run_is_where_a_routed_one_starts(tmp_path: Path, tied: bool) -> None:
    dense = quiet(tmp_path / "dense", model={"config": {"tie_word_embeddings": tied}})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense" / "model")
    start = {"config": None, "checkpoint": str(tmp_path / "dense")}
    config = text_config(tmp_path / "routed", model=start, routing={**SCORE, "gate": "identity", "capacity": 1.0})
    model, teacher = create_models(TextKind(config))
    assert teacher is not None
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    tokens = torch.arange(40)[None]
    with torch.no_grad(), mmod.trace(model):
        student, taught = (one_model(input_ids=tokens).logits for one_model in (model.train(), teacher))
    assert torch.equal(student, taught)
    assert torch.equal(student, plain(input_ids=tokens).logits)
    assert fit(config, progress=False).evaluation.kept == dict.fromkeys(mmod.routed_blocks(model), 1.0)
    again = mmod.load_pretrained(tmp_path / "routed" / "model")
    assert mmod.is_routed(again)
    continued = text_config(tmp_path / "on", model={**start, "checkpoint": str(tmp_path / "routed")}, routing=SCORE)
    assert set(create_models(TextKind(continued))[0].state_dict()) == set(again.state_dict())
    assert dense.evaluation.causal_loss == dense.evaluation.loss


def test_the_parts_of_the_loss_are_what_they_are_said_to_be(tmp_path: Path) -> None:
    model, _ = create_models(TextKind(text_config(tmp_path, routing=SCORE)))
    tokens, following = torch.randint(0, 256, (2, 3, 20)).unbind()
    twin = {"teacher": create_models(TextKind(text_config(tmp_path)))[0].eval(), "distill_weight": 0.5}
    plain = TextTask(model, auxiliary=True, **twin)(tokens, following)
    assert set(plain) == {"loss", "task", "auxiliary", "distillation"}
    both = TextTask(model, auxiliary=True, elastic=True)(tokens, following)
    assert set(both) == {"loss", "task", "auxiliary", "elastic"}
    assert both["elastic"].item() > 0
    # The pass of all tokens leaves no loss.
    assert both["auxiliary"].item() == plain["auxiliary"].item()
    for parts in (plain, both):
        assert parts["loss"].item() == pytest.approx(sum(parts[name].item() for name in set(parts) - {"loss"}))
    assert plain["task"].item() != both["task"].item()


def test_an_elastic_run_tells_the_loss_of_all_tokens_in_all_layers(tmp_path: Path) -> None:
    result = quiet(tmp_path / "run", routing=PREDICTOR, elastic=True)
    kept = json.loads((tmp_path / "run" / "result.json").read_text())["evaluation"]
    assert kept["full_loss"] == result.evaluation.full_loss is not None
    assert "all tokens in all layers" in str(result)


def test_what_is_routed_in_training_alone_is_left_dense(tmp_path: Path) -> None:
    routing = {"router": "random", "training_only": True}
    for name, epochs in (("routed", None), ("ended", 1)):
        result = quiet(tmp_path / name, routing=routing, training_only_epochs=epochs)
        assert (result.evaluation.kept, result.evaluation.causal_loss) == ({}, result.evaluation.loss)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        assert type(model).__name__ == "LlamaForCausalLM"
        again = create(TextKind(text_config(tmp_path / "next", model={"checkpoint": str(tmp_path / name)})))
        assert again.state_dict().keys() == model.state_dict().keys()
    routed, ended, dense = (
        weights(tmp_path / name / "model") for name in ("routed", "ended", quiet(tmp_path / "dense").folder)
    )
    for other in (ended, dense):
        assert any(not torch.equal(value, other[name]) for name, value in routed.items())


def test_weights_of_another_form_are_refused(tmp_path: Path) -> None:
    quiet(tmp_path / "dense", epochs=1, epoch_steps=1)
    model = {"config": {**LLAMA, "hidden_size": 16}, "checkpoint": str(tmp_path / "dense")}
    with pytest.raises(ValueError, match="does not fit the model"):
        create_models(TextKind(text_config(tmp_path / "other", model=model)))


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "text").glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_that_come_with_mmod_build_their_model(path: Path) -> None:
    config = TrainConfig.load(path)
    with torch.device("meta"):
        model, _ = create_models(TextKind(config))
    assert mmod.is_routed(model) == (config.routing is not None)
    assert config.output == f"runs/text/{path.stem}"


def test_a_model_of_other_tokens_than_bytes_is_refused(tmp_path: Path) -> None:
    config = text_config(tmp_path, model={"config": {**LLAMA, "vocab_size": 300}})
    with pytest.raises(ValueError, match="vocab_size must be 256, as many as there are bytes, got 300"):
        TextKind(config).prepare()
