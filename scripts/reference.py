"""API pages and options of configs from docstrings, which `python -m scripts.pages` writes.

In a page of the docs, a line stands before what is written here, up to `<!-- end -->`. Names are `MODULE:NAME` or
`mmod.NAME`.

- `<!-- api NAME ... -->`: the entries of these names. `NAME[one,two]` shows these members of a class, `NAME[]` none.
  Behind them stands a list of the classes of mmod that they take or return, and that have no entry of their own.
- `<!-- names -->`: a list of all public names with entries, by page.
- `<!-- scores -->` and `<!-- presets -->`: those that configs can name, the options of scores, and the rest of their
  docstrings.
- `<!-- options NAME -->`: the options of a config in their order; what stands in an earlier place is named alone.
- `<!-- groups -->`: links to the groups of these options.
- `<!-- common NAME KEY ... -->`: some keys of a config, each with the first sentence of its meaning.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import EnumType
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, NamedTuple, TypeVar

import torch
from docstring_parser import parse

from mmod.config import PRESETS, SCORES
from mmod.config.named import PresetList
from mmod.config.parse import shown_default
from mmod.config.registry import Registry
from mmod.io.options import field_meanings
from mmod.plain import dataclass_in
from mmod.values import FINITE, describe, hints_of, limits_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PLACE = re.compile(
    r"^<!-- (api|options|names|groups|common|scores|presets)( [^>]+)? -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL
)
SECTION = re.compile(r"^(\w+):$", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(?! )([^:]+):", re.MULTILINE)
ARGS = re.compile(r"^Args:\n(?: .*\n?|\n)*", re.MULTILINE)
# A name in backticks, and whether a reader is sent there.
NAME = re.compile(r"(\b[Ss]ee (?:also )?)?(?<!\[)`([A-Za-z_][\w.:]*)`")
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
    shown = [(path, place[2].split()) for path, place in places if place[1] == "api"]
    return {name.partition("[")[0]: path for path, names in shown for name in names}


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as the site and the repository make it.

    Example:
        >>> anchor("mmod.route_"), anchor("Images: `data`")
        ('mmodroute_', 'images-data')
    """
    return re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-")


def written(path: Path) -> str:
    """Return the text of a page with all its places written anew."""
    options = Options()
    # The groups are known at the end.
    return _filled(path, options).replace(_GROUPS, options.links())


def _filled(path: Path, options: Options) -> str:
    text = path.read_text()

    def fill(place: re.Match[str]) -> str:
        names = (place[2] or "").split()
        # Options are those of the section that they stand in.
        _, _, section = text[: place.start()].rpartition("\n## ")
        body = _body(path, place[1], names, section.partition("\n")[0], options)
        return f"<!-- {place[1]}{place[2] or ''} -->\n\n{body}\n\n<!-- end -->"

    return PLACE.sub(fill, text)


_GROUPS = "(groups)"


def _body(path: Path, kind: str, names: Sequence[str], section: str, options: Options) -> str:
    match kind:
        case "names":
            return _linked(path, name_table(path))
        case "scores":
            return _linked(path, f"{score_table()}\n\n{score_options()}\n\n{notes(SCORES)}")
        case "presets":
            return _linked(path, f"{preset_table()}\n\n{notes(PRESETS)}")
        case "groups":
            return _GROUPS
        case "common":
            return _linked(path, common_table(lookup(names[0]), names[1:]))
        case "options":
            return _linked(path, "\n\n".join(options.of(section, lookup(names[0]))))
    return _linked(path, "\n\n".join([*map(entry, names), *other_classes(names)]))


def _linked(path: Path, text: str) -> str:
    """Let names that have entries lead there, outside of code and headings; behind "see", also without their module."""

    def link(match: re.Match[str]) -> str:
        see, name = match.groups()
        shown = _entry_of(name, is_short=bool(see))
        if shown is None:
            return match[0]
        page = entries()[shown]
        file = "" if page == path else _relative(page, path.parent)
        return f"{see or ''}[`{name}`]({file}#{anchor(shown)})"

    parts = re.split(r"(^```.*?^```$|^#[^\n]*$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else NAME.sub(link, part) for number, part in enumerate(parts))


def _entry_of(name: str, is_short: bool) -> str | None:
    """Return the name with the entry that describes a name: its own, or that of the class which it is a member of."""
    known = {shown.replace(":", "."): shown for shown in entries()}
    if is_short:
        known |= {full.rpartition(".")[2]: shown for full, shown in known.items()}
    return known.get(name) or known.get(name.rpartition(".")[0])


def _relative(page: Path, folder: Path) -> str:
    if page.is_relative_to(folder):
        return page.relative_to(folder).as_posix()
    return f"../{page.relative_to(folder.parent).as_posix()}"


def name_table(path: Path) -> str:
    """Return tables of all public names with entries, by page in the order of the site's menu."""
    parts = []
    for file in re.findall(r"api/(\w+\.md)", (ROOT / "mkdocs.yml").read_text()):
        page = path.parent / file
        # Names of internals are written `MODULE:NAME`.
        rows = [f"| `{name}` | {first_sentence(lookup(name))} |" for name in _public_names(page)]
        if rows:
            title = page.read_text().partition("\n")[0].removeprefix("# ")
            parts.append("\n".join([f"[{title}]({file})", "", "| name | what it is |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _public_names(page: Path) -> list[str]:
    return [name for name, path in entries().items() if path == page and ":" not in name]


def score_table() -> str:
    """Return a table of the scores that mmod registers."""
    rows = [f"| `{name}` | {first_sentence(SCORES[name])} |" for name in sorted(_own(SCORES))]
    return "\n".join(["| score | the number that it gives a token |", "|---|---|", *rows])


def score_options() -> str:
    """Return a table of the options of these scores."""
    lines = ["| score | option | values | default | meaning |", "|---|---|---|---|---|"]
    for name in sorted(_own(SCORES)):
        lines += [f"| `{name}` | {' | '.join(row)} |" for row in _rows(SCORES[name], "")]
    return "\n".join(lines)


def preset_table() -> str:
    """Return the table as which the presets of mmod print."""
    table = repr(PresetList(sorted(_own(PRESETS))))
    return re.sub(r" {2,}", " ", re.sub(r"-{4,}", "---", table))


def notes(registry: Registry[Any]) -> str:
    """Return a list of what docstrings say behind the line and the arguments that tables have."""
    lines = []
    for name in sorted(_own(registry)):
        _, _, more = (inspect.getdoc(registry[name]) or "").partition("\n\n")
        more = ARGS.sub("", more)
        if more:
            lines.append(f"- **{name}**: {' '.join(more.split())}")
    return "\n".join(lines)


def _own(registry: Registry[Any]) -> list[str]:
    """Return the names that mmod registers; where this runs, others may be registered."""
    return [name for name in registry if registry[name].__module__.startswith("mmod.")]


def first_sentence(value: Any) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split()).replace("|", "\\|")


def entry(name: str) -> str:
    """Return the heading, signature and docstring of a function or class, and its members."""
    name, is_chosen, chosen = name.partition("[")
    value = lookup(name)
    parts = [f"### {name.replace(':', '.')}"]
    # Members of an enum are not made.
    if not isinstance(value, EnumType):
        parts.append(signature(name.replace(":", ".").rpartition(".")[2], value))
    is_config = dataclasses.is_dataclass(value)
    text = inspect.getdoc(value) or ""
    parts.append(docstring(_with_inherited(value, text) if is_config else text, _ranges(value) if is_config else {}))
    if inspect.isclass(value):
        members = list(_members(value))
        names = [member for member in chosen.rstrip("]").split(",") if member]
        unknown = set(names) - {member for member, _ in members}
        if unknown:
            raise ValueError(f"{name} has no documented members {', '.join(sorted(unknown))}")
        parts += [text for member, text in members if member in names or not is_chosen]
    return "\n\n".join(part for part in parts if part)


def other_classes(names: Sequence[str]) -> list[str]:
    """Return a table of the classes without an entry that these names take or return; nothing where there is none."""
    listed = [lookup(name) for name in entries()]
    found = {cls for name in names for cls in _classes_of(name) if cls not in listed}
    rows = sorted(f"| {_shown_name(cls)} | {first_sentence(cls)} |" for cls in found)
    return (
        ["\n".join(["| other classes that they take or return | what they are |", "|---|---|", *rows])] if rows else []
    )


def _shown_name(cls: type) -> str:
    """Return the name by which a class is imported, with a link to its keys where it is a group of options."""
    packages = list(itertools.accumulate(cls.__module__.split("."), "{}.{}".format))
    public = [package for package in packages if getattr(importlib.import_module(package), cls.__name__, None) is cls]
    name = f"`{public[0]}.{cls.__name__}`"
    heading = option_groups().get(cls)
    return f"[{name}](../options.md#{anchor(heading)})" if heading else name


@functools.cache
def option_groups() -> Mapping[type, str]:
    """Return the heading of every group on the page of options."""
    options = Options()
    _filled(DOCS / "options.md", options)
    return options.described


def _classes_of(name: str) -> Iterator[type]:
    """Yield mmod's classes in the signatures that the entry of a name shows."""
    name, is_chosen, chosen = name.partition("[")
    value = lookup(name)
    shown = [value]
    if inspect.isclass(value):
        members = [member for member, _ in _members(value)]
        shown += [
            _function(value, member) for member in members if member in chosen.rstrip("]").split(",") or not is_chosen
        ]
    for item in shown:
        found = inspect.signature(item)
        hints = [parameter.annotation for parameter in found.parameters.values()]
        if not inspect.isclass(item):
            hints.append(found.return_annotation)
        for hint in hints:
            yield from _classes_in(_annotation(hint, item), item)


def _function(cls: type, member: str) -> Any:
    """Return the function of a method or property."""
    item = inspect.getattr_static(cls, member)
    for name in ("fget", "func", "__func__"):
        item = getattr(item, name, item)
    return item


def _classes_in(annotation: str, value: Any) -> Iterator[type]:
    """Yield the classes of mmod in an annotation of a function or class."""
    owners = [cls for cls in value.__mro__ if cls.__module__.startswith("mmod")] if inspect.isclass(value) else [value]
    for name in re.findall(r"\b[A-Z]\w+", annotation):
        for owner in owners:
            cls = _named_in(inspect.unwrap(owner).__module__, name)
            if inspect.isclass(cls) and cls.__module__.startswith("mmod"):
                yield cls
                break


@functools.cache
def _named_in(module: str, name: str) -> Any:
    """Return what a name stands for in a module, also one that it imports for type checkers alone; None for nothing."""
    known = vars(sys.modules[module])
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return getattr(importlib.import_module(node.module), name)
    return known.get(name)


def _with_inherited(kind: Any, text: str) -> str:
    """Return the docstring of a dataclass with the fields that its bases describe, behind its own."""
    own = {item.arg_name for item in parse(text).params}
    meanings = field_meanings(kind)
    fields = [item.name for item in dataclasses.fields(kind) if item.name in meanings and item.name not in own]
    items = "".join(f"    {name}: {textwrap.indent(meanings[name], ' ' * 8).strip()}\n" for name in fields)
    head, title, rest = text.partition("Args:\n")
    # Behind its own arguments, which end at an empty line before the next section: lists in them have empty lines too.
    described, *end = re.split(r"\n\n(?=\S)", rest, maxsplit=1)
    return "\n\n".join([f"{head}{title}{described.rstrip()}\n{items}".rstrip(), *end]) if items and title else text


def _ranges(kind: Any) -> dict[str, str]:
    """Return in words which numbers the fields of a config take, by name."""
    try:
        hints = hints_of(kind)
        limits = limits_of(kind)
    except NameError:
        # Its types are imported for type checkers alone: nothing reads limits there.
        return {}
    return {name: range_in_words(limits[name], hints[name]) for name in hints if isinstance(limits.get(name), str)}


def range_in_words(limit: Any, hint: Any = float) -> str:
    """Return an interval as a reader says it.

    Example:
        >>> range_in_words("(0, 1]"), range_in_words("[1, inf)"), range_in_words("[0, 1]", tuple[float, ...])
        ('above 0, at most 1', 'at least 1', 'each from 0 to 1')
    """
    low, high = limit[1:-1].split(", ")
    if limit[0] == "[" and limit[-1] == "]":
        words = f"from {low} to {high}"
    else:
        bounds = [f"{'at least' if limit[0] == '[' else 'above'} {low}"]
        if high != "inf":
            bounds.append(f"{'at most' if limit[-1] == ']' else 'below'} {high}")
        words = ", ".join(bounds)
    options = (hint, *typing.get_args(hint))
    if str in options:
        words = f"a number {words}"
    is_several = any(typing.get_origin(option) in (list, tuple) for option in options)
    return f"each {words}" if is_several else words


def signature(name: str, value: Any) -> str:
    """Return a fenced signature: in one line if it fits, else a parameter a line."""
    found = inspect.signature(value)
    parameters = [text for text in _parameters(found, value) if text != "self"]
    returns = f" -> {_annotation(found.return_annotation, value)}" if found.return_annotation is not found.empty else ""
    if inspect.isclass(value):
        returns = ""
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) > WIDTH:
        line = "\n".join([f"{name}(", *(f"    {text}," for text in parameters), f"){returns}"])
    return f"```python3\n{line}\n```"


def _parameters(found: inspect.Signature, value: Any) -> Iterator[str]:
    factories = {item.name: item for item in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}
    is_keyword = False
    for item in found.parameters.values():
        if item.kind is item.KEYWORD_ONLY and not is_keyword:
            is_keyword = True
            yield "*"
        is_keyword = is_keyword or item.kind is item.VAR_POSITIONAL
        stars = {item.VAR_POSITIONAL: "*", item.VAR_KEYWORD: "**"}.get(item.kind, "")
        hint = f": {_annotation(item.annotation, value)}" if item.annotation is not item.empty else ""
        default = _default(item.default)
        # What a dataclass makes anew for each object is no value in the signature of its `__init__`.
        if item.name in factories and default.startswith(("<", "_HAS_DEFAULT_FACTORY")):
            default = _default_of(factories[item.name])
        yield f"{stars}{item.name}{hint}{f' = {default}' if item.default is not item.empty else ''}"


def _annotation(annotation: Any, value: Any) -> str:
    """Return an annotation as a reader needs it: without limits, which stand in words, and with aliases written out."""
    # Fields of a named tuple keep their annotations as references.
    annotation = getattr(annotation, "__forward_arg__", annotation)
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    known: dict[str, Any] = {}
    # Inherited fields have the names of their own module.
    for owner in reversed(value.__mro__) if inspect.isclass(value) else [inspect.unwrap(value)]:
        known |= vars(sys.modules[owner.__module__])
    return ast.unparse(_WithoutAliases(known).visit(ast.parse(text, mode="eval")))


class _WithoutAliases(ast.NodeTransformer):
    """Replaces `Annotated[TYPE, LIMIT]` by the type, names of unions by these, and variables by their bounds."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known = known

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Return the type alone."""
        if ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
            result: ast.AST = self.visit(node.slice.elts[0])
            return result
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Return what a name of this module alone stands for."""
        value = self.known.get(node.id)
        text = node.id
        if isinstance(value, TypeVar) and value.__bound__ is torch.nn.Module:
            text = "nn.Module"
        elif isinstance(value, UnionType) or typing.get_origin(value) is not None:
            text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(value))
            if "Literal" not in text:
                text = re.sub(r"\bModule\b", "nn.Module", text.replace("'", ""))
            # What has private names, as numpy's `ArrayLike`, is better known by its own.
            if re.search(r"\b_\w", text):
                text = node.id
        return ast.parse(text, mode="eval").body


def _default(value: Any) -> str:
    if inspect.isfunction(value) or inspect.isclass(value):
        return str(value.__name__)
    text = repr(dict(value)) if isinstance(value, MappingProxyType) else repr(value)
    # An object that does not say how it is made has an address, which is another one in each run.
    return f"{type(value).__name__}()" if " object at 0x" in text else text


def _default_of(item: dataclasses.Field[Any]) -> str:
    """Return the default of a field as Python: that which it makes anew, of a config without its fields."""
    if item.default_factory is dataclasses.MISSING:
        return _default(item.default)
    value = item.default_factory()
    return f"{type(value).__name__}()" if dataclasses.is_dataclass(value) else _default(value)


def docstring(text: str, ranges: Mapping[str, str] | None = None) -> str:
    """Return a docstring of Google's style as Markdown, with the ranges of its arguments.

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
            parts += [f"**{title}**", _items(body, ranges or {})]
        else:
            parts.append(f"**{title}** {' '.join(body.split())}")
    return "\n\n".join(part for part in parts if part)


def _items(body: str, ranges: Mapping[str, str]) -> str:
    _, *found = ENTRY.split(body)
    lines = []
    for name, text in zip(found[::2], found[1::2]):
        limit = f" ({ranges[name]})" if name in ranges else ""
        lines.append(f"- `{name}`{limit}: {_item(text)}")
    return "\n".join(lines)


def _item(text: str) -> str:
    """Return a description in one line, and lists in it below."""
    lead, *points = re.split(r"^ *- ", text, flags=re.MULTILINE)
    return "\n".join([" ".join(lead.split()), *(f"    - {' '.join(point.split())}" for point in points)])


def _members(value: type) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the public members of a class that mmod defines, bases first in their order."""
    shown: dict[str, Any] = {}
    for cls in reversed(value.__mro__):
        if cls.__module__.startswith("mmod"):
            shown.update({name: item for name, item in vars(cls).items() if not name.startswith("_")})
    for name, item in shown.items():
        function = getattr(item, "__func__", item)
        text = inspect.getdoc(item) if isinstance(item, (property, functools.cached_property)) else None
        if inspect.isfunction(function) and inspect.getdoc(getattr(value, name)):
            text = inspect.getdoc(getattr(value, name))
            call = _parameters(inspect.signature(function), function)
            parameters = ", ".join(part for part in call if part not in ("self", "cls"))
            yield name, f"**`{name}({parameters})`** {docstring(text or '')}"
        elif text:
            yield name, f"**`{name}`** {docstring(text)}"


class _Row(NamedTuple):
    """A key of a config, as cells of a table."""

    key: str
    values: str
    default: str
    meaning: str


class Options:
    """The options of the configs on a page: each is described where it stands first."""

    def __init__(self) -> None:
        self.groups: dict[str, list[tuple[str, str]]] = {}
        self.described: dict[Any, str] = {}
        self._sections: dict[_Row, str] = {}

    def links(self) -> str:
        """Return a table of the groups that were described, by section, with links."""
        rows = ["| section | groups |", "|---|---|"]
        for section, groups in self.groups.items():
            links = [f"[`{key}`](#{anchor(heading)})" for key, heading in groups]
            rows.append(f"| [{section}](#{anchor(section)}) | {', '.join(links)} |")
        return "\n".join(rows)

    def of(self, section: str, kind: Any, prefix: str = "") -> Iterator[str]:
        """Yield the options of a config in their order: its own, then those of the groups that it holds."""
        key = prefix.rstrip(".")
        groups = self.groups.setdefault(section, [])
        if key:
            heading = f"{section}: {key}"
            same = self.described.get(kind)
            groups.append((key, same or heading))
            if same:
                # Its own groups have been described as well.
                return
            self.described[kind] = heading
            yield f"### {section}: `{key}`\n\n{first_sentence(kind)}"
        yield from self._table(section, list(_rows(kind, prefix)))
        for name, hint in typing.get_type_hints(kind).items():
            group = dataclass_in(hint)
            if group is not None and dataclasses.fields(group):
                yield from self.of(section, group, f"{prefix}{name}.")
        if not key:
            earlier = [(name, heading) for name, heading in groups if not heading.startswith(f"{section}:")]
            if earlier:
                links = ", ".join(f"[`{name}`](#{anchor(heading)})" for name, heading in earlier)
                yield f"Groups as above: {links}."

    def _table(self, section: str, rows: Sequence[_Row]) -> Iterator[str]:
        """Yield the rows that stand on no earlier table, and the keys of the others by the sections that have them."""
        shared: dict[str, list[str]] = {}
        for row in rows:
            first = self._sections.setdefault(row, section)
            if first != section:
                shared.setdefault(first, []).append(row.key)
        for first, keys in shared.items():
            yield f"As for [{first.lower()}](#{anchor(first)}): {', '.join(keys)}."
        lines = [f"| {' | '.join(row)} |" for row in rows if self._sections[row] == section]
        if lines:
            yield "\n".join(["| key | values | default | meaning |", "|---|---|---|---|", *lines])


def common_table(kind: Any, keys: Sequence[str]) -> str:
    """Return a table of some keys of a config, with the first sentence of what they mean."""
    lines = []
    for key in keys:
        *groups, last = key.split(".")
        owner = functools.reduce(lambda config, name: dataclass_in(typing.get_type_hints(config)[name]), groups, kind)
        prefix = "".join(f"{name}." for name in groups)
        row = next(row for row in _rows(owner, prefix) if row.key == f"`{prefix}{last}`")
        sentence, _, _ = row.meaning.partition(". ")
        lead, _, points = sentence.partition("<br>")
        lead = lead.removesuffix(", one of") if points else lead
        lines.append(f"| {row.key} | {row.default} | {lead.rstrip('.')} |")
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *lines])


def _rows(kind: Any, prefix: str) -> Iterator[_Row]:
    meanings = field_meanings(kind)
    limits = limits_of(kind)
    parameters = inspect.signature(kind).parameters
    for item in dataclasses.fields(kind):
        hint = typing.get_type_hints(kind)[item.name]
        # A group that may be written as a name, such as `gate: tanh`, is a key too.
        accepts = str(parameters[item.name].annotation).split(" | ")
        if dataclasses.is_dataclass(hint) and "str" not in accepts and "None" not in accepts:
            continue
        values = describe(hint, limits.get(item.name, FINITE))
        group = dataclass_in(hint)
        if dataclasses.is_dataclass(hint):
            values = f"a text or the group `{item.name}`" if "str" in accepts else f"the group `{item.name}` or null"
        elif group is not None:
            values = re.sub(rf"an? {group.__name__}", f"{_group_name(group)}the group `{item.name}`", values)
        # A list stays one in a cell.
        meaning = re.sub(r"\n\s*- ", "<br>- ", meanings.get(item.name, ""))
        default = shown_default(kind, item)
        cells = [f"`{prefix}{item.name}`", values, f"`{default}`" if default else "required", meaning]
        yield _Row(*(" ".join(cell.split()).replace("|", "\\|") for cell in cells))


def _group_name(group: type) -> str:
    """Return the text that stands for a group with its defaults, where there is one."""
    name = getattr(group, "name", None)
    return f"{name!r} or " if isinstance(name, str) else ""


def rewritten() -> Iterator[tuple[Path, str]]:
    """Yield every page with places, and its text with all of them written anew."""
    for path in pages():
        yield path, written(path)
