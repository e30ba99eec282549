"""Flash decoding: attention of a few new query tokens over a long key-value cache, and its companions.

Symbols in shapes: B requests, Hq query heads, Hkv key-value heads, D head dim of queries and keys, DV head dim of
values. An array is anything that speaks DLPack; all arrays of a call lie on one device. Lengths, positions and sizes
count tokens. ``lse`` is the natural logarithm of the sum of exponentials of a row's scores, in fp32, and -inf where a
row attends to nothing; its output is 0 there. Paths after "Source" are those of the project's repository.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from flashport import _core
from flashport.torch import tracing
from flashport.typing import Array, CacheFormat, KvLayout, StreamLike, SupportsDLPack

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class _DecodeOptions(TypedDict, total=False):
        """Arguments of flash_decode that do not change the type of its result."""

        block_table: SupportsDLPack | None
        token_table: SupportsDLPack | None
        request_index: SupportsDLPack | None
        kv_indptr: SupportsDLPack | None
        kv_indices: SupportsDLPack | None
        kv_last_page_len: SupportsDLPack | None
        kv_layout: KvLayout
        cu_seqlens_q: SupportsDLPack | None
        max_q_len: int | None
        softmax_scale: float | None
        window: tuple[int, int]
        softcap: float
        alibi_slopes: SupportsDLPack | None
        sinks: SupportsDLPack | None
        tree_mask: SupportsDLPack | None
        k_scale: SupportsDLPack | None
        v_scale: SupportsDLPack | None
        k_format: CacheFormat | None
        v_format: CacheFormat | None
        num_splits: int | None
        workspace: SupportsDLPack | None
        stream: StreamLike | None


def _torch_operators() -> Any:
    from flashport.torch import decode

    return decode


@overload
def flash_decode(
    q: Array, k_cache: SupportsDLPack, v_cache: SupportsDLPack, seqlens: SupportsDLPack | None, *,
    out: Array | None = None, lse: None = None, return_lse: Literal[False] = False, **options: Unpack[_DecodeOptions],
) -> Array: ...  # fmt: skip
@overload
def flash_decode(
    q: Array, k_cache: SupportsDLPack, v_cache: SupportsDLPack, seqlens: SupportsDLPack | None, *,
    out: Array | None = None, lse: Array | None = None, return_lse: Literal[True], **options: Unpack[_DecodeOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def flash_decode(
    q: Array, k_cache: SupportsDLPack, v_cache: SupportsDLPack, seqlens: SupportsDLPack | None, *,
    out: Array | None = None, lse: Array, return_lse: bool = False, **options: Unpack[_DecodeOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def flash_decode(
    q: Array, k_cache: SupportsDLPack, v_cache: SupportsDLPack, seqlens: SupportsDLPack | None, *,
    out: Array | None = None, lse: Array | None = None, return_lse: bool = False, **options: Unpack[_DecodeOptions],
) -> Array | tuple[Array, Array]: ...  # fmt: skip
@_core.direct
def flash_decode(
    q: Array,
    k_cache: SupportsDLPack,
    v_cache: SupportsDLPack,
    seqlens: SupportsDLPack | None,
    *,
    block_table: SupportsDLPack | None = None,
    token_table: SupportsDLPack | None = None,
    request_index: SupportsDLPack | None = None,
    kv_indptr: SupportsDLPack | None = None,
    kv_indices: SupportsDLPack | None = None,
    kv_last_page_len: SupportsDLPack | None = None,
    kv_layout: KvLayout = "NHD",
    cu_seqlens_q: SupportsDLPack | None = None,
    max_q_len: int | None = None,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: SupportsDLPack | None = None,
    sinks: SupportsDLPack | None = None,
    tree_mask: SupportsDLPack | None = None,
    k_scale: SupportsDLPack | None = None,
    v_scale: SupportsDLPack | None = None,
    k_format: CacheFormat | None = None,
    v_format: CacheFormat | None = None,
    num_splits: int | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    workspace: SupportsDLPack | None = None,
    stream: StreamLike | None = None,
) -> Array | tuple[Array, Array]:
    """softmax(scale * q k^T + bias) v over the cached keys of each request.

    Query head h reads key-value head h // (Hq / Hkv). Lengths, tables and indices are read on the device, so a captured
    graph can be replayed with others. Entries of a table, and rows of a cache, past a request's length are never read.
    A row that attends to nothing gives output 0 and lse -inf.

    D and DV are multiples of 8 from 16 to 512 and may differ; Hq / Hkv is 1 to 128. :func:`supports` says what a target
    serves, and why not. Any strides will do, but for the last axis of caches, tables, ``alibi_slopes`` and
    ``tree_mask``, and for one-dimensional arrays: these must be contiguous.

    Args:
        q: (B, Hq, D) for one new token a request, (B, q_len, Hq, D) with q_len 1 to 16, or (total_q, Hq, D) with
            ``cu_seqlens_q``. fp16 or bf16; fp32 on the CPU.
        k_cache: With ``kv_layout="NHD"`` (B, S, Hkv, D), or (pages, page_size, Hkv, D) with ``block_table`` or
            ``kv_indptr``; with ``"HND"`` (B, Hkv, S, D) or (pages, Hkv, page_size, D); with ``token_table``
            (slots, Hkv, D), which the two paged forms take as pages of one token. Any page_size from 1. The query's
            type, one of 8 bits or, where ``k_format`` names it, fp16 or bf16 beside other queries; blocks are uint8
            with their bytes in place of D, a multiple of 32: D / 32 * 34 for "q8_0".
        v_cache: As ``k_cache``, with DV in place of D and ``v_format``.
        seqlens: (B) int32 or int64: keys of each request in the cache, its new tokens among them. None only with
            ``kv_last_page_len``.
        block_table: (B, max_pages) int32, page numbers of each request.
        token_table: (requests, max_len) int32, slot of each token of a request, as LightLLM has it.
        request_index: (B) int32 or int64, row of ``token_table``; default 0 to B - 1.
        kv_indptr: (B + 1) int32, as FlashInfer has it: the pages of request b are entries kv_indptr[b] to
            kv_indptr[b + 1] - 1 of ``kv_indices``.
        kv_indices: (pages in use) int32, page numbers.
        kv_last_page_len: (B) int32, tokens in the last page of each request, 1 to page_size; read where ``seqlens`` is
            None.
        kv_layout: "NHD" or "HND".
        cu_seqlens_q: (B + 1) int32, first row of each request in a ragged ``q``; needs ``max_q_len``. Rows past its
            last entry are nobody's: their rows of ``out`` and ``lse`` are not written, and of new arrays hold anything.
        max_q_len: The most new tokens of any request, 1 to 16.
        softmax_scale: Factor on the scores; default 1 / sqrt(D).
        window: (left, right), keys on either side of a query's own position that it sees; -1 is no limit. New token i
            has the position seqlens - q_len + i.
        softcap: Scores become cap * tanh(score / cap) after the scale; 0 is off.
        alibi_slopes: (Hq) or (B, Hq) fp32; adds -slope * |query position - key position|.
        sinks: (Hq) fp32, a logit that joins the softmax's denominator, and so the lse, only. Where
            parts will be merged, give it to one of them.
        tree_mask: (B, q_len) uint32, or (total_q) with a ragged ``q``; bit j of row i lets new token i see new token
            j. Default: causal.
        k_scale: Factor on the stored keys. (1) or (Hkv) fp32, finite and not 0. Or beside the cache, fp32 or fp16: on
            the axes of ``k_cache`` without the last, one for each row (token and head); or on all of them with a number
            of groups in place of D, each of 8 values or a multiple of it, as LightLLM has them. Those of rows past a
            length are never read. A cache that has them is read natively, where the target does, or by the kernel that
            widens any format.
        v_scale: As ``k_scale``, of ``v_cache``. Where neither lies beside its cache, both are of one shape.
        k_format: What ``k_cache`` stores: "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e4m3fnuz", or a format of ggml's
            blocks of 32 values: "q8_0", "q4_0", "q4_1", "q5_0", "q5_1" or "iq4_nl"; "fp8_e5m2", "int8" or "int4", as in
            :func:`append_kv`. Default: its element type's own; to be given where that is uint8, which has none.
        v_format: What ``v_cache`` stores. A pair without a kernel of its own is read by one that widens any; by
            :func:`supports` a target says what it serves, by :func:`which_kernel` how.
        num_splits: None gives results whose bits do not depend on the rest of the batch; 0 picks a count by
            :func:`num_splits_heuristic`; n cuts each request into n equal parts.
        out: As ``q`` with DV in place of D; fp16, bf16 or fp32; written. Default: a new array like ``q``.
        lse: fp32, as ``out`` without its last axis; written. Where given, ``return_lse`` is implied.
        return_lse: Also return the lse.
        workspace: uint8 of at least :func:`decode_workspace_size` bytes, aligned to 16, zero before its first use, for
            one stream at a time; a graph that was captured with it keeps it. Default: a cached one per device and
            stream.
        stream: Stream handle, or a stream object, to run on. Default: the current stream of the query's library.

    Returns:
        ``out``, or ``(out, lse)``.

    Raises:
        ValueError: A wrong rank, shape, stride, device or value (a number that fp32 does not have among them), or an
            output that shares an element with another argument; nothing has been written. Also a length or an entry of
            a table that lies outside of the cache, and a scale of the cache that is 0, NaN or infinite, where these are
            in host memory: on a GPU, where no call waits, lengths are clamped to what the layout can hold, entries and
            scales are trusted (FLASHPORT_CHECK=1 in the environment checks them, and waits). Also a graph capture for
            which no workspace is ready.
        TypeError: A wrong element type, or an argument that is no array.
        NotImplementedError: No kernel of the device's target serves the request; the text says what is missing.
        RuntimeError: A driver call failed.

    Source:
        common/host/decode/flash_decode.cpp, common/host/decode/problem.cpp (checks), common/device/decode/kernel.h.
    """
    operations = _torch_operators() if tracing.is_compiling() else _core
    return operations.flash_decode(
        q, k_cache, v_cache, seqlens, block_table, token_table, request_index, kv_indptr, kv_indices, kv_last_page_len,
        kv_layout, cu_seqlens_q, max_q_len, softmax_scale, window, softcap, alibi_slopes, sinks, tree_mask, k_scale,
        v_scale, k_format, v_format, num_splits, out, lse, return_lse, workspace, stream,
    )  # fmt: skip


def decode_workspace_size(
    q: SupportsDLPack,
    k_cache: SupportsDLPack,
    v_cache: SupportsDLPack,
    seqlens: SupportsDLPack | None,
    *,
    block_table: SupportsDLPack | None = None,
    token_table: SupportsDLPack | None = None,
    request_index: SupportsDLPack | None = None,
    kv_indptr: SupportsDLPack | None = None,
    kv_indices: SupportsDLPack | None = None,
    kv_last_page_len: SupportsDLPack | None = None,
    kv_layout: KvLayout = "NHD",
    cu_seqlens_q: SupportsDLPack | None = None,
    max_q_len: int | None = None,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: SupportsDLPack | None = None,
    sinks: SupportsDLPack | None = None,
    tree_mask: SupportsDLPack | None = None,
    k_scale: SupportsDLPack | None = None,
    v_scale: SupportsDLPack | None = None,
    k_format: CacheFormat | None = None,
    v_format: CacheFormat | None = None,
    num_splits: int | None = None,
    out: SupportsDLPack | None = None,
    lse: SupportsDLPack | None = None,
    return_lse: bool = False,
    workspace: SupportsDLPack | None = None,
    stream: StreamLike | None = None,
) -> int:
    """Bytes of workspace that :func:`flash_decode` needs with these arguments, whatever the lengths.

    Nothing is computed or allocated. The size follows from shapes, formats, ``num_splits`` and the device, so one
    workspace serves a graph that is replayed with other lengths.

    Args:
        q, k_cache, v_cache, seqlens, block_table, token_table, request_index, kv_indptr, kv_indices, kv_last_page_len,
        kv_layout, cu_seqlens_q, max_q_len, softmax_scale, window, softcap, alibi_slopes, sinks, tree_mask, k_scale,
        v_scale, k_format, v_format, num_splits, out, lse, return_lse, workspace, stream: As in :func:`flash_decode`; no
            element is read or written.

    Returns:
        A number of bytes; 0 where no workspace is needed.

    Raises:
        ValueError, TypeError, NotImplementedError: As :func:`flash_decode`.

    Source:
        common/host/decode/plan.cpp.
    """
    return _core.decode_workspace_size(
        q, k_cache, v_cache, seqlens, block_table, token_table, request_index, kv_indptr, kv_indices, kv_last_page_len,
        kv_layout, cu_seqlens_q, max_q_len, softmax_scale, window, softcap, alibi_slopes, sinks, tree_mask, k_scale,
        v_scale, k_format, v_format, num_splits, out, lse, return_lse, workspace, stream,
    )  # fmt: skip


@_core.direct
def flash_decode_stage1(
    q: SupportsDLPack,
    k: SupportsDLPack,
    v: SupportsDLPack,
    Req_to_tokens: SupportsDLPack,  # noqa: N803 - LightLLM's names
    B_req_idx: SupportsDLPack,  # noqa: N803
    B_Seqlen: SupportsDLPack,  # noqa: N803
    max_len_in_batch: int,
    mid_out: SupportsDLPack,
    mid_out_logsumexp: SupportsDLPack,
    block_seq: int,
    sm_scale: float | None = None,
    *,
    k_scale: SupportsDLPack | None = None,
    v_scale: SupportsDLPack | None = None,
    k_format: CacheFormat | None = None,
    v_format: CacheFormat | None = None,
    stream: StreamLike | None = None,
) -> None:
    """LightLLM's first stage: attention of q over each block of ``block_seq`` keys of a request.

    Query head h reads key-value head h // (Hq / Hkv). Rows of the outputs past ceil(length / block_seq) are not
    written. D is a multiple of 8 from 16 to 512.

    Args:
        q: (B, Hq, D) fp16 or bf16; fp32 on the CPU.
        k: (slots, Hkv, D), the token pool; any strides but the last, also two slices of one buffer. The type of ``q``,
            fp8 e4m3, or, with ``k_format="q8_0"``, uint8 as in :func:`flash_decode`.
        v: (slots, Hkv, D), as ``k``, with ``v_format``.
        Req_to_tokens: (max_requests, max_len) int32, slot of each token of a request.
        B_req_idx: (B) int32 or int64, row of ``Req_to_tokens``.
        B_Seqlen: (B) int32 or int64, keys of each request.
        max_len_in_batch: The longest of them, in tokens; 0 where no request has any.
        mid_out: (B, Hq, blocks, D) fp32 with blocks >= ceil(max_len_in_batch / block_seq), any strides; written.
        mid_out_logsumexp: (B, Hq, blocks) fp32, natural log, any strides; written.
        block_seq: Keys of a block, 1 or more.
        sm_scale: Factor on the scores; default 1 / sqrt(D).
        k_scale, v_scale: As in :func:`flash_decode`: (1) or (Hkv) fp32; or fp32 or fp16 beside the pool, (slots, Hkv)
            or (slots, Hkv, groups), as LightLLM's int8 and int4 caches have D / 8 groups.
        k_format, v_format: What ``k`` and ``v`` store, as in :func:`flash_decode`.
        stream: As in :func:`flash_decode`.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flash_decode`; nothing has been written. A
            length beyond ``max_len_in_batch`` or ``Req_to_tokens`` is a ValueError in host memory, and is clamped on a
            GPU.

    Source:
        common/host/decode/stage1.cpp and common/device/decode/kernel.h; the signature is LightLLM's.
    """
    operations = _torch_operators() if tracing.is_compiling() else _core
    return operations.flash_decode_stage1(
        q, k, v, Req_to_tokens, B_req_idx, B_Seqlen, max_len_in_batch, mid_out, mid_out_logsumexp, block_seq, sm_scale,
        k_scale, v_scale, k_format, v_format, stream,
    )  # fmt: skip


@_core.direct
def flash_decode_stage2(
    mid_out: SupportsDLPack,
    mid_out_logexpsum: SupportsDLPack,
    B_Seqlen: SupportsDLPack,  # noqa: N803 - LightLLM's names
    Out: SupportsDLPack,  # noqa: N803
    block_seq: int,
    *,
    lse: SupportsDLPack | None = None,
    stream: StreamLike | None = None,
) -> None:
    """LightLLM's second stage: merges the blocks of each request into ``Out``; a length of 0 gives 0.

    Blocks past ceil(length / block_seq) are not read: they may hold anything, NaN included. Any D.

    Args:
        mid_out: (B, Hq, blocks, D) fp32, any strides; what stage 1 wrote.
        mid_out_logexpsum: (B, Hq, blocks) fp32, natural log, any strides.
        B_Seqlen: (B) int32 or int64, keys of each request.
        Out: (B, Hq, D) fp16, bf16 or fp32, any strides; written.
        block_seq: Keys of a block, 1 or more.
        lse: (B, Hq) fp32, natural log, -inf for a length of 0; written where given.
        stream: As in :func:`flash_decode`.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flash_decode`; nothing has been written. A
            length beyond blocks * block_seq is a ValueError in host memory, and is clamped on a GPU.

    Source:
        common/host/decode/stage2.cpp and common/device/merge/merge_kernel.h; the signature is LightLLM's.
    """
    operations = _torch_operators() if tracing.is_compiling() else _core
    return operations.flash_decode_stage2(mid_out, mid_out_logexpsum, B_Seqlen, Out, block_seq, lse, stream)


@_core.direct
def append_kv(
    k: SupportsDLPack,
    v: SupportsDLPack,
    k_cache: SupportsDLPack,
    v_cache: SupportsDLPack,
    positions: SupportsDLPack,
    *,
    kv_layout: KvLayout = "NHD",
    k_scale: SupportsDLPack | None = None,
    v_scale: SupportsDLPack | None = None,
    k_format: CacheFormat | None = None,
    v_format: CacheFormat | None = None,
    stream: StreamLike | None = None,
) -> None:
    """Writes new tokens into a cache of any layout, converting to the cache's format.

    A position is a slot of the cache, counted over its pages (or sequences) in memory order, whatever table will point
    at it: new tokens go where the caller's allocator has put them. Positions are distinct; of two tokens for one slot
    either may win. A block that a NaN or an infinity goes into is NaN throughout.

    Args:
        k: (tokens, Hkv, D) fp16, bf16 or fp32, any strides.
        v: (tokens, Hkv, DV), of the type of ``k``.
        k_cache: As in :func:`flash_decode`: contiguous, paged, or a token pool; its format, here any of them, is
            independent of ``k``. Written.
        v_cache: As ``k_cache`` with DV; written.
        positions: (tokens) int32 or int64, the slot that each token goes to: page * page_size + offset in the page;
            b * S + offset where the cache is contiguous; the slot itself in a token pool. -1 skips the token.
        kv_layout: "NHD" or "HND".
        k_scale: What is stored is k / k_scale. (1) or (Hkv) fp32, finite and not 0. Or, of fp8, int8 and int4, fp32 or
            fp16 on the axes of ``k_cache`` without the last, one for each row; or on all of them with a number of
            groups in place of D, each of 8 values or a multiple of it, as LightLLM has them. Those are written: the
            largest magnitude of the row or group / 448, 240, 57344 (fp8 e4m3, FNUZ, e5m2), 127 or 7. "int4" needs them.
        v_scale: As ``k_scale``, of ``v`` and ``v_cache``.
        k_format, v_format: What ``k_cache`` and ``v_cache`` store, as in :func:`flash_decode`, also "q4_0",
            "q4_1", "q5_0", "q5_1" and "iq4_nl"; "fp8_e5m2"; "int8"; and "int4", int8 with D / 2 in place of D, two
            values in each, the first in the low bits.
        stream: As in :func:`flash_decode`.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flash_decode`; nothing has been written. A
            position outside of the cache is a ValueError in host memory; on a GPU the token is skipped. A scale that is
            0, NaN or infinite is one in host memory, and is trusted on a GPU.

    Source:
        common/host/kv/append_kv.cpp and common/device/kv/append_kernel.h.
    """
    operations = _torch_operators() if tracing.is_compiling() else _core
    return operations.append_kv(
        k, v, k_cache, v_cache, positions, kv_layout, k_scale, v_scale, k_format, v_format, stream
    )


@_core.direct
def merge_state(
    o_a: Array,
    lse_a: SupportsDLPack,
    o_b: SupportsDLPack,
    lse_b: SupportsDLPack,
    *,
    lse_base: float | None = None,
    out: Array | None = None,
    out_lse: Array | None = None,
    stream: StreamLike | None = None,
) -> tuple[Array, Array]:
    """Merges two partial results of one softmax, as of a shared prefix and a request's own suffix.

    -inf on both sides gives o = 0 and lse = -inf. A side whose lse is -inf is not read.

    Args:
        o_a: (..., D) fp16, bf16 or fp32, normalised. Any strides under which the axes before D collapse to two.
        lse_a: (...) fp32.
        o_b: As ``o_a``.
        lse_b: As ``lse_a``.
        lse_base: Base of the logarithms that come and go: None for natural ones, 2 for FlashInfer's.
        out: As ``o_a``; written. Default: a new array.
        out_lse: As ``lse_a``; written. Default: a new array.
        stream: As in :func:`flash_decode`.

    Returns:
        ``(o, lse)``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flash_decode`; nothing has been written.

    Source:
        common/host/merge/merge_states.cpp and common/device/merge/merge_kernel.h.
    """
    operations = _torch_operators() if tracing.is_compiling() else _core
    return operations.merge_state(o_a, lse_a, o_b, lse_b, lse_base, out, out_lse, stream)


@_core.direct
def merge_states(
    o: Array,
    lse: SupportsDLPack,
    *,
    lse_base: float | None = None,
    out: Array | None = None,
    out_lse: Array | None = None,
    stream: StreamLike | None = None,
) -> tuple[Array, Array]:
    """Merges n partial results of one softmax.

    Rows whose lse are all -inf give o = 0 and lse = -inf. A state whose lse is -inf is not read.

    Args:
        o: (n, ..., D) fp16, bf16 or fp32, normalised. Any strides under which the axes between n and D collapse to two.
        lse: (n, ...) fp32.
        lse_base: Base of the logarithms that come and go: None for natural ones, 2 for FlashInfer's.
        out: (..., D), of the type of ``o``; written. Default: a new array.
        out_lse: (...) fp32; written. Default: a new array.
        stream: As in :func:`flash_decode`.

    Returns:
        ``(o, lse)``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flash_decode`; nothing has been written.

    Source:
        common/host/merge/merge_states.cpp and common/device/merge/merge_kernel.h.
    """
    operations = _torch_operators() if tracing.is_compiling() else _core
    return operations.merge_states(o, lse, lse_base, out, out_lse, stream)


def num_splits_heuristic(
    batch_nheads_mblocks: int,
    num_SMs: int,  # noqa: N803 - the published name
    num_n_blocks: int,
    max_splits: int,
) -> int:
    """flash-attention's published count of splits: the smallest that fills the device 85% as well as the best one does.

    Args:
        batch_nheads_mblocks: Blocks of work without splitting: batch * heads * query blocks.
        num_SMs: Multiprocessors, or twice that where two blocks share one.
        num_n_blocks: Key blocks of a request.
        max_splits: Upper limit of the result.

    Returns:
        A count of splits from 1 to ``max_splits``.

    Raises:
        TypeError: An argument that is no integer.
        ValueError: One below 0 or beyond 32 bits.

    Source:
        common/host/decode/heuristic.cpp; the rule is that of flash-attention's num_splits_heuristic. flash_decode asks
        it, as its callers do today, with query blocks of 64 rows, key blocks of 256 (D <= 64), 128 (D <= 128) or 64
        tokens, twice the multiprocessors and at most 128 splits.
    """
    return _core.num_splits_heuristic(batch_nheads_mblocks, num_SMs, num_n_blocks, max_splits)
