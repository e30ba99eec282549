"""An attention call that the suites share: random inputs as NumPy arrays, and what its results are held against."""

from __future__ import annotations

import numpy as np

import flashport
from flashport.testing import attention_oracle, oracle
from helpers import BF16

FORMATS = {"fp32": np.float32, "fp16": np.float16, "bf16": BF16}
HEADS, KV_HEADS = 4, 2
STATE = np.array([1, 2])


def make_attention(
    q_lens=(70, 5, 0, 1), kv_lens=(90, 5, 7, 0), dims=(32, 32), fmt="bf16", packed=True, heads=(HEADS, KV_HEADS), seed=0
):
    """Arguments by name: packed sequences, or dense ones whose tokens past a length are NaN.

    Dense sequences say their lengths by ``seqused_q`` and ``seqused_k``, unless they all are the longest.
    """
    rng = np.random.default_rng(seed)
    (q_heads, kv_heads), (dim, dim_v), dtype = heads, dims, FORMATS[fmt]

    def random(tokens, *shape):
        return rng.standard_normal((tokens, *shape), np.float32).astype(dtype)

    parts = {"q": (q_lens, q_heads, dim), "k": (kv_lens, kv_heads, dim), "v": (kv_lens, kv_heads, dim_v)}
    if packed:
        arguments = {name: random(sum(lens) + 2, count, width) for name, (lens, count, width) in parts.items()}
        for name, (lens, *_) in parts.items():
            arguments[name][sum(lens) :] = np.nan  # no sequence's
        for side, lens in (("q", q_lens), ("k", kv_lens)):
            arguments[f"cu_seqlens_{side}"] = np.cumsum([0, *lens], dtype=np.int32)
            arguments[f"max_seqlen_{side}"] = max([1, *lens])
        return arguments
    arguments = {}
    for name, (lens, count, width) in parts.items():
        arguments[name] = random(len(lens) * max(lens), count, width).reshape(len(lens), max(lens), count, width)
        for b, length in enumerate(lens):
            arguments[name][b, length:] = np.nan
    for side, lens in (("q", q_lens), ("k", kv_lens)):
        if min(lens) < max(lens):
            arguments[f"seqused_{side}"] = np.array(lens, np.int32)
    return arguments


def format_of(arguments):
    """The name of q's element type."""
    return next(fmt for fmt, dtype in FORMATS.items() if arguments["q"].dtype == dtype)


def poisoned_outputs(arguments):
    """``out`` and ``lse`` that are NaN throughout."""
    q, v = arguments["q"], arguments["v"]
    shape = (*q.shape[:-1], v.shape[-1])
    lse = (shape[1], shape[0]) if q.ndim == 3 else (shape[0], shape[2], shape[1])
    return {"out": np.full(shape, np.nan, q.dtype), "lse": np.full(lse, np.nan, np.float32)}


def check(arguments):
    """Runs the call over outputs that hold NaN and holds it against the oracle; gives the outputs."""
    outputs = poisoned_outputs(arguments)
    flashport.attention(**arguments, **outputs)
    expect_right(arguments, **outputs)
    return outputs["out"], outputs["lse"]


def expect_right(arguments, out, lse):
    """These results are within tolerance where the call writes, and NaN elsewhere."""
    truth = attention_oracle.attention(arguments)
    plain = attention_oracle.attention(arguments, plain=format_of(arguments))
    # A logit is a sum of products of about 1, and a capped one a multiple of the cap, however small it is itself.
    rounding = 5e-7 * max(1.0, arguments.get("softcap", 0.0))
    for name, got, wanted, usual in zip(("out", "lse"), (out, lse), truth, plain, strict=True):
        # A small call has few samples of the largest error, which the last rounding alone may make.
        step = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(np.asarray(got).dtype.name, 0.0)
        got = np.asarray(got).astype(np.float32)
        unwritten = np.isnan(wanted)
        assert np.isnan(got[unwritten]).all(), f"{name} was written where no sequence has a query"
        finite = wanted[np.isfinite(wanted)]
        last = step * float(np.abs(finite).max()) if 0 < finite.size < 100_000 else 0.0
        compared = oracle.compare(got[~unwritten], wanted[~unwritten], usual[~unwritten], name, rounding + last)
        assert not compared.problem, compared.problem


def packed_arguments():
    """With every array that packed sequences may have."""
    arguments = make_attention((5, 3), (9, 4), (32, 48))
    arguments |= {"seqused_q": np.array([4, 3], np.int32), "seqused_k": np.array([9, 2], np.int32)}
    arguments |= {"leftpad_k": np.array([1, 0], np.int32), "alibi_slopes": np.zeros((2, HEADS), np.float32)}
    return arguments | {"sinks": np.zeros(HEADS, np.float32), "rng_state": STATE.copy(), **poisoned_outputs(arguments)}


def dense_arguments():
    """The same of dense sequences."""
    arguments = make_attention((5, 5), (9, 9), (32, 48), packed=False)
    arguments |= {"alibi_slopes": np.zeros(HEADS, np.float32), "sinks": np.zeros(HEADS, np.float32)}
    arguments |= {"bias": np.zeros((2, HEADS, 5, 9), np.float32), "rng_state": STATE.copy()}
    return arguments | poisoned_outputs(arguments)


MAKERS = {"packed": packed_arguments, "dense": dense_arguments}
# All their arrays, each as (form, name).
ARRAYS = [
    (form, name) for form, make in MAKERS.items() for name, value in make().items() if isinstance(value, np.ndarray)
]
