"""Own conversations: from a JSON and a folder of pictures to an answer about a new picture, as the guide says."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from mmod.data.readers.conversations import open_conversations
from mmod.data.records import Message
from mmod.training import fit
from mmod.training.chat.config import TrainConfig
from mmod.training.chat.processor import create_bpe_processor, create_processor
from mmod.training.chat.start import create_with_processor
from mmod.training.kinds import estimate, kind_of
from tests.kit.chat_configs import vlm_config
from tests.kit.conversations import write_own

ROOT = Path(__file__).parents[3]
STEPS = {"max_steps": 2, "warmup_steps": 0, "use_cpu": True, "per_device_train_batch_size": 4}


def own_config(**trainer: Any) -> TrainConfig:
    config = TrainConfig.load(ROOT / "configs/vlm/own-conversations.yaml")
    return replace(config, trainer={**config.trainer, **STEPS, **trainer}, max_new_tokens=6)


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with own conversations."""
    monkeypatch.chdir(tmp_path)
    write_own(tmp_path)
    return tmp_path


def test_the_guide_leads_to_an_answer_about_a_new_picture(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(own_config(), progress=False)
    assert result.evaluation is not None
    assert sum(result.evaluation.questions.values()) == 24
    Image.new("RGB", (50, 20), "red").save("new.jpg")
    page = (ROOT / "docs/finetuning_vlm.md").read_text()
    (code,) = (body for body in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "new.jpg" in body)
    capsys.readouterr()
    exec(compile(code, "docs/finetuning_vlm.md", "exec"), {})
    assert capsys.readouterr().out.endswith("\n")


def test_a_tokenizer_of_the_conversations_knows_every_text_and_is_the_same_each_time(inside: Path) -> None:
    first, second = (create_processor(own_config()).tokenizer for _ in range(2))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    for text in ("It's red, naïvely.", "unseen: 漢字 🙂", "  two  spaces "):
        assert first.decode(first(text)["input_ids"]) == text
    assert first.unk_token_id is None
    model, processor = create_with_processor(own_config())
    assert model.config.text_config.vocab_size == len(processor.tokenizer)
    chats = open_conversations("data/conversations.json", own_config().data)
    batch = kind_of(own_config()).collator([chats[0], chats[1]])
    taught = batch["input_ids"][0][batch["labels"][0] != -100]
    assert processor.tokenizer.decode(taught) == " It's red, naïvely. </s>"
    assert torch.isfinite(model(**batch).loss)
    # "red" is one token with the space in front of it, which belongs to the answer.
    red = chats[0]._replace(messages=(Message("user", "<image> is it red or blue?"), Message("assistant", "red")))
    batch = kind_of(own_config()).collator([red])
    taught = batch["input_ids"][0][batch["labels"][0] != -100]
    assert processor.tokenizer.convert_ids_to_tokens(taught.tolist()) == ["Ġred", "Ġ", "</s>"]


def test_the_trained_tokenizer_is_saved_with_the_model(tmp_path: Path) -> None:
    processor = create_bpe_processor(["A tench.", "A red fox."], image_size=12, patch_size=6)
    processor.save_pretrained(tmp_path)
    loaded = transformers.AutoProcessor.from_pretrained(tmp_path)
    text = "<s><user> <image> A naïve fox? <assistant>"
    image = Image.new("RGB", (9, 9))
    expected = processor(images=image, text=text, return_tensors="pt")
    actual = loaded(images=image, text=text, return_tensors="pt")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert int((expected["input_ids"] == processor.image_token_id).sum()) == 4


def test_words_that_the_processor_does_not_know_are_refused_with_one_that_knows_them(inside: Path) -> None:
    config = own_config()
    words = replace(config, model=replace(config.model, processor="words"))
    match = r"does not know 100\.0% of the tokens of training answers.*'<unk>'.* Set model\.processor to bpe"
    for start in (fit, estimate):
        with pytest.raises(ValueError, match=match):
            start(words)
    assert not Path(config.output, "config.yaml").exists()


def test_a_run_shorter_than_its_logging_steps_shows_its_loss(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(vlm_config(folder, "short", {"logging_steps": 100}))
    assert re.search(r"train: .*, loss=[0-9.]+, lr=[0-9.e-]+, epoch=", capsys.readouterr().err)


def test_a_run_shows_its_loss_and_where_it_resumes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = vlm_config(folder, "shown", {"logging_steps": 3, "save_total_limit": 2})
    result: Any = fit(config)
    shown = capsys.readouterr().err
    # Few steps are logged: figures on a later line say theirs.
    assert re.search(r"train: 4 of 4 steps, .*, at step=3, loss=[0-9.]+, lr=[0-9.e-]+, epoch=", shown)
    assert "Writing model shards" not in shown
    assert "right answers without looking at an image" in str(result)
    Path(config.output, "result.json").unlink()
    shutil.rmtree(Path(config.output, "checkpoints/checkpoint-4"))
    fit(config)
    assert f"{config.output}: resumed at step 2 of 4" in capsys.readouterr().err
