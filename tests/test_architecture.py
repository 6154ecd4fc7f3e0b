"""The rules of the architecture, as tests."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import io
import linecache
import os
import pkgutil
import py_compile
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import nn

import mmod
from mmod.blocks.conversion import Mixin
from mmod.cli import COMMANDS
from mmod.lab.recursions import Cycle
from tests.kit.fitted import few_series, fit_once
from tests.kit.scripts import ROOT, run_script

PACKAGE = ROOT / "mmod"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TOOLS = ROOT / "tools"
BENCHMARKS = sorted((TOOLS / "benchmarks").rglob("*.py"))


def names_of(paths: list[Path]) -> dict[str, Path]:
    """Return the files of modules by their names."""
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


NAMES = names_of(SOURCES)
EXAMPLES = {name: path for name, path in names_of([*SOURCES, *BENCHMARKS]).items() if ">>> " in path.read_text()}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file of the package, which several rules read."""
    return ast.parse(path.read_text())


def imports(path: Path) -> list[tuple[str, str]]:
    """Return the imports of ours, as `all_imports` returns them."""
    return [(module, name) for module, name in all_imports(path) if module.split(".")[0] == "mmod"]


@functools.cache
def all_imports(path: Path) -> list[tuple[str, str]]:
    """Return the module and, for `from module import name`, the name of every import, at any depth."""
    names = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            names += [(str(node.module), alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            name = constant_start(node.args[0])
            # A module that is chosen by its name in the folder of the file is beside it.
            if name.split(".")[0] == "mmod" and name.split(".")[1:] != [path.parent.name]:
                names.append((name, ""))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"mmod(\.\w+)*:\w+", str(node.value)):
            names.append(tuple(node.value.split(":")))
    return names


def constant_start(argument: ast.expr) -> str:
    """Return what is constant of a module's name in a call of `import_module`, up to the last whole name."""
    first = argument.values[0] if isinstance(argument, ast.JoinedStr) else argument
    name = str(first.value) if isinstance(first, ast.Constant) else ""
    return name if first is argument else name.rpartition(".")[0]


def test_names_of_modules_in_calls_are_imports(tmp_path: Path) -> None:
    path = tmp_path / "called.py"
    path.write_text('import importlib\nimportlib.import_module("mmod.cli")\nimport_module(f"mmod.data.{name}")\n')
    assert imports(path) == [("mmod.cli", ""), ("mmod.data", "")]
    path = tmp_path / "named.py"
    path.write_text('import_path("mmod.values:one_of")\n')
    assert imports(path) == [("mmod.values", "one_of")]


class Drawn(NamedTuple):
    """A row of the table of folders: the folders and files of the package in it, and the folders that they import."""

    rooms: list[str]
    imports: set[str]


def rooms_in(cell: str) -> list[str]:
    """Return folders and top-level files without suffix, of a cell that separates them by commas."""
    return [name.strip("()`/").removesuffix(".py") for name in cell.split(", ") if name]


def read_table(text: str) -> list[Drawn]:
    """Return the rows of the table of folders in a page."""
    rows = []
    for line in text.partition("| layer | folder |")[2].partition("\n\n")[0].splitlines()[2:]:
        _, folders, _, imported = (cell.strip() for cell in line.strip("|").split("|"))
        rows.append(Drawn(rooms_in(folders), set(rooms_in(imported))))
    return rows


def imported_rooms(path: Path) -> set[str]:
    """Return the folders and top-level files that a file imports from, or whose modules it names by strings."""
    constants = {str(node.value) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant)}
    named = {name for name in constants & NAMES.keys() if name != "mmod"}
    return {module.split(".")[1] for module in named.union(module for module, _ in imports(path))}


TABLE = read_table((ROOT / "ARCHITECTURE.md").read_text())
ROOMS = [room for row in TABLE for room in row.rooms]
GROUND = set(ROOMS[: ROOMS.index("io") + 1])


def room_of(path: Path) -> str:
    """Return the folder or top-level file of the package that a file is in or is, without suffix."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_each_folder_imports_only_from_those_above_it() -> None:
    for path in SOURCES:
        folder = room_of(path)
        assert folder in ROOMS, f"{folder} has no row in the table of ARCHITECTURE.md"
        # What `import mmod` offers is for users: inside, names come from the modules that define them.
        allowed = ROOMS[: ROOMS.index(folder) + 1]
        below = {module for module, _ in imports(path) if [*module.split("."), "mmod"][1] not in allowed}
        assert not below, f"{path} imports {below}, which {folder} stands above"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.rooms[0])
def test_the_table_of_folders_names_all_that_they_import(row: Drawn) -> None:
    paths = [path for path in SOURCES if room_of(path) in row.rooms]
    assert paths, f"{row.rooms} is not in the package"
    actual = {room for path in paths for room in imported_rooms(path)}
    assert actual - GROUND - {*row.rooms} == row.imports


def test_the_runs_of_a_study_know_its_comparison_and_not_its_config() -> None:
    readers = {path.stem for path in SOURCES for _, name in imports(path) if name.endswith("StudyConfig")}
    # A `Study` holds it, of which features know the fields; runs, what measures them, and questions get none.
    assert readers == {"commands", "study", "candidates", "kind", "kind_configs", "features"}


def test_a_name_of_a_package_is_no_module_of_it_too() -> None:
    both = {}
    for name in [name for name, path in NAMES.items() if path.name == "__init__.py"]:
        package = importlib.import_module(name)
        for module in pkgutil.iter_modules(package.__path__):
            if module.name in dir(package):
                both[f"{name}.{module.name}"] = getattr(package, module.name)
    assert {name: value for name, value in both.items() if not inspect.ismodule(value)} == {}


def test_the_package_imports_no_folder_beside_it() -> None:
    beside = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"mmod", "datasets"}
    for path in SOURCES:
        below = {module for module, _ in all_imports(path) if module.partition(".")[0] in beside}
        assert not below, f"{path} imports {below}, which the wheel does not have"


def test_no_modules_import_each_other() -> None:
    graph = {
        name: {f"{module}.{item}" if f"{module}.{item}" in NAMES else module for module, item in imports(path)} - {name}
        for name, path in NAMES.items()
    }
    # Modules that import nothing left in the graph leave it, until only circles and what imports them remain.
    while free := {name for name, needed in graph.items() if not needed & graph.keys()}:
        graph = {name: needed for name, needed in graph.items() if name not in free}
    while unused := graph.keys() - set().union(*graph.values()):
        graph = {name: needed for name, needed in graph.items() if name not in unused}
    circles = {name: sorted(needed & graph.keys()) for name, needed in graph.items()}
    assert not circles, f"modules import each other: {circles}"


def test_no_two_classes_or_aliases_share_a_name() -> None:
    named = Counter[str]()
    for path in SOURCES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named[node.name] += 1
    # Each kind of training has its own, in files of equal names.
    repeated = {name for name, count in named.items() if count > 1}
    assert repeated == {"ModelConfig", "TrainConfig", "EvalResult"}
    for path in SOURCES:
        for node in tree_of(path).body:
            aliases = {target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)}
            assert not aliases & named.keys(), f"{path} has an alias with the name of a class: {aliases}"


# What a mixin replaces of a host on purpose.
REPLACED = {"_init_weights", "_no_split_modules", "dynamic_feat_size", "forward_head", "generate"}
REPLACED |= {"activation_relu_or_gelu", "init_continuous_batching", "save_pretrained"}


def test_what_stands_in_front_of_a_host_hides_none_of_its_names() -> None:
    for module in pkgutil.walk_packages(mmod.__path__, "mmod."):
        if module.name.split(".")[1] in ("adapters", "blocks", "lab", "methods"):
            importlib.import_module(module.name)
    found: list[type[nn.Module]] = [Mixin]
    for mixin in found:
        found += [derived for derived in mixin.__subclasses__() if derived not in found]
    # Converted classes have the names of their hosts, and a cycle takes the place of blocks.
    mixins = [mixin for mixin in found if "mod_host" not in vars(mixin) and mixin is not Cycle]
    bases = {base for mixin in mixins for base in mixin.__mro__ if base.__module__.startswith("mmod.")}
    names = {name for base in bases for name in vars(base) if not name.startswith(("__", "mod_", "_mod_"))}
    assert {name for name in names if not hasattr(nn.Module, name)} == REPLACED
    assert len(bases) > 20


def test_state_of_threads_is_in_few_places() -> None:
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in SOURCES}
    makers = [path for path, text in texts.items() if re.search(r"threading\.local|ContextVar", text)]
    assert makers == ["threads.py"]
    # Calls of a stack and passes that a backward pass recomputes, what a running block tells its modules, what modules
    # decided, warnings that are noted in place of given, rules that a context overrides, the prompt of `generate`, and
    # what a tower's attention computed.
    holders = {"blocks/branches.py", "blocks/span.py", "blocks/record.py", "routing/router.py"}
    holders |= {"adapters/base.py", "adapters/proven.py"}
    holders |= {"adapters/transformers/groups.py", "adapters/transformers/tower.py"}
    assert {path for path, text in texts.items() if re.search(r"PerThread\(|\(PerThread\[", text)} == holders | {
        "threads.py"
    }


def test_batches_stay_symbolic() -> None:
    """`len` of a tensor is a number, which fixes the size of the batch in an export; `shape[0]` is a symbol."""
    folders = ("adapters", "blocks", "methods", "ops", "routing")
    files = [file for folder in folders for file in (ROOT / "mmod" / folder).rglob("*.py")]
    lines = [f"{file.relative_to(ROOT)}: {line.strip()}" for file in files for line in file.read_text().splitlines()]
    assert not [line for line in lines if re.search(r"\blen\([\w.]+_[A-Z]*B[A-Z0-9]*\)", line)]


def test_type_checkers_read_the_names_of_lazy_packages() -> None:
    packages = 0
    for path in PACKAGE.rglob("__init__.py"):
        body = tree_of(path).body
        value = getattr(body[-1], "value", None)
        if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "lazy_names"):
            continue
        checked: dict[str, list[str]] = {}
        for node in ast.walk(next(node for node in body if isinstance(node, ast.If))):
            if isinstance(node, ast.ImportFrom):
                checked[str(node.module)] = [alias.name for alias in node.names]
        assert ast.literal_eval(value.args[1]) == checked, f"{path} lists other names below `if TYPE_CHECKING:`"
        packages += 1
    assert packages == 6


def test_package_is_imported_without_its_sources(tmp_path: Path) -> None:
    """Frozen programs and some images hold compiled modules only."""
    (tmp_path / "mmod").mkdir()
    for module in ("__init__", "lazy"):
        py_compile.compile(str(PACKAGE / f"{module}.py"), str(tmp_path / "mmod" / f"{module}.pyc"), doraise=True)
    code = "import mmod; print(mmod.__file__.endswith('.pyc'), mmod.__all__[0])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.split() == ["True", "AuditConfig"], done.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fit_once(monkeypatch)
    few_series(monkeypatch, "gradual", "smaller-image")
    # Each docstring starts a debugger, which looks whether any file that was read in this process has changed.
    monkeypatch.setattr(linecache, "checkcache", lambda *_: None)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted
    assert result.failed == 0


@pytest.mark.parametrize("name", mmod.__all__)
def test_public_names_say_what_they_do(name: str) -> None:
    thing = getattr(mmod, name)
    assert inspect.getdoc(thing), f"mmod.{name} has no docstring"
    if inspect.isfunction(thing):
        doc = inspect.getdoc(thing) or ""
        # What is a model or a name needs no words.
        for parameter in inspect.signature(thing).parameters.keys() - {"model", "name"}:
            assert f"{parameter}:" in doc, f"the docstring of mmod.{name} does not explain {parameter}"
        assert "Returns:" in doc or "Raises:" in doc or doc.startswith("Return ")
        assert all(p.annotation is not inspect.Parameter.empty for p in inspect.signature(thing).parameters.values())


# What a reader must hold counts, not the number of lines. A folder or module of the package, or of the tools, joins by
# its name.
CALM = ["adapters", "analysis", "blocks", "cli", "config", "data", "io", "lab"]
CALM += ["losses", "methods", "model", "opening", "ops", "planning", "pretrained", "registry", "report", "routing"]
CALM += ["lazy", "studies", "threads", "training", "values", "plain", "names", "benchmarks"]
FMT_COMMENT = re.compile(r"# fmt: (skip|off)")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def dense_lines(text: str, tree: ast.Module) -> dict[str, list[int]]:
    """Return the lines of constructs that take several readings in a module, by their names."""
    lines: dict[str, list[int]] = {"fmt comment": [], "nested conditional": [], "comprehension": [], "tuple": []}
    for number, line in enumerate(text.splitlines(), 1):
        if FMT_COMMENT.search(line):
            lines["fmt comment"].append(number)
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            conditionals = [part for part in ast.walk(node) if isinstance(part, ast.IfExp)]
            if len(conditionals) > 1:
                lines["nested conditional"].append(node.lineno)
        elif isinstance(node, COMPREHENSIONS):
            conditions = [len(generator.ifs) for generator in node.generators]
            if len(conditions) > 1 or max(conditions) > 1:
                lines["comprehension"].append(node.lineno)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            lines["tuple"] += [node.lineno for target in node.targets if isinstance(target, ast.Tuple)]
    return lines


def code_lines(text: str, tree: ast.Module) -> int:
    """Return the number of lines with code in a module, without comments and docstrings."""
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {token.start[0] for token in tokens if token.type not in layout}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and ast.get_docstring(node) is not None:
            lines -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(lines)


def test_dense_constructs_are_counted() -> None:
    text = f"a, b = 1, 2  # {'fmt'}: skip\nc = 1 if a else 2 if b else 3\nd = [x for y in c for x in y]\n"
    text += "e = [x for x in d if x if a]\na, b = b\nf = [x for x in d if x]\n"
    dense = {"fmt comment": [1], "nested conditional": [2], "comprehension": [3, 4], "tuple": [1]}
    assert dense_lines(text, ast.parse(text)) == dense
    text = f'"""A module."""\n\n# A comment.\n{text}'
    assert code_lines(text, ast.parse(text)) == 6


@pytest.mark.parametrize("room", CALM)
def test_code_needs_no_second_reading(room: str) -> None:
    tuples = 0
    code = 0
    for path in [*SOURCES, *BENCHMARKS]:
        name = path.relative_to(TOOLS if path in BENCHMARKS else PACKAGE).as_posix()
        if name.partition("/")[0].removesuffix(".py") != room:
            continue
        text = path.read_text()
        tree = tree_of(path)
        lines = dense_lines(text, tree)
        tuples += len(lines.pop("tuple"))
        code += code_lines(text, tree)
        for construct, places in lines.items():
            assert not places, f"{name} has a {construct} in line {places[0]}: write it as statements"
    assert code, f"{room} is no folder or module of the package"
    assert 1000 * tuples <= 6 * code, f"{room} assigns {tuples} tuples in {code} lines of code: give each value a line"


def test_the_formatter_lays_out_all_code() -> None:
    paths = [path for folder in ("mmod", "tests", "tools", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 500
    assert [path for path in paths if FMT_COMMENT.search(path.read_text())] == []


def test_readme_commands_exist() -> None:
    commands = tuple(" ".join(word for word in command.split() if word.islower()) for command in COMMANDS)
    for command in re.findall(r"(?:&& |`|^ +|-m )mmod ([a-z][^`\n]*)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert command.startswith(commands), f"README names mmod {command}"
    for config in re.findall(r"configs/\S+\.yaml", (ROOT / "README.md").read_text()):
        assert (ROOT / config).is_file(), f"README names {config}"


@pytest.mark.parametrize("folder", ["configs", "docs", "examples", "mmod", "README.md", "CONTRIBUTING.md"])
def test_commands_are_those_that_the_wheel_has(folder: str) -> None:
    scripts = {path.stem for path in TOOLS.glob("*.py")} - {
        "benchmark",
        "run_timm_tests",
        "run_transformers_tests",
        "transformers_families",
    }
    there = ROOT / folder
    for path in [there] if there.is_file() else [*there.rglob("*.md"), *there.rglob("*.py"), *there.rglob("*.yaml")]:
        named = set(re.findall(r"\btools/(\w+)\.py", path.read_text())) & scripts
        assert not named, f"{path} names tools/{named}, which a wheel lacks: say `mmod ...`"


@pytest.mark.parametrize(
    "command",
    [
        ["tools/tradeoff.py", "configs/tradeoff/digits.yaml", "--seed", "3"],
        ["tools/benchmark.py", "models", "--batch_size", "1"],
        ["tools/train.py", "configs/digits/dense.yaml", "--epoch", "1"],
        ["tools/train_clip.py", "configs/clip/scenes.yaml", "--epoch", "1"],
        ["datasets/digits.py", "folder", "--clut", "3"],
        ["datasets/scenes.py", "folder", "--clut", "3"],
        ["datasets/pairs.py", "table.csv", "folder", "--resiz", "3"],
    ],
    ids=lambda command: command[0],
)
def test_options_are_never_guessed(command: list[str]) -> None:
    done = run_script(*command)
    assert done.returncode == 2
    assert command[-2].lstrip("-") in done.stderr
    assert not (ROOT / "folder").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["tools/tradeoff.py", "configs/tradeoff/digits.yaml", "--capacities", "[1.5]"],
            "capacity must be a number in [0, 1], got 1.5",
        ),
        (["tools/benchmark.py", "ops", "--ops", "[nope]"], "unknown ops ['nope']; valid are attention_with_importance"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_values_a_config_refuses_are_one_line(command: list[str], message: str) -> None:
    done = run_script(*command)
    assert done.returncode == 2
    assert f"error: {message}" in done.stderr
    assert "Traceback" not in done.stderr


TESTS = sorted((ROOT / "tests").rglob("*.py"))
# Words that name any value, and so none.
FILLERS = {"each", "found", "own", "rest", "seen", "told", "wanted", "whole"}


def test_no_test_imports_from_another_or_hides_a_table() -> None:
    """What two tests need is in `tests/kit`. Of two constants of one name, the first is lost to whoever imports it."""
    for path in TESTS:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tests"):
                continue
            modules = {*str(node.module).split("."), *(alias.name for alias in node.names)}
            tests = [name for name in modules if name.startswith("test_")]
            assert not tests, f"{path.relative_to(ROOT)} imports from {tests}: move what they share to tests/kit"
        names: list[str] = []
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names += [target.id for target in targets if isinstance(target, ast.Name)]
        twice = {name for name in names if names.count(name) > 1}
        assert not twice, f"{path.relative_to(ROOT)} assigns {twice} twice"


def test_names_in_tests_say_what_they_hold() -> None:
    names = 0
    lines = 0
    for path in TESTS:
        text = path.read_text()
        lines += text.count("\n")
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        names += sum(token.type == tokenize.NAME and token.string in FILLERS for token in tokens)
    assert 1000 * names <= 10 * lines, f"{names} names in {lines} lines of tests are one of {sorted(FILLERS)}"
