"""What the drop-ins for SGLang do beside a call: SGLang's own arguments, and gates made by the caller's own library.

Arrays are torch's, NumPy's or CuPy's, whose methods differ from library to library: they have no types here.
"""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from typing import Any

from flashport.arrays import array_library, contiguous, new_array, rank
from flashport.torch import tracing

CHUNK_SIZE = 64  # tokens between two states of ``h``; SGLang has it in chunk_delta_h.py


def check_scale(name: str, scale: Any) -> None:
    """SGLang's functions take a scale above 0, or None."""
    if scale is None:
        return
    try:
        above = scale > 0
    except TypeError:
        above = None
    if above is None or isinstance(scale, bool):
        raise TypeError(f"{name}: scale must be a number or None, got {type(scale).__name__}")
    if not above:
        raise ValueError(f"{name}: scale must be above 0, got {scale}")


def with_steps(name: str, buffer: Any, steps: int) -> Any:
    """The buffer of intermediate states as slots of ``steps`` steps each, which it may say otherwise."""
    if not hasattr(steps, "__index__") or isinstance(steps, bool):
        raise TypeError(f"{name}: cache_steps must be an integer, got {type(steps).__name__}")
    if rank(buffer) != 5 or steps == buffer.shape[1]:
        return buffer  # the library says what does not fit
    if steps < 1:
        raise ValueError(f"{name}: cache_steps must be above 0, got {steps}")
    if contiguous(buffer) is not buffer:
        raise ValueError(
            f"{name}: intermediate_states_buffer must be contiguous where cache_steps, {steps}, are not its "
            f"{buffer.shape[1]} steps; pass cache_steps={buffer.shape[1]}, or a contiguous buffer"
        )
    slots = buffer.shape[0] * buffer.shape[1] // steps
    inner = tuple(buffer.shape[2:])
    return buffer.reshape(-1, *inner)[: slots * steps].reshape(slots, steps, *inner)


def new_chunk_states(name: str, q: Any, v: Any, cu_seqlens: Any, state_layout: str) -> Any:
    """An array for the state that enters each chunk; None where shapes do not fit, of which the library says so."""
    if rank(q) != 4 or rank(v) != 4 or (cu_seqlens is not None and rank(cu_seqlens) != 1):
        return None
    batch, tokens, _, keys = q.shape
    chunks = -(-tokens // CHUNK_SIZE) if cu_seqlens is None else _chunks_of(cu_seqlens, tokens)
    heads, values = v.shape[2:]
    inner = (values, keys) if state_layout == "vk" else (keys, values)
    return new_array(name, "q", q, (batch, chunks, heads, *inner))


def _chunks_of(cu_seqlens: Any, tokens: int) -> int:
    """How many chunks packed sequences have together, each of at most ``tokens``; waits for a GPU."""
    if tracing.is_compiling():  # a list of numbers would end the graph
        count: int = (-(-cu_seqlens.diff().clamp(0, tokens) // CHUNK_SIZE)).sum().item()
        return count
    if not hasattr(cu_seqlens, "tolist"):
        raise TypeError(
            "chunk_gated_delta_rule: h needs cu_seqlens of torch, NumPy or CuPy, got "
            f"{type(cu_seqlens).__name__}; pass one of these, or output_h=False"
        )
    counts = (end - first for first, end in pairwise(cu_seqlens.tolist()))
    return sum(int(-(-min(tokens, max(0, count)) // CHUNK_SIZE)) for count in counts)


def gdn_gating(
    A_log: Any,  # noqa: N803 - SGLang's name
    a: Any,
    b: Any,
    dt_bias: Any,
    beta: float,
    threshold: float,
) -> tuple[Any, Any]:
    """What :func:`flashport.sglang.fused_gdn_gating` gives."""
    name = "fused_gdn_gating"
    torch: Any = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(a, torch.Tensor)
    library: Any = torch if is_torch else array_library(a)
    for argument, x in (("a", a), ("b", b), ("A_log", A_log), ("dt_bias", dt_bias)):
        if library is None or not isinstance(x, torch.Tensor if is_torch else library.ndarray):
            raise TypeError(f"{name}: {argument} must be an array of torch, NumPy or CuPy, got {type(x).__name__}")
    if a.ndim != 2 or b.shape != a.shape:
        argument, x = ("a", a) if a.ndim != 2 else ("b", b)
        wanted = "2 dimensions (tokens, value heads)" if a.ndim != 2 else f"the shape of a {tuple(a.shape)}"
        raise ValueError(f"{name}: {argument} must have {wanted}, got shape {tuple(x.shape)}")
    for argument, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if math.prod(x.shape) != a.shape[1]:
            raise ValueError(f"{name}: {argument} must have {a.shape[1]} elements, got shape {tuple(x.shape)}")
    if is_torch:
        x = a.float() + dt_bias.reshape(-1).float()
        g = torch.nn.functional.softplus(x, beta, threshold).mul_(A_log.reshape(-1).float().exp().neg_())
        return g.contiguous().unsqueeze(0), b.sigmoid().float().contiguous().unsqueeze(0)
    x = a.astype("float32") + dt_bias.reshape(-1).astype("float32")
    scaled = x * library.float32(beta)
    inside = library.log1p(library.exp(library.minimum(scaled, threshold))) / library.float32(beta)
    g = -library.exp(A_log.reshape(-1).astype("float32")) * library.where(scaled <= threshold, inside, x)
    rates = 1 / (1 + library.exp(library.minimum(-b.astype("float32"), 88)))  # beyond, exp would overflow
    g, rates = (library.ascontiguousarray(y.astype("float32"))[None] for y in (g, rates.astype(b.dtype)))
    return g, rates
