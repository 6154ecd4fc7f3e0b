import atexit
import gc
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Two cores shared by several workers: spinning OpenMP threads would starve each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from hypothesis import HealthCheck, settings
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

# Asked of the driver, a GPU stays free for the processes that tests fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if not torch.cuda.is_available():
    # Read when kernels are defined, so before anything imports them.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Each seed is kept for devices that may come, with the stack of its caller, which takes half a millisecond.
    for device in (torch.cuda, torch.mtia, torch.xpu):
        device.manual_seed_all = lambda _: None

import tests.kit.sets  # noqa: F401  (its folder is shared by the workers, which start after it is made)
from tests.kit.processes import start_server

# No test is about a machine that loses power, and waiting for the disk takes a tenth of training.
os.fsync = lambda _: None
# What is imported for the tests lives to the end: no garbage is looked for in it, now or later.
gc.disable()
settings.register_profile(
    "mmod", deadline=None, max_examples=15, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("mmod")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


_drawn: dict[tuple[str, str | None], str | bytes] = {}


@pytest.fixture(autouse=True, scope="module")
def _quick_figures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw one figure of each file name, without a layout, where tests are not about figures: studies renew theirs."""
    draw = Figure.savefig

    def draw_once(figure: Figure, file: Any, *, format: str | None = None, **options: Any) -> None:
        file = Path(file) if isinstance(file, str) else file
        kind = (getattr(file, "name", ""), format)
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
            patched.setattr("mmod.analysis.plots.place_labels", lambda *_: None)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    # Compilers and exports make many objects that live: a tenth of their time went into looking through them.
    gc.set_threshold(20_000, 20, 20)
    if session.items and not session.config.option.collectonly:
        start_server()


# Not before: pytest looks for garbage several times when it ends.
atexit.register(gc.unfreeze)
