"""The step of the build that pyproject.toml cannot name: the folder `configs` goes into the wheel as mmod/configs."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Build the package; in an editable installation the configs are found in the repository."""

    def run(self) -> None:
        """Copy the modules, then the configs."""
        super().run()
        if not self.editable_mode:
            # The benchmarks are run from a clone.
            left_out = shutil.ignore_patterns("benchmark")
            shutil.copytree("configs", Path(self.build_lib, "mmod", "configs"), ignore=left_out, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfigs})
