from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A colour image, a grey one, and a file that is no image, for records of conversations."""
    Image.new("RGB", (12, 12), (255, 0, 0)).save(tmp_path / "a.png")
    Image.new("L", (12, 24)).save(tmp_path / "b.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    return tmp_path
