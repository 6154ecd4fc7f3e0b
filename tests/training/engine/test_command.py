"""What a refusal is, and what is a fault whose traceback must be seen."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from torch.utils.data import DataLoader

import mmod
from mmod.data.corrupt import original_errors
from mmod.training.engine.command import one_line_errors


def refuse() -> None:
    mmod.RoutingConfig(capacity=2)


def fail() -> None:
    int("seven")


def test_refusals_end_in_one_line_and_faults_keep_their_traceback() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:

        def elsewhere(task: Callable[[], None]) -> Callable[[], None]:
            return lambda: pool.submit(task).result()

        def in_loader(task: Callable[[], None]) -> Callable[[], None]:
            def load() -> None:
                with original_errors():
                    next(iter(DataLoader([0], num_workers=1, collate_fn=lambda _: task())))  # type: ignore[arg-type]

            return load

        for refusal in (refuse, elsewhere(refuse), in_loader(refuse)):
            with pytest.raises(SystemExit, match=r"^error: capacity must be a number in \[0, 1\]"), one_line_errors():
                refusal()
        for fault in (fail, elsewhere(fail), in_loader(fail)):
            with pytest.raises(ValueError, match="seven"), one_line_errors():
                fault()
