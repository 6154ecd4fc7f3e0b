"""Which sets the models of each kind of training are audited on, and what their samples and tokens are sorted by.

Axes: B samples, N tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mmod import is_routed
from mmod.adapters import find_stack
from mmod.analysis.audit.choices import REFERENCE_ENTROPY
from mmod.analysis.audit.generation import Generation, judge_generation
from mmod.analysis.plots import RoutingMaps, sample_maps
from mmod.audits.config import AnyConfig, AuditConfig, ChatAuditConfig, PairsAuditConfig, TextAuditConfig
from mmod.audits.subject import Again, Sorted, Subject
from mmod.data.config import DataConfig
from mmod.data.readers.chat import IGNORED
from mmod.data.readers.conversations import open_conversations
from mmod.data.readers.source import spread
from mmod.data.readers.text import create_eval_text
from mmod.data.synthetic.digits import DIFFICULTIES, DigitScene, compose_scenes
from mmod.model import routing_configs
from mmod.training.image.recipe import sample_images
from mmod.training.text.config import BYTES

_DIGITS = "digits"
_PIXELS = "pixel_values"
_KIND = "kind of question"


def subject_of(config: AnyConfig) -> Subject[Any]:
    """Return what is audited."""
    kinds: dict[type, type[Subject[Any]]] = {
        AuditConfig: ImageSubject,
        PairsAuditConfig: PairsSubject,
        ChatAuditConfig: ChatSubject,
        TextAuditConfig: TextSubject,
    }
    return kinds[type(config)](config)


class ImageSubject(Subject[AuditConfig]):
    """A timm model; see `Subject`."""

    def create(self, reference: str | None = None) -> nn.Module:
        """Make the routed model, or the dense one of another run."""
        model = super().create(reference)
        if reference is None:
            self._prefix = find_stack(model).prefix
            self._grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
        return model

    def batches(self, changes: Mapping[str, Any] = MappingProxyType({})) -> Again:
        """Return the images by the size and place of their object, and their patches by what they show."""
        stream, scenes = self.stream(changes), _scenes(self.data(changes))

        def make() -> Iterator[Sorted]:
            start = 0
            for images, targets in stream.batches(0):
                own = scenes[start : start + len(images)]
                start += len(images)
                yield Sorted((images, targets), _strata(own, targets), self._kinds(own, targets))

        return Again(make, stream.steps_per_epoch)

    def maps(self, model: nn.Module, count: int) -> RoutingMaps:
        """Return what the blocks keep of sample images."""
        return sample_maps(model, sample_images(self.config, count))

    def _kinds(self, scenes: Sequence[DigitScene], targets: Tensor) -> dict[str, NDArray[np.str_]]:
        """Return what each token of a batch shows; nothing where the set does not say it."""
        if targets.ndim == 2:
            shown = np.where(targets > 0, "object", "background")
        elif scenes and self._grid is not None:
            shown = np.stack([_regions(scene, self._grid) for scene in scenes])
        else:
            return {}
        return {"region": np.pad(shown.astype(object), ((0, 0), (self._prefix, 0)), constant_values="prefix token")}


class PairsSubject(Subject[PairsAuditConfig]):
    """An open_clip model, whose images and captions have to find each other within a batch; see `Subject`."""

    split = "val"
    # No head of such a model answers for a token.
    unasked = frozenset({REFERENCE_ENTROPY})

    def batches(self, changes: Mapping[str, Any] = MappingProxyType({})) -> Again:
        """Return the pairs that `data.val` names, sorted by nothing."""
        stream = self.stream(changes)
        return Again(lambda: (Sorted(batch) for batch in stream.batches(0)), stream.steps_per_epoch)


class ChatSubject(Subject[ChatAuditConfig]):
    """A vision-language model of transformers; see `Subject`."""

    split = "val"
    # Not all conversations have equally many tokens, and no loss asked the head what follows an image token.
    unasked = frozenset({"shuffled", REFERENCE_ENTROPY})

    def batches(self, changes: Mapping[str, Any] = MappingProxyType({})) -> Again:
        """Return the conversations with images, those of about equal length together, by the kind of question."""
        data, size = self.data(changes), self.config.eval_batch_size
        if data.val is None:
            raise ValueError("an audit needs conversations to ask: set data.val")
        talks = open_conversations(data.val, data)
        order = np.lexsort((talks.letters, talks.images))
        order = order[np.asarray(talks.images)[order] > 0]
        wanted = self.config.questions
        if wanted is not None and wanted < len(order):
            chosen = np.random.default_rng(self.config.seed).choice(len(order), wanted, replace=False)
            order = order[np.sort(chosen)]
        collate = self.recipe.collator
        is_language_routed = is_routed(self.model) and "language" in routing_configs(self.model)

        def make() -> Iterator[Sorted]:
            for start in range(0, len(order), size):
                asked = [talks[int(index)] for index in order[start : start + size]]
                batch, kinds = collate(asked), [talk.question_type for talk in asked]
                roles = _roles(batch, collate.processor) if is_language_routed else {}
                yield Sorted(batch, {_KIND: kinds}, roles and {**roles, _KIND: _for_each_token(kinds, batch)})

        return Again(make, -(-len(order) // size))

    def shifted(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Change the images where each conversation of the batch has one."""
        if _PIXELS not in batch or batch[_PIXELS].ndim != 4 or len(batch[_PIXELS]) != len(batch["labels"]):
            raise ValueError("audit.shifts need conversations of one image each, of one size")
        return {**batch, _PIXELS: change(batch[_PIXELS])}


def _role(byte: bytes) -> str:
    """Return what a byte is in a text."""
    if byte.isspace():
        return "end of line" if byte in b"\r\n" else "space"
    if byte.isalnum() or byte == b"_":
        return "digit" if byte.isdigit() else "letter"
    return "punctuation" if byte.isascii() and byte >= b" " else "other"


_ROLES = np.array([_role(bytes([value])) for value in range(BYTES)])


class TextSubject(Subject[TextAuditConfig]):
    """A language model of bytes, which decides as in generation where it was trained for that; see `Subject`."""

    def batches(self, changes: Mapping[str, Any] = MappingProxyType({})) -> Again:
        """Return the windows of the evaluation split, sorted by nothing, with what each byte is."""
        stream = self.stream(changes)

        def make() -> Iterator[Sorted]:
            for tokens, following in stream.batches(0):
                yield Sorted((tokens, following), kinds={"role": _ROLES[tokens.numpy()]})

        return Again(make, stream.steps_per_epoch)

    def generation(self, model: nn.Module) -> Generation | None:
        """Return how the model decides in texts that are longer than the windows of its training."""
        config = self.config
        if not config.generation:
            return None
        length = config.data.length + config.generation
        stream = create_eval_text(dataclasses.replace(config.data, length=length, val_limit=config.texts))
        tokens_BN = torch.cat([tokens for tokens, _ in stream.batches(0)]).to(next(model.parameters()).device)
        return judge_generation(model, tokens_BN, config.data.length, config.seed)

    def shifted(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Refuse: shifts change images."""
        raise ValueError("audit.shifts change images, and text has none: leave them out")


def _scenes(data: DataConfig) -> list[DigitScene]:
    """Return the scenes of the embedded digits in the order of the set; nothing of other sets."""
    kind, _, difficulty = data.source.partition(":")
    if kind != _DIGITS:
        return []
    scenes = list(compose_scenes(DIFFICULTIES[difficulty or "default"], data.val_split))
    if data.val_limit is None:
        return scenes
    return [scenes[int(place)] for place in spread([scene.label for scene in scenes], data.val_limit)]


def _strata(scenes: Sequence[DigitScene], targets: Tensor) -> dict[str, list[float]]:
    """Return size and place of the digit in each scene, and how many patches have an object where they have classes."""
    found: dict[str, list[float]] = {}
    if scenes:
        boxes = torch.tensor([scene.box for scene in scenes], dtype=torch.float64)
        middle = (boxes[:, :2] + boxes[:, 2:] - len(scenes[0].image)) / 2
        found["side of the object"] = (boxes[:, 2] - boxes[:, 0]).tolist()
        found["distance of the object from the middle"] = middle.norm(dim=1).tolist()
    if targets.ndim == 2:
        found["patches with an object"] = (targets > 0).sum(1).tolist()
    return found


def _regions(scene: DigitScene, grid: tuple[int, int]) -> NDArray[np.str_]:
    """Return of each patch whether its middle lies in the digit's box, there is ink of others, or nothing (P)."""
    pixels = torch.from_numpy(scene.image)[None].float()
    has_ink = torch.nn.functional.adaptive_max_pool2d(pixels, grid)[0] > 0
    left, top, right, bottom = scene.box
    rows, columns = ((np.arange(count) + 0.5) * len(scene.image) / count for count in grid)
    is_object = ((rows >= top) & (rows < bottom))[:, None] & ((columns >= left) & (columns < right))
    return np.where(is_object, "object", np.where(has_ink, "clutter", "background")).flatten()


def _roles(batch: Mapping[str, Tensor], processor: Any) -> dict[str, NDArray[np.str_]]:
    """Return what each token of a batch is."""
    tokens = batch["input_ids"]
    is_special = torch.isin(tokens, torch.tensor(processor.tokenizer.all_special_ids))
    names = np.where(batch["labels"] != IGNORED, "answer", np.where(is_special, "special token", "question"))
    return {"role": np.where(tokens == processor.image_token_id, "image", names)}


def _for_each_token(names: Sequence[str], batch: Mapping[str, Tensor]) -> NDArray[np.str_]:
    return np.repeat(np.asarray(names)[:, None], batch["input_ids"].shape[1], axis=1)
