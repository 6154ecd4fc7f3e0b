"""The embedded questions: true of their images, not to be guessed, and the same bytes each time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmod.data.records import prior_of
from mmod.data.synthetic.questions import (
    DIFFICULTIES,
    KINDS,
    QUESTIONS,
    WORDS,
    SyntheticChat,
    compose_chats,
    export_questions,
    measure_prior,
)

TINY = DIFFICULTIES["tiny"]


@pytest.fixture(scope="module")
def chats() -> dict[str, list[SyntheticChat]]:
    config = replace(TINY, conversations={"train": 600, "val": 72, "test": 420})
    return {split: list(compose_chats(config, split)) for split in ("train", "test")}


def answer(chat: SyntheticChat, kind: str, question: str) -> str:
    """Work the answer out anew from what is known of the scenes."""
    words = question.split()
    if kind == "text":
        return str(max(int(word) for word in words if word.isdecimal()))
    scene = chat.scenes[kind == "two" and "second" in words]
    if kind == "count":
        return str(len(scene.classes))
    if kind in ("largest", "two"):
        return str(scene.classes[scene.largest])
    if kind == "read":
        return " ".join(map(str, scene.classes))
    place = scene.classes.index(int(words[-2]))
    return str(scene.classes[place - 1 if "left" in words else place + 1])


def test_answers_are_true_and_in_the_vocabulary(chats: dict[str, list[SyntheticChat]]) -> None:
    known = {*WORDS, *map(str, range(10))}
    for chat in chats["train"] + chats["test"]:
        for turn in chat.turns:
            assert turn.answer == answer(chat, turn.question_type, turn.question)
            assert {*turn.question.split(), *turn.answer.split()} <= known


def test_kinds_images_and_turns(chats: dict[str, list[SyntheticChat]]) -> None:
    assert {len(chat.scenes) for chat in chats["train"]} == {0, 1, 2}
    assert max(len(chat.turns) for chat in chats["train"]) == TINY.turns
    assert [chat.turns[0].question_type for chat in chats["test"][: len(KINDS)]] == list(KINDS)
    assert all(len(chat.turns) == 1 for chat in chats["test"])
    for chat in chats["train"]:
        assert len({turn.question for turn in chat.turns}) == len(chat.turns)


def test_questions_alone_give_little_away() -> None:
    prior = measure_prior(replace(TINY, conversations={"train": 3000, "val": 72, "test": 720}))
    # Three counts, ten classes, and the class of the other digit; what needs no image is left out.
    highest = {"count": 0.45, "largest": 0.2, "beside": 0.22, "read": 0.15, "two": 0.2}
    assert {kind: prior[kind] <= share for kind, share in highest.items()} == dict.fromkeys(highest, True), prior


def test_prior_answers_unknown_questions_by_their_kind() -> None:
    train = [("count", "how many ?", "2"), ("count", "how many ?", "2"), ("count", "and now ?", "1")]
    assert prior_of(train, [("count", "once more ?", "2"), ("count", "and now ?", "1"), ("new", "why ?", "so")]) == {
        "count": 1.0,
        "new": 0.0,
    }
    # As answers are compared: without case and spacing.
    assert prior_of([("all", "what ?", "A  Fox")], [("all", "what ?", "a fox")]) == {"all": 1.0}


def test_json_says_what_shards_say(tmp_path: Path) -> None:
    from mmod.data.readers.conversations import open_conversations

    config = replace(TINY, conversations={"train": 40, "val": 7, "test": 7}, shard_size=30)
    QUESTIONS.build(tmp_path / "shards", config)
    files = export_questions(tmp_path / "json", config)
    assert {name: entry["samples"] for name, entry in files.items()} == {
        "train.json": 40,
        "val.json": 7,
        "test.json": 7,
    }
    one, other = (open_conversations(f"{tmp_path}/{name}") for name in ("shards/train-*.tar", "json/train.json"))
    assert len(one) == len(other) == 40
    for index in range(40):
        assert one[index].messages == other[index].messages
        assert one[index].kinds == other[index].kinds
        for left, right in zip(one[index].images, other[index].images, strict=True):
            np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    chats = compose_chats(config, "train")
    assert list(one.turns()) == [tuple(turn) for chat in chats for turn in chat.turns]
    assert json.loads((tmp_path / "json" / "train.json").read_text())[0]["conversations"][0]["from"] == "human"
    with pytest.raises(FileExistsError, match="not empty"):
        export_questions(tmp_path / "json", config)
