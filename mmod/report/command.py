"""The command that writes a report: `mmod report FOLDER... [--output FOLDER]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmod.io.files import check_place
from mmod.io.records import FolderTakenError
from mmod.io.refusals import OneLineParser


def main(arguments: Sequence[str]) -> None:
    """Write the report that a command line describes and print its path."""
    parser = OneLineParser(
        description="Show studies, audits and training runs on one page that opens in a browser without a network.",
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a study, a run, or what holds several")
    parser.add_argument("--output", help="folder of the report; `report` in the first folder unless given")
    options = parser.parse_args(arguments)
    if options.output is not None:
        check_place(options.output)
    from mmod.report.page import write_report

    print(f"Report: {write_report(options.folders, options.output)}")


def report_on(folder: Path) -> None:
    """Write the page of a finished study or audited run into its folder, or say why there is none."""
    from mmod.report.page import write_report

    try:
        print(f"Report: {write_report([folder])}")
    except FolderTakenError as error:
        print(f"No report: {error}")
