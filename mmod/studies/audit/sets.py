"""Evaluation sets of each kind of training as audits read them, with what is known of their samples and tokens.

Axes: B samples, N tokens, P patches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mmod.adapters import find_stack, image_stack, patch_grid
from mmod.audits.choices import REFERENCE_ENTROPY
from mmod.audits.contexts import LabelledBatch
from mmod.data.loader import scenes_of
from mmod.data.readers.lengths import open_checked
from mmod.methods.route import is_routed, routing_configs
from mmod.studies.audit.config import Audited
from mmod.training.chat.kind import ChatKind
from mmod.training.engine.config import config_as
from mmod.training.engine.kind import Kind, LoopKind, evaluation_data
from mmod.training.engine.task import Batch
from mmod.training.image.config import TrainConfig
from mmod.training.kinds import kind_of
from mmod.values import IGNORED, refuse_unknown

# Left, top, right and bottom in pixels.
Box = tuple[int, int, int, int]
_QUESTION = "kind of question"


@dataclass(frozen=True)
class Batches:
    """A number of batches that can be iterated several times."""

    make: Callable[[], Iterator[LabelledBatch]]
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[LabelledBatch]:
        return self.make()


def _streamed(kind: LoopKind, model: nn.Module, label: Callable[[Batch], LabelledBatch] = LabelledBatch) -> Batches:
    """Return the batches that training evaluates, with labels."""
    stream = evaluation_data(kind, model)
    return Batches(lambda: map(label, stream.batches(0)), stream.steps_per_epoch)


def _of_images(kind: LoopKind, model: nn.Module) -> Batches:
    scenes = scenes_of(config_as(kind.config, TrainConfig).data)
    # Of the scenes, which images may be cropped from.
    canvas = len(scenes[0].image) if scenes else 0
    batches = _streamed(kind, model)

    def make() -> Iterator[LabelledBatch]:
        # A new iterator for each pass over the set: batches are read several times.
        remaining = iter(scenes)
        for (images, targets), _, _ in batches:
            shown = list(islice(remaining, len(images)))
            strata = strata_of([scene.box for scene in shown], canvas, targets)
            regions = None
            if targets.ndim == 2:
                regions = np.where(targets > 0, "object", np.where(targets == IGNORED, "unlabelled", "background"))
            elif shown and image_stack(model) is not None:
                grid = patch_grid(model, (images.shape[2], images.shape[3]))
                regions = np.stack([regions_of(scene.image, scene.box, grid) for scene in shown])
            if regions is None:
                yield LabelledBatch((images, targets), strata)
                continue
            prefix = ((0, 0), (find_stack(model).prefix, 0))
            named = np.pad(regions.astype(object), prefix, constant_values="prefix token")
            yield LabelledBatch((images, targets), strata, {"region": named})

    return Batches(make, len(batches))


def _of_conversations(kind: ChatKind, model: nn.Module) -> Batches:
    config = kind.config
    data = config.data
    size = config.eval_batch_size
    if data.val is None:
        raise ValueError("an audit needs conversations to ask: set data.val")
    collate = kind.collator
    chats = open_checked(data.val, data, collate)
    # Conversations with images, those of about equal length together.
    # By number of images, then by letters: batches of similar length need little padding.
    order = np.lexsort((chats.letters, chats.images))
    order = order[np.asarray(chats.images)[order] > 0]
    wanted = config_as(config, Audited).audit.questions
    if wanted is not None and wanted < len(order):
        chosen = np.random.default_rng(config.seed).choice(len(order), wanted, replace=False)
        # In ascending order again, which is that of lengths.
        order = order[np.sort(chosen)]
    is_language_routed = is_routed(model) and "language" in routing_configs(model)

    def make() -> Iterator[LabelledBatch]:
        for start in range(0, len(order), size):
            conversations = chats.read(order[start : start + size])
            if not conversations:
                continue
            batch = collate(conversations)
            kinds = [chat.question_type for chat in conversations]
            roles = {}
            if is_language_routed:
                roles = roles_of(batch, collate.processor)
                kind_B1 = np.asarray(kinds)[:, None]
                roles[_QUESTION] = np.repeat(kind_B1, batch["input_ids"].shape[1], axis=1)
            yield LabelledBatch(batch, {_QUESTION: kinds}, roles)

    return Batches(make, -(-len(order) // size))


def _of_text(kind: LoopKind, model: nn.Module) -> Batches:
    return _streamed(kind, model, lambda batch: LabelledBatch(batch, token_kinds={"role": _ROLES[batch[0].numpy()]}))


class Sets(NamedTuple):
    """How the sets of a kind of training are read; by default as in training.

    Attributes:
        read: Returns the batches of the evaluation set that a kind's config names, as a model of the kind reads them.
        on_request: Conditions that are only compared where the config names them.
    """

    read: Callable[[Any, nn.Module], Batches] = _streamed
    on_request: frozenset[str] = frozenset()


_SETS = {
    "image": Sets(_of_images),
    # No head of such a model predicts tokens.
    "pairs": Sets(on_request=frozenset({REFERENCE_ENTROPY})),
    # Conversations differ in length, and no loss trained the head on image tokens.
    "chat": Sets(_of_conversations, frozenset({"shuffled", REFERENCE_ENTROPY})),
    "text": Sets(_of_text),
}


def sets_of(kind: str) -> Sets:
    """Return how the sets of a kind of training are read."""
    return _SETS.get(kind, Sets())


def read_set(kind: Kind, model: nn.Module, changes: Mapping[str, object] | None = None) -> Batches:
    """Return the evaluation set of a kind, or another with changed keys of `data`."""
    config = kind.config
    changes = changes or {}
    refuse_unknown("key of data", changes, [field.name for field in dataclasses.fields(config.data)])
    # A key whose value is a mapping is another one, too.
    data = {**dataclasses.asdict(config.data), **changes}
    config = type(config).from_dict({**config.as_written(), "data": data})
    return sets_of(config.kind).read(kind_of(config), model)


def strata_of(boxes: Sequence[Box], canvas: int, targets: Tensor) -> dict[str, list[float]]:
    """Return size and place of the digit in every scene, and the patches with an object where patches have classes."""
    strata: dict[str, list[float]] = {}
    if boxes:
        box_B4 = torch.tensor(boxes, dtype=torch.float64)
        # Twice the middle less the side, in halves: the distance from the image's middle.
        middle = (box_B4[:, :2] + box_B4[:, 2:] - canvas) / 2
        strata["side of the object"] = (box_B4[:, 2] - box_B4[:, 0]).tolist()
        strata["distance of the object from the middle"] = middle.norm(dim=1).tolist()
    if targets.ndim == 2:
        strata["patches with an object"] = (targets > 0).sum(1).tolist()
    return strata


def regions_of(image: np.ndarray, box: Box, grid: tuple[int, int]) -> NDArray[np.str_]:
    """Return the content of every patch by its middle: the digit's box, ink of other digits, or background (P)."""
    pixels = torch.from_numpy(image)[None].float()
    has_ink = torch.nn.functional.adaptive_max_pool2d(pixels, grid)[0] > 0
    left, top, right, bottom = box
    rows, columns = ((np.arange(count) + 0.5) * len(image) / count for count in grid)
    in_rows = (rows >= top) & (rows < bottom)
    in_columns = (columns >= left) & (columns < right)
    # By the middle of each patch for the box, and by any ink in it for clutter.
    is_object = in_rows[:, None] & in_columns
    content = np.where(has_ink, "clutter", "background")
    return np.where(is_object, "object", content).flatten()


def roles_of(batch: Mapping[str, Tensor], processor: Any) -> dict[str, NDArray[np.str_]]:
    """Return what every token of a batch of conversations is: image, question, answer or special token (B, N)."""
    tokens = batch["input_ids"]
    is_special = torch.isin(tokens, torch.tensor(processor.tokenizer.all_special_ids))
    names = np.where(batch["labels"] != IGNORED, "answer", np.where(is_special, "special token", "question"))
    return {"role": np.where(tokens == processor.image_token_id, "image", names)}


def _role(byte: bytes) -> str:
    if byte.isspace():
        return "end of line" if byte in b"\r\n" else "space"
    if byte.isalnum() or byte == b"_":
        return "digit" if byte.isdigit() else "letter"
    if byte.isascii() and byte >= b" ":
        return "punctuation"
    return "other"


_ROLES = np.array([_role(bytes([value])) for value in range(256)])
