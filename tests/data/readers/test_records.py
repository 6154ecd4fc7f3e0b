"""Records of conversations: the spellings that are read, and what is refused by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmod.data.convert.conversations import ConversationsConversion, convert_conversations
from mmod.data.corrupt import CorruptDataError
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from mmod.data.records import Message, check_record
from tests.kit.conversations import SOUND, said, write
from tests.kit.pair_files import png, write_tar


def content(*parts: Any) -> list[dict[str, Any]]:
    """A question of these parts, and an answer, as a list of messages with roles."""
    return [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "3"}]


PART: dict[str, Any] = {"type": "text", "text": "which is the 7 ?"}
SPELLINGS: dict[str, dict[str, Any]] = {
    "a list of one": {"image": ["a.png"], "conversations": said("<image>which is the 7 ?", "3")},
    "images": {"images": ["a.png"], "conversations": said("<image>which is the 7 ?", "3")},
    "images and an empty image": {
        "images": ["a.png"],
        "image": "",
        "conversations": said("<image>which is the 7 ?", "3"),
    },
    "roles": {"image": "a.png", "messages": content({"type": "text", "text": "<image>which is the 7 ?"})},
    "parts": {"images": ["a.png"], "messages": content({"type": "image"}, PART)},
    "named parts": {"messages": content({"type": "image", "image": "a.png"}, PART)},
    "parts with a path": {"messages": content({"type": "image", "path": "a.png"}, PART)},
    "empty media": {**SOUND, "video": None, "audio": [], "conversations": said("<image>which is the 7 ?", "3")},
    "metadata": {
        **SOUND,
        "image_id": 7,
        "video_id": "v",
        "image_url": "https://example.org/a.png",
        "source": "video",
        "conversations": said("<image>which is the 7 ?", "3"),
    },
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings_are_read_as_the_same_conversation(name: str, folder: Path) -> None:
    (conversations,) = (open_conversations(write(folder, [SPELLINGS[name]])),)
    assert conversations[0].messages == (Message("user", "<image>which is the 7 ?"), Message("assistant", "3"))
    assert [image.getpixel((0, 0)) for image in conversations[0].images] == [(255, 0, 0)]


def test_several_images_keep_their_order_in_every_spelling(folder: Path) -> None:
    text = "<image>\nand <image> which ?"
    both = ["b.png", "a.png"]
    parts = [{"type": "text", "text": "\nand "}, {"type": "text", "text": " which ?"}]
    named = [{"type": "image", "image": name} for name in both]
    records = [
        {"image": both, "conversations": said(text, "3")},
        {"images": both, "conversations": said(text, "3")},
        {"images": both, "messages": content({"type": "image"}, parts[0], {"type": "image"}, parts[1])},
        {"messages": content(named[0], parts[0], named[1], parts[1])},
    ]
    conversations = open_conversations(write(folder, records))
    assert {conversations[index].messages for index in range(4)} == {(Message("user", text), Message("assistant", "3"))}
    assert all([image.size for image in conversations[index].images] == [(12, 24), (12, 12)] for index in range(4))
    prompt = {"system": "be brief", "conversations": said("a ?", "3")}
    assert check_record(prompt)[0] == Message("system", "be brief")


PLAIN = said("which is the 7 ?", "3")
UNREAD: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{key}": (f"has '{key}', which this reader does not read", {key: "a.file", "conversations": PLAIN})
        for key in ("video", "videos", "video_path", "audio", "audios", "sound", "speech", "Video", "point_cloud")
    },
    **{
        f"{key}": (f"has '{key}', which this reader does not read; .* `image`", {key: "a.png", "conversations": PLAIN})
        for key in ("image_path", "img", "image_url", "pixel_values")
    },
    "video beside an image": ("has 'video'", {**SOUND, "video": "a.mp4"}),
    "video for an image": ("has 'video'", {"video": "a.mp4", "conversations": said("<image>\na ?", "3")}),
    "tools": ("has 'tools'", {"tools": "[{}]", "conversations": PLAIN}),
    **{
        f"{token} in a question": (
            f"message 0 holds '{re.escape(token)}'.*write <image>",
            {"conversations": said(text, "3")},
        )
        for token, text in {
            "<video>": "<video>\na ?",
            "<audio>": "<audio>\na ?",
            "<|vision_start|>": "<|vision_start|><|image_pad|><|vision_end|>a ?",
            "<|image|>": "<|image|>a ?",
            "<|image_1|>": "<|image_1|>\na ?",
            "<fake_token_around_image>": "<fake_token_around_image><global-img>a ?",
            "<IMG_CONTEXT>": "<img><IMG_CONTEXT></img>a ?",
            "<start_of_image>": "<start_of_image>a ?",
            "<image 1>": "<image 1> a ?",
        }.items()
    },
    "a token in an answer": ("message 1 holds '<.image_pad.>'", {"conversations": said("a ?", "<|image_pad|>")}),
    "both lists": ("both 'conversations' and 'messages'", {"conversations": PLAIN, "messages": content(PART)}),
    "both images": ("both 'image' and 'images'", {**SOUND, "images": ["a.png"]}),
    "a video part": ("part of type 'video'", {"messages": content({"type": "video", "video": "a.mp4"}, PART)}),
    "an image by address": ("part of type 'image_url'", {"messages": content({"type": "image_url"}, PART)}),
    "half of the images named": (
        "some images are named",
        {"messages": content({"type": "image", "image": "a.png"}, {"type": "image"}, PART)},
    ),
    "a message with an image": ("message 0 has 'image'", {"conversations": [{**PLAIN[0], "image": "a.png"}, PLAIN[1]]}),
    "a part without a place": (
        "0 <image> in the questions for 1",
        {"images": ["a.png"], "messages": content(PART)},
    ),
    "a role of a tool": ("is from 'tool'", {"messages": [{"role": "tool", "content": "a"}]}),
    "two system messages": ("`system` must be", {"system": 3, "conversations": PLAIN}),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_no_reader_reads_is_a_fault_by_its_name(name: str, folder: Path) -> None:
    message, record = UNREAD[name]
    path = write(folder, [SOUND, record])
    with pytest.raises(CorruptDataError, match=rf"\[1\]: .*{message}"):
        open_conversations(path)
    conversations = open_conversations(path, ConversationsConfig(on_corrupt="skip"))
    assert (
        [conversations.record(index)["key"] for index in range(len(conversations))],
        conversations.report.counts,
    ) == (["0"], {path: 1})
    report = convert_conversations(ConversationsConversion(path, f"{folder}/out", on_corrupt="skip"), progress=False)
    assert report["dropped"] == {"invalid record": 1}


def test_an_answer_may_write_html(folder: Path) -> None:
    record = {"conversations": said("how do I show a film ?", "With <video> or <audio>, as <img> shows an image.")}
    assert len(check_record(record)) == 2


def test_shards_with_other_media_or_images_that_are_missing_are_faults(tmp_path: Path) -> None:
    sound = {"image": ["x.png", "y.png"], "conversations": said("<image> <image> a ?", "3")}
    image = png(0)
    samples: dict[str, tuple[dict[str, Any], dict[str, bytes]]] = {
        "a": (sound, {"0.png": image, "1.png": image}),
        "b": ({**sound, "conversations": said("<image> a ?", "3")}, {"0.png": image}),
        "c": ({"conversations": PLAIN}, {"mp4": b"film"}),
        "d": ({"conversations": PLAIN}, {"0.wav": b"tone"}),
    }
    files = {key: {"json": json.dumps(record).encode(), **members} for key, (record, members) in samples.items()}
    write_tar(tmp_path / "all.tar", {f"{key}.{name}": data for key in files for name, data in files[key].items()})
    conversations = open_conversations(str(tmp_path / "all.tar"), ConversationsConfig(on_corrupt="skip"))
    assert [conversations.record(index)["key"] for index in range(len(conversations))] == ["a"]
    assert [fault.reason for fault in conversations.report.faults] == [
        "2 names of images for 1 images",
        "has a .mp4 member, which this reader does not read",
        "has a .0.wav member, which this reader does not read",
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.sampled_from(["human", "gpt", "<image>", "\ud800", []]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["id", "image", "images", "conversations", "messages", "kinds", "from", "value", "role", "content"]
            ),
            inner,
            max_size=4,
        )
    ),
)


@given(JSON, JSON, JSON)
def test_any_json_is_sound_or_refused(record: Any, image: Any, kinds: Any) -> None:
    answers = said("a ?", "3")
    for value in (
        record,
        {**SOUND, "image": image},
        {**SOUND, "conversations": record},
        {"conversations": answers, "kinds": kinds},
        {"messages": [{"role": "user", "content": record}, {"role": "assistant", "content": "3"}], "images": image},
    ):
        try:
            messages = check_record(value)
        except ValueError:
            continue
        assert messages[-1].role == "assistant"
        assert all(message.text.encode() for message in messages)
