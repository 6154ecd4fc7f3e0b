"""One folder for synthetic sets, which the first test that asks for a set builds and the others of its process read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# Processes that a test starts inherit the variable; the folder is removed at the end of the one that made it.
_FOLDER = None if "MMOD_TEST_SETS" in os.environ else tempfile.TemporaryDirectory(prefix="mmod-sets-")
SETS = Path(os.environ["MMOD_TEST_SETS"] if _FOLDER is None else _FOLDER.name)
os.environ["MMOD_TEST_SETS"] = str(SETS)
