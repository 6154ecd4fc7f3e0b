"""Image files by path: what is inside a folder, and what is a file at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmod.data.corrupt import UnusableError
from mmod.data.readers import images
from mmod.data.readers.images import ImageFiles, read_image


def read(files: ImageFiles, name: str) -> bytes:
    return read_image(files.locate(name))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of files and links, beside a file that is not in it."""
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    for path in (tmp_path / "outside.png", root / "a.png", root / "sub" / "b.png"):
        path.write_bytes(path.name.encode())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "c.png").write_bytes(b"c.png")
    links = {
        "inner.png": "sub/b.png",
        "outer.png": "../outside.png",
        "other": "../other",
        "gone.png": "nowhere",
        "loop": "loop",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    (root / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(root / "pipe.png")
    return root


INSIDE = ("a.png", "sub/b.png", "sub/../a.png", "./a.png", "inner.png", "{}/a.png", "{}/sub/../inner.png")
LINKED = ("outer.png", "other/c.png")
FAULTS = {
    "../outside.png": "image outside the folder",
    "sub/../../outside.png": "image outside the folder",
    "{}/../outside.png": "image outside the folder",
    "/etc/hostname": "image outside the folder",
    "/dev/zero": "image outside the folder",
    "zero.png": "image outside the folder",
    "pipe.png": "image cannot be read",
    "sub": "image cannot be read",
    ".": "image cannot be read",
    "loop": "image cannot be read",
    "none.png": "image not found",
    "gone.png": "image not found",
    "none/a.png": "image not found",
    "a.png/b.png": "image not found",
    "a\0.png": "image cannot be read",
    "a" * 5000: "image cannot be read",
    "a" * 10**7: "image cannot be read",
    "\ud800.png": "image cannot be read",
    "http://example.org/a.png": "image not found",
}


@pytest.mark.parametrize("name", INSIDE)
def test_files_of_the_folder_are_read(folder: Path, name: str) -> None:
    name = name.format(folder)
    assert read(ImageFiles(folder), name) == Path(folder, name).read_bytes()


@pytest.mark.parametrize("name", LINKED)
def test_links_lead_out_only_where_that_is_asked_for(folder: Path, name: str) -> None:
    with pytest.raises(UnusableError, match=r"image outside the folder: .*is not in"):
        read(ImageFiles(folder), name)
    assert read(ImageFiles(folder, follow_links=True), name) == Path(folder, name).read_bytes()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", FAULTS, ids=lambda name: ascii(name)[:30])
@pytest.mark.parametrize("open_", [ImageFiles.locate, read])
def test_everything_else_has_a_reason(folder: Path, name: str, open_: object) -> None:
    with pytest.raises(UnusableError) as caught:
        open_(ImageFiles(folder), name.format(folder) if "{" in name else name)  # type: ignore[operator]
    assert caught.value.reason == FAULTS[name]
    path = os.path.join(folder, name.format(folder) if "{" in name else name)
    # Of a long path a message quotes both ends.
    for quoted in (path[:400], path[-400:]):
        assert quoted in str(caught.value) or repr(quoted)[1:-1] in str(caught.value)
    assert len(str(caught.value)) < 1100


@pytest.mark.timeout(20)
def test_followed_links_lead_to_files_alone(folder: Path) -> None:
    with pytest.raises(UnusableError, match=r"zero\.png is no regular file"):
        read(ImageFiles(folder, follow_links=True), "zero.png")
    with pytest.raises(UnusableError, match=r"pipe\.png is no regular file"):
        read_image(str(folder / "pipe.png"))


def test_every_absolute_path_lies_in_the_root(folder: Path) -> None:
    assert read(ImageFiles("/"), f"{folder}/outer.png") == b"outside.png"


def test_a_folder_that_is_a_link_is_no_way_out(folder: Path) -> None:
    (folder.parent / "alias").symlink_to(folder)
    assert read(ImageFiles(folder.parent / "alias"), "sub/b.png") == b"b.png"


def test_a_file_is_looked_for_again_where_a_listing_lacks_it(folder: Path) -> None:
    files = ImageFiles(folder)
    with pytest.raises(UnusableError, match="not found"):
        files.locate("late.png")
    (folder / "late.png").write_bytes(b"late")
    assert read(files, "late.png") == b"late"
    (folder / "a.png").unlink()
    with pytest.raises(UnusableError, match="not found"):
        read(files, "a.png")


def test_long_files_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(folder / "a.png", 1 << 40)
    monkeypatch.setattr(images, "open", lambda *_: pytest.fail("it was opened"), raising=False)
    with pytest.raises(UnusableError, match="image file too long"):
        read(ImageFiles(folder), "a.png")
