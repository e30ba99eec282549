"""Serves requests alone, in other chunks and on other pages, and holds tokens and logits against those of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flashport.cli.serve.engine import Engine, Result, Served
from flashport.cli.serve.scheduler import Request

TOKEN_BUDGETS = (7, 1000, 16, 33, 100)  # of requests that are served alone, in turn: the chunks of their prompts


def sample(requests: Sequence[Request], count: int | None, seed: int) -> list[Request]:
    """So many of the requests, in their order; all of them for None."""
    if count is None or count >= len(requests):
        return list(requests)
    chosen = np.random.default_rng(seed).choice(len(requests), count, replace=False)
    return [requests[n] for n in sorted(chosen)]


def serve_alone(
    engine: Engine, requests: Sequence[Request], seed: int, advance: Callable[[int], None] = lambda tokens: None
) -> Served:
    """Serves each request by itself; the pages have another order each time."""
    rng = np.random.default_rng(seed)
    served = Served()
    for n, request in enumerate(requests):
        engine.cache.shuffle(rng)
        served.add(engine.serve([request], TOKEN_BUDGETS[n % len(TOKEN_BUDGETS)], advance))
    return served


def differences(together: dict[int, Result], alone: dict[int, Result]) -> list[str]:
    """What is wrong, a line for each request: logits of NaN, and what differs in requests that were served alone."""
    problems = {number: _problem(result, alone.get(number)) for number, result in sorted(together.items())}
    return [f"request {number}: {problem}" for number, problem in problems.items() if problem]


def _problem(together: Result, alone: Result | None) -> str:
    for name, result in (("in the batch", together), ("alone", alone)):
        if result is not None and b"" in result.digests:
            return f"logits of new token {result.digests.index(b'')} are NaN {name}"
    if alone is None:
        return ""
    for n, (ours, theirs) in enumerate(zip(together.tokens, alone.tokens, strict=True)):
        if ours != theirs:
            return f"new token {n} is {ours} in the batch and {theirs} alone"
        if together.digests[n] != alone.digests[n]:
            return f"logits of new token {n} differ, which is {ours} both times"
    return ""
