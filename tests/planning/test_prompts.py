"""Answers that are generated to labelled prompts, and prompts of equal length, of every family of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmod
from mmod.planning.divergence import real_tokens
from mmod.planning.early import BATCH
from mmod.planning.prompts import of_equal_length, pad_token, questions_of, right_of, same_tokens
from mmod.planning.samples import MIX, Prompts
from tests.kit.vlm_zoo import make_joint, pad, prompt

FAMILIES = ("llava", "qwen2_5_vl", "llava-onevision")


def labelled(name: str, answers: int = 2, side: str = "right") -> dict[str, Any]:
    """Return prompts with two images and one, whose last tokens are the answers."""
    batch = prompt(name, (2, 1), side=side)
    is_real_BN = real_tokens(batch)
    behind_BN = is_real_BN.flip(1).cumsum(1).flip(1)
    batch["labels"] = torch.where(is_real_BN & (behind_BN <= answers), batch["input_ids"], -100)
    return batch


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_the_model_gives_is_right_and_another_is_wrong(name: str, side: str) -> None:
    model: Any = make_joint(name)
    image = model.config.image_token_id
    pad = pad_token(model, image)
    questions = questions_of(labelled(name, side=side), pad)
    for row in range(2):
        alone = prompt(name, (2, 1), side=side)
        count = int(real_tokens(alone)[row].sum()) - 2
        ids_N = alone["input_ids"][row][real_tokens(alone)[row]]
        assert torch.equal(questions.inputs["input_ids"][row, -count:], ids_N[:-2])
        assert int(questions.inputs["attention_mask"][row].sum()) == count
        assert torch.equal(questions.answers[row], ids_N[-2:])
    given: Any = model.generate(
        **questions.inputs, max_new_tokens=2, do_sample=False, pad_token_id=pad, suppress_tokens=[image]
    )
    expected: list[Tensor] = list(given[:, questions.inputs["input_ids"].shape[1] :])
    assert right_of(model, questions._replace(answers=expected), pad, image, same_tokens) == [True, True]
    other = [expected[0], expected[1] + 1]
    assert right_of(model, questions._replace(answers=other), pad, image, same_tokens) == [True, False]
    assert right_of(model, questions._replace(answers=other), pad, image, lambda given_A, answer_A: True) == [True] * 2


def test_only_the_last_answer_is_asked_for() -> None:
    ids_BN = torch.arange(12)[None]
    labels_BN = torch.where(torch.isin(ids_BN, torch.tensor([3, 4, 8, 9])), ids_BN, -100)
    questions = questions_of({"input_ids": ids_BN, "labels": labels_BN}, pad=0)
    assert questions.inputs["input_ids"].tolist() == [list(range(8))]
    assert [answer.tolist() for answer in questions.answers] == [[8, 9]]


@pytest.mark.parametrize("labels", [torch.full((1, 4), -100), torch.arange(4)[None]], ids=["no answer", "no question"])
def test_prompts_without_question_or_answer_are_refused(labels: Tensor) -> None:
    with pytest.raises(ValueError, match="behind a question in every prompt, and prompt 0 of a batch has none: leave"):
        questions_of({"input_ids": torch.arange(4)[None], "labels": labels}, pad=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_with_as_many_image_tokens_keep_their_images(name: str) -> None:
    model: Any = make_joint(name)
    batch = prompt(name, (1, 1, 1))
    equal = of_equal_length(model, batch)
    assert equal is not None
    assert real_tokens(equal).all()
    assert torch.equal(equal["pixel_values"], batch["pixel_values"])
    assert (equal["input_ids"] == equal["input_ids"][0]).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_of_equal_length_are_one_prompt_of_the_batch_without_padding(name: str) -> None:
    model: Any = make_joint(name)
    batch = prompt(name, (2, 1, 3))
    equal = of_equal_length(model, batch)
    assert equal is not None
    assert real_tokens(equal).all()
    assert len(equal["input_ids"]) == 3
    with torch.no_grad():
        padded_NF = model(**batch).logits[0][real_tokens(batch)[0]]
        for logits_NF in model(**equal).logits:
            torch.testing.assert_close(logits_NF, padded_NF, rtol=1e-3, atol=1e-3)
    assert of_equal_length(model, equal) is equal


def test_prompts_whose_images_cannot_be_told_apart_are_timed_as_they_come() -> None:
    model: Any = make_joint("qwen2_5_vl")
    # One image of 12 tokens and two of 3: that one of three rows is the first prompt's does not follow from the tokens.
    image = model.config.image_token_id
    rows = [[1, *[image] * 12, 2, 3], [1, *[image] * 3, 2, *[image] * 3, 3]]
    grids = torch.tensor([[1, 3, 4], [1, 1, 3], [1, 1, 3]])
    alike = prompt("qwen2_5_vl", (1,))["pixel_values"]
    pixels = torch.randn(18, alike.shape[1])
    batch = {**pad(rows, "right"), "pixel_values": pixels, "image_grid_thw": grids}
    batch["mm_token_type_ids"] = (batch["input_ids"] == image).long()
    samples = Prompts(model, "language", [batch], same_tokens)
    assert set(samples.timed) == {BATCH}
    assert samples.timed[BATCH] is batch
    assert samples.note.startswith("Times are of prompts padded to one length")


@pytest.mark.parametrize("labels", [False, True])
def test_times_and_answers_of_a_routed_model_are_its_own(labels: bool) -> None:
    model: Any = make_joint("llava")
    batch = labelled("llava")
    if not labels:
        del batch["labels"]
    samples = Prompts(model, "language", [batch], same_tokens)
    routed = mmod.route_(make_joint("llava"), language=mmod.preset("evenly-spread", depth=4, capacity=0.5))
    measured = samples.evaluate(routed, 0, 2)
    assert ("correct" in measured.outcomes) == labels
    for name, reading in samples.readings(routed).items():
        (call,) = reading.draws
        call()
        assert reading.samples == len(samples.timed[name]["input_ids"])
    assert set(samples.timed) == {BATCH, MIX}
