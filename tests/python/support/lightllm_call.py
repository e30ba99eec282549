"""A batch of LightLLM's, and the oracle's answer to it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from flashport.testing import oracle
from helpers import BF16

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128


LENS = (300, 1, 256, 0, 129)


def make_state(dtype=BF16):
    """A token pool of one buffer for keys and values, and the parts of infer_state that the wrappers read."""
    rng = np.random.default_rng(4)
    slots = rng.permutation(sum(LENS) + 9)
    pool = np.full((len(slots), 2 * KV_HEADS, HEAD_DIM), np.nan, np.float32)
    table = np.full((len(LENS) + 3, max(LENS) + 5), len(slots) - 1, np.int32)
    rows = rng.permutation(len(LENS) + 3)[: len(LENS)].astype(np.int32)
    first = 0
    for row, length in zip(rows, LENS, strict=True):
        own = slots[first : first + length]
        table[row, :length] = own
        pool[own] = rng.standard_normal((length, 2 * KV_HEADS, HEAD_DIM)).astype(dtype)
        first += length
    q = rng.standard_normal((len(LENS), HEADS, HEAD_DIM)).astype(dtype)
    pool = pool.astype(dtype)
    state = SimpleNamespace(
        batch_size=len(LENS),
        max_len_in_batch=max(LENS),
        req_manager=SimpleNamespace(req_to_token_indexs=table),
        b_req_idx=rows,
        b_seq_len=np.array(LENS, np.int32),
    )
    return SimpleNamespace(q=q, k=pool[:, :KV_HEADS], v=pool[:, KV_HEADS:], state=state)


def answer(x, first=0, last=None):
    """The oracle's (out, lse) over keys [first, last) of each request."""
    parts = []
    for b, length in enumerate(LENS):
        own = x.state.req_manager.req_to_token_indexs[x.state.b_req_idx[b], :length][first:last]
        parts.append(
            oracle.attend(oracle.Request(*(part.astype(np.float32) for part in (x.q[b : b + 1], x.k[own], x.v[own]))))
        )
    return np.concatenate([out for out, _ in parts]), np.concatenate([lse for _, lse in parts])
