"""Where images come from: the embedded data set, webdataset shards, and whatever timm reads."""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

if TYPE_CHECKING:
    from mmod.data.config import AugmentConfig, DataConfig
    from mmod.data.corrupt import CorruptDataError, CorruptReport, Fault
    from mmod.data.loader import BatchStream, create_eval_stream, create_train_stream

__all__ = [
    "AugmentConfig",
    "BatchStream",
    "CorruptDataError",
    "CorruptReport",
    "DataConfig",
    "Fault",
    "create_eval_stream",
    "create_train_stream",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "config": ("AugmentConfig", "DataConfig"),
        "corrupt": ("CorruptDataError", "CorruptReport", "Fault"),
        "loader": ("BatchStream", "create_eval_stream", "create_train_stream"),
    },
)
