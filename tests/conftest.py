"""What the tests change of the world, so that they share two cores, and which of them are quick.

`tests/README.md` has the same list with the reasons.

- OpenMP has one thread, which waits without spinning; matplotlib has no screen.
- Without a GPU, Triton interprets its kernels, and seeds of absent devices are not stored.
- Each test starts from `torch.manual_seed(0)`; hypothesis draws 15 fixed examples, without a deadline.
- `os.fsync` does nothing, and `datasets` tells no server what is opened.
- Logs of libraries are neither kept nor printed.
- SIGINT is not ignored, as it is in a shell's background jobs.
- Garbage collection is off, and what was imported, or left by the tests before, is frozen.
- Outside of tests of figures, one figure of each kind is drawn, without its layout.
- Checks of 200 conversations are kept, CLIP's tokeniser is made once, and blocks of equal models are tried once.
- Texts of configs and shards of synthetic conversations are taken apart once.
- A fork server starts before the first test, and synthetic sets share one folder.
- Workers end at once when their tests are done.
- Files with slow tests come first. The process that hands out tests changes nothing.
"""

import atexit
import functools
import gc
import inspect
import io
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

# Two cores shared by several workers: spinning OpenMP threads would starve each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Without a connection, `datasets` waits five seconds for a server that counts what is opened.
os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
# Asked of the driver, a GPU stays free for the processes that tests fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import pytest

import tests.kit.sets  # noqa: F401  (its folder is shared by the workers, which start after it is made)


def pytest_configure(config: pytest.Config) -> None:
    # The process that hands tests to workers, which wait for it, runs none and needs no torch.
    if config.getoption("dist", "no") == "no" or config.option.collectonly:
        _change_world()


def _change_world() -> None:
    """Make the changes that hold for all tests of a process, before any of them is imported."""
    import torch
    from hypothesis import HealthCheck, settings

    if not torch.cuda.is_available():
        # Read when kernels are defined, so before anything imports them.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # The driver's library would be looked for on disk at each question, of which tracing asks thousands.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
        # Each seed is kept for devices that may come, with the stack of its caller, which takes half a millisecond.
        for device in (torch.cuda, torch.mtia, torch.xpu):
            device.manual_seed_all = lambda _: None
    # No test is about a machine that loses power, and waiting for the disk takes a tenth of training.
    os.fsync = lambda _: None
    # pytest keeps no logs, which takes a look at each of 2,000 loggers six times a test. Nothing is printed instead.
    logging.getLogger().addHandler(logging.NullHandler())
    # A shell starts background jobs with SIGINT ignored, and processes that tests start would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What is imported for the tests lives to the end: no garbage is looked for in it.
    gc.disable()
    settings.register_profile(
        "mmod", deadline=None, max_examples=15, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("mmod")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _frozen() -> None:
    """Freeze what earlier tests left: a trainer of transformers, which asks for collections, would search it all."""
    gc.freeze()


_drawn: dict[tuple[str, str | None], str | bytes] = {}


@pytest.fixture(autouse=True, scope="module")
def _quick_figures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw one figure of each kind, without a layout, where tests are not about figures: studies renew theirs."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    draw = Figure.savefig

    def draw_once(figure: Figure, file: Any, *, format: str | None = None, **options: Any) -> None:
        file = Path(file) if isinstance(file, str) else file
        # Behind the first word of its name are those of models.
        kind = (getattr(file, "name", "").partition("-")[0], format)
        if kind not in _drawn:
            buffer = io.StringIO() if isinstance(file, io.StringIO) else io.BytesIO()
            draw(figure, buffer, format=format, **options)
            _drawn[kind] = buffer.getvalue()
        write = file.write_bytes if isinstance(file, Path) else file.write
        write(_drawn[kind])

    with pytest.MonkeyPatch.context() as patched:
        if request.path.parent.name not in ("analysis", "io", "report"):
            patched.setattr(Figure, "savefig", draw_once)
            patched.setattr(ConstrainedLayoutEngine, "execute", lambda *_: None)
            patched.setattr(Figure, "draw_without_rendering", lambda *_: None)
            patched.setattr("mmod.analysis.fronts.place_labels", lambda *_: None)
        yield


@functools.cache
def _make_tokenizer(*args: Any, **options: Any) -> Any:
    tokenizer = sys.modules["open_clip.tokenizer"].SimpleTokenizer(*args, **options)
    # Each evaluation asks for the same thousands of prompts.
    tokenizer.encode = functools.cache(tokenizer.encode)
    return tokenizer


@pytest.fixture(autouse=True, scope="module")
def _made_once() -> Iterator[None]:
    """Let runs share what each would make again, where their libraries are imported."""
    with pytest.MonkeyPatch.context() as patched:
        # Every run would read the same 49,000 merges.
        if "open_clip.factory" in sys.modules:
            patched.setattr("open_clip.factory.SimpleTokenizer", _make_tokenizer)
        # Small models scatter, which asks for further rounds.
        patched.setattr("mmod.analysis.timing._FURTHER", 1)
        yield


# `pytest -m quick`: folders and files of the core, without tests whose code compiles, trains or starts processes.
QUICK = ["config", "ops", "routing", "blocks", "methods", "adapters/test_timm_suite.py"]
QUICK += ["test_invariants.py", "test_model.py", "test_losses.py", "test_pretrained.py", "test_values.py"]
NOT_QUICK = ["methods/test_formats.py", "ops/test_aot.py", "blocks/test_launches.py"]
SLOW_CALLS = {"TensorStream", "compile", "export", "fit", "opcheck", "run_processes", "subprocess"}


def _is_quick(item: pytest.Item) -> bool:
    path = item.path.relative_to(Path(__file__).parent)
    places = {path.as_posix(), path.parts[0]}
    if item.get_closest_marker("slow") or places & set(NOT_QUICK) or not places & set(QUICK):
        return False
    code = inspect.unwrap(item.function).__code__ if isinstance(item, pytest.Function) else None
    return code is None or not SLOW_CALLS & _names_in(code)


def _names_in(code: CodeType) -> set[str]:
    """Return the names that a function and those defined in it use."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if _is_quick(item):
            item.add_marker(pytest.mark.quick)
    # Files with long tests come first: near the end, tests that one process waits for the other to finish are short.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish(session: pytest.Session) -> None:
    # For the collections that code under test asks for, such as before it is timed.
    gc.freeze()
    if "mmod.data.readers.lengths" in sys.modules:
        # The lengths of a set are checked once, and not by every run; processes inherit this.
        sys.modules["mmod.data.readers.lengths"]._WORTH_KEEPING = 200  # type: ignore[attr-defined]
    if session.items and not session.config.option.collectonly:
        from tests.kit.once import read_once
        from tests.kit.processes import start_server
        from tests.kit.proofs import prove_once

        prove_once()
        read_once()
        start_server()


def _end(process: int) -> None:
    """End a worker without taking apart the millions of objects that its tests left, for which pytest would wait."""
    if os.getpid() == process:
        os._exit(0)


if "PYTEST_XDIST_WORKER" in os.environ:
    # Before anything else registers: what is registered later is called earlier.
    atexit.register(_end, os.getpid())
else:
    # Not before: pytest looks for garbage several times when it ends.
    atexit.register(gc.unfreeze)
