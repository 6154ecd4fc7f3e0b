"""Resume log: the runs of a benchmark are kept one by one, so that a killed benchmark goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmod.benchmarks.options import Options
from mmod.benchmarks.report import (
    UNFINISHED,
    AnyRow,
    BenchmarkReport,
    Row,
    environment,
    plain_options,
    refuse_to_overwrite,
)
from mmod.io.claim import check_same
from mmod.io.files import parse_json
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
    log = ResumeLog(folder, options, machine)
    missing = [name for name in runs if name not in log.runs]
    with progress_bar(total=len(runs), initial=len(runs) - len(missing), shown=progress, unit="run") as bar:
        for name in missing:
            bar.set_description(name)
            log.add(name, runs[name]())
            bar.update()
    rows = [row.from_dict(values) for name in runs for values in log.runs[name]]
    report = BenchmarkReport(title, options, machine, rows, notes(rows) if notes else ())
    report.save(folder)
    log.close()
    return report


class ResumeLog:
    """The runs of a benchmark that is not finished, one line of JSON each.

    Args:
        folder: Where the results will be; nothing is written before the first run is added.
        config: The options, see `plain_options`.
        environment: See `environment`.

    Attributes:
        runs: The rows of every finished run, as plain values.

    Raises:
        FileExistsError: The folder holds a finished benchmark.
        ValueError: The folder holds one that was begun with other options or in another environment.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        refuse_to_overwrite(folder)
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self._path = folder / UNFINISHED
        self._head = {"config": config, "environment": environment}
        if not self._path.exists():
            return
        lines = self._path.read_text().splitlines(keepends=True)
        whole = [parse_json(line, str(self._path)) for line in lines if line.endswith("\n")]
        if whole:
            check_same(self._path, whole[0], self._head, kind="a benchmark")
        self.runs = {entry["run"]: entry["rows"] for entry in whole[1:]}
        if len(whole) < len(lines):
            self._path.write_text("".join(line for line in lines if line.endswith("\n")))

    def add(self, run: str, rows: Sequence[Row]) -> None:
        """Keep the rows of a finished run."""
        self.runs[run] = [row.to_dict() for row in rows]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            if not file.tell():
                file.write(json.dumps(self._head) + "\n")
            file.write(json.dumps({"run": run, "rows": self.runs[run]}) + "\n")

    def close(self) -> None:
        """Remove the file, once the results are saved."""
        self._path.unlink(missing_ok=True)
