"""Drop-ins for SGLang's linear attention, under its names and signatures.

``from flashport.sglang import fused_sigmoid_gating_delta_rule_update`` in place of the Triton module of that name.
Tensors may be torch's, NumPy's, CuPy's or :class:`flashport.DeviceArray`; torch is imported only by who hands in its
tensors. Arguments that SGLang's releases order differently go by keyword here, as all of SGLang's callers give them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from flashport import tracing
from flashport.arrays import new_array, new_output, rank
from flashport.gated_delta import gated_delta_chunk, gated_delta_update, refuse_gradients

__all__ = ["chunk_gated_delta_rule", "fused_sigmoid_gating_delta_rule_update"]

_CHUNK = 64


def fused_sigmoid_gating_delta_rule_update(
    A_log: Any,  # noqa: N803 - SGLang's names
    a: Any,
    dt_bias: Any,
    softplus_beta: float,
    softplus_threshold: float,
    q: Any,
    k: Any,
    v: Any,
    b: Any,
    initial_state_source: Any,
    initial_state_indices: Any,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    is_kda: bool = False,
    *,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Any = None,
    intermediate_state_indices: Any = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Any = None,
    cache_ring: bool = False,
    replayssm_rawv: Any = None,
    replayssm_rawk: Any = None,
    replayssm_g: Any = None,
    replayssm_beta: Any = None,
    match_cutedsl_decode: bool = False,
    state_layout: str = "vk",
) -> Any:
    """:func:`flashport.gated_delta_update` under SGLang's names: decoding, and verifying of drafts.

    Symbols, and what is not said here, are those of :func:`flashport.gated_delta_update`. Source:
    bindings/python/flashport/sglang.py over that function; the signature is SGLang 0.5.23's, whose
    sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py has ``lower_bound`` and what follows by
    position too.

    Args:
        A_log: HV elements, fp32; (HV), or KDA's (1, 1, HV, 1).
        a: (B * T, HV) or (B, T, HV), with ``is_kda`` (.., HV * K) or (B, T, HV, K); fp16, bf16 or fp32; any strides.
        dt_bias: HV elements, with ``is_kda`` HV * K; fp16, bf16 or fp32.
        softplus_beta: Factor inside softplus, 1.0 in SGLang.
        softplus_threshold: Above it softplus(x) is x, 20.0 in SGLang.
        q: (B, T, H, K) fp16, bf16 or fp32; any strides but the last axis.
        k: (B, T, H, K), as ``q``.
        v: (B, T, HV, V), as ``q``.
        b: (B * T, HV) or (B, T, HV); types and strides as ``a``.
        initial_state_source: (slots, HV, V, K) fp32 or bf16, any stride between slots; older SGLang's
            (slots, HV, K, V) with ``state_layout="kv"``. Written. None: states start from zero and are dropped, and
            ``initial_state_indices`` is not read.
        initial_state_indices: (N) int32 or int64, no slot twice if states are written (a CPU refuses it, a GPU leaves
            anything in that slot); negative is padding: starts from zero, is not written.
        scale: Factor on the queries, above 0; default K ** -0.5.
        use_qk_l2norm_in_kernel: Normalise q and k.
        cu_seqlens: (N + 1) int32 or int64, with B = 1.
        is_kda: The gate has a value for each channel of K.
        lower_bound: Lower bound of KDA's safe gate, negative.
        disable_state_update: Do not write the final states.
        intermediate_states_buffer: (slots, steps, HV, V, K) fp32 or bf16; written.
        intermediate_state_indices: (N) int32 or int64; negative stores nothing. Not read without the buffer.
        cache_steps: The steps of ``intermediate_states_buffer``, or None. Not read without the buffer.
        retrieve_parent_token: (N, at least T) int32 or int64. Not read without the buffer, as in SGLang.
        cache_ring: Must be False.
        replayssm_rawv: Not used, nor are the other three, without ``cache_ring``.
        replayssm_rawk: See ``replayssm_rawv``.
        replayssm_g: See ``replayssm_rawv``.
        replayssm_beta: See ``replayssm_rawv``.
        match_cutedsl_decode: Must be False: it asks for the bits of another kernel.
        state_layout: "vk", or "kv" for pools of older SGLang; not an argument of SGLang's.

    Returns:
        o, (B, T, HV, V), new and contiguous, of the type of ``q``.

    Raises:
        ValueError, TypeError, RuntimeError: As :func:`flashport.gated_delta_update`, whose names the texts use; also
            a ``scale`` that is not above 0.
        NotImplementedError: ``cache_ring`` or ``match_cutedsl_decode``; a tensor that asks for a gradient while
            torch records them; and as :func:`flashport.gated_delta_update`.
    """
    name = "fused_sigmoid_gating_delta_rule_update"
    if cache_ring or match_cutedsl_decode:
        asked = "cache_ring" if cache_ring else "match_cutedsl_decode"
        raise NotImplementedError(f"{name}: {asked} must be False, got True")
    if scale is not None and not scale > 0:
        raise ValueError(f"{name}: scale must be above 0, got {scale}")
    refuse_gradients(name, A_log, a, dt_bias, q, k, v, b, initial_state_source, intermediate_states_buffer)
    if initial_state_source is None:
        initial_state_indices = None
    if intermediate_states_buffer is None:
        intermediate_state_indices = retrieve_parent_token = None
    elif (
        cache_steps is not None
        and rank(intermediate_states_buffer) == 5
        and cache_steps != intermediate_states_buffer.shape[1]
    ):
        raise ValueError(
            f"{name}: cache_steps must be the {intermediate_states_buffer.shape[1]} steps of "
            f"intermediate_states_buffer, got {cache_steps}"
        )
    return gated_delta_update(
        q, k, v, a, b, A_log, dt_bias, initial_state_source, initial_state_indices, scale=scale,
        softplus_beta=softplus_beta, softplus_threshold=softplus_threshold, lower_bound=lower_bound,
        use_qk_l2norm=use_qk_l2norm_in_kernel, is_kda=is_kda, state_layout=state_layout,
        update_state=not disable_state_update, cu_seqlens=cu_seqlens, intermediate_states=intermediate_states_buffer,
        intermediate_indices=intermediate_state_indices, parent_tokens=retrieve_parent_token,
        out=new_output(q, v, name),
    )  # fmt: skip


def chunk_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    initial_state_indices: Any = None,
    cu_seqlens: Any = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
    *,
    output_h: bool = True,
    state_layout: str = "vk",
) -> tuple[Any, None, Any]:
    """:func:`flashport.gated_delta_chunk` under SGLang's names: prefilling.

    Symbols, and what is not said here, are those of :func:`flashport.gated_delta_chunk`. Source:
    bindings/python/flashport/sglang.py over that function; the signature is SGLang 0.5.23's, from
    sglang/kernels/ops/attention/fla/chunk.py.

    Args:
        q: (B, T, H, K) fp16, bf16 or, on CPUs, fp32 (which SGLang refuses); any strides but the last axis.
        k: (B, T, H, K), as ``q``.
        v: (B, T, HV, V), as ``q``.
        g: (B, T, HV), logarithm of the gate; fp32, fp16 or bf16; any strides.
        beta: (B, T, HV), rate at which the state learns; fp32, fp16 or bf16; any strides.
        scale: Factor on the queries, above 0; default K ** -0.5.
        initial_state: (slots, HV, V, K) fp32 or bf16, any stride between slots. Written with ``inplace_update``. None:
            states start from zero, and ``initial_state_indices`` is not read.
        initial_state_indices: (N) int32 or int64, no slot twice if states are written (a CPU refuses it, a GPU leaves
            anything in that slot); negative is padding: starts from zero, is not written. Default: 0 to N - 1.
        cu_seqlens: (N + 1) int32 or int64, with B = 1.
        head_first: Must be False.
        use_qk_l2norm_in_kernel: Normalise q and k.
        inplace_update: Write final states to ``initial_state``.
        output_h: Give ``h``. With ``cu_seqlens`` on a GPU its shape makes the call wait for the device, as SGLang's
            does, and torch.compile(fullgraph=True) needs torch._dynamo.config.capture_scalar_outputs; False, which is
            not an argument of SGLang's, makes a call that a graph can capture.
        state_layout: "vk", or "kv" for pools and ``h`` of older SGLang; not an argument of SGLang's.

    Returns:
        (o, None, h): o (B, T, HV, V) and h (B, chunks, HV, V, K), the state that enters each chunk of 64 tokens, with
        ``cu_seqlens`` those of all sequences one behind the other; both new, contiguous, of the type of ``q``. h is
        None where it was not asked for.

    Raises:
        ValueError, TypeError, RuntimeError: As :func:`flashport.gated_delta_chunk`, whose names the texts use.
        DeprecationWarning: ``head_first``, as in SGLang.
        NotImplementedError: A tensor that asks for a gradient while torch records them; and as
            :func:`flashport.gated_delta_chunk`.
    """
    name = "chunk_gated_delta_rule"
    if head_first:
        raise DeprecationWarning(f"{name}: head_first must be False, got True; pass (batch, tokens, heads, ...)")
    refuse_gradients(name, q, k, v, g, beta, initial_state)
    if initial_state is None:
        initial_state_indices = None
    h = None
    if output_h and rank(q) == 4 and rank(v) == 4 and (cu_seqlens is None or rank(cu_seqlens) == 1):
        chunks = -(-q.shape[1] // _CHUNK)
        if cu_seqlens is not None:
            chunks = _chunks_of(cu_seqlens, q.shape[1])
        inner = (v.shape[3], q.shape[3]) if state_layout == "vk" else (q.shape[3], v.shape[3])
        h = new_array(name, "q", q, (q.shape[0], chunks, v.shape[2], *inner))
    out = gated_delta_chunk(
        q, k, v, g, beta, initial_state, initial_state_indices, scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel, state_layout=state_layout, update_state=inplace_update,
        cu_seqlens=cu_seqlens, chunk_states=h, out=new_output(q, v, name),
    )  # fmt: skip
    return out, None, h


def _chunks_of(cu_seqlens: Any, tokens: int) -> int:
    """How many chunks packed sequences have together, each of at most ``tokens``; waits for a GPU."""
    if tracing.is_compiling():  # a list of numbers would end the graph
        return (-(-cu_seqlens.diff().clamp(0, tokens) // _CHUNK)).sum().item()
    if not hasattr(cu_seqlens, "tolist"):
        raise TypeError(
            "chunk_gated_delta_rule: h needs cu_seqlens of torch, NumPy or CuPy, got "
            f"{type(cu_seqlens).__name__}; pass one of these, or output_h=False"
        )
    counts = (end - first for first, end in pairwise(cu_seqlens.tolist()))
    return sum(int(-(-min(tokens, max(0, count)) // _CHUNK)) for count in counts)
