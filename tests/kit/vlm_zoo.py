"""Tiny random language and vision-language models of every family that can be routed, and prompts for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import mmod
from tests.kit.made import made_once
from tests.kit.vlm_types import (
    EAGER,
    FAMILIES,
    HEAD,
    IMAGE,
    PAD,
    SMALL,
    VIDEO,
    WINDOWS,
    config_of,
    pictures_of,
)

# Name -> (config class, its changes). A name ends in -window where layers slide over fewer tokens than a prompt has.
LANGUAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", HEAD),
    "mistral": ("MistralConfig", {"sliding_window": None, **HEAD}),
    "mistral-window": ("MistralConfig", {"sliding_window": 9, **HEAD}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "gemma": ("GemmaConfig", HEAD),
    "gemma2": ("Gemma2Config", {**HEAD, **WINDOWS, "attn_implementation": "eager"}),
    "gemma3": ("Gemma3TextConfig", {**HEAD, **WINDOWS}),
}
# Name -> (type of transformers, language model in `LANGUAGE`, None for the type's own).
JOINT: dict[str, tuple[str, str | None]] = {
    "llava": ("llava", "llama"),
    "llava-qwen2": ("llava", "qwen2"),
    "llava-mistral-window": ("llava", "mistral-window"),
    "llava-next": ("llava_next", "mistral"),
    "llava-onevision": ("llava_onevision", "qwen2"),
    "internvl": ("internvl", "qwen2"),
    "smolvlm": ("smolvlm", "llama"),
    "mistral3": ("mistral3", "mistral"),
    "qwen2-vl": ("qwen2_vl", None),
    "qwen2.5-vl": ("qwen2_5_vl", None),
    "qwen3-vl": ("qwen3_vl", None),
    "gemma3-vision": ("gemma3", None),
    "paligemma": ("paligemma", None),
}
# Types of transformers that stand for no name above, and that the installed version knows.
OTHERS = tuple(kind for kind in FAMILIES if kind in CONFIG_MAPPING and kind not in [kind for kind, _ in JOINT.values()])
# Those whose decoder layers have other arguments, branches, norms behind them or attention than every name above: mmod
# reads nothing else of a layer, so the layers of all other types take the way of one of these or of one above.
APART = tuple(
    kind
    for kind in OTHERS
    if kind
    in (
        "aya_vision",
        "exaone4_5",
        "gemma4",
        "gemma4_unified",
        "glm4v",
        "hyperclovax_vision_v2",
        "kimi_k25",
        "molmo2",
        "qwen3_5",
        "qwen3_vl_moe",
    )
)
# Those whose image tokens know no pixels of their own: patches in no known order, mixed or in maps, tiles, prompts of
# another form, layers with a state, a tower for videos.
WITHOUT_PIXELS = (
    *("mistral3", "cosmos3_edge", "kimi_k25", "lighton_ocr", "paddleocr_vl"),
    *("llava-next", "llava-onevision", "llava_next_video"),
    *("aria", "idefics2", "deepseek_vl_hybrid", "fast_vlm", "got_ocr2", "pp_chart2table", "granite_docling"),
    *("gemma4", "gemma4_unified", "molmo2", "qwen3_5", "qwen3_5_moe", "video_llava"),
)
# Names of models whose layers slide over fewer tokens than a prompt has.
SLIDING = (
    "-window",
    "gemma3",
    "gemma3-vision",
    "aya_vision",
    "cohere2_vision",
    "exaone4_5",
    "gemma4",
    "gemma4_unified",
)
MERGED = ("internvl", "idefics3", "smolvlm", "mistral3")  # 6 x 6 patches, of which 2 x 2 become one image token
PATCHES = 9  # image tokens of one image, in every joint model but LLaVA-NeXT
# Tokens of a frame of a video.
FRAME = {
    "qwen2-vl": 9,
    "qwen2.5-vl": 9,
    "llava-onevision": 4,
    "llava_next_video": 9,
    "video_llava": 10,
    "video_llama_3": 9,
}
# Changes that give Mistral 3 the text model of Ministral 3, which scales queries by their positions.
MINISTRAL: dict[str, Any] = {
    "model_type": "ministral3",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 4,
        "llama_4_scaling_beta": 0.7,
    },
}
LINEAR = mmod.RoutingConfig(router=mmod.score("linear", init_std=0.2), capacity=0.5, blocks=(1, 3))


@made_once
def make_language(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Return a small causal language model whose every parameter matters."""
    torch.manual_seed(seed)
    return lively(transformers.AutoModelForCausalLM.from_config(_text_config(name, changes)))


def _text_config(name: str, changes: dict[str, Any]) -> Any:
    kind, fields = LANGUAGE[name]
    config = getattr(transformers, kind)(**{**SMALL, **{k: v for k, v in fields.items() if k != "attn_implementation"}})
    for key, value in changes.items():
        setattr(config, key, value)
    if "attn_implementation" in fields:
        config._attn_implementation = fields["attn_implementation"]
    return config


@made_once
def make_joint(name: str, seed: int = 0, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """Return a small vision-language model whose every parameter matters, by its name or its type of transformers."""
    torch.manual_seed(seed)
    kind, language = type_of(name)
    text = None if language is None or "model_type" in changes else _text_config(language, changes)
    config = config_of(kind, text, **changes)
    config._attn_implementation = {"": "eager", "text_config": attention} if kind in EAGER else attention
    # The grouped product of experts takes no float64.
    config._experts_implementation = "eager"
    return lively(transformers.AutoModelForImageTextToText.from_config(config))


def type_of(name: str) -> tuple[str, str | None]:
    """Return the type of a joint model and the name of its language model; names like "llava-gemma2" need no entry."""
    family, _, language = name.partition("-")
    return JOINT.get(name) or ((family, language) if language in LANGUAGE else (name, None))


def lively(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval()


def prompt(name: str, images: tuple[int, ...], seed: int = 1, side: str = "left") -> dict[str, Any]:
    """Return a padded batch with one sample for each entry of `images`, which says how many images it has.

    Args:
        name: The joint model.
        images: Images in each sample.
        seed: Of words and pictures.
        side: Where padding stands.
    """
    generator = torch.Generator().manual_seed(seed)
    kind, _ = type_of(name)
    pictures = FAMILIES[kind].pictures
    given = pictures_of(kind, sum(images), generator) if sum(images) else {}
    words = iter(torch.randint(3, IMAGE, (1000,), generator=generator).tolist())
    samples: list[list[int]] = []
    for sample, number in enumerate(images):
        row = [1, *(next(words) for _ in range(2 + sample))]
        for _ in range(number):
            row += [IMAGE] * pictures.tokens + [next(words) for _ in range(3)]
        samples.append(row + [next(words) for _ in range(2)])
    batch = {**pad(samples, side), **given}
    if pictures.kinds is not None:
        argument, at_text, at_image = pictures.kinds
        batch[argument] = torch.where(batch["input_ids"] == IMAGE, at_image, at_text)
    return batch


def sample_of(batch: dict[str, Any], row: int, counts: tuple[int, ...]) -> dict[str, Any]:
    """Return one sample of a padded batch without its padding.

    Args:
        batch: What `prompt` or `video` returned.
        row: Which sample.
        counts: Images or videos of each sample.
    """
    shape, real = batch["input_ids"].shape, batch["attention_mask"][row].bool()
    first, count = sum(counts[:row]), counts[row]
    alone = {}
    for name, values in batch.items():
        if values.shape == shape:
            alone[name] = values[row : row + 1, real]
        elif count and len(values) == 1:
            # Idefics 3 and SmolVLM take pictures with an axis of samples in front.
            alone[name] = values[:, first : first + count]
        elif count:
            rows = len(values) // sum(counts)
            alone[name] = values[first * rows : (first + count) * rows]
    return alone


def video(name: str, videos: tuple[int, ...], frames: int = 4, seed: int = 1) -> dict[str, Any]:
    """Return a padded batch with one sample for each entry of `videos`, which says how many videos it has.

    Args:
        name: The joint model, in `FRAME`; videos of LLaVA-OneVision end in one more token.
        videos: Videos in each sample.
        frames: Frames of each video, of `FRAME[name]` tokens.
        seed: Of words and pictures.
    """
    generator = torch.Generator().manual_seed(seed)
    words = iter(torch.randint(3, IMAGE, (1000,), generator=generator).tolist())
    by_grid = name.startswith(("qwen", "video_llama"))
    tokens = frames * FRAME[name] + (name == "llava-onevision")
    rows = []
    for number in videos:
        rows.append([1])
        for _ in range(number):
            rows[-1] += [next(words), *[VIDEO] * tokens, next(words)]
    batch: dict[str, Any] = pad(rows)
    if by_grid:
        batch["pixel_values_videos"] = torch.randn(sum(videos) * frames * 9, 48, generator=generator)
        batch["video_grid_thw"] = torch.tensor([[frames, 3, 3]] * sum(videos))
    else:
        batch["pixel_values_videos"] = torch.randn(sum(videos), frames, 3, 12, 12, generator=generator)
    if name.startswith("qwen"):
        batch["mm_token_type_ids"] = (batch["input_ids"] == VIDEO).long() * 2
    if name == "video_llama_3":
        batch["video_merge_sizes"] = torch.ones(sum(videos), dtype=torch.long)
    return batch


def merged_embeddings(model: Any, batch: dict[str, Any]) -> Tensor:
    """Return the embeddings of a prompt with the features of its images in place of their tokens."""
    captured: list[Tensor] = []

    def look(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        captured.append(options["inputs_embeds"])

    text = model.model.get_submodule("text_model" if hasattr(model.model, "text_model") else "language_model")
    handle = text.register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        model(**batch)
    handle.remove()
    return captured[0]


def pad(samples: list[list[int]], side: str = "left") -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask` of samples of different lengths."""
    longest = max(map(len, samples))
    rows, masks = [], []
    for row in samples:
        gap = longest - len(row)
        before, after = (gap, 0) if side == "left" else (0, gap)
        rows.append([PAD] * before + row + [PAD] * after)
        masks.append([0] * before + [1] * len(row) + [0] * after)
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def words(samples: int = 2, tokens: int = 20) -> dict[str, Tensor]:
    """Return random samples without images, each five tokens shorter than the one before, padded."""
    rows = torch.randint(3, IMAGE, (samples, tokens)).tolist()
    return pad([row[: tokens - 5 * place] for place, row in enumerate(rows)])


def random_words(*shape: int) -> Tensor:
    """Return the same words for the same shape, none of them an image."""
    return torch.randint(3, 80, shape, generator=torch.Generator().manual_seed(7))
