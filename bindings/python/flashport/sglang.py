"""Drop-ins for SGLang's linear attention, under its names and signatures.

Everything that the gated delta rule's backends of SGLang 0.5.10 import is here; tests/python/sglang_calls.csv lists it.
``from flashport.sglang import fused_sigmoid_gating_delta_rule_update`` in place of the Triton module of that name.

SGLang's releases order late arguments differently. Positions here are those of 0.5.10; arguments that only later
releases have, or that are this library's own, go by keyword.

Tensors may be torch's, NumPy's, CuPy's or :class:`flashport.DeviceArray`; torch is imported only by a caller that hands
in its tensors. Flags may be anything that has a truth value.
"""

from __future__ import annotations

import math
import operator
import sys
from itertools import pairwise
from typing import Any

from flashport import tracing
from flashport.arrays import array_library, contiguous, contiguous_rows, new_array, new_output, rank
from flashport.gated_delta import gated_delta_chunk, gated_delta_packed_decode, gated_delta_update
from flashport.gradients import refuse_gradients

__all__ = [
    "CHUNK_SIZE",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_gdn_gating",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_recurrent_gated_delta_rule_update",
    "fused_sigmoid_gating_delta_rule_update",
]

CHUNK_SIZE = 64  # tokens between two states of ``h``; SGLang has it in chunk_delta_h.py


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
    disable_state_update: bool = False,
    intermediate_states_buffer: Any = None,
    intermediate_state_indices: Any = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Any = None,
    *,
    lower_bound: float | None = None,
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
    bindings/python/flashport/sglang.py over that function; positions are those of SGLang 0.5.10, from
    sglang/srt/layers/attention/fla/fused_sigmoid_gating_recurrent.py. Later releases (0.5.23) put ``lower_bound``
    before ``disable_state_update``: with them give what follows ``is_kda`` by keyword, as SGLang's backends do.

    Args:
        A_log: HV elements, fp32, bf16 or fp16; (HV), or KDA's (1, 1, HV, 1).
        a: (B * T, HV) or (B, T, HV), with ``is_kda`` (B * T, HV * K), (B, T, HV * K), (B * T, HV, K) or (B, T, HV, K);
            fp16, bf16 or fp32; any strides.
        dt_bias: HV elements, with ``is_kda`` HV * K; fp16, bf16 or fp32.
        softplus_beta: Factor inside softplus, 1.0 in SGLang.
        softplus_threshold: Above it softplus(x) is x, 20.0 in SGLang.
        q: (B, T, H, K) fp16, bf16 or fp32; any strides but the last axis.
        k: (B, T, H, K), as ``q``.
        v: (B, T, HV, V), as ``q``.
        b: (B * T, HV) or (B, T, HV); types and strides as ``a``.
        initial_state_source: (slots, HV, V, K) fp32, bf16 or fp16, any stride between slots; older SGLang's
            (slots, HV, K, V) with ``state_layout="kv"``. Written. None: states start from zero and are dropped, and
            ``initial_state_indices`` is not read.
        initial_state_indices: (N) int32 or int64, no slot twice if states are written (a CPU refuses it, a GPU leaves
            anything in that slot); negative is padding: starts from zero, is not written.
        scale: Factor on the queries, above 0; default K ** -0.5.
        use_qk_l2norm_in_kernel: Normalise q and k.
        cu_seqlens: (N + 1) int32 or int64, with B = 1.
        is_kda: The gate has a value for each channel of K.
        disable_state_update: Do not write the final states.
        intermediate_states_buffer: (slots, steps, HV, V, K) fp32, bf16 or fp16; written.
        intermediate_state_indices: (N) int32 or int64; negative stores nothing. Not read without the buffer.
        cache_steps: The steps of a slot, above 0: a slot begins that many steps after the one before it, whatever the
            buffer's shape, as in SGLang; where they are not the shape's, the buffer is contiguous. Default: those of
            the shape (SGLang's kernel takes 0, with which all sequences share one slot). Not read without the buffer.
        retrieve_parent_token: (N, at least T) int32 or int64. Not read without the buffer, as in SGLang.
        lower_bound: Lower bound of KDA's safe gate, negative.
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
    _check_scale(name, scale)
    refuse_gradients(name, A_log, a, dt_bias, q, k, v, b, initial_state_source, intermediate_states_buffer)
    if initial_state_source is None:
        initial_state_indices = None
    if intermediate_states_buffer is None:
        intermediate_state_indices = retrieve_parent_token = None
    elif cache_steps is not None:
        intermediate_states_buffer = _with_steps(name, intermediate_states_buffer, cache_steps)
    return gated_delta_update(
        q, k, v, a, b, A_log, dt_bias, initial_state_source, initial_state_indices, scale=scale,
        softplus_beta=softplus_beta, softplus_threshold=softplus_threshold, lower_bound=lower_bound,
        use_qk_l2norm=bool(use_qk_l2norm_in_kernel), is_kda=bool(is_kda), state_layout=state_layout,
        update_state=not disable_state_update, cu_seqlens=cu_seqlens, intermediate_states=intermediate_states_buffer,
        intermediate_indices=intermediate_state_indices, parent_tokens=retrieve_parent_token,
        out=new_output(q, v, name),
    )  # fmt: skip


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Any,
    a: Any,
    b: Any,
    A_log: Any,  # noqa: N803 - SGLang's names
    dt_bias: Any,
    scale: float,
    initial_state: Any,
    out: Any,
    ssm_state_indices: Any,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    state_layout: str = "vk",
) -> tuple[Any, Any]:
    """:func:`flashport.gated_delta_update` under SGLang's names: the usual decoding, a token of each request.

    Symbols, and what is not said here, are those of :func:`flashport.gated_delta_update`, with T = 1. Source:
    bindings/python/flashport/sglang.py over that function; the signature is SGLang 0.5.10's, from
    sglang/srt/layers/attention/fla/fused_recurrent.py.

    Args:
        mixed_qkv: (B, 2 * H * K + HV * V): queries, keys and values of each request; fp16, bf16 or fp32; any stride but
            the last axis. H follows from the other sizes.
        a: (B, HV); fp16, bf16 or fp32; any strides.
        b: As ``a``.
        A_log: HV elements, fp32, bf16 or fp16.
        dt_bias: HV elements; fp16, bf16 or fp32.
        scale: Factor on the queries, above 0.
        initial_state: (slots, HV, V, K) fp32, bf16 or fp16, any stride between slots; (slots, HV, K, V) with
            ``state_layout="kv"``. Written.
        out: (B, 1, HV, V), of the type of ``mixed_qkv``; written.
        ssm_state_indices: (B) int32 or int64, no slot twice (a CPU refuses it, a GPU leaves anything in that slot); of
            any stride: copied where its elements lie apart. Negative is padding: its row of ``out`` is zeros.
        use_qk_l2norm_in_kernel: Normalise q and k.
        state_layout: "vk" or "kv"; not an argument of SGLang's.

    Returns:
        (out, initial_state), as they were given.

    Raises:
        ValueError, TypeError, RuntimeError: As :func:`flashport.gated_delta_update`, whose names the texts use; also
            sizes from which H does not follow.
        NotImplementedError: As :func:`fused_sigmoid_gating_delta_rule_update`.
    """
    name = "fused_recurrent_gated_delta_rule_packed_decode"
    _check_scale(name, scale)
    refuse_gradients(name, mixed_qkv, a, b, A_log, dt_bias, initial_state, out)
    gated_delta_packed_decode(
        mixed_qkv, a, b, A_log, dt_bias, initial_state, contiguous(ssm_state_indices), scale,
        bool(use_qk_l2norm_in_kernel), state_layout, out, None,
    )  # fmt: skip
    return out, initial_state


def fused_recurrent_gated_delta_rule_update(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any = None,
    scale: float | None = None,
    initial_state_source: Any = None,
    initial_state_indices: Any = None,
    cu_seqlens: Any = None,
    use_qk_l2norm_in_kernel: bool = False,
    disable_state_update: bool = False,
    disable_output_calculation: bool = False,
    intermediate_states_buffer: Any = None,
    intermediate_state_indices: Any = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Any = None,
    *,
    state_layout: str = "vk",
) -> Any:
    """:func:`flashport.gated_delta_update` under SGLang's names, with gates and rates as they are given.

    Symbols, and what is not said here, are those of :func:`flashport.gated_delta_update`. Source:
    bindings/python/flashport/sglang.py over that function; the signature is SGLang 0.5.10's, from
    sglang/srt/layers/attention/fla/fused_recurrent.py.

    SGLang makes what comes in contiguous; here inputs that are not stay as they are where kernels read their strides,
    and are copied else. Pools that are written are never copied (SGLang writes to the copy, and loses it): their states
    are contiguous, slots may lie apart.

    Args:
        q: (B, T, H, K) fp16, bf16 or fp32; any strides: copied where neighbours along the last axis lie apart.
        k: (B, T, H, K), as ``q``.
        v: (B, T, HV, V), as ``q``.
        g: (B, T, HV), logarithm of the gate; fp32, fp16 or bf16; any strides.
        beta: (B, T, HV), rate at which the state learns, or (B, T, HV, V), of each column; types and strides as ``g``.
            Default: 1.
        scale: Factor on the queries, above 0; default K ** -0.5.
        initial_state_source: As of :func:`fused_sigmoid_gating_delta_rule_update`.
        initial_state_indices: As there; copied where its elements lie apart, as are the other arrays of indices.
        cu_seqlens: (N + 1) int32 or int64, with B = 1.
        use_qk_l2norm_in_kernel: Normalise q and k.
        disable_state_update: Do not write the final states.
        disable_output_calculation: Give no outputs.
        intermediate_states_buffer: As of :func:`fused_sigmoid_gating_delta_rule_update`.
        intermediate_state_indices: As there.
        cache_steps: As there.
        retrieve_parent_token: As there.
        state_layout: "vk" or "kv"; not an argument of SGLang's.

    Returns:
        o, (B, T, HV, V), new and contiguous, of the type of ``q``; with ``disable_output_calculation`` (1, 1, 1, 1)
        that holds anything, as SGLang's.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: As :func:`fused_sigmoid_gating_delta_rule_update`.
    """
    name = "fused_recurrent_gated_delta_rule_update"
    _check_scale(name, scale)
    refuse_gradients(name, q, k, v, g, beta, initial_state_source, intermediate_states_buffer)
    if initial_state_source is None:
        initial_state_indices = None
    if intermediate_states_buffer is None:
        intermediate_state_indices = retrieve_parent_token = None
    elif cache_steps is not None:
        intermediate_states_buffer = _with_steps(name, intermediate_states_buffer, cache_steps)
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    out = gated_delta_update(
        q, k, v, state=initial_state_source, state_indices=contiguous(initial_state_indices), scale=scale,
        use_qk_l2norm=bool(use_qk_l2norm_in_kernel), state_layout=state_layout, update_state=not disable_state_update,
        cu_seqlens=contiguous(cu_seqlens), intermediate_states=intermediate_states_buffer,
        intermediate_indices=contiguous(intermediate_state_indices), parent_tokens=retrieve_parent_token, g=g,
        beta=beta, out=new_output(q, v, name),
    )  # fmt: skip
    return new_array(name, "q", q, (1, 1, 1, 1)) if disable_output_calculation else out


def fused_gdn_gating(
    A_log: Any,  # noqa: N803 - SGLang's names
    a: Any,
    b: Any,
    dt_bias: Any,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[Any, Any]:
    """The gates and rates that :func:`chunk_gated_delta_rule` takes, of a model's projections.

    Source: bindings/python/flashport/sglang.py, in operations of the caller's own library; the signature is SGLang
    0.5.10's, from sglang/srt/layers/attention/fla/fused_gdn_gating.py. :func:`flashport.gated_delta_chunk` makes both
    inside its kernels, of ``A_log`` and with ``beta_sigmoid``.

    Args:
        A_log: HV elements of any floating type, as are the others.
        a: (T, HV); any strides.
        b: (T, HV); any strides.
        dt_bias: HV elements.
        beta: Factor inside softplus.
        threshold: Where ``beta`` times x exceeds it, softplus(x) is x.

    Returns:
        (g, beta_output), both (1, T, HV) fp32, new and contiguous: -exp(A_log) * softplus(a + dt_bias), and sigmoid(b),
        rounded to the type of ``b`` as SGLang's is.

    Raises:
        ValueError: ``a`` has not two axes, or the others do not go with it.
        TypeError: An argument is no array of torch, NumPy or CuPy, or not of the library that ``a`` is of.
        NotImplementedError: A tensor that asks for a gradient while torch records them.
    """
    name = "fused_gdn_gating"
    refuse_gradients(name, A_log, a, b, dt_bias)
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(a, torch.Tensor)
    library = torch if is_torch else array_library(a)
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
    return tuple(library.ascontiguousarray(y.astype("float32"))[None] for y in (g, rates.astype(b.dtype)))


def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    initial_state_indices: Any = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    **kwargs: Any,
) -> Any:
    """Kimi's chunked form, which is not here: it is refused, so that the module that imports it can decode with ours.

    Source: bindings/python/flashport/sglang.py; the signature is SGLang 0.5.10's, from
    sglang/srt/layers/attention/fla/kda.py.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        "chunk_kda: there is no chunked form with a gate for each key (Kimi linear attention); keep SGLang's own for "
        "prompts, or run them token by token by fused_sigmoid_gating_delta_rule_update with is_kda=True"
    )


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
    bindings/python/flashport/sglang.py over that function; positions up to ``use_qk_l2norm_in_kernel`` are those of
    SGLang 0.5.10, from sglang/srt/layers/attention/fla/chunk.py, which always writes final states; ``inplace_update``
    comes next in SGLang 0.5.23.

    SGLang makes what comes in contiguous; here inputs that are not stay as they are where kernels read their strides,
    and are copied else. A pool that is written is never copied (SGLang writes to the copy, and loses it): its states
    are contiguous, slots may lie apart.

    Args:
        q: (B, T, H, K) fp16, bf16 or, on CPUs, fp32 (which SGLang refuses); any strides: copied where neighbours along
            the last axis lie apart.
        k: (B, T, H, K), as ``q``.
        v: (B, T, HV, V), as ``q``.
        g: (B, T, HV), logarithm of the gate; fp32, fp16 or bf16; any strides.
        beta: (B, T, HV), rate at which the state learns; fp32, fp16 or bf16; any strides.
        scale: Factor on the queries, above 0; default K ** -0.5.
        initial_state: (slots, HV, V, K) fp32, bf16 or fp16, any stride between slots. Written with ``inplace_update``.
            None: states start from zero, and ``initial_state_indices`` is not read.
        initial_state_indices: (N) int32 or int64, no slot twice if states are written (a CPU refuses it, a GPU leaves
            anything in that slot); negative is padding: starts from zero, is not written. Default: 0 to N - 1. Copied
            where its elements lie apart, as ``cu_seqlens`` is.
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
        ``cu_seqlens`` those of all sequences one after the other; both new, contiguous, of the type of ``q``. h is
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
    q, k, v, cu_seqlens = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v), contiguous(cu_seqlens)
    h = None
    if output_h and rank(q) == 4 and rank(v) == 4 and (cu_seqlens is None or rank(cu_seqlens) == 1):
        chunks = -(-q.shape[1] // CHUNK_SIZE)
        if cu_seqlens is not None:
            chunks = _chunks_of(cu_seqlens, q.shape[1])
        inner = (v.shape[3], q.shape[3]) if state_layout == "vk" else (q.shape[3], v.shape[3])
        h = new_array(name, "q", q, (q.shape[0], chunks, v.shape[2], *inner))
    out = gated_delta_chunk(
        q, k, v, g, beta, initial_state, contiguous(initial_state_indices), scale=scale,
        use_qk_l2norm=bool(use_qk_l2norm_in_kernel), state_layout=state_layout, update_state=bool(inplace_update),
        cu_seqlens=cu_seqlens, chunk_states=h, out=new_output(q, v, name),
    )  # fmt: skip
    return out, None, h


def _check_scale(name: str, scale: Any) -> None:
    """SGLang's functions take a scale above 0, or None."""
    if scale is None:
        return
    try:
        above = scale > 0
    except TypeError:
        raise TypeError(f"{name}: scale must be a number or None, got {type(scale).__name__}") from None
    if not above:
        raise ValueError(f"{name}: scale must be above 0, got {scale}")


def _with_steps(name: str, buffer: Any, steps: int) -> Any:
    """The buffer of intermediate states as slots of ``steps`` steps each, which it may say otherwise."""
    if rank(buffer) != 5 or steps == buffer.shape[1]:
        return buffer  # the library says what does not fit
    try:
        operator.index(steps)
    except TypeError:
        raise TypeError(f"{name}: cache_steps must be an integer, got {type(steps).__name__}") from None
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


def _chunks_of(cu_seqlens: Any, tokens: int) -> int:
    """How many chunks packed sequences have together, each of at most ``tokens``; waits for a GPU."""
    if tracing.is_compiling():  # a list of numbers would end the graph
        return (-(-cu_seqlens.diff().clamp(0, tokens) // CHUNK_SIZE)).sum().item()
    if not hasattr(cu_seqlens, "tolist"):
        raise TypeError(
            "chunk_gated_delta_rule: h needs cu_seqlens of torch, NumPy or CuPy, got "
            f"{type(cu_seqlens).__name__}; pass one of these, or output_h=False"
        )
    counts = (end - first for first, end in pairwise(cu_seqlens.tolist()))
    return sum(int(-(-min(tokens, max(0, count)) // CHUNK_SIZE)) for count in counts)
