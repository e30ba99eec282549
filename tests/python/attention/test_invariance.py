"""A row's bits follow from its own query and the keys that it sees: alone, in a batch, in chunks, repeated."""

from __future__ import annotations

import numpy as np
import pytest

import flashport
from attention_call import FORMATS, HEADS, make_attention
from flashport import _core
from helpers import same

Q_LENS, KV_LENS = (200, 1, 64, 37), (333, 70, 64, 400)
OPTIONS = {
    "plain": {},
    "window": {"window": (50, 3)},
    "modified": {"softcap": 5.0, "alibi_slopes": np.linspace(0.1, 1, HEADS, dtype=np.float32)},
}
MODIFIED = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def alone(arguments, b):
    """The call of sequence ``b`` by itself, as a dense batch of one."""
    cu_q, cu_k = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
    own = {"q": arguments["q"][cu_q[b] : cu_q[b + 1]][None]}
    return own | {name: arguments[name][cu_k[b] : cu_k[b + 1]][None] for name in "kv"}


@MODIFIED
@pytest.mark.parametrize("fmt", FORMATS)
def test_alone_and_in_a_batch(fmt, options):
    arguments = make_attention(Q_LENS, KV_LENS, fmt=fmt)
    options = options | {"causal": True}
    out, lse = flashport.attention(**arguments, **options, return_lse=True)
    for b, (start, end) in enumerate(zip(arguments["cu_seqlens_q"], arguments["cu_seqlens_q"][1:], strict=False)):
        one, one_lse = flashport.attention(**alone(arguments, b), **options, return_lse=True)
        same(one[0], out[start:end])
        same(one_lse[0], lse[:, start:end])


@MODIFIED
@pytest.mark.parametrize("chunk", [1, 7, 100, 192])
def test_a_prompt_in_chunks(chunk, options):
    arguments = alone(make_attention((400,), (400,)), 0)
    whole, whole_lse = flashport.attention(**arguments, **options, causal=True, return_lse=True)
    step = 29 if chunk == 1 else chunk
    for start in range(0, 400, step):
        stop = min(start + chunk, 400)
        part = {name: x[:, start:stop] if name == "q" else x[:, :stop] for name, x in arguments.items()}
        out, lse = flashport.attention(**part, **options, causal=True, return_lse=True)
        same(out, whole[:, start:stop])
        same(lse, whole_lse[..., start:stop])


@MODIFIED
def test_on_any_number_of_multiprocessors_and_again(options):
    arguments = make_attention(Q_LENS, KV_LENS) | options
    first = flashport.attention(**arguments)[: sum(Q_LENS)]
    for limit in (0, 1, 3):
        _core.set_multiprocessor_limit(limit)
        try:
            same(flashport.attention(**arguments)[: sum(Q_LENS)], first)
        finally:
            _core.set_multiprocessor_limit(0)


def test_lengths_in_use_are_as_shorter_sequences():
    q, k, v = (x.copy() for x in alone(make_attention((80,), (90,)), 0).values())
    used = {"seqused_q": np.array([50], np.int32), "seqused_k": np.array([77], np.int32)}
    out = flashport.attention(q, k, v, **used, causal=True)
    same(out[:, :50], flashport.attention(q[:, :50], k[:, :77], v[:, :77], causal=True))


def test_dropout_does_not_follow_the_cut():
    """Of a sequence that stays first in its batch; heads of later ones are counted through the batch."""
    options = {"dropout_p": 0.3, "rng_state": np.array([3, 4])}
    arguments = make_attention(Q_LENS, KV_LENS)
    out = flashport.attention(**arguments, **options)
    same(flashport.attention(**alone(arguments, 0), **options)[0], out[: Q_LENS[0]])
