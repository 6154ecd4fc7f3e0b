"""README and docs: their commands are valid, their links lead somewhere, and they stay short."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import functools
import importlib
import inspect
import re
import runpy
import shlex
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import open_clip
import pytest
import timm
import yaml
from packaging.requirements import Requirement
from PIL import Image

import mmod
from mmod import cli
from mmod.studies.kind_configs import CONFIGS
from mmod.training.kinds import KINDS, config_class
from scripts import doc_tables, reference
from tests.kit.fitted import few_series, fit_once
from tests.kit.pages import BENCHMARK, COMPLETE, DOWNLOADS, FENCE, FOLDERS, FOREIGN, NAMED, NESTED, PAGES, commands_of
from tests.kit.processes import run_processes
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
        cli.main([*words[1:], "--help", "all"])
    assert end.value.code in (0, None), command


def test_every_command_of_a_page_is_known() -> None:
    known = (
        "mmod ",
        BENCHMARK,
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
    """Return the anchors that the site makes of a page's headings."""
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
    parts = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert [name for part in parts for name in part] == ["Get started", "Guides", "Results", "Reference", "Notebook"]
    pages = [page for part in parts for entries in part.values() for entry in entries for page in entry.values()]
    assert sorted(pages) == sorted(name.removeprefix("docs/") for name in PAGES if name.startswith("docs/"))


def words_in(text: str) -> tuple[int, int]:
    """Count the words of a page outside and inside of its tables, without fenced blocks and the marks around tables."""
    lines = [line.strip() for line in FENCE.sub("", text).splitlines()]
    rows = [line.replace("|", " ") for line in lines if line.startswith("|") and line.strip("|-")]
    outside = sum(len(line.split()) for line in lines if not line.startswith(("|", "<!-- ")))
    return outside, sum(len(row.split()) for row in rows)


def test_pages_stay_short() -> None:
    assert len(PAGES["README.md"].split()) <= 900
    # Tables of the notebook hold its figures.
    notebook = [page for page in PAGES if page.startswith("docs/notebook/")]
    assert sum(words_in(PAGES[page])[0] for page in notebook) < 13_000
    # Pages that are written from docstrings are as long as these.
    written = {path.relative_to(ROOT).as_posix() for path in reference.pages()}
    guides = [page for page in PAGES if page.startswith("docs/") and page not in {*notebook, *written}]
    in_tables = sum(words_in(PAGES[page])[1] for page in guides)
    words = in_tables + sum(words_in(PAGES[page])[0] for page in guides)
    assert words <= 19_000
    # A table compares values; what explains is a list or a section.
    assert in_tables <= 0.1 * words


def test_installation_takes_the_address_of_a_repository() -> None:
    lines = re.findall(
        r'^pip install "\.(\[.*?\])"  # in a clone; elsewhere "(mmod\1 @ git\+URL)"',
        "\n".join(PAGES.values()),
        re.MULTILINE,
    )
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert len(lines) >= 6
    for _, line in lines:
        requirement = Requirement(line.replace("URL", "https://example.org/owner/mmod"))
        assert requirement.extras <= extras


def test_pages_are_those_of_figures_and_docstrings(tmp_path: Path) -> None:
    # In a process of before the tests: pages print what is registered and documented, which tests add to.
    log = tmp_path / "log.txt"
    assert run_processes(check_pages, log=log) == [0], log.read_text()
    assert not doctest.testmod(reference).failed


def check_pages() -> None:
    done = run_script("-m scripts.pages", "--check")
    sys.stderr.write(done.stderr)
    sys.exit(done.returncode)


def test_a_changed_figure_and_a_table_without_a_place_are_noticed() -> None:
    path, tables = next(doc_tables.pages())
    text = path.read_text()
    assert doc_tables.written(text, tables) == text
    assert not doctest.testmod(doc_tables).failed
    table = next(iter(tables.values()))
    table["rows"][0][0] = "another model"
    assert "another model" in doc_tables.written(text, tables)
    share = {"of": "notebook/results/equal_time.json#the-main-job", "rows": [2, 0], "columns": ["top-1 %"]}
    assert doc_tables.ratio(**share, times=100) == pytest.approx(100 * 89.3 / 89.9)
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
    shown = {path for text in (*PAGES.values(), *FOLDERS.values()) for path in re.findall(r"images/([\w.-]+)\)", text)}
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


RUNS = ["README.md", "ARCHITECTURE.md"]
RUNS += [f"docs/{name}.md" for name in ("index", "get_started", "which_method", "timm", "open_clip", "methods")]
RUNS += [f"docs/{name}.md" for name in ("auditing", "before_you_commit", "your_model")]
RUNS += [f"docs/lab.md#{name}" for name in ("Experts", "Recursions", "Experts and recursions in decoders", "Channels")]
# The rest of these pages needs downloads.
RUNS += ["docs/transformers.md#Try it without a download", "docs/pages_and_screens.md#A vision tower"]
RUNS += sorted(page for page in PAGES if page.startswith("docs/api/") and "```python\n" in PAGES[page])
SLOW = ("docs/api/planning.md", "docs/api/training.md")


@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.slow if page in SLOW else ()) for page in RUNS])
def test_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fit_once(monkeypatch)
    few_series(monkeypatch, "gradual", "smaller-image")
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *names, pretrained=False, **options: create(*names, **options))
    # A CLIP model of a few layers under the name of a large one.
    clip = open_clip.get_model_config("ViT-B-32")
    for tower in ("vision_cfg", "text_cfg"):
        clip[tower] |= {"width": 128, "layers": 4}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "ViT-B-32", clip)
    scope: dict[str, object] = {}
    name, _, section = page.partition("#")
    text = PAGES[name].partition(f"\n## {section}\n")[2].partition("\n## ")[0] if section else PAGES[name]
    blocks = [body for language, body in FENCE.findall(text) if language == "python"]
    assert blocks
    for body in blocks:
        exec(compile(body, page, "exec"), scope)


def test_every_public_name_has_an_entry_and_is_used_on_its_page() -> None:
    entries = reference.entries()
    public = {f"mmod.{name}" for name in mmod.__all__ if name != "__version__"}
    public |= {f"mmod.lab.{name}" for name in mmod.lab.__all__}
    public |= {f"mmod.methods.{name}" for name in mmod.methods.__all__ if name not in ("METHODS", "undo_")}
    listed = {f"{value.__module__}.{value.__qualname__}" for value in map(reference.lookup, entries)}
    assert public <= set(entries)
    for name in mmod.planning.__all__:
        value = getattr(mmod.planning, name)
        assert f"{value.__module__}.{value.__qualname__}" in listed, name
    for name, path in entries.items():
        text = path.read_text()
        code = "\n".join(body for language, body in FENCE.findall(text) if language in ("python", "pycon"))
        code += "\n".join(["", *re.findall(r"`(mmod\.[^`]+)`", text)])
        assert re.search(rf"\b{name.rpartition('.')[2].rpartition(':')[2]}\b", code), f"{path.name} never uses {name}"
    internal = {name for name in entries if ":" in name}
    assert {entries[name].name for name in internal} == {"extending.md"}


SECTIONS = [
    (path.name, section)
    for path in sorted((ROOT / "docs/api").glob("*.md"))
    for section in path.read_text().split("\n## ")[1:]
]


@pytest.mark.parametrize(("page", "section"), SECTIONS, ids=lambda text: text.partition("\n")[0])
def test_a_section_of_the_reference_has_two_sentences_and_a_use(page: str, section: str) -> None:
    text, mark, _ = section.partition("\n<!-- ")
    prose, fence, _ = text.partition("\n```python\n")
    assert mark, page
    assert fence, "no example"
    _, _, prose = prose.partition("\n")
    assert len(re.findall(r"\w\S*[.:](?=\s|$)|;", prose)) >= 2, prose


def test_entries_of_the_reference_are_read_by_users() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    # A limit is said in words, and what a dataclass makes anew is shown as what is written.
    for mark in ("Annotated[", " = ...", "object at 0x", "See `Mixture`"):
        assert mark not in text, mark
    # The contract of all methods stands once, and each method has what it adds.
    assert text.count("**`with_settings_of(") == 1
    assert text.count("**`training_only`**") == 1
    entry = reference.entry("mmod.methods.Prune[]")
    assert "    keep: float = 0.7,\n" in entry
    assert "- `keep` (above 0, at most 1): Share of its patches" in entry
    assert "**`" not in entry
    with pytest.raises(ValueError, match=r"mmod\.Gate has no documented members scales"):
        reference.entry("mmod.Gate[scales]")


def test_names_of_the_guides_are_in_the_reference() -> None:
    written = [path.relative_to(ROOT).as_posix() for path in reference.pages()]
    others = ("ARCHITECTURE.md", "CONTRIBUTING.md", *written)
    guides = [name for name in PAGES if name not in others and not name.startswith("docs/notebook/")]
    listed = [reference.lookup(name) for name in reference.entries()]
    for page in guides:
        imports = re.findall(r"^from (mmod[\w.]*) import (.*)$", PAGES[page], re.MULTILINE)
        imported = {f"{module}.{name.strip()}" for module, names in imports for name in names.split(",")}
        for name in sorted({*re.findall(r"mmod(?:\.\w+)+", PAGES[page]), *imported}):
            module, *attributes = name.split(".")
            value: Any = importlib.import_module(module)
            for attribute in attributes:
                # What an entry lists, such as `mmod.Score.normalised`, stands there.
                if not inspect.ismodule(value):
                    break
                if not hasattr(value, attribute):
                    importlib.import_module(f"{value.__name__}.{attribute}")
                value = getattr(value, attribute)
            assert inspect.ismodule(value) or not callable(value) or value in listed, f"{page}: {name} has no entry"


@pytest.mark.parametrize("path", reference.pages(), ids=lambda path: path.name)
def test_what_a_reader_of_the_reference_is_sent_to_is_described(path: Path) -> None:
    text = FENCE.sub("", path.read_text())
    # Arguments, members and keys; what has an entry is linked.
    described = re.findall(r"^ *- `(\w+)`|^\*\*`(\w+)|^\| `([\w.]+)` \|", text, re.MULTILINE)
    known = {name for names in described for name in names}
    sent = re.findall(r"\b[Ss]ee (?:also )?(?:the )?`([\w.:]+)`", text)
    assert not set(sent) - known, "say it in the docstring, or give the name an entry on a page"


@functools.cache
def code_of_package() -> list[ast.AST]:
    """Return every node of the syntax of the package."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "mmod").rglob("*.py")]
    return [node for tree in trees for node in ast.walk(tree)]


def test_classes_in_the_signatures_of_the_reference_are_described() -> None:
    classes = {node.name for node in code_of_package() if isinstance(node, ast.ClassDef)}
    entries = {re.split("[.:]", name)[-1] for name in reference.entries()}
    for path in sorted((ROOT / "docs/api").glob("*.md")):
        text = path.read_text()
        signatures = [body for language, body in FENCE.findall(text) if language == "python3"]
        named = set(
            re.findall(r"\b[A-Z]\w+\b", "\n".join([*signatures, *re.findall(r"^\*\*`.*`\*\*", text, re.MULTILINE)]))
        )
        rows = set(re.findall(r"^\| \[?`mmod\.[\w.]*?(\w+)`", text, re.MULTILINE))
        assert not named & classes - entries - rows, path.name


def test_every_option_of_a_score_has_a_row() -> None:
    section = PAGES["docs/api/config.md"].partition("\n## Scores\n")[2]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| .+ \| `.+` \| .+ \|$", section, re.MULTILINE)
    # Where this runs, other tests have registered scores. A docstring's example names a module that does not hold it.
    scores = {name: mmod.config.SCORES[name] for name in mmod.config.SCORES}
    own = {}
    for name, score in scores.items():
        module = score.__module__
        if module.startswith("mmod.") and getattr(sys.modules[module], score.__name__, None) is score:
            own[name] = score
    assert rows == [(name, item.name) for name in sorted(own) for item in dataclasses.fields(own[name])]
    assert set(own) <= set(re.findall(r"^\| `(\w+)` \| [^`|]", section, re.MULTILINE))
    for value in typing.get_args(typing.get_type_hints(own["attention"])["importance"]):
        assert f'<br>- "{value}"' in section, value


def test_a_changed_docstring_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"# A page\n\n<!-- api mmod.is_routed -->\n\nother text\n\n<!-- end -->\n\n{'after'}\n")
    text = reference.written(path)
    assert "Return whether any block of a model is routed." in text
    assert "other text" not in text
    assert text.endswith("<!-- end -->\n\nafter\n")


def test_groups_of_options_are_linked_and_described_once() -> None:
    page = PAGES["docs/options.md"]
    headings = re.findall(r"^##+ (.*)$", page, re.MULTILINE)
    assert len(headings) == len(set(headings))
    anchors = {reference.anchor(heading) for heading in headings}
    links = re.findall(r"\(#([\w-]+)\)", page)
    assert set(links) <= anchors
    assert {reference.anchor(heading) for heading in headings if ": `" in heading} <= set(links)
    rows = re.findall(r"^\| `[\w.]+` \|.*\|.*\|.*\|$", page, re.MULTILINE)
    assert len(rows) == len(set(rows)) > 150
    assert all(row.removesuffix(" |").rpartition("|")[2].strip() for row in rows), "a key without a meaning"


@pytest.mark.parametrize(
    "words",
    [
        *(f"train {kind}" for kind in KINDS),
        *(f"tradeoff --kind {kind}" for kind in CONFIGS),
        *(name.rpartition(" ")[0] for name in cli.COMMANDS if name.startswith(("isoflop", "audit", "plan"))),
    ],
)
def test_options_hold_every_key_of_a_command(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*words.split(), "--help", "all"])
    keys = re.findall(r"^  --([\w.]+)$", capsys.readouterr().out, re.MULTILINE)
    page = PAGES["docs/options.md"]
    # Routing, audits and plans have sections of their own, and presets a page.
    own = re.compile(r"^(?:routing(?:\.PART)?|audit|plan)\.")
    missing = {key for key in keys if f"`{key}`" not in page and f"`{own.sub('', key)}`" not in page}
    assert len(keys) > 8
    assert missing <= {"routing.preset", "routing.PART.preset"}


@pytest.mark.parametrize("kind", KINDS)
def test_help_names_the_options_of_routing_as_a_config_takes_them(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", kind, "--help", "all"])
    (key,) = re.findall(r"^  (--routing\.\S*capacity)$", capsys.readouterr().out, re.MULTILINE)
    for part in config_class(kind).parse([KINDS[kind].example]).parts:
        config = config_class(kind).parse([KINDS[kind].example, key.replace("PART", part), "0.25"])
        assert (config.routing_parts()[part] or {})["capacity"] == 0.25


def messages() -> list[str]:
    """Return all texts in the code of the package, with "…" for what a formatted one fills in."""
    texts = []
    for node in code_of_package():
        if isinstance(node, ast.JoinedStr):
            texts.append(
                "".join(getattr(part, "value", "…") if isinstance(part, ast.Constant) else "…" for part in node.values)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return texts


def test_messages_of_troubleshooting_exist() -> None:
    quoted = re.findall(r"^### `([^`]+)`$", PAGES["docs/troubleshooting.md"], re.MULTILINE)
    assert len(quoted) >= 20
    texts = "\n".join(messages())
    for message in quoted:
        parts = [re.escape(part.strip()) for part in message.split("…") if part.strip(" .:;")]
        assert re.search(".*".join(parts), texts), message


def test_a_picture_of_each_method_is_drawn(tmp_path: Path) -> None:
    done = run_script("scripts/method_pictures.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    shown = [*(ROOT / "docs/images").glob("method_*")]
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in shown}
    # Those that pages load; what is drawn here depends on the settings that other tests left to matplotlib.
    assert all(path.stat().st_size < 8_000 for path in shown)
