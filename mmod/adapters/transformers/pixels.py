"""A score of pixels for the image tokens of a language model: the largest of the patches that a token is made of.

Axes: B samples or images, I images, P patches of an image or of all, N tokens of a prompt or patches of an image, T
image tokens, R rows and C columns of patches, H channels of a pixel, E pixels of a patch, F numbers of a patch, Y rows
and X columns of pixels.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters.transformers.images import KINDS, pixels_of
from mmod.adapters.transformers.tower import Noted, TowerCall, TowerReader, place_values
from mmod.adapters.transformers.vision import row_source, takes_rows
from mmod.blocks import Arguments, GridSource, ModelHook, RowSource, check_pixels, cut_patches
from mmod.blocks.passes import recomputing
from mmod.config import Score
from mmod.ops import FIRST
from mmod.threads import PerThread


class PixelsHook(ModelHook):
    """Hook of the patch embedding: notes the score of each patch.

    Args:
        score: A score that reads pixels.
        prefix: Leading tokens of the tower, which are no patches.
    """

    def __init__(self, score: Score, source: GridSource, prefix: int, noted: PerThread[Noted]) -> None:
        self.score = score
        self.std = source.std
        self.prefix = prefix
        self.noted = noted

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing before the call."""

    def after(self, module: Any, args: tuple[Any, ...], kwargs: Arguments, output: Any) -> None:
        """Note the scores; there is no output of a call that failed."""
        if output is None or recomputing():
            return
        (image_IHYX,) = args or kwargs.values()
        with torch.no_grad():
            score_IP, *_ = self.score.see(cut_patches(module, image_IHYX), self.std)
        self.noted.value.calls.append(TowerCall(F.pad(score_IP, (self.prefix, 0), value=FIRST), None))


class TowerPixels(TowerReader):
    """The largest score of the patches that an image token is made of, by a score of their pixels.

    Which patches those are is traced once for each layout of images, through tiles and ends of lines: each image token
    has a number, and for each of its binary digits, the gradient of all features whose number has a 1 there reaches the
    patches of these tokens. So the digits of a patch's gradients are the number of its token.

    Raises:
        ValueError: The model has no tower, or patches of its tower have no pixels of their own.
    """

    def __init__(self, entry: Any, score: Score) -> None:
        super().__init__(entry, f"router={score.name!r}", "amax", FIRST)
        source = self.stack.grid
        if source is None:
            raise ValueError(
                f"{self.option} needs patches whose place in the picture is known: the tower of a "
                f"{type(entry).__name__} shows no rows and columns of patches, as where pictures of several sizes are "
                "one sequence"
            )
        check_pixels(source, score, self.stack.names[0])
        self.embedding = source.module
        self.pixels = PixelsHook(score, source, self.stack.prefix, self.noted)

    @property
    def hooks(self) -> list[tuple[nn.Module, ModelHook]]:
        """All hooks that it needs, with their modules."""
        return [*super().hooks, (self.embedding, self.pixels)]

    def _try(self, entry: Any, name: str, arguments: Arguments, calls: list[TowerCall]) -> tuple[Tensor, int]:
        """Return the token of each patch (Q), -1 for none, and the number of tokens, by gradients."""
        # A layer that is checkpointed would recompute itself for what is saved here.
        plainly = torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)
        copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
        devices = {value.device for value in copied.values() if isinstance(value, Tensor) and value.is_cuda}
        starts: list[Tensor] = []
        # Dropout of the tower must not change what the user's next layer draws.
        drawn = torch.random.fork_rng(list(devices))
        with self._beginning(starts), drawn, torch.inference_mode(False), torch.no_grad(), plainly:
            output = getattr(entry, f"get_{name}_features")(**copied)
        features = getattr(output, "pooler_output", output)
        parts = [features] if isinstance(features, Tensor) else list(features)
        with torch.inference_mode(False), torch.enable_grad(), plainly:
            feature_TD = torch.cat([part.flatten(0, -2) for part in parts])
            if not starts or not feature_TD.requires_grad:
                raise ValueError(
                    f"{self.option} needs features with a gradient, those of this {type(entry).__name__} have none"
                )
            tokens = _tokens_of(entry, feature_TD, starts, self.option)
        return torch.cat([token_IP.flatten() for token_IP in tokens]), len(feature_TD)

    @contextmanager
    def _beginning(self, starts: list[Tensor]) -> Iterator[None]:
        """Context in which the graph begins at the layer's outputs, which are noted; the layer may be routed."""
        thread = threading.get_ident()

        def begin(module: nn.Module, args: Any, output: Any) -> Any:
            if threading.get_ident() != thread:
                return output
            first = output[0] if isinstance(output, tuple) else output
            start: Tensor = first.detach().requires_grad_()
            starts.append(start)
            # The layers before are traced without a graph; the caller's context ends this.
            torch.set_grad_enabled(True)
            return (start, *output[1:]) if isinstance(output, tuple) else start

        # Before the hook by which transformers collects hidden states.
        handle = self.layer.register_forward_hook(begin, prepend=True)
        try:
            yield
        finally:
            handle.remove()
            self.noted.value.take()


def _unchanged(value: Tensor) -> Tensor:
    return value


def _tokens_of(entry: nn.Module, feature_TD: Tensor, starts: list[Tensor], option: str) -> list[Tensor]:
    """Return the number of the image token that each patch belongs to, -1 for none (I, P), see `TowerPixels`."""
    weight_TD = torch.randn(feature_TD.shape, generator=torch.Generator().manual_seed(0)).to(feature_TD)

    def reached_by(chosen_T: Tensor) -> list[Tensor]:
        """Return which patches (I, P) some tokens are made of."""
        weights = weight_TD * chosen_T.unsqueeze(1)
        gradients = torch.autograd.grad(feature_TD, starts, weights, retain_graph=True, materialize_grads=True)
        return [(gradient != 0).any(-1) for gradient in gradients]

    number_T = torch.arange(len(feature_TD), device=feature_TD.device)
    found = [torch.zeros(start.shape[:-1], dtype=torch.long, device=start.device) for start in starts]
    used = reached_by(torch.ones_like(number_T))
    if not any(bool(reached_IP.any()) for reached_IP in used):
        raise ValueError(
            f"{option} follows image tokens to the tower's last layer that is used, and the features of this "
            f"{type(entry).__name__} come from elsewhere"
        )
    for digit in range((len(feature_TD) - 1).bit_length()):
        has_one_T = number_T >> digit & 1
        for token_IP, one_IP, zero_IP in zip(found, reached_by(has_one_T), reached_by(1 - has_one_T)):
            if bool((one_IP & zero_IP).any()):
                raise ValueError(
                    f"{option} needs image tokens that are made of patches of their own: in this "
                    f"{type(entry).__name__} a patch reaches several image tokens"
                )
            token_IP += one_IP.long() << digit
    return [token_IP.masked_fill(~reached_IP, -1) for token_IP, reached_IP in zip(found, used)]


class RowPixels:
    """The largest score of the patches that an image token is made of, where the model gets each patch as a row."""

    hooks: Sequence[tuple[nn.Module, ModelHook]] = ()

    def __init__(self, source: RowSource, score: Score) -> None:
        self.option = f"router={score.name!r}"
        self.score = score
        self.source = source
        # An option that does not fit these pictures is told of now and not in the first pass.
        score.see(torch.zeros(1, 1, 1, source.channels, 1), None)

    @torch.compiler.disable
    @torch.no_grad()
    def of(self, entry: nn.Module, kind_BN: Tensor, arguments: Arguments, copies: int) -> Tensor:
        """Return the scores of image tokens (B, N), the largest at all other tokens, see `TowerReader.of`."""
        score_BN = torch.full(kind_BN.shape, FIRST, device=kind_BN.device)
        for name, kind in KINDS.items():
            image_BN = kind_BN == kind
            if not bool(image_BN.any()):
                continue
            rows, grids = pixels_of(arguments, name), arguments.get(f"{name}_grid_thw")
            if rows is None or grids is None:
                raise ValueError(f"{self.option} reads the pixels of {name}s: pass them with {name}_grid_thw")
            if arguments.get(f"{name}_compression_mask") is not None:
                raise ValueError(f"{self.option} needs all tokens of a {name}, and {name}_compression_mask drops some")
            pictures = self.source.pictures(rows, grids, arguments.get(f"{name}_merge_sizes"))
            score_T = torch.cat([self._scores(pixels, side) for pixels, side in pictures])
            score_BN = torch.where(image_BN, place_values(score_T, image_BN, copies, FIRST), score_BN)
        return score_BN

    def _scores(self, pixels_BRCHE: Tensor, side: int) -> Tensor:
        """Return the scores of the tokens of a picture or of all frames of a video (T)."""
        rows, columns = pixels_BRCHE.shape[1:3]
        score_BN, *_ = self.score.see(pixels_BRCHE, None, frames=pixels_BRCHE.shape[0])
        return score_BN.unflatten(1, (rows // side, side, columns // side, side)).amax(dim=(2, 4)).flatten()


def pixel_scores(entry: nn.Module, score: Score) -> TowerPixels | RowPixels:
    """Return what scores the image tokens of a model by the pixels of their patches."""
    for module in entry.modules():
        if takes_rows(module):
            return RowPixels(row_source(module), score)
    return TowerPixels(entry, score)
