"""Requests that come and go, from a seed."""

from __future__ import annotations

import numpy as np

from flashport.cli.serve.cache import PAGE_SIZE
from flashport.cli.serve.scheduler import Request

SHORTEST = 3  # tokens of a prompt


def make_requests(count: int, max_prompt: int, max_new: int, vocab: int, seed: int) -> list[Request]:
    """Requests with lengths of prompts evenly spread over their logarithm, and one or two steps between arrivals.

    The second prompt is the longest that there may be, the third shorter than a page: chunks and pages that are not
    full are there whatever the seed.
    """
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(np.log(min(SHORTEST, max_prompt)), np.log(max_prompt + 1), count)).astype(int)
    lengths = np.minimum(lengths, max_prompt)  # whatever exp rounds to
    lengths[1:2] = max_prompt
    lengths[2:3] = min(max_prompt, PAGE_SIZE - 5)
    arrivals = np.cumsum(rng.geometric(0.4, count) - 1)
    return [
        Request(number, int(arrival), rng.integers(vocab, size=length), int(rng.integers(1, max_new + 1)))
        for number, (arrival, length) in enumerate(zip(arrivals, lengths, strict=True))
    ]
