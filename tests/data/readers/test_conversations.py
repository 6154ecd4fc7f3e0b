"""Conversations: what is accepted, what is refused, and how labels are placed."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmod.data.convert.conversations import ConversationsConversion, convert_conversations
from mmod.data.corrupt import CorruptDataError
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ChatSample, ConversationsConfig, open_conversations
from mmod.data.records import Message, check_record
from mmod.training.chat.processor import create_word_processor
from mmod.values import IGNORED
from tests.kit.conversations import SOUND, said, write

FAULTS: dict[str, dict[str, Any]] = {
    "no list": {"id": "1"},
    "got nothing": {"id": "1", "conversations": []},
    "valid: human": {"id": "1", "conversations": [{"from": "robot", "value": "hi"}]},
    "is empty": {"id": "1", "conversations": said("which is the 7 ?", " ")},
    "got user$": {"id": "1", "conversations": said("which is the 7 ?")},
    "got assistant, user$": {"id": "1", "conversations": said("3", "no", roles=("gpt", "human"))},
    "0 <image> in the questions for 1": {
        "id": "1",
        "image": "a.png",
        "conversations": said("which is the 7 ?", "3"),
    },
    "2 <image> in the questions for 1": {
        "id": "1",
        "image": "a.png",
        "conversations": said("<image> <image> a ?", "3"),
    },
    "1 <image> in the questions for 0": {"id": "1", "conversations": said("<image> a ?", "3")},
    "no list of conversations or messages, but id, conversation$": {"id": "1", "conversation": said("a ?", "3")},
    "1 <image> outside a question, as in an answer": {
        "id": "1",
        "image": "a.png",
        "conversations": said("<image> a ?", "is <image> this ?"),
    },
    "a path or a list": {"id": "1", "image": 7, "conversations": said("<image> a ?", "3")},
    "one text for each question": {"id": "1", "kinds": ["a", "b"], "conversations": said("a ?", "3")},
    "not of the form": {"id": "1", "conversations": ["which is the 7 ?", "3"]},
    "got user, assistant, system": {
        "id": "1",
        "conversations": [*said("a ?", "3"), {"from": "system", "value": "now"}],
    },
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults_are_named(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_record(FAULTS[message])


def test_sound_records_pass() -> None:
    assert check_record(SOUND) == (Message("user", "<image>\nwhich is the 7 ?"), Message("assistant", "3"))
    several = {"image": ["a.png", "b.png"], "conversations": said("<image>\nand <image> ?", "no", "a ?", "3")}
    assert len(check_record(several)) == 4
    system = {"conversations": [{"from": "system", "value": "be brief"}, *said("a ?", "3")]}
    assert check_record(system)[0].role == "system"


def test_files_are_read_and_faults_counted(folder: Path) -> None:
    path = write(folder, [SOUND, *FAULTS.values()])
    with pytest.raises(CorruptDataError, match="no list"):
        open_conversations(path)
    conversations = open_conversations(path, ConversationsConfig(on_corrupt="skip"))
    assert len(conversations) == 1
    assert conversations.report.counts == {path: len(FAULTS)}
    assert conversations[0].images[0].size == (12, 12)
    lines = folder / "all.jsonl"
    lines.write_text("\n".join(json.dumps(record) for record in [SOUND, SOUND]) + "\n")
    assert len(open_conversations(str(lines))) == 2
    assert [turn[2] for turn in pickle.loads(pickle.dumps(conversations)).turns()] == ["3"]


@pytest.mark.parametrize("outer", [True, False])
def test_a_record_that_names_a_key_twice_is_a_fault(folder: Path, outer: bool) -> None:
    sound = json.dumps(SOUND)
    key = '"id": "0"' if outer else '"from": "human"'
    twice = sound.replace(key, f"{key}, {key}")
    for name, text in (("all.json", f" [{sound},\n{twice}, {sound} ] "), ("all.jsonl", f"{sound}\n{twice}\n{sound}")):
        (folder / name).write_text(text)
        with pytest.raises(CorruptDataError, match=f"the key '{'id' if outer else 'from'}' occurs twice"):
            open_conversations(str(folder / name))
        conversations = open_conversations(str(folder / name), ConversationsConfig(on_corrupt="skip"))
        assert (len(conversations), len(conversations.report.faults)) == (2, 1)
        assert [fault.sample for fault in conversations.report.faults] == ["1"]
    for text, message in ((f"[{twice}, ", "is no JSON.*cut off"), (twice, "holds no list")):
        (folder / "all.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            open_conversations(str(folder / "all.json"))


def test_sources_that_are_none(folder: Path) -> None:
    with pytest.raises(ValueError, match="must end in"):
        open_conversations("table.csv")
    with pytest.raises(ValueError, match="a split of"):
        open_conversations("questions:tiny/other")


TWO = {
    "id": "2",
    "image": ["a.png", "b.png"],
    "conversations": said("<image> <image> which ?", "first", "sure ?", "5"),
}
NONE = {"id": "3", "conversations": said("which is larger , 3 or 7 ?", "7")}


@pytest.fixture
def talks(folder: Path) -> list[ChatSample]:
    for name in ("a", "b"):
        Image.new("RGB", (12, 12)).save(folder / f"{name}.png")
    conversations = open_conversations(write(folder, [SOUND, TWO, NONE]))
    return [conversations[index] for index in range(3)]


@pytest.mark.parametrize("ends", [True, False])
def test_labels_stand_on_answers_and_their_ends(talks: list[ChatSample], ends: bool) -> None:
    processor = create_word_processor(image_size=12, patch_size=6)
    if not ends:
        # As in the template of LLaVA-1.5, no token ends an answer.
        template = processor.chat_template
        processor.chat_template = template.replace("{{ eos_token }}", "{{ ' ' }}")
        assert processor.chat_template != template
    batch = ChatCollator(processor)(talks)
    assert batch["pixel_values"].shape == (3, 3, 12, 12)
    images = (batch["input_ids"] == processor.image_token_id).sum(1)
    assert images.tolist() == [4, 8, 0]
    words = [processor.tokenizer.decode(row[row != IGNORED]) for row in batch["labels"]]
    assert words == ["3 </s>", "first </s> 5 </s>", "7 </s>"]
    kept = batch["labels"] != IGNORED
    assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])
    assert not kept[batch["attention_mask"] == 0].any()


def test_prompts_end_where_the_answer_starts(talks: list[ChatSample]) -> None:
    collator = ChatCollator(create_word_processor(image_size=12, patch_size=6))
    prompts, batch = collator.prompts(talks), collator(talks)
    for row in range(3):
        prompt = prompts["input_ids"][row][prompts["attention_mask"][row].bool()]
        assert torch.equal(prompt, batch["input_ids"][row][: len(prompt)])
        answer_labels = batch["labels"][row][len(prompt) :]
        assert (
            answer_labels[answer_labels != IGNORED] == batch["input_ids"][row][len(prompt) :][answer_labels != IGNORED]
        ).all()
        assert answer_labels[0] != IGNORED
    assert prompts["attention_mask"][:, -1].all()


@pytest.mark.parametrize("packed", [False, True])
def test_protected_text_is_the_question_or_all_that_is_said(talks: list[ChatSample], packed: bool) -> None:
    processor = create_word_processor(image_size=12, patch_size=6)
    batches = {
        protected: ChatCollator(processor, packed=packed, protected=protected)(talks)
        for protected in (None, "question", "conversation")
    }
    plain = batches[None]
    assert "protected_mask" not in plain
    for batch in batches.values():
        assert all(torch.equal(batch[name], plain[name]) for name in ("input_ids", "labels"))
    question, conversation = (batches[name]["protected_mask"] for name in ("question", "conversation"))
    assert torch.equal(conversation, question | (plain["labels"] != IGNORED))
    assert not (question & (plain["labels"] != IGNORED)).any()
    image = plain["input_ids"] == processor.image_token_id
    padding = torch.zeros_like(image) if packed else plain["attention_mask"] == 0
    assert torch.equal(~conversation, image | padding)
    words = processor.tokenizer.decode(plain["input_ids"][question])
    assert words.count("<assistant>") == words.count("<user>") == 4
    assert "which is larger , 3 or 7 ?" in words
    assert "first" not in words


def test_long_conversations_are_cut_but_never_an_image(talks: list[ChatSample]) -> None:
    processor = create_word_processor(image_size=12, patch_size=6)
    uncut = ChatCollator(processor)(talks[1:2])
    cut = ChatCollator(processor, max_length=uncut["input_ids"].shape[1] - 2)(talks[1:2])
    assert processor.tokenizer.decode(cut["labels"][0][cut["labels"][0] != IGNORED]) == "first </s>"
    assert cut["attention_mask"].shape == cut["input_ids"].shape
    with pytest.raises(ValueError, match="cuts off an image"):
        ChatCollator(processor, max_length=6)(talks)
    with pytest.raises(ValueError, match="leaves no answer in '3'"):
        ChatCollator(processor, max_length=5)(talks[2:])


def test_inputs_that_are_as_wide_as_the_text_is_long_are_not_cut(talks: list[ChatSample]) -> None:
    processor = create_word_processor(image_size=12, patch_size=6)
    length = ChatCollator(processor)(talks[1:2])["input_ids"].shape[1]
    patches = torch.zeros(9, length)

    class Patched(ChatCollator):
        def _process(self, *arguments: Any) -> dict[str, torch.Tensor]:
            return {**super()._process(*arguments), "pixel_values": patches}

    cut = Patched(processor, max_length=length - 2)(talks[1:2])
    assert cut["input_ids"].shape[1] == length - 2
    assert cut["pixel_values"].shape == patches.shape


def test_templates_that_rewrite_the_past_are_refused(talks: list[ChatSample]) -> None:
    processor = create_word_processor(image_size=12, patch_size=6)
    processor.chat_template = "{{ messages | length }} " + processor.chat_template
    with pytest.raises(ValueError, match="changes earlier turns"):
        ChatCollator(processor)(talks[1:2])
    processor.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        ChatCollator(processor)


def test_answers_that_nothing_ends_are_refused() -> None:
    processor = create_word_processor(image_size=12, patch_size=6)
    processor.chat_template = processor.chat_template.replace("{{ eos_token }}", "")
    processor.tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither chat template nor tokenizer of LlavaProcessor ends an answer"):
        ChatCollator(processor)


def convert(folder: Path, **changes: Any) -> Any:
    config = ConversationsConversion(f"{folder}/all.json", f"{folder}/out", **{"shard_size": 2, **changes})
    return convert_conversations(config, progress=False)


def test_conversion_lists_what_it_leaves_out(folder: Path) -> None:
    bad = [{**SOUND, "image": "bad.png"}, {**SOUND, "image": "gone.png"}, *FAULTS.values()]
    write(folder, [SOUND, TWO, *bad, NONE])
    with pytest.raises(CorruptDataError, match="on_corrupt='skip'") as error:
        convert(folder)
    assert not (folder / "out" / "conversations.json").exists()
    report = convert(folder, on_corrupt="skip")
    # The command prints it.
    assert report["first_dropped"].startswith("item 2, ")
    assert f"is {report['first_dropped']}. " in str(error.value)
    assert (report["items"], report["samples"]) == (len(bad) + 3, 3)
    assert report["records_by_images"] == {"0": 1, "1": 1, "2": 1}
    assert report["dropped"] == {"invalid record": len(FAULTS), "image cannot be decoded": 1, "image not found": 1}
    assert json.loads((folder / "out" / "conversations.json").read_text()) == [SOUND, TWO, NONE]
    assert len((folder / "out" / "dropped.csv").read_text().splitlines()) == 1 + len(bad)
    conversations = open_conversations(
        str(folder / "out" / "conversations.json"), ConversationsConfig(images=str(folder))
    )
    assert len(conversations) == 3


def test_conversion_goes_on_where_it_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mmod.data.convert.conversations as module

    write(folder, [SOUND, TWO, NONE, SOUND, {**SOUND, "id": "last"}])
    uninterrupted = convert(folder, shards=True)
    first = {path.name: path.read_bytes() for path in (folder / "out").glob("*.tar")}
    shutil.rmtree(folder / "out")
    check, checked = module._check, []

    def stop_after_three(record: Any, *settings: Any) -> Any:
        checked.append(record["id"])
        if len(checked) == 4:
            raise KeyboardInterrupt
        return check(record, *settings)

    monkeypatch.setattr(module, "_check", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        convert(folder, shards=True, threads=1)

    def count(record: Any, *settings: Any) -> Any:
        checked.append(record["id"])
        return check(record, *settings)

    monkeypatch.setattr(module, "_check", count)
    checked.clear()
    again = convert(folder, shards=True)
    assert again == uninterrupted
    assert checked[0] != SOUND["id"] or len(checked) == 3
    assert {path.name: path.read_bytes() for path in (folder / "out").glob("*.tar")} == first
    conversations = open_conversations(f"{folder}/out/*.tar")
    assert [len(conversations[index].images) for index in range(5)] == [1, 2, 0, 1, 1]


SUFFIXES = (
    "",
    ".",
    ".jfif",
    ".JFIF",
    ".jpe",
    ".jpg",
    ".JPG",
    ".png",
    ".webp",
    ".gif",
    ".bmp",
    ".tif",
    ".pgm",
    ".dat",
    ".a.b",
)


def test_shards_of_what_is_called_sound_are_read_whatever_files_are_called(folder: Path) -> None:
    kinds = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
    names = []
    for suffix in SUFFIXES:
        for number, kind in enumerate(kinds):
            names.append(f"photo{number}{suffix}")
            Image.new("RGB", (9, 8), (20 * len(names) % 256, 200, 50)).save(folder / names[-1], format=kind)
    records = [{**SOUND, "image": name} for name in names]
    several = {"image": names, "conversations": said("<image>" * len(names) + " which ?", "first")}
    path = write(folder, [*records, several])
    assert convert(folder, shards=True)["samples"] == len(names) + 1
    here, there = open_conversations(path), open_conversations(f"{folder}/out/*.tar")
    assert len(here) == len(there) == len(names) + 1
    for index in range(len(here)):
        assert [image.tobytes() for image in here[index].images] == [image.tobytes() for image in there[index].images]


@pytest.mark.parametrize("on_corrupt", ["raise", "skip"])
def test_missing_images_are_found_before_anything_is_read(folder: Path, on_corrupt: Any) -> None:
    (folder / "sub").mkdir()
    (folder / "gone.png").symlink_to(folder / "nowhere.png")
    names = ["a.png", "sub/no.png", "b.png", "none/c.png", "gone.png", "sub", "../a.png", f"{folder}/b.png"]
    path = write(folder, [{**SOUND, "id": str(place), "image": name} for place, name in enumerate(names)])
    config = ConversationsConfig(on_corrupt=on_corrupt)
    if on_corrupt == "raise":
        with pytest.raises(CorruptDataError, match=r"all\.json \[1\]: image not found: .*sub/no\.png"):
            open_conversations(path, config)
        return
    conversations = open_conversations(path, config)
    assert [conversations.record(index)["key"] for index in range(len(conversations))] == ["0", "2", "7"]
    assert conversations.report.counts == {path: 5}
    assert "[6]: image outside the folder" in str(conversations.report)


def test_conversion_keeps_to_its_folder(folder: Path) -> None:
    write(folder, [SOUND])
    convert(folder)
    with pytest.raises(FileExistsError, match="shard_size"):
        convert(folder, shard_size=9)
    (folder / "other").mkdir()
    (folder / "other" / "file").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds files but no conversion\.json"):
        convert_conversations(ConversationsConversion(f"{folder}/all.json", f"{folder}/other"), progress=False)
    with pytest.raises(ValueError, match=r"source='a\.csv' must end in \.json or \.jsonl"):
        ConversationsConversion("a.csv", "b")
    with pytest.raises(ValueError, match="on_corrupt"):
        ConversationsConversion("a.json", "b", on_corrupt="ignore")


@pytest.mark.parametrize("missing", [2, 3])
def test_the_folder_of_images_is_told_exactly_where_most_are_not_found(missing: int, folder: Path) -> None:
    moved = {**SOUND, "image": "moved/a.png"}
    broken = {**SOUND, "video": "a.mp4"}
    path = write(folder, [broken, *[moved] * missing, SOUND])
    hint = rf"the images are looked for in '{folder}': name the folder of their paths by `images`"
    check = ConversationsConversion(path, str(folder / f"checked-{missing}"))
    for read in (partial(open_conversations, path), partial(convert_conversations, check, progress=False)):
        with pytest.raises(CorruptDataError, match="image not found") as refusal:
            read()
        assert bool(re.search(hint, str(refusal.value))) == (missing == 3)
