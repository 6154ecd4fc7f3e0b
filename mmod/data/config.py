"""Configs of images, pairs and text, apart from the readers: a command line shows its options without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mmod.data.corrupt import OnCorrupt
from mmod.io.remote import RemoteConfig
from mmod.values import Checked, one_of

EMBEDDED = ("digits", "crowds")
"""Embedded image sets, built on demand."""
PREPARATION = ("mean", "std", "crop_pct", "crop_mode", "interpolation")
"""Keys of `DataConfig` that say how images are prepared for evaluation; None leaves them to the model."""
_TORCHVISION = (
    *("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist", "inaturalist", "inat", "places365"),
    "imagenet",
)
_STREAMS = ("hfids", "tfds", "wds")
_TEXT_SPLITS = ("train", "val", "test")

# timm's names. The policy is the first word of `auto_augment`.
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
_TRAIN_INTERPOLATIONS = (*_INTERPOLATIONS, "random")
_POLICIES = ("rand", "augmix", "original", "originalr", "v0", "v0r", "3a")


@dataclass
class AugmentConfig(Checked, group="data.augment"):
    """Training augmentation: arguments of `timm.data.create_transform`.

    Args:
        scale: Area of the crop, as a share of the image; None for timm's default.
        hflip: Probability of a horizontal flip.
        color_jitter: Strength of the colour jitter; unused when `auto_augment` replaces it.
        auto_augment: A policy such as "rand-m9-mstd0.5-inc1" or "3a"; None for no policy.
        interpolation: Interpolation of the crop: "bilinear", "bicubic", "random", ...
        re_prob: Probability of random erasing.
        re_mode: Fill of the erased area: "const", "rand" or "pixel".
    """

    scale: Annotated[tuple[float, float] | None, "(0, inf)"] = None
    hflip: Annotated[float, "[0, 1]"] = 0.5
    color_jitter: Annotated[float, "[0, inf)"] = 0.4
    auto_augment: str | None = None
    interpolation: Annotated[str, _TRAIN_INTERPOLATIONS] = "random"
    re_prob: Annotated[float, "[0, 1]"] = 0.0
    re_mode: Literal["const", "rand", "pixel"] = "const"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.auto_augment is not None:
            one_of("the policy of data.augment.auto_augment", self.auto_augment.partition("-")[0], _POLICIES)


@dataclass(kw_only=True)
class SourceConfig(Checked, group="data"):
    """Settings of every source that may hold corrupt data or lie on another machine.

    Args:
        on_corrupt: "raise" stops at a sample or shard that cannot be read. "skip" counts it in the report: training
            replaces it by the next readable sample, evaluation leaves it out.
        max_corrupt: Maximum number of faults that "skip" leaves out; None for any number.
        remote: How remote shards are read.
    """

    on_corrupt: OnCorrupt = "raise"
    max_corrupt: Annotated[int | None, "[0, inf)"] = None
    remote: RemoteConfig = field(default_factory=RemoteConfig)


@dataclass(kw_only=True)
class StreamConfig(Checked, group="data"):
    """Settings of every stream of batches.

    Args:
        batch_size: Samples per batch and process.
        workers: Worker processes; 0 reads in the training process.
        pin_memory: Return batches in pinned memory (for a GPU).
    """

    batch_size: Annotated[int, "[1, inf)"] = 64
    workers: Annotated[int, "[0, inf)"] = 0
    pin_memory: bool = False


@dataclass
class DataConfig(StreamConfig, SourceConfig):
    """Config of a data set of images.

    Args:
        source: Where images come from, one of

            - "folder": class folders for each split, `ROOT/SPLIT/CLASS/IMAGE`;
            - "shards:PATTERN": webdataset shards, with `{split}` in the pattern;
            - "hf-datasets:NAME:SPLIT" or "hf-datasets:NAME@SUBSET:SPLIT": a data set of the hub, streamed;
            - "hf-datasets:BUILDER:FILES": files, such as "hf-datasets:parquet:data/{split}-*.parquet";
            - "maps:SIDE": images and label maps, scaled to squares of SIDE pixels;
            - "torch/NAME": a set of torchvision, by its name for `timm.data.create_dataset`;
            - "digits" or "digits:DIFFICULTY": the embedded digits, each drawn when it is read;
            - "crowds" or "crowds:DIFFICULTY": the same with a label per patch.
        root: Folder of the data. Embedded sets are built there; without it, nothing is stored. Shards keep indices,
            and copies of remote shards, here.
        train_split: Split to train on.
        val_split: Split to evaluate on.
        train_limit: Number of training images, drawn once and spread evenly over the classes; None uses all.
        val_limit: Number of evaluation images, drawn in the same way.
        image_size: Side of an image, in pixels.
        channels: 1 (grey) or 3 (RGB).
        mean: Mean per channel. None takes the mean of the starting model, and the run records it: that of the model's
            run or saved folder, else timm's for its name. Embedded sets have their own, and grey images 0.5.
        std: Standard deviation per channel, of pixels in [0, 1]; None as for `mean`.
        augment: Augmentation of training images; None resizes and crops them as for evaluation.
        crop_pct: Share of the resized image that the evaluation crop keeps; None as for `mean`, 0.875 for grey images.
            Set 1 for images that already have `image_size`. Embedded sets are never cropped.
        crop_mode: How the evaluation resizes: "center" the shorter side, "border" the longer one, "squash" both; None
            as for `mean`.
        interpolation: Interpolation of the evaluation resize; None as for `mean`.
        options: Further arguments of `timm.data.create_dataset` for "torch/NAME", such as `download`.
        classes: File with the names of the model's classes in the order of its outputs, one per line or as JSON. The
            names of the data are matched to them. None numbers the training classes in the order of their names. Set
            it for weights without a run folder, or whose run folder has no `classes.json`, and for class folders whose
            names begin with `.`, `__` or `@`.
        columns: Columns of images and classes of "hf-datasets:".
        label_patch: Side of a patch in pixels, for one class per patch; None for one class per image. The class of a
            patch is the most frequent one of its pixels in the label map: `.seg.png` in shards, or the map of
            "maps:SIDE". Images are square, and label maps have the size of their image. Pixels of value 255 have no
            class.
    """

    source: str = "digits"
    root: str | None = None
    train_split: str = "train"
    val_split: str = "val"
    train_limit: Annotated[int | None, "[1, inf)"] = None
    val_limit: Annotated[int | None, "[1, inf)"] = None
    image_size: Annotated[int, "[1, inf)"] = 32
    channels: Literal[1, 3] = 1
    mean: tuple[float, ...] | None = None
    std: Annotated[tuple[float, ...] | None, "(0, 1]"] = None
    augment: AugmentConfig | None = None
    crop_pct: Annotated[float | None, "(0, 1]"] = None
    crop_mode: Literal["center", "border", "squash"] | None = None
    interpolation: Annotated[str | None, _INTERPOLATIONS] = None
    options: dict[str, object] = field(default_factory=dict)
    classes: str | None = None
    columns: tuple[str, str] = ("image", "label")
    label_patch: Annotated[int | None, "[1, inf)"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # What stands behind the colon is a difficulty, a pattern or a side, which only some sources have.
        reader = self.source.partition(":")[0]
        if reader == "maps":
            self._check_maps()
        elif self.source != "folder" and reader not in (*EMBEDDED, "shards", "hf-datasets"):
            _check_known(self.source)
        if self.options and not reader.lower().startswith("torch/"):
            raise ValueError(
                f"data.options={self.options} are arguments of torch/NAME, which source {self.source!r} is not: leave "
                "them out"
            )
        self._check_labels(reader)
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None and len(values) != self.channels:
                raise ValueError(f"{name}={values} must have channels={self.channels} values")

    def _check_maps(self) -> None:
        """Raise a ValueError unless the squares of "maps:SIDE" divide into patches."""
        side = self.source.partition(":")[2]
        if self.root is None or self.label_patch is None:
            raise ValueError(f"source {self.source!r} needs root, the folder, and label_patch, the side of a patch")
        is_multiple = side.isdecimal() and int(side) > 0 and int(side) % self.label_patch == 0
        if not is_multiple:
            raise ValueError(
                f"source {self.source!r} must be maps:SIDE with a multiple of label_patch={self.label_patch}, such as "
                f"maps:{24 * self.label_patch}"
            )

    def _check_labels(self, reader: str) -> None:
        """Raise a ValueError if the source lacks labels per image or per patch, whichever the config needs."""
        side = self.label_patch
        if side is None:
            if reader == "crowds":
                raise ValueError("source 'crowds' has labels for patches: set label_patch to the model's patch size")
            return
        if reader not in ("crowds", "maps", "shards"):
            raise ValueError(f"label_patch={side} needs label maps, which source {self.source!r} lacks")
        # Moved pixels would no longer stand under their labels.
        if self.augment is not None:
            raise ValueError(f"label_patch={side} cannot be combined with augment, which moves images only")


def _check_known(name: str) -> None:
    """Raise a ValueError for a source that is none of torchvision's sets."""
    reader, _, dataset = name.partition("/")
    reader = reader.lower()
    if reader in _STREAMS and dataset:
        raise ValueError(
            f"source {name!r} is a stream without random access, so a run could not be resumed exactly; "
            "use 'shards:PATTERN' for webdataset shards, 'hf-datasets:NAME:SPLIT' for other streams"
        )
    if reader != "torch" or dataset.lower() not in _TORCHVISION:
        raise ValueError(
            f"source {name!r} is unknown; valid: digits, digits:DIFFICULTY, crowds, crowds:DIFFICULTY, shards:PATTERN, "
            "hf-datasets:NAME:SPLIT, maps:SIDE, folder, and torch/NAME with one of "
            f"{', '.join(_TORCHVISION)}"
        )


@dataclass
class PairsConfig(StreamConfig, SourceConfig):
    """Config of a data set of image-text pairs.

    Args:
        train: Training data, one or several of

            - paths or URLs of webdataset shards, with brace ranges (`{00000..00127}.tar`) or globs (local paths only);
              remote shards (`s3://`, `gs://`, `https://`, `hf://`, ...) are copied to `root` before they are read;
            - `pipe:` commands that print a shard;
            - `hf-datasets:NAME:SPLIT` or `hf-datasets:BUILDER:FILES`, streamed by `datasets`;
            - `scenes:DIFFICULTY/SPLIT`, the embedded set, built on demand.
        val: Evaluation data, in the same form. With training data of your own, name evaluation data of your own too.
        root: Folder for copies of remote shards and for indices, or of the embedded set (default
            `runs/data/captioned-scenes-DIFFICULTY`).
        columns: Columns of images and captions of "hf-datasets:".
    """

    train: str | list[str] = "scenes:default/train"
    val: str | list[str] = "scenes:default/val"
    root: str | None = None
    columns: tuple[str, str] = ("image", "text")


@dataclass
class TextConfig(StreamConfig):
    """Config of a byte-level text data set, read in windows of one length that do not overlap.

    A checksum of a file's or document's content assigns it to a split, 90 % to "train", so that copies share a split.

    Args:
        source: Where text comes from; all of it is read into memory at the start:

            - "python": the standard library of the running Python, which differs between versions;
            - a glob pattern such as "books/**/*.txt": files are read as bytes, without a byte order mark;
            - "hf-datasets:NAME:SPLIT" or "hf-datasets:BUILDER:FILES": the column `text`.
        train_split: Split to train on: "train", "val" or "test".
        val_split: Split to evaluate on.
        val_limit: Number of evaluation windows, spread evenly over the split; None uses all.
        length: Window length in bytes.
    """

    source: str = "python"
    train_split: Annotated[str, _TEXT_SPLITS] = "train"
    val_split: Annotated[str, _TEXT_SPLITS] = "val"
    val_limit: Annotated[int | None, "[1, inf)"] = None
    length: Annotated[int, "[1, inf)"] = 256
    batch_size: int = field(default=32, kw_only=True)
