"""A decode call that the suites share: random inputs as NumPy arrays, and the oracle's answer to them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from flashport.testing import oracle
from helpers import BF16


def make_decode(lens=(100, 37, 1), heads=8, kv_heads=2, head_dim=128, dtype=BF16, seed=0):
    """One new token a request over a contiguous cache, rows past a length NaN."""
    rng = np.random.default_rng(seed)
    batch, extent = len(lens), max([1, *lens])
    q = rng.standard_normal((batch, heads, head_dim)).astype(dtype)
    k = rng.standard_normal((batch, extent, kv_heads, head_dim)).astype(dtype)
    v = rng.standard_normal((batch, extent, kv_heads, head_dim)).astype(dtype)
    for b, length in enumerate(lens):
        k[b, length:] = np.nan
        v[b, length:] = np.nan
    return SimpleNamespace(q=q, k=k, v=v, seqlens=np.array(lens, np.int32), lens=lens, head_dim=head_dim)


def answer(x):
    """(out, lse) of the oracle, fp64."""
    parts = [
        oracle.attend(
            oracle.Request(
                x.q[b : b + 1].astype(np.float32),
                x.k[b, :length].astype(np.float32),
                x.v[b, :length].astype(np.float32),
            )
        )
        for b, length in enumerate(x.lens)
    ]
    return np.concatenate([out for out, _ in parts]), np.concatenate([lse for _, lse in parts])
