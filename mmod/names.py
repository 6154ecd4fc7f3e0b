"""Names in messages: near and valid ones of an unknown name, and the words around them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

# Of more names than these, a message lists similar ones alone.
MANY = 20
# Words of papers and other libraries, which no spelling is near to, and our words for them.
_SYNONYMS = {
    "tome": ("merge",),
    "evit": ("prune",),
    "keep": ("capacity", "r"),
    "ratio": ("capacity", "keep", "r"),
    "learning_rate": ("lr",),
    "accuracy": ("top1",),
    "epochs": ("num_train_epochs",),
    "batch_size": ("per_device_train_batch_size",),
    "rank": ("r",),
    "routing": ("routers",),
}


def similar(name: object, known: Iterable[str], cutoff: float = 0.65) -> list[str]:
    """Return up to three known names that mean or look like another one in any case, the most similar first.

    Example:
        >>> similar("A-MoD", ["a-mod", "gradual"]), similar("ToMe", ["prune", "merge"])
        (['a-mod'], ['merge'])
        >>> similar("pruning", ["routing", "prune"])
        ['prune', 'routing']
    """
    folded = {other.casefold(): other for other in known}
    word = str(name).casefold()
    meant = [folded[other] for other in _SYNONYMS.get(word, ()) if other in folded]
    close = difflib.get_close_matches(word, folded, n=3, cutoff=cutoff)
    # "pruning" has more letters of "routing", and is meant as "prune".
    close.sort(key=lambda other: not other.startswith(word[:3]))
    return meant or [folded[other] for other in close]


def near_names(name: object, known: Iterable[str], listing: str = "") -> str:
    """Return similar names as a hint for an error message, or the command that lists all.

    Example:
        >>> near_names("vit_tinny", ["resnet18", "vit_tiny"], "timm.list_models()")
        'near ones: vit_tiny'
        >>> near_names("x", ["resnet18", "vit_tiny"], "timm.list_models()")
        'timm.list_models() lists the known ones'
    """
    near = say_near(similar(name, known))
    if near or not listing:
        return near
    return f"{listing} lists the known ones"


def say_near(near: Iterable[object]) -> str:
    """Say which names, or paths, are near an unknown one; empty for none."""
    listed = ", ".join(map(str, near))
    if not listed:
        return ""
    return f"near ones: {listed}"


def prefixed(lead: str, text: object) -> str:
    """Return a text behind its lead; empty where there is nothing to say."""
    if not text:
        return ""
    return f"{lead}{text}"


def with_hint(name: str, hint: str) -> str:
    """Return a name with a hint in brackets, where there is one."""
    if not hint:
        return name
    return f"{name} ({hint})"


def first_names(names: Sequence[str]) -> str:
    """Return the first three names, with an ellipsis for others."""
    if len(names) > 3:
        names = [*names[:3], "..."]
    return ", ".join(names)


def one_line(error: Exception) -> str:
    """Return the message of another library, which may have several lines and indents, as one line."""
    return " ".join(str(error).split())


def plural(noun: str, number: float) -> str:
    """Return a noun in the plural, unless the number of what it names is 1."""
    if number == 1:
        return noun
    return f"{noun}s"


def valid_names(name: object, valid: Sequence[str], lead: str) -> str:
    """Return the valid names as a hint for an error message, those similar to an unknown one first.

    Many are left out if some are similar.

    Example:
        >>> valid_names("learning_rat", ["epochs", "learning_rate"], "valid ones are")
        'near ones: learning_rate; valid ones are epochs, learning_rate'
    """
    near = near_names(name, valid)
    if near and len(valid) > MANY:
        return near
    return "; ".join(filter(None, [near, f"{lead} {', '.join(valid)}"]))
