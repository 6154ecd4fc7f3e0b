"""Retrieval and zero-shot accuracy are what a plain count of similarities says they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

import mmod
from mmod.data.config import PairsConfig
from mmod.data.corrupt import CorruptDataError
from mmod.data.loader import pairs_stream
from mmod.training.engine.run_folder import read_files
from mmod.training.pairs.config import ModelConfig, TrainConfig
from mmod.training.pairs.evaluate import check_imagenet, evaluate_set, rank_both_ways
from tests.kit.pairs_worker import MODEL
from tests.kit.sets import SETS


@given(seed=st.integers(0, 10**6), count=st.integers(1, 12), kinds=st.integers(1, 12))
def test_ranks_are_those_of_a_loop_over_images_and_distinct_captions(seed: int, count: int, kinds: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    caption_N = torch.randint(0, kinds, (count,), generator=generator)
    # Coarse embeddings, so that ties happen. Equal captions have equal ones.
    image_ND = torch.randint(-1, 2, (count, 3), generator=generator).float()
    text_ND = torch.randint(-1, 2, (kinds, 3), generator=generator).float()[caption_N]
    texts = {int(caption): text for caption, text in zip(caption_N, text_ND)}
    captions_before = []
    images_before = []
    for image, caption in zip(image_ND, caption_N.tolist()):
        right = float(image @ texts[caption])
        captions_before.append(sum(float(image @ text) >= right for other, text in texts.items() if other != caption))
        best = max(float(other @ texts[caption]) for other, its in zip(image_ND, caption_N) if its == caption)
        images_before.append(
            sum(float(other @ texts[caption]) >= best for other, its in zip(image_ND, caption_N) if its != caption)
        )
    tokens = caption_N[:, None].expand(-1, 2)
    actual = [ranks.tolist() for ranks in rank_both_ways(image_ND, text_ND, tokens)]
    assert actual == [captions_before, images_before]


@pytest.mark.parametrize("copies", [1, 2, 7])
def test_copies_of_captions_change_no_recall(copies: int) -> None:
    images, texts = torch.randn(2, 8, 3)
    tokens = torch.arange(8)[:, None]
    expected, _ = rank_both_ways(images, texts, tokens)
    assert len(expected.unique()) > 3
    actual, _ = rank_both_ways(*(part.repeat(copies, 1) for part in (images, texts, tokens)))
    assert actual.tolist() == expected.repeat(copies).tolist()


def test_embeddings_that_say_nothing_find_nothing() -> None:
    tokens = torch.arange(6)[:, None]
    for value in (1.0, float("nan")):
        constant = torch.full((6, 4), value)
        assert [ranks.tolist() for ranks in rank_both_ways(constant, constant, tokens)] == [[5] * 6] * 2


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    vision = {**MODEL["vision_cfg"], "image_size": 48, "patch_size": 16}  # type: ignore[dict-item]
    text = {**MODEL["text_cfg"], "context_length": 12}  # type: ignore[dict-item]
    config = {**MODEL, "vision_cfg": vision, "text_cfg": text}
    return open_clip.create_model("ViT-B-32", output_dict=True, **config).train()


@pytest.fixture(scope="module")
def stream(model: Any) -> Any:
    config = PairsConfig(val="scenes:tiny/val", root=str(SETS / "scenes"), batch_size=24)
    return pairs_stream(config, open_clip.image_transform(48, is_train=False), tokenizer)


def tokenizer(captions: list[str]) -> Tensor:
    return open_clip.get_tokenizer("ViT-B-32")(captions, context_length=12)


def test_recalls_are_those_of_the_whole_similarity_matrix(model: Any, stream: Any) -> None:
    result = evaluate_set(model, stream, tokenizer).result
    assert model.training
    model.eval()
    images, texts = (torch.cat(parts) for parts in zip(*stream.batches(0)))
    with torch.no_grad():
        outputs = model(images, texts)
    model.train()
    similarity = outputs["image_features"] @ outputs["text_features"].T
    assert result.samples == 64
    for matrix, first, five in (
        (similarity, result.image_to_text_r1, result.image_to_text_r5),
        (similarity.T, result.text_to_image_r1, result.text_to_image_r5),
    ):
        order = matrix.argsort(1, descending=True) == torch.arange(64)[:, None]
        assert first == pytest.approx(100 * order[:, 0].double().mean().item())
        assert five == pytest.approx(100 * order[:, :5].any(1).double().mean().item())


def test_kept_shares_of_both_towers(model: Any, stream: Any) -> None:
    routing = mmod.RoutingConfig(capacity=0.5)
    mmod.route_(model, routing)
    try:
        result = evaluate_set(model, stream, tokenizer).result
    finally:
        mmod.unroute_(model)
    assert result.kept["visual.transformer.resblocks.1"] == pytest.approx(5 / 10)
    assert 0.3 < result.kept["transformer.resblocks.1"] < 0.6
    assert set(result.columns()) >= {"kept", "image_to_text_r1"}


class KnowsDigits(nn.Module):
    """Embeds captions by the digit they name first, and every image as the same digit."""

    logit_scale = torch.zeros(())

    def __init__(self, digit: str):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.digit = tokenizer([digit])[0, 1]
        self.digits = tokenizer([str(digit) for digit in range(10)])[:, 1]

    def forward(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        same = (self.digits == self.digit).float()
        features = {"image_features": same.expand(len(images), 10), "text_features": self.encode_text(texts)}
        return {**features, "logit_scale": torch.ones(())}

    def encode_text(self, texts: Tensor, normalize: bool = True) -> Tensor:
        return (texts[:, 3, None] == self.digits).float()


def test_zero_shot_asks_for_the_digit_that_captions_name_first(stream: Any) -> None:
    classes = [tokens[3].item() for _, batch in stream.batches(0) for tokens in batch]
    result = evaluate_set(KnowsDigits("7"), stream, tokenizer, zero_shot="scenes").result
    share = classes.count(tokenizer(["7"])[0, 1].item()) / len(classes)
    assert 0 < share < 1
    assert result.zero_shot_top1 == pytest.approx(100 * share)


def test_zero_shot_on_a_folder_of_classes(
    model: Any, stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("n0", "n1", "n2", "n3", "n4", "n5")):
        (tmp_path / name).mkdir()
        Image.new("RGB", (50, 60), (40 * number, 0, 99)).save(tmp_path / name / "a.png")
    options: dict[str, Any] = {"transform": open_clip.image_transform(48, is_train=False)}
    with pytest.raises(ValueError, match=r"must have 1000 folders, .*; got 6: n0"):
        evaluate_set(model, stream, tokenizer, zero_shot=f"imagenet:{tmp_path}", **options)
    monkeypatch.setattr(open_clip, "IMAGENET_CLASSNAMES", ["cat", "dog", "cup", "car", "sea", "tree"])
    result = evaluate_set(model, stream, tokenizer, zero_shot=f"imagenet:{tmp_path}", **options).result
    assert result.zero_shot_top1 in [pytest.approx(100 * hits / 6) for hits in range(7)]
    assert result.zero_shot_top5 >= result.zero_shot_top1
    # Broken images are faults as of any folder.
    (tmp_path / "n3" / "b.png").write_bytes(b"no picture")
    with pytest.raises(CorruptDataError, match=r"b\.png: image of 10 bytes"):
        evaluate_set(model, stream, tokenizer, zero_shot=f"imagenet:{tmp_path}", **options)
    config = PairsConfig(val="scenes:tiny/val", root=str(SETS / "scenes"), batch_size=24, on_corrupt="skip")
    skipping = pairs_stream(config, options["transform"], tokenizer)
    again = evaluate_set(model, skipping, tokenizer, zero_shot=f"imagenet:{tmp_path}", **options).result
    assert again.zero_shot_top1 == result.zero_shot_top1
    assert len(skipping.report.faults) == 1


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([f"n{number:08d}" for number in range(4)], None),
        (["3", "0", "2", "1"], None),
        (["00", "01", "02", "03"], None),
        (["cat", "dog", "sea", "sky"], "named by WordNet identifiers.*got 4: cat"),
        (["1", "2", "3", "4"], "got 4: 1"),
        (["0", "1", "2"], "got 3: 0"),
    ],
)
def test_prompts_are_of_folders_whose_order_is_known(names: list[str], message: str | None) -> None:
    if message is None:
        check_imagenet(names, 4, "folder")
        return
    with pytest.raises(ValueError, match=message):
        check_imagenet(names, 4, "folder")


def test_captions_of_another_kind_have_no_zero_shot_class(model: Any, stream: Any) -> None:
    def other(captions: list[str]) -> Tensor:
        return tokenizer([f"the {caption}" for caption in captions])

    with pytest.raises(ValueError, match="pair 0 has a caption of another kind"):
        evaluate_set(model, stream, other, zero_shot="scenes")


def test_the_folder_of_zero_shot_is_part_of_the_evaluation_data(tmp_path: Path) -> None:
    known = []
    for zero_shot in (None, "scenes", f"imagenet:{tmp_path}"):
        config = TrainConfig(output="run", model=ModelConfig("RN50"), zero_shot=zero_shot)
        known.append(read_files(config))
    assert known[:2] == [None, None]
    (tmp_path / "further.png").write_bytes(b"1")
    assert read_files(config) not in known
