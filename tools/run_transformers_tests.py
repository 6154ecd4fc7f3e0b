"""Run transformers' own tests on dense and on routed models: those of loading and saving, or with --all every one.

    pip install parameterized
    python tools/run_transformers_tests.py [--routed] [--all] [--sdist FILE] [PYTEST ARGUMENTS]

Downloads the source distribution of the installed transformers with pip. It carries the tests that all models share,
not those of single models, so the small models that are tested are those of `tools/transformers_families.py`.
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

TESTS = (
    "test_save_load",
    "test_from_pretrained_no_checkpoint",
    "test_load_contiguous_weights",
    "test_can_init_all_missing_weights",
    "test_init_weights_can_init_buffers",
    "test_torch_save_load",
    "test_base_model_prefix_loads_base_weights",
    "test_load_save_without_tied_weights",
    "test_tied_weights_keys",
    "test_model_weights_reload_no_missing_tied_weights",
    "test_can_be_initialized_on_meta",
    "test_can_load_with_device_context_manager",
    "test_can_load_with_global_device_set",
    "test_cannot_load_with_meta_device_context_manager",
    "test_can_load_ignoring_mismatched_shapes",
    "test_load_with_mismatched_shapes",
    "test_reverse_loading_mapping",
    "test_can_load_from_already_mapped_keys",
)
# The shared tests import these two, of which the tests that run here need nothing.
EMPTY = {"exporters/test_export.py": "ExportTesterMixin", "generation/test_utils.py": "GenerationTesterMixin"}


def fetch_tests(folder: Path, sdist: Path | None) -> None:
    """Put transformers' shared tests into the package `shared` in a folder."""
    if sdist is None:
        requirement = f"transformers=={importlib.metadata.version('transformers')}"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            "transformers",
            requirement,
        ]
        subprocess.run([*pip, "--dest", str(folder)], check=True)
        (sdist,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = (path for path in folder.glob("transformers-*") if path.is_dir())
    shutil.move(source / "tests", folder / "shared")
    shutil.rmtree(source)
    (folder / "shared/__init__.py").touch()
    for name, mixin in EMPTY.items():
        path = folder / "shared" / name
        path.parent.mkdir(exist_ok=True)
        path.with_name("__init__.py").touch()
        path.write_text(f"class {mixin}:\n    pass\n")


def main() -> int:
    """Parse the command line, run the tests, return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routed", action="store_true", help="route every model that is made")
    parser.add_argument("--all", action="store_true", help="every test that models share, not loading and saving alone")
    parser.add_argument("--sdist", type=Path, help="transformers-X.Y.Z.tar.gz that is there already")
    arguments, pytest_arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fetch_tests(folder, arguments.sdist)
        shutil.copy(Path(__file__).with_name("transformers_families.py"), folder / "test_families.py")
        search = os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": search, "MMOD_ROUTED": str(int(arguments.routed))}
        command = [sys.executable, "-m", "pytest", "test_families.py", "-q", "-rfs", "--import-mode=importlib"]
        selection = [*([] if arguments.all else ["-k", " or ".join(TESTS)]), *pytest_arguments]
        return subprocess.run([*command, *selection], cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
