"""Routed models from transformers' Auto classes: importing this module registers a loader for each supported model.

`AutoModelForCausalLM.from_pretrained(folder)` and its like then give the routed model where the folder's config.json
describes routing, and a dense model of the plain class everywhere else. Arguments (`dtype`, `device_map`,
`quantization_config`, ...) mean what they always do.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import CONFIG_MAPPING

from mmod.adapters.transformers.saving import KEY, load
from mmod.pretrained import route_again

__all__ = ["MODEL_TYPES"]

MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "llava",
    "llava_next",
    "llava_onevision",
    "qwen2_vl",
    "qwen2_vl_text",
    "qwen2_5_vl",
    "qwen2_5_vl_text",
    "clip",
    "clip_vision_model",
    "siglip",
    "siglip_vision_model",
)
"""Types of model, as in config.json, whose routed folders the Auto classes load."""

# Auto class -> its table of model classes.
_AUTO_CLASSES = {
    "AutoModel": "MODEL_MAPPING",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "AutoModelForPreTraining": "MODEL_FOR_PRETRAINING_MAPPING",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "AutoModelForZeroShotImageClassification": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING",
}


def _register_all() -> None:
    for auto_name, mapping_name in _AUTO_CLASSES.items():
        auto, mapping = getattr(transformers, auto_name), getattr(transformers, mapping_name)
        for model_type in MODEL_TYPES:
            config_class = CONFIG_MAPPING[model_type]
            dense = mapping.get(config_class, None)
            if dense is not None:
                auto.register(config_class, _loader(dense), exist_ok=True)


def _loader(dense: Any) -> Any:
    """Return a stand-in for a model class: it is never instantiated, and loads the routed or the dense model."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return dense(*args, **kwargs)

    def from_pretrained(cls: Any, folder: Any, *args: Any, **options: Any) -> Any:
        if isinstance(getattr(options.get("config"), KEY, None), dict):
            return load(folder, route_again, *args, model_class=dense, **options)
        return dense.from_pretrained(folder, *args, **options)

    members = {"__new__": new, "from_pretrained": classmethod(from_pretrained), "__module__": dense.__module__}
    return type(dense.__name__, (dense,), members)


_register_all()
