"""The gated delta rule in NumPy, written from its specification: fp64 as the truth, and the same recurrence in fp32.

Shares no code with the library. The fp32 recurrence is the yardstick of every tolerance: sums in index order, no fused
multiply-add, states rounded to the type of the memory that holds them wherever they are stored, outputs rounded to
theirs; the library's error against fp64 may be 1.5 times as large as its. That of the chunked form is held against a
plain WY form with operands of the inputs' type. Symbols are those of flashport/gated_delta.py; element types are named
as in flashport/testing/numerics.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flashport.testing import numerics
from flashport.testing.oracle import ERROR_RATIO, Comparison

L2NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Rule:
    """Options of the recurrence; the names are those of :func:`flashport.gated_delta_update`."""

    scale: float | None = None
    softplus_beta: float = 1.0
    softplus_threshold: float = 20.0
    lower_bound: float | None = None
    use_qk_l2norm: bool = False
    is_kda: bool = False
    head_map: str = "consecutive"
    allow_neg_eigval: bool = False


@dataclass(frozen=True)
class Expected:
    """What a call leaves behind.

    out [B, T, HV, V], NaN where no sequence has a token; state and intermediate in the shapes of the call's arrays, or
    None where it had none. Elements that the call does not write are those that it was given. final_states [N, ...] has
    the inner axes of the layout.
    """

    out: np.ndarray
    state: np.ndarray | None
    intermediate: np.ndarray | None
    final_states: np.ndarray


def gate(a: np.ndarray, A_log: np.ndarray, dt_bias: np.ndarray, rule: Rule, dtype: type) -> np.ndarray:  # noqa: N803
    """Logarithm of the decay, of the shape of ``a``; A_log and dt_bias broadcast against it."""
    x = a.astype(dtype) + dt_bias.astype(dtype)
    speed = np.exp(A_log.astype(dtype))
    with np.errstate(over="ignore"):
        if rule.lower_bound is not None:
            return dtype(rule.lower_bound) / (1 + np.exp(-speed * x))
        scaled = dtype(rule.softplus_beta) * x
        soft = np.log1p(np.exp(scaled)) / dtype(rule.softplus_beta)
        return -speed * np.where(scaled <= rule.softplus_threshold, soft, x)


def sigmoid(b: np.ndarray, dtype: type) -> np.ndarray:
    """Rate at which a token is learned."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-b.astype(dtype)))


def per_value_head(x: np.ndarray, num_value_heads: int, head_map: str) -> np.ndarray:
    """[..., H, K] as [..., HV, K]: what each value head reads."""
    heads = np.arange(num_value_heads)
    num_heads = x.shape[-2]
    return x[..., heads % num_heads if head_map == "modulo" else heads // (num_value_heads // num_heads), :]


def l2norm(x: np.ndarray) -> np.ndarray:
    """Rows of the last axis over their length, summed in index order."""
    return x / np.sqrt(np.add.accumulate(x * x, axis=-1)[..., -1:] + x.dtype.type(L2NORM_EPSILON))


def step(
    S: np.ndarray,  # noqa: N803 - the state's name in the literature
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    gates: list[np.ndarray],
    beta: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """One token: (o [HV, V], the new state); S [HV, K, V], q and k [HV, K], v [HV, V], beta [HV, V or 1].

    ``gates``: logarithms of factors, each [HV, K or 1, V or 1]. NumPy sums over K in index order as long as V is the
    innermost axis in memory.
    """
    S = np.ascontiguousarray(S)  # noqa: N806
    for gate in gates:
        S = S * np.exp(gate)  # noqa: N806
    u = beta * (v - (S * k[..., None]).sum(axis=1))
    S = S + k[..., None] * u[:, None, :]  # noqa: N806
    return (S * q[..., None]).sum(axis=1), S


def update(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    a: np.ndarray | None = None,
    b: np.ndarray | None = None,
    A_log: np.ndarray | None = None,  # noqa: N803
    dt_bias: np.ndarray | None = None,
    state: np.ndarray | None = None,
    state_indices: np.ndarray | None = None,
    *,
    g: np.ndarray | None = None,
    gk: np.ndarray | None = None,
    gv: np.ndarray | None = None,
    beta: np.ndarray | None = None,
    state_layout: str = "vk",
    update_state: bool = True,
    cu_seqlens: np.ndarray | None = None,
    intermediate_states: np.ndarray | None = None,
    intermediate_indices: np.ndarray | None = None,
    parent_tokens: np.ndarray | None = None,
    dtype: type = np.float64,
    out_type: str = "fp32",
    state_type: str = "fp32",
    intermediate_type: str = "fp32",
    final_type: str = "fp32",
    rule: Rule = Rule(),
) -> Expected:
    """What :func:`flashport.gated_delta_update` makes of these arguments, in ``dtype``; fp32 also rounds.

    Arrays hold the values as stored, in any type of NumPy's; none is written. The four types say to what fp32 results
    are rounded.
    """
    plain = dtype is np.float32
    batch, tokens, heads, values = v.shape
    keys = k.shape[-1]
    q, k = (per_value_head(x, heads, rule.head_map).astype(dtype).reshape(-1, heads, keys) for x in (q, k))
    if rule.use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q = q * dtype(1 / math.sqrt(keys) if rule.scale is None else rule.scale)
    v = v.astype(dtype).reshape(-1, heads, values)
    gates = []  # each [tokens, HV, K or 1, V or 1]
    if a is not None:
        channels = keys if rule.is_kda else 1
        bias = np.zeros(heads * channels) if dt_bias is None else dt_bias
        made = gate(a.reshape(-1, heads, channels), A_log.reshape(heads, 1), bias.reshape(heads, channels), rule, dtype)
        gates.append(made[..., None])
    gates += [x.astype(dtype).reshape(-1, heads, 1, 1) for x in (g,) if x is not None]
    gates += [x.astype(dtype).reshape(-1, heads, keys, 1) for x in (gk,) if x is not None]
    gates += [x.astype(dtype).reshape(-1, heads, 1, values) for x in (gv,) if x is not None]
    rates = np.ones((len(v), heads), dtype)
    if beta is not None:
        rates = beta.astype(dtype)
    elif b is not None:
        rates = (2 if rule.allow_neg_eigval else 1) * sigmoid(b, dtype)
    rates = rates.reshape(-1, heads, values if rates.ndim == 4 else 1)

    bounds = np.arange(batch + 1) * tokens if cu_seqlens is None else np.asarray(cu_seqlens)
    count = len(bounds) - 1
    slots = _or_identity(state_indices, count) if state is not None else np.full(count, -1)
    kept = _or_identity(intermediate_indices, count) if intermediate_states is not None else np.full(count, -1)
    out = np.full((batch * tokens, heads, values), np.nan, dtype)
    pool, buffer = (None if x is None else x.astype(dtype) for x in (state, intermediate_states))
    final = []

    def store(S: np.ndarray, fmt: str) -> np.ndarray:  # noqa: N803
        S = S if state_layout == "kv" else S.swapaxes(-1, -2)  # noqa: N806
        return numerics.rounded(S, fmt) if plain else S

    def load(stored: np.ndarray) -> np.ndarray:
        return stored if state_layout == "kv" else stored.swapaxes(-1, -2)

    for n in range(count):
        first, length = int(bounds[n]), int(bounds[n + 1] - bounds[n])
        S = load(pool[slots[n]]) if slots[n] >= 0 else np.zeros((heads, keys, values), dtype)  # noqa: N806
        for t in range(length):
            if parent_tokens is not None and t > 0 and kept[n] >= 0:
                S = load(buffer[kept[n], parent_tokens[n, t]])  # noqa: N806
            row = first + t
            out[row], S = step(S, q[row], k[row], v[row], [x[row] for x in gates], rates[row])  # noqa: N806
            if kept[n] >= 0:
                buffer[kept[n], t] = store(S, intermediate_type)
        final.append(store(S, final_type))
        if slots[n] >= 0 and update_state and length > 0:
            pool[slots[n]] = store(S, state_type)
    if plain:
        out = numerics.rounded(out, out_type)
    inner = (heads, keys, values) if state_layout == "kv" else (heads, values, keys)
    return Expected(
        out.reshape(batch, tokens, heads, values), pool, buffer, np.asarray(final, dtype).reshape(count, *inner)
    )


def _or_identity(indices: np.ndarray | None, count: int) -> np.ndarray:
    return np.arange(count) if indices is None else np.asarray(indices)


@dataclass(frozen=True)
class ExpectedChunks:
    """What a chunked call leaves behind: as :class:`Expected`, and the states that sequences end with and enter chunks.

    final_states [N, ...] and chunk_states [B, chunks, ...] have the inner axes of the layout.
    """

    out: np.ndarray
    state: np.ndarray | None
    final_states: np.ndarray
    chunk_states: np.ndarray


CHUNK = 64


def log_gates(g: np.ndarray, A_log: np.ndarray | None, dt_bias: np.ndarray | None, dtype: type) -> np.ndarray:  # noqa: N803
    """Logarithms of the decays [.., HV] from the chunked call's arguments."""
    if A_log is None:
        return g.astype(dtype)
    bias = np.zeros(g.shape[-1]) if dt_bias is None else dt_bias.reshape(-1)
    return gate(g, A_log.reshape(-1), bias, Rule(), dtype)


def wy_chunk(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    S: np.ndarray,  # noqa: N803
    fmt: str,
) -> tuple[np.ndarray, np.ndarray]:
    """One chunk in the plain WY form: (o [HV, c, V], the new state [HV, K, V]), in fp32.

    q, k [HV, c, K] of type ``fmt``, normalised and rounded to it; v [HV, c, V]; g, beta [HV, c]. U = T (beta v),
    W = T (beta e^G k), v_new = U - W S, with T, U, W, v_new, P and the operand S rounded to ``fmt``, and sums in fp32.
    Gates are added up in fp64, none below -1000, so that differences are numbers: the yardstick is of the products, not
    of how sums of gates lose digits.
    """
    rounded, f32 = (lambda x: numerics.rounded(x, fmt)), np.float32
    G = np.cumsum(np.maximum(g.astype(np.float64), -1000), axis=-1)  # noqa: N806
    count = G.shape[-1]
    lower = np.tri(count, dtype=bool)
    D = np.exp(np.where(lower, G[:, :, None] - G[:, None, :], -np.inf).astype(f32))  # noqa: N806
    beta = beta[..., None].astype(f32)
    eg = np.exp(G).astype(f32)[..., None]
    A = np.where(np.tri(count, k=-1, dtype=bool), beta * (k @ k.swapaxes(1, 2)) * D, f32(0))  # noqa: N806
    T = np.broadcast_to(np.eye(count, dtype=f32), A.shape).copy()  # noqa: N806
    for i in range(1, count):
        T[:, i, :] -= (A[:, i, :i, None] * T[:, :i, :]).sum(axis=1, dtype=f32)
    T = rounded(T)  # noqa: N806
    U, W = rounded(T @ rounded(beta * v)), rounded(T @ rounded(beta * eg * k))  # noqa: N806
    operand = rounded(S)
    v_new = U - W @ operand
    P = rounded((q @ k.swapaxes(1, 2)) * D)  # noqa: N806
    out = eg * (q @ operand) + P @ rounded(v_new)
    left = np.exp((G[:, -1:] - G).astype(f32))[..., None]
    return out, eg[:, -1:] * S + k.swapaxes(1, 2) @ rounded(left * v_new)


def chunk(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray | None = None,
    state_indices: np.ndarray | None = None,
    *,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    A_log: np.ndarray | None = None,  # noqa: N803
    dt_bias: np.ndarray | None = None,
    state_layout: str = "vk",
    update_state: bool = True,
    cu_seqlens: np.ndarray | None = None,
    plain: str | None = None,
    state_type: str = "fp32",
    final_type: str = "fp32",
    rule: Rule = Rule(),
) -> ExpectedChunks:
    """What :func:`flashport.gated_delta_chunk` makes of these arguments: the recurrence in fp64.

    With ``plain``, the type of q: the plain WY form with operands of that type, results rounded as they are stored.
    """
    dtype = np.float64 if plain is None else np.float32
    batch, tokens, heads, values = v.shape
    keys = k.shape[-1]
    q, k = (per_value_head(x, heads, rule.head_map).astype(dtype).reshape(-1, heads, keys) for x in (q, k))
    if rule.use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q = q * dtype(1 / math.sqrt(keys) if rule.scale is None else rule.scale)
    if plain is not None and rule.use_qk_l2norm:
        q, k = numerics.rounded(q, plain), numerics.rounded(k, plain)
    v = v.astype(dtype).reshape(-1, heads, values)
    g = log_gates(g.reshape(-1, heads), A_log, dt_bias, dtype)
    beta = beta.reshape(-1, heads)
    beta = (2 if allow_neg_eigval else 1) * sigmoid(beta, dtype) if beta_sigmoid else beta.astype(dtype)

    bounds = np.arange(batch + 1) * tokens if cu_seqlens is None else np.asarray(cu_seqlens)
    count = len(bounds) - 1
    slots = _or_identity(state_indices, count) if state is not None else np.full(count, -1)
    out = np.full((batch * tokens, heads, values), np.nan, dtype)
    pool = None if state is None else state.astype(dtype)
    final, entering = [], []

    def turned(S: np.ndarray) -> np.ndarray:  # noqa: N803
        return S if state_layout == "kv" else S.swapaxes(-1, -2)

    for n in range(count):
        first, end = int(bounds[n]), int(bounds[n + 1])
        S = turned(pool[slots[n]]) if slots[n] >= 0 else np.zeros((heads, keys, values), dtype)  # noqa: N806
        for begin in range(first, end, CHUNK):
            own = slice(begin, min(begin + CHUNK, end))
            entering.append(turned(S).copy())
            if plain is not None:
                by_head = [x[own].swapaxes(0, 1) for x in (q, k, v, g, beta)]
                o, S = wy_chunk(*by_head, S, plain)  # noqa: N806
                out[own] = o.swapaxes(0, 1)
                continue
            for t in range(begin, own.stop):
                out[t], S = step(S, q[t], k[t], v[t], [g[t, :, None, None]], beta[t, :, None])  # noqa: N806
        final.append(turned(S).copy())
        if slots[n] >= 0 and update_state and end > first:
            pool[slots[n]] = turned(S) if plain is None else numerics.rounded(turned(S), state_type)
    inner = turned(np.zeros((heads, keys, values))).shape
    final, entering = (np.asarray(x, dtype).reshape(-1, *inner) for x in (final, entering))
    if plain is not None:
        out, entering = numerics.rounded(out, plain), numerics.rounded(entering, plain)
        final = numerics.rounded(final, final_type)
    chunks = len(entering) if cu_seqlens is not None else -(-tokens // CHUNK)
    return ExpectedChunks(
        out.reshape(batch, tokens, heads, values), pool, final, entering.reshape(batch, chunks, *inner)
    )


def compare(got: np.ndarray, truth: np.ndarray, plain: np.ndarray, fmt: str, what: str = "out") -> Comparison:
    """Holds a result of type ``fmt`` against the truth and the plain recurrence: its largest error, and its rms.

    The floor is 8 roundings of fp32 of the largest result; the largest error may have half a unit in the last place of
    ``fmt`` on top. docs/numerics.md says why.
    """
    got, truth, plain = (np.asarray(x).astype(np.float64) for x in (got, truth, plain))
    if not got.shape == truth.shape == plain.shape:
        return Comparison(problem=f"{what}: shape {got.shape}, expected {truth.shape}")
    if not np.isfinite(got).all():
        return Comparison(error=math.inf, problem=f"{what}: not finite")
    if got.size == 0:
        return Comparison()
    error, plain_error = np.abs(got - truth), np.abs(plain - truth)
    largest = float(np.abs(truth).max())
    floor = 8 * 2.0**-24 * largest
    rounding = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}[fmt] * largest
    limit = ERROR_RATIO * float(plain_error.max()) + floor + rounding
    rms, rms_limit = _rms(error), ERROR_RATIO * _rms(plain_error) + floor
    problem = ""
    if not error.max() <= limit:
        problem = f"{what}: error {error.max():.3g}, allowed {limit:.3g}"
    elif not rms <= rms_limit:
        problem = f"{what}: rms error {rms:.3g}, allowed {rms_limit:.3g}"
    return Comparison(float(error.max()), float(plain_error.max()), problem)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x * x)))
