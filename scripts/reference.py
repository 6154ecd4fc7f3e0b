"""API pages and options of configs from docstrings, which `python -m scripts.pages` writes.

In a page of the docs, `<!-- api NAME ... -->` stands before the entries of these names, `<!-- options NAME -->` before
the options of a config in their order, both as `MODULE:NAME` or `mmod.NAME`, and `<!-- names -->` before a list of all
public names with entries. What is between such a line and `<!-- end -->` is written here.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmod.config.parse import shown_default
from mmod.io.options import field_meanings
from mmod.plain import dataclass_in
from mmod.values import describe

DOCS = Path(__file__).parents[1] / "docs"
PLACE = re.compile(r"^<!-- (api|options|names)( [^>]+)? -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^(\w+):$", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(?! )([^:]+):", re.MULTILINE)
WIDTH = 100


def lookup(name: str) -> Any:
    """Return the object that a page names as `PACKAGE.NAME` or as `MODULE:NAME`."""
    module, _, last = name.replace(":", ".").rpartition(".")
    return getattr(importlib.import_module(module), last)


def pages() -> list[Path]:
    """Return the pages that hold places."""
    return [path for path in sorted(DOCS.rglob("*.md")) if PLACE.search(path.read_text())]


@functools.cache
def entries() -> dict[str, Path]:
    """Return the page of every name with an entry."""
    places = [(path, place) for path in pages() for place in PLACE.finditer(path.read_text())]
    return {name: path for path, place in places if place[1] == "api" for name in place[2].split()}


def anchor(name: str) -> str:
    """Return the anchor of a heading, as the site and the repository make it.

    Example:
        >>> anchor("mmod.route_")
        'mmodroute_'
    """
    return re.sub(r"[^\w\- ]", "", name).lower()


def written(path: Path) -> str:
    """Return the text of a page with all its places written anew."""
    described: dict[Any, str] = {}

    def fill(place: re.Match[str]) -> str:
        names = place[2] or ""
        return f"<!-- {place[1]}{names} -->\n\n{_body(path, place[1], names.split(), described)}\n\n<!-- end -->"

    return PLACE.sub(fill, path.read_text())


def _body(path: Path, kind: str, names: list[str], described: dict[Any, str]) -> str:
    if kind == "names":
        return _linked(path, name_table())
    if kind == "options":
        return _linked(path, "\n\n".join(_groups(lookup(names[0]), "", described)))
    return _linked(path, "\n\n".join(entry(name) for name in names))


def _linked(path: Path, text: str) -> str:
    """Let names that have entries lead there, outside of code and headings."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        if name not in entries():
            return match[0]
        page = entries()[name]
        file = "" if page == path else _relative(page, path.parent)
        return f"[`{name}`]({file}#{anchor(name)})"

    parts = re.split(r"(^```.*?^```$|^#[^\n]*$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if number % 2 else re.sub(r"(?<!\[)`(mmod[\w.:]*)`", link, part) for number, part in enumerate(parts)
    )


def _relative(page: Path, folder: Path) -> str:
    if page.is_relative_to(folder):
        return page.relative_to(folder).as_posix()
    return f"../{page.relative_to(folder.parent).as_posix()}"


def name_table() -> str:
    """Return a table of all public names with entries; those of internals are written `MODULE:NAME`."""
    public = [name for name in entries() if ":" not in name]
    rows = [f"| `{name}` | {first_sentence(lookup(name))} |" for name in public]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def first_sentence(value: Any) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split()).replace("|", "\\|")


def entry(name: str) -> str:
    """Return the heading, signature and docstring of a function or class, and its methods."""
    value = lookup(name)
    parts = [f"### {name.replace(':', '.')}", signature(name.replace(":", ".").rpartition(".")[2], value)]
    parts.append(docstring(inspect.getdoc(value) or ""))
    if inspect.isclass(value):
        parts += list(_members(value))
    return "\n\n".join(part for part in parts if part)


def signature(name: str, value: Any) -> str:
    """Return a fenced signature: in one line if it fits, else a parameter a line."""
    found = inspect.signature(value)
    parameters = [text for text in _parameters(found) if text != "self"]
    returns = f" -> {_annotation(found.return_annotation)}" if isinstance(found.return_annotation, str) else ""
    if inspect.isclass(value):
        returns = ""
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) > WIDTH:
        line = "\n".join([f"{name}(", *(f"    {text}," for text in parameters), f"){returns}"])
    return f"```python3\n{line}\n```"


def _parameters(found: inspect.Signature) -> Iterator[str]:
    is_keyword = False
    for item in found.parameters.values():
        if item.kind is item.KEYWORD_ONLY and not is_keyword:
            is_keyword = True
            yield "*"
        is_keyword = is_keyword or item.kind is item.VAR_POSITIONAL
        stars = {item.VAR_POSITIONAL: "*", item.VAR_KEYWORD: "**"}.get(item.kind, "")
        hint = f": {_annotation(item.annotation)}" if item.annotation is not item.empty else ""
        default = f" = {_default(item.default)}" if item.default is not item.empty else ""
        yield f"{stars}{item.name}{hint}{default}"


def _annotation(annotation: Any) -> str:
    # Fields of a named tuple keep their annotations as references.
    annotation = getattr(annotation, "__forward_arg__", annotation)
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: Any) -> str:
    if inspect.isfunction(value):
        return value.__name__
    text = repr(value)
    # Defaults that a dataclass makes anew for each object.
    return "..." if text.startswith("<") else text


def docstring(text: str) -> str:
    """Return a docstring of Google's style as Markdown.

    Example:
        >>> docstring("Add.\\n\\nArgs:\\n    a: One\\n        number.\\n")
        'Add.\\n\\n**Args**\\n\\n- `a`: One number.'
    """
    # A source is one sentence, in the line of its title.
    head, *sections = SECTION.split(re.sub(r"^Source: ", "Source:\n    ", text, flags=re.MULTILINE))
    parts = [head.strip()]
    for title, body in zip(sections[::2], sections[1::2]):
        body = body.strip("\n")
        if title in ("Example", "Examples"):
            parts.append(f"```pycon\n{textwrap.dedent(body).rstrip()}\n```")
        elif title in ("Args", "Attributes", "Raises"):
            parts += [f"**{title}**", _items(body)]
        else:
            parts.append(f"**{title}** {' '.join(body.split())}")
    return "\n\n".join(part for part in parts if part)


def _items(body: str) -> str:
    _, *found = ENTRY.split(body)
    return "\n".join(f"- `{name}`: {_item(text)}" for name, text in zip(found[::2], found[1::2]))


def _item(text: str) -> str:
    """Return a description in one line, and lists in it below."""
    lead, *points = re.split(r"^ *- ", text, flags=re.MULTILINE)
    return "\n".join([" ".join(lead.split()), *(f"    - {' '.join(point.split())}" for point in points)])


def _members(value: type) -> Iterator[str]:
    """Yield the public methods and properties of a class that mmod defines, bases first in their order."""
    shown: dict[str, Any] = {}
    for cls in reversed(value.__mro__):
        if cls.__module__.startswith("mmod"):
            shown.update({name: item for name, item in vars(cls).items() if not name.startswith("_")})
    for name, item in shown.items():
        function = getattr(item, "__func__", item)
        text = inspect.getdoc(item) if isinstance(item, (property, functools.cached_property)) else None
        if inspect.isfunction(function) and inspect.getdoc(getattr(value, name)):
            text = inspect.getdoc(getattr(value, name))
            call = ", ".join(part for part in _parameters(inspect.signature(function)) if part not in ("self", "cls"))
            yield f"**`{name}({call})`** {docstring(text or '')}"
        elif text:
            yield f"**`{name}`** {docstring(text)}"


def _groups(kind: Any, prefix: str, described: dict[Any, str]) -> Iterator[str]:
    """Yield the options of a config in their order: its own, then those of the groups that it holds.

    Args:
        described: Groups that the page has described already, by the keys that they were described under.
    """
    key = prefix.rstrip(".")
    lead = f"**`{key}`** {first_sentence(kind)}" if key else ""
    if kind in described:
        yield f"{lead} The keys are those of `{described[kind]}` above."
        return
    if key:
        described[kind] = key
    rows = "\n".join(["| key | values | default | meaning |", "|---|---|---|---|", *_rows(kind, prefix)])
    yield f"{lead}\n\n{rows}".strip()
    for name, hint in typing.get_type_hints(kind).items():
        group = dataclass_in(hint)
        if group is not None:
            yield from _groups(group, f"{prefix}{name}.", described)


def _rows(kind: Any, prefix: str) -> Iterator[str]:
    meanings = field_meanings(kind)
    limits = typing.get_type_hints(kind, include_extras=True)
    for item in dataclasses.fields(kind):
        hint = typing.get_type_hints(kind)[item.name]
        if dataclasses.is_dataclass(hint):
            continue
        limit = _limit(limits[item.name])
        values = describe(hint, limit) if limit else describe(hint)
        if (group := dataclass_in(hint)) is not None:
            values = re.sub(rf"an? {group.__name__}", f"{_group_name(group)}the group `{item.name}`", values)
        # A list stays one in a cell.
        meaning = re.sub(r"\n\s*- ", "<br>- ", meanings.get(item.name, ""))
        default = shown_default(kind, item)
        cells = [f"`{prefix}{item.name}`", values, f"`{default}`" if default else "required", meaning]
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _group_name(group: type) -> str:
    """Return the text that stands for a group with its defaults, where there is one."""
    name = getattr(group, "name", None)
    return f"{name!r} or " if isinstance(name, str) else ""


def _limit(hint: Any) -> Any:
    """Return the limit in `Annotated[TYPE, LIMIT]`; None for a type alone."""
    metadata = getattr(hint, "__metadata__", ())
    return metadata[0] if metadata else None


def rewritten() -> Iterator[tuple[Path, str]]:
    """Yield every page with places, and its text with all of them written anew."""
    for path in pages():
        yield path, written(path)
