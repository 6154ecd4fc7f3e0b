"""What labels mean, for every reader: class numbers, names of classes, and captions."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mmod.data.corrupt import UnusableError
from mmod.io.files import BYTE_ORDER_MARK, near_paths, parse_json, read_text
from mmod.names import near_names, with_hint
from mmod.values import brief

UNLABELLED = 255
"""Value of the pixels of a label map that have no class."""
CLASSES = "classes.json"
"""File of a run folder with the number of each class by its name."""


@dataclass(frozen=True)
class Classes:
    """The classes of a set of images.

    Args:
        numbers: Number of each class by its name, as the labels have it; a model's may be more than the set's.
        present: Number of classes of the set; None if that is not known.
        given: The numbers are a model's, not ranks of names in the data.
        is_plain: The data set has the same classes by the same numbers without being matched.
        origin: What was taken for classes, such as "the folders cat, dog of data/train", for messages.
    """

    numbers: Mapping[str, int]
    present: int | None = None
    given: bool = False
    is_plain: bool = True
    origin: str = ""

    @property
    def taken(self) -> str:
        """What was taken for classes: folders, or the names."""
        return self.origin or some_names([*self.numbers])

    def check_ranks(self, outputs: int | None) -> None:
        """Raise a ValueError if numbers that are ranks cannot be those of a model with so many outputs."""
        count = 1 + max(self.numbers.values())
        if not self.given and outputs and count != outputs:
            raise ValueError(
                f"the data names {count} classes, {self.taken}, and the model has {outputs} outputs, so the rank of a "
                "class among these names is not its output. Name a run folder as model.checkpoint, which holds the "
                "names of its classes; list the model's classes in a file, data.classes; or, for image folders, put "
                "the training folder with all classes beside this one"
            )

    def __str__(self) -> str:
        if self.present is None:
            return "classes matched by name"
        classes = 1 + max(self.numbers.values())
        return f"{self.present} of {classes} classes, matched by name"


@dataclass(frozen=True)
class ModelClasses:
    """The classes that a model answers with.

    Args:
        numbers: Number of each output by the name of its class.
        origin: Where the names are from, for messages.
        required: Data with other names are refused; otherwise they keep their own numbers.
    """

    numbers: Mapping[str, int]
    origin: str
    required: bool = True


def name_key(name: str) -> tuple[list[int | str], str]:
    """Return a sort key for timm's natural order, in which "9" comes before "10"."""
    from timm.utils.misc import natural_key

    # timm's key ignores case and leading zeros: names that differ in these alone need an order, too.
    return natural_key(name), name


def rank_names(names: Iterable[str]) -> dict[str, int]:
    """Number names in the order of `name_key`.

    Example:
        >>> rank_names({"10", "9", "b2"})
        {'9': 0, '10': 1, 'b2': 2}
    """
    return {name: number for number, name in enumerate(sorted(set(names), key=name_key))}


def match_classes(own: Classes, found: Collection[str], model: ModelClasses | None, source: str) -> Classes:
    """Return the classes of a set with the numbers of a model, by name; the set's own ones without a model's names.

    Args:
        own: The classes by the numbers of the data set.
        found: Names of the classes that the set has.
        source: The set, for messages.

    Raises:
        ValueError: The model requires its names and lacks one, or tells classes apart that share a number in the set.
    """
    if model is None:
        return own
    unknown = [name for name in rank_names(found) if name not in model.numbers]
    if not unknown:
        joined: dict[int, int] = {}
        for name in rank_names(found):
            number = model.numbers[name]
            # Two of the model's classes under one number of the set would be confused in silence.
            if joined.setdefault(own.numbers.get(name, number), number) != number:
                raise ValueError(
                    f"{source}: the number {own.numbers[name]} stands for several classes of the model, one of which "
                    f"is {name!r}: give them one number in the file of the model's classes, data.classes"
                )
        plain = own.numbers == model.numbers
        return dataclasses.replace(own, numbers=model.numbers, present=len(set(found)), given=True, is_plain=plain)
    if not model.required:
        return own
    free = model.numbers.keys() - set(found)
    raise ValueError(
        f"{source} has classes that {model.origin} does not name: {beside_near(unknown, free)}; it names "
        f"{some_names(list(model.numbers))}. Rename or remove their folders or labels; to train on them, start with a "
        "new classifier, model.head='fresh'"
    )


def beside_near(names: Iterable[str], known: Collection[str]) -> str:
    """Return the first of some unknown names, each with the known ones that are near.

    Example:
        >>> beside_near(["circles", "dot"], {"circle", "square"})
        'circles (near ones: circle), dot'
    """
    return some_names([with_hint(name, near_names(name, known)) for name in names])


def some_names(names: list[str], shown: int = 5) -> str:
    """Return the first of some names, and how many more there are."""
    first = ", ".join(names[:shown])
    if len(names) <= shown:
        return first
    return f"{first} and {len(names) - shown} more"


def read_classes(path: str | Path) -> dict[str, int]:
    """Read the number of each class by its name.

    Args:
        path: A `.json` file with a list of names or numbers by name, or a text file with a name in each line, whose
            blanks at the ends are left out.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file of class names at {str(path)!r}{near_paths(path)}")
    if path.suffix == ".json":
        content = parse_json(path.read_bytes(), str(path))
    else:
        text = read_text(path).rstrip()
        content = []
        if text:
            content = [line.strip() for line in text.split("\n")]
        if "" in content:
            raise ValueError(f"{str(path)!r} names no class in line {content.index('') + 1}: remove the blank line")
    if isinstance(content, list) and all(isinstance(name, str) for name in content):
        if len(set(content)) < len(content):
            twice = next(name for name in content if content.count(name) > 1)
            raise ValueError(f"{str(path)!r} names the class {twice!r} twice")
        content = {name: number for number, name in enumerate(content)}
    # A boolean is an integer to Python, and none to whoever numbers classes.
    is_numbered = False
    if isinstance(content, dict):
        is_numbered = all(type(number) is int and number >= 0 for number in content.values())
    if not content or not is_numbered:
        raise ValueError(f"{str(path)!r} must name classes: a list of names, or their numbers from 0 by name")
    return content


def class_number(value: object, names: Mapping[str, int] | None = None) -> int:
    """Return the class that a label stands for; a ValueError if it stands for none.

    Args:
        value: A number from 0, also as an integral float or a boolean; or a name.
        names: Number of each class by its name.

    Example:
        >>> class_number(3.0), class_number("cat", {"cat": 1})
        (3, 1)
    """
    if isinstance(value, str) and names is not None and value in names:
        return names[value]
    # Booleans and NumPy's numbers are numbers as well; 3.0 is a class and 3.5 is none.
    if isinstance(value, numbers.Real):
        number = float(value)
        if number >= 0 and number.is_integer():
            return int(number)
    if isinstance(value, str) and names is not None:
        raise ValueError(f"{brief(value)} is not the name of a class; known are {some_names(list(names))}")
    reason = ""
    if value == -1:
        reason = ", which marks samples without a label"
    raise ValueError(f"{brief(value)} is no class{reason}; classes are numbers from 0")


def renumbered_class(value: object, numbers: Mapping[int, int]) -> int:
    """Return the number of a class in place of its label; without numbers the label itself, see `class_number`."""
    number = class_number(value)
    if numbers and number not in numbers:
        raise ValueError(f"class {number} has no name among {len(numbers)}")
    return numbers.get(number, number)


def read_caption(value: object) -> str:
    """Return a caption as it is, but for a byte order mark; an `UnusableError` unless it is a text with a word.

    Example:
        >>> read_caption("\\ufefftwo cats\\n")
        'two cats\\n'
    """
    if not isinstance(value, str):
        raise UnusableError("no caption", f"{brief(value)} is not one text")
    value = value.removeprefix(BYTE_ORDER_MARK)
    if not value.strip():
        raise UnusableError("no caption", f"{value[:20]!r} holds no text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnusableError("caption is not UTF-8", ascii(value)) from error
    return value
