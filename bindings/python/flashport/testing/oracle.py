"""Attention in NumPy, written from the specification: fp64 as the truth, and a plain same-precision implementation.

Shares no code with the library. The plain implementation rounds operands, probabilities and the output to the math
type and accumulates in fp32, in the simplest order; its error against fp64 is the yardstick of every tolerance: the
library's may be 1.5 times as large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flashport.testing import numerics

ERROR_RATIO = 1.5


@dataclass
class Request:
    """One request with its rows gathered.

    q [q_len, Hq, D], k [kv_len, Hkv, D], v [kv_len, Hkv, DV]: fp32 values as stored, before k_scale and v_scale.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    slopes: np.ndarray | None = None  # [Hq]
    sinks: np.ndarray | None = None  # [Hq]
    tree: np.ndarray | None = None  # [q_len] uint32
    k_scale: np.ndarray | None = None  # [Hkv]
    v_scale: np.ndarray | None = None  # [Hkv]

    def visible(self) -> np.ndarray:
        """[q_len, kv_len]: whether a row attends to a key."""
        q_len, kv_len = len(self.q), len(self.k)
        first = kv_len - q_len  # position of the first new token
        position = first + np.arange(q_len)[:, None]
        key = np.arange(kv_len)[None, :]
        if self.tree is None:
            seen = key <= position
        else:
            draft = np.maximum(key - first, 0).astype(np.uint32)
            seen = (key < first) | ((self.tree[:, None].astype(np.uint32) >> draft) & 1 == 1)
        left, right = self.window
        if left >= 0:
            seen = seen & (key >= position - left)
        if right >= 0:
            seen = seen & (key <= position + right)
        return seen


def attend(
    request: Request, dtype: type = np.float64, math_type: str = "fp32", out_type: str = "fp32"
) -> tuple[np.ndarray, np.ndarray]:
    """(out [q_len, Hq, DV], lse [q_len, Hq]) in ``dtype``; fp32 also rounds as the plain implementation does."""
    r = request
    plain = dtype is np.float32
    q_len, num_q_heads, head_dim = r.q.shape
    kv_len, num_kv_heads, head_dim_v = r.v.shape
    group = num_q_heads // num_kv_heads
    scale = 1 / math.sqrt(head_dim) if r.scale is None else r.scale
    out = np.zeros((q_len, num_q_heads, head_dim_v), dtype)
    lse = np.full((q_len, num_q_heads), -np.inf, dtype)
    seen = r.visible()
    distance = np.abs(kv_len - q_len + np.arange(q_len)[:, None] - np.arange(kv_len)[None, :])
    for kv_head in range(num_kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        q = r.q[:, heads].transpose(1, 0, 2).astype(dtype)  # [group, q_len, D]
        k = r.k[:, kv_head].astype(dtype)
        v = r.v[:, kv_head].astype(dtype)
        if plain:  # a quantised cache is widened to the math type, and so are queries of another type
            q, k, v = (numerics.rounded(operand, math_type) for operand in (q, k, v))
        scores = q @ k.T * dtype(scale * (1 if r.k_scale is None else r.k_scale[kv_head]))
        if r.softcap > 0:
            scores = dtype(r.softcap) * np.tanh(scores / dtype(r.softcap))
        if r.slopes is not None:
            scores = scores - r.slopes[heads, None, None].astype(dtype) * distance
        scores = np.where(seen, scores, -np.inf)
        largest = scores.max(axis=-1, initial=-np.inf)
        if r.sinks is not None:
            sinks = r.sinks[heads, None].astype(dtype)
            largest = np.maximum(largest, sinks)
        shift = np.where(np.isfinite(largest), largest, 0)
        weights = np.exp(scores - shift[..., None])
        total = weights.sum(axis=-1)
        if r.sinks is not None:
            total = total + np.exp(sinks - shift)
        if plain:
            weights = numerics.rounded(weights, math_type)
        unseen = total == 0
        safe = np.where(unseen, 1, total)
        result = (weights @ v) / safe[..., None] * dtype(1 if r.v_scale is None else r.v_scale[kv_head])
        out[:, heads] = result.transpose(1, 0, 2)
        with np.errstate(divide="ignore"):
            lse[:, heads] = np.where(unseen, -np.inf, np.log(safe) + shift).T
    if plain:
        out = numerics.rounded(out, out_type)
    return out, lse


def merge(o: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge over the leading axis, in fp64: o [n, ..., D], lse [n, ...] of natural logarithms."""
    o, lse = o.astype(np.float64), lse.astype(np.float64)
    largest = lse.max(axis=0)
    shift = np.where(np.isfinite(largest), largest, 0)
    weights = np.exp(lse - shift)
    total = weights.sum(axis=0)
    unseen = total == 0
    safe = np.where(unseen, 1, total)
    out = (np.where(weights[..., None] > 0, o, 0) * weights[..., None]).sum(axis=0) / safe[..., None]
    return out, np.where(unseen, -np.inf, np.log(safe) + shift)


@dataclass
class Comparison:
    """Errors of a result against the oracle; ``problem`` is empty where it is within tolerance."""

    error: float = 0.0  # largest absolute error
    plain_error: float = 0.0  # that of the plain implementation
    problem: str = ""


def compare(
    got: np.ndarray, truth: np.ndarray, plain: np.ndarray, what: str = "out", rounding: float = 0.0
) -> Comparison:
    """Holds a result against the oracle and the plain implementation's error.

    ``rounding`` is an error that fp32 may bring into the result by itself, where one row of it says too little.
    """
    if got.shape != truth.shape:
        return Comparison(problem=f"{what}: shape {got.shape}, expected {truth.shape}")
    if not np.array_equal(np.isfinite(got), np.isfinite(truth)) or np.isnan(got).any():
        return Comparison(error=math.inf, problem=f"{what}: not finite where the oracle is, or finite where it is not")
    finite = np.isfinite(truth)
    if not finite.any():
        return Comparison()
    truth = truth[finite].astype(np.float64)
    error = float(np.abs(got[finite] - truth).max())
    plain_error = float(np.abs(plain[finite] - truth).max())
    # Below this lies rounding of fp32 sums in any order.
    floor = 4e-6 * max(float(np.abs(truth).max()), 1e-3)
    limit = ERROR_RATIO * plain_error + floor + rounding
    problem = "" if error <= limit else f"{what}: error {error:.3g}, allowed {limit:.3g}"
    return Comparison(error, plain_error, problem)
