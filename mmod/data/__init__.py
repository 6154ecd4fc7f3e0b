"""Images in batches: from the embedded data sets, webdataset shards, and every data set that timm reads."""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

# For type checkers; at run time, lazy_names imports the same names on first use.
# ruff: noqa: F401
if TYPE_CHECKING:
    from mmod.data.config import AugmentConfig, DataConfig
    from mmod.data.corrupt import CorruptDataError, CorruptReport, Fault
    from mmod.data.loader import image_stream
    from mmod.data.stream import BatchStream

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "mmod.data.config": ["AugmentConfig", "DataConfig"],
        "mmod.data.corrupt": ["CorruptDataError", "CorruptReport", "Fault"],
        "mmod.data.loader": ["image_stream"],
        "mmod.data.stream": ["BatchStream"],
    },
)
