"""Keep the repository's folder `datasets` from being taken for the package of that name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_NAME = "datasets"


def hide_own_folder() -> None:
    """Let `datasets` be the installed package, or be missing, never the folder beside this package.

    Python takes a folder on its path for a package where no other is found, and transformers then believes that
    `datasets` is installed.
    """
    folder = Path(__file__).parents[3] / _NAME
    if not folder.is_dir():
        return
    loaded = sys.modules.get(_NAME)
    spec = importlib.util.find_spec(_NAME) if loaded is None else loaded.__spec__
    places = [] if spec is None or spec.origin is not None else spec.submodule_search_locations or []
    if {Path(place).resolve() for place in places} != {folder.resolve()}:
        return
    sys.modules[_NAME] = None  # type: ignore[assignment]
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        transformers.utils.is_datasets_available.cache_clear()
