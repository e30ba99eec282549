"""Drop-ins for SGLang's linear attention, under its names and signatures.

Everything that the gated delta rule's backends of SGLang 0.5.10 import is here, as tests/python/shims/sglang_calls.csv
lists it. ``from flashport.sglang import fused_sigmoid_gating_delta_rule_update`` in place of the Triton module of that
name.

SGLang's releases order late arguments differently. Positions here are those of 0.5.10; arguments that only later
releases have, or that are this library's own, go by keyword.

Tensors may be torch's, NumPy's, CuPy's or :class:`flashport.DeviceArray`; torch is imported only by a caller that hands
in its tensors. Flags may be anything that has a truth value.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn, overload

from flashport._sglang import CHUNK_SIZE, check_scale, gdn_gating, new_chunk_states, with_steps
from flashport.arrays import contiguous, contiguous_rows, new_array, new_output
from flashport.gated_delta import gated_delta_chunk, gated_delta_packed_decode, gated_delta_update
from flashport.torch.gradients import refuse_gradients
from flashport.typing import Array, StateLayout, SupportsDLPack

__all__ = [
    "CHUNK_SIZE",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_gdn_gating",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_recurrent_gated_delta_rule_update",
    "fused_sigmoid_gating_delta_rule_update",
]


def fused_sigmoid_gating_delta_rule_update(
    A_log: SupportsDLPack,  # noqa: N803 - SGLang's names
    a: SupportsDLPack,
    dt_bias: SupportsDLPack,
    softplus_beta: float,
    softplus_threshold: float,
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    b: SupportsDLPack,
    initial_state_source: SupportsDLPack | None,
    initial_state_indices: SupportsDLPack | None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: SupportsDLPack | None = None,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: SupportsDLPack | None = None,
    intermediate_state_indices: SupportsDLPack | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: SupportsDLPack | None = None,
    *,
    lower_bound: float | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Any = None,
    replayssm_rawk: Any = None,
    replayssm_g: Any = None,
    replayssm_beta: Any = None,
    match_cutedsl_decode: bool = False,
    state_layout: StateLayout = "vk",
) -> Array:
    """:func:`flashport.gated_delta_update` under SGLang's names: decoding, and verifying of drafts.

    Symbols, and what is not said here, are those of :func:`flashport.gated_delta_update`. Later releases (0.5.23) put
    ``lower_bound`` before ``disable_state_update``: with them give what follows ``is_kda`` by keyword, as SGLang's
    backends do.

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

    Source:
        bindings/python/flashport/sglang.py over that function; positions are those of SGLang 0.5.10, from
        sglang/srt/layers/attention/fla/fused_sigmoid_gating_recurrent.py.
    """
    name = "fused_sigmoid_gating_delta_rule_update"
    if cache_ring or match_cutedsl_decode:
        asked = "cache_ring" if cache_ring else "match_cutedsl_decode"
        raise NotImplementedError(f"{name}: {asked} must be False, got True")
    check_scale(name, scale)
    refuse_gradients(
        name, "A_log a dt_bias q k v b initial_state_source intermediate_states_buffer",
        A_log, a, dt_bias, q, k, v, b, initial_state_source, intermediate_states_buffer,
    )  # fmt: skip
    if initial_state_source is None:
        initial_state_indices = None
    if intermediate_states_buffer is None:
        intermediate_state_indices = retrieve_parent_token = None
    elif cache_steps is not None:
        intermediate_states_buffer = with_steps(name, intermediate_states_buffer, cache_steps)
    return gated_delta_update(
        q, k, v, a, b, A_log, dt_bias, initial_state_source, initial_state_indices, scale=scale,
        softplus_beta=softplus_beta, softplus_threshold=softplus_threshold, lower_bound=lower_bound,
        use_qk_l2norm=bool(use_qk_l2norm_in_kernel), is_kda=bool(is_kda), state_layout=state_layout,
        update_state=not disable_state_update, cu_seqlens=cu_seqlens, intermediate_states=intermediate_states_buffer,
        intermediate_indices=intermediate_state_indices, parent_tokens=retrieve_parent_token,
        out=new_output(q, v, name),
    )  # fmt: skip


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: SupportsDLPack,
    a: SupportsDLPack,
    b: SupportsDLPack,
    A_log: SupportsDLPack,  # noqa: N803 - SGLang's names
    dt_bias: SupportsDLPack,
    scale: float,
    initial_state: Array,
    out: Array,
    ssm_state_indices: SupportsDLPack,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    state_layout: StateLayout = "vk",
) -> tuple[Array, Array]:
    """:func:`flashport.gated_delta_update` under SGLang's names: the usual decoding, a token of each request.

    Symbols, and what is not said here, are those of :func:`flashport.gated_delta_update`, with T = 1.

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

    Source:
        bindings/python/flashport/sglang.py over that function; the signature is SGLang 0.5.10's, from
        sglang/srt/layers/attention/fla/fused_recurrent.py.
    """
    name = "fused_recurrent_gated_delta_rule_packed_decode"
    check_scale(name, scale)
    refuse_gradients(
        name, "mixed_qkv a b A_log dt_bias initial_state out",
        mixed_qkv, a, b, A_log, dt_bias, initial_state, out,
    )  # fmt: skip
    gated_delta_packed_decode(
        mixed_qkv, a, b, A_log, dt_bias, initial_state, contiguous(ssm_state_indices), scale,
        bool(use_qk_l2norm_in_kernel), state_layout, out, None,
    )  # fmt: skip
    return out, initial_state


def fused_recurrent_gated_delta_rule_update(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    g: SupportsDLPack,
    beta: SupportsDLPack | None = None,
    scale: float | None = None,
    initial_state_source: SupportsDLPack | None = None,
    initial_state_indices: SupportsDLPack | None = None,
    cu_seqlens: SupportsDLPack | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    disable_state_update: bool = False,
    disable_output_calculation: bool = False,
    intermediate_states_buffer: SupportsDLPack | None = None,
    intermediate_state_indices: SupportsDLPack | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: SupportsDLPack | None = None,
    *,
    state_layout: StateLayout = "vk",
) -> Array:
    """:func:`flashport.gated_delta_update` under SGLang's names, with gates and rates as they are given.

    Symbols, and what is not said here, are those of :func:`flashport.gated_delta_update`.

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

    Source:
        bindings/python/flashport/sglang.py over that function; the signature is SGLang 0.5.10's, from
        sglang/srt/layers/attention/fla/fused_recurrent.py.
    """
    name = "fused_recurrent_gated_delta_rule_update"
    check_scale(name, scale)
    refuse_gradients(
        name, "q k v g beta initial_state_source intermediate_states_buffer",
        q, k, v, g, beta, initial_state_source, intermediate_states_buffer,
    )  # fmt: skip
    if initial_state_source is None:
        initial_state_indices = None
    if intermediate_states_buffer is None:
        intermediate_state_indices = retrieve_parent_token = None
    elif cache_steps is not None:
        intermediate_states_buffer = with_steps(name, intermediate_states_buffer, cache_steps)
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
    A_log: SupportsDLPack,  # noqa: N803 - SGLang's names
    a: Array,
    b: SupportsDLPack,
    dt_bias: SupportsDLPack,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[Array, Array]:
    """The gates and rates that :func:`chunk_gated_delta_rule` takes, of a model's projections.

    :func:`flashport.gated_delta_chunk` makes both inside its kernels, of ``A_log`` and with ``beta_sigmoid``.

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

    Source:
        bindings/python/flashport/sglang.py, in operations of the caller's own library; the signature is SGLang
        0.5.10's, from sglang/srt/layers/attention/fla/fused_gdn_gating.py.
    """
    refuse_gradients("fused_gdn_gating", "A_log a b dt_bias", A_log, a, b, dt_bias)
    return gdn_gating(A_log, a, b, dt_bias, beta, threshold)


def chunk_kda(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    g: SupportsDLPack,
    beta: SupportsDLPack,
    scale: float | None = None,
    initial_state: SupportsDLPack | None = None,
    initial_state_indices: SupportsDLPack | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: SupportsDLPack | None = None,
    **kwargs: Any,
) -> NoReturn:
    """Kimi's chunked form, which is not here: it is refused, so that the module that imports it can decode with ours.

    Args:
        q, k, v, g, beta, scale, initial_state, initial_state_indices, use_qk_l2norm_in_kernel, cu_seqlens, kwargs: Not
            read.

    Raises:
        NotImplementedError: Always.

    Source:
        bindings/python/flashport/sglang.py; the signature is SGLang 0.5.10's, from
        sglang/srt/layers/attention/fla/kda.py.
    """
    raise NotImplementedError(
        "chunk_kda: there is no chunked form with a gate for each key (Kimi linear attention); keep SGLang's own for "
        "prompts, or run them token by token by fused_sigmoid_gating_delta_rule_update with is_kda=True"
    )


@overload
def chunk_gated_delta_rule(
    q: Array, k: SupportsDLPack, v: SupportsDLPack, g: SupportsDLPack, beta: SupportsDLPack, scale: float | None = None,
    initial_state: SupportsDLPack | None = None, initial_state_indices: SupportsDLPack | None = None,
    cu_seqlens: SupportsDLPack | None = None, head_first: bool = False, use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True, *, output_h: Literal[True] = True, state_layout: StateLayout = "vk",
) -> tuple[Array, None, Array]: ...  # fmt: skip
@overload
def chunk_gated_delta_rule(
    q: Array, k: SupportsDLPack, v: SupportsDLPack, g: SupportsDLPack, beta: SupportsDLPack, scale: float | None = None,
    initial_state: SupportsDLPack | None = None, initial_state_indices: SupportsDLPack | None = None,
    cu_seqlens: SupportsDLPack | None = None, head_first: bool = False, use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True, *, output_h: bool, state_layout: StateLayout = "vk",
) -> tuple[Array, None, Array | None]: ...  # fmt: skip
def chunk_gated_delta_rule(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    g: SupportsDLPack,
    beta: SupportsDLPack,
    scale: float | None = None,
    initial_state: SupportsDLPack | None = None,
    initial_state_indices: SupportsDLPack | None = None,
    cu_seqlens: SupportsDLPack | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
    *,
    output_h: bool = True,
    state_layout: StateLayout = "vk",
) -> tuple[Array, None, Array | None]:
    """:func:`flashport.gated_delta_chunk` under SGLang's names: prefilling.

    Symbols, and what is not said here, are those of :func:`flashport.gated_delta_chunk`.

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

    Source:
        bindings/python/flashport/sglang.py over that function; positions up to ``use_qk_l2norm_in_kernel`` are those of
        SGLang 0.5.10, from sglang/srt/layers/attention/fla/chunk.py, which always writes final states;
        ``inplace_update`` comes next in SGLang 0.5.23.
    """
    name = "chunk_gated_delta_rule"
    if head_first:
        raise DeprecationWarning(f"{name}: head_first must be False, got True; pass (batch, tokens, heads, ...)")
    refuse_gradients(name, "q k v g beta initial_state", q, k, v, g, beta, initial_state)
    if initial_state is None:
        initial_state_indices = None
    q, k, v, cu_seqlens = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v), contiguous(cu_seqlens)
    h = new_chunk_states(name, q, v, cu_seqlens, state_layout) if output_h else None
    out = gated_delta_chunk(
        q, k, v, g, beta, initial_state, contiguous(initial_state_indices), scale=scale,
        use_qk_l2norm=bool(use_qk_l2norm_in_kernel), state_layout=state_layout, update_state=bool(inplace_update),
        cu_seqlens=cu_seqlens, chunk_states=h, out=new_output(q, v, name),
    )  # fmt: skip
    return out, None, h
