"""What a screenshot costs Qwen's models at full width: few layers of random weights, dense and without duplicates.

Axes: P patches, T tokens of a prompt, R and C rows and columns of patches or tokens.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch import Tensor, nn

import mmod
from mmod.adapters.transformers.cache_base import cache_of
from mmod.analysis.memory import peak_bytes
from mmod.io.store import Store
from mmod.ops import find_duplicates
from scripts.pages_and_screens import sources
from scripts.pages_and_screens.browser import photograph
from scripts.pages_and_screens.rows import DENSE

MERGED = 2
"""Patches along a side of a token of the language model."""
IMAGE, VISION_START, VISION_END = 900, 901, 902
SMALL_VOCABULARY = 1000
BUILT = 2
"""Layers of the language model that are built."""
CPU = torch.device("cpu")
QUESTION = 40
"""Words of the prompt behind the image."""
WIDTH = 2000
"""Width of a window in CSS pixels."""
DUPLICATE = "duplicate"
_STD = 0.5


class Host(NamedTuple):
    """A model at full width with few layers.

    Args:
        patch: Side of a patch in pixels.
        layers: Layers of the whole model in the parts that are measured, "tower" and "language".
        config: Makes the config. Of the layers that it builds, as large a share sees windows as of the whole model's.
    """

    patch: int
    layers: Mapping[str, int]
    config: Callable[[], Any]


_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VISION_END + 1,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "tie_word_embeddings": False,
}


def _qwen25_vl() -> Any:
    text = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": BUILT,
        "vocab_size": SMALL_VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision = {
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "depth": 8,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7],
        "window_size": 112,
        "patch_size": 14,
    }
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_IDS)


def _qwen3_vl() -> Any:
    text = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": BUILT,
        "vocab_size": SMALL_VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    }
    vision = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "depth": 3,
        "out_hidden_size": 4096,
        "deepstack_visual_indexes": [1],
        "num_position_embeddings": 2304,
        "patch_size": 16,
    }
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **_IDS)


TITLES = {"tower": "tower", "language": "language model"}
COLUMNS = {
    "": "{}",
    "patches or image tokens": "{:,}",
    "kept %": "{:.0f}",
    "TFLOP, dense / left": "{:.0f} / {:.0f}",
    "CPU s, few layers": "{:.1f} / {:.1f}",
    "speed": "{:.2f}",
    "KV cache MB": "{:.0f} / {:.0f}",
    "peak GB, few layers": "{:.1f} / {:.1f}",
}
ROUTES = {"image": "pixelprune", "language": "pixelprune-language"}
HOSTS = {
    "Qwen3-VL 8B": Host(16, {"tower": 27, "language": 36}, _qwen3_vl),
    "Qwen2.5-VL 7B": Host(14, {"tower": 32, "language": 28}, _qwen25_vl),
}


def make(config: Any) -> Any:
    """Return a model of random weights in bfloat16."""
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()


def rows_of(picture: Image.Image, patch: int) -> tuple[Tensor, Tensor]:
    """Return the rows of a picture's patches as Qwen's image processor makes them, and the grid (1, 3)."""
    side = MERGED * patch
    columns, rows = picture.width // side, picture.height // side
    pixel_YXC = np.asarray(picture.convert("RGB"))[: rows * side, : columns * side]
    image = (torch.from_numpy(pixel_YXC.copy()).permute(2, 0, 1) / 255 - _STD) / _STD
    cut = image.view(3, rows, MERGED, patch, columns, MERGED, patch).permute(1, 4, 2, 5, 0, 3, 6)
    # A still picture is two equal frames.
    row_PF = cut.unsqueeze(5).expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(rows * columns * MERGED**2, -1)
    return row_PF, torch.tensor([[1, MERGED * rows, MERGED * columns]])


def prompt(picture: Image.Image, patch: int) -> dict[str, Tensor]:
    """Return a prompt of a picture and some words."""
    row_PF, grid = rows_of(picture, patch)
    tokens = len(row_PF) // MERGED**2
    words = torch.randint(3, IMAGE, (QUESTION,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = torch.tensor([[VISION_START, *[IMAGE] * tokens, VISION_END, *words]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": row_PF,
        "image_grid_thw": grid,
    }


def kept_rows(picture: Image.Image, patch: int) -> dict[str, Tensor]:
    """Return by part which patches a tower computes (R, C), and which image tokens a language model gets (R, C)."""
    pixel_YXC = torch.from_numpy(np.asarray(picture.convert("RGB")).copy()).float()
    rows, columns = (extent // (MERGED * patch) * MERGED for extent in pixel_YXC.shape[:2])
    cut = pixel_YXC[: rows * patch, : columns * patch].view(rows, patch, columns, patch, 3)
    patches = cut.permute(0, 2, 4, 1, 3).flatten(3).unsqueeze(0)
    kept = {}
    for part, cell, side in (("tower", 4, 1), ("language", None, MERGED)):
        stands_N = find_duplicates(patches, 0.0, cell, torch.ones(3)).stands_BN[0]
        own = (stands_N == torch.arange(len(stands_N))).view(rows // side, side, columns // side, side)
        kept[part] = own.any(3).any(1)
    return kept


def screenshots(driver: Any, folder: Path, scale: int) -> list[Path]:
    """Photograph a page of every package at 2,000 CSS pixels and some pixels for each; those that are there stay."""
    paths = []
    for number, page in enumerate(sources.pages(1)):
        path = folder / f"{number:03d}.png"
        if not path.exists():
            photograph(driver, sources.Page(page.address, WIDTH, page.split, 0.0), path, scale=scale)
        paths.append(path)
    return paths


def median_page(store: Store, scale: int, paths: Sequence[Path]) -> Path:
    """Return the page whose share of kept tokens of 28 pixels is the median; the store takes all shares."""

    def measured() -> list[float]:
        return [float(kept_rows(Image.open(path), 14)["language"].float().mean()) for path in paths]

    shares = store.once({"wide": "kept shares", "scale": scale}, measured)
    return sorted(zip(shares, paths))[len(paths) // 2][1]


class Seconds(NamedTuple):
    """CPU time of a prefill."""

    tower: float
    language: float


@contextmanager
def _timed(module: nn.Module, spent: list[float]) -> Iterator[None]:
    def begin(*_: Any) -> None:
        spent.append(-time.thread_time())

    def end(*_: Any) -> None:
        spent[-1] += time.thread_time()

    handles = module.register_forward_pre_hook(begin), module.register_forward_hook(end)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def prefill(model: Any, batch: Mapping[str, Tensor]) -> Seconds:
    """Run a prompt with a cache, and return the CPU time of its parts."""
    tower: list[float] = []
    language: list[float] = []
    with _timed(model.model.visual, tower), _timed(model.model.language_model, language):
        model(**batch, use_cache=True, logits_to_keep=1)
    return Seconds(sum(tower), sum(language))


def memory(model: Any, batch: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the bytes of the cache behind a prompt, and the peak of the pass beyond the weights."""
    caches: list[Any] = []
    peak = peak_bytes(lambda: caches.append(cache_of(model(**batch, use_cache=True, logits_to_keep=1))), CPU)
    return {"peak": peak, "cache": sum(map(_bytes_of, caches[0].layers))}


def _bytes_of(layer: Any) -> int:
    return sum(tensor.nbytes for tensor in (layer.keys, layer.values))


def flops(host: Host, part: str, kept_RC: Tensor, others: int = 0) -> float:
    """Return the FLOPs of all layers of a part: matrix products with weights, and attention among the rows of a window.

    Args:
        kept_RC: The patches or image tokens that are computed.
        others: Further tokens.
    """
    with torch.device("meta"):
        model: Any = transformers.AutoModelForImageTextToText.from_config(host.config())
    layers = layers_of(model, part)
    weights = sum(module.weight.numel() for module in layers[0].modules() if isinstance(module, nn.Linear))
    vision = model.config.vision_config
    rows = int(kept_RC.sum()) + others
    pairs: float = rows**2
    width = layers[0].self_attn.o_proj.in_features if part == "language" else vision.hidden_size
    if part == "tower" and hasattr(vision, "window_size"):
        in_windows = pairs_in_windows(kept_RC, vision.window_size // vision.patch_size)
        pairs = in_windows + len(vision.fullatt_block_indexes) / vision.depth * (pairs - in_windows)
    return host.layers[part] * (2 * rows * weights + 4 * pairs * width)


def pairs_in_windows(kept_RC: Tensor, side: int) -> int:
    """Return how many pairs of kept patches lie in the same window of a side in patches."""
    below, right = (-extent % side for extent in kept_RC.shape)
    window_RSCS = F.pad(kept_RC.long(), (0, right, 0, below)).unflatten(1, (-1, side)).unflatten(0, (-1, side))
    return int((window_RSCS.sum(dim=(1, 3)) ** 2).sum())


def layers_of(model: Any, part: str) -> nn.ModuleList:
    """Return the layers of a part that are built."""
    layers: nn.ModuleList = model.model.visual.blocks if part == "tower" else model.model.language_model.layers
    return layers


def identity(host: str, scale: int, row: str, figure: str) -> dict[str, Any]:
    """Return what a figure is of, as the store has it."""
    return {"wide": host, "scale": scale, "row": row, "figure": figure}


def measure(store: Store, name: str, scale: int, picture: Image.Image, rounds: int) -> None:
    """Put into the store what a prompt with a picture costs, dense and without duplicates, in turns."""
    host = HOSTS[name]
    batch = prompt(picture, host.patch)
    wanted = ["memory", *(f"round {number}" for number in range(rounds))]
    if all(identity(name, scale, row, figure) in store for row in (DENSE, DUPLICATE) for figure in wanted):
        return
    model = make(host.config())
    for figure in wanted:
        for row in (DENSE, DUPLICATE):
            if row == DUPLICATE:
                mmod.route_(model, **ROUTES)
            if figure == "memory":
                store.once(identity(name, scale, row, figure), lambda: memory(model, batch))
            else:
                store.once(identity(name, scale, row, figure), lambda: prefill(model, batch)._asdict())
            if row == DUPLICATE:
                mmod.undo_(model)


def lines_of(store: Store, name: str, scale: int, picture: Image.Image) -> list[list[Any]]:
    """Return a line for each part of a host: what it computes of a picture, and its cost as far as it is known."""
    host = HOSTS[name]
    kept_of = kept_rows(picture, host.patch)
    used = [store.get(identity(name, scale, row, "memory")) for row in (DENSE, DUPLICATE)]
    rounds = list[list[Any]]()
    while identity(name, scale, DUPLICATE, f"round {len(rounds)}") in store:
        rounds.append([store.get(identity(name, scale, row, f"round {len(rounds)}")) for row in (DENSE, DUPLICATE)])
    lines = list[list[Any]]()
    for part, layers in host.layers.items():
        kept_RC = kept_of[part]
        others = 0 if part == "tower" else QUESTION + 2
        line: list[Any] = [f"{name}, {TITLES[part]} of {layers} layers", kept_RC.numel()]
        line.append(100 * float(kept_RC.float().mean()))
        line.append([flops(host, part, rows, others) / 1e12 for rows in (torch.ones_like(kept_RC), kept_RC)])
        seconds = [[one[part] for one in of_row] for of_row in zip(*rounds)]
        line.append([float(np.median(of_row)) for of_row in seconds] if rounds else None)
        line.append(float(np.median([dense / left for dense, left in zip(*seconds)])) if rounds else None)
        known = part == "language" and used[0] is not None
        line.append([one["cache"] / BUILT * layers / 1e6 for one in used] if known else None)
        line.append([one["peak"] / 1e9 for one in used] if known else None)
        lines.append(line)
    return lines
