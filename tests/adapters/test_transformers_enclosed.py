"""A changed model inside a model of transformers, which saves itself."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers

import mmod


class Holder(transformers.PreTrainedModel):
    """A user's model, whose constructor changes what it holds."""

    config_class = transformers.TimmWrapperConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.tower = mmod.route_(timm.create_model("test_vit"), mmod.RoutingConfig(capacity=0.25))
        self.post_init()


def enclosed(kind: str) -> tuple[Any, Any]:
    """Return a model of transformers and the one inside it that methods may change alone."""
    if kind == "encoder":
        encoder = transformers.SiglipVisionModel(
            transformers.SiglipVisionConfig(
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=4,
                num_attention_heads=2,
                image_size=12,
                patch_size=4,
            )
        )
        decoder = transformers.BertLMHeadModel(
            transformers.BertConfig(
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=2,
                vocab_size=20,
                is_decoder=True,
                add_cross_attention=True,
            )
        )
        outer: Any = transformers.VisionEncoderDecoderModel(encoder=encoder, decoder=decoder)
        return outer, outer.encoder
    host = getattr(transformers, kind)
    outer = host(transformers.TimmWrapperConfig(architecture="test_vit"))
    return outer, outer.timm_model


@pytest.mark.parametrize("method", ["attention", "linear"])
@pytest.mark.parametrize("kind", ["TimmWrapperModel", "TimmWrapperForImageClassification", "encoder"])
def test_a_changed_model_inside_another_is_not_saved_as_a_dense_one(kind: str, method: str, tmp_path: Path) -> None:
    outer, inner = enclosed(kind)
    dense = {name: value.clone() for name, value in outer.state_dict().items()}
    mmod.route_(inner, mmod.RoutingConfig(router=method, capacity=0.5))
    with pytest.raises(ValueError, match=f"this {type(outer).__name__} would be saved without the methods"):
        outer.save_pretrained(tmp_path / "outer")
    assert set(dense) <= set(outer.state_dict())
    # Each advice.
    if kind == "encoder":
        inner.save_pretrained(tmp_path / "inner")
    else:
        mmod.save_pretrained(inner, tmp_path / "inner")
    assert mmod.is_routed(mmod.load_pretrained(tmp_path / "inner"))
    copy.deepcopy(pickle.loads(pickle.dumps(inner))).state_dict(prefix="inner.")
    mmod.undo_(inner)
    outer.save_pretrained(tmp_path / "undone")
    loaded = type(outer).from_pretrained(tmp_path / "undone").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in dense.items())
    assert not inner._state_dict_pre_hooks


def test_a_users_class_that_changes_what_it_holds_saves_itself(tmp_path: Path) -> None:
    model = Holder(transformers.TimmWrapperConfig(architecture="test_vit"))
    model.save_pretrained(tmp_path)
    loaded = Holder.from_pretrained(tmp_path)
    assert mmod.capacities(loaded) == mmod.capacities(model)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values()))
