"""Times of asynchronous calls, without any array library: host clock around batches, device synchronised."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from flashport import _core


def call_seconds(call: Callable[[], object], device: str, budget: float = 1.0, rounds: int = 7) -> float:
    """Median seconds of a call over ``rounds`` batches that together take about ``budget`` seconds.

    A call that takes longer than the budget is measured once.
    """
    _batch(call, device, 1)  # the warm-up
    estimate = _batch(call, device, 1)
    if estimate > budget:
        return estimate
    count = max(1, min(1000, int(budget / rounds / max(estimate, 1e-6))))
    return statistics.median(_batch(call, device, count) for _ in range(rounds))


def read_seconds(arrays: list[object], device: str, budget: float = 0.5) -> float | None:
    """Seconds that a plain streaming read of these arrays takes; None where the target has no such kernel."""

    def read() -> None:
        for array in arrays:
            _core.read_memory(array)

    try:
        return call_seconds(read, device, budget)
    except NotImplementedError:
        return None


def _batch(call: Callable[[], object], device: str, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    _core.synchronize(device)
    return (time.perf_counter() - start) / count
