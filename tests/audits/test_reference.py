"""What a dense model is unsure of: its own answers, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod.audits import Comparisons, DecisionContext, evaluate_answers
from mmod.audits.reference import token_entropy
from tests.kit.vlm_zoo import make_joint, make_language, prompt
from tests.kit.zoo import make_images, make_model


def entropy(logits: Tensor) -> Tensor:
    log_p = logits.double().log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("options", [{"global_pool": "avg"}, {"global_pool": "avg", "fc_norm": False}, {}])
def test_a_classifier_is_asked_of_each_token_as_of_an_image(options: dict[str, object]) -> None:
    model, images = make_model("vit_tiny_patch16_224", **options).eval(), make_images("vit_tiny_patch16_224", 3)
    with torch.no_grad():
        with token_entropy(model) as captured:
            model(images)
        state_BND = model.forward_features(images)
        expected = entropy(model.head(model.fc_norm(state_BND)))
        assert "forward_head" not in vars(model)
    (entropy_BN,) = captured
    torch.testing.assert_close(entropy_BN.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_classifier_of_patches_and_language_models_answer_for_tokens_themselves() -> None:
    patches, images = make_model("vit_tiny_patch16_224", global_pool="").eval(), make_images("vit_tiny_patch16_224", 2)
    # Its logits are capped behind the head.
    language = make_language("gemma2").eval()
    tokens = torch.randint(20, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for model, inputs, logits_of in (
            (patches, {"x": images}, lambda answer: answer),
            (language, {"input_ids": tokens}, lambda answer: answer.logits),
        ):
            with token_entropy(model) as captured:
                logits = logits_of(model(**inputs))
            torch.testing.assert_close(captured[0].double(), entropy(logits), rtol=1e-4, atol=1e-5)


def test_tokens_that_the_reference_is_least_sure_of_are_kept() -> None:
    name = "vit_tiny_patch16_224"
    dense, images = make_model(name).eval(), make_images(name, 12)
    routed = mmod.route_(make_model(name), mmod.RoutingConfig(router="random"))

    def slow(place: DecisionContext) -> Tensor:
        return entropy(dense.head(dense.fc_norm(dense.forward_features(images))))

    audit = mmod.audit(
        routed,
        [(images, torch.arange(12) % 7)],
        mmod.AuditConfig(conditions=["random", "reference entropy"], draws=1, resamples=100),
        Comparisons(custom={"slow": slow}, reference=dense),
    )
    fast, slowly = audit.conditions[-2:]
    assert (fast.name, fast.family) == ("reference entropy", "other")
    assert (fast.accuracy, fast.loss) == (slowly.accuracy, slowly.loss)


def test_image_tokens_of_a_vision_language_model_are_ranked_by_what_comes_next() -> None:
    routing = mmod.RoutingConfig(router=mmod.score("linear", init_std=0.3), capacity=0.5, language={"tokens": "image"})
    model, dense = mmod.route_(make_joint("llava"), language=routing), make_joint("llava")
    batch = prompt("llava", (1, 2), seed=0)
    batch["labels"] = batch["input_ids"]
    contexts: list[DecisionContext] = []

    def look(context: DecisionContext) -> Tensor:
        contexts.append(context)
        return context.x_BND.norm(dim=-1)

    audit = mmod.audit(
        model,
        [batch],
        mmod.AuditConfig(conditions=["random", "reference entropy"], draws=1, resamples=100),
        Comparisons(reference=dense, custom={"look": look}),
        evaluate=evaluate_answers,
    )
    assert math.isfinite(audit.conditions[-2].loss.value)
    assert contexts[-1].reference["reference entropy"].shape == contexts[-1].learned.score_BN.shape


def test_models_without_such_a_head_are_refused() -> None:
    for model in (make_model("vit_tiny_patch16_224", num_classes=0), nn.Sequential(nn.Flatten(), nn.Linear(256, 4))):
        with pytest.raises(ValueError, match="no head that answers for single tokens"), token_entropy(model):
            pass
    other = make_model("vit_tiny_patch16_224", img_size=32)
    routed = mmod.route_(make_model("vit_tiny_patch16_224"), mmod.RoutingConfig(router="norm"))
    big, small = make_images("vit_tiny_patch16_224", 3), torch.randn(3, 3, 32, 32)

    def evaluate(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        return (model(small if model is other else batch)[:, 0],) * 2

    config = mmod.AuditConfig(["random", "reference entropy"], draws=1, resamples=100)
    with pytest.raises(ValueError, match=r"no reference entropy of the 17 tokens in blocks\.\d"):
        mmod.audit(routed, [big], config, Comparisons(reference=other), evaluate=evaluate)
