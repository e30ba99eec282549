"""Calls whose traces tests record, and what they hold of these traces."""

from __future__ import annotations

import numpy as np

from flashport import trace
from flashport.trace import _reference

RNG = np.random.default_rng(3)


def random(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values):
    return np.array(values, np.int32)


def recorded(path, call, layers=1):
    """(steps, result) of what a function calls."""
    with trace.record(path, layers=layers):
        result = call()
    return trace.load(path), result


def check(loaded, limit=2e-6):
    for step in loaded:
        assert _reference.differences(step.out, _reference.reference(step)).within(limit), step


def paged(k, page):
    """(pages, table) of a contiguous cache."""
    batch, length, heads, dim = k.shape
    table = np.random.default_rng(4).permutation(batch * length // page).astype(np.int32).reshape(batch, -1)
    pages = np.full((batch * length // page, page, heads, dim), np.nan, k.dtype)
    for b in range(batch):
        pages[table[b]] = k[b].reshape(-1, page, heads, dim)
    return pages, table
