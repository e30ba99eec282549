"""Outputs that share memory with other arguments are refused, and rows that nobody owns are not written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashport
from decode_arguments import (
    ARRAYS,
    FUNCTIONS,
    HEAD_DIM,
    HEADS,
    decode_arguments,
    expect,
)
from decode_call import make_decode
from helpers import BF16, same, share_memory


def test_outputs_that_overlap_inputs_or_themselves():
    arguments = decode_arguments()
    arguments["out"] = arguments["q"]
    expect("flash_decode", arguments, ValueError, r"^flash_decode: out ")
    arguments["out"] = np.broadcast_to(np.zeros((1, 1, HEAD_DIM), BF16), (3, HEADS, HEAD_DIM)).copy()
    arguments["out"] = np.lib.stride_tricks.as_strided(arguments["out"], strides=(0, 256, 2))
    expect("flash_decode", arguments, ValueError, r"^flash_decode: out ")


@pytest.mark.parametrize(("function", "name"), ARRAYS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_outputs_that_share_memory_with_another_argument(function, name, data):
    make, outputs = FUNCTIONS[function]
    arguments = make()
    others = [output for output in outputs if output != name]
    if not others:
        return
    output = data.draw(st.sampled_from(others))
    share_memory(arguments, output, name, data.draw(st.integers(0, (arguments[output].nbytes - 1) // 16)))
    text = rf"({output} must not share memory with {name}|{name} must not share memory with {output}); pass another"
    expect(function, arguments, ValueError, rf"^{function}: {text} tensor$")


def test_outputs_over_tables_and_lengths():
    """What ended the process, or gave wrong numbers."""
    x = make_decode((40, 7, 1))
    table = np.arange(3, dtype=np.int32).reshape(3, 1)
    memory = np.zeros(3 * HEADS * HEAD_DIM, BF16)
    in_table = np.ndarray(table.shape, np.int32, memory)
    in_table[...] = table
    with pytest.raises(ValueError, match=r"^flash_decode: out must not share memory with block_table; pass another"):
        flashport.flash_decode(x.q, x.k, x.v, x.seqlens, block_table=in_table, out=memory.reshape(x.q.shape))
    assert np.array_equal(in_table, table)
    wide = np.zeros((3, 2, HEADS, HEAD_DIM), BF16)
    wide[:, 0] = x.q
    queries = wide[:, 0]
    shifted = wide.reshape(-1)[1 : 1 + 3 * HEADS * HEAD_DIM].reshape(x.q.shape)
    with pytest.raises(ValueError, match=r"^flash_decode: out must not share memory with q; pass another tensor$"):
        flashport.flash_decode(queries, x.k, x.v, x.seqlens, out=shifted)
    wanted = flashport.flash_decode(x.q, x.k, x.v, x.seqlens)
    flashport.flash_decode(queries, x.k, x.v, x.seqlens, out=wide[:, 1])  # interleaved, and no element is shared
    same(wide[:, 1], wanted)
    same(wide[:, 0], x.q)


def test_shared_memory_of_append_and_merges():
    k = np.ones((3, 2, 64), np.float32)
    cache, other = np.zeros((2, 4, 2, 2, 64), np.float32)
    inside = cache.reshape(-1, 2, 64)[:3]
    for arguments, text in (
        ((inside, k, cache, other, np.arange(3)), "k_cache must not share memory with k"),
        ((k, inside, cache, other, np.arange(3)), "k_cache must not share memory with v"),
        ((k, k, cache, cache, np.arange(3)), "v_cache must not share memory with k_cache"),
        ((k, k, other, cache, cache.view(np.int64).reshape(-1)[:3]), "v_cache must not share memory with positions"),
    ):
        with pytest.raises(ValueError, match=rf"^append_kv: {text}; pass another tensor$"):
            flashport.append_kv(*arguments)
    assert not cache.any()
    pool = np.zeros((5, 2, 2, 64), np.float32)  # keys and values side by side
    flashport.append_kv(k, k, pool[:, 0], pool[:, 1], np.arange(3))
    assert pool[:3].all()
    assert not pool[3:].any()
    o, lse = np.zeros((3, 64), np.float32), np.zeros(3, np.float32)
    out = flashport.merge_state(o, lse, o, lse)  # one tensor as both states
    assert not out[0].any()
    with pytest.raises(ValueError, match=r"^merge_state: out_lse must not share memory with o_b; pass another tensor$"):
        flashport.merge_state(o.copy(), lse, o, lse, out_lse=o[:, 0])
    both = np.zeros((2, 3, 129), np.float32)
    with pytest.raises(ValueError, match=r"^merge_states: out must not share memory with lse; pass another tensor$"):
        flashport.merge_states(both[..., :64], both[..., 64], out=both[0, :, 64:128])


@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_ragged_rows_that_nobody_owns_are_not_written(num_splits):
    x = make_decode((400, 300))
    q = np.concatenate([x.q, x.q, x.q])
    out, lse = np.full(q.shape, 7, BF16), np.full(q.shape[:2], 7, np.float32)
    offsets = np.array([0, 2, 3], np.int32)
    flashport.flash_decode(
        q, x.k, x.v, x.seqlens, cu_seqlens_q=offsets, max_q_len=2, num_splits=num_splits, out=out, lse=lse
    )
    assert (out[3:] == 7).all()
    assert (lse[3:] == 7).all()
    assert not (lse[:3] == 7).any()
