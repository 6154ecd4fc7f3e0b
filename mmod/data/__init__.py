"""Where images come from: the embedded data set, webdataset shards, and whatever timm reads."""

from mmod.data.corrupt import CorruptDataError, CorruptReport, Fault
from mmod.data.loader import AugmentConfig, BatchStream, DataConfig, create_eval_stream, create_train_stream

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
