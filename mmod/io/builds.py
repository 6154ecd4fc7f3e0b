"""torch and torchvision of different builds, which fail when torchvision is imported."""

from __future__ import annotations

import importlib
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version

from mmod.version import __version__

# How torch says that the compiled half of torchvision did not load; transformers quotes it in errors of its own.
_UNLOADED = re.compile(r"operator torchvision::\w+ does not exist")


def explain_unloaded(error: BaseException) -> str:
    """Return what to install if an error says that torchvision does not fit torch; empty for other errors."""
    found = _UNLOADED.search(str(error))
    if found is None:
        return ""
    _, _, tag = version("torch").partition("+")
    advice = "install both with one command, `pip install --force-reinstall torch torchvision`"
    if tag:
        index = f"--index-url https://download.pytorch.org/whl/{tag}"
        advice = (
            f"install both with one command, `pip install --force-reinstall torch torchvision {index}`, or where that "
            "index gives another pair, the same without --index-url"
        )
    return (
        f"torch {version('torch')} and torchvision {version('torchvision')} are of different builds ({found[0]}): "
        f"{advice}"
    )


def installed_versions() -> str:
    """Return the versions of mmod, torch and torchvision, without an import of them."""
    told = [f"mmod {__version__}"]
    for package in ("torch", "torchvision"):
        # Routing itself needs no torchvision.
        with suppress(PackageNotFoundError):
            told.append(f"{package} {version(package)}")
    return ", ".join(told)


def check_builds() -> None:
    """Import torchvision if its version is not that of torch, which raises where the two are of different builds.

    Versions are read without an import. Alone they prove nothing: some mixed pairs work.
    """
    try:
        torch, torchvision = version("torch"), version("torchvision")
        needed = re.findall(r"\btorch ?\(?==([\d.]+)", " ".join(requires("torchvision") or []))
    except PackageNotFoundError:
        return
    public, _, tag = torch.partition("+")
    if tag != torchvision.partition("+")[2] or public not in (needed or [public]):
        importlib.import_module("torchvision")
