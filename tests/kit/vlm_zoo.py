"""Tiny random language and vision-language models of every family that can be routed, and prompts for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

import mmod

IMAGE, VIDEO, PAD, VOCABULARY = 90, 91, 0, 96
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD = {"head_dim": 8}
_WINDOWS = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}

# Name -> (config class, its changes). A name ends in -window where layers slide over fewer tokens than a prompt has.
LANGUAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", _HEAD),
    "mistral": ("MistralConfig", {"sliding_window": None, **_HEAD}),
    "mistral-window": ("MistralConfig", {"sliding_window": 9, **_HEAD}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "gemma": ("GemmaConfig", _HEAD),
    "gemma2": ("Gemma2Config", {**_HEAD, **_WINDOWS, "sliding_window": 9, "attn_implementation": "eager"}),
    "gemma3": ("Gemma3TextConfig", {**_HEAD, **_WINDOWS, "sliding_window": 9}),
}
JOINT = (
    *("llava", "llava-qwen2", "llava-mistral-window", "llava-next", "llava-onevision", "internvl"),
    *("smolvlm", "mistral3"),
    *("qwen2-vl", "qwen2.5-vl", "qwen3-vl"),
)
MERGED = ("internvl", "smolvlm", "mistral3")  # 6 x 6 patches, of which 2 x 2 become one image token
PATCHES = 9  # image tokens of one image, in every joint model but LLaVA-NeXT
FRAME = {"qwen2-vl": 9, "qwen2.5-vl": 9, "llava-onevision": 4}  # tokens of a frame of a video
LINEAR = mmod.RoutingConfig(router=mmod.score("linear", init_std=0.2), capacity=0.5, blocks=(1, 3))


def make_language(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Return a small causal language model whose every parameter matters."""
    torch.manual_seed(seed)
    return _lively(transformers.AutoModelForCausalLM.from_config(_text_config(name, changes)))


def _text_config(name: str, changes: dict[str, Any]) -> Any:
    kind, fields = LANGUAGE[name]
    config = getattr(transformers, kind)(
        **{**_SMALL, **{k: v for k, v in fields.items() if k != "attn_implementation"}}
    )
    for key, value in changes.items():
        setattr(config, key, value)
    if "attn_implementation" in fields:
        config._attn_implementation = fields["attn_implementation"]
    return config


def make_joint(name: str, seed: int = 0, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """Return a small vision-language model whose every parameter matters."""
    torch.manual_seed(seed)
    config = _joint_config(name, changes)
    config._attn_implementation = attention
    return _lively(transformers.AutoModelForImageTextToText.from_config(config))


def _joint_config(name: str, changes: dict[str, Any]) -> Any:
    if name.startswith("qwen"):
        kind = {"qwen2-vl": "Qwen2VLConfig", "qwen2.5-vl": "Qwen2_5_VLConfig", "qwen3-vl": "Qwen3VLConfig"}[name]
        vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 1}
        vision |= {"temporal_patch_size": 1, "in_channels": 3}
        if name == "qwen2-vl":
            vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
        elif name == "qwen3-vl":
            vision |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 9}
            vision |= {"deepstack_visual_indexes": [0, 1]}
        else:
            vision |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "window_size": 8}
            vision |= {"fullatt_block_indexes": [1]}
        text = {**_SMALL, **_MROPE, **(_HEAD if name == "qwen3-vl" else {}), **changes}
        return getattr(transformers, kind)(
            text_config=text,
            vision_config=vision,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=92,
            vision_end_token_id=93,
        )
    if name == "internvl":
        # 6 x 6 patches, of which 2 x 2 become one image token.
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision |= {"image_size": [24, 24], "patch_size": [4, 4]}
        text_config = _text_config("qwen2", changes)
        return transformers.InternVLConfig(text_config=text_config, vision_config=vision, image_token_id=IMAGE)
    if name == "smolvlm":
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision |= {"image_size": 24, "patch_size": 4}
        text = _text_config("llama", changes)
        return transformers.SmolVLMConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    if name == "mistral3":
        vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        vision |= {"num_attention_heads": 2, "head_dim": 8, "image_size": 24, "patch_size": 4}
        text = _text_config("mistral", changes)
        return transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_id=IMAGE)
    vision_type = "siglip_vision_model" if name == "llava-onevision" else "clip_vision_model"
    vision = {
        "model_type": vision_type,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "image_size": 12,
        "patch_size": 4,
    }
    families = {"llava": "llama", "llava-next": "mistral", "llava-onevision": "qwen2"}
    text_config = _text_config(families.get(name, name.removeprefix("llava-")), changes)
    common = {"text_config": text_config, "vision_config": vision, "image_token_index": IMAGE}
    if name == "llava-next":
        return transformers.LlavaNextConfig(**common, image_grid_pinpoints=[[12, 24], [24, 12], [24, 24]])
    if name == "llava-onevision":
        return transformers.LlavaOnevisionConfig(
            **common,
            video_token_index=VIDEO,
            image_grid_pinpoints=[[12, 12]],
            vision_feature_layer=-1,
            vision_aspect_ratio="anyres_max_9",
        )
    return transformers.LlavaConfig(**common)


def _lively(model: nn.Module) -> nn.Module:
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
    pixels, sizes, rows = _pixels(name, sum(images), generator)
    words = iter(torch.randint(3, IMAGE, (1000,), generator=generator).tolist())
    counts = iter(rows)
    samples: list[list[int]] = []
    for sample, number in enumerate(images):
        row = [1, *(next(words) for _ in range(2 + sample))]
        for _ in range(number):
            row += [IMAGE] * next(counts) + [next(words) for _ in range(3)]
        samples.append(row + [next(words) for _ in range(2)])
    batch = pad(samples, side)
    if pixels is not None:
        batch |= {"pixel_values": pixels, **sizes}
    if name.startswith("qwen"):
        batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return batch


def _pixels(name: str, images: int, generator: torch.Generator) -> tuple[Tensor | None, dict[str, Tensor], list[int]]:
    """Return pixels, what else the model wants with them, and the number of image tokens of every image."""
    if not images:
        return None, {}, []
    if name.startswith("qwen"):
        grid = torch.tensor([[1, 3, 3]] * images)
        return torch.randn(images * 9, 48, generator=generator), {"image_grid_thw": grid}, [PATCHES] * images
    if name == "llava-next":
        # A base view of 9, and two tiles of 3 x 3 with one more token at the end of each row.
        pixels = torch.randn(images, 3, 3, 12, 12, generator=generator)
        return pixels, {"image_sizes": torch.tensor([[12, 24]] * images)}, [9 + 3 * 7] * images
    if name == "llava-onevision":
        # Base view, one tile of the same size with a token at the end of each row.
        pixels = torch.randn(images, 2, 3, 12, 12, generator=generator)
        sizes = {"image_sizes": torch.tensor([[12, 12]] * images)}
        return pixels, sizes, [9 + 3 * 4] * images
    side = 24 if name in MERGED else 12
    pixels = torch.randn(images, 3, side, side, generator=generator)
    sizes = {"image_sizes": torch.tensor([[24, 24]] * images)} if name == "mistral3" else {}
    # SmolVLM takes the images of all samples as those of one.
    return pixels[None] if name == "smolvlm" else pixels, sizes, [PATCHES] * images


def video(name: str, videos: tuple[int, ...], frames: int = 4, seed: int = 1) -> dict[str, Any]:
    """Return a padded batch with one sample for each entry of `videos`, which says how many videos it has.

    Args:
        name: The joint model, of Qwen or LLaVA-OneVision, whose videos end in one more token.
        videos: Videos in each sample.
        frames: Frames of each video, of `FRAME[name]` tokens.
        seed: Of words and pictures.
    """
    generator = torch.Generator().manual_seed(seed)
    words = iter(torch.randint(3, IMAGE, (1000,), generator=generator).tolist())
    qwen = name.startswith("qwen")
    tokens = frames * FRAME[name] + (not qwen)
    rows = []
    for number in videos:
        rows.append([1])
        for _ in range(number):
            rows[-1] += [next(words), *[VIDEO] * tokens, next(words)]
    batch: dict[str, Any] = pad(rows)
    if qwen:
        batch["pixel_values_videos"] = torch.randn(sum(videos) * frames * 9, 48, generator=generator)
        batch["video_grid_thw"] = torch.tensor([[frames, 3, 3]] * sum(videos))
        batch["mm_token_type_ids"] = (batch["input_ids"] == VIDEO).long() * 2
    else:
        batch["pixel_values_videos"] = torch.randn(sum(videos), frames, 3, 12, 12, generator=generator)
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
