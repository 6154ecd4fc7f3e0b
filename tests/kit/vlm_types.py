"""The image-text-to-text types of transformers that are routed: a tiny config of each, and pictures for it."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

IMAGE, VIDEO, PAD, VOCABULARY = 90, 91, 0, 96
SMALL: dict[str, Any] = {
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
HEAD = {"head_dim": 8}
WINDOWS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 9,
}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_HYBRID = {
    **_SECTIONS,
    "layer_types": ["full_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_PER_LAYER = {**WINDOWS, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY}
_AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 8}
_AUDIO |= {"output_dim": 32}

_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_PLAIN = {**_TOWER, "image_size": 12, "patch_size": 4}
# 6 x 6 patches, of which 2 x 2 become one image token.
_MERGED = {**_TOWER, "image_size": 24, "patch_size": 4}
_CLIP = {**_PLAIN, "num_hidden_layers": 4, "model_type": "clip_vision_model"}
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model"}
_PIXTRAL = {**_MERGED, "model_type": "pixtral", **HEAD}
_INTERN = {**_TOWER, "image_size": [24, 24], "patch_size": [4, 4]}
_GEMMA = {**_TOWER, "model_type": "gemma4_vision", "num_key_value_heads": 2, **HEAD, "patch_size": 4}
_SAM = {"num_hidden_layers": 2, "patch_size": 4, "mlp_dim": 24, "output_channels": 8, "global_attn_indexes": [1]}
_SAM |= {"hidden_size": 16, "num_attention_heads": 2, "window_size": 2}
_PATCHES = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 1, "temporal_patch_size": 1}
_PATCHES |= {"in_channels": 3}
_GRID = {**_PATCHES, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
_WINDOWED = {**_GRID, "depth": 4, "window_size": 8, "fullatt_block_indexes": [1, 3]}
_DEEP = {**_GRID, "num_position_embeddings": 9, "deepstack_visual_indexes": [0, 1]}
_CORE = {"embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": [12, 12], "patch_size": 4}
_CORE |= {"use_post_transformer_norm": False}

_PINPOINTS = {"image_grid_pinpoints": [[12, 24], [24, 12], [24, 24]]}
_IMAGE = {"image_token_id": IMAGE}
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
_MARKED = {**_IDS, "vision_start_token_id": 92, "vision_end_token_id": 93}


class Pictures(NamedTuple):
    """What a model takes for one image.

    Args:
        pixels: Shape of its pixels.
        tokens: Its image tokens.
        rows: Arguments of all images whose rows are concatenated instead of stacked.
        together: Images of all samples are passed as those of one.
        given: Other arguments of an image; a tuple is the shape of random values.
        kinds: Argument that marks image tokens, and its values at text and at image tokens.
        name: Argument of the pixels.
    """

    pixels: tuple[int, ...] = (3, 12, 12)
    tokens: int = 9
    rows: tuple[str, ...] = ()
    together: bool = False
    given: dict[str, Any] | None = None
    kinds: tuple[str, int, int] | None = None
    name: str = "pixel_values"


class Family(NamedTuple):
    """Fields of a type's config that are not the library's defaults: of the text config, the tower's, and its own."""

    text: dict[str, Any]
    vision: dict[str, Any]
    fields: dict[str, Any]
    pictures: Pictures = Pictures()


# A base view of 9, and two tiles of 3 x 3 with one more token at the end of each row.
_TILES = Pictures((3, 3, 12, 12), 9 + 3 * 7, given={"image_sizes": [12, 24]})
# A base view, and one tile of the same size with a token at the end of each row.
_ONE_TILE = Pictures((2, 3, 12, 12), 9 + 3 * 4, given={"image_sizes": [12, 12]})
_LARGE = Pictures((3, 24, 24))
_SIZED = Pictures((3, 24, 24), given={"image_sizes": [24, 24]})
_ONE_SAMPLE = Pictures((3, 24, 24), together=True)
_ROWS = Pictures((9, 48), rows=("pixel_values",), given={"image_grid_thw": [1, 3, 3]})
_TYPED = _ROWS._replace(kinds=("mm_token_type_ids", 0, 1))
# Image tokens see each other in Gemma 3, all tokens of type 0 in PaliGemma.
_BLOCKS = Pictures(kinds=("token_type_ids", 0, 1))
_PREFIX = Pictures(kinds=("token_type_ids", 1, 0))

FAMILIES: dict[str, Family] = {
    "aria": Family(
        {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        {**_PLAIN, "model_type": "idefics3_vision"},
        {"image_token_index": IMAGE, "projector_patch_to_query_dict": {9: 4}},
        Pictures(tokens=4),
    ),
    "aya_vision": Family(WINDOWS, _SIGLIP, {"image_token_index": IMAGE, "downsample_factor": 1}),
    "cohere2_vision": Family(WINDOWS, _SIGLIP, {**_IMAGE, "downsample_factor": 1}),
    "cosmos3_edge": Family(_SECTIONS, _GRID, _IDS, _TYPED),
    "cosmos3_omni": Family(_SECTIONS, _GRID, _IDS, _TYPED),
    "deepseek_vl": Family({}, _SIGLIP, _IMAGE),
    "deepseek_vl_hybrid": Family(
        {},
        _SIGLIP,
        {**_IMAGE, "high_res_vision_config": {**_SAM, "image_size": 32}},
        Pictures(given={"high_res_pixel_values": (3, 32, 32)}),
    ),
    "exaone4_5": Family(WINDOWS, {**_WINDOWED, "num_key_value_heads": 2}, _IDS, _ROWS),
    "fast_vlm": Family(
        {},
        {"architecture": "test_convnext", "hidden_size": 64},
        {"image_token_index": IMAGE},
        Pictures((3, 96, 96)),
    ),
    "gemma3": Family(WINDOWS, _SIGLIP, {"image_token_index": IMAGE, "mm_tokens_per_image": 9}, _BLOCKS),
    "gemma4": Family(
        {**_PER_LAYER, "global_head_dim": 16, "use_bidirectional_attention": "vision"},
        {**_GEMMA, "pooling_kernel_size": 2},
        _IDS,
        Pictures(
            (36, 48),
            given={"image_position_ids": [[place // 6, place % 6] for place in range(36)]},
            kinds=("mm_token_type_ids", 0, 1),
        ),
    ),
    "gemma4_unified": Family(
        _PER_LAYER,
        {
            **_TOWER,
            "model_type": "gemma4_vision",
            "num_key_value_heads": 2,
            **HEAD,
            "patch_size": 4,
            "pooling_kernel_size": 1,
        },
        _IDS,
        Pictures((9, 48), given={"image_position_ids": [[place // 3, place % 3] for place in range(9)]}),
    ),
    "kimi_k25": Family(
        {
            **_EXPERTS,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "head_dim": 4,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
        {**_TOWER, "patch_size": 4, "merge_kernel_size": [1, 1], "pos_emb_height": 4, "pos_emb_width": 4},
        {**_MARKED, "projection_hidden_size": 16},
        _ROWS._replace(pixels=(9, 3, 4, 4)),
    ),
    "molmo2": Family(
        {"additional_vocab_size": 4},
        {**_PLAIN, "image_size": [12, 12], **HEAD, "num_key_value_heads": 2},
        {
            "image_patch_id": IMAGE,
            "adapter_config": {
                "vision_feature_layer": [1, 0],
                "hidden_size": 16,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "intermediate_size": 24,
                "text_hidden_size": 32,
            },
        },
        Pictures(
            (9, 48),
            4,
            rows=("image_token_pooling",),
            given={
                "image_token_pooling": [[0, 1], [2, 3], [4, 5], [6, 7]],
                "image_grids": [2, 2, 0, 0],
                "image_num_crops": 1,
            },
            kinds=("mm_token_type_ids", 0, 1),
        ),
    ),
    "qwen2_5_omni_thinker": Family(
        _SECTIONS,
        _WINDOWED,
        {
            **_MARKED,
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "audio_token_index": 94,
            "audio_config": _AUDIO,
        },
        _ROWS,
    ),
    "qwen3_omni_moe_thinker": Family(
        {**_SECTIONS, **_EXPERTS, "num_experts": 4},
        _DEEP,
        {**_MARKED, "audio_token_id": 94, "audio_config": {**_AUDIO, "downsample_hidden_size": 8}},
        _ROWS,
    ),
    "glm46v": Family(_SECTIONS, {**_GRID, "image_size": 12}, _MARKED, _TYPED),
    "glm4v": Family(_SECTIONS, {**_GRID, "image_size": 12}, _MARKED, _TYPED),
    "glm4v_moe": Family(
        {**_SECTIONS, **_EXPERTS, "head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        {**_GRID, "image_size": 12},
        _MARKED,
        _TYPED,
    ),
    "glm_ocr": Family(_SECTIONS, {**_GRID, "image_size": 12}, _MARKED, _TYPED),
    "glmga": Family(_SECTIONS, {**_GRID, "image_size": 12}, _MARKED, _TYPED),
    "got_ocr2": Family({}, {**_SAM, "image_size": 64}, {"image_token_index": IMAGE}, Pictures((3, 64, 64), 16)),
    "granite_docling": Family(
        {},
        {**_MERGED, "out_hidden_size": 32, "scale_factor": 2, "deepstack_visual_indexes": [0, 1]},
        {**_IMAGE, "fine_image_token_id": 95},
        _ONE_SAMPLE._replace(given={"pixel_attention_mask": True}),
    ),
    "hyperclovax_vision_v2": Family({}, _WINDOWED, _IDS, _ROWS),
    "idefics2": Family(
        {},
        _PLAIN,
        {
            **_IMAGE,
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 3,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 8,
                "num_key_value_heads": 1,
            },
        },
        Pictures(tokens=3, together=True),
    ),
    "idefics3": Family({}, _MERGED, _IMAGE, _ONE_SAMPLE),
    "internvl": Family({}, _INTERN, _IMAGE, _LARGE),
    "janus": Family(
        {},
        {**_PLAIN, "projection_dim": 32, "num_image_tokens": 9},
        {
            **_IMAGE,
            "vq_config": {
                "embed_dim": 4,
                "num_embeddings": 8,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "num_patches": 3,
                "projection_dim": 16,
                "image_token_embed_dim": 16,
            },
        },
    ),
    "lighton_ocr": Family({}, _PIXTRAL, _IMAGE, _SIZED),
    "llava": Family({}, _CLIP, {"image_token_index": IMAGE}),
    "llava_next": Family({}, _CLIP, {"image_token_index": IMAGE, **_PINPOINTS}, _TILES),
    "llava_next_video": Family(
        {},
        _CLIP,
        {"image_token_index": IMAGE, "video_token_index": VIDEO, **_PINPOINTS, "spatial_pool_stride": 1},
        _TILES,
    ),
    "llava_onevision": Family(
        {},
        _SIGLIP,
        {
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "image_grid_pinpoints": [[12, 12]],
            "vision_feature_layer": -1,
            "vision_aspect_ratio": "anyres_max_9",
        },
        _ONE_TILE,
    ),
    "mistral3": Family({}, _PIXTRAL, _IMAGE, _SIZED),
    "ovis2": Family(
        {},
        {**_PLAIN, "vocab_size": 12, "num_visual_indicator_tokens": 2},
        {**_IMAGE, "visual_indicator_token_ids": [93, 94], "hidden_size": 32, "vocab_size": VOCABULARY},
    ),
    "paddleocr_vl": Family(
        _SECTIONS, {**_MERGED, "spatial_merge_size": 1}, _MARKED, _TYPED._replace(pixels=(9, 3, 4, 4))
    ),
    "paligemma": Family({}, _SIGLIP, {"image_token_index": IMAGE, "projection_dim": 32}, _PREFIX),
    "perception_lm": Family(
        {},
        {"architecture": "vit_pe_core_tiny_patch16_384", "do_pooling": False, "model_args": _CORE},
        _IDS,
        Pictures((1, 3, 12, 12)),
    ),
    "pp_chart2table": Family({}, {**_SAM, "image_size": 64}, {"image_token_index": IMAGE}, Pictures((3, 64, 64), 16)),
    "qianfan_ocr": Family({}, _INTERN, _IMAGE, _LARGE),
    "qwen2_5_vl": Family(_SECTIONS, _WINDOWED, _MARKED, _TYPED),
    "qwen2_vl": Family(_SECTIONS, {**_PATCHES, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, _MARKED, _TYPED),
    "qwen3_5": Family(_HYBRID, {**_GRID, "num_position_embeddings": 9}, _MARKED, _TYPED),
    "qwen3_5_moe": Family(
        {**_HYBRID, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
        {**_GRID, "num_position_embeddings": 9},
        _MARKED,
        _TYPED,
    ),
    "qwen3_vl": Family({**_SECTIONS, **HEAD}, _DEEP, _MARKED, _TYPED),
    "qwen3_vl_moe": Family({**_SECTIONS, **HEAD, **_EXPERTS, "num_experts": 4}, _DEEP, _MARKED, _TYPED),
    "smolvlm": Family({}, _MERGED, _IMAGE, _ONE_SAMPLE),
    "video_llama_3": Family(
        {},
        {**_TOWER, "patch_size": 4},
        _IDS,
        _ROWS._replace(given={"image_grid_thw": [1, 3, 3], "image_merge_sizes": 1}),
    ),
    "video_llava": Family(
        {},
        _CLIP,
        {"image_token_index": IMAGE, "video_token_index": VIDEO},
        Pictures(name="pixel_values_images"),
    ),
    "vipllava": Family({}, _CLIP, {"image_token_index": IMAGE, "vision_feature_layer": [-2, -3, 1]}),
}
# Types whose tower has no attention but eager.
EAGER = ("got_ocr2", "pp_chart2table")


def config_of(kind: str, text: Any = None, **changes: Any) -> Any:
    """Return the config of a tiny model.

    Args:
        kind: The type of transformers, as in `FAMILIES`.
        text: Config of its language model; None for the type's own language model.
        changes: Fields of that config.
    """
    # Configs write defaults into the dictionaries that they get.
    family, host = copy.deepcopy(FAMILIES[kind]), CONFIG_MAPPING[kind]
    default: Any = host()
    if text is None:
        text = {"model_type": default.text_config.model_type, **SMALL, **HEAD, **family.text, **changes}
    vision = {"model_type": getattr(default.vision_config, "model_type", None), **family.vision}
    return host(text_config=text, vision_config=vision, **family.fields)


def pictures_of(kind: str, images: int, generator: torch.Generator) -> dict[str, Any]:
    """Return what a model takes with this many images, except ids."""
    pictures = FAMILIES[kind].pictures
    pixels = torch.randn(images, *pictures.pixels, generator=generator)
    batch: dict[str, Any] = {pictures.name: pixels}
    for name, value in (pictures.given or {}).items():
        if isinstance(value, tuple):
            batch[name] = torch.randn(images, *value, generator=generator)
        else:
            batch[name] = torch.tensor([value] * images)
    for name in pictures.rows:
        batch[name] = batch[name].flatten(0, 1)
    return {name: value[None] for name, value in batch.items()} if pictures.together else batch
