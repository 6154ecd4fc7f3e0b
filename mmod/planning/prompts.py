"""Questions, answers and prompts of equal length from batches of prompts. B: prompts, N: tokens, A: answer tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.planning.divergence import PromptBatch, real_tokens
from mmod.planning.plan_search import run_batch
from mmod.values import IGNORED

IsRight = Callable[[Tensor, Tensor], bool]
"""From the tokens of a generated answer and of the expected one, (A,) each, to whether it is right."""


class Questions(NamedTuple):
    """Prompts up to their last answers, padded on the left for `generate`, and these answers' tokens (A,) each."""

    inputs: dict[str, Any]
    answers: list[Tensor]


def questions_of(batch: PromptBatch, pad: int) -> Questions:
    """Cut every prompt of a labelled batch before its last answer.

    Args:
        pad: Token in front of shorter prompts, which the attention mask leaves out.

    Raises:
        ValueError: A prompt has no answer, or nothing in front of it.
    """
    ids_BN = batch["input_ids"]
    number_N = torch.arange(1, ids_BN.shape[1] + 1, device=ids_BN.device)
    is_answer_BN = batch["labels"] != IGNORED
    end_B = (is_answer_BN * number_N).amax(1)
    # The last token in front of the last answer.
    start_B = (~is_answer_BN * (number_N <= end_B[:, None]) * number_N).amax(1)
    is_asked_BN = real_tokens(batch) & (number_N <= start_B[:, None])
    lengths = is_asked_BN.sum(1).tolist()
    if 0 in lengths:
        raise ValueError(
            f"labels must mark an answer behind a question in every prompt, and prompt {lengths.index(0)} of a batch "
            "has none: leave labels out to compare next tokens"
        )
    columns = {name: value for name, value in batch.items() if name != "labels"}
    columns["attention_mask"] = real_tokens(batch).to(ids_BN.dtype)
    for name, value in columns.items():
        if not isinstance(value, Tensor) or value.shape != ids_BN.shape:
            continue
        fill = pad if name == "input_ids" else 0
        cut = [row_N[is_asked_N] for row_N, is_asked_N in zip(value, is_asked_BN)]
        columns[name] = torch.stack([F.pad(row, (max(lengths) - len(row), 0), value=fill) for row in cut])
    spans = zip(ids_BN, start_B.tolist(), end_B.tolist())
    return Questions(columns, [row_N[start:end] for row_N, start, end in spans])


@torch.no_grad()
def right_of(model: Any, questions: Questions, pad: int, image_token: int, is_right: IsRight) -> list[bool]:
    """Return for every question whether the model's greedy answer is right.

    Args:
        model: A vision-language model that generates.
        questions: Prompts and their expected answers.
        pad: Token that fills shorter prompts.
        image_token: Token that is never generated, as it would need an image.
        is_right: Compares tokens of the given answer with those of the expected one, each up to its first end token.
    """
    ends = _end_tokens(model.generation_config)
    given_BN = model.generate(
        **questions.inputs,
        # One more than the answers, so that none looks right because it is cut.
        max_new_tokens=max(map(len, questions.answers)) + 1,
        do_sample=False,
        pad_token_id=pad,
        # An image token without an image would fail in the next step.
        suppress_tokens=[image_token],
    )
    prompt_length = questions.inputs["input_ids"].shape[1]
    pairs = zip(given_BN[:, prompt_length:].cpu(), questions.answers)
    return [is_right(_until_end(given_A, ends), _until_end(answer_A.cpu(), ends)) for given_A, answer_A in pairs]


def same_tokens(given_A: Tensor, answer_A: Tensor) -> bool:
    """Return whether a generated answer begins with all tokens of the expected one."""
    return torch.equal(given_A[: len(answer_A)], answer_A)


def _until_end(answer_A: Tensor, ends: list[int]) -> Tensor:
    """Return an answer up to its first end token, which belongs to it."""
    is_end_A = torch.isin(answer_A, torch.tensor(ends, dtype=answer_A.dtype))
    if is_end_A.any():
        return answer_A[: int(is_end_A.int().argmax()) + 1]
    return answer_A


def pad_token(model: Any, image_token: int) -> int:
    """Return a token for padding that stands for no image."""
    config = model.generation_config
    tokens = (config.pad_token_id, *_end_tokens(config), 0, 1)
    return next(token for token in tokens if token is not None and token != image_token)


def _end_tokens(config: Any) -> list[int]:
    """Return the tokens that end an answer: hosts have none, one, or several in a list or a tensor."""
    if config.eos_token_id is None:
        return []
    return torch.tensor(config.eos_token_id).flatten().tolist()


def of_equal_length(model: Any, batch: PromptBatch, like: PromptBatch | None = None) -> PromptBatch | None:
    """Return as many prompts without padding: the batch itself, or its prompt of median length with images, repeated.

    Where all prompts have as many image tokens, each keeps its own images.

    Args:
        like: The same prompts with images of another size, whose median is repeated; None is the batch.

    Returns:
        None where an input of the batch does not tell which of its rows belong to that prompt.
    """
    ids_BN = batch["input_ids"]
    is_real_BN = real_tokens(batch)
    tokens_B = is_real_BN.sum(1)
    if bool((tokens_B == tokens_B[0]).all()):
        return batch
    images_B = ((ids_BN == model.config.image_token_id) & is_real_BN).sum(1)
    lengths_B = tokens_B if like is None else real_tokens(like).sum(1)
    seeing = [row for row in lengths_B.argsort(stable=True).tolist() if images_B[row] or not images_B.any()]
    row = seeing[len(seeing) // 2]
    equal: dict[str, object] = {}
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            equal[name] = value
            continue
        if value.shape[:2] != ids_BN.shape and bool((images_B == images_B[0]).all()):
            equal[name] = value
            continue
        if value.shape[:2] == ids_BN.shape:
            own = value[row : row + 1, is_real_BN[row]]
        else:
            image_rows = _rows_of_images(len(value), images_B.tolist(), row)
            if image_rows is None:
                return None
            own = value[image_rows]
        equal[name] = own.repeat(len(ids_BN), *[1] * (own.ndim - 1))
    try:
        run_batch(model, equal)
    except (ValueError, RuntimeError, IndexError):
        # Rows in proportion to image tokens by chance: the model finds other images than the prompt has.
        return None
    return equal


def _rows_of_images(rows: int, images: list[int], prompt: int) -> slice | None:
    """Return which rows of an input belong to the images of a prompt; None where that is not known.

    Args:
        rows: Rows of the input: one for each image, or a number in proportion to the image tokens.
        images: Image tokens of each prompt.
    """
    if rows == len(images) and all(images):
        return slice(prompt, prompt + 1)
    ends = [rows * sum(images[:number]) for number in range(len(images) + 1)]
    total = sum(images)
    if not total or any(end % total for end in ends):
        return None
    return slice(ends[prompt] // total, ends[prompt + 1] // total)
