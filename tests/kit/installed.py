"""Packages in a folder, as pip leaves them: code and the version that it says."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, package: str, name: str, needs: str = "") -> None:
    """Write a package of one file and its description.

    Args:
        package: The code of the file.
        name: The package's name and version, with a hyphen between them.
        needs: What it requires.
    """
    described = folder / f"{name}.dist-info"
    described.mkdir()
    title, _, number = name.partition("-")
    lines = ["Metadata-Version: 2.1", f"Name: {title}", f"Version: {number}"]
    (described / "METADATA").write_text("\n".join([*lines, *([f"Requires-Dist: {needs}"] if needs else []), ""]))
    (folder / title).mkdir()
    (folder / title / "__init__.py").write_text(package)
