"""The runs of a benchmark are kept one by one, so that a killed benchmark goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmod.benchmarks.options import Options
from mmod.benchmarks.report import (
    NAME,
    UNFINISHED,
    AnyRow,
    BenchmarkReport,
    environment,
    plain_options,
    refuse_to_overwrite,
)
from mmod.io.files import parse_json
from mmod.io.journal import Journal
from mmod.io.progress import progress_bar


def run_all(
    config: Options,
    title: str,
    row: type[AnyRow],
    runs: Mapping[str, Callable[[], Sequence[AnyRow]]],
    progress: bool,
    notes: Callable[[Sequence[AnyRow]], Sequence[str]] | None = None,
) -> BenchmarkReport:
    """Run what is missing of a benchmark and write the results of all runs.

    Args:
        config: Its options.
        title: What is measured, in a few words.
        row: The class of its rows.
        runs: The runs by name; each returns its rows.
        progress: Show a progress bar on stderr.
        notes: Returns what a reader of the table must know, from the rows.

    Raises:
        FileExistsError: The output folder holds a benchmark already.
        ValueError: The output folder holds an unfinished benchmark with other options or of another machine.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    options, folder, machine = plain_options(config), Path(config.out), environment(config.device)
    refuse_to_overwrite(folder)
    journal = Journal(folder / UNFINISHED, {"config": options, "environment": machine}, "benchmark")
    done = dict(journal.records)
    missing = [name for name in runs if name not in done]
    with progress_bar(total=len(runs), initial=len(runs) - len(missing), shown=progress, unit="run") as bar:
        for name in missing:
            bar.set_description(name)
            done[name] = [each.to_dict() for each in runs[name]()]
            journal.add([name, done[name]])
            bar.update()
    rows = [row.from_dict(values) for name in runs for values in done[name]]
    report = BenchmarkReport(title, options, machine, rows, notes(rows) if notes else ())
    report.save(folder)
    journal.close()
    return report


def measured_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that a benchmark has so far, finished or not, as plain values.

    Args:
        folder: Where its results are; there need not be any.
    """
    path = folder / f"{NAME}.json"
    if not path.exists():
        return [row for _, rows in Journal(folder / UNFINISHED, None, "benchmark").records for row in rows]
    rows: list[dict[str, Any]] = parse_json(path.read_bytes(), str(path))["rows"]
    return rows
