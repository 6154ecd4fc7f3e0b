"""Write and run the notebooks of `examples/`: `python scripts/notebook.py [--check]`.

`examples/get_started.ipynb` holds the text of `docs/get_started.md` and its Python, cell by cell. All notebooks are
run, so that their outputs show on the repository; this needs `pip install nbclient ipykernel`.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "get_started.ipynb"


def cells(page: str) -> list[tuple[str, str]]:
    """Return the cells of a page, each with its type: "code" for fenced Python, "markdown" for what is between.

    Links to other pages lead to the folder `docs`.

    Example:
        >>> cells("# Title\\n\\n```python\\nx = 1\\n```\\n")
        [('markdown', '# Title'), ('code', 'x = 1')]
    """
    parts = re.split(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    typed = [("code" if number % 2 else "markdown", part.strip()) for number, part in enumerate(parts)]
    return [
        (kind, text if kind == "code" else re.sub(r"\]\((?=[\w/-]+\.md)", "](../docs/", text))
        for kind, text in typed if text
    ]  # fmt: skip


def notebook(page: str) -> dict[str, Any]:
    """Return a page as a notebook without outputs."""
    content: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells(page)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        content.append({**cell, "execution_count": None, "outputs": []} if kind == "code" else cell)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": content, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def sources(content: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the cells of a notebook as `cells` does, without their outputs."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in content["cells"]]


def executed(content: dict[str, Any]) -> str:
    """Run a notebook and return its text, with the outputs of this run alone."""
    import nbformat
    from nbclient import NotebookClient

    notes = nbformat.reads(json.dumps(content), as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notes, timeout=600, resources={"metadata": {"path": folder}}, record_timing=False).execute()
    # The version of Python is no news of a run.
    notes.metadata.pop("language_info", None)
    for cell in notes.cells:
        cell["outputs"] = [output for output in cell.get("outputs", []) if is_shown(output)]
        if cell.cell_type == "markdown":
            del cell["outputs"]
    return str(nbformat.writes(notes)) + "\n"


def is_shown(output: dict[str, Any]) -> bool:
    """Whether an output is printed or drawn: no warning that names this machine, no text of a model."""
    return output.get("name") != "stderr" and set(output.get("data", {})) != {"text/plain"}


def main() -> None:
    """Write the notebooks with their outputs, or end with an error where one lacks them or differs from its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the notebook differs")
    page = notebook((ROOT / "docs" / "get_started.md").read_text())
    is_check = parser.parse_args().check
    for path in sorted(NOTEBOOK.parent.glob("*.ipynb")):
        present = json.loads(path.read_text())
        content = page if path == NOTEBOOK else present
        if not is_check:
            path.write_text(executed(content))
        elif sources(present) != sources(content):
            sys.exit(f"{path} differs from docs/get_started.md; run `python scripts/notebook.py`")
        elif not any(cell.get("outputs") for cell in present["cells"]):
            sys.exit(f"{path} has no outputs; run `python scripts/notebook.py`")


if __name__ == "__main__":
    main()
