"""Cluttered questions: conversations about images of handwritten digits among fragments of others.

The classes are drawn independently of the questions, so a question reveals only the type of its answer;
`measure_prior` measures the accuracy that this allows.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from mmod.data.records import IMAGE, prior_of
from mmod.data.synthetic.build import BuiltFile, SyntheticSet
from mmod.data.synthetic.handwriting import SPLITS, DrawnConfig, DrawnSamples, Painter, encode_png, paste
from mmod.io.files import replacing
from mmod.io.progress import progress_bar

ONE_IMAGE = {"count": 1, "largest": 2, "beside": 2, "read": 1}
"""Types of questions about one image, and how many digits it must show at least."""
KINDS = (*ONE_IMAGE, "two", "text")
"""Types of questions: those about one image, "two" about one of two images, "text" without an image."""
WORDS = (
    *("is", "there", "?", "how", "many", "digits", "are", "which", "digit", "the", "largest", "left", "right", "of"),
    *(",", "from", "to", "in", "image", "first", "or", "second", "larger"),
)
"""All words of questions and answers except the ten digits."""
# Minimum horizontal distance of two centres in pixels, so that the order from left to right is visible.
_GAP = 4


@dataclass(frozen=True)
class QuestionsConfig(DrawnConfig):
    """Parameters of a build, in addition to those of `DrawnConfig`.

    Args:
        large: Smallest and largest side of the largest digit's box, in pixels.
        small: Smallest and largest side of the other digits' boxes.
        step: Positions of digits are multiples of this, in pixels. With the patch size the set is much faster to learn.
        digits: Smallest and largest number of digits in an image, at most 4.
        turns: Questions per image in a training conversation; one in "val" and "test".
        shares: Shares of training conversations with two images and with none.
        conversations: Number of conversations per split; in "val" and "test" all types are equally frequent.
    """

    counts = "conversations"
    least = len(KINDS)

    clutter: int = 3
    contrast: tuple[float, float] = (0.3, 0.6)
    large: tuple[int, int] = (12, 12)
    small: tuple[int, int] = (8, 8)
    step: Annotated[int, "[1, inf)"] = 4
    digits: tuple[int, int] = (1, 3)
    turns: Annotated[int, "[1, inf)"] = 4
    shares: tuple[float, float] = (0.1, 0.05)
    conversations: dict[str, int] = field(default_factory=lambda: {"train": 16000, "val": 1200, "test": 1800})

    def __post_init__(self) -> None:
        super().__post_init__()
        sides = (*self.small, *self.large)
        if not (4 <= sides[0] <= sides[1] < sides[2] <= sides[3] <= self.canvas // 2):
            raise ValueError(f"small={self.small} and large={self.large} must ascend from 4 to canvas/2, apart")
        if not 1 <= self.digits[0] < self.digits[1] <= 4:
            raise ValueError(f"digits={self.digits} must ascend within 1 to 4")
        if min(self.shares) < 0 or sum(self.shares) >= 1:
            raise ValueError(f"shares={self.shares} must not be negative and leave room for one image")


DIFFICULTIES: dict[str, QuestionsConfig] = {
    "default": QuestionsConfig(),
    "tiny": QuestionsConfig(conversations={"train": 256, "val": 72, "test": 72}, shard_size=128),
    "hard": QuestionsConfig(
        canvas=64,
        large=(19, 24),
        small=(10, 14),
        step=1,
        digits=(1, 4),
        clutter=16,
        contrast=(0.5, 0.9),
        conversations={"train": 64000, "val": 1200, "test": 3000},
    ),
}
"""Named parameter sets: `default` learns in minutes on two cores, `tiny` is for tests, `hard` wants a GPU."""


class QuestionScene(NamedTuple):
    """An image, and class and source image of its digits from left to right; `largest` is an index among them."""

    image: np.ndarray
    classes: tuple[int, ...]
    largest: int
    sources: tuple[int, ...]


class Turn(NamedTuple):
    """A question of one of `KINDS` and its answer, in words separated by spaces."""

    question_type: str
    question: str
    answer: str


class SyntheticChat(NamedTuple):
    """A conversation about zero to two images."""

    scenes: tuple[QuestionScene, ...]
    turns: tuple[Turn, ...]


def compose_chats(config: QuestionsConfig, split: str) -> DrawnSamples[SyntheticChat]:
    """Return the conversations of a split."""
    painter = Painter(config, split)

    def draw(index: int) -> SyntheticChat:
        # The last number tells the draws of a set from those of others with the same seed.
        rng = np.random.default_rng([*painter.seeds, index, 2])
        if split != "train":
            # Evaluations ask each type equally often, training as often as `shares` say.
            return _single(KINDS[index % len(KINDS)], config, painter, rng)
        share = rng.random()
        if share < config.shares[0]:
            return _single("two", config, painter, rng, config.turns)
        if share < sum(config.shares):
            return _single("text", config, painter, rng, config.turns)
        scene = _compose(config, painter, config.digits[0], rng)
        kinds = [question_type for question_type in ONE_IMAGE if len(scene.classes) >= ONE_IMAGE[question_type]]
        chosen = [kinds[place] for place in rng.permutation(len(kinds))[: config.turns]]
        return SyntheticChat((scene,), tuple(_ask(question_type, scene, rng) for question_type in chosen))

    return DrawnSamples(config.conversations[split], draw)


def _single(
    question_type: str, config: QuestionsConfig, painter: Painter, rng: np.random.Generator, turns: int = 1
) -> SyntheticChat:
    """Compose a conversation of one question type, with one turn; up to `turns` for "two"."""
    if question_type == "text":
        first, second = (int(value) for value in rng.permutation(10)[:2])
        question = f"which is larger , {first} or {second} ?"
        answer = str(max(first, second))
        return SyntheticChat((), (Turn(question_type, question, answer),))
    if question_type == "two":
        scenes = tuple(_compose(config, painter, 2, rng) for _ in range(2))
        questions = []
        for index in rng.permutation(2)[:turns]:
            scene = scenes[index]
            question = f"which digit is the largest in the {('first', 'second')[index]} image ?"
            questions.append(Turn("two", question, str(scene.classes[scene.largest])))
        return SyntheticChat(scenes, tuple(questions))
    scene = _compose(config, painter, ONE_IMAGE[question_type], rng)
    return SyntheticChat((scene,), (_ask(question_type, scene, rng),))


def _ask(question_type: str, scene: QuestionScene, rng: np.random.Generator) -> Turn:
    """Ask a question of one type, of `ONE_IMAGE`."""
    classes = scene.classes
    if question_type == "count":
        question, answer = "how many digits are there ?", str(len(classes))
    elif question_type == "largest":
        question, answer = "which digit is the largest ?", str(classes[scene.largest])
    elif question_type == "read":
        question, answer = "which digits are there , from left to right ?", " ".join(map(str, classes))
    else:
        left = int(rng.integers(len(classes) - 1))
        first, second = classes[left : left + 2]
        if rng.integers(2):
            question, answer = f"which digit is left of the {second} ?", str(first)
        else:
            question, answer = f"which digit is right of the {first} ?", str(second)
    return Turn(question_type, question, answer)


def _compose(config: QuestionsConfig, painter: Painter, least: int, rng: np.random.Generator) -> QuestionScene:
    """Draw at least so many digits of different classes that do not overlap, one larger than the others."""
    fewest, most = config.digits
    count = int(rng.integers(max(fewest, least), most + 1))
    canvas = painter.canvas()
    painter.clutter(canvas, config.large, rng)
    classes = [int(digit) for digit in rng.permutation(10)[:count]]
    chosen = [int(rng.choice(painter.by_class[digit])) for digit in classes]
    # The first is the large one.
    digits = [painter.digit(source, config.large, rng) for source in chosen[:1]]
    digits += [painter.digit(source, config.small, rng) for source in chosen[1:]]
    boxes = painter.apart([len(digit) for digit in digits], config.step, rng, _GAP)
    for digit, (left, top, *_) in zip(digits, boxes):
        paste(canvas, digit, left, top)
    # Questions read digits from left to right, whatever the order in which they were drawn.
    order = sorted(range(count), key=lambda index: boxes[index][0] + boxes[index][2])
    classes_in_order = tuple(classes[index] for index in order)
    sources_in_order = tuple(chosen[index] for index in order)
    return QuestionScene(canvas, classes_in_order, order.index(0), sources_in_order)


def to_record(key: str, chat: SyntheticChat, images: list[str]) -> dict[str, object]:
    """Return a conversation about these image files as a LLaVA record, with the question types as `kinds`."""
    record: dict[str, object] = {"id": key, "kinds": [turn.question_type for turn in chat.turns]}
    if images:
        record["image"] = images[0] if len(images) == 1 else images
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(chat.turns):
        question = turn.question
        if number == 0:
            # The first question names all images.
            question = f"{IMAGE}\n" * len(images) + question
        messages += [{"from": "human", "value": question}, {"from": "gpt", "value": turn.answer}]
    record["conversations"] = messages
    return record


def _encode(key: str, chat: SyntheticChat) -> dict[str, bytes]:
    images = {f"{number}.png": encode_png(scene.image) for number, scene in enumerate(chat.scenes)}
    names = [f"{key}.{name}" for name in images]
    return {"json": json.dumps(to_record(key, chat, names)).encode(), **images}


QUESTIONS = SyntheticSet("questions", "cluttered questions", 2, DIFFICULTIES, compose_chats, _encode)
"""The set: shards of `KEY.json`, a conversation in LLaVA's format with the question types under `kinds`, and its
images as `KEY.0.png`, `KEY.1.png`."""


def export_questions(
    root: str | Path, config: QuestionsConfig | str = "default", progress: bool = False
) -> dict[str, BuiltFile]:
    """Write LLaVA's files, `SPLIT.json` and a folder `images`; return `samples` and `sha256` of each JSON file."""
    if isinstance(config, str):
        config = QUESTIONS.config(config)
    files: dict[str, BuiltFile] = {}
    # Not durable: flushing many small files one by one would take minutes.
    with replacing(root, shared=True, durable=False) as partial:
        (partial / "images").mkdir(parents=True)
        for split in SPLITS:
            records = []
            chats = compose_chats(config, split)
            bar = progress_bar(chats, desc=split, total=config.conversations[split], shown=progress)
            for index, chat in enumerate(bar):
                key = f"{split}-{index:06d}"
                names = [f"images/{key}.{number}.png" for number in range(len(chat.scenes))]
                for name, scene in zip(names, chat.scenes):
                    (partial / name).write_bytes(encode_png(scene.image))
                records.append(to_record(key, chat, names))
            text = json.dumps(records, indent=1) + "\n"
            (partial / f"{split}.json").write_text(text)
            checksum = hashlib.sha256(text.encode()).hexdigest()
            files[f"{split}.json"] = {"samples": len(records), "sha256": checksum}
    return files


def measure_prior(config: QuestionsConfig) -> dict[str, float]:
    """Return the prior accuracy on the test split of the embedded questions by question type, in [0, 1]."""
    train = chain.from_iterable(chat.turns for chat in compose_chats(config, "train"))
    test = chain.from_iterable(chat.turns for chat in compose_chats(config, "test"))
    return prior_of(train, test)
