"""Many threads that call one model at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def assert_right_in_threads(
    model: Callable[[Any], torch.Tensor], batches: Sequence[Any], threads: int = 4, times: int = 8
) -> None:
    """Run batches of equal shape in many threads at once and compare each result with the one computed alone."""

    def run(number: int) -> tuple[int, torch.Tensor]:
        with torch.no_grad():
            return number, model(batches[number])

    alone = [run(number)[1] for number in range(len(batches))]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for number, result in pool.map(run, list(range(len(batches))) * times):
                torch.testing.assert_close(result, alone[number], rtol=1e-5, atol=1e-6)
    finally:
        sys.setswitchinterval(switch)
