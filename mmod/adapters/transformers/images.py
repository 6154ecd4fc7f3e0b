"""Image and video tokens of a prompt, and the boundaries of frames.

Axes: B samples, N tokens, T image tokens or video tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# A keyword of the model's forward that marks image tokens.
IMAGES = "image_mask"
TEXT, IMAGE, VIDEO = 0, 1, 2
_KINDS = {"image": IMAGE, "video": VIDEO}
# Arguments with the features of all images, so that no frame is split between calls.
_PIXELS = {"image": ("pixel_values", "pixel_values_images"), "video": ("pixel_values_videos",)}
# Types of models that put one more token behind the frames of a video.
_ENDING_VIDEOS = ("llava_onevision",)


def checked_mask(name: str, mask_BN: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a mask of tokens if it has their shape."""
    if mask_BN.shape != shape:
        raise ValueError(f"{name} has shape {tuple(mask_BN.shape)}, the tokens have {tuple(shape)}")
    return mask_BN


class Frames(NamedTuple):
    """Boundaries of frames.

    Args:
        first_BN: True at the first token of every frame (B, N).
        apart_BN: True at image tokens outside frames, such as newlines (B, N).
        complete: No frame began in cached tokens.
    """

    first_BN: Tensor
    apart_BN: Tensor
    complete: bool


class ImageTokens:
    """Finds the image tokens of a model whose config names them; a text model's names none."""

    def __init__(self, config: Any) -> None:
        tokens = {kind: getattr(config, f"{name}_token_id", None) for name, kind in _KINDS.items()}
        self.ids = {kind: int(token) for kind, token in tokens.items() if token is not None}
        vision = getattr(config, "vision_config", None)
        self.merged = int(getattr(vision, "spatial_merge_size", 1))
        self.ends = int(getattr(config, "model_type", "") in _ENDING_VIDEOS)

    def kinds(self, module: nn.Module, arguments: Mapping[str, Any], mask_BN: Tensor | None) -> Tensor:
        """Return the modality of every token: 0 text, 1 image, 2 video (B, N).

        Args:
            mask_BN: The user's mask of image tokens, True or one of these numbers (B, N); or None.
        """
        ids_BN = arguments.get("input_ids")
        embeds_BND = arguments.get("inputs_embeds")
        kind_BN = arguments.get("mm_token_type_ids") if mask_BN is None and ids_BN is None else mask_BN
        shape = embeds_BND.shape[:2] if ids_BN is None else ids_BN.shape  # type: ignore[union-attr]
        if kind_BN is not None:
            return checked_mask("mm_token_type_ids" if mask_BN is None else IMAGES, kind_BN, shape).long()
        if ids_BN is not None:
            return sum((ids_BN == token) * kind for kind, token in self.ids.items())
        return self._kinds_of(module, embeds_BND)  # type: ignore[arg-type]

    def _kinds_of(self, module: nn.Module, embeds_BND: Tensor) -> Tensor:
        table: Any = module.get_input_embeddings()  # type: ignore[operator]
        kind_BN = torch.zeros(embeds_BND.shape[:2], dtype=torch.long, device=embeds_BND.device)
        for kind, token in self.ids.items():
            if not 0 <= token < table.num_embeddings:
                continue
            place: Tensor = table(torch.tensor(token, device=embeds_BND.device))
            kind_BN = kind_BN.masked_fill((embeds_BND == place.to(embeds_BND.device)).all(-1), kind)
        if not bool(kind_BN.any()):
            raise ValueError(
                "inputs_embeds have no embedding of an image token, so the image tokens are unknown: pass input_ids "
                f"or {IMAGES} (B, N), True at image tokens and all False if there are none"
            )
        return kind_BN

    def frames(
        self, arguments: Mapping[str, Any], kind_BN: Tensor, valid_BN: Tensor, segment_BN: Tensor | None = None
    ) -> Frames:
        """Return the boundaries of frames: from the model's grids, else every run of image tokens is a frame.

        Args:
            segment_BN: Sample of each token in rows that pack several (B, N); a frame ends with its sample.
        """
        loose_BN = kind_BN != TEXT
        first_BN, apart_BN = torch.zeros(2, *kind_BN.shape, dtype=torch.bool, device=kind_BN.device)
        for name, kind in _KINDS.items():
            modality_BN = kind_BN == kind
            tokens = int(modality_BN.sum())
            sizes = self._sizes(arguments, name, tokens) if tokens else None
            if sizes is not None:
                first_T, apart_T = _marks(sizes, tokens, kind_BN.device)
                first_BN = first_BN.masked_scatter(modality_BN, first_T)
                apart_BN = apart_BN.masked_scatter(modality_BN, apart_T)
                loose_BN = loose_BN & ~modality_BN
        before_BN = nn.functional.pad(kind_BN, (1, 0))[:, :-1]
        changes_BN = kind_BN != before_BN
        if segment_BN is not None:
            changes_BN = changes_BN | (segment_BN.diff(dim=1, prepend=segment_BN[:, :1]) != 0)
        first_BN = first_BN | (loose_BN & changes_BN)
        # A run at the beginning may continue a cached frame, unless the features of all images are passed.
        begins_BN = loose_BN & valid_BN & (valid_BN.cumsum(1) == 1)
        complete = any(_pixels(arguments, name) is not None for name in _PIXELS) or not bool(begins_BN.any())
        return Frames(first_BN, apart_BN, complete)

    def _sizes(self, arguments: Mapping[str, Any], name: str, tokens: int) -> list[int] | None:
        """Return the number of tokens of every frame, negative for tokens outside frames; None if unknown."""
        pixels = _pixels(arguments, name)
        if arguments.get(f"{name}_grid_thw") is not None:
            return self._sizes_of_grid(arguments, name, tokens)
        if name == "image" and pixels is not None and pixels.ndim == 4 and arguments.get("image_sizes") is None:
            # LLaVA: images of one size.
            return None if tokens % len(pixels) else [tokens // len(pixels)] * len(pixels)
        if name == "video" and pixels is not None and pixels.ndim == 5:
            # Frames of one size.
            videos, frames = pixels.shape[:2]
            size = (tokens // videos - self.ends) // frames
            if videos * (frames * size + self.ends) != tokens:
                raise ValueError(f"{videos} videos of {frames} frames each do not make {tokens} tokens")
            return [*[size] * frames, *[-1] * self.ends] * videos
        return None

    def _sizes_of_grid(self, arguments: Mapping[str, Any], name: str, tokens: int) -> list[int] | None:
        grid = arguments[f"{name}_grid_thw"].tolist()
        # VideoLLaMA 3 merges the patches of each image or video by a number of its own, and drops tokens of videos.
        merged = arguments.get(f"{name}_merge_sizes")
        sides = [self.merged] * len(grid) if merged is None else merged.tolist()
        sizes: list[int] = []
        for (time, height, width), side in zip(grid, sides, strict=True):
            sizes += [height * width // side**2] * time
        remains = arguments.get(f"{name}_compression_mask")
        if remains is not None:
            counts = [int(frame.sum()) for frame in remains.split(sizes)]
            sizes = [count for count in counts if count]
        if sum(sizes) == tokens:
            return sizes
        if name == "image" and arguments.get("video_grid_thw") is not None:
            # GLM-4.1V gives tokens of images and videos one id; text stands between frames.
            return None
        raise ValueError(f"{name}_grid_thw describes {sum(sizes)} tokens, the prompt has {tokens}")


def _pixels(arguments: Mapping[str, Any], name: str) -> Tensor | None:
    """Return the pixels of images or videos; None without any."""
    return next((arguments[key] for key in _PIXELS[name] if arguments.get(key) is not None), None)


def _marks(sizes: list[int], tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which tokens begin a frame, and which are outside frames (T)."""
    first_T, apart_T = torch.zeros(2, tokens, dtype=torch.bool)
    start = 0
    for size in sizes:
        (first_T if size > 0 else apart_T)[start] = True
        start += abs(size)
    return first_T.to(device), apart_T.to(device)
