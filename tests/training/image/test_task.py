"""The parts of the loss."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmod
from mmod.training import ClassificationTask


def tiny(**routing: object) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=4, num_heads=2, num_classes=5
    )
    return mmod.route_(model, mmod.RoutingConfig(**routing)) if routing else model


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 3, 16, 16, generator=generator), torch.arange(6) % 5


def test_distillation_is_the_divergence_from_the_teacher(batch: tuple[Tensor, Tensor]) -> None:
    images, targets = batch
    student, teacher = tiny(), tiny()
    nn.init.normal_(teacher.head.weight)
    task = ClassificationTask(student, nn.CrossEntropyLoss(), teacher=teacher, distill_weight=0.3)
    parts = task.train()(images, targets)
    assert not teacher.training
    p, q = teacher(images).softmax(-1), student(images).softmax(-1)
    expected = 0.3 * (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(parts["distillation"], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(parts["loss"], parts["task"] + parts["distillation"])
    torch.testing.assert_close(parts["task"], F.cross_entropy(student(images), targets))


def test_auxiliary_objective_is_in_the_loss_and_moves_the_router(batch: tuple[Tensor, Tensor]) -> None:
    model = tiny(router="linear", gate="identity", losses={"membership": 0.5})
    parts = ClassificationTask(model, nn.CrossEntropyLoss(), auxiliary=True).train()(*batch)
    torch.testing.assert_close(parts["loss"], parts["task"] + parts["auxiliary"])
    assert parts["auxiliary"] > 0
    parts["loss"].backward()
    gradients = [block.router.score.weight.grad for block in mmod.routed_blocks(model).values()]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize("pool", ["token", "avg", ""])
def test_features_are_compared_token_by_token(batch: tuple[Tensor, Tensor], pool: str) -> None:
    images, targets = batch
    student, teacher = tiny(), tiny()
    for seed, model in enumerate((student, teacher)):
        torch.manual_seed(seed)
        nn.init.normal_(model.blocks[0].attn.qkv.weight)  # type: ignore[union-attr,index,arg-type]
        model.reset_classifier(5, pool)  # type: ignore[operator]
    mmod.route_(student, mmod.RoutingConfig(capacity=0.5))
    targets = targets[:, None].expand(-1, 16) if pool == "" else targets
    task = ClassificationTask(student, nn.CrossEntropyLoss(), teacher=teacher, feature_weight=0.3)
    parts = task.train()(images, targets)
    features, taught = (model.forward_features(images) for model in (student, teacher))  # type: ignore[operator]
    expected = 0.3 * (1 - (F.normalize(features, dim=-1) * F.normalize(taught, dim=-1)).sum(-1)).mean()
    assert parts["features"] > 0
    torch.testing.assert_close(parts["features"], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(parts["loss"], parts["task"] + parts["distillation"] + parts["features"])
    parts["features"].backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in student.parameters())


def test_features_of_a_model_without_a_final_norm_are_refused() -> None:
    with pytest.raises(ValueError, match="this Linear has no final `norm`"):
        ClassificationTask(nn.Linear(2, 2), nn.CrossEntropyLoss(), teacher=tiny(), feature_weight=1.0)
