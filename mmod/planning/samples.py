"""What a changed model is evaluated on: images, or prompts. N: samples, R: rows of outputs, F: features, T: tokens."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mmod.adapters import find_library, image_facts, image_output, patch_grid, watch_grid
from mmod.adapters.images import resized
from mmod.analysis.counting import by_data, meta_copy, pass_flops
from mmod.analysis.flop_count import flops
from mmod.analysis.prefill import Prompt
from mmod.analysis.repeats import RedundancyReport, redundancy, whole_patches
from mmod.analysis.table import Measured
from mmod.analysis.timing import DRAWS, PASSES, Reading, reading_of
from mmod.analysis.tracing import Trace, trace
from mmod.io.jobs import Callback
from mmod.io.store import fingerprint
from mmod.planning.candidate import MEASURES, ImageSize, Measure
from mmod.planning.divergence import PromptBatch, compared, outputs, real_tokens
from mmod.planning.early import BATCH
from mmod.planning.plan_search import run_batch
from mmod.planning.prompts import IsRight, Questions, of_equal_length, pad_token, questions_of, right_of
from mmod.planning.untrained import counted_part
from mmod.random_state import spread
from mmod.values import one_of

# Samples of the first look at all candidates; the others are run for candidates near the front.
FIRST_LOOK = 64
# More at once are slower on a CPU, whose caches do not hold what passes between layers.
_AT_ONCE = 16
_ROW = "one row of numbers for an image, (B, F)"
# What a measure compares, of each image.
_RETURNED: dict[Measure, str] = {"top1": _ROW, "features": _ROW, "patches": "a row for each patch, (B, N, F)"}

AGREEMENT = "agreement"
"""The measure and the outcome of samples: whether the most probable class or token is the dense model's."""
CORRECT = "correct"
"""The outcome of samples with labels: whether the most probable class is theirs, or the generated answer right."""
MIX = "mix"
"""Name of the timed pass over prompts of different lengths."""
ALONE = "batch 1"
"""Name of the timed passes over single images."""
AtSize = Callable[[nn.Module, ImageSize], Iterable[PromptBatch]]
"""Makes a model read images of another size, in place, and returns the batches at that size."""


class Costs(NamedTuple):
    """What a sample costs a model.

    Attributes:
        flops: FLOPs of a pass over an image, or of the language model's prefill of a prompt of mean length; None where
            they cannot be counted.
        cache: Bytes of the KV cache of that prompt; None for images.
    """

    flops: int | None
    cache: int | None


class Images:
    """Images that changed models are evaluated on, with the dense model's outputs for them, and perhaps with labels.

    Attributes:
        measure: How outputs are compared.
        part: The part of the model that is made cheaper.
        read: What stands for the samples alone, in a question of advice.
        identity: The model and the samples, as a store knows them; dense outputs of the first ones stand for the model.
        first: Number of samples of the first look.
        batch_size: Samples of a timed batch.
        has_labels: Whether accuracy is evaluated.
        classes: Number of classes that the model chooses from; None without labels.
        note: What is said of the samples in the report.
        searched: Number of samples beside these on which plans were searched.
    """

    searched = 0

    def __init__(
        self,
        model: nn.Module,
        part: str,
        prefix: int,
        pixels: Tensor,
        labels: Tensor | None,
        batch_size: int,
        measure: Measure | None = None,
    ) -> None:
        self._dense = model
        self.part = part
        self.prefix = prefix
        order_N = look_order(len(pixels)).to(pixels.device)
        pixels = pixels[order_N]
        # The same images with other labels are other samples.
        given = [pixels]
        if labels is not None:
            labels = labels[order_N.to(labels.device)]
            given.append(labels)
        self.read = fingerprint(*given)
        self.pixels = pixels
        self.batch_size = batch_size
        self.device = next(model.parameters()).device
        self.counted = counted_part(model, part, pixels[:1])
        facts = image_facts(model)
        try:
            # Of the dense model: outputs on other grids are brought to this one.
            with watch_grid(model) as seen:
                self._dense_NRF, _ = self._outputs(model, 0, _AT_ONCE)
        # As hosts refuse sizes of images.
        except (RuntimeError, AssertionError) as error:
            shape = tuple(pixels.shape)
            raise ValueError(f"this {type(model).__name__} cannot run on images of shape {shape}: {error}") from error
        returned = self._dense_NRF.shape[2]
        self.measure = _measure_of(model, self._dense_NRF, facts.classes, labels is not None, measure)
        self.labels = labels if self.measure == AGREEMENT else None
        self.has_labels = self.labels is not None
        notes = []
        if labels is not None and not self.has_labels:
            why = ", because the model has no classes" if measure is None else f" for the {self.measure}"
            notes.append(f"Labels are not used{why}.")
        elif labels is not None and int(labels.max()) >= returned:
            raise ValueError(
                f"the labels reach {int(labels.max())}, and this {type(model).__name__} returns {returned} numbers for "
                "an image: pass images without labels to compare its outputs"
            )
        if batch_size > len(pixels):
            notes.append(f"The timed batches of {batch_size} repeat the {len(pixels)} images.")
        self.note = " ".join(notes)
        self.classes = returned if self.has_labels else None
        self.identity = _identity(model, part, len(pixels), fingerprint(self._dense_NRF))
        self.identity["read"] = self.read
        if measure is not None:
            # The same outputs may be compared in several ways.
            self.identity["measure"] = measure
        self.first = min(FIRST_LOOK, len(pixels))
        self.size = (int(pixels.shape[2]), int(pixels.shape[3]))
        self.patches = facts.patch or _patch_of(self.size, seen.grid)

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the dense model's patches."""
        assert self.patches is not None
        return self.size[0] // self.patches[0], self.size[1] // self.patches[1]

    @property
    def redundancy(self) -> RedundancyReport | None:
        """The redundancy of the images at the model's patches; None where these are unknown or not square."""
        sides = set(self.patches or ())
        if len(sides) != 1:
            return None
        (side,) = sides
        return redundancy(whole_patches(self.pixels, side), side)

    def costs(self, model: nn.Module, kept: Mapping[str, float]) -> Costs:
        """Return the FLOPs of a pass over an image, by the kept shares of `Measured` where these decide them."""
        path, inputs, size = self.counted
        counted = model.get_submodule(path)
        # A model of one's own may read values of images, and a count has none.
        with suppress(NotImplementedError, RuntimeError, AssertionError, ValueError):
            if not by_data(counted):
                return Costs(pass_flops(meta_copy(counted), inputs), None)
            return Costs(flops(counted, size, kept).routed, None)
        return Costs(None, None)

    def check(self, model: nn.Module) -> None:
        """Run a model on one image; raises a ValueError where it cannot be run, or answers in another form."""
        given = outputs(model, self.pixels[:1].to(self.device), self.part).shape[-1]
        wanted = self._dense_NRF.shape[2]
        if given != wanted:
            raise ValueError(f"it returns {given} numbers, and the dense model {wanted}")

    def read_by(self, model: nn.Module, size: object) -> Images:
        """Return the images as a changed model reads them; methods that resize do so in the model."""
        self.check(model)
        return self

    @functools.cached_property
    def timed(self) -> list[Tensor]:
        """Batches that are timed, one in a round."""
        labels = [0] * len(self) if self.labels is None else self.labels.tolist()
        draws = []
        for seed in range(DRAWS):
            # Spread over the classes, as those of a study are.
            index = spread(labels, self.batch_size, seed)
            # Few images are repeated: a batch has its size.
            repeated = index[np.arange(self.batch_size) % len(index)]
            draws.append(self.pixels[repeated].to(self.device))
        return draws

    def readings(self, model: nn.Module) -> dict[str, Reading]:
        """Return the passes over a batch, and over single ones of its images."""
        read = partial(image_output, model)
        passes = {BATCH: reading_of(read, [[images] for images in self.timed], self.batch_size)}
        if self.batch_size > 1:
            few = min(self.batch_size, PASSES)
            passes[ALONE] = reading_of(read, [images[:few].split(1) for images in self.timed], few)
        return passes

    def evaluate(self, model: nn.Module, start: int, stop: int, callback: Callback = lambda share: None) -> Measured:
        """Return whether the top class of some images is the dense model's, or the mean cosine over rows."""
        if model is self._dense:
            return self._compared(model, self.dense_outputs(callback)[start:stop], start)
        changed_NRF, kept = self._outputs(model, start, stop, callback)
        return self._compared(model, changed_NRF, start)._replace(kept=kept)

    def dense_outputs(self, callback: Callback = lambda share: None) -> Tensor:
        """Return the dense model's outputs for all images; what a store has needs those of the first ones alone."""
        known = len(self._dense_NRF)
        if known < len(self):
            others_NRF, _ = self._outputs(self._dense, known, len(self), callback)
            self._dense_NRF = torch.cat([self._dense_NRF, others_NRF])
        return self._dense_NRF

    def _compared(self, model: nn.Module, changed_NRF: Tensor, start: int) -> Measured:
        stop = start + len(changed_NRF)
        dense_NRF = self.dense_outputs()[start:stop].float()
        changed_NRF = changed_NRF.float()
        if changed_NRF.shape[1] != dense_NRF.shape[1]:
            with watch_grid(model) as seen:
                self.check(model)
            changed_NRF = resized(changed_NRF, seen.grid or patch_grid(model, self.size), self.grid)
        if self.measure != AGREEMENT:
            cosine_N = torch.cosine_similarity(changed_NRF, dense_NRF, dim=-1).mean(1)
            return _measured({AGREEMENT: cosine_N.double().numpy()})
        top_N = changed_NRF[:, 0].argmax(-1)
        outcomes = {AGREEMENT: (top_N == dense_NRF[:, 0].argmax(-1)).double().numpy()}
        if self.labels is not None:
            outcomes[CORRECT] = (top_N == self.labels[start:stop].cpu()).double().numpy()
        return _measured(outcomes)

    def _outputs(
        self, model: nn.Module, start: int, stop: int, callback: Callback = lambda share: None
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the outputs (N, R, F), one row per image or per patch, and what `Costs` need of tokens kept."""
        counted = model.get_submodule(self.counted[0])
        tracing: Callable[[], AbstractContextManager[Trace | None]] = nullcontext
        if by_data(counted):
            tracing = partial(trace, counted)
        kept: dict[str, float] = {}
        done = 0
        batches = []
        for chunk in self.pixels[start:stop].split(_AT_ONCE):
            # A trace is that of one pass.
            with tracing() as decisions:
                rows_NRF = outputs(model, chunk.to(self.device), self.part).unflatten(0, (len(chunk), -1))
            if decisions is not None:
                for name, share in decisions.kept_shares().items():
                    kept[name] = kept.get(name, 0.0) + share * len(chunk) / (stop - start)
            if rows_NRF.shape[1] > 1:
                # Rows of patches are many, and only compared.
                rows_NRF = rows_NRF[:, self.prefix :].half()
            batches.append(rows_NRF.cpu())
            done += len(chunk)
            callback(done / (stop - start))
        return torch.cat(batches), kept


def look_order(images: int) -> Tensor:
    """Return the order in which images are looked at, by their positions: folders and loaders may come class by class.

    As many as a first look sees stay as they are.
    """
    order = np.arange(images)
    if images > FIRST_LOOK:
        order = np.random.default_rng(0).permutation(order)
    return torch.from_numpy(order)


def take_off_head_(model: Any, measure: Measure, name: str) -> None:
    """Let a model of images return, in place, what a measure compares; refuse a measure that it cannot have.

    Only timm's heads can be taken off. What a class of no library returns is compared as it is.

    Args:
        name: What names the measure, for messages.
    """
    library = find_library(model)
    if library is None:
        one_of(name, measure, MEASURES)
        return
    classes = image_facts(model).classes
    measures: Sequence[str]
    if library == "timm":
        measures = MEASURES if classes else MEASURES[1:]
    else:
        measures = ("top1",) if classes else ("features",)
    one_of(f"{name}, which has {classes or 'no'} classes,", measure, measures)
    if library != "timm" or measure == "top1":
        return
    if measure == "patches":
        # Without pooling, the model returns the features of each patch.
        model.reset_classifier(0, "")
    else:
        model.reset_classifier(0)


def _measure_of(
    model: nn.Module, output_NRF: Tensor, classes: int | None, has_labels: bool, asked: Measure | None
) -> str:
    """Return how outputs are compared; those of a class of no library are logits if there are labels.

    Args:
        asked: How the user wants it, of a class of no library alone: another model returns what is asked for.
    """
    is_own = find_library(model) is None
    has_rows = output_NRF.shape[1] > 1
    if is_own and asked is not None and has_rows != (asked == "patches"):
        raise ValueError(
            f"measure={asked!r} needs a model that returns {_RETURNED[asked]}, and this {type(model).__name__} returns "
            f"{output_NRF.shape[1]} rows of {output_NRF.shape[2]} for an image"
        )
    if has_rows:
        return "cosine of patches"
    if is_own and asked is not None:
        return AGREEMENT if asked == "top1" else "cosine of features"
    if classes or (is_own and has_labels):
        return AGREEMENT
    return "cosine of outputs" if is_own else "cosine of features"


def _patch_of(size: tuple[int, int], grid: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return height and width of patches in pixels; None for a grid that is unknown or does not tile images."""
    if grid is None or size[0] % grid[0] or size[1] % grid[1]:
        return None
    return size[0] // grid[0], size[1] // grid[1]


class Prompts:
    """Batches of prompts on which candidates are compared with the dense model.

    With labels, a candidate is evaluated by the answers that it generates; without, by how often its next token is
    the dense model's, over all text.

    Attributes:
        batches_at: Makes a model read images of another size, and returns the batches with such images; None if the
            caller gave no way. The others are those of `Images`.
    """

    redundancy = None
    classes = None
    searched = 0
    note = ""
    batches_at: Callable[[nn.Module, ImageSize], list[PromptBatch]] | None = None

    def __init__(
        self,
        model: Any,
        part: str,
        batches: Sequence[PromptBatch],
        is_right: IsRight,
        callback: Callback = lambda share: None,
    ) -> None:
        self.measure = AGREEMENT
        self.part = part
        self.batches = batches
        self.image_token = model.config.image_token_id
        self.starts = [0, *accumulate(len(batch["input_ids"]) for batch in batches)]
        self.first = next((start for start in self.starts if start >= FIRST_LOOK), len(self))
        self.batch_size = self.starts[1]
        self.has_labels = all(batch.get("labels") is not None for batch in batches)
        self.is_right = is_right
        self.pad = pad_token(model, self.image_token)
        self.questions: list[Questions] = []
        if self.has_labels:
            self.questions = [questions_of(batch, self.pad) for batch in batches]
        self.timed = {BATCH: batches[0]}
        equal = of_equal_length(model, batches[0])
        if equal is None:
            self.note = "Times are of prompts padded to one length, in which the dense model computes padding too."
        elif equal is not batches[0]:
            self.timed = {BATCH: equal, MIX: batches[0]}
            self.note = (
                "Speed-ups are those of prompts of equal length, and decide. Those of the mix are of prompts as they "
                "come, padded to one length."
            )
        self.read = [_read(batch) for batch in batches]
        tops = []
        for number, batch in enumerate(batches, 1):
            tops.append(self._top(model, batch))
            callback(number / len(batches))
        self.dense_T = [top_T for top_T, _ in tops]
        self.identity = {
            **_identity(model, part, len(self), [told for _, told in tops]),
            # Another function finds other answers right.
            "is_right": getattr(is_right, "__qualname__", type(is_right).__name__),
        }

    def __len__(self) -> int:
        return self.starts[-1]

    def read_by(self, model: nn.Module, size: object) -> Prompts:
        """Return the prompts as a changed model reads them, perhaps with images of another size.

        Raises:
            ValueError: The model cannot be run on them, or in a time that cannot be compared with the dense model's.
        """
        if self.batches_at is None or not isinstance(size, (int, Mapping)):
            self.check(model)
            return self
        try:
            # The first ones are for plans.
            resized = self._resized(model, self.batches_at(model, size)[-len(self.batches) :])
            resized.check(model)
        except (RuntimeError, LookupError, TypeError) as error:
            # Hosts and processors that split images, or fix their tokens, fail in many ways at another size.
            images = f"{size} px"
            if isinstance(size, Mapping):
                images = f"at most {size['longest_edge']:,} pixels"
            raise ValueError(f"images of {images}: {error}") from error
        return resized

    def _resized(self, model: nn.Module, batches: Sequence[PromptBatch]) -> Prompts:
        """Return the prompts of other batches, in which only images differ; answers are compared with the same ones."""
        texts = [self._text(batch) for batch in batches]
        own_texts = map(self._text, self.batches)
        if len(texts) != len(self.batches) or not all(map(torch.equal, texts, own_texts)):
            raise ValueError("images of another size change more of the prompts than the number of image tokens")
        if _count(batches, self.image_token) >= _count(self.batches, self.image_token):
            raise ValueError("images of another size have as many image tokens as before")
        resized = copy.copy(self)
        resized.batches = batches
        resized.questions = []
        if self.has_labels:
            resized.questions = [questions_of(batch, self.pad) for batch in batches]
        resized.timed = {BATCH: batches[0]}
        if MIX in self.timed:
            equal = of_equal_length(model, batches[0], self.batches[0])
            if equal is None:
                raise ValueError("prompts of equal length cannot be made of those with images of another size")
            resized.timed = {BATCH: equal, MIX: batches[0]}
        return resized

    def _text(self, batch: PromptBatch) -> Tensor:
        """Return the tokens of a batch that are neither padding nor of images."""
        ids_BN = batch["input_ids"]
        return ids_BN[real_tokens(batch) & (ids_BN != self.image_token)]

    def check(self, model: nn.Module) -> None:
        """Run a model on the first batch."""
        self._top(model, self.batches[0])

    def readings(self, model: nn.Module) -> dict[str, Reading]:
        """Return the prefill of prompts of equal length and of the first batch alone, vision tower included."""
        passes = {}
        for name, batch in self.timed.items():
            passes[name] = Reading([partial(run_batch, model, batch)], self.batch_size)
        return passes

    def costs(self, model: nn.Module, kept: Mapping[str, float]) -> Costs:
        """Return the FLOPs of the language model's prefill of a prompt of mean length, and the bytes of its cache."""
        images = sum(int((batch["input_ids"] == self.image_token).sum()) for batch in self.batches) // len(self)
        tokens = sum(int(real_tokens(batch).sum()) for batch in self.batches) // len(self)
        counted = flops(model, Prompt(tokens - images, images), kept or None)
        return Costs(counted.routed, counted.cache_bytes)

    def evaluate(self, model: nn.Module, start: int, stop: int, callback: Callback = lambda share: None) -> Measured:
        """Return the share of a prompt's next tokens that are the dense model's, and whether its answer is right."""
        scores: list[float] = []
        correct: list[bool] = []
        for number in range(self.starts.index(start), self.starts.index(stop)):
            batch = self.batches[number]
            top_T, _ = self._top(model, batch)
            compared_BN = compared(batch, self.image_token)
            counts = compared_BN.sum(1).tolist()
            scores += [float(x.double().mean()) for x in (top_T == self.dense_T[number]).split(counts)]
            if self.has_labels:
                correct += right_of(model, self.questions[number], self.pad, self.image_token, self.is_right)
            callback((self.starts[number + 1] - start) / (stop - start))
        outcomes = {AGREEMENT: np.array(scores)}
        if self.has_labels:
            outcomes[CORRECT] = np.array(correct, np.float64)
        return _measured(outcomes)._replace(kept=self._kept(model))

    def _kept(self, model: nn.Module) -> dict[str, float]:
        """Return the share of the first batch's image tokens that each layer keeps; empty where it is known before."""
        if not by_data(model):
            return {}
        with trace(model) as decisions:
            self.check(model)
        image_BN = (self.batches[0]["input_ids"] == self.image_token).cpu()
        return {name: float(routing.keep_BN.cpu()[image_BN].float().mean()) for name, routing in decisions.items()}

    def _top(self, model: nn.Module, batch: PromptBatch) -> tuple[Tensor, str]:
        """Return the most probable next tokens (T,), and what tells their logits and labels from others."""
        logits_TF = outputs(model, batch, self.part)
        told = [logits_TF]
        if batch.get("labels") is not None:
            told.append(batch["labels"])
        return logits_TF.argmax(-1).cpu(), fingerprint(*told)


def _count(batches: Iterable[PromptBatch], token: int) -> int:
    return sum(int((batch["input_ids"] == token).sum()) for batch in batches)


def _read(batch: PromptBatch) -> str:
    """Return what stands for prompts and their images."""
    seen = [batch["input_ids"], batch.get("pixel_values")]
    return fingerprint(*[value for value in seen if value is not None])


def _measured(outcomes: dict[str, np.ndarray]) -> Measured:
    return Measured({}, samples=len(outcomes[AGREEMENT]), outcomes=outcomes)


def _identity(model: nn.Module, part: str, samples: int, outputs: str | Sequence[str]) -> dict[str, object]:
    return {
        "work": "rows of advice",
        "model": type(model).__name__,
        "part": part,
        "samples": samples,
        "outputs": outputs,
    }


def first_images(batches: Iterable[object], images: int) -> tuple[Tensor, Tensor | None]:
    """Return the first images of batches, with their labels if all batches have some."""
    pixels: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches:
        x, *more = batch if isinstance(batch, (tuple, list)) else (batch,)
        if not isinstance(x, Tensor) or x.ndim != 4:
            raise TypeError(f"batches must hold images (B, C, H, W), or pairs of images and labels, got {_shape(x)}")
        if x.shape[1:] != (pixels or [x])[0].shape[1:]:
            raise ValueError(f"images must have one size, got {_shape(pixels[0])} and {_shape(x)}")
        if more and not (isinstance(more[0], Tensor) and more[0].shape == x.shape[:1]):
            raise TypeError(f"labels must be an index of a class for each of {len(x)} images, got {_shape(more[0])}")
        pixels.append(x)
        labels += more[:1]
        if sum(map(len, pixels)) >= images:
            break
    if not sum(map(len, pixels)):
        raise ValueError("no images: batches is empty")
    together = torch.cat(pixels)[:images]
    if len(labels) < len(pixels):
        return together, None
    return together, torch.cat(labels)[:images]


def _shape(images: object) -> str:
    if isinstance(images, Tensor):
        return str(tuple(images.shape))
    return type(images).__name__


def first_prompts(
    batches: Iterable[object], prompts: int, device: torch.device, callback: Callback
) -> list[PromptBatch]:
    """Return batches up to a number of prompts, whole ones, on a device."""
    moved: list[PromptBatch] = []
    read = 0
    for batch in batches:
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            raise TypeError(f"batches must hold prompts, as the model's processor returns them, got {type(batch)}")
        on_device = {}
        for name, value in batch.items():
            on_device[name] = value.to(device) if isinstance(value, Tensor) else value
        moved.append(on_device)
        read += len(batch["input_ids"])
        callback(min(1.0, read / prompts))
        if read >= prompts:
            break
    if not moved:
        raise ValueError("no prompts: batches is empty")
    return moved
