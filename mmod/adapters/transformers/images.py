"""Image and video tokens of a prompt, and the boundaries of frames.

Axes: B samples, N tokens, T image tokens or video tokens of the batch.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmod.blocks import Arguments, picture_sizes

# A keyword of the model's forward that marks image tokens.
IMAGES = "image_mask"
TEXT, IMAGE, VIDEO = 0, 1, 2
KINDS = {"image": IMAGE, "video": VIDEO}
# Arguments with the features of all images, so that no frame is split between calls.
_PIXELS = {"image": ("pixel_values", "pixel_values_images"), "video": ("pixel_values_videos",)}
# All arguments that describe frames.
LAYOUT = (
    *chain.from_iterable(_PIXELS.values()),
    *(f"{name}_grid_thw" for name in KINDS),
    *(f"{name}_merge_sizes" for name in KINDS),
    "image_sizes",
    "pixel_attention_mask",
    "batch_num_images",
)
# Types of models that put one more token behind the frames of a video.
_ENDING_VIDEOS = ("llava_onevision",)


def checked_mask(name: str, mask_BN: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a mask of tokens if it has their shape."""
    if mask_BN.shape != shape:
        raise ValueError(f"{name} has shape {tuple(mask_BN.shape)}, the tokens have {tuple(shape)}")
    return mask_BN


class Clip(NamedTuple):
    """An image, or a video frame by frame.

    Args:
        frames: Number of frames; 0 for tokens outside frames, such as newlines.
        tokens: Number of tokens in each frame; without frames, the number of all tokens.
    """

    frames: int
    tokens: int

    @property
    def total(self) -> int:
        """Number of tokens."""
        return max(self.frames, 1) * self.tokens


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

    def __init__(self, config: object) -> None:
        tokens = {kind: getattr(config, f"{name}_token_id", None) for name, kind in KINDS.items()}
        self.ids = {kind: int(token) for kind, token in tokens.items() if token is not None}
        vision = getattr(config, "vision_config", None)
        self.merged = int(getattr(vision, "spatial_merge_size", 1))
        self.ends = int(getattr(config, "model_type", "") in _ENDING_VIDEOS)

    def kinds(self, module: nn.Module, arguments: Arguments, mask_BN: Tensor | None) -> Tensor:
        """Return the modality of every token: 0 text, 1 image, 2 video (B, N).

        Args:
            mask_BN: The user's mask of image tokens, True or one of these numbers (B, N); or None.
        """
        ids_BN: Tensor | None = arguments.get("input_ids")
        source: Tensor = arguments["inputs_embeds"] if ids_BN is None else ids_BN
        samples, tokens = source.shape[:2]
        if mask_BN is not None:
            return checked_mask(IMAGES, mask_BN, (samples, tokens)).long()
        if ids_BN is not None:
            marks = ((ids_BN == token) * kind for kind, token in self.ids.items())
            return sum(marks, start=torch.zeros_like(ids_BN))
        types_BN: Tensor | None = arguments.get("mm_token_type_ids")
        if types_BN is not None:
            return checked_mask("mm_token_type_ids", types_BN, (samples, tokens)).long()
        return self._kinds_of(module, source)

    def _kinds_of(self, module: nn.Module, embeds_BND: Tensor) -> Tensor:
        table = module.get_input_embeddings()  # type: ignore[operator]
        kind_BN = torch.zeros(embeds_BND.shape[:2], dtype=torch.long, device=embeds_BND.device)
        for kind, token in self.ids.items():
            if not 0 <= token < table.num_embeddings:
                continue
            embedding_D: Tensor = table(torch.tensor(token, device=embeds_BND.device))
            kind_BN = kind_BN.masked_fill((embeds_BND == embedding_D.to(embeds_BND.device)).all(-1), kind)
        if not bool(kind_BN.any()):
            raise ValueError(
                "inputs_embeds have no embedding of an image token, so the image tokens are unknown: pass input_ids "
                f"or {IMAGES} (B, N), True at image tokens and all False if there are none"
            )
        return kind_BN

    def frames(
        self, arguments: Arguments, kind_BN: Tensor, valid_BN: Tensor, segment_BN: Tensor | None = None
    ) -> Frames:
        """Return the boundaries of frames: from the model's grids, else every run of image tokens is a frame.

        Args:
            segment_BN: Sample of each token in rows that pack several (B, N); a frame ends with its sample.
        """
        loose_BN = kind_BN != TEXT
        first_BN, apart_BN = torch.zeros(2, *kind_BN.shape, dtype=torch.bool, device=kind_BN.device)
        for name, kind in KINDS.items():
            modality_BN = kind_BN == kind
            tokens = int(modality_BN.sum())
            clips = self._clips(arguments, name, tokens) if tokens else None
            if clips is not None:
                first_T, apart_T = _marks(clips, tokens, kind_BN.device)
                first_BN = first_BN.masked_scatter(modality_BN, first_T)
                apart_BN = apart_BN.masked_scatter(modality_BN, apart_T)
                loose_BN = loose_BN & ~modality_BN
        first_BN = first_BN | (loose_BN & _begins(kind_BN, segment_BN))
        # A run at the beginning may continue a cached frame, unless the features of all images are passed.
        begins_BN = loose_BN & valid_BN & (valid_BN.cumsum(1) == 1)
        complete = has_pixels(arguments) or not bool(begins_BN.any())
        return Frames(first_BN, apart_BN, complete)

    def earlier(self, arguments: Arguments, kind_BN: Tensor, images: bool, segment_BN: Tensor | None = None) -> Tensor:
        """Return the index in its row of the token at the same position one frame earlier, -1 for none (B, N).

        Args:
            images: Successive images of a sample with equally many tokens are frames; otherwise those of videos alone.
            segment_BN: Sample of each token in rows that pack several (B, N).
        """
        earlier_BN = torch.full_like(kind_BN, -1)
        for name, kind in KINDS.items():
            modality_BN = kind_BN == kind
            row_T, position_T = modality_BN.nonzero(as_tuple=True)
            if not len(row_T) or (kind == IMAGE and not images):
                continue
            clips = self._clips(arguments, name, len(row_T))
            if clips is None and kind == VIDEO:
                raise ValueError("the frames of a video are unknown: pass video_grid_thw or pixel_values_videos")
            if clips is None:
                begins_T = _begins(kind_BN, segment_BN)[modality_BN]
                clips = [Clip(1, run) for run in (begins_T.cumsum(0) - 1).bincount().tolist()]
            before_T = _frame_before(clips).to(kind_BN.device)
            at_T = before_T.clamp(min=0)
            same_T = (before_T >= 0) & (row_T[at_T] == row_T)
            if segment_BN is not None:
                same_T = same_T & (segment_BN[modality_BN][at_T] == segment_BN[modality_BN])
            earlier_BN[modality_BN] = torch.where(same_T, position_T[at_T], -1)
        return earlier_BN

    def _clips(self, arguments: Arguments, name: str, tokens: int) -> list[Clip] | None:
        """Return the images, or the videos, that arguments describe, in order; None if unknown."""
        pixels = pixels_of(arguments, name)
        if arguments.get(f"{name}_grid_thw") is not None:
            return self._clips_of_grid(arguments, name, tokens)
        if name == "image" and pixels is not None and pixels.ndim == 4 and arguments.get("image_sizes") is None:
            # LLaVA: images of one size.
            if tokens % len(pixels):
                return None
            return [Clip(1, tokens // len(pixels))] * len(pixels)
        if name == "video" and pixels is not None and pixels.ndim == 5:
            # Frames of one size.
            videos, frames = pixels.shape[:2]
            size = (tokens // videos - self.ends) // frames
            if videos * (frames * size + self.ends) != tokens:
                raise ValueError(f"{videos} videos of {frames} frames each do not make {tokens} tokens")
            return [Clip(frames, size), *[Clip(0, 1)] * self.ends] * videos
        return None

    def _clips_of_grid(self, arguments: Arguments, name: str, tokens: int) -> list[Clip] | None:
        sizes = picture_sizes(arguments, self.merged, f"{name}_")
        clips = [Clip(size.frames, size.rows * size.columns // size.side**2) for size in sizes]
        described = sum(clip.total for clip in clips)
        if described == tokens:
            return clips
        if name == "image" and arguments.get("video_grid_thw") is not None:
            # GLM-4.1V gives tokens of images and videos one id; text stands between frames.
            return None
        raise ValueError(f"{name}_grid_thw describes {described} tokens, the prompt has {tokens}")


def pixels_of(arguments: Arguments, name: str) -> Tensor | None:
    """Return the pixels of images or videos; None without any."""
    return next((arguments[key] for key in _PIXELS[name] if arguments.get(key) is not None), None)


def has_pixels(arguments: Arguments) -> bool:
    """Return whether a call gets the pixels of images or videos."""
    return any(pixels_of(arguments, name) is not None for name in KINDS)


def _begins(kind_BN: Tensor, segment_BN: Tensor | None) -> Tensor:
    """Return where the modality changes, or the sample (B, N)."""
    before_BN = nn.functional.pad(kind_BN, (1, 0))[:, :-1]
    changes_BN = kind_BN != before_BN
    if segment_BN is not None:
        changes_BN = changes_BN | (segment_BN.diff(dim=1, prepend=segment_BN[:, :1]) != 0)
    return changes_BN


def _frame_before(clips: list[Clip]) -> Tensor:
    """Return the token at the same position one frame earlier (T), -1 for none.

    An image follows the image before if it has as many tokens.

    Example:
        >>> _frame_before([Clip(2, 2), Clip(0, 1), Clip(1, 1), Clip(1, 1)]).tolist()
        [-1, -1, 0, 1, -1, -1, 5]
    """
    before: list[Tensor] = []
    start = 0
    previous = Clip(0, 0)
    for clip in clips:
        earlier = torch.arange(start, start + clip.total) - clip.tokens
        follows = previous == clip == Clip(1, clip.tokens)
        if not follows:
            earlier = earlier.masked_fill(earlier < start, -1)
        before.append(earlier)
        start += clip.total
        previous = clip
    return torch.cat(before)


def _marks(clips: list[Clip], tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which tokens begin a frame, and which are outside frames (T)."""
    first_T, apart_T = torch.zeros(2, tokens, dtype=torch.bool)
    start = 0
    for clip in clips:
        end = start + clip.total
        if clip.frames:
            first_T[start : end : clip.tokens] = True
        else:
            apart_T[start:end] = True
        start = end
    return first_T.to(device), apart_T.to(device)
