"""Decode over a cache whose parts have formats of their own: some tokens quantised, others not.

Symbols are those of :mod:`flashport.decode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flashport import _core, decode
from flashport._rewording import REFUSALS, reworded
from flashport.arrays import rank
from flashport.torch import tracing
from flashport.typing import Array, CacheFormat, KvLayout, StreamLike, SupportsDLPack


def _torch_operators() -> Any:
    from flashport.torch import mixed

    return mixed


class _Segment(NamedTuple):
    k: SupportsDLPack
    v: SupportsDLPack
    seqlens: SupportsDLPack | None
    k_format: CacheFormat | None
    v_format: CacheFormat | None
    block_table: SupportsDLPack | None
    token_table: SupportsDLPack | None
    request_index: SupportsDLPack | None
    kv_indptr: SupportsDLPack | None
    kv_indices: SupportsDLPack | None
    kv_layout: KvLayout
    k_scale: SupportsDLPack | None
    v_scale: SupportsDLPack | None


class KvSegment(_Segment):
    """Keys and values that follow each other in every sequence, of one format and layout.

    Args:
        k: As ``k_cache`` of :func:`flashport.flash_decode`, of any type that a cache may have, whatever the query's is.
        v: As ``k``, with DV in place of D.
        seqlens: (B) int32 or int64: the segment's keys in each sequence, from 0. None is all that a contiguous cache
            has.
        k_format, v_format: What ``k`` and ``v`` store, as of :func:`flashport.flash_decode`.
        block_table, token_table, request_index, kv_indptr, kv_indices, kv_layout: Where the keys lie, as there.
        k_scale, v_scale: Factors on what is stored, fp32 or fp16: (1), (Hkv), one for each row on the axes of ``k``
            without its last, or on all axes of ``k`` one for each group of values in place of each value; a group is 8
            values or a multiple of that. Of a row that no sequence has, the factor may be anything.
    """

    __slots__ = ()

    def __new__(
        cls,
        k: SupportsDLPack,
        v: SupportsDLPack,
        seqlens: SupportsDLPack | None = None,
        *,
        k_format: CacheFormat | None = None,
        v_format: CacheFormat | None = None,
        block_table: SupportsDLPack | None = None,
        token_table: SupportsDLPack | None = None,
        request_index: SupportsDLPack | None = None,
        kv_indptr: SupportsDLPack | None = None,
        kv_indices: SupportsDLPack | None = None,
        kv_layout: KvLayout = "NHD",
        k_scale: SupportsDLPack | None = None,
        v_scale: SupportsDLPack | None = None,
    ) -> KvSegment:
        """The fields in their order."""
        fields = (k, v, seqlens, k_format, v_format, block_table, token_table, request_index, kv_indptr, kv_indices,
                  kv_layout, k_scale, v_scale)  # fmt: skip
        return tuple.__new__(cls, fields)


@_core.direct
def flash_decode_segments(
    q: Array,
    segments: Sequence[KvSegment],
    *,
    mask: SupportsDLPack | None = None,
    mask_slopes: SupportsDLPack | None = None,
    cu_seqlens_q: SupportsDLPack | None = None,
    max_q_len: int | None = None,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: SupportsDLPack | None = None,
    sinks: SupportsDLPack | None = None,
    by_segment: bool = False,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    workspace: SupportsDLPack | None = None,
    stream: StreamLike | None = None,
) -> Array | tuple[Array, Array]:
    """:func:`flashport.flash_decode` over sequences that are several segments, one after the other.

    All segments are read where they lie, under one softmax, and in one launch, unless ``by_segment`` asks for more.
    Positions, windows and slopes count from the first key of the first segment. A sequence's bits follow from its own
    query, lengths and values: not from the rest of the batch, nor, in one launch and where formats hold the same
    values, from where one segment ends and the next begins.

    Without a mask, new token i sees the keys up to its own position. A mask says by itself what each token sees; keys
    that it hides are read all the same, so what they hold must be numbers.

    Args:
        q: As of :func:`flashport.flash_decode`; on the CPU also fp32, whatever the segments store.
        segments: 1 to 4, the oldest first; they agree in B, Hkv, D and DV.
        mask: (B or 1, Hq or 1, q_len or more, keys of a sequence or more) fp16 or fp32, any strides: added to the
            scores after the softcap, -inf where a token does not see a key, as ggml has it.
        mask_slopes: (Hq) fp32, factor on the mask for each query head, with which ggml makes ALiBi of its max_bias;
            -inf stays -inf. Default: 1.
        cu_seqlens_q, max_q_len, softmax_scale, window, softcap, alibi_slopes, sinks: As of
            :func:`flashport.flash_decode`.
        by_segment: True: each segment as it is stored, by one kernel where there is one for the formats (q8_0 or q4_0
            with 16 bits of q's type, on ``sm90a``, also with a mask), else each by the kernel that reads its formats
            alone, and a launch that merges the results; in place of one kernel that widens all formats. The choice for
            many keys in all: 1k of bf16 after 7k of q8_0 take 0.53 of the time at 64 sequences and 0.67 at 32, but 1.4
            at one (H200). Results differ in their last bits; those of a sequence follow from it alone either way, but
            then also from where its segments end. It changes nothing where ``flash_decode`` has no kernel for a segment
            (16-bit ones are of q's type there, and scales are as it takes them), for more than one new token, with
            ``cu_seqlens_q``, a window or slopes; nor, if no one kernel reads all segments, with a mask and where all
            segments have the same formats.
        out, lse, return_lse, workspace, stream: As of :func:`flashport.flash_decode`; :func:`mixed_workspace_size` has
            the workspace's size.

    Returns:
        ``out``, or ``(out, lse)``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flashport.flash_decode`; nothing has been
            written. In host memory, also a mask that has fewer keys than a sequence; on a GPU keys that it does not
            have are not read.

    Source:
        common/host/decode/mixed.cpp (checks), stored_segments.h and segment_launches.h, common/device/decode/segments.h
        and kernel.h.
    """
    operations: Any = _torch_operators() if tracing.is_compiling() else _core
    result: Array | tuple[Array, Array] = operations.flash_decode_segments(
        q, segments, mask, mask_slopes, cu_seqlens_q, max_q_len, softmax_scale, window, softcap, alibi_slopes, sinks,
        by_segment, out, lse, return_lse, workspace, stream,
    )  # fmt: skip
    return result


def mixed_workspace_size(
    q: SupportsDLPack,
    segments: Sequence[KvSegment],
    *,
    mask: SupportsDLPack | None = None,
    mask_slopes: SupportsDLPack | None = None,
    cu_seqlens_q: SupportsDLPack | None = None,
    max_q_len: int | None = None,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: SupportsDLPack | None = None,
    sinks: SupportsDLPack | None = None,
    by_segment: bool = False,
    out: SupportsDLPack | None = None,
    lse: SupportsDLPack | None = None,
    return_lse: bool = False,
    workspace: SupportsDLPack | None = None,
    stream: StreamLike | None = None,
) -> int:
    """Bytes of workspace that :func:`flash_decode_segments` needs with these arguments, whatever the lengths.

    Args:
        q, segments, mask, mask_slopes, cu_seqlens_q, max_q_len, softmax_scale, window, softcap, alibi_slopes, sinks,
        by_segment, out, lse, return_lse, workspace, stream: As of :func:`flash_decode_segments`; no element is read or
        written.

    Returns:
        A number of bytes; 0 where no workspace is needed.

    Raises:
        ValueError, TypeError, NotImplementedError: As :func:`flash_decode_segments`.

    Source:
        common/host/decode/plan.cpp.
    """
    return _core.mixed_workspace_size(
        q, segments, mask, mask_slopes, cu_seqlens_q, max_q_len, softmax_scale, window, softcap, alibi_slopes, sinks,
        by_segment, out, lse, return_lse, workspace, stream,
    )  # fmt: skip


@_core.direct
def flash_decode_mixed(
    q: Array,
    k_hot: SupportsDLPack,
    v_hot: SupportsDLPack,
    mask: SupportsDLPack | None = None,
    k_quant: SupportsDLPack | None = None,
    v_quant: SupportsDLPack | None = None,
    *,
    hot_seqlens: SupportsDLPack | None = None,
    quant_seqlens: SupportsDLPack | None = None,
    k_quant_format: CacheFormat | None = "q8_0",
    v_quant_format: CacheFormat | None = "q8_0",
    k_quant_scale: SupportsDLPack | None = None,
    v_quant_scale: SupportsDLPack | None = None,
    kv_layout: KvLayout = "NHD",
    mask_slopes: SupportsDLPack | None = None,
    cu_seqlens_q: SupportsDLPack | None = None,
    max_q_len: int | None = None,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: SupportsDLPack | None = None,
    sinks: SupportsDLPack | None = None,
    by_segment: bool = False,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    workspace: SupportsDLPack | None = None,
    stream: StreamLike | None = None,
) -> Array | tuple[Array, Array]:
    """Attention over a quantised part of a cache and the newest tokens after it: llama.cpp's six inputs.

    It is :func:`flash_decode_segments` over ``[quantised, hot]``, or over ``[hot]`` where nothing is quantised. Here
    caches are contiguous: segments may lie in pages.

    Args:
        q: As of :func:`flash_decode_segments`.
        k_hot: (B, S, Hkv, D), the newest keys, after the quantised ones; fp16, bf16, fp32 (on the CPU) or fp8.
        v_hot: (B, S, Hkv, DV).
        mask: As of :func:`flash_decode_segments`, over the quantised keys, then the hot ones.
        k_quant: (B, Sq, Hkv, bytes of a row), the older keys. Default: none.
        v_quant: As ``k_quant``; both are given or neither.
        hot_seqlens: (B) int32 or int64, hot keys of each sequence. Default: S.
        quant_seqlens: (B) int32 or int64, quantised keys of each sequence. Default: Sq.
        k_quant_format, v_quant_format: What ``k_quant`` and ``v_quant`` store; None is their element type's own.
        k_quant_scale, v_quant_scale: As ``k_scale`` of :class:`KvSegment`.
        kv_layout: "NHD" or "HND" (B, Hkv, S, D), of both parts.
        mask_slopes, cu_seqlens_q, max_q_len, softmax_scale, window, softcap, alibi_slopes, sinks, by_segment, out, lse,
        return_lse, workspace, stream: As of :func:`flash_decode_segments`.

    Returns:
        ``out``, or ``(out, lse)``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flash_decode_segments`.

    Source:
        common/host/decode/mixed.cpp.
    """
    operations: Any = _torch_operators() if tracing.is_compiling() else _core
    result: Array | tuple[Array, Array] = operations.flash_decode_mixed(
        q, k_hot, v_hot, mask, k_quant, v_quant, hot_seqlens, quant_seqlens, k_quant_format, v_quant_format,
        k_quant_scale, v_quant_scale, kv_layout, mask_slopes, cu_seqlens_q, max_q_len, softmax_scale, window, softcap,
        alibi_slopes, sinks, by_segment, out, lse, return_lse, workspace, stream,
    )  # fmt: skip
    return result


# What append_kv calls the arguments of spill_kv.
_OF_APPEND = {"k_cache": "k_quant", "v_cache": "v_quant", "k": "k_hot", "v": "v_hot"}


def spill_kv(
    k_hot: SupportsDLPack,
    v_hot: SupportsDLPack,
    k_quant: SupportsDLPack,
    v_quant: SupportsDLPack,
    positions: SupportsDLPack,
    *,
    kv_layout: KvLayout = "NHD",
    k_quant_scale: SupportsDLPack | None = None,
    v_quant_scale: SupportsDLPack | None = None,
    k_quant_format: CacheFormat | None = "q8_0",
    v_quant_format: CacheFormat | None = "q8_0",
    stream: StreamLike | None = None,
) -> None:
    """Copies tokens of the hot part of a cache to its quantised part, quantising, all on the device.

    Which tokens go where is read on the device, so a captured graph can be replayed with others; lengths of the two
    parts are the caller's to move with the tokens. The copies stay in the hot part until something else is written
    there. It is one call of :func:`flashport.append_kv` over the slots of the hot part.

    Args:
        k_hot: (B, S, Hkv, D) or (pages, page_size, Hkv, D), or a token pool (slots, Hkv, D); fp16, bf16 or fp32; an
            array of torch, NumPy or CuPy, of which slots follow each other in memory at one stride, else it is copied.
        v_hot: As ``k_hot``, with DV in place of D.
        k_quant, v_quant: The quantised part, as the caches of :func:`flashport.append_kv`, of any layout; written.
        positions: (B * S), (pages * page_size) or (slots) int32 or int64: for each slot of the hot part the slot of the
            quantised part that its token is copied to; -1 copies nothing.
        kv_layout: "NHD" or "HND", of both parts; a hot part in "HND" order is copied first.
        k_quant_scale, v_quant_scale, k_quant_format, v_quant_format: As of :func:`flashport.append_kv`.
        stream: As there.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flashport.append_kv`; nothing has been
            written.

    Source:
        common/host/kv/append_kv.cpp and common/device/kv/append_kernel.h.
    """
    k, v = _slots("k_hot", k_hot, kv_layout), _slots("v_hot", v_hot, kv_layout)
    try:
        decode.append_kv(
            k, v, k_quant, v_quant, positions, kv_layout=kv_layout, k_scale=k_quant_scale, v_scale=v_quant_scale,
            k_format=k_quant_format, v_format=v_quant_format, stream=stream,
        )  # fmt: skip
    except REFUSALS as error:
        names = {**_OF_APPEND, **{f"{side}_{x}": f"{side}_quant_{x}" for side in "kv" for x in ("scale", "format")}}
        raise reworded(error, "spill_kv: ", names) from None


def _slots(name: str, cache: Any, kv_layout: KvLayout) -> Any:
    """The slots of a cache on one axis."""
    if rank(cache) == 3:
        return cache
    if rank(cache) != 4:
        raise ValueError(
            f"spill_kv: {name} must have 3 dimensions (slots, num_kv_heads, head_dim) or 4 (pages or batch, page_size "
            f"or length, num_kv_heads, head_dim), got {rank(cache)}"
        )
    if kv_layout == "HND":
        cache = cache.swapaxes(1, 2)
    return cache.reshape(-1, *cache.shape[2:])
