import gzip
import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from mmod.data.corrupt import CorruptDataError, CorruptReport
from mmod.data.readers.shards import ShardSource, expand_pattern
from mmod.io.remote import RemoteConfig
from tests.kit.pair_files import write_tar
from tests.kit.shards import png, read_all, write_samples


def test_samples_of_all_shards_in_order_and_by_number(tmp_path):
    write_samples(tmp_path / "a-0.tar", range(5))
    write_samples(tmp_path / "a-1.tar", range(5, 7))
    source = ShardSource(str(tmp_path / "a-{0..1}.tar"), CorruptReport())
    assert read_all(source) == [(key, key % 10) for key in range(7)]
    assert source.read(6, "RGB")[0].mode == "RGB"


def test_the_same_samples_as_webdataset_reads(tmp_path):
    from webdataset import WebDataset

    members = {"./dir/1.png": png(1), "./dir/1.cls": b"1", "__meta__": b"x", "._junk": b"", "dir/2.cls": b" 2\n"}
    members |= {"dir/2.seg.png": png(9), "dir/2.PNG": png(2), "dir/2.json": b"{}"}
    path = write_tar(tmp_path / "a.tar", members)
    theirs = [
        (int(np.asarray(Image.open(io.BytesIO(item["png"])))[0, 0]), int(item["cls"]))
        for item in WebDataset(str(path), shardshuffle=False)
    ]
    assert read_all(ShardSource(str(path), CorruptReport())) == theirs == [(1, 1), (2, 2)]


def test_patterns(tmp_path):
    for number in range(3):
        write_samples(tmp_path / f"train-{number}.tar", range(1))
    train = [str(tmp_path / f"train-{number}.tar") for number in range(3)]
    assert expand_pattern(f"{tmp_path}/train-*.tar") == train
    assert expand_pattern(f"{tmp_path}/train-{{0..2}}.tar") == train
    assert expand_pattern(f"file://{tmp_path}/train-[12].tar::{train[0]}") == [*train[1:], train[0]]
    assert expand_pattern("pipe:cat {a,b}.tar") == ["pipe:cat a.tar", "pipe:cat b.tar"]


@pytest.mark.parametrize("pattern", ["train-{0..3}.tar", "val-*.tar", ""])
def test_a_pattern_that_matches_nothing_is_an_error(tmp_path, pattern):
    for number in range(3):
        write_samples(tmp_path / f"train-{number}.tar", range(1))
    with pytest.raises(ValueError, match=r"no shard matches|names no shard"):
        ShardSource(str(tmp_path / pattern) if pattern else "", CorruptReport())


def test_a_shard_named_twice_is_an_error(tmp_path):
    path = write_samples(tmp_path / "a.tar", range(1))
    with pytest.raises(ValueError, match=r"a\.tar twice"):
        expand_pattern(f"{path}::{tmp_path}/*.tar")


def test_a_compressed_shard_is_an_error_even_when_skipping(tmp_path):
    plain = write_samples(tmp_path / "a.tar", range(2))
    packed = tmp_path / "a.tar.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(ValueError, match="is compressed and cannot be read in random order: decompress it"):
        ShardSource(str(packed), CorruptReport("skip"))


def test_a_shard_that_shrinks_later_is_an_unreadable_sample(tmp_path):
    path = write_samples(tmp_path / "a.tar", range(3))
    source = ShardSource(str(path), CorruptReport())
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(ValueError, match="changed since it was indexed"):
        source.read(2, "L")


def test_a_remote_shard_that_fails_leaves_no_copy(tmp_path):
    path = write_samples(tmp_path / "0.tar", range(3))
    report, remote = CorruptReport("skip"), RemoteConfig(retries=1, backoff=0)
    pattern = [f"pipe:head -c 900 {path}; exit 3", str(path)]
    assert len(ShardSource(pattern, report, tmp_path / "cache", remote=remote)) == 3
    assert report.counts == {pattern[0]: 1}
    assert "cannot be read, in 2 attempts" in str(report)
    assert "1 remote reads repeated" in str(report)
    with pytest.raises(CorruptDataError, match="exit 3 cannot be read, in 2 attempts"):
        ShardSource(pattern, CorruptReport(), tmp_path / "cache", remote=remote)
    with pytest.raises(CorruptDataError, match="more than max_corrupt=0 faults, the last: pipe:head"):
        ShardSource(pattern, CorruptReport("skip", limit=0), tmp_path / "cache", remote=remote)
    assert list((tmp_path / "cache").glob("*.tar")) == []


def test_long_member_names(tmp_path):
    name = "x" * 150
    path = tmp_path / "a.tar"
    for tar_format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(path, "w", format=tar_format) as tar:
            for key, data in ((f"{name}.png", png(5)), (f"{name}.cls", b"5")):
                info = tarfile.TarInfo(key)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        assert read_all(ShardSource(str(path), CorruptReport())) == [(5, 5)]
