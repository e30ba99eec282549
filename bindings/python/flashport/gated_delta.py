"""The gated delta rule: linear attention whose state forgets by a gate and is corrected by its own prediction.

Symbols in shapes: B rows of T tokens, N sequences of a call (B, or as many as ``cu_seqlens`` delimits), H query and key
heads, HV value heads, K head dim of queries and keys, V head dim of values. The state of a sequence and a value head is
a matrix S [K, V]; states live in a pool whose slots the caller hands out. An array is anything that speaks DLPack; all
arrays of a call lie on one device. Paths after "Source" are those of the project's repository.
"""

from __future__ import annotations

from typing import Any

from flashport import _core
from flashport.arrays import new_output
from flashport.torch import tracing
from flashport.typing import Array, HeadMap, StateLayout, StreamLike, SupportsDLPack


def _torch_operators() -> Any:
    from flashport.torch import gated_delta

    return gated_delta


def gated_delta_packed_decode(*arguments: Any) -> Any:
    """The operation under :func:`flashport.sglang.fused_recurrent_gated_delta_rule_packed_decode`, by position."""
    operations = _torch_operators() if tracing.is_compiling() else _core
    return operations.gated_delta_packed_decode(*arguments)


@_core.direct
def gated_delta_update(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    a: SupportsDLPack | None = None,
    b: SupportsDLPack | None = None,
    A_log: SupportsDLPack | None = None,  # noqa: N803 - the field's name
    dt_bias: SupportsDLPack | None = None,
    state: SupportsDLPack | None = None,
    state_indices: SupportsDLPack | None = None,
    *,
    scale: float | None = None,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    lower_bound: float | None = None,
    use_qk_l2norm: bool = False,
    is_kda: bool = False,
    head_map: HeadMap = "consecutive",
    state_layout: StateLayout = "vk",
    update_state: bool = True,
    cu_seqlens: SupportsDLPack | None = None,
    intermediate_states: SupportsDLPack | None = None,
    intermediate_indices: SupportsDLPack | None = None,
    parent_tokens: SupportsDLPack | None = None,
    g: SupportsDLPack | None = None,
    gk: SupportsDLPack | None = None,
    gv: SupportsDLPack | None = None,
    beta: SupportsDLPack | None = None,
    allow_neg_eigval: bool = False,
    final_states: SupportsDLPack | None = None,
    out: Array | None = None,
    stream: StreamLike | None = None,
) -> Array:
    """Runs the gated delta rule over the tokens of each sequence, one by one, and updates its state in place.

    For each token and value head, with S [K, V] in fp32::

        g    = -exp(A_log) * softplus(a + dt_bias)      softplus(x) = log1p(exp(softplus_beta * x)) / softplus_beta
        beta = sigmoid(b)                               while softplus_beta * x <= softplus_threshold, else x
        S    = exp(g) * S
        S    = S + k (beta * (v - S^T k))^T
        o    = S^T (scale * q)

    or with ``g`` and ``beta`` as they are given, and with gates of rows and of columns of S, S = diag(exp(gk)) S
    diag(exp(gv)), on top. Without any gate nothing decays; without ``b`` and ``beta``, beta is 1.

    One token a sequence is decoding, a few with ``intermediate_states`` verify a draft, any number is a prefill without
    chunks. S starts from the sequence's slot and ends there. Within a call S stays in fp32 whatever the pool's type is,
    and is rounded to it once, to nearest even. A sequence without tokens leaves its slot as it is. Slots that no
    sequence names are neither read nor written.

    The bits of a sequence's results do not depend on the rest of the batch. Indices, ``cu_seqlens`` and parents are
    read on the device, so a captured graph can be replayed with others.

    K and V are multiples of 8 from 16 to 256 and may differ; HV is a multiple of H.

    Args:
        q: (B, T, H, K) fp16, bf16 or fp32; any strides but the last axis, which is contiguous: a slice of a packed
            projection will do.
        k: (B, T, H, K), as ``q``.
        v: (B, T, HV, V), as ``q``.
        a: (B * T, HV) or (B, T, HV), input of the gate; with ``is_kda`` (B * T, HV * K), (B, T, HV * K),
            (B * T, HV, K) or (B, T, HV, K). fp16, bf16 or fp32; any strides. Needs ``A_log``.
        b: (B * T, HV) or (B, T, HV), logit of the rate at which the state learns, or (B, T, HV, V), of each column of
            S. fp16, bf16 or fp32; any strides.
        A_log: HV elements in any shape, fp32, bf16 or fp16, contiguous: logarithm of the gate's speed. Needs ``a``.
        dt_bias: HV elements in any shape, with ``is_kda`` HV * K; fp16, bf16 or fp32, contiguous; added to ``a``.
            Default: zeros.
        state: The pool: (slots, HV, V, K), or (slots, HV, K, V) with ``state_layout="kv"``; fp32, bf16 or fp16; any
            stride between slots, each of them contiguous. Written, unless ``update_state`` is False. Default: every
            sequence starts from zero, and final states are dropped. In one call no states are bf16 and others fp16.
        state_indices: (N) int32 or int64, the slot of each sequence; no slot twice if states are written (a CPU refuses
            it, a GPU leaves anything in that slot). Negative: the sequence starts from zero and its final state is
            dropped, as padding of a captured batch wants it. Default: 0 to N - 1.
        scale: Factor on the queries, after their normalisation; above 0; default K ** -0.5.
        softplus_beta: As above; above 0.
        softplus_threshold: As above, in units of softplus_beta * x.
        lower_bound: Where given, a negative number, and g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias)) in place
            of the softplus.
        use_qk_l2norm: Divide each q and k by sqrt(its sum of squares + 1e-6) first.
        is_kda: The gate has a value for each channel of K: row i of S decays by exp(g[i]) (Kimi delta attention).
        head_map: Which query and key head a value head h reads: "consecutive" is h // (HV / H), "modulo" is h % H, as
            llama.cpp has it.
        state_layout: "vk" or "kv", the inner axes of ``state``, ``intermediate_states`` and ``final_states``.
        update_state: Whether final states are written to ``state``.
        cu_seqlens: (N + 1) int32 or int64, first token of each sequence, with B = 1 and the sequences packed along T;
            starts with 0. Tokens behind its last entry belong to nobody: their output is not written.
        intermediate_states: (slots, steps, HV, V, K), with the inner axes of ``state_layout``; fp32, bf16 or fp16; any
            stride between slots, each of them contiguous. Written: the state after each token.
        intermediate_indices: (N) int32 or int64, the slot of ``intermediate_states`` that each sequence has; no slot
            twice; negative stores nothing. Both are given, or neither.
        parent_tokens: (N, at least T) int32 or int64, any strides; needs ``intermediate_states``. Token t > 0 starts
            from the state that was stored after token parent_tokens[n, t] < t, as it was rounded there, in place of
            the state after token t - 1: a draft tree. Entry 0, and entries past a sequence's tokens, are not read. A
            sequence that stores nothing goes on from token to token.
        g: (B * T, HV) or (B, T, HV), logarithm of the factor on the state, in place of ``a``; fp16, bf16 or fp32; any
            strides.
        gk: (B, T, HV, K), logarithms of factors on the rows of S; types and strides as ``g``.
        gv: (B, T, HV, V), logarithms of factors on the columns of S; types and strides as ``g``.
        beta: (B * T, HV) or (B, T, HV), rate at which the state learns, in place of ``b``, or (B, T, HV, V), of each
            column of S; types and strides as ``g``.
        allow_neg_eigval: beta is twice sigmoid(b).
        final_states: (N, HV, V, K), with the inner axes of ``state_layout``; fp32, bf16 or fp16; written: the state
            that each sequence ends with, also where its index is negative. A sequence without tokens ends as it
            starts.
        out: (B, T, HV, V), of the type of ``q``, any strides but the last axis; written. Default: a new array of q's
            library; to be given where that is none of torch, NumPy and CuPy.
        stream: As in :func:`flash_decode`.

    Returns:
        ``out``.

    Raises:
        ValueError: A wrong rank, shape, stride, device or value; nothing has been written. Where they are in host
            memory also: a slot beyond its pool or named twice, ``cu_seqlens`` that does not start at 0, falls, or
            exceeds T, a sequence of more tokens than ``intermediate_states`` has steps, and a parent that is not an
            earlier token. On a GPU, where no call waits, slots are trusted, lengths and parents are clamped, and
            surplus steps are not stored (FLASHPORT_CHECK=1 in the environment checks all of it, and waits).
        TypeError: A wrong element type, or an argument that is no array.
        NotImplementedError: No kernel of the device's target serves the request; the text says what is missing.
        RuntimeError: A driver call failed.

    Source:
        common/host/gated_delta/update.cpp, common/host/gated_delta/problem.cpp (checks),
        common/device/gated_delta/update_kernel.h, common/device/gated_delta/token_gates.h.
    """
    out = new_output(q, v) if out is None else out
    operations = _torch_operators() if tracing.is_compiling() else _core
    return operations.gated_delta_update(
        q, k, v, a, b, A_log, dt_bias, state, state_indices, scale, softplus_beta, softplus_threshold, lower_bound,
        use_qk_l2norm, is_kda, head_map, state_layout, update_state, cu_seqlens, intermediate_states,
        intermediate_indices, parent_tokens, g, gk, gv, beta, allow_neg_eigval, final_states, out, stream,
    )  # fmt: skip


@_core.direct
def gated_delta_chunk(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    g: SupportsDLPack,
    beta: SupportsDLPack,
    state: SupportsDLPack | None = None,
    state_indices: SupportsDLPack | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    A_log: SupportsDLPack | None = None,  # noqa: N803 - the field's name
    dt_bias: SupportsDLPack | None = None,
    head_map: HeadMap = "consecutive",
    state_layout: StateLayout = "vk",
    update_state: bool = True,
    cu_seqlens: SupportsDLPack | None = None,
    final_states: SupportsDLPack | None = None,
    chunk_states: SupportsDLPack | None = None,
    workspace: SupportsDLPack | None = None,
    out: Array | None = None,
    stream: StreamLike | None = None,
) -> Array:
    """Runs the gated delta rule over prompts, 64 tokens at a time, with matrix products in place of single steps.

    For each token and value head, with S [K, V] in fp32::

        S = exp(g) * S
        S = S + k (beta * (v - S^T k))^T
        o = S^T (scale * q)

    which within a chunk is one triangular system for all its tokens (the WY form). Chunks are counted from a sequence's
    first token. S starts from the sequence's slot and ends there; it stays in fp32 over all chunks, and is rounded to
    the pool's type once, to nearest even. Operands of products are of the type of ``q`` on GPUs and fp32 on a CPU;
    sums, gates, and the inverse of the triangular system are fp32, sums of gates carry twice as many digits. Slots that
    no sequence names are neither read nor written.

    The bits of a sequence's results do not depend on the rest of the batch; a prompt that is cut at a multiple of 64
    tokens has the same bits in one call and in two, as long as the pool is fp32. Indices and ``cu_seqlens`` are read on
    the device, so a captured graph can be replayed with others.

    K and V are multiples of 8 from 16 to 256 and may differ; HV is a multiple of H.

    Args:
        q: (B, T, H, K) fp16, bf16 or, on CPUs, fp32; any strides but the last axis, which is contiguous: a slice of a
            packed projection will do.
        k: (B, T, H, K), as ``q``.
        v: (B, T, HV, V), as ``q``.
        g: (B, T, HV), logarithm of the factor on the state, with ``A_log`` what it is made of; fp32, fp16 or bf16; any
            strides. Below -120, where nothing of a state is left, it counts as -120.
        beta: (B, T, HV), rate at which the state learns, or its logit; fp32, fp16 or bf16; any strides.
        state: The pool: (slots, HV, V, K), or (slots, HV, K, V) with ``state_layout="kv"``; fp32, bf16 or fp16; any
            stride between slots, each of them contiguous. Written, unless ``update_state`` is False. Default: every
            sequence starts from zero.
        state_indices: (N) int32 or int64, the slot of each sequence; no slot twice if states are written (a CPU refuses
            it, a GPU leaves anything in that slot). Negative: the sequence starts from zero and its final state is not
            written to the pool. Default: 0 to N - 1.
        scale: Factor on the queries, after their normalisation; above 0; default K ** -0.5.
        use_qk_l2norm: Divide each q and k by sqrt(its sum of squares + 1e-6) first.
        beta_sigmoid: ``beta`` is a logit; its sigmoid is taken, in fp32.
        allow_neg_eigval: Twice that sigmoid; needs ``beta_sigmoid``.
        A_log: HV elements in any shape, fp32, bf16 or fp16, contiguous. Where given, the logarithm of the factor is
            -exp(A_log) * softplus(g + dt_bias), in fp32.
        dt_bias: HV elements in any shape, fp32, fp16 or bf16, contiguous; needs ``A_log``. Default: zeros.
        head_map: Which query and key head a value head h reads: "consecutive" is h // (HV / H), "modulo" is h % H.
        state_layout: "vk" or "kv", the inner axes of ``state``, ``final_states`` and ``chunk_states``.
        update_state: Whether final states are written to ``state``.
        cu_seqlens: (N + 1) int32 or int64, first token of each sequence, with B = 1 and the sequences packed along T;
            starts with 0. Tokens behind its last entry belong to nobody: their output is not written.
        final_states: (N, HV, V, K), with the inner axes of ``state_layout``; fp32, bf16 or fp16; written: the state
            that each sequence ends with, also where its index is negative. A sequence without tokens ends as it
            starts.
        chunk_states: (B, chunks, HV, V, K), with the inner axes of ``state_layout``, of the type of ``q``; written: the
            state that enters each chunk. There are ceil(T / 64) chunks; with ``cu_seqlens`` as many as the sequences
            have together, one sequence behind the other.
        workspace: uint8 of at least :func:`gated_delta_chunk_workspace_size` bytes, aligned to 16, which may hold
            anything and does so afterwards: not one that :func:`flash_decode` is given, nor that of a call on another
            stream. Default: the library keeps one for each stream, and for each captured graph.
        out: (B, T, HV, V), of the type of ``q``, any strides but the last axis; written. Default: a new array of q's
            library; to be given where that is none of torch, NumPy and CuPy.
        stream: As in :func:`flash_decode`.

    Returns:
        ``out``.

    Raises:
        ValueError: A wrong rank, shape, stride, device or value; nothing has been written. Where they are in host
            memory also: a slot beyond its pool or named twice, ``cu_seqlens`` that does not start at 0, falls, or
            exceeds T, and ``chunk_states`` with too few chunks. On a GPU, where no call waits, slots are trusted,
            lengths are clamped, and surplus chunks are not stored (FLASHPORT_CHECK=1 in the environment checks all of
            it, and waits). Also a graph capture for which no workspace is ready.
        TypeError: A wrong element type, or an argument that is no array.
        NotImplementedError: No kernel of the device's target serves the request; the text says what is missing.
        RuntimeError: A driver call failed.

    Source:
        common/host/gated_delta/chunk.cpp, common/host/gated_delta/chunk_problem.cpp (checks),
        common/device/gated_delta/prepare_kernel.h, common/device/gated_delta/chunk_kernel.h.
    """
    out = new_output(q, v) if out is None else out
    operations = _torch_operators() if tracing.is_compiling() else _core
    return operations.gated_delta_chunk(
        q, k, v, g, beta, state, state_indices, scale, use_qk_l2norm, beta_sigmoid, allow_neg_eigval, A_log, dt_bias,
        head_map, state_layout, update_state, cu_seqlens, final_states, chunk_states, workspace, out, stream,
    )  # fmt: skip


def gated_delta_chunk_workspace_size(
    q: SupportsDLPack,
    k: SupportsDLPack,
    v: SupportsDLPack,
    g: SupportsDLPack,
    beta: SupportsDLPack,
    state: SupportsDLPack | None = None,
    state_indices: SupportsDLPack | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    A_log: SupportsDLPack | None = None,  # noqa: N803 - the field's name
    dt_bias: SupportsDLPack | None = None,
    head_map: HeadMap = "consecutive",
    state_layout: StateLayout = "vk",
    update_state: bool = True,
    cu_seqlens: SupportsDLPack | None = None,
    final_states: SupportsDLPack | None = None,
    chunk_states: SupportsDLPack | None = None,
    workspace: SupportsDLPack | None = None,
    out: SupportsDLPack | None = None,
    stream: StreamLike | None = None,
) -> int:
    """Bytes of workspace that :func:`gated_delta_chunk` needs with these arguments, whatever the lengths.

    Nothing is computed or allocated. About 33 KiB for 64 tokens of one value head; half as much where operands of
    products have 16 bits.

    Args:
        q, k, v, g, beta, state, state_indices, scale, use_qk_l2norm, beta_sigmoid, allow_neg_eigval, A_log, dt_bias,
        head_map, state_layout, update_state, cu_seqlens, final_states, chunk_states, workspace, out, stream: As in
            :func:`gated_delta_chunk`; no element is read or written.

    Returns:
        A number of bytes; 0 where there are no tokens.

    Raises:
        ValueError, TypeError, NotImplementedError: As :func:`gated_delta_chunk`.

    Source:
        common/host/gated_delta/chunk.cpp.
    """
    return _core.gated_delta_chunk_workspace_size(
        q, k, v, g, beta, state, state_indices, scale, use_qk_l2norm, beta_sigmoid, allow_neg_eigval, A_log, dt_bias,
        head_map, state_layout, update_state, cu_seqlens, final_states, chunk_states, workspace, out, stream,
    )  # fmt: skip
