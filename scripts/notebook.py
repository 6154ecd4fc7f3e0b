"""Write the notebook of the docs' first page: `python scripts/notebook.py [--check]`.

`examples/get_started.ipynb` holds the text of `docs/get_started.md` and its Python, cell by cell, without outputs.
"""

import argparse
import json
import re
import sys
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
        (kind, text if kind == "code" else re.sub(r"\]\((?=[\w-]+\.md)", "](../docs/", text))
        for kind, text in typed if text
    ]  # fmt: skip


def notebook(page: str) -> str:
    """Return a page as the text of a notebook."""
    content: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells(page)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        content.append({**cell, "execution_count": None, "outputs": []} if kind == "code" else cell)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": content, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def main() -> None:
    """Write the notebook, or end with an error where it differs from the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the notebook differs")
    text = notebook((ROOT / "docs" / "get_started.md").read_text())
    if not parser.parse_args().check:
        NOTEBOOK.write_text(text)
    elif NOTEBOOK.read_text() != text:
        sys.exit(f"{NOTEBOOK} differs from docs/get_started.md; run `python scripts/notebook.py`")


if __name__ == "__main__":
    main()
