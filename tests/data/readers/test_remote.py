"""Remote shards: from fsspec's memory, and from a web server in this process that fails as it is asked to."""

from __future__ import annotations

import http.server
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from mmod.data.config import DataConfig, PairsConfig
from mmod.data.corrupt import CorruptDataError, CorruptReport
from mmod.data.loader import image_stream, pairs_stream
from mmod.data.readers import shard_files
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from mmod.data.readers.shards import ShardSource, expand_pattern
from mmod.data.synthetic.questions import QUESTIONS
from mmod.io.remote import RemoteConfig, RemoteError, RemoteFiles
from tests.kit.pair_files import tokenizer, transform, write_pairs
from tests.kit.processes import run_processes
from tests.kit.shards import read_all, write_samples

SAMPLES = [(key, key % 10) for key in range(6)]
URL = "memory://shards/{0..1}.tar"


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Path]:
    """Two shards of three samples, as local files and in fsspec's memory."""
    memory = fsspec.filesystem("memory")
    for number in range(2):
        path = write_samples(tmp_path / f"{number}.tar", range(number * 3, number * 3 + 3))
        memory.pipe(f"/shards/{number}.tar", path.read_bytes())
    yield tmp_path
    memory.store.clear()


def forbid_indexing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a shard was indexed again")

    monkeypatch.setattr(ShardSource, "_make_index", fail)


@pytest.mark.parametrize("pattern", [URL, "pipe:cat {folder}/{{0..1}}.tar"])
def test_shards_are_copied_and_indexed_once(pattern: str, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = shards / "cache"
    pattern = pattern if pattern == URL else pattern.format(folder=shards)
    with pytest.raises(ValueError, match="needs a folder"):
        ShardSource(pattern, CorruptReport())
    assert read_all(ShardSource(pattern, CorruptReport(), cache)) == SAMPLES
    forbid_indexing(monkeypatch)
    # Copies that were removed are made again, and their indices kept.
    for path in cache.glob("*.tar"):
        path.unlink()
    ShardSource(pattern, CorruptReport(), cache)
    assert len(list(cache.glob("*.tar"))) == 2
    fsspec.filesystem("memory").store.clear()
    for path in shards.glob("*.tar"):
        path.unlink()
    assert read_all(ShardSource(pattern, CorruptReport(), cache)) == SAMPLES


def test_without_copies_samples_are_read_from_their_urls(shards: Path) -> None:
    source = ShardSource(URL, CorruptReport(), shards / "cache", remote=RemoteConfig(copy=False))
    assert read_all(source) == SAMPLES
    assert source.labels() == [label for _, label in SAMPLES]
    assert not list((shards / "cache").glob("*.tar"))


def test_indices_of_another_node_save_the_first_pass(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteConfig(copy=False)
    ShardSource(URL, CorruptReport(), shards / "one", remote=remote)
    shutil.copytree(shards / "one", shards / "other")
    forbid_indexing(monkeypatch)
    assert read_all(ShardSource(URL, CorruptReport(), shards / "other", remote=remote)) == SAMPLES


def test_an_index_of_another_version_is_not_used(shards: Path) -> None:
    remote = RemoteConfig(copy=False)
    ShardSource(URL, CorruptReport(), shards / "cache", remote=remote)
    path = write_samples(shards / "new.tar", range(7, 10))
    assert path.stat().st_size == (shards / "0.tar").stat().st_size
    fsspec.filesystem("memory").pipe("/shards/0.tar", path.read_bytes()[:1024] + bytes(9216))
    with pytest.raises(CorruptDataError, match=r"memory://shards/0\.tar \[0007\]: needs one image"):
        ShardSource(URL, CorruptReport(), shards / "cache", remote=remote)


def test_a_local_index_follows_its_shard(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(shards / "0.tar")
    assert len(ShardSource(path, CorruptReport())) == 3
    write_samples(shards / "0.tar", range(5))
    assert len(ShardSource(path, CorruptReport())) == 5
    kept = shards / ".0.tar.cls.index"
    for damage in (lambda data: b"", lambda data: data[:-32], lambda data: data[:-16] + b"\xff" * 16):
        kept.write_bytes(damage(kept.read_bytes()))
        assert len(ShardSource(path, CorruptReport())) == 5
    forbid_indexing(monkeypatch)
    assert len(ShardSource(path, CorruptReport())) == 5


def test_faults_are_kept_with_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_samples(tmp_path / "a.tar", range(3))
    path.write_bytes(path.read_bytes()[: 512 * 9 + 20])
    first, second = CorruptReport("skip"), CorruptReport("skip")
    ShardSource(str(path), first)
    forbid_indexing(monkeypatch)
    ShardSource(str(path), second)
    assert second.faults == first.faults != {}
    with pytest.raises(CorruptDataError, match="within this member"):
        ShardSource(str(path), CorruptReport())


def test_a_shard_that_is_gone_is_an_error_or_counted(shards: Path) -> None:
    cache, url = shards / "cache", "memory://shards/{0..2}.tar"
    with pytest.raises(CorruptDataError, match=r"memory://shards/2\.tar cannot be read, in 1 attempts: FileNotFound"):
        ShardSource(url, CorruptReport(), cache)
    report = CorruptReport("skip")
    assert read_all(ShardSource(url, report, cache)) == SAMPLES
    assert report.counts == {"memory://shards/2.tar": 1}


def test_a_sample_that_cannot_be_read_names_the_url(shards: Path) -> None:
    source = ShardSource(URL, CorruptReport(), shards / "cache", remote=RemoteConfig(copy=False, retries=0))
    fsspec.filesystem("memory").store.clear()
    with pytest.raises(OSError, match=r"memory://shards/1\.tar cannot be read"):
        source.read(4, "L")


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_of_remote_shards_equal_those_of_local_ones(tmp_path: Path, shards: Path, workers: int) -> None:
    options = {"image_size": 8, "crop_pct": 1.0, "batch_size": 2, "workers": workers, "val_split": "0"}
    local = DataConfig(f"shards:{shards}/{{split}}.tar", train_split="{0..1}", **options)
    remote = DataConfig(
        "shards:memory://shards/{split}.tar",
        str(tmp_path / "cache"),
        "{0..1}",
        remote=RemoteConfig(copy=False),
        **options,
    )
    batches = [list(image_stream(config, seed=0).batches(1)) for config in (local, remote)]
    for (images, labels), (others, numbers) in zip(*batches, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, numbers)


def test_pairs_and_conversations(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/a/0.tar", write_pairs(tmp_path / "0.tar", range(4)).read_bytes())
    config = PairsConfig("memory://a/0.tar", root=str(tmp_path / "cache"), batch_size=4)
    _, tokens = next(pairs_stream(config, transform, tokenizer, seed=0).batches(0))
    assert sorted(tokens.flatten().tolist()) == [0, 1, 2, 3]
    QUESTIONS.build(tmp_path / "questions", "tiny")
    for path in (tmp_path / "questions").glob("test-*.tar"):
        memory.pipe(f"/q/{path.name}", path.read_bytes())
    chats = open_conversations("memory://q/test-000000.tar", ConversationsConfig(root=str(tmp_path / "cache")))
    local = open_conversations(f"{tmp_path}/questions/test-*.tar")
    assert [chat.messages for chat in map(chats.__getitem__, range(9))] == [local[i].messages for i in range(9)]


@pytest.mark.parametrize(
    ("url", "package"), [("s3://bucket/0.tar", "s3fs"), ("gs://bucket/0.tar", "gcsfs"), ("az://c/0.tar", "adlfs")]
)
def test_a_missing_driver_is_one_line(url: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ModuleNotFoundError, match=f"^{url} needs a driver that is not installed: .*[Ii]nstall {package}[^\n]*$"
    ):
        ShardSource(url, CorruptReport("skip"), tmp_path)


def test_an_unknown_protocol_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x9://a\.tar: Protocol not known: x9; https://, s3://"):
        ShardSource("x9://a.tar", CorruptReport("skip"), tmp_path)


def test_remote_patterns() -> None:
    assert expand_pattern("s3://b/{0..1}.tar::hf://datasets/a/b/2.tar") == [
        *("s3://b/0.tar", "s3://b/1.tar"),
        "hf://datasets/a/b/2.tar",
    ]


class Flaky(fsspec.AbstractFileSystem):
    """The memory, whose next operations fail or hang."""

    protocol = "flaky"
    cachable = False
    trouble: list[float | Exception] = []  # noqa: RUF012
    asked = 0

    def _do(self, name: str, path: str, *arguments: object, **options: object) -> object:
        type(self).asked += 1
        if self.trouble:
            next_one = self.trouble.pop(0)
            if isinstance(next_one, Exception):
                raise next_one
            time.sleep(next_one)
        return getattr(fsspec.filesystem("memory"), name)(self._strip_protocol(path), *arguments, **options)

    def info(self, path: str, **options: object) -> object:
        return self._do("info", path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> object:
        return self._do("cat_file", path, start=start, end=end)

    def open(self, path: str, mode: str = "rb", **options: object) -> object:
        return self._do("open", path, mode)


@pytest.fixture
def flaky(shards: Path, monkeypatch: pytest.MonkeyPatch) -> type[Flaky]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(Flaky, "trouble", [])
    monkeypatch.setattr(Flaky, "asked", 0)
    return Flaky


def test_attempts_are_repeated_and_counted(flaky: type[Flaky], shards: Path) -> None:
    flaky.trouble[:] = [OSError("reset"), ConnectionError("refused"), 5.0]
    report, remote = CorruptReport(), RemoteConfig(timeout=0.2, backoff=0.001)
    assert read_all(ShardSource("flaky://shards/0.tar", report, shards / "cache", remote=remote)) == SAMPLES[:3]
    assert int(report.retried) == 3
    assert str(report) == "no corrupt data\n3 remote reads repeated"


def test_a_source_that_hangs_ends_with_its_url(flaky: type[Flaky], shards: Path) -> None:
    flaky.trouble[:] = [5.0, 5.0]
    remote = RemoteConfig(timeout=0.1, retries=1, backoff=0.001)
    with pytest.raises(
        CorruptDataError, match=r"flaky://shards/0.tar cannot be read, in 2 attempts: TimeoutError: no byte"
    ):
        ShardSource("flaky://shards/0.tar", CorruptReport(), shards / "cache", remote=remote)


def test_a_shard_that_failed_is_not_asked_for_every_sample(flaky: type[Flaky], shards: Path) -> None:
    remote = RemoteConfig(copy=False, retries=1, backoff=0.001)
    source = ShardSource("flaky://shards/{0..1}.tar", CorruptReport("skip"), shards / "cache", remote=remote)
    flaky.trouble[:] = [OSError("down")] * 100
    before = flaky.asked
    for index in (0, 1, 2):
        with pytest.raises(OSError, match="down"):
            source.read(index, "L")
    assert flaky.asked - before == 2


def test_a_file_that_ends_early_is_no_copy(flaky: type[Flaky], shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host_info = Flaky.info
    monkeypatch.setattr(Flaky, "info", lambda self, path, **options: {**host_info(self, path), "size": 99999})
    with pytest.raises(RemoteError, match="the file ended after 10240 of 99999 bytes"):
        RemoteFiles(RemoteConfig(retries=0)).copy("flaky://shards/0.tar", shards / "copy.tar")
    assert not (shards / "copy.tar").exists()


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves ranges, and fails the first requests of a path."""

    failures: dict[str, int] = {}  # noqa: RUF012
    gets: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.gets.append(self.path)
        if self.failures.get(self.path, 0):
            self.failures[self.path] -= 1
            self.send_error(503)
            return
        data = (
            Path(self.translate_path(self.path)).read_bytes() if os.path.exists(self.translate_path(self.path)) else b""
        )
        if not data:
            self.send_error(404)
            return
        span = self.headers.get("Range")
        if span:
            first, last = (int(part) for part in span.removeprefix("bytes=").split("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            data = data[first : last + 1]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(shards: Path) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    Server.failures.clear()
    Server.gets.clear()
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: Server(*args, directory=str(shards)))
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    served.server_close()


@pytest.mark.parametrize("copy", [True, False])
def test_a_web_server(server: str, shards: Path, copy: bool) -> None:
    Server.failures["/1.tar"] = 2
    report = CorruptReport()
    remote = RemoteConfig(copy=copy, backoff=0.001)
    assert read_all(ShardSource(f"{server}/{{0..1}}.tar", report, shards / "cache", remote=remote)) == SAMPLES
    assert int(report.retried) == 2


def test_a_web_server_without_a_shard(server: str, shards: Path) -> None:
    with pytest.raises(CorruptDataError, match=r"7\.tar cannot be read, in 1 attempts: FileNotFoundError"):
        ShardSource(f"{server}/7.tar", CorruptReport(), shards / "cache")


def read_six(url: str, cache: Path) -> None:
    assert len(ShardSource(url, CorruptReport(), cache)) == 6


def test_processes_of_a_node_copy_a_shard_once(shards: Path) -> None:
    url = "::".join(f"pipe:echo {number} >> {shards}/copies; cat {shards}/{number}.tar" for number in range(2))
    assert run_processes(read_six, url, shards / "cache", world=2) == [0, 0]
    assert sorted((shards / "copies").read_text().split()) == ["0", "1"]


def test_processes_index_many_shards_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        write_samples(tmp_path / f"{number}.tar", range(number * 3, number * 3 + 3))
    (tmp_path / "3.tar").write_bytes(b"no tar file" * 100)
    sources = []
    for per_process in (100, 1):
        monkeypatch.setattr(shard_files, "_SHARDS_PER_PROCESS", per_process)
        report = CorruptReport("skip")
        sources.append((read_all(ShardSource(f"{tmp_path}/*.tar", report)), report.faults))
        for path in tmp_path.glob(".*.index"):
            path.unlink()
    assert sources[0] == sources[1]
    assert len(sources[0][0]) == 12
    assert len(sources[0][1]) == 1
