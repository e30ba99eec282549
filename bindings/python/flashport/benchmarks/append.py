"""Benchmark cases of attention over a cache: calls that append new keys, and calls of few queries.

The peer of a call that appends, with rotary embedding, is the same call on a cache that has the new keys already. The
peer of few queries, which flash_decode's kernels serve, is the packed form of the call, which attention's own kernels
serve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from flashport import _attention
from flashport.benchmarks import harness
from flashport.testing import numerics


@dataclass(frozen=True)
class CacheCase:
    """``batch`` requests of ``q_len`` new tokens each, the last of ``context`` keys on pages of 16."""

    name: str
    batch: int
    q_len: int
    context: int
    appends: bool = False
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    fmt: str = "bf16"
    page_size: int = 16

    @property
    def title(self) -> str:
        """The shape in a few words."""
        how = "append, rotary and attention" if self.appends else "few queries"
        heads = "/".join(map(str, self.heads))
        return f"{how}, {self.batch} x {self.q_len} on {self.context}, {heads}, {self.head_dim}, {self.fmt}"

    @property
    def bytes(self) -> int:
        """The keys and values on all pages."""
        return (
            self.batch
            * self.context
            * self.heads[1]
            * self.head_dim
            * 2
            * np.dtype(numerics.CARRIER[self.fmt]).itemsize
        )

    @property
    def query(self) -> dict[str, Any]:
        """The options of :func:`flashport.supports`."""
        return {
            "dtype": self.fmt, "head_dim": self.head_dim, "causal": True, "paged": True, "q_len": self.q_len,
            "group_size": self.heads[0] // self.heads[1],
        }  # fmt: skip


_CASES = (
    CacheCase("append_64x1_on_8k", 64, 1, 8192, appends=True),
    CacheCase("append_8x1_on_4k", 8, 1, 4096, appends=True),
    CacheCase("append_4x512_on_8k", 4, 512, 8192, appends=True),
    *(
        CacheCase(
            f"few_{batch}x{q_len}_on_{context // 1024}k_{heads[0]}_{heads[1]}", batch, q_len, context, heads=heads
        )
        for q_len in (1, 4, 16)
        for batch, context in ((1, 8192), (16, 4096))
        for heads in ((32, 8), (64, 4))
    ),
)


def cases(match: str = "") -> list[CacheCase]:
    """All cases; ``match`` selects by name or title."""
    return [case for case in _CASES if match in case.name or match in case.title]


def run_case(case: CacheCase, device: str, target: str, rounds: int = 9, largest: float = math.inf) -> harness.Row:
    """Times one case on a device; ``largest`` limits the bytes of its cache."""
    row = harness.Row(case.name, case.title, case.bytes)
    candidates = partial(make_candidates, case=case, device=device)
    where = device, target, rounds
    harness.run_in_torch(
        row, "attention", case.query, where, case.bytes, largest, "in whose arrays the cache lies", candidates
    )
    return row


def make_candidates(torch: Any, case: CacheCase, device: str) -> tuple[harness.Call, dict[str, harness.Call]]:
    """Our call and its peer; ``torch`` makes the cache on the device."""
    where = harness.torch_device(device)
    (heads, kv_heads), dim = case.heads, case.head_dim
    pages = -(-case.context // case.page_size)

    def random(*shape: int) -> Any:
        return harness.random_tensor(torch, shape, case.fmt, where)

    def place(values: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(where)

    k, v = (random(case.batch * pages, case.page_size, kv_heads, dim) for _ in "kv")
    q, out, other_out = (random(case.batch, case.q_len, heads, dim) for _ in range(3))
    order = np.random.default_rng(0).permutation(case.batch * pages)
    cache = {"block_table": place(order.reshape(case.batch, pages)), "causal": True}
    lens = place([case.context] * case.batch)

    def full() -> object:
        return _attention.attention(q, k, v, seqused_k=lens, out=out, **cache)

    if case.appends:
        before = place([case.context - case.q_len] * case.batch)
        new = {
            "k_new": random(case.batch, case.q_len, kv_heads, dim),
            "v_new": random(case.batch, case.q_len, kv_heads, dim),
        }
        rotary = {"rotary_cos": random(case.context, dim // 2), "rotary_sin": random(case.context, dim // 2)}

        def appended() -> object:
            return _attention.attention(q, k, v, seqused_k=before, out=other_out, **cache, **new, **rotary)

        return appended, {"without new keys": full}
    offsets = place(np.arange(case.batch + 1) * case.q_len)

    def packed() -> object:
        return _attention.attention(
            q.flatten(0, 1), k, v, seqused_k=lens, out=other_out.flatten(0, 1), cu_seqlens_q=offsets,
            max_seqlen_q=case.q_len, **cache,
        )  # fmt: skip

    return full, {"packed": packed}
