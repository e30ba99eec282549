"""The calls of flashport: what a server needs around its paged cache, and nothing else.

A step's rows are packed: one row of each request that decodes, then the chunks of prompts one after the other. Lengths,
offsets and tables are made once a step and serve all layers. In each layer ``append_kv`` writes the new keys and
values, ``flash_decode`` serves the rows that decode, and ``attention`` the chunks, all over the same pages.

Both calls keep a request's bits apart from the batch: ``flash_decode`` with its default ``num_splits=None`` cuts keys
by the request's own length, and ``attention`` with ``num_splits=1`` does not cut them, so that a row of a prompt has
the same bits whatever chunk it comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashport import append_kv, attention, flash_decode
from flashport.cli.serve.arrays import Arrays
from flashport.cli.serve.cache import PAGE_SIZE, PagedCache
from flashport.cli.serve.scheduler import Work

DECODE_SPLITS: int | None = None
CHUNK_SPLITS: int | None = 1


class StepAttention:
    """Attention of one step; called once in each layer."""

    def __init__(self, arrays: Arrays, cache: PagedCache, step: Sequence[Work], clock: Any) -> None:
        self._arrays, self._cache, self._clock = arrays, cache, clock
        decodes = [work for work in step if work.running.decodes]
        chunks = list(step[len(decodes) :])
        self._decodes = len(decodes)
        self._slots = arrays.put(np.concatenate([_slots(work) for work in step]))
        if decodes:
            self._decode = {"seqlens": self._lengths(decodes), "block_table": self._table(decodes)}
        self._chunks: dict[str, Any] | None = None
        if chunks:
            counts = [work.count for work in chunks]
            self._chunks = {
                "cu_seqlens_q": arrays.put(np.cumsum([0, *counts], dtype=np.int32)),
                "max_seqlen_q": max(counts),
                "seqused_k": self._lengths(chunks),
                "block_table": self._table(chunks),
            }

    def __call__(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        """The output [rows, heads, head_dim] of q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]."""
        k_cache, v_cache = self._cache.layers[layer]
        out = self._arrays.xp.empty_like(q)
        n = self._decodes
        with self._clock:
            append_kv(k, v, k_cache, v_cache, self._slots)
            if n > 0:
                flash_decode(q[:n], k_cache, v_cache, **self._decode, num_splits=DECODE_SPLITS, out=out[:n])
            if self._chunks is not None:
                attention(q[n:], k_cache, v_cache, **self._chunks, causal=True, num_splits=CHUNK_SPLITS, out=out[n:])
        return out

    def _lengths(self, works: Sequence[Work]) -> Any:
        """Keys of each request, the new ones among them: ``append_kv`` has written them when they are read."""
        return self._arrays.put(np.array([work.kv_len for work in works], np.int32))

    def _table(self, works: Sequence[Work]) -> Any:
        """The pages of each request; entries past them are never read and hold what is no page."""
        width = max(len(work.running.pages) for work in works)
        table = np.full((len(works), width), -1, np.int32)
        for row, work in zip(table, works, strict=True):
            row[: len(work.running.pages)] = work.running.pages
        return self._arrays.put(table)


def _slots(work: Work) -> np.ndarray:
    """Where the new tokens go: page * page_size + offset in the page."""
    positions = np.arange(work.running.cached, work.kv_len)
    return np.array(work.running.pages)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
