"""Keys cut into pieces that run side by side: by lengths, by count, and what stays whole."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import flashport
from attention_call import FORMATS, HEADS, check, make_attention
from flashport import _core
from helpers import same

# The first three of these sequences are cut by their lengths.
Q_LENS, KV_LENS = (20, 1, 100, 300, 7), (5000, 2100, 4400, 300, 2047)
CUT = 3
OPTIONS = {
    "plain": {},
    "window": {"window": (3000, -1)},
    "modified": {
        "softcap": 5.0,
        "alibi_slopes": np.linspace(0.1, 1, HEADS, dtype=np.float32),
        "sinks": np.linspace(-1, 4, HEADS, dtype=np.float32),
    },
}
MODIFIED = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def sequence(arguments, b):
    """The call of sequence ``b`` by itself, as a dense batch of one."""
    cu_q, cu_k = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
    own = {"q": arguments["q"][cu_q[b] : cu_q[b + 1]][None]}
    return own | {name: arguments[name][cu_k[b] : cu_k[b + 1]][None] for name in "kv"}


@MODIFIED
@pytest.mark.parametrize("fmt", FORMATS)
def test_few_queries_on_many_keys(fmt, options):
    check(make_attention(Q_LENS, KV_LENS, fmt=fmt) | options | {"causal": True})


@pytest.mark.parametrize("splits", [0, 2, 7, 128])
def test_a_count_of_pieces(splits):
    arguments = make_attention((130, 3, 0, 20), (1500, 700, 9, 0), dims=(64, 40)) | {"num_splits": splits}
    check(arguments | {"causal": True, "window": (900, 0), "dropout_p": 0.2, "rng_state": np.array([4, 5])})


@MODIFIED
def test_alone_in_a_batch_and_on_any_number_of_multiprocessors(options):
    arguments, options = make_attention(Q_LENS, KV_LENS), options | {"causal": True, "return_lse": True}
    starts = arguments["cu_seqlens_q"]
    for limit in (0, 1, 7):
        _core.set_multiprocessor_limit(limit)
        try:
            out, lse = flashport.attention(**arguments, **options)
            for b, (start, end) in enumerate(pairwise(starts)):
                one, one_lse = flashport.attention(**sequence(arguments, b), **options)
                same(one[0], out[start:end])
                same(one_lse[0], lse[:, start:end])
        finally:
            _core.set_multiprocessor_limit(0)


def test_one_piece_has_the_bits_of_chunks_and_of_what_is_not_cut():
    arguments = make_attention(Q_LENS, KV_LENS) | {"causal": True, "return_lse": True}
    cut, cut_lse = flashport.attention(**arguments)
    whole, whole_lse = flashport.attention(**arguments, num_splits=1)
    starts = arguments["cu_seqlens_q"]
    for b, (start, end) in enumerate(pairwise(starts)):
        if b < CUT:
            assert (cut_lse[:, start:end] != whole_lse[:, start:end]).any()
        else:
            same(cut[start:end], whole[start:end])
            same(cut_lse[:, start:end], whole_lse[:, start:end])
    prompt = sequence(make_attention((2500,), (2500,)), 0)
    whole, whole_lse = flashport.attention(**prompt, causal=True, return_lse=True)
    last = prompt | {"q": prompt["q"][:, -50:], "causal": True, "return_lse": True}
    out, lse = flashport.attention(**last, num_splits=1)
    same(out, whole[:, -50:])
    same(lse, whole_lse[..., -50:])
    assert (flashport.attention(**last)[1] != lse).any()


def test_workspace():
    arguments = make_attention((20, 20), (5000, 5000), packed=False)
    bytes_of_call = flashport.attention_workspace_size(**arguments)
    shape = {"batch": 2, "num_q_heads": HEADS, "num_kv_heads": 2, "q_len": 20, "kv_len": 5000, "head_dim": 32}
    plan = flashport.explain("attention", **shape, target="cpu")
    assert plan.pieces == 4
    assert plan.workspace_bytes == bytes_of_call > 4 * 2 * 20 * HEADS * 33 * 4
    assert "keys in 4 pieces, merged in a second launch" in str(plan)
    assert flashport.attention_workspace_size(**arguments, num_splits=1) == 256
    workspace = np.full(bytes_of_call + 16, 255, np.uint8)
    workspace = workspace[-workspace.ctypes.data % 16 :][:bytes_of_call]
    workspace[:256] = 0
    same(flashport.attention(**arguments, workspace=workspace), flashport.attention(**arguments))
    with pytest.raises(ValueError, match=rf"workspace must have at least {bytes_of_call} bytes, got 256"):
        flashport.attention(**arguments, workspace=workspace[:256])


def test_packed_prompts_share_offsets_and_are_never_cut():
    arguments = make_attention((3000, 20), (3000, 20))
    assert flashport.attention_workspace_size(**arguments) > 256
    arguments["cu_seqlens_k"] = arguments["cu_seqlens_q"]
    assert flashport.attention_workspace_size(**arguments) == 256
