"""The check of conversations against a processor: it finds what a collator would meet, before the first step."""

from __future__ import annotations

import errno
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import transformers
from PIL import ExifTags, Image

from mmod.data.corrupt import CorruptDataError
from mmod.data.readers import lengths
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ChatDataset, ConversationsConfig, open_conversations
from mmod.data.readers.lengths import open_checked
from mmod.io.store import Store
from mmod.training import fit
from mmod.training.chat.kind import ChatKind
from mmod.training.chat.processor import create_bpe_processor, create_word_processor
from mmod.training.engine.kind import calibration, create
from mmod.training.kinds import estimate
from tests.kit.chat_configs import vlm_config
from tests.kit.conversations import said
from tests.kit.processors import qwen

SKIP = ConversationsConfig(on_corrupt="skip")


def next_one() -> Any:
    words = create_word_processor(image_size=24, patch_size=6)
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 24},
        crop_size={"height": 24, "width": 24},
        image_grid_pinpoints=[[24, 48], [48, 24], [48, 48]],
    )
    return transformers.LlavaNextProcessor(
        images,
        words.tokenizer,
        patch_size=6,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=words.chat_template,
    )


def idefics() -> Any:
    """Return a processor that writes markers of rows and columns between the tokens of a split image."""
    words = create_word_processor(image_size=24, patch_size=6)
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    words.tokenizer.add_tokens(["<global-img>", *places], special_tokens=True)
    images = transformers.Idefics3ImageProcessor(size={"longest_edge": 48}, max_image_size={"longest_edge": 24})
    return transformers.Idefics3Processor(images, words.tokenizer, image_seq_len=4, chat_template=words.chat_template)


PROCESSORS = {
    "llava": lambda: create_word_processor(image_size=24, patch_size=6),
    "qwen": qwen,
    "llava-next": next_one,
    "idefics3": idefics,
}
_RECORDS = 16
WORDS = ["which", "is", "the", "7", "?", "three", "of", "left"]


def record(rng: random.Random, folder: Path, key: int) -> dict[str, Any]:
    """Write random images, and return a conversation about them with up to three turns."""
    images: list[str] = []
    texts: list[str] = []
    for turn in range(rng.randint(1, 3)):
        marks = ""
        for _ in range(rng.choice([0, 0, 1, 1, 2]) if turn else rng.randint(0, 2)):
            name = f"{key}-{len(images)}.png"
            exif = Image.Exif()
            # Upright, or turned as a photograph of a telephone.
            exif[ExifTags.Base.Orientation] = 1 if key % 2 else 6
            Image.new("RGB", (rng.randint(20, 200), rng.randint(20, 200))).save(folder / name, exif=exif)
            images.append(name)
            marks += "<image>\n"
        texts += [marks + " ".join(rng.choices(WORDS, k=rng.randint(1, 12))), " ".join(rng.choices(WORDS, k=3))]
    return {"id": str(key), "image": images, "conversations": said(*texts)}


def fails(collator: ChatCollator, chats: ChatDataset) -> dict[str, str]:
    """Return why a collator fails, by key of the conversation."""
    failed = {}
    for index in range(len(chats)):
        try:
            collator([chats[index]])
        except ValueError as error:
            failed[chats.record(index)["key"]] = "image" if "cuts off an image" in str(error) else "answer"
    return failed


@pytest.mark.parametrize("name", PROCESSORS)
def test_what_is_found_is_what_a_collator_meets(name: str, tmp_path: Path) -> None:
    processor = PROCESSORS[name]()
    rng = random.Random(name)
    path = tmp_path / "all.json"
    path.write_text(json.dumps([record(rng, tmp_path, key) for key in range(_RECORDS)]))
    chats = open_conversations(str(path))
    found_any = set()
    for limit in (4, 20, 40, 80, 240, None):
        collator = ChatCollator(processor, max_length=limit)
        expected = fails(collator, chats)
        if len(expected) == len(chats):
            with pytest.raises(ValueError, match="no conversation is left"):
                open_checked(str(path), SKIP, collator)
            continue
        checked = open_checked(str(path), SKIP, collator)
        left = {checked.record(index)["key"] for index in range(len(checked))}
        assert left == {str(key) for key in range(_RECORDS)} - expected.keys(), limit
        reasons = {fault.sample.split("'")[1]: fault.reason for fault in checked.report.faults}
        assert reasons.keys() == expected.keys()
        for key, kind in expected.items():
            assert ("cuts off an image" if kind == "image" else "leaves no answer") in reasons[key]
            found_any.add(kind)
        if expected:
            with pytest.raises(CorruptDataError, match=rf"conversation \d+, '\d+'.*max_length={limit} .* tokens"):
                open_checked(str(path), ConversationsConfig(), collator)
    assert found_any == {"image", "answer"}


def test_the_processor_encodes_each_size_once_and_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "all.json"
    path.write_text(json.dumps([record(random.Random(key % 3), tmp_path, key) for key in range(9)]))
    chats = open_conversations(str(path))
    upright = {image.size for index in range(9) for image in chats[index].images}
    encoded: list[Any] = []
    encode = ChatCollator.__call__

    def encoding(collator: ChatCollator, samples: Any) -> Any:
        encoded.extend(image.size for sample in samples for image in sample.images)
        return encode(collator, samples)

    monkeypatch.setattr(ChatCollator, "__call__", encoding)
    monkeypatch.setattr(ChatDataset, "__getitem__", lambda *_: pytest.fail("an image was decoded"))
    open_checked(str(path), SKIP, ChatCollator(qwen(), max_length=100))
    assert len(encoded) > 3
    assert encoded == sorted(upright)


def test_tokens_of_the_processor_in_a_text_are_faults(tmp_path: Path) -> None:
    collator = ChatCollator(qwen())
    records = [
        {"id": "a", "conversations": said("which is it ?", "3")},
        {"id": "b", "conversations": said("say <pad> or <s>", "3")},
    ]
    path = tmp_path / "all.json"
    path.write_text(json.dumps(records))
    collator.processor.image_token = "<pad>"
    for prompts in (False, True):
        with pytest.raises(CorruptDataError, match=r"1, 'b'\]: a message holds '<pad>', a token of Qwen2_5"):
            open_checked(str(path), ConversationsConfig(), collator, prompts=prompts)
        assert len(open_checked(str(path), SKIP, collator, prompts=prompts)) == 1


def test_a_template_that_rewrites_earlier_turns_is_found_where_it_does(tmp_path: Path) -> None:
    processor = create_word_processor(image_size=24, patch_size=6)
    loop, part = "{% for part in message['content'] %}", "{{ part['text'] + ' ' }}"
    cut = "{{ (part['text'] if is_last else part['text'].split('</think>')[-1]) + ' ' }}"
    template = processor.chat_template.replace(part, cut).replace(loop, "{% set is_last = loop.last %}" + loop)
    processor.chat_template = template
    texts = [("a ?", "3", "b ?", "4"), ("a ?", "hm </think> 3", "b ?", "4"), ("a ?", "hm </think> 3")]
    path = tmp_path / "all.json"
    path.write_text(json.dumps([{"id": str(n), "conversations": said(*text)} for n, text in enumerate(texts)]))
    checked = open_checked(str(path), SKIP, ChatCollator(processor))
    assert [checked.record(index)["key"] for index in range(len(checked))] == ["0", "2"]
    assert "changes earlier turns" in str(checked.report)


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize(
    ("asks", "begins", "is_whole"),
    [
        # LLaVA-1.5, SmolVLM and Idefics3, Qwen-VL, Gemma 3; then those that end within a token.
        ("ASSISTANT:", "ASSISTANT: ", True),
        ("Assistant:", "Assistant: ", True),
        ("<assistant>\n", "<assistant>\n", True),
        ("<start_of_turn>model\n", "<start_of_turn>model\n", True),
        ("ASSISTANT: ", "ASSISTANT: ", False),
        ("<assistant> ", "<assistant> ", False),
        ("Answer: a ", "Answer: a ", False),
    ],
)
def test_a_prompt_whose_end_joins_the_answer_is_refused(
    asks: str, begins: str, is_whole: bool, prompts: bool, tmp_path: Path
) -> None:
    processor = create_bpe_processor(["is it red or blue ?"] * 9, image_size=24, patch_size=6)
    role = "{% if message['role'] == 'assistant' %}{{ BEGINS }}{% else %}{{ 'USER: ' }}{% endif %}"
    template = processor.chat_template.replace("{{ '<' + message['role'] + '> ' }}", role)
    template = template.replace("'<assistant>'", repr(asks)).replace("BEGINS", repr(begins))
    processor.chat_template = template
    path = tmp_path / "all.json"
    path.write_text(json.dumps([{"id": "a", "conversations": said("is it red or blue ?", "red")}]))
    if is_whole:
        assert len(open_checked(str(path), ConversationsConfig(), ChatCollator(processor), prompts=prompts)) == 1
        return
    match = r"as in 'a': a prompt ends in \[.*, ' '\], where the whole conversation has \[.*, ' red'\]\. Let what"
    with pytest.raises(ValueError, match=match):
        open_checked(str(path), ConversationsConfig(), ChatCollator(processor), prompts=prompts)


def test_a_processor_that_cannot_be_trained_is_refused_and_can_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = create_word_processor(image_size=24, patch_size=6)
    monkeypatch.setattr(type(processor), "replace_image_token", lambda self, *_, **__: "")
    Image.new("RGB", (24, 24)).save(tmp_path / "a.png")
    path = tmp_path / "all.json"
    path.write_text(json.dumps([{"id": "a", "image": "a.png", "conversations": said("<image>\na ?", "3")}]))
    with pytest.raises(ValueError, match="changes the text around images"):
        open_checked(str(path), SKIP, ChatCollator(processor))
    assert len(open_checked(str(path), SKIP, ChatCollator(processor), prompts=True)) == 1


@pytest.mark.parametrize("name", PROCESSORS)
def test_labels_are_the_answers(name: str, tmp_path: Path) -> None:
    processor = PROCESSORS[name]()
    rng = random.Random(0)
    path = tmp_path / "all.json"
    path.write_text(json.dumps([record(rng, tmp_path, key) for key in range(4)]))
    chats = open_conversations(str(path))
    batch = ChatCollator(processor)([chats[index] for index in range(4)])
    for labels, index in zip(batch["labels"], range(4)):
        # A word that the tokenizer does not know.
        texts = [message.text.replace("three", "<unk>") for message in chats[index].messages]
        said_again = processor.tokenizer.decode(labels[labels >= 0]).split("</s>")
        assert [text.strip() for text in said_again] == [*texts[1::2], ""]


def test_a_long_check_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "_WORTH_KEEPING", 1)
    rng = random.Random(3)
    path = tmp_path / "all.json"
    path.write_text(json.dumps([record(rng, tmp_path, key) for key in range(12)]))
    collator = ChatCollator(qwen(), max_length=60)

    def check(limit: int = 60) -> str:
        return str(open_checked(str(path), SKIP, replace(collator, max_length=limit)).report)

    first = check()
    assert "max_length=60" in first
    calls: list[int] = []
    encode = ChatCollator.plain_tokens
    monkeypatch.setattr(ChatCollator, "plain_tokens", lambda *args: calls.append(1) or encode(*args))
    replace(collator, max_length=None)([open_conversations(str(path))[0]])
    assert check() == first
    assert not calls, "an equal check is read"
    assert "max_length=50" in check(50)
    assert calls, "another length is another check"
    calls.clear()
    assert check() == first
    assert "max_length=50" in check(50)
    assert not calls, "both are kept"
    kept = tmp_path / lengths._KEPT
    for text in ("", "[", "[]", '{"a": "b"}', kept.read_text().replace("max_length", "min_length")):
        kept.write_text(text)
        assert check() == first
    calls.clear()
    assert check() == first
    assert not calls
    Image.new("RGB", (190, 190)).save(tmp_path / "0-0.png")
    check()
    assert calls, "an exchanged image is read again"


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "_WORTH_KEEPING", 1)
    # As the system refuses it, which a superuser does not meet.
    monkeypatch.setattr(os, "access", lambda *_: False)
    refused = PermissionError(errno.EACCES, "denied", str(tmp_path))
    monkeypatch.setattr(Store, "_write", Mock(side_effect=refused))
    path = tmp_path / "all.json"
    path.write_text(json.dumps([record(random.Random(1), tmp_path, key) for key in range(9)]))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CorruptDataError, match="max_length=12"):
        open_checked(str(path), ConversationsConfig(), ChatCollator(qwen(), max_length=12))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("limit", [40, None])
def test_images_whose_size_the_processor_refuses_are_faults(limit: int | None, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    Image.new("RGB", (30, 30)).save(tmp_path / "a.png")
    Image.new("RGB", (8000, 30)).save(tmp_path / "long.png")
    records = [
        {"id": name, "image": f"{name}.png", "conversations": said("<image>\na ?", "3")}
        for name in ("bad", "a", "long")
    ]
    path = tmp_path / "all.json"
    path.write_text(json.dumps(records))
    checked = open_checked(str(path), SKIP, ChatCollator(qwen(), max_length=limit))
    assert [checked.record(index)["key"] for index in range(len(checked))] == ["a"]
    assert ["size of an image" in fault.reason for fault in checked.report.faults] == [True, False]
    assert "aspect ratio" in str(checked.report)
    # Questions are asked of files that can be read at all.
    asked = open_checked(str(path), SKIP, ChatCollator(qwen()), prompts=True)
    assert [asked.record(index)["key"] for index in range(len(asked))] == ["a", "long"]
    with pytest.raises(
        CorruptDataError, match=r"conversation 0, 'bad'.*the size of an image of 8 bytes cannot be read"
    ):
        open_checked(str(path), ConversationsConfig(), ChatCollator(qwen()), prompts=True)


def test_a_run_stops_before_its_first_step_or_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    short = {"id": "short", "image": "a.png", "conversations": said("<image>\nwhich is the 7 ?", "3")}
    long = {**short, "id": "long", "conversations": said("<image>\n" + "which " * 60, "3")}
    for name, records in (("train", [short, long] + [short] * 6), ("val", [short, long])):
        (tmp_path / f"{name}.json").write_text(json.dumps(records))
    data = ConversationsConfig(str(tmp_path / "train.json"), str(tmp_path / "val.json"), max_length=40)
    config = vlm_config(tmp_path, trainer={"max_steps": 1, "save_steps": 1}, data=data)
    with pytest.raises(CorruptDataError, match=r"conversation 1, 'long'\]: max_length=40 leaves no answer"):
        fit(config, progress=False)
    assert not (tmp_path / "run").exists()
    with pytest.raises(CorruptDataError, match="leaves no answer"):
        estimate(config)
    config = replace(config, data=replace(data, on_corrupt="skip"))
    with monkeypatch.context() as patch:
        patch.setattr(transformers.TrainingArguments, "world_size", 3)
        with pytest.raises(ValueError, match="2 conversations for 3 processes"):
            fit(config, progress=False)
    result = fit(config, progress=False)
    assert result.skipped == {"train": {data.train: 1}, "val": {}}
    assert result.evaluation is not None
    assert sum(result.evaluation.questions.values()) == 2, "prompts are not cut"
    batches = list(calibration(ChatKind(config), create(ChatKind(config)), 4, 4))
    assert sum(len(batch["input_ids"]) for batch in batches) == 7
