"""Streams of pairs: who is in a batch, what is done about damage, and what a restarted stream repeats."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from mmod.data.config import PairsConfig
from mmod.data.corrupt import CorruptDataError
from mmod.data.loader import pairs_stream
from tests.kit.pair_files import pair, png, tokenizer, transform, write_pairs, write_tar


def train(config: PairsConfig, rank: int = 0, world: int = 1, seed: int = 0) -> Any:
    return pairs_stream(config, transform, tokenizer, seed, rank, world)


def keys(batches: Any) -> list[int]:
    return [key for _, tokens in batches for key in tokens[:, 0].tolist()]


@pytest.fixture
def shards(tmp_path: Path) -> str:
    for number in range(4):
        write_pairs(tmp_path / f"a-{number:05d}.tar", range(10 * number, 10 * number + 10))
    return str(tmp_path / "a-{00000..00003}.tar")


def exact(pattern: str | list[str], **changes: Any) -> PairsConfig:
    return PairsConfig(pattern, val=pattern, **{"batch_size": 4, **changes})


def test_an_exact_epoch_has_every_pair_once_and_image_and_caption_belong_together(shards: str) -> None:
    stream = train(exact(shards))
    images, tokens = (torch.cat(parts) for parts in zip(*stream.batches(0)))
    assert sorted(tokens[:, 0].tolist()) == list(range(40))
    assert torch.equal(images[:, 0, 0, 0].long(), tokens[:, 0])
    assert keys(stream.batches(0)) == tokens[:, 0].tolist() != keys(stream.batches(1))


def test_remote_shards_and_lists(tmp_path: Path, shards: str) -> None:
    folder = Path(shards).parent
    pattern = [f"pipe:cat {folder}/a-{{00000..00001}}.tar", str(folder / "a-00003.tar")]
    read_keys = set(keys(train(exact(pattern, root=str(tmp_path / "copies"))).batches(0)))
    assert read_keys <= {*range(20), *range(30, 40)}
    assert len(read_keys) == 28


def test_augmentation_draws_follow_the_place_not_the_worker(shards: str) -> None:
    def noisy(image: Image.Image) -> Tensor:
        return transform(image) + torch.rand(()) + random.random()

    def first(workers: int) -> Tensor:
        config = exact(shards, workers=workers)
        return next(pairs_stream(config, noisy, tokenizer, 0).batches(0))[0]

    torch.manual_seed(9)
    expected = torch.rand(())
    torch.manual_seed(9)
    assert torch.equal(first(0), first(2))
    assert torch.equal(torch.rand(()), expected)


def cut(data: bytes) -> bytes:
    """Cut a PNG within its pixels."""
    return data[: len(data) // 2]


BROKEN = {
    "truncated image": lambda key: {f"{key:06d}.png": cut(png(key)), f"{key:06d}.txt": f"number {key}".encode()},
    "no image": lambda key: {f"{key:06d}.txt": f"number {key}".encode()},
    "no caption": lambda key: {f"{key:06d}.png": png(key), f"{key:06d}.json": b"{}"},
    "empty caption": lambda key: {f"{key:06d}.png": png(key), f"{key:06d}.txt": b" \n"},
    "wrong encoding": lambda key: {f"{key:06d}.png": png(key), f"{key:06d}.txt": "Größe".encode("latin-1")},
}


def test_broken_pairs_stop_training_or_are_replaced(tmp_path: Path) -> None:
    broken = {name: data for key, kind in enumerate(BROKEN.values()) for name, data in kind(key).items()}
    bad = write_tar(tmp_path / "a-1.tar", {**broken, **{k: v for key in range(5, 9) for k, v in pair(key).items()}})
    write_pairs(tmp_path / "a-0.tar", range(9, 15))
    pattern = str(tmp_path / "a-{0..1}.tar")
    with pytest.raises(CorruptDataError, match="a-1"):
        keys(train(exact(pattern)).batches(0))
    stream = train(exact(pattern, on_corrupt="skip"))
    read_keys = keys(stream.batches(0))
    assert len(read_keys) == 4 * stream.steps_per_epoch
    assert min(read_keys) == 5
    assert stream.report.counts == {str(bad): len(BROKEN)}
    for reason in ("cannot be decoded", "needs one image and one .txt member", "holds no text", "no text in UTF-8"):
        assert reason in str(stream.report)


def test_open_clip_shards_with_other_members_are_read(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("L", (8, 8), 7).save(file, format="JPEG")
    members = {"00000/0.JPG": file.getvalue(), "00000/0.txt": b" Zahl 7 ", "00000/0.json": b"{}", "x.md": b""}
    path = write_tar(tmp_path / "a.tar", members, mode="w")
    stream = pairs_stream(PairsConfig(val=str(path), on_corrupt="skip"), transform, tokenizer)
    images, tokens = next(stream.batches(0))
    assert images.shape == (1, 3, 8, 8)
    assert tokens.tolist() == [[7]]


@pytest.mark.parametrize("train", ["scenes:tiny", "scenes:tiny/tests", "scenes:huge/train"])
def test_unknown_embedded_sets(train: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"scenes:DIFFICULTY/SPLIT|of captioned scenes is unknown; valid: default"):
        pairs_stream(PairsConfig(train, root=str(tmp_path / "x")), transform, tokenizer, 0)
    assert not (tmp_path / "x").exists()
