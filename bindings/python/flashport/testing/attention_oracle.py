"""Attention of many queries in NumPy, written from its specification: fp64 as the truth, and a plain implementation.

Shares no code with the library. The plain implementation has operands of one type, rounds weights and the output to it
and accumulates in fp32; the library's error against fp64 may be 1.5 times as large as its (:func:`oracle.compare`).
Symbols are those of flashport/_attention.py; element types are named as in flashport/testing/numerics.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashport.testing import numerics


@dataclass(frozen=True)
class Rule:
    """Options of a call that are no arrays; the names are those of :func:`flashport.attention`."""

    softmax_scale: float | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    dropout_p: float = 0.0


def philox(counter: tuple[np.ndarray, ...], key: int) -> list[np.ndarray]:
    """Philox4x32-10 (Salmon et al., SC 2011): four words of random bits for each counter of four words."""
    x = [np.asarray(word, np.uint64) for word in counter]
    low, high = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32 & 0xFFFFFFFF)
    word = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [b >> np.uint64(32) ^ x[1] ^ low, b & word, a >> np.uint64(32) ^ x[3] ^ high, a & word]
        low, high = low + np.uint64(0x9E3779B9) & word, high + np.uint64(0xBB67AE85) & word
    return x


def kept_weights(
    rng_state: np.ndarray, dropout_p: float, heads: np.ndarray, rows: np.ndarray, kv_len: int
) -> np.ndarray:
    """[heads, rows, kv_len]: whether a weight is kept. ``heads`` count those of all sequences.

    One call of the generator serves 16 keys of a query, a byte each: of 64 keys those whose numbers are 2 c and
    2 c + 1 modulo 8.
    """
    seed, offset = (int(x) & 0xFFFFFFFFFFFFFFFF for x in rng_state)
    keys = np.arange(kv_len)
    group = keys // 64 * 4 + keys % 8 // 2
    byte = keys % 64 // 8 * 2 + keys % 2  # which of 16
    counter = np.broadcast_arrays(group, rows[:, None], heads[:, None, None], offset & 0xFFFFFFFF)
    words = np.stack(philox(tuple(counter), seed ^ (offset & 0xFFFFFFFF00000000)))
    chosen = np.take_along_axis(words, np.broadcast_to(byte // 4, (1, *words.shape[1:])), 0)[0]
    bits = chosen >> (byte % 4 * 8).astype(np.uint64) & np.uint64(0xFF)
    return bits >= min(np.rint(dropout_p * 256), 255)


def dropout_mask(shape: tuple[int, int, int, int], rng_state: np.ndarray, dropout_p: float) -> np.ndarray:
    """As :func:`flashport.dropout_mask`."""
    batch, heads, q_len, kv_len = shape
    kept = kept_weights(rng_state, dropout_p, np.arange(batch * heads), np.arange(q_len), kv_len)
    return kept.reshape(shape).astype(np.uint8)


def visible(rule: Rule, rows: np.ndarray, q_len: int, kv_len: int) -> np.ndarray:
    """[rows, kv_len]: whether a query sees a key."""
    position, key = (rows + kv_len - q_len)[:, None], np.arange(kv_len)[None]
    left, right = rule.window
    right = 0 if rule.causal else right
    seen = np.ones((len(rows), kv_len), bool)
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    return seen


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    rule: Rule,
    *,
    slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    kept: np.ndarray | None = None,
    rows: np.ndarray | None = None,
    plain: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(out [rows, Hq, DV], lse [Hq, rows]) of one sequence, in fp64 or of a plain implementation in the type ``plain``.

    q [Sq, Hq, D], k [Sk, Hkv, D], v [Sk, Hkv, DV] of fp32 values; slopes and sinks [Hq]; bias and ``kept`` [Hq, rows,
    Sk]. ``rows``: the queries to compute. Default: all.
    """
    dtype = np.float64 if plain is None else np.float32
    q_len, kv_len, heads = len(q), len(k), q.shape[1]
    group = heads // k.shape[1]
    rows = np.arange(q_len) if rows is None else rows
    scale = 1 / math.sqrt(q.shape[2]) if rule.softmax_scale is None else rule.softmax_scale
    seen = visible(rule, rows, q_len, kv_len)
    distance = np.abs((rows + kv_len - q_len)[:, None] - np.arange(kv_len)[None])
    out = np.zeros((len(rows), heads, v.shape[2]), dtype)
    lse = np.full((heads, len(rows)), -np.inf, dtype)
    for head in range(heads):
        scores = q[rows, head].astype(dtype) @ k[:, head // group].astype(dtype).T * dtype(scale)
        if rule.softcap > 0:
            scores = dtype(rule.softcap) * np.tanh(scores / dtype(rule.softcap))
        if slopes is not None:
            scores = scores - dtype(slopes[head]) * distance
        if bias is not None:
            scores = scores + bias[head].astype(dtype)
        scores = np.where(seen, scores, -np.inf)
        largest = scores.max(axis=1, initial=-np.inf if sinks is None else dtype(sinks[head]))
        shift = np.where(np.isfinite(largest), largest, 0)
        weights = np.exp(scores - shift[:, None])
        total = weights.sum(axis=1)
        if sinks is not None:
            total = total + np.exp(dtype(sinks[head]) - shift)
        if kept is not None:
            weights = np.where(kept[head], weights, 0) / dtype(1 - rule.dropout_p)
        if plain is not None:
            weights = numerics.rounded(weights, plain)
        unseen = total == 0
        safe = np.where(unseen, 1, total)
        out[:, head] = weights @ v[:, head // group].astype(dtype) / safe[:, None]
        lse[head] = np.where(unseen, -np.inf, np.log(safe) + shift)
    return (out if plain is None else numerics.rounded(out, plain)), lse


def attention(arguments: dict[str, Any], plain: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a call, NaN where it writes nothing.

    ``arguments``: those of :func:`flashport.attention` by name, arrays as NumPy arrays; an output, a maximum and a
    workspace are not looked at.
    """
    q, k, v = (np.asarray(arguments[name]).astype(np.float32) for name in "qkv")
    offsets = [arguments.get(f"cu_seqlens_{side}") for side in "qk"]
    packed = offsets[0] is not None
    batch = len(offsets[0]) - 1 if packed else len(q)
    heads = q.shape[-2]
    rule = Rule(**{name: arguments[name] for name in Rule.__dataclass_fields__ if name in arguments})
    slopes, bias = arguments.get("alibi_slopes"), arguments.get("bias")
    slopes = None if slopes is None else np.broadcast_to(slopes, (batch, heads))
    bias = (
        None if bias is None else np.broadcast_to(np.asarray(bias).astype(np.float32), (batch, heads, *bias.shape[2:]))
    )
    lengths = [arguments.get(name) for name in ("seqused_q", "seqused_k")]
    pads = arguments.get("leftpad_k")
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan)
    lse = np.full((heads, len(q)) if packed else (batch, heads, q.shape[1]), np.nan)
    for b in range(batch):
        queries, keys = (
            slice(start, end if used is None else start + used[b])
            for start, end, used in (
                (cu[b], cu[b + 1], used) if packed else (0, x.shape[1], used)
                for cu, x, used in zip(offsets, (q, k), lengths, strict=True)
            )
        )
        keys = slice(keys.start + (0 if pads is None else pads[b]), keys.stop)
        own_q, own_k, own_v = (x[where] if packed else x[b, where] for x, where in ((q, queries), (k, keys), (v, keys)))
        kept = None
        if rule.dropout_p > 0:
            own_heads = b * heads + np.arange(heads)
            kept = kept_weights(arguments["rng_state"], rule.dropout_p, own_heads, np.arange(len(own_q)), len(own_k))
        own_out, own_lse = attend(
            own_q, own_k, own_v, rule, slopes=None if slopes is None else slopes[b], sinks=arguments.get("sinks"),
            bias=None if bias is None else bias[b, :, : len(own_q), : len(own_k)], kept=kept, plain=plain,
        )  # fmt: skip
        (out if packed else out[b])[queries] = own_out
        (lse if packed else lse[b])[:, queries] = own_lse
    return out, lse
