import functools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmod.data import AugmentConfig, CorruptDataError, DataConfig, image_stream, loader
from mmod.data.readers.shards import ShardSource
from mmod.data.stream import BatchStream, Decoded

STRONG = AugmentConfig(
    scale=(0.3, 1.0), auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.5, re_mode="pixel", color_jitter=0.4
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """27 training and 10 evaluation images of three classes; the red value tells an image's number."""
    root = tmp_path_factory.mktemp("folder")
    rng = np.random.default_rng(0)
    for split, count in (("train", 27), ("val", 10)):
        for number in range(count):
            path = root / split / "abc"[number % 3] / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 255, (20, 24, 3), np.uint8)
            pixels[..., 0] = number
            Image.fromarray(pixels).save(path)
    return root


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> DataConfig:
    config = DataConfig("digits:tiny", root=str(tmp_path_factory.mktemp("digits")), batch_size=10)
    image_stream(config, 0)
    return config


def folder_config(folder: Path, **changes) -> DataConfig:
    # Without resizing and normalisation, the red value of a pixel is the image's number.
    values = {"image_size": 20, "channels": 3, "batch_size": 4, "crop_pct": 1.0, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    return DataConfig("folder", root=str(folder), **(values | changes))


def numbers(images: torch.Tensor) -> list[int]:
    return (images[:, 0, 0, 0] * 255).round().int().tolist()


def equal(first: list, second: list) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, second)
    )


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
    batch=st.integers(1, 13),
    world=st.integers(1, 2),
    data=st.data(),
)
def test_a_stream_is_a_pure_function_of_seed_epoch_and_start(folder, seed, epoch, batch, world, data):
    config = folder_config(folder, batch_size=batch, augment=STRONG)
    rank = data.draw(st.integers(0, world - 1))
    stream = image_stream(config, seed, rank, world)
    batches = list(stream.batches(epoch))
    assert len(batches) == stream.steps_per_epoch == 27 // (batch * world)
    start = data.draw(st.integers(0, len(batches)))
    list(stream.batches(epoch + 1))
    assert equal(list(image_stream(config, seed, rank, world).batches(epoch, start)), batches[start:])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(folder, workers):
    config = folder_config(folder, augment=STRONG)
    alone = list(image_stream(config, 5).batches(2))
    assert equal(list(image_stream(replace(config, workers=workers), 5).batches(2, 1)), alone[1:])


def test_augmentation_differs_between_epochs_and_seeds_but_not_between_batch_sizes(folder):
    def by_number(seed: int, epoch: int, batch: int) -> dict[int, torch.Tensor]:
        augment = AugmentConfig(scale=(0.3, 0.5), color_jitter=0.0, interpolation="bilinear")
        stream = image_stream(folder_config(folder, augment=augment, batch_size=batch), seed)
        return {number: image for images, _ in stream.batches(epoch) for number, image in zip(numbers(images), images)}

    first = by_number(0, 0, 1)
    assert len(first) == 27
    same = by_number(0, 0, 9)
    assert all(torch.equal(first[number], same[number]) for number in first)
    for other in (by_number(1, 0, 1), by_number(0, 1, 1)):
        assert sum(torch.equal(first[number], other[number]) for number in first) < 3


@pytest.mark.parametrize("workers", [0, 2])
def test_the_callers_random_state_is_neither_used_nor_changed(folder, workers):
    stream = image_stream(folder_config(folder, augment=STRONG, workers=workers), 0)

    def state():
        return random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002

    def reset(seed: int) -> None:
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)  # noqa: NPY002

    reset(3)
    undisturbed = state()
    reset(3)
    first = list(stream.batches(0))
    assert state() == undisturbed
    reset(4)
    assert equal(list(stream.batches(0)), first)


def test_skipping_to_start_reads_nothing_before(folder, monkeypatch):
    stream = image_stream(folder_config(folder), 0)
    read: list[int] = []
    source = stream.reader.source
    original = source.read
    monkeypatch.setattr(source, "read", lambda index, mode: (read.append(index), original(index, mode))[1])
    list(stream.batches(0, 4))
    assert len(read) == (6 - 4) * 4


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5))
def test_ranks_share_out_every_sample_exactly_once(samples, batch, world):
    class Counted:
        def __len__(self) -> int:
            return samples

    def taken(seed: int | None) -> list[list[np.ndarray]]:
        config = DataConfig(batch_size=batch)
        return [BatchStream(Counted(), None, config, rank, world, seed)._order(0) for rank in range(world)]

    for seed, needed in ((None, world), (7, world * batch)):
        if samples < needed:
            with pytest.raises(ValueError, match=f"has {samples} samples, fewer than one"):
                taken(seed)
    if samples >= world:
        evaluated = np.concatenate([part for rank in taken(None) for part in rank])
        assert sorted(evaluated) == list(range(samples))
    if samples >= world * batch:
        trained = [part for rank in taken(7) for part in rank]
        assert len(set(np.concatenate(trained))) == samples // (batch * world) * batch * world
        assert all(len(part) == batch for part in trained)


def test_two_processes_make_the_global_batches_of_one(digits):
    alone = list(image_stream(replace(digits, batch_size=20), 0).batches(3))
    ranks = [list(image_stream(digits, 0, rank, 2).batches(3)) for rank in range(2)]
    for step, (images, classes) in enumerate(alone):
        assert torch.equal(images, torch.cat([rank[step][0] for rank in ranks]))
        assert torch.equal(classes, torch.cat([rank[step][1] for rank in ranks]))


def test_evaluation_is_every_sample_once_in_order(folder):
    config = folder_config(folder)
    images, classes = zip(*image_stream(config).batches(0))
    assert [len(part) for part in classes] == [4, 4, 2]
    order = [0, 3, 6, 9, 1, 4, 7, 2, 5, 8]
    assert numbers(torch.cat(images)) == order
    assert torch.cat(classes).tolist() == [number % 3 for number in order]
    first = [part for images, _ in image_stream(config, None, 0, 2).batches(0) for part in numbers(images)]
    assert first == order[::2]


def test_the_memory_path_equals_decoding_each_time(digits, folder):
    for config in (digits, folder_config(folder, image_size=12, crop_pct=0.8, mean=None, std=None)):
        fast = list(image_stream(config, 1, in_memory=True).batches(0))
        slow = list(image_stream(replace(config, workers=1), 1, in_memory=False).batches(0))
        for (images, classes), (expected, expected_classes) in zip(fast, slow, strict=True):
            assert images.dtype == torch.float32
            assert classes.dtype == torch.int64
            torch.testing.assert_close(images, expected, rtol=0, atol=1e-5)
            assert torch.equal(classes, expected_classes)


def test_digits_are_normalised(digits):
    images = torch.cat([images for images, _ in image_stream(digits, 0).batches(0)])
    assert images.mean().abs() < 0.1
    assert abs(images.std() - 1) < 0.1
    assert next(image_stream(replace(digits, channels=3), 0).batches(0))[0].shape == (10, 3, 32, 32)


def damaged_folder(folder: Path, root: Path, broken: list[int]) -> list[str]:
    paths = []
    for path in sorted(folder.glob("*/*/*.png")):
        copy = root / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes()
        if int(path.stem) in broken:
            data = data[:200]
            paths.append(str(copy))
        copy.write_bytes(data)
    return paths


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_corrupt_image_raises(folder, tmp_path, workers, in_memory):
    damaged_folder(folder, tmp_path, [4])
    config = folder_config(tmp_path, workers=workers)
    with pytest.raises(CorruptDataError, match=r"004\.png: image of 200 bytes cannot be decoded.*on_corrupt: skip"):
        list(image_stream(config, in_memory=in_memory).batches(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_skipping_replaces_in_training_and_leaves_out_in_evaluation(folder, tmp_path, workers):
    broken = damaged_folder(folder, tmp_path, [4, 7, 25])
    config = folder_config(tmp_path, workers=workers, on_corrupt="skip", batch_size=3)
    train = image_stream(config, 0)
    trained = [list(train.batches(0)) for _ in range(2)]
    actual = [number for batches in trained for images, _ in batches for number in numbers(images)]
    # The folder's order is a, b, c: 4 and 7 are neighbours, whose next readable one is 10; after 25 comes 2.
    expected = [{4: 10, 7: 10, 25: 2}.get(number, number) for number in range(27)]
    assert sorted(actual) == sorted(expected * 2)
    assert train.report.counts == {path: 1 for path in broken if "train" in path}
    evaluation = image_stream(config)
    evaluated = list(evaluation.batches(0))
    assert [number for images, _ in evaluated for number in numbers(images)] == [0, 3, 6, 9, 1, 2, 5, 8]
    assert evaluation.report.counts == {path: 1 for path in broken if "val" in path}
    for seed, stream, batches in ((0, train, trained[0]), (None, evaluation, evaluated)):
        memory = image_stream(config, seed, in_memory=True)
        for _ in range(2):
            for (images, classes), (expected_images, expected_classes) in zip(memory.batches(0), batches, strict=True):
                torch.testing.assert_close(images, expected_images, rtol=0, atol=1e-5)
                assert torch.equal(classes, expected_classes)
        assert memory.report.counts == stream.report.counts


def test_an_evaluation_leaves_out_batches_without_a_readable_sample(folder, tmp_path):
    damaged_folder(folder, tmp_path, [1, 4, 7])
    for batch_size in (1, 3):
        stream = image_stream(folder_config(tmp_path, batch_size=batch_size, on_corrupt="skip"))
        actual = [number for images, _ in stream.batches(0) for number in numbers(images)]
        assert actual == [0, 3, 6, 9, 2, 5, 8]
        assert sum(stream.report.counts.values()) == 3
    damaged_folder(folder, tmp_path, list(range(27)))
    for in_memory in (False, True):
        stream = image_stream(folder_config(tmp_path, on_corrupt="skip"), in_memory=in_memory)
        with pytest.raises(CorruptDataError, match="no sample can be read; 10 corrupt"):
            stream.first_batch()
        with pytest.raises(CorruptDataError, match="no sample can be read; 27 corrupt"):
            list(image_stream(folder_config(tmp_path, on_corrupt="skip"), 0, in_memory=in_memory).batches(0))


def test_an_image_in_memory_is_decoded_once_for_all_streams_and_only_if_it_is_read(digits, monkeypatch):
    monkeypatch.setattr(loader, "_decoded", functools.lru_cache(lambda *_: Decoded()))
    stream = image_stream(replace(digits, workers=2), 0)
    read: list[int] = []
    decode = stream.reader.reader.decode

    def noted(index, faults):
        read.append(index)
        return decode(index, faults)

    monkeypatch.setattr(stream.reader.reader, "decode", noted)
    first = [next(stream.batches(0)) for _ in range(2)]
    assert torch.equal(first[0][0], first[1][0])
    assert len(read) == len(first[0][0])
    for epoch in range(2):
        list(stream.batches(epoch))
    assert len(read) == len(set(read)) <= stream.num_samples
    other = image_stream(digits, 0)
    monkeypatch.setattr(other.reader.reader, "decode", noted)
    before = len(read)
    assert torch.equal(next(other.batches(0))[0], first[0][0])
    assert len(read) == before


def test_every_stream_of_an_embedded_set_meets_its_faults(digits, monkeypatch):
    monkeypatch.setattr(loader, "_decoded", functools.lru_cache(lambda *_: Decoded()))
    read = ShardSource.read

    def damaged(source, index, mode):
        if index == 3:
            raise ValueError("damaged")
        return read(source, index, mode)

    monkeypatch.setattr(ShardSource, "read", damaged)
    # The second stream finds what the first has decoded, and not the sample that it could not.
    for _ in range(2):
        with pytest.raises(CorruptDataError, match="damaged"):
            list(image_stream(digits).batches(0))
    skipping = [image_stream(replace(digits, on_corrupt="skip")) for _ in range(2)]
    assert [sum(len(classes) for _, classes in stream.batches(0)) for stream in skipping] == [63, 63]
    assert [sum(stream.report.counts.values()) for stream in skipping] == [1, 1]


def test_shards_with_any_number_of_workers(digits):
    # One training shard in four, two workers for one evaluation shard.
    config = replace(digits, source=f"shards:{digits.root}/{{split}}-*.tar", image_size=32, crop_pct=1.0, workers=2)
    config = replace(config, mean=(0.094,), std=(0.22,))
    for make in (image_stream, lambda config: image_stream(config, 3)):
        expected, actual = list(make(digits).batches(0)), list(make(config).batches(0))
        for (images, classes), (others, other_classes) in zip(expected, actual, strict=True):
            torch.testing.assert_close(images, others, rtol=0, atol=1e-5)
            assert torch.equal(classes, other_classes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "digits:huge"}, "'huge' of cluttered digits is unknown; valid: default, tiny, aligned"),
        ({"source": "digits:tiny", "image_size": 64}, "image_size=64 exceeds the 32 pixels of 'tiny' digits"),
        ({"source": "digits:tiny", "train_split": "training"}, "must be digits:DIFFICULTY/SPLIT with a split of train"),
        ({"source": "shards:/nowhere/a.tar"}, r"must contain '\{split\}'"),
        ({"source": "shards:/nowhere/{split}-{00..03}.tar"}, "no shard matches '/nowhere/train-00.tar'"),
        ({"source": "folder"}, "data.root=None is no folder"),
        (
            {"augment": AugmentConfig(auto_augment="rand-m9-strong3")},
            "no transform with auto_augment='rand-m9-strong",
        ),
        ({"augment": AugmentConfig(auto_augment="original-strong3")}, "no transform with auto_augment='original-stro"),
        ({"source": "digits:tiny", "batch_size": 300}, "has 256 samples, fewer than one batch"),
    ],
)
def test_streams_that_cannot_be_made(tmp_path, change, message):
    root = None if change.get("source") == "folder" else str(tmp_path / "root")
    with pytest.raises(ValueError, match=message):
        image_stream(replace(DataConfig(root=root), **change), 0)
    # The set of 16,000 images is not built first.
    assert "augment" not in change or not (tmp_path / "root").exists()


def test_ranks_epochs_and_policies_out_of_range_are_named(digits):
    for rank, world in ((2, 2), (-1, 1), (0, 0)):
        with pytest.raises(ValueError, match=f"rank={rank} must lie in"):
            image_stream(digits, None, rank, world)
    stream = image_stream(digits, 0)
    for epoch, start in ((-1, 0), (0, 26), (0, -1)):
        with pytest.raises(ValueError, match=f"epoch={epoch} must be >= 0 and start={start}"):
            next(stream.batches(epoch, start))
    assert list(stream.batches(0, 25)) == []
    with pytest.raises(ValueError, match="on_corrupt must be one of 'raise', 'skip', got 'ignore'"):
        image_stream(replace(digits, on_corrupt="ignore"), 0)


def test_readers_survive_pickling(folder):
    import pickle

    for config in (folder_config(folder, augment=STRONG), DataConfig("digits:tiny")):
        reader = image_stream(config, 0).reader
        again = pickle.loads(pickle.dumps(reader))
        indices = np.arange(3)
        assert torch.equal(reader.read(indices, (0, 0)).images, again.read(indices, (0, 0)).images)


@pytest.mark.parametrize("source", ["digits:tiny", "crowds:tiny"])
def test_what_is_drawn_when_it_is_read_equals_the_built_set(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    patch = 4 if source == "crowds:tiny" else None
    drawn = DataConfig(source, label_patch=patch, batch_size=24, val_limit=48)
    for seed in (None, 5):
        # In another order than that of the index, of which a part is read.
        expected = list(image_stream(replace(drawn, root="built"), seed).batches(0, 1))
        for (images, labels), (others, other_labels) in zip(
            image_stream(drawn, seed).batches(0, 1), expected, strict=True
        ):
            assert torch.equal(images, others)
            assert torch.equal(labels, other_labels)
    assert {path.name for path in tmp_path.iterdir()} == {"built", ".built.lock"}
