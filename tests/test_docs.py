"""README and docs: their commands are valid, their links lead somewhere, and they stay short."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import re
import runpy
import shlex
import textwrap
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import timm
import yaml
from PIL import Image

import mmod
from mmod import cli
from mmod.training.kinds import config_class
from scripts import doc_tables
from tests.kit.pages import COMPLETE, DOWNLOADS, FENCE, FOLDERS, FOREIGN, NAMED, NESTED, PAGES, commands_of
from tests.kit.scripts import ROOT, run_script


# Complete commands are run in tests/test_doc_commands.py.
@pytest.mark.parametrize(
    "command",
    sorted({command for _, command in NAMED} - {command for _, command in COMPLETE}),
    ids=lambda name: name[:60],
)
def test_commands_are_valid(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    if words[0] == "python":
        assert run_script(" ".join(words[1:3]) if words[1] == "-m" else words[1], "--help").returncode == 0
        return
    with pytest.raises(SystemExit) as end:
        cli.main([*words[1:], "--help"])
    assert end.value.code in (0, None), command


def test_every_command_of_a_page_is_known() -> None:
    known = (
        "mmod ",
        "python datasets/",
        "python scripts/",
        "python -m scripts.",
        "python -m mmod",
        *FOREIGN,
        *DOWNLOADS,
        "for ",
        "done",
        "runs=",
        "#",
        "",
    )
    for page, text in PAGES.items():
        for language, body in FENCE.findall(text):
            for line in commands_of(f"```{language}\n{body}```") if language == "sh" else ():
                assert not line or line.startswith(known[:-1]), f"{page}: {line}"


def anchors_of(text: str) -> set[str]:
    """Return the anchors that mkdocs makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def test_links_lead_somewhere() -> None:
    for page, text in {**PAGES, **FOLDERS}.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
            if "://" in target:
                continue
            path, _, anchor = unquote(target).partition("#")
            there = (ROOT / page).parent / path if path else ROOT / page
            assert there.exists(), f"{page} links to {target}"
            if anchor and there.suffix == ".md":
                assert anchor in anchors_of(there.read_text()), f"{page} links to {target}"


def test_every_page_is_in_the_menu() -> None:
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    (parts,) = [part["nav"] for part in [yaml.safe_load(text)]]
    assert [name for part in parts for name in part] == ["Get started", "Guides", "Results", "Reference"]
    pages = [page for part in parts for entries in part.values() for entry in entries for page in entry.values()]
    assert sorted(pages) == sorted(name.removeprefix("docs/") for name in PAGES if name.startswith("docs/"))


def words_in(text: str) -> int:
    """Count the words of a page without its tables, the marks around them, and fenced blocks."""
    lines = FENCE.sub("", text).splitlines()
    return sum(len(line.split()) for line in lines if not line.lstrip().startswith(("|", "<!-- ")))


def test_pages_stay_short() -> None:
    assert len(PAGES["README.md"].split()) <= 900
    docs = [text for page, text in PAGES.items() if page.startswith("docs/") and not page.startswith("docs/api/")]
    assert sum(map(words_in, docs)) < 25_000


def test_tables_of_figures_are_those_of_the_json_beside_the_pages() -> None:
    done = run_script("scripts/doc_tables.py", "--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_changed_figure_and_a_table_without_a_place_are_noticed() -> None:
    path, tables = next(doc_tables.pages())
    text = path.read_text()
    assert doc_tables.written(text, tables) == text
    assert not doctest.testmod(doc_tables).failed
    table = next(iter(tables.values()))
    table["rows"][0][0] = "another model"
    assert "another model" in doc_tables.written(text, tables)
    with pytest.raises(ValueError, match=r"without a place .*'unplaced'"):
        doc_tables.written(text, {**tables, "unplaced": table})


@pytest.mark.parametrize(("path", "tables"), list(doc_tables.pages()), ids=lambda value: getattr(value, "stem", ""))
def test_every_table_of_figures_names_its_command(path: Path, tables: dict[str, dict[str, Any]]) -> None:
    page = path.read_text()
    stated = [re.sub(r"\s+", " ", text) for text in (page, *commands_of(page))]
    for name, table in tables.items():
        assert table.get("how") or table["commands"], name
        for command in table.get("commands", []):
            assert any(command in text for text in stated), f"{name}: {command}"


def test_the_picture_of_the_readme_is_drawn_from_the_table_of_the_docs(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "scripts/readme_picture.py"))
    (shown,) = (
        table for path, tables in doc_tables.pages() for name, table in tables.items() if name == "the-main-job"
    )
    marks = script["marks"]()
    assert [mark.name for mark in marks] == [row[0] for row in shown["rows"]]
    assert {mark.score for mark in marks} == {row[4] for row in shown["rows"]}
    Image.new("RGB", (60, 30)).save(tmp_path / script["MAPS"])
    done = run_script("scripts/readme_picture.py", str(tmp_path), str(tmp_path / "picture.png"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_complete_configs_of_pages_are_read() -> None:
    texts = [body for text in PAGES.values() for language, body in FENCE.findall(text) if language == "yaml"]
    complete = [fields for fields in map(yaml.safe_load, texts) if "kind" in fields and "model" in fields]
    assert {fields["kind"] for fields in complete} == {"chat", "image", "pairs"}
    for fields in complete:
        config_class(fields["kind"]).from_dict(fields)


def test_every_picture_is_shown_on_a_page() -> None:
    shown = {path for text in (*PAGES.values(), *FOLDERS.values()) for path in re.findall(r"images/([\w.]+)\)", text)}
    assert {path.name for path in (ROOT / "docs/images").iterdir()} == shown


PYTHON = [
    (page, number, textwrap.dedent(body))
    for page, text in PAGES.items()
    for number, (_, language, body) in enumerate(NESTED.findall(text))
    if language in ("python", "py")
]


def chain(node: ast.expr) -> list[str]:
    """Return the names of `a.b.c`; nothing for what is no such chain."""
    if isinstance(node, ast.Attribute):
        return [*names, node.attr] if (names := chain(node.value)) else []
    return [node.id] if isinstance(node, ast.Name) else []


@pytest.mark.parametrize(("page", "number", "code"), PYTHON, ids=lambda value: str(value)[:30])
def test_names_of_examples_exist(page: str, number: int, code: str) -> None:
    tree, modules = ast.parse(code, f"{page}, block {number}"), {"mmod": mmod}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mmod"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("mmod"):
                    importlib.import_module(alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (names := chain(node))[:1] == ["mmod"]:
            thing: object = modules["mmod"]
            for name in names[1:]:
                assert hasattr(thing, name), f"{page} names {'.'.join(names)}"
                thing = getattr(thing, name)
        if isinstance(node, ast.Call) and (names := chain(node.func))[:1] == ["mmod"]:
            function = functools.reduce(getattr, names[1:], mmod)
            known = inspect.signature(function).parameters.values()
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known):
                unknown = {keyword.arg for keyword in node.keywords} - {parameter.name for parameter in known} - {None}
                assert not unknown, f"{page}: {'.'.join(names)} takes no {unknown}"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/get_started.md"])
def test_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *names, pretrained=False, **options: create(*names, **options))
    scope: dict[str, object] = {}
    for language, body in FENCE.findall(PAGES[page]):
        if language == "python":
            exec(compile(body, page, "exec"), scope)
