"""The scripts of the vision-language model of trained halves, on halves of random weights and pictures of noise."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mmod.data.readers.chat import ChatCollator
from mmod.training.chat.processor import create_bpe_processor
from mmod.training.chat.start import router_parameters
from scripts.real_halves import learn, on_screens, photographs, rows, screens, tune
from scripts.real_halves.__main__ import make, save
from scripts.real_halves.evaluate import answered, by_picture, evaluate, gap, loaded
from scripts.real_halves.rows import SPREAD, Row

CLASSES = ("Faces_easy", "car_side", "crab", "dollar_bill", "yin_yang")


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of a tower and a language model."""
    root = tmp_path_factory.mktemp("halves")
    torch.manual_seed(0)
    vit = timm.create_model("vit_small_patch14_dinov2", img_size=56, embed_dim=64, num_heads=1, num_classes=0)
    save_file(vit.state_dict(), root / "tower.safetensors")
    tokenizer = create_bpe_processor(["What is this? a car"], 56, 14).tokenizer
    tokenizer.save_pretrained(root / "language")
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2}
    text = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **fields)
    LlamaForCausalLM(text).save_pretrained(root / "language")
    return root


@pytest.fixture(scope="module")
def folder(halves: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained model and its questions about photographs."""
    root = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        files = [f"{name}/{split}{number}.jpg" for name in CLASSES for number in range(4)]
        for file in files:
            path = root / "photographs/101_ObjectCategories" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(path)
        (root / f"photographs/{split}.txt").write_text("\n".join([*files, "BACKGROUND_Google/a.jpg"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(photographs, "TRAINING_SCENES", 12)
        patch.setattr(photographs, "HELD_OUT", 14)
        make(root, halves / "tower.safetensors", halves / "language", root / "photographs")
    return root


@pytest.fixture(scope="module")
def screens_folder(halves: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained model and its questions about screens and pages."""
    root = tmp_path_factory.mktemp("screens")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screens, "TRAINING_PICTURES", 10)
        patch.setattr(screens, "HELD_OUT", 10)
        make(root, halves / "tower.safetensors", halves / "language", None)
    save(loaded(root / "untrained")[0], root)
    return root


def test_tower_is_timms(halves: Path, folder: Path) -> None:
    model, _ = loaded(folder / "untrained")
    from safetensors.torch import load_file

    vit = timm.create_model("vit_small_patch14_dinov2", img_size=56, embed_dim=64, num_heads=1, num_classes=0).eval()
    vit.load_state_dict(load_file(halves / "tower.safetensors"))
    images = torch.randn(2, 3, 56, 56)
    with torch.no_grad():
        expected = vit.forward_intermediates(images, indices=[10], intermediates_only=True, output_fmt="NLC")[0]
        hidden = model.model.vision_tower(images, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(hidden[:, 1:], expected)


def test_questions_are_true_of_their_pictures() -> None:
    chosen = [photographs.Photograph(f"{name}.jpg", name) for name in "abcd"]
    names = [*"abcdef"]
    draw = photographs.random.Random(0)
    scene = photographs.grid(chosen, names, draw)
    answers = {question.text: question.answer for question in scene.questions}
    assert answers["What is at the top right?"] == "b"
    assert answers["What is below the b?"] == "d"
    assert answers["What is left of the d?"] == "c"
    assert "What is above the a?" not in answers
    for _ in range(20):
        pair = photographs.pair(chosen[:2], names, draw)
        (first, second), cells = pair.questions[:2], list(pair.cells)
        axis = 0 if "left" in first.text else 1
        assert (first.answer, second.answer) == ("a", "b")
        assert (cells[0][axis], cells[1][axis]) == (0.0, 1.0)
        there = pair.questions[2]
        assert there.answer == ("yes" if there.text[-2] in "ab" else "no")
        counted = photographs.count(chosen, {"a": [chosen[0]] * 4}, draw)
        seen = [photograph.name for photograph in counted.cells.values()]
        assert len(seen) == 4
        assert counted.questions[0].answer == str(seen.count("a"))


def test_questions_beside_each_other_are_answered_as_alone(folder: Path) -> None:
    model, processor = loaded(folder / "untrained")
    chats = learn.Chats(folder / "questions/train.json", processor.tokenizer)
    several = [chat for chat in chats.chats if len(chat.questions) > 1][:3]
    alone = [
        learn.Chat(chat.picture, [question], [answer], [kind])
        for chat in several
        for question, answer, kind in zip(chat.questions, chat.answers, chat.kinds)
    ]
    image = torch.randn(len(chats.pictures), 9, 32)

    def logits(chosen: list[learn.Chat]) -> torch.Tensor:
        batch: dict[str, Any] = learn.batch_of(
            chats, chosen, image[[chat.picture for chat in chosen]], model.get_input_embeddings()
        )
        labels = batch.pop("labels")
        with torch.no_grad():
            return model.lm_head(model.model.language_model(**batch).last_hidden_state[labels >= 0])

    torch.testing.assert_close(logits(several), logits(alone), rtol=1e-4, atol=1e-5)


def test_gamma_mod_is_tuned_and_answers(folder: Path) -> None:
    save(loaded(folder / "untrained")[0], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "_STEPS", 2)
        model, processor = tune.tuned(folder, Row(tune.gamma_mod(0.5, True)), 0, 4)
    routers = list(router_parameters(model).values())
    # One weight for all routed layers.
    assert len(routers) == 1
    answers = answered(model, ChatCollator(processor), folder / "questions", 4)
    assert [len(asked) for asked in answers.values()] == [4, 4]


def test_rows_are_evaluated_once(folder: Path) -> None:
    save(loaded(folder / "untrained")[0], folder)
    journal = folder / "answers-4.jsonl"
    chosen = {"dense": Row(), "all windows": Row(tokens=4), "fewer": Row(patches=2)}
    for _ in range(2):
        evaluate(folder / "model", folder / "questions", chosen, journal, 4, limit=6)
    assert len(journal.read_text().splitlines()) == 3
    answered = by_picture(journal)
    said = [json.loads(line)["answers"] for line in journal.read_text().splitlines()]
    assert said[0] == said[1]
    difference = gap(answered["fewer"]["places"], answered["dense"]["places"])
    assert difference.low <= difference.value <= difference.high


@pytest.mark.parametrize("is_screen", [True, False])
def test_answers_about_screens_are_those_of_what_is_drawn(is_screen: bool) -> None:
    draw = random.Random(0)
    for _ in range(20):
        drawing = screens.Drawing(draw, is_screen)
        shown = dict(drawing.boxes)
        names = [name for name, _ in drawing.boxes]
        answers = {question.text: question.answer for question in drawing.questions}
        assert answers["Which word is the title?"] == names[0]
        assert answers["Is there a table?"] == ("yes" if "table" in names else "no")
        if is_screen:
            button = f"{answers['What colour is the button?']} button"
            left, top, _, bottom = shown[button]
            # Left of its word.
            seen = drawing.canvas.picture.getpixel((left + 6, (top + bottom) // 2))
            assert seen == screens.COLOURS[button.split()[0]]
            assert answers["How many cards are there?"] == str(names.count("card"))
            shown["button"] = shown[button]
        for name in ("button", "table", "picture"):
            if name in shown:
                left, top, *_ = shown[name]
                row, column = answers[f"Where is the {name}?"].split()
                assert (column == "right") == (left >= screens.SIDE / 2)
                # The cells begin below the title, which is a third.
                assert (row == "bottom") == (top >= screens.SIDE * 2 / 3)
        for thing in drawing.things("a.png"):
            left, top, right, bottom = shown.get(thing.name, (0, 0, screens.SIDE, screens.SIDE))
            middle = [(place + thing.side / 2) * screens.SIDE for place in thing.corner]
            assert thing.name in ("blank", "card", "text") or (
                left <= middle[0] <= right and top <= middle[1] <= bottom
            )


def test_screens_are_evaluated_and_compared(screens_folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_HALVINGS", 4)
        # Plans of the other families are fitted alike.
        patch.setattr(on_screens, "families", lambda depth: {SPREAD: rows.families(depth)[SPREAD]})
        found = on_screens.rows(screens_folder, screens.PATCHES)
    chosen = {name: found[name] for name in (on_screens.DENSE, on_screens.BOTH, "fewer pixels")}
    journal = screens_folder / f"answers-{screens.PATCHES}.jsonl"
    evaluate(screens_folder / "model", screens_folder / "questions", chosen, journal, screens.PATCHES, limit=6)
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    # Halves of random weights are right by chance, which is never.
    right = {on_screens.DENSE: 6, on_screens.BOTH: 3, "fewer pixels": 0}
    for record in records:
        for answers in record["answers"].values():
            assert len(answers) == 6
            for number, one in enumerate(answers):
                one["right"] = number < right[record["name"]]
    journal.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_screens, "_PROMPTS", 2)
        patch.setattr(on_screens, "_ROUNDS", 1)
        patch.setattr(on_screens, "rows", lambda *_: found)
        table = on_screens.table(screens_folder, screens.PATCHES)
    columns = dict(zip(table["columns"], zip(*table["rows"])))
    assert columns[""][:3] == tuple(chosen)
    assert columns["right %"][:3] == (100, 50, 0)
    assert columns["kept % of dense"][:3] == (100, 50, 0)
    gap_of_both, gap_of_fewer_pixels = columns["to dense"][1:3]
    low, high = gap_of_both[1:]
    assert low < gap_of_both[0] == -50 < high
    assert gap_of_fewer_pixels == [-100, -100, -100]
    dense, both, fewer_pixels = columns["image tokens"][:3]
    assert (dense, fewer_pixels) == (screens.PATCHES**2, found["fewer pixels"].patches ** 2)
    assert 0.3 * dense < both < 0.7 * dense
