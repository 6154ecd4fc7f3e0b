"""Configs of images, image-text pairs and text: `DataConfig`, `PairsConfig` and `TextConfig`.

They stand apart from what reads the data, so that a command line knows its options without importing torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mmod.data.corrupt import OnCorrupt
from mmod.values import check_fields, one_of

EMBEDDED = ("digits", "crowds")
"""Embedded sets of images, built where they are not there."""
FOLDERS = ("folder", "", "torch/folder", "torch/image_folder")
"""Names of folders of images with one folder per class."""
_TORCHVISION = (
    *("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist", "inaturalist", "inat", "places365"),
    *("imagenet", "image_folder", "folder"),
)
_STREAMS = ("hfids", "tfds", "wds")


# As timm knows them; a policy is the first word of `auto_augment`.
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
_POLICIES = ("rand", "augmix", "original", "originalr", "v0", "v0r", "3a")


@dataclass
class AugmentConfig:
    """Training augmentation: the arguments of `timm.data.create_transform` that matter for images.

    Args:
        train_crop_mode: "rrc" (random resized crop), "rkrc" or "rkrr".
        scale: Area of the crop, as a share of the image; timm's default when None.
        ratio: Aspect ratio of the crop; timm's default when None.
        hflip: Probability of a horizontal flip.
        vflip: Probability of a vertical flip.
        color_jitter: Strength of the colour jitter; unused when `auto_augment` replaces it.
        color_jitter_prob: Probability of the colour jitter; always when None.
        grayscale_prob: Probability of a greyscale image.
        gaussian_blur_prob: Probability of a blur.
        auto_augment: A policy as "rand-m9-mstd0.5-inc1" or "3a"; none when None.
        interpolation: Interpolation of the crop: "bilinear", "bicubic", "random", ...
        re_prob: Probability of random erasing.
        re_mode: Fill of the erased area: "const", "rand" or "pixel".
        re_count: Number of erased areas.
    """

    train_crop_mode: str = "rrc"
    scale: tuple[float, float] | None = None
    ratio: tuple[float, float] | None = None
    hflip: float = 0.5
    vflip: float = 0.0
    color_jitter: float = 0.4
    color_jitter_prob: float | None = None
    grayscale_prob: float = 0.0
    gaussian_blur_prob: float = 0.0
    auto_augment: str | None = None
    interpolation: str = "random"
    re_prob: float = 0.0
    re_mode: str = "const"
    re_count: int = 1

    def __post_init__(self) -> None:
        shares = ("hflip", "vflip", "color_jitter_prob", "grayscale_prob", "gaussian_blur_prob", "re_prob")
        check_fields(
            self,
            "data.augment",
            train_crop_mode=("rrc", "rkrc", "rkrr"),
            interpolation=(*_INTERPOLATIONS, "random"),
            scale="(0, inf)",
            ratio="(0, inf)",
            color_jitter="[0, inf)",
            re_mode=("const", "rand", "pixel"),
            re_count="[1, inf)",
            **dict.fromkeys(shares, "[0, 1]"),
        )
        if self.auto_augment is not None:
            one_of("the policy of data.augment.auto_augment", self.auto_augment.partition("-")[0], _POLICIES)


@dataclass
class DataConfig:
    """Config of a data set of images.

    Args:
        source: "digits" or "digits:DIFFICULTY" (the embedded set, built into `root` when it is not there), "crowds"
            alike, whose labels are those of patches; "shards:PATTERN" (webdataset shards; `{split}` in the pattern
            stands for the split); "maps:SIDE" (images and label maps, scaled to squares of SIDE pixels, see
            `mmod.data.readers.maps.MapSource`); or a name for `timm.data.create_dataset`: "folder", "torch/...",
            "hfds/...".
        root: Folder of the data. For an embedded set it defaults to `runs/data/TITLE-DIFFICULTY`, as in
            `runs/data/cluttered-digits-tiny`; for remote shards it is where copies of them are kept.
        train_split: Split to train on.
        val_split: Split to evaluate on.
        train_limit: Images of the training split that are used, drawn once and spread evenly over the classes; None
            uses all.
        val_limit: The same of the split to evaluate on.
        image_size: Side of an image, in pixels.
        channels: 1 (grey) or 3 (RGB).
        mean: Mean of each channel; by default the digits' own, ImageNet's for 3 channels, 0.5 for 1.
        std: Standard deviation of each channel, as `mean`.
        batch_size: Images in a batch of one process.
        workers: Worker processes; 0 reads in the training process.
        augment: Augmentation of training images; None resizes and crops them as for evaluation.
        crop_pct: Share of the resized image that the evaluation crop keeps. Digits are never cropped; other images that
            have `image_size` already need 1 to be taken whole.
        interpolation: Interpolation of the evaluation resize.
        on_corrupt: "raise" stops at an image or shard that cannot be read. "skip" counts it in the stream's
            report: a training batch gets the next readable sample in its place, evaluation goes on without it.
        in_memory: Decode everything once and keep it as uint8; None does so for digits without augmentation.
        pin_memory: Return batches in pinned memory (for a GPU).
        options: Further arguments of `timm.data.create_dataset`, as `class_map`.
        label_patch: Side of the patches, in pixels of the sample's label map (the member `.seg.png` of shards, the
            square of "maps:SIDE"), each of which has a class: that of most of its pixels. Images are square, and maps
            equally large. None gives each image one class.

    Raises:
        ValueError: If a value is out of range.
    """

    source: str = "digits"
    root: str | None = None
    train_split: str = "train"
    val_split: str = "val"
    train_limit: int | None = None
    val_limit: int | None = None
    image_size: int = 32
    channels: int = 1
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    batch_size: int = 64
    workers: int = 0
    augment: AugmentConfig | None = None
    crop_pct: float = 0.875
    interpolation: str = "bicubic"
    on_corrupt: OnCorrupt = "raise"
    in_memory: bool | None = None
    pin_memory: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    label_patch: int | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            "data",
            train_limit="[1, inf)",
            val_limit="[1, inf)",
            image_size="[1, inf)",
            label_patch="[1, inf)",
            batch_size="[1, inf)",
            workers="[0, inf)",
            crop_pct="(0, 1]",
            std="(0, inf)",
            interpolation=_INTERPOLATIONS,
        )
        kind = self.source.partition(":")[0]
        if kind == "maps":
            self._check_maps()
        elif kind not in (*EMBEDDED, "shards"):
            check_name(self.source)
        self._check_labels(kind)
        if self.channels not in (1, 3):
            raise ValueError(f"channels={self.channels} is unknown; valid: 1 (grey), 3 (RGB)")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None and len(values) != self.channels:
                raise ValueError(f"{name}={values} must have channels={self.channels} values")
        if self.in_memory and self.augment is not None:
            raise ValueError("in_memory=True keeps images as evaluated; it cannot be combined with augment")

    def _check_maps(self) -> None:
        """Raise a ValueError where squares of the source are not made of whole patches."""
        side = self.source.partition(":")[2]
        if self.root is None or self.label_patch is None:
            raise ValueError(f"source {self.source!r} needs root, the folder, and label_patch, the side of a patch")
        if not side.isdecimal() or not int(side) or int(side) % self.label_patch:
            raise ValueError(
                f"source {self.source!r} must be maps:SIDE with the side of a square of whole patches of "
                f"label_patch={self.label_patch} pixels, as maps:{24 * self.label_patch}"
            )

    def _check_labels(self, kind: str) -> None:
        """Raise a ValueError where the source has no labels of the kind that is asked for."""
        side = self.label_patch
        if side is None:
            if kind == "crowds":
                raise ValueError("source 'crowds' has labels for patches: set label_patch to the side of the model's")
            return
        if kind not in ("crowds", "maps", "shards"):
            raise ValueError(f"label_patch={side} needs label maps, which source {self.source!r} has none of")
        if self.augment is not None:
            raise ValueError(f"label_patch={side} cannot be combined with augment, which moves images only")


def check_name(name: str) -> None:
    """Refuse a name that timm knows no data set by; it would read the folder of images in `root` for it.

    Args:
        name: Name for `timm.data.create_dataset`.

    Raises:
        ValueError: If the name is unknown, or of a stream without numbered samples.

    Example:
        >>> check_name("hfds/user/flowers")
    """
    kind, _, rest = name.partition("/")
    kind = kind.lower()
    if kind in _STREAMS and rest:
        raise ValueError(
            f"source {name!r} is a stream: its samples have no numbers, so that it cannot be resumed exactly; "
            "for webdataset shards use 'shards:PATTERN'"
        )
    is_torchvision = kind == "torch" and rest.lower() in _TORCHVISION
    if name not in FOLDERS and not is_torchvision and not (kind == "hfds" and rest):
        raise ValueError(
            f"source {name!r} is unknown; valid: digits, digits:DIFFICULTY, crowds, crowds:DIFFICULTY, shards:PATTERN, "
            f"maps:SIDE, folder, hfds/NAME, and torch/NAME with one of {', '.join(_TORCHVISION)}"
        )


@dataclass
class PairsConfig:
    """Config of a data set of image-text pairs.

    Args:
        train: Shards to train on: paths or URLs with brace ranges (`{00000..00127}.tar`), globs (local paths only) or
            `pipe:` commands, one or a list; or `scenes:DIFFICULTY/SPLIT`, the embedded set, built where it is not
            there.
        val: Pairs to evaluate on, given alike; read by number, so remote shards are copied to `root`.
        root: Folder for copies of remote shards, or of the embedded set (`runs/data/captioned-scenes-DIFFICULTY` by
            default).
        batch_size: Pairs in a batch of one process.
        workers: Worker processes; 0 reads in the training process.
        on_corrupt: "raise" stops at a shard, image or caption that cannot be read. "skip" counts it for its shard: a
            training batch gets another sample in its place, evaluation goes on without it.
        pin_memory: Return batches in pinned memory (for a GPU).
        sampling: "exact": every training sample once an epoch, in an order of its own.
        samples: None. It, `sampling` and `shuffle` are kept for configs written by earlier versions.
        shuffle: Without effect.

    Raises:
        ValueError: If a value is out of range, or `sampling` asks for shards drawn with replacement.
    """

    train: str | list[str] = "scenes:default/train"
    val: str | list[str] = "scenes:default/val"
    root: str | None = None
    batch_size: int = 64
    workers: int = 0
    on_corrupt: OnCorrupt = "raise"
    pin_memory: bool = False
    sampling: Literal["exact", "resampled"] = "exact"
    samples: int | None = None
    shuffle: int = 5000

    def __post_init__(self) -> None:
        check_fields(self, "data", batch_size="[1, inf)", workers="[0, inf)")
        if self.sampling == "resampled" or self.samples is not None:
            raise ValueError(
                f"data.sampling={self.sampling!r}, data.samples={self.samples}: only open_clip's own program draws "
                "shards with replacement; run mmod train open-clip with its option --dataset-resampled, or set "
                "data.sampling to 'exact'"
            )


@dataclass
class TextConfig:
    """Config of a text that is read byte by byte, in windows of one length that do not overlap.

    Files are dealt to the splits by a checksum of what they hold, nine in ten to "train", so that no file and no copy
    of one is in two splits.

    Args:
        source: "python", the modules of the standard library and the licence of the Python that runs, which differ
            from one version of Python to the next; or a pattern of files, such as "books/**/*.txt".
        train_split: Split to train on: "train", "val" or "test".
        val_split: Split to evaluate on.
        val_limit: Windows of that split that are used, spread evenly over it; None uses all.
        length: Bytes of a window.
        batch_size: Windows in a batch of one process.
        workers: Worker processes; 0 reads in the training process.
        pin_memory: Return batches in pinned memory (for a GPU).

    Raises:
        ValueError: If a value is out of range.
    """

    source: str = "python"
    train_split: str = "train"
    val_split: str = "val"
    val_limit: int | None = None
    length: int = 256
    batch_size: int = 32
    workers: int = 0
    pin_memory: bool = False

    def __post_init__(self) -> None:
        splits = ("train", "val", "test")
        check_fields(
            self,
            "data",
            train_split=splits,
            val_split=splits,
            val_limit="[1, inf)",
            length="[1, inf)",
            batch_size="[1, inf)",
            workers="[0, inf)",
        )
