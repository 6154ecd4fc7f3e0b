"""Models on the hub, with a folder of this machine in its place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from torch import nn

import mmod
from mmod.registry.hub import model_card, write_hub_folder
from tests.kit.vlm_zoo import LINEAR, make_language, words


class Hub:
    """What is called of `huggingface_hub`, on folders of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[dict[str, Any]] = []

    def __call__(self, token: Any = None) -> Hub:
        self.calls.append({"token": token})
        return self

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        self.calls.append(options)
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, repo_id: str, folder_path: str, **options: Any) -> Any:
        self.calls.append(options)
        shutil.copytree(folder_path, self.root / repo_id)
        return SimpleNamespace(commit_url=f"hub/{repo_id}")

    def snapshot(self, repo_id: str, revision: str | None = None, allow_patterns: Any = None) -> str:
        self.calls.append({"revision": revision})
        return str(self.root / repo_id)

    def download(self, repo_id: str, filename: str, revision: str | None = None) -> str:
        if not (self.root / repo_id / filename).is_file():
            raise FileNotFoundError(filename)
        return str(self.root / repo_id / filename)


def timm_model() -> tuple[nn.Module, Any, dict[str, Any]]:
    import timm

    model = timm.create_model("test_vit", num_classes=7)
    mmod.route_(model, mmod.RoutingConfig(router="norm", capacity=0.5))
    return model, mmod.flops(model, 160), {"x": torch.randn(2, 3, 160, 160)}


def clip_model() -> tuple[nn.Module, Any, dict[str, Any]]:
    from tests.kit import clip_zoo

    model = clip_zoo.make_clip("ViT-B-32")
    mmod.route_(model, image=mmod.RoutingConfig(router="norm", capacity=0.5))
    images = clip_zoo.make_images("ViT-B-32")
    return model, mmod.flops(model, {"image": images[:1]}), {"image": images}


def causal_model() -> tuple[nn.Module, Any, dict[str, Any]]:
    model = mmod.route_(make_language("llama"), LINEAR.replace(language={"tokens": "all"}))
    return model, mmod.flops(model, mmod.Prompt(20)), dict(words())


def answers(model: nn.Module, batch: dict[str, Any]) -> Any:
    with torch.no_grad():
        outputs = model.eval()(**batch)
    return outputs.logits if hasattr(outputs, "logits") else outputs[0] if isinstance(outputs, tuple) else outputs


@pytest.mark.parametrize("make", [timm_model, causal_model])
def test_what_was_uploaded_comes_back(make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot)
    model, flops, batch = make()
    assert mmod.push_to_hub(model, "me/small", flops, about="Trained on nothing.", private=True) == "hub/me/small"
    assert {"private": True, "exist_ok": True} in hub.calls
    card = huggingface_hub.ModelCard.load(tmp_path / "me/small/README.md")
    assert {"mmod", "mixture-of-depths"} <= set(card.data.tags)
    config = mmod.routing_config(model)
    plan = config.resolved(len(flops.blocks))
    described = json.dumps(config.to_dict(), indent=2)
    for said in ("Trained on nothing.", str(flops), str(plan), described, "Counted, not timed"):
        assert said in card.text
    again = mmod.load_pretrained("hf-hub:me/small@main")
    assert hub.calls[-1] == {"revision": "main"}
    assert torch.equal(answers(again, batch), answers(model, batch))


def test_a_changed_model_of_the_hub_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    model, flops, batch = timm_model()
    mmod.push_to_hub(model, "me/small", flops)
    opened = mmod.open_model("hf-hub:me/small@main")
    assert torch.equal(answers(opened.model, batch), answers(model, batch))
    assert opened.sentence == "the model that mmod saved in hf-hub:me/small@main, changed by routing"
    # Of another repository timm says what is wrong.
    read: list[str] = []

    def open_timm(name: str, _: Any) -> mmod.Opened:
        read.append(name)
        return opened

    monkeypatch.setattr("mmod.opening.timm.open_timm", open_timm)
    mmod.open_model("hf-hub:me/dense")
    assert read == ["hf-hub:me/dense"]


def test_models_of_open_clip_name_their_architecture(tmp_path: Path) -> None:
    from tests.kit import clip_zoo

    model, flops, batch = clip_model()
    write_hub_folder(model, tmp_path, "me/clip", flops, architecture=clip_zoo.small_config("ViT-B-32"))
    assert torch.equal(answers(mmod.load_pretrained(tmp_path), batch), answers(model, batch))
    assert 'mmod.load_pretrained("hf-hub:me/clip")' in (tmp_path / "README.md").read_text()


def test_what_a_card_cannot_state_is_refused(tmp_path: Path) -> None:
    model, flops, _ = timm_model()
    with pytest.raises(ValueError, match="FLOPs are of other blocks"):
        model_card(model, "me/small", causal_model()[1])
    for repo in ("", "**bold**/small", "me/small](http://x)", "me/a/b", None):
        with pytest.raises((TypeError, ValueError), match=r"Repo id must|repo must be a text, got None"):
            model_card(model, repo, flops)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="about must be a text, got None"):
        model_card(model, "me/small", flops, about=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a card is for models of open_clip, timm, transformers that methods changed"):
        write_hub_folder(mmod.unroute_(model), tmp_path, "me/small", flops)
    assert not list(tmp_path.iterdir())
