"""Run timm's own model tests on the routed models: `python tools/run_timm_tests.py [PYTEST ARGUMENTS]`.

Downloads the source distribution of the installed timm with pip, which carries the tests, into a temporary folder.
Left out are TorchScript, which routed models refuse, and the tests that download weights.
"""

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

LEFT_OUT = "torchscript or test_model_inference or test_model_load_pretrained"


def fetch_tests(folder: Path, sdist: Path | None) -> None:
    """Put timm's tests, without the package beside them, into `folder`."""
    if sdist is None:
        requirement = f"timm=={importlib.metadata.version('timm')}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "timm", requirement]
        subprocess.run([*pip, "--dest", str(folder)], check=True)
        (sdist,) = folder.glob("timm-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = (path for path in folder.glob("timm-*") if path.is_dir())
    shutil.move(source / "tests", folder / "tests")
    shutil.move(source / "pyproject.toml", folder / "pyproject.toml")
    shutil.rmtree(source)


def main() -> int:
    """Parse the command line, run the tests, return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdist", type=Path, help="timm-X.Y.Z.tar.gz that is there already, instead of downloading")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="routed models to test; all of them by default")
    arguments, pytest_arguments = parser.parse_known_args()

    from mmod.registry.timm import ROUTED_MODELS

    unknown = sorted(set(arguments.models or ()) - set(ROUTED_MODELS))
    if unknown:
        parser.error(f"not routed models: {', '.join(unknown)}; there are {', '.join(ROUTED_MODELS)}")
    chosen = " or ".join(arguments.models or ROUTED_MODELS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fetch_tests(folder, arguments.sdist)
        search = os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH")]))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "mmod.registry.timm",
            "tests/test_models.py",
            "-q",
            "-rs",
        ]
        selection = ["-k", f"({chosen}) and not ({LEFT_OUT})", *pytest_arguments]
        return subprocess.run([*command, *selection], cwd=folder, env={**os.environ, "PYTHONPATH": search}).returncode


if __name__ == "__main__":
    sys.exit(main())
