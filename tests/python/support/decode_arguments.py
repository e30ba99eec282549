"""Right arguments of the decode functions, for suites that make one of them wrong; and how a call must fail."""

from __future__ import annotations

import numpy as np
import pytest

import flashport
from decode_call import make_decode
from helpers import BF16

BATCH, HEADS, KV_HEADS, HEAD_DIM, BLOCKS, BLOCK_SEQ, SLOTS = 3, 8, 2, 128, 4, 16, 80


def stage1_arguments():
    rng = np.random.default_rng(1)
    pool = rng.standard_normal((SLOTS, 2, KV_HEADS, HEAD_DIM)).astype(BF16)
    return {
        "q": rng.standard_normal((BATCH, HEADS, HEAD_DIM)).astype(BF16),
        "k": pool[:, 0],
        "v": pool[:, 1],
        "Req_to_tokens": rng.integers(0, SLOTS, (BATCH + 1, 64), np.int32),
        "B_req_idx": np.arange(BATCH, dtype=np.int32),
        "B_Seqlen": np.array([64, 17, 0], np.int32),
        "max_len_in_batch": 64,
        "mid_out": np.full((BATCH, HEADS, BLOCKS, HEAD_DIM), np.nan, np.float32),
        "mid_out_logsumexp": np.full((BATCH, HEADS, BLOCKS), np.nan, np.float32),
        "block_seq": BLOCK_SEQ,
    }


def stage2_arguments():
    rng = np.random.default_rng(2)
    return {
        "mid_out": rng.standard_normal((BATCH, HEADS, BLOCKS, HEAD_DIM), np.float32),
        "mid_out_logexpsum": rng.standard_normal((BATCH, HEADS, BLOCKS), np.float32),
        "B_Seqlen": np.array([64, 17, 0], np.int32),
        "Out": np.full((BATCH, HEADS, HEAD_DIM), np.nan, BF16),
        "block_seq": BLOCK_SEQ,
    }


def decode_arguments():
    x = make_decode((40, 7, 1))
    return {
        "q": x.q,
        "k_cache": x.k,
        "v_cache": x.v,
        "seqlens": x.seqlens,
        "sinks": np.zeros(HEADS, np.float32),
        "out": np.full(x.q.shape, np.nan, BF16),
        "lse": np.full(x.q.shape[:2], np.nan, np.float32),
    }


FUNCTIONS = {
    "flash_decode_stage1": (stage1_arguments, ("mid_out", "mid_out_logsumexp")),
    "flash_decode_stage2": (stage2_arguments, ("Out",)),
    "flash_decode": (decode_arguments, ("out", "lse")),
}


ARRAYS = [
    (function, name)
    for function, (make, _) in FUNCTIONS.items()
    for name, value in make().items()
    if isinstance(value, np.ndarray)
]


def call(function, arguments):
    positional = arguments
    keywords = {}
    if function == "flash_decode":
        names = ("q", "k_cache", "v_cache", "seqlens")
        positional = {name: arguments[name] for name in names}
        keywords = {name: value for name, value in arguments.items() if name not in names}
    return getattr(flashport, function)(*positional.values(), **keywords)


def expect(function, arguments, error, text):
    """The call fails so, and leaves its outputs as they were."""
    outputs = [arguments[name] for name in FUNCTIONS[function][1]]
    before = [np.array(output).tobytes() for output in outputs]
    with pytest.raises(error, match=text):
        call(function, arguments)
    assert [np.array(output).tobytes() for output in outputs] == before
