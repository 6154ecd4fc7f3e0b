"""Parts that run other programs: pytest on tests marked `gpu`, compute-sanitizer on kernels that move rows."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from mmod.benchmarks.gpu.config import FIGURES, GpuOptions, figures_row
from mmod.benchmarks.report import Row, Runs, UnavailableError

# Exit codes of pytest: no test failed, some failed, none was collected.
_OK, _FAILED, _NONE = 0, 1, 5
MOVEMENT = ("gather_rows", "scatter_rows", "gather_norm", "merge_rows")


def run_tests(config: GpuOptions) -> Runs:
    """Run the tests marked `gpu`, file by file: every kernel against float64, models on kernels against torch."""
    missing = [path for path in config.tests if not Path(path).exists()]
    if missing:
        raise UnavailableError(
            f"{', '.join(missing)} is not here: start in a checkout of the repository, or give --tests"
        )
    if find_spec("pytest") is None:
        raise UnavailableError("pytest is not installed")
    listed = _pytest(["--collect-only", "-q", *config.tests])
    files = list(dict.fromkeys(line.partition("::")[0] for line in listed.splitlines() if "::" in line))
    runs = {file: functools.partial(_run_file, file) for file in (files[:1] if config.rehearses else files)}
    return Runs("tests marked gpu", FIGURES, runs)


def _run_file(file: str) -> list[Row]:
    # A process for every core but two compiles kernels.
    workers = max(0, (os.cpu_count() or 1) - 2)
    options = ["-n", str(workers)] if find_spec("xdist") and workers else []
    options += ["--timeout", "120"] if find_spec("pytest_timeout") else []
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        _pytest([*options, f"--junitxml={results}", file])
        return [_read_results(file, results)]


def _pytest(arguments: Sequence[str]) -> str:
    options = ["-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers"]
    done = _run([sys.executable, "-m", "pytest", *options, *arguments])
    if done.returncode not in (_OK, _FAILED, _NONE):
        raise RuntimeError(f"pytest ended with exit code {done.returncode}: {_last_lines(done.stdout)}")
    return done.stdout


def _run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program, its output in the log of the part and in the result."""
    changed = {**os.environ, **environment}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=changed, check=False
    )
    print(done.stdout, flush=True)
    return done


def _read_results(file: str, results: Path) -> Row:
    suite = next(ElementTree.parse(results).iter("testsuite"))
    total, failures, errors, skipped = (int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
    bad = failures + errors
    failed = [
        f"{case.get('name')}: {(problem.get('message') or '').partition(chr(10))[0]}"
        for case in suite.iter("testcase")
        for problem in (*case.iter("failure"), *case.iter("error"))
    ]
    figures = {
        "passed": total - bad - skipped,
        "failed": bad,
        "skipped": skipped,
        "seconds": float(suite.get("time", 0)),
    }
    return figures_row(file, figures | ({"failures": "; ".join(failed)} if failed else {}))


def check_memory(config: GpuOptions) -> Runs:
    """Run the kernels that move rows under compute-sanitizer, which finds accesses outside of allocated memory."""
    program = shutil.which("compute-sanitizer")
    if program is None or config.rehearses:
        raise UnavailableError("compute-sanitizer is not installed" if program is None else "it needs a GPU")
    return Runs("memcheck", FIGURES, {"memcheck": functools.partial(_memcheck, program)})


def _memcheck(program: str) -> list[Row]:
    sizes = "[{images: 3, tokens: 197, heads: 3}, {images: 2, tokens: 33, heads: 1, head_channels: 33}]"
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "ops": f"[{', '.join(MOVEMENT)}]", "sizes": sizes, "dtypes": "[bfloat16, float32]", "backends": "[triton]",
            "device": "cuda", "seconds": "0", "rounds": "1", "out": f"{folder}/ops",
        }  # fmt: skip
        command = [sys.executable, "-m", "mmod", "benchmark", "ops", *(f"--{n}={v}" for n, v in options.items())]
        # Without the cache every tensor is a separate allocation, whose end the program knows.
        checked = [program, "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "20", *command]
        done = _run(checked, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    if done.returncode:
        raise RuntimeError(f"compute-sanitizer ended with exit code {done.returncode}: {_last_lines(done.stdout)}")
    return [figures_row(", ".join(MOVEMENT), {"result": _last_lines(done.stdout, 1)})]


def _last_lines(text: str, count: int = 5) -> str:
    return " | ".join(text.strip().splitlines()[-count:])
