"""open_clip's own training program, routed, on shards that its own reader could not read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import webdataset

import mmod
from mmod.data.synthetic.scenes import SCENES
from mmod.registry.open_clip_program import readable_shards, train_open_clip
from tests.kit.pairs_worker import MODEL

ARGUMENTS = ["--dataset-type", "webdataset", "--epochs", "1", "--batch-size", "32", "--workers", "1"]


@pytest.mark.slow
def test_the_program_trains_a_routed_model_from_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SCENES.build(tmp_path / "data", "tiny")
    model = MODEL | {"vision_cfg": {**MODEL["vision_cfg"], "image_size": 48}}  # type: ignore[dict-item]
    (tmp_path / "program-clip.json").write_text(json.dumps(model))
    models: list[torch.nn.Module] = []
    import open_clip_train.main as program

    real = program.train_one_epoch

    def watched(model: torch.nn.Module, data: object, *args: object, **kwargs: object) -> object:
        models.append(model)
        return real(model, data, *args, **kwargs)

    monkeypatch.setattr(program, "train_one_epoch", watched)
    shards = f"{tmp_path}/data/train-{{00000..00003}}.tar"
    logs = ["--logs", str(tmp_path / "logs"), "--name", "run"]
    train_open_clip(
        [*ARGUMENTS, *logs, "--model", "program-clip", "--train-data", shards, "--accum-freq", "2"],
        models=str(tmp_path / "program-clip.json"),
        image=mmod.RoutingConfig(capacity=0.5),
    )
    assert list(mmod.routed_blocks(models[0])) == ["visual.transformer.resblocks.1"]
    saved = torch.load(tmp_path / "logs/run/checkpoints/epoch_1.pt", weights_only=True)
    assert saved["epoch"] == 1
    assert saved["state_dict"].keys() == models[0].state_dict().keys()


def test_without_the_preparation_its_reader_fails_on_the_mark_at_a_shards_end(tmp_path: Path) -> None:
    from open_clip_train import data

    SCENES.build(tmp_path / "data", "tiny")
    urls = [{"url": str(path)} for path in sorted((tmp_path / "data").glob("val-*.tar"))]
    with pytest.raises(KeyError, match="fname"):
        list(data.tarfile_to_samples_nothrow(iter([dict(url) for url in urls])))
    with readable_shards():
        assert len(list(data.tarfile_to_samples_nothrow(iter(urls)))) == 64
    assert data.tar_file_expander is webdataset.tariterators.tar_file_expander


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ValueError, match="would be routed like the model"):
        train_open_clip(["--distill-model", "ViT-B-32"])
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        train_open_clip([], models="none.json")
