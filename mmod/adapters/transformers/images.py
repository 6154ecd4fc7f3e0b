"""Which tokens of a prompt show images and videos, and where each frame of them begins.

Axes: B samples, N tokens, T tokens of one kind in the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# A keyword of the model's forward that says where images are.
IMAGES = "image_mask"
TEXT, IMAGE, VIDEO = 0, 1, 2
_KINDS = {"image": IMAGE, "video": VIDEO}
# What brings all features of the image tokens in the same call, and so no part of a frame alone.
_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


class Frames(NamedTuple):
    """Where frames are.

    Args:
        first_BN: True at the first token of every frame (B, N).
        apart_BN: True at tokens that belong to no frame (B, N).
        whole: No frame goes on from earlier tokens, which are cached already.
    """

    first_BN: Tensor
    apart_BN: Tensor
    whole: bool


class ImageTokens:
    """Finds the image tokens of a vision-language model.

    Args:
        config: The model's config; None where it sees no images.
    """

    def __init__(self, config: Any) -> None:
        found = {kind: getattr(config, f"{name}_token_id", None) for name, kind in _KINDS.items()}
        self.ids = {kind: int(token) for kind, token in found.items() if token is not None}
        vision = getattr(config, "vision_config", None)
        self.merged = int(getattr(vision, "spatial_merge_size", 1)) ** 2

    def kinds(self, module: nn.Module, given: Mapping[str, Any], mask_BN: Tensor | None) -> Tensor:
        """Return what each token shows: 0 text, 1 an image, 2 a video (B, N).

        Args:
            module: The module that was called.
            given: Its arguments by name.
            mask_BN: Where images are, as the user says (B, N), True or one of these numbers; None leaves it to others.

        Raises:
            ValueError: Nothing says where images are.
        """
        ids_BN, embeds_BND = given.get("input_ids"), given.get("inputs_embeds")
        told_BN = given.get("mm_token_type_ids") if mask_BN is None and ids_BN is None else mask_BN
        shape = embeds_BND.shape[:2] if ids_BN is None else ids_BN.shape  # type: ignore[union-attr]
        if told_BN is not None:
            if told_BN.shape != shape:
                name = IMAGES if mask_BN is not None else "mm_token_type_ids"
                raise ValueError(f"{name} has shape {tuple(told_BN.shape)}, the tokens have {tuple(shape)}")
            return told_BN.long()
        if ids_BN is not None:
            return sum((ids_BN == token) * kind for kind, token in self.ids.items())
        return self._kinds_of(module, embeds_BND)  # type: ignore[arg-type]

    def _kinds_of(self, module: nn.Module, embeds_BND: Tensor) -> Tensor:
        table: nn.Module = module.get_input_embeddings()  # type: ignore[operator]
        kind_BN = torch.zeros(embeds_BND.shape[:2], dtype=torch.long, device=embeds_BND.device)
        for kind, token in self.ids.items():
            place: Tensor = table(torch.tensor(token, device=embeds_BND.device))
            kind_BN = kind_BN.masked_fill((embeds_BND == place.to(embeds_BND.device)).all(-1), kind)
        if not bool(kind_BN.any()):
            raise ValueError(
                "inputs_embeds hold no embedding of an image token, so nothing says which of them show an image: give "
                f"input_ids, or {IMAGES} (B, N), True at image tokens and all False where there are none"
            )
        return kind_BN

    def frames(self, given: Mapping[str, Any], kind_BN: Tensor, valid_BN: Tensor) -> Frames:
        """Return where frames are: as the model's grids say, else every unbroken run of image tokens is one.

        Args:
            given: The arguments of the module that was called, by name.
            kind_BN: What each token shows (B, N).
            valid_BN: False where a token is padding (B, N).

        Raises:
            ValueError: A grid that describes another number of tokens.
        """
        loose_BN = kind_BN != TEXT
        first_BN, apart_BN = torch.zeros(2, *kind_BN.shape, dtype=torch.bool, device=kind_BN.device)
        for name, kind in _KINDS.items():
            own_BN = kind_BN == kind
            tokens = int(own_BN.sum())
            sizes = self._sizes(given, name, tokens) if tokens else None
            if sizes is not None:
                first_T, apart_T = _marks(sizes, tokens, kind_BN.device)
                first_BN = first_BN.masked_scatter(own_BN, first_T)
                apart_BN = apart_BN.masked_scatter(own_BN, apart_T)
                loose_BN = loose_BN & ~own_BN
        before_BN = nn.functional.pad(kind_BN, (1, 0))[:, :-1]
        first_BN = first_BN | (loose_BN & (kind_BN != before_BN))
        # A run at the very beginning may be the rest of a frame, unless the features of whole images come with it.
        begins_BN = loose_BN & valid_BN & (valid_BN.cumsum(1) == 1)
        whole = any(given.get(name) is not None for name in _PIXELS.values()) or not bool(begins_BN.any())
        return Frames(first_BN, apart_BN, whole)

    def _sizes(self, given: Mapping[str, Any], name: str, tokens: int) -> list[int] | None:
        """Return the tokens of each frame, negative where they belong to none; None where nothing says."""
        grid, pixels = given.get(f"{name}_grid_thw"), given.get(_PIXELS[name])
        if grid is not None:
            sizes = [height * width // self.merged for time, height, width in grid.tolist() for _ in range(time)]
            if sum(sizes) != tokens:
                raise ValueError(f"{name}_grid_thw describes {sum(sizes)} tokens, the prompt has {tokens}")
            return sizes
        if name == "image" and pixels is not None and pixels.ndim == 4 and given.get("image_sizes") is None:
            # LLaVA: images of one size.
            return None if tokens % len(pixels) else [tokens // len(pixels)] * len(pixels)
        if name == "video" and pixels is not None and pixels.ndim == 5:
            # LLaVA-OneVision: frames of one size, and a newline behind each video.
            videos, frames = pixels.shape[:2]
            size = (tokens // videos - 1) // frames
            if videos * (frames * size + 1) != tokens:
                raise ValueError(f"{videos} videos of {frames} frames each do not make {tokens} tokens")
            return [*[size] * frames, -1] * videos
        return None


def _marks(sizes: list[int], tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which tokens begin a frame, and which belong to none (T)."""
    first_T, apart_T = torch.zeros(2, tokens, dtype=torch.bool)
    start = 0
    for size in sizes:
        (first_T if size > 0 else apart_T)[start] = True
        start += abs(size)
    return first_T.to(device), apart_T.to(device)
