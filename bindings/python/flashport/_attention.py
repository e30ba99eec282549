"""Attention of many query tokens: prompts, encoders, packed batches; and the mask of its dropout.

The module has another name than its function, which would hide it. Symbols in shapes: B sequences, Sq and Sk tokens of
a sequence, Tq and Tk tokens of all packed sequences, Hq query heads, Hkv key-value heads, D head dim of queries and
keys, DV head dim of values. An array is anything that speaks DLPack; all arrays of a call lie on one device. Lengths,
offsets and windows count tokens. ``lse`` is the natural logarithm of the sum of exponentials of a row's logits, in
fp32. Paths after "Source" are those of the project's repository.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from flashport import _core
from flashport.torch import tracing
from flashport.typing import Array, CacheFormat, KvLayout, StreamLike, SupportsDLPack

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class _AttentionOptions(TypedDict, total=False):
        """Arguments of attention that do not change the type of its result."""

        cu_seqlens_q: SupportsDLPack | None
        cu_seqlens_k: SupportsDLPack | None
        max_seqlen_q: int | None
        max_seqlen_k: int | None
        seqused_q: SupportsDLPack | None
        seqused_k: SupportsDLPack | None
        leftpad_k: SupportsDLPack | None
        block_table: SupportsDLPack | None
        token_table: SupportsDLPack | None
        request_index: SupportsDLPack | None
        kv_indptr: SupportsDLPack | None
        kv_indices: SupportsDLPack | None
        kv_last_page_len: SupportsDLPack | None
        kv_layout: KvLayout
        k_new: SupportsDLPack | None
        v_new: SupportsDLPack | None
        cu_seqlens_k_new: SupportsDLPack | None
        rotary_cos: SupportsDLPack | None
        rotary_sin: SupportsDLPack | None
        rotary_interleaved: bool
        softmax_scale: float | None
        causal: bool
        window: tuple[int, int]
        softcap: float
        alibi_slopes: SupportsDLPack | None
        sinks: SupportsDLPack | None
        bias: SupportsDLPack | None
        dropout_p: float
        rng_state: SupportsDLPack | None
        q_scale: SupportsDLPack | None
        k_scale: SupportsDLPack | None
        v_scale: SupportsDLPack | None
        k_format: CacheFormat | None
        v_format: CacheFormat | None
        num_splits: int | None
        workspace: SupportsDLPack | None
        stream: StreamLike | None


def _torch_operators() -> Any:
    from flashport.torch import attention

    return attention


@overload
def attention(
    q: Array, k: SupportsDLPack, v: SupportsDLPack, *,
    out: Array | None = None, lse: None = None, return_lse: Literal[False] = False,
    **options: Unpack[_AttentionOptions],
) -> Array: ...  # fmt: skip
@overload
def attention(
    q: Array, k: SupportsDLPack, v: SupportsDLPack, *,
    out: Array | None = None, lse: Array | None = None, return_lse: Literal[True],
    **options: Unpack[_AttentionOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def attention(
    q: Array, k: SupportsDLPack, v: SupportsDLPack, *,
    out: Array | None = None, lse: Array, return_lse: bool = False, **options: Unpack[_AttentionOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def attention(
    q: Array, k: SupportsDLPack, v: SupportsDLPack, *,
    out: Array | None = None, lse: Array | None = None, return_lse: bool = False, **options: Unpack[_AttentionOptions],
) -> Array | tuple[Array, Array]: ...  # fmt: skip
@_core.direct
def attention(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    *,
    cu_seqlens_q: SupportsDLPack | None = None,
    cu_seqlens_k: SupportsDLPack | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: SupportsDLPack | None = None,
    seqused_k: SupportsDLPack | None = None,
    leftpad_k: SupportsDLPack | None = None,
    block_table: SupportsDLPack | None = None,
    token_table: SupportsDLPack | None = None,
    request_index: SupportsDLPack | None = None,
    kv_indptr: SupportsDLPack | None = None,
    kv_indices: SupportsDLPack | None = None,
    kv_last_page_len: SupportsDLPack | None = None,
    kv_layout: KvLayout = "NHD",
    k_new: SupportsDLPack | None = None,
    v_new: SupportsDLPack | None = None,
    cu_seqlens_k_new: SupportsDLPack | None = None,
    rotary_cos: SupportsDLPack | None = None,
    rotary_sin: SupportsDLPack | None = None,
    rotary_interleaved: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: SupportsDLPack | None = None,
    sinks: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    dropout_p: float = 0.0,
    rng_state: SupportsDLPack | None = None,
    q_scale: SupportsDLPack | None = None,
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
    """softmax(scale * q k^T + bias) v over each sequence.

    Query head h reads key-value head h // (Hq / Hkv). Query i of a sequence with q_len queries and kv_len keys stands
    at position i + kv_len - q_len, so that the last query stands at the last key: causal, window and ALiBi go by that.
    A query that sees no key gets output 0 and lse -inf.

    The bits of a row follow from its own query and the keys that it sees, and from the lengths of its sequence alone:
    they are the same whatever else is in the batch and on any number of multiprocessors, with ``num_splits`` 1 also for
    a prompt that is cut into chunks of any size. Offsets and lengths are read on the device, so a captured graph can be
    replayed with others.

    Few queries on a cache, without ``cu_seqlens_q``, run the kernels of :func:`flashport.flash_decode` where those
    serve the call and are faster: up to 16 queries a sequence, with ``seqused_k`` or ``kv_last_page_len`` and
    ``num_splits`` None. Causal ones have its bits. :func:`which_kernel` and :func:`explain` say so.

    D and DV are multiples of 8 from 16 to 512 and may differ; Hq is a multiple of Hkv. :func:`supports` says what a
    target serves, and why not. The last axes of q, k, v and ``alibi_slopes`` and one-dimensional arrays are contiguous;
    any other stride will do, so q, k and v may be views of one packed projection.

    Args:
        q: (B, Sq, Hq, D), or (Tq, Hq, D) with ``cu_seqlens_q``. fp16, bf16 or fp8 (e4m3); fp32 on the CPU.
        k: (B, Sk, Hkv, D), or (Tk, Hkv, D) with ``cu_seqlens_k``, or the pages of a cache as
            :func:`flashport.flash_decode` takes them; of q's type, or as ``k_format`` says, which fp16 beside q of bf16
            and bf16 beside fp16 need.
        v: As ``k`` with DV in place of D.
        cu_seqlens_q: (B + 1) int32, first row of each sequence in a packed ``q``, and the end of the last one; needs
            ``max_seqlen_q``, and unless keys are (B, Sk, Hkv, D) or on pages ``cu_seqlens_k``. Rows past the last
            offset are no sequence's: their rows of ``out`` and ``lse`` are not written, and of new arrays hold
            anything.
        cu_seqlens_k: (B + 1) int32, the same for ``k`` and ``v``.
        max_seqlen_q: With ``cu_seqlens_q``: no sequence has more queries.
        max_seqlen_k: With ``cu_seqlens_k``: no sequence has more keys.
        seqused_q: (B) int32, queries of each sequence in use; rows past them are neither read nor written.
        seqused_k: (B) int32, keys of each sequence in use, those before ``leftpad_k`` among them; keys past them are
            not read. With ``k_new``: those before the new ones.
        leftpad_k: (B) int32, first keys of each sequence that do not exist; the key after them has position 0.
        block_table, token_table, request_index, kv_indptr, kv_indices, kv_last_page_len: Which pages the keys of each
            sequence lie on, in one of the ways of :func:`flashport.flash_decode`; ``seqused_k`` has the lengths.
        kv_layout: "NHD" for (..., tokens, Hkv, D), "HND" for (..., Hkv, tokens, D) of keys with four axes.
        k_new: (B, Sn, Hkv, D), or (Tn, Hkv, D) with ``cu_seqlens_k_new``; fp16, bf16 or fp32. New keys, which the call
            writes into ``k``, in the cache's format, after the ``seqused_k`` keys of each sequence; then it attends to
            all of them. ``k`` and ``v`` are a cache: with four axes and no ``cu_seqlens_k``, or on pages. Keys for
            which a sequence has no room raise where lengths are in host memory, as below, and are else dropped.
            ``k_scale`` and ``v_scale`` divide them, unless q is fp8; not with scales that lie beside ``k`` or ``v``.
        v_new: As ``k_new`` with DV in place of D.
        cu_seqlens_k_new: (B + 1) int32, first row of each sequence in packed ``k_new`` and ``v_new``, and the end of
            the last one.
        rotary_cos: (positions, rotary_dim / 2) fp16, bf16 or fp32, rotary_dim a multiple of 16 up to D. With
            ``k_new`` of q's type: rotary position embedding turns new key i of a sequence to position seqused_k + i,
            and so a copy of query i where the call is causal or has a window, else of all its queries to seqused_k.
            Positions past the end are not turned.
        rotary_sin: As ``rotary_cos``.
        rotary_interleaved: Pairs are dims 2i and 2i + 1; else i and i + rotary_dim / 2.
        softmax_scale: Factor on the products of queries and keys; default 1 / sqrt(D).
        causal: Whether a query sees no key after its own position, whatever the right side of ``window`` is.
        window: (left, right), keys on either side of a query's own position that it sees; -1 is no limit.
        softcap: Logits become cap * tanh(logit / cap) after the scale, before ALiBi, bias and mask; 0 is off.
        alibi_slopes: (Hq) or (B, Hq) fp32; adds -slope * |query position - key position|.
        sinks: (Hq) fp32, a logit that joins the softmax's denominator, and so the lse, only.
        bias: (B or 1, Hq or 1, Sq, Sk) fp32 or q's type, added to the logits; -inf hides a key. Not with packed
            sequences, keys on pages, ``leftpad_k`` or ``k_new``. On ``sm90a`` calls are about twice as fast where
            it has q's type and its rows begin at multiples of 16 bytes.
        dropout_p: Probability, below 1, that a weight is dropped, in steps of 1/256; kept ones grow by
            1 / (1 - dropout_p). Needs ``rng_state``. The lse is that of all weights.
        rng_state: (2) int64, seed and offset. Which weights are dropped follows from these, the sequence, the head, the
            query and the key alone, on every target: :func:`dropout_mask` tells which.
        q_scale: (1), (Hkv) or (B, Hkv) fp32, positive: what stored queries are multiplied by.
        k_scale: The same of keys; or beside ``k``, fp32 or fp16: on its axes without the last, one for each row (token
            and head); or on all of them with a number of groups in place of D, each of 8 values or a multiple of it.
            Where ``k`` has three axes and B rows, (B, Hkv) is of sequences, and (B, Hkv, 1) of rows. Scales of rows
            that no sequence has are never read.
        v_scale: As ``k_scale``, of ``v``; either may lie beside its array or not.
        k_format, v_format: What ``k`` and ``v`` store, as in :func:`flashport.append_kv`; default the own format of
            their element type.
        num_splits: Into how many pieces the keys of a sequence are cut, which run side by side and are merged in a
            second launch; at most 128. None cuts where few queries are on many keys, by the sequence's own lengths
            (docs/attention.md); 1 never cuts, so that the bits of a prompt are those of its chunks; 0 picks a count for
            the whole batch by :func:`num_splits_heuristic`.
        out: As ``q`` with DV in place of D, of q's type, for fp8 bf16 or fp16; written. Default: a new array like
            ``q``, for fp8 of bf16.
        lse: (B, Hq, Sq) fp32, or (Hq, Tq) of packed sequences; written. Where given, ``return_lse`` is implied.
        return_lse: Also return the lse.
        workspace: uint8 of at least :func:`attention_workspace_size` bytes, aligned to 16, zero before its first use,
            for one stream at a time; a graph that was captured with it keeps it. Default: a cached one per device and
            stream.
        stream: Stream handle, or a stream object, to run on. Default: the current stream of the query's library.

    Returns:
        ``out``, or ``(out, lse)``.

    Raises:
        ValueError: A wrong rank, shape, stride, device or value (a number that fp32 does not have among them), options
            that cannot be combined, or an output that shares an element with another argument; nothing has been
            written. Also offsets that fall, do not begin with 0 or exceed the rows or the maximum, and lengths beyond
            their sequence, where these are in host memory: on a GPU, where no call waits, they are clamped
            (FLASHPORT_CHECK=1 in the environment checks them, and waits). Also a graph capture for which no workspace
            is ready.
        TypeError: A wrong element type, or an argument that is no array.
        NotImplementedError: No kernel of the device's target serves the request, and the text says what is missing; or
            torch records gradients and an input requires one: there is no backward yet.
        RuntimeError: A driver call failed.

    Source:
        common/host/attention/attention.cpp, common/host/attention/problem.cpp (checks),
        common/device/attention/kernel.h, common/device/attention/pieces.h (how keys are cut).
    """
    operations = _torch_operators() if tracing.is_compiling() else _core
    return operations.attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, leftpad_k, block_table,
        token_table, request_index, kv_indptr, kv_indices, kv_last_page_len, kv_layout, k_new, v_new, cu_seqlens_k_new,
        rotary_cos, rotary_sin, rotary_interleaved, softmax_scale, causal, window, softcap, alibi_slopes, sinks, bias,
        dropout_p, rng_state, q_scale, k_scale, v_scale, k_format, v_format, num_splits, out, lse, return_lse,
        workspace, stream,
    )  # fmt: skip


def attention_workspace_size(
    q: SupportsDLPack,
    k: SupportsDLPack,
    v: SupportsDLPack,
    *,
    cu_seqlens_q: SupportsDLPack | None = None,
    cu_seqlens_k: SupportsDLPack | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: SupportsDLPack | None = None,
    seqused_k: SupportsDLPack | None = None,
    leftpad_k: SupportsDLPack | None = None,
    block_table: SupportsDLPack | None = None,
    token_table: SupportsDLPack | None = None,
    request_index: SupportsDLPack | None = None,
    kv_indptr: SupportsDLPack | None = None,
    kv_indices: SupportsDLPack | None = None,
    kv_last_page_len: SupportsDLPack | None = None,
    kv_layout: KvLayout = "NHD",
    k_new: SupportsDLPack | None = None,
    v_new: SupportsDLPack | None = None,
    cu_seqlens_k_new: SupportsDLPack | None = None,
    rotary_cos: SupportsDLPack | None = None,
    rotary_sin: SupportsDLPack | None = None,
    rotary_interleaved: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: SupportsDLPack | None = None,
    sinks: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    dropout_p: float = 0.0,
    rng_state: SupportsDLPack | None = None,
    q_scale: SupportsDLPack | None = None,
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
    """Bytes of workspace that :func:`attention` needs with these arguments, whatever the lengths.

    Nothing is computed or allocated. The size follows from shapes, ``num_splits`` and the device, so one workspace
    serves a graph that is replayed with other lengths. Where keys may be cut into pieces, their partial results take
    most of it. None are where one array is both ``cu_seqlens_q`` and ``cu_seqlens_k``, as those of prompts may be.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, leftpad_k, block_table,
        token_table, request_index, kv_indptr, kv_indices, kv_last_page_len, kv_layout, k_new, v_new, cu_seqlens_k_new,
        rotary_cos, rotary_sin, rotary_interleaved, softmax_scale, causal, window, softcap, alibi_slopes, sinks, bias,
        dropout_p, rng_state, q_scale, k_scale, v_scale, k_format, v_format, num_splits, out, lse, return_lse,
        workspace, stream: As in :func:`attention`; no element is read or written.

    Returns:
        A number of bytes; 0 where no workspace is needed.

    Raises:
        ValueError, TypeError, NotImplementedError: As :func:`attention`.

    Source:
        common/host/attention/plan.cpp.
    """
    return _core.attention_workspace_size(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, leftpad_k, block_table,
        token_table, request_index, kv_indptr, kv_indices, kv_last_page_len, kv_layout, k_new, v_new, cu_seqlens_k_new,
        rotary_cos, rotary_sin, rotary_interleaved, softmax_scale, causal, window, softcap, alibi_slopes, sinks, bias,
        dropout_p, rng_state, q_scale, k_scale, v_scale, k_format, v_format, num_splits, out, lse, return_lse,
        workspace, stream,
    )  # fmt: skip


@_core.direct
def dropout_mask(
    shape: Sequence[int],
    rng_state: Array,
    dropout_p: float,
    *,
    mask: Array | None = None,
    stream: StreamLike | None = None,
) -> Array:
    """Which weights :func:`attention` keeps with this random state: 1 where it keeps one, 0 where it drops it.

    An element follows from the seed, the offset, its sequence, head, query and key alone, so every target, shape and
    call gives the same one. Queries and keys count from the first of their sequence, keys after ``leftpad_k``.

    Args:
        shape: (B, Hq, Sq, Sk) of the mask; of packed sequences as many queries and keys as the longest has.
        rng_state: (2) int64, seed and offset, as :func:`attention` takes it; the mask is on its device.
        dropout_p: Probability, at least 0 and below 1, that a weight is dropped; it is rounded to a multiple of 1/256.
        mask: uint8 of that shape, any strides; written. Default: a new array like ``rng_state``.
        stream: As in :func:`attention`.

    Returns:
        ``mask``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`attention`; nothing has been written.

    Source:
        common/host/attention/dropout_mask.cpp and common/device/attention/dropout_mask_kernel.h; the generator is
        Philox4x32-10 (common/device/attention/philox.h).
    """
    operations = _torch_operators() if tracing.is_compiling() else _core
    return operations.dropout_mask(shape, rng_state, dropout_p, mask, stream)
