"""Small models for transformers' shared tests, see `run_transformers_tests.py`."""

import os
import unittest
from typing import Any

import torch
import transformers
from shared.test_modeling_common import ModelTesterMixin, ids_tensor

import mmod
from mmod.registry.transformers import open_routed_folders

ROUTED = os.environ.get("MMOD_ROUTED") == "1"
LINEAR = mmod.RoutingConfig(router="linear", capacity=0.5, blocks=(1,))
# Equal to the dense model, so that tests of what a model computes should pass too.
EVERY_TOKEN = mmod.RoutingConfig(router="attention", capacity=1.0, blocks=(1,))
TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
}
if ROUTED:
    open_routed_folders()


def made(name: str, parts: dict[str, Any]) -> Any:
    """Return a class of transformers, or one that makes routed models of it."""
    host = getattr(transformers, name)
    if not ROUTED:
        return host

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        self.__class__ = host
        host.__init__(self, config, *args, **kwargs)
        mmod.route_(self, **parts)

    def load(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        # Without a folder, weights are given for a config, which says nothing of routing: the class made here does.
        kind = cls if pretrained_model_name_or_path is None else host
        return transformers.PreTrainedModel.from_pretrained.__func__(
            kind, pretrained_model_name_or_path, *args, **kwargs
        )

    return type(name, (host,), {"__init__": build, "__module__": host.__module__, "from_pretrained": classmethod(load)})


class Tester:
    """What the shared tests ask for a config and a batch."""

    is_training = False

    def __init__(self, config: Any, inputs: Any) -> None:
        self.config, self.inputs = config, inputs

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """Return a config and a batch."""
        return self.config(), self.inputs()


class Family(ModelTesterMixin):
    """One family: its config, batch, classes and how it is routed."""

    test_resize_embeddings = False

    def setUp(self) -> None:
        """Make the tester."""
        self.model_tester = Tester(self.make_config, self.make_inputs)


def text() -> dict[str, Any]:
    """Return a batch of text."""
    ids = ids_tensor([2, 7], 96) + 3
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def llama_like(kind: str) -> type:
    """Return the tests of a language model."""
    parts = {"language": LINEAR.replace(language={"tokens": "all"})}
    names = [f"{kind}Model", f"{kind}ForCausalLM", f"{kind}ForSequenceClassification"]
    members = {
        "all_model_classes": tuple(made(name, parts) for name in names),
        "make_config": staticmethod(lambda: getattr(transformers, f"{kind}Config")(**TEXT)),
        "make_inputs": staticmethod(text),
    }
    return type(f"Test{kind}", (Family, unittest.TestCase), members)


TestLlama = llama_like("Llama")
TestQwen2 = llama_like("Qwen2")


class TestClipVision(Family, unittest.TestCase):
    """A vision tower."""

    all_model_classes = (made("CLIPVisionModel", {"image": LINEAR}),)
    make_config = staticmethod(lambda: transformers.CLIPVisionConfig(**VISION))
    make_inputs = staticmethod(lambda: {"pixel_values": torch.randn(2, 3, 12, 12)})


def images_of(kind: str, names: tuple[str, ...], changes: dict[str, Any]) -> type:
    """Return the tests of a vision model."""
    members = {
        "all_model_classes": tuple(made(name, {"image": EVERY_TOKEN}) for name in names),
        "make_config": staticmethod(lambda: getattr(transformers, f"{kind}Config")(**{**VISION, **changes})),
        "make_inputs": staticmethod(lambda: {"pixel_values": torch.randn(2, 3, 12, 12)}),
    }
    return type(f"Test{kind}", (Family, unittest.TestCase), members)


TestViT = images_of(
    "ViT", ("ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling"), {"encoder_stride": 4}
)
TestDeiT = images_of("DeiT", ("DeiTModel", "DeiTForImageClassification"), {})
TestDinov2 = images_of("Dinov2", ("Dinov2Model", "Dinov2ForImageClassification", "Dinov2Backbone"), {})


class TestSiglip2Vision(Family, unittest.TestCase):
    """A tower that takes patches in rows."""

    all_model_classes = (made("Siglip2VisionModel", {"image": EVERY_TOKEN}),)

    @staticmethod
    def make_config() -> Any:
        """Return a config of nine patches."""
        values = {name: value for name, value in VISION.items() if name != "image_size"}
        return transformers.Siglip2VisionConfig(**values, num_patches=9)

    @staticmethod
    def make_inputs() -> dict[str, Any]:
        """Return two images of three by three patches."""
        mask = torch.ones(2, 9, dtype=torch.long)
        shapes = torch.tensor([[3, 3], [3, 3]])
        return {"pixel_values": torch.randn(2, 9, 48), "pixel_attention_mask": mask, "spatial_shapes": shapes}


class TestQwen2VL(Family, unittest.TestCase):
    """A vision-language model whose language model runs on every token."""

    all_model_classes = tuple(
        made(name, {"language": EVERY_TOKEN.replace(language={"tokens": "all"})})
        for name in ("Qwen2VLModel", "Qwen2VLForConditionalGeneration")
    )

    @staticmethod
    def make_config() -> Any:
        """Return a config with a small tower."""
        tower = {"depth": 2, "embed_dim": 32, "num_heads": 4, "patch_size": 4, "hidden_size": 32, "mlp_ratio": 2}
        rope = {"rope_type": "default", "mrope_section": [2, 1, 1]}
        return transformers.Qwen2VLConfig(
            text_config={**TEXT, "rope_parameters": rope}, vision_config=tower, image_token_id=98, video_token_id=97
        )

    @staticmethod
    def make_inputs() -> dict[str, Any]:
        """Return two texts."""
        return text()


class TestLlava(Family, unittest.TestCase):
    """A vision-language model."""

    all_model_classes = tuple(
        made(name, {"language": LINEAR}) for name in ("LlavaModel", "LlavaForConditionalGeneration")
    )

    @staticmethod
    def make_config() -> Any:
        """Return a LLaVA of a CLIP tower and a Llama."""
        return transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**TEXT),
            vision_config=transformers.CLIPVisionConfig(**VISION),
            image_token_index=98,
            vision_feature_layer=-1,
        )

    @staticmethod
    def make_inputs() -> dict[str, Any]:
        """Return two prompts with an image each."""
        batch = text()
        ids = torch.cat([batch["input_ids"].clamp(max=97), torch.full((2, 9), 98), batch["input_ids"][:, :2]], 1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 12, 12)}
