"""What a refusal is, and what is a fault whose traceback must be seen."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

import mmod
from mmod.training.engine.command import one_line_errors


def refuse() -> None:
    mmod.RoutingConfig(capacity=2)


def fail() -> None:
    int("seven")


def test_refusals_end_in_one_line_and_faults_keep_their_traceback() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:

        def elsewhere(task: Callable[[], None]) -> Callable[[], None]:
            return lambda: pool.submit(task).result()

        for refusal in (refuse, elsewhere(refuse)):
            with pytest.raises(SystemExit, match=r"^error: capacity must be a number in \[0, 1\]"), one_line_errors():
                refusal()
        for fault in (fail, elsewhere(fail)):
            with pytest.raises(ValueError, match="seven"), one_line_errors():
                fault()
