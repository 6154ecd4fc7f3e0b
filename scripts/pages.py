"""Write what pages of the docs take from elsewhere: `python -m scripts.pages [--check]`.

Tables come from the figures beside the pages (`scripts/doc_tables.py`), API entries and options from docstrings
(`scripts/reference.py`).
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain

from scripts import doc_tables, reference


def update(check: bool = False) -> list[str]:
    """Write the pages that differ, or with `check` none; return their names."""
    changed = []
    for path, text in chain(doc_tables.rewritten(), reference.rewritten()):
        if text != path.read_text():
            changed.append(path.name)
            if not check:
                path.write_text(text)
    return changed


def main() -> None:
    """Write the pages, or end with an error where one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page differs")
    check = parser.parse_args().check
    changed = update(check)
    if check and changed:
        sys.exit(f"pages differ from figures or docstrings: {', '.join(changed)}; run `python -m scripts.pages`")
    print("written:", ", ".join(changed) or "nothing, all pages are up to date")


if __name__ == "__main__":
    main()
