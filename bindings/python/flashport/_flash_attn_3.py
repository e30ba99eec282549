"""What :mod:`flashport.flash_attn_3` does in a call, with FlashAttention-3's checks in its words."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashport.flash_attn import _cache
from flashport.flash_attn import _checks as checks
from flashport.flash_attn import _kernels as kernels
from flashport.flash_attn.layers.rotary import positions, rotated

MAX_SPLITS = 256
FP8 = torch.float8_e4m3fn
TYPES = (*checks.TYPES, FP8)
_Q = "batch_size, seqlen_q, num_heads, head_size"


class NewKeys(NamedTuple):
    """New keys and values, [B, S, Hkv, D] or packed with ``cu_seqlens``, and how they are turned."""

    k: Any
    v: Any
    cu_seqlens: Any
    cos: Any
    sin: Any
    rotary_seqlens: Any
    interleaved: bool


def refuse_options(function: str, qv: Any, attention_chunk: int) -> None:
    """Options for which there are no kernels, by name."""
    if qv is not None:
        raise NotImplementedError(f"{function}: qv must be None, as no kernel has a second product of queries (MLA)")
    if attention_chunk != 0:
        raise NotImplementedError(f"{function}: attention_chunk must be 0, as no kernel has it, got {attention_chunk}")


def attend(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    num_splits: int,
    sinks: Any,
    return_lse: bool,
    descales: tuple[Any, Any, Any],
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
) -> tuple[Any, Any]:
    """(out, lse or None) of a dense batch, or of packed sequences."""
    packed = cu_seqlens_q is not None
    softmax_scale, causal, softcap, num_splits = _numbers(function, softmax_scale, causal, softcap, num_splits)
    max_seqlen_q = _optional_int(function, "max_seqlen_q", max_seqlen_q)
    max_seqlen_k = _optional_int(function, "max_seqlen_k", max_seqlen_k)
    q, k, v = kernels.unit_rows(q), kernels.unit_rows(k), kernels.unit_rows(v)
    offsets, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    form = checks.form_of(function, (q, k, v, *offsets), (*longest, num_splits))
    checks.check_once(form, _check_call, function, q, k, v, offsets, longest, num_splits)
    if packed:
        batch, q_len, kv_len = len(cu_seqlens_q) - 1, max_seqlen_q or 0, max_seqlen_k or 0
    else:
        batch = q.shape[0]
    scales = _scales(function, q, descales, batch, k.shape[-2])
    options = _options(function, q, softmax_scale, softcap, sinks, return_lse)
    window = _window(function, window_size, causal)
    if packed:
        for name, x in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
            if x is not None:
                checks.check_integers(function, q, name, x, (batch,), "batch_size")
        options.update({"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k})
        options.update({"max_seqlen_q": q_len, "max_seqlen_k": kv_len})
        return kernels.attend(function, q, k, v, window, seqused_q=seqused_q, seqused_k=seqused_k, **options, **scales)
    if q.dtype != FP8 and k.shape[1] > 0 and kernels.decodes(q.shape[1], q.shape[2], k.shape[2]):
        seqlens = torch.full((batch,), k.shape[1], dtype=torch.int32, device=q.device)
        splits = num_splits if num_splits > 1 else None
        return kernels.decode(function, q, k, v, seqlens, window, q.shape[1], num_splits=splits, **options)
    return kernels.attend(function, q, k, v, window, **options, **scales)


def batch_of(function: str, q: Any, cu_seqlens_q: Any) -> int:
    """The sequences of a call; a symbol where torch compiles for any number of them."""
    if cu_seqlens_q is not None:
        return _sequences(function, "cu_seqlens_q", cu_seqlens_q)
    checks.check_rank(function, "q", q, _Q)
    batch: int = q.shape[0]
    return batch


def _sequences(function: str, name: str, offsets: Any) -> int:
    """Those of packed tensors."""
    checks.check_rank(function, name, offsets, "batch_size + 1")
    batch: int = max(0, offsets.shape[0] - 1)
    return batch


def attend_cache(
    function: str,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    new: NewKeys,
    batch: int,
    seqlens: Any,
    batch_idx: Any,
    leftpad: Any,
    page_table: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    num_splits: int,
    sinks: Any,
    return_lse: bool,
    descales: tuple[Any, Any, Any],
) -> tuple[Any, Any]:
    """(out, lse or None). Nothing is written before all is checked."""
    packed, paged = cu_seqlens_q is not None, page_table is not None
    softmax_scale, causal, softcap, num_splits = _numbers(function, softmax_scale, causal, softcap, num_splits)
    max_seqlen_q = _optional_int(function, "max_seqlen_q", max_seqlen_q)
    q = kernels.unit_rows(q)
    page_table, batch_idx = kernels.unit_rows(page_table), kernels.unit_rows(batch_idx)
    places = (seqlens, batch_idx, leftpad, page_table, cu_seqlens_q)
    tensors = (q, k_cache, v_cache, new.k, new.v, new.cu_seqlens, new.cos, new.sin, new.rotary_seqlens, *places)
    form = checks.form_of(function, tensors, (batch, max_seqlen_q, num_splits))
    checks.check_once(form, _check_cache, function, q, k_cache, v_cache, new, batch, places, max_seqlen_q, num_splits)
    q_len = max_seqlen_q or 0 if packed else q.shape[1]
    kv_len = k_cache.shape[1] * (page_table.shape[1] if paged else 1)
    added = None if new.k is None else new.k.shape[1] if new.cu_seqlens is None else new.cu_seqlens.diff()
    if batch > 0 and checks.reads_contents(q):
        _cache.check_contents(function, seqlens, added, kv_len, k_cache, batch_idx, leftpad, page_table, "page_table")

    scales = _scales(function, q, descales, batch, k_cache.shape[2])
    window = _seen(_window(function, window_size, causal), kv_len, q_len)
    table = page_table if batch_idx is None else batch_idx[:, None]  # a sequence of the cache is a page
    options = _options(function, q, softmax_scale, softcap, sinks, return_lse)
    options.update({"block_table": table, "cu_seqlens_q": cu_seqlens_q})
    few = q.dtype != FP8 and leftpad is None and kernels.decodes(q_len, q.shape[-2], k_cache.shape[2])
    if few and packed and new.k is None and kv_len > 0:
        if table is None:
            options["block_table"] = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
        if seqlens is None:
            seqlens = torch.full((batch,), kv_len, dtype=torch.int32, device=q.device)
        options.update({"num_splits": num_splits if num_splits > 1 else None, "max_q_len": q_len})
        return kernels.decode(function, q, k_cache, v_cache, seqlens, window, q_len, **options)
    if new.k is not None:
        q, appended = _appended(q, new, seqlens, cu_seqlens_q, masked=window != (-1, -1))
        options.update(appended)
    options.update({"seqused_k": seqlens, "leftpad_k": leftpad, "max_seqlen_q": q_len if packed else None})
    return kernels.attend(function, q, k_cache, v_cache, window, **options, **scales)


def _check_call(
    function: str, q: Any, k: Any, v: Any, offsets: tuple[Any, Any], longest: tuple[Any, Any],
    num_splits: int,
) -> None:  # fmt: skip
    """What the form of a call of :func:`attend` says."""
    packed = offsets[0] is not None
    heads = "num_heads, head_size"
    q_words = f"total_q, {heads}" if packed else f"batch_size, seqlen_q, {heads}"
    k_words = "total_k, num_heads_k, head_size" if packed else "batch_size_k, seqlen_k, num_heads_k, head_size"
    _check_tensors(function, q, k, v, q_words, k_words)
    if packed:
        batch, _ = _check_offsets(function, q, "cu_seqlens_q", offsets[0], longest[0])
        batch_k, _ = _check_offsets(function, q, "cu_seqlens_k", offsets[1], longest[1])
    else:
        batch, batch_k = q.shape[0], k.shape[0]
    if batch != batch_k:
        raise checks.FlashAttnError(f"{function}: batch_size must be equal to batch_size_k, got {batch} and {batch_k}")
    _check_sizes(function, q, k, v, k_words)
    checks.check_splits(function, num_splits, MAX_SPLITS)


def _check_cache(
    function: str, q: Any, k_cache: Any, v_cache: Any, new: NewKeys, batch: int, places: tuple[Any, ...],
    max_seqlen_q: int | None, num_splits: int,
) -> None:  # fmt: skip
    """What the form of a call of :func:`attend_cache` says."""
    seqlens, batch_idx, leftpad, page_table, cu_seqlens_q = places
    packed, paged = cu_seqlens_q is not None, page_table is not None
    q_words = "total_q, num_heads, head_size" if packed else _Q
    rows = "num_pages, page_size" if paged else "batch_size_k, seqlen_k"
    words = f"{rows}, num_heads_k, head_size"
    _check_tensors(function, q, k_cache, v_cache, q_words, words, ("k_cache: k", "v_cache: v"))
    if packed:
        batch, q_len = _check_offsets(function, q, "cu_seqlens_q", cu_seqlens_q, max_seqlen_q)
    else:
        q_len = q.shape[1]
    _check_sizes(function, q, k_cache, v_cache, words, ("k_cache: k", "v_cache: v"))
    checks.check_splits(function, num_splits, MAX_SPLITS)
    kv_len = k_cache.shape[1]
    if paged:
        if batch_idx is not None or leftpad is not None:
            name = "cache_leftpad" if batch_idx is None else "cache_batch_idx"
            raise checks.FlashAttnError(f"{function}: {name} must be None with a page_table; pass one of them")
        words = "batch_size_k, max_num_pages_per_seq"
        checks.check_block_table(function, q, page_table, batch, "page_table", words)
        kv_len *= page_table.shape[1]
    elif batch_idx is None and k_cache.shape[0] != batch:
        raise checks.FlashAttnError(
            f"{function}: batch_size must be equal to batch_size_k, got {batch} and {k_cache.shape[0]}"
        )
    for name, x, dtype in (
        ("cache_seqlens: seqused_k", seqlens, "int32"),
        ("cache_leftpad: leftpad_k", leftpad, "int32"),
        ("cache_batch_idx: kv_batch_idx", batch_idx, "int32"),
        ("rotary_seqlens: seqlens_rotary", new.rotary_seqlens, "torch.int32"),
    ):
        if x is not None:
            checks.check_integers(function, q, name, x, (batch,), "batch_size", dtype)
    _check_new(function, q, k_cache, v_cache, new, batch, seqlens, q_len, kv_len, paged)


def _appended(q: Any, new: NewKeys, seqlens: Any, cu_seqlens_q: Any, masked: bool) -> tuple[Any, dict[str, Any]]:
    """The queries, and the arguments of :func:`flashport.attention` for the new keys."""
    k, v, cos = new.k, new.v, new.cos
    if cos is not None and (new.rotary_seqlens is not None or q.dtype == FP8):  # which it does not turn
        first = seqlens if new.rotary_seqlens is None else new.rotary_seqlens
        q_rows = positions(q, first, cu_seqlens_q) if masked else _first_positions(q, first, cu_seqlens_q)
        q = rotated(q, cos, new.sin, new.interleaved, q_rows)
        k = rotated(k, cos, new.sin, new.interleaved, positions(k, first, new.cu_seqlens))
        cos = None
    if q.dtype == FP8:  # which fp16 has exactly
        k, v = k.half(), v.half()
    options = {"k_new": k, "v_new": v, "cu_seqlens_k_new": new.cu_seqlens}
    if cos is not None:
        options.update({"rotary_cos": cos, "rotary_sin": new.sin, "rotary_interleaved": new.interleaved})
    return q, options


def _scales(function: str, q: Any, descales: tuple[Any, Any, Any], batch: int, kv_heads: int) -> dict[str, Any]:
    """What stored fp8 is multiplied by; other types have no factors, and do not look at them."""
    if q.dtype != FP8:
        return {}
    for side, descale in zip("qkv", descales, strict=True):
        if descale is not None:
            checks.check_device(function, q, f"{side}_descale", descale)
            checks.check_shape(function, f"{side}_descale", descale, (batch, kv_heads), "batch_size, num_heads_k")
    return {f"{side}_scale": descale for side, descale in zip("qkv", descales, strict=True)}


def _options(
    function: str, q: Any, softmax_scale: float | None, softcap: float, sinks: Any, return_lse: bool
) -> dict[str, Any]:
    """What both operations call alike."""
    if sinks is not None and not isinstance(sinks, torch.Tensor):
        raise checks.not_a_tensor(function, "sinks", sinks)
    return {
        "softmax_scale": q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        "softcap": max(softcap, 0.0), "sinks": None if sinks is None else sinks.float(), "return_lse": return_lse,
    }  # fmt: skip


def _numbers(
    function: str, softmax_scale: Any, causal: Any, softcap: Any, num_splits: Any
) -> tuple[float | None, bool, float, int]:
    """As torch's dispatcher gives them to FlashAttention-3's operator, or refuses them."""
    if softmax_scale is not None:
        softmax_scale = checks.to_float(function, "softmax_scale", softmax_scale)
    return (
        softmax_scale,
        checks.to_bool(function, "causal", causal),
        checks.to_float(function, "softcap", softcap),
        checks.to_int(function, "num_splits", num_splits),
    )


def _optional_int(function: str, name: str, x: Any) -> int | None:
    return None if x is None else checks.to_int(function, name, x)


def _window(function: str, window_size: Any, causal: bool) -> tuple[int, int]:
    """-1 is no limit; causality is a right side of 0."""
    left, right = (max(-1, side) for side in checks.window_of(function, window_size))
    return left, 0 if causal else right


def _seen(window: tuple[int, int], kv_len: int, q_len: int) -> tuple[int, int]:
    """The same window, without sides that hide nothing."""
    left, right = window
    return left if left < kv_len - 1 else -1, right if right == 0 or right < q_len - 1 else -1


def _first_positions(q: Any, first: Any, cu_seqlens_q: Any) -> Any:
    """The position of each row of q where all queries of a sequence stand at its first new key."""
    if cu_seqlens_q is None:
        return first[:, None]
    rows = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), rows, right=True).clamp(max=len(first) - 1)
    return first[sequence]


def _check_tensors(
    function: str, q: Any, k: Any, v: Any, q_words: str, k_words: str, names: tuple[str, str] = ("k", "v")
) -> None:
    checks.check_rank(function, "q", q, q_words)
    checks.check_rank(function, names[0], k, k_words)
    checks.check_rank(function, names[1], v, f"{k_words}_v")
    checks.check_tensors(
        function, q, (names[0], k, "query and key must have the same dtype"),
        (names[1], v, "query and value must have the same dtype"), types=TYPES,
    )  # fmt: skip


def _check_offsets(function: str, q: Any, name: str, offsets: Any, longest: int | None) -> tuple[int, int]:
    """How many sequences cu_seqlens has, and the tokens of the longest one, which the caller says."""
    batch = _sequences(function, name, offsets)
    checks.check_integers(function, q, name, offsets, (batch + 1,), "batch_size + 1", "torch.int32")
    maximum = f"max_seqlen_{name[-1]}"
    if longest is None:
        raise checks.FlashAttnError(f"{function}: {maximum} must be provided if {name} is provided")
    return batch, longest


def _check_sizes(function: str, q: Any, k: Any, v: Any, words: str, names: tuple[str, str] = ("k", "v")) -> None:
    """Heads and head dims; v may have another one."""
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    checks.check_heads(function, q.shape[-2], k.shape[-2], max(head_dim, head_dim_v))
    checks.check_shape(function, names[0], k, (*k.shape[:-1], head_dim), words)
    checks.check_shape(function, names[1], v, (*k.shape[:-1], head_dim_v), f"{words}_v")
    for name, size in (("head_size", head_dim), ("head_size_v", head_dim_v)):
        if size % 8 != 0:
            raise checks.FlashAttnError(f"{function}: {name} should be a multiple of 8, got {size}")


def _check_new(
    function: str, q: Any, k_cache: Any, v_cache: Any, new: NewKeys, batch: int, seqlens: Any, q_len: int, kv_len: int,
    paged: bool,
) -> None:  # fmt: skip
    """New keys and values, and what they need."""
    if new.cos is not None:  # without pages FlashAttention-3 takes tables that are shorter than the cache
        checks.check_rotary(function, q, new.k, new.cos, new.sin, kv_len if paged else 0)
    if new.k is None:
        return
    if new.v is None:
        raise checks.FlashAttnError(f"{function}: If k_new is supplied, v_new must also be passed in")
    if seqlens is None:
        raise checks.FlashAttnError(f"{function}: If k_new is supplied, seqlens_k must also be passed in")
    if q_len > kv_len:
        raise checks.FlashAttnError(
            f"{function}: If k_new is supplied, it must have seqlen <= the seqlen of the KV cache, got {q_len} and "
            f"{kv_len}"
        )
    if new.cu_seqlens is not None:
        name, shape = "cu_seqlens_k_new", (batch + 1,)
        checks.check_integers(function, q, name, new.cu_seqlens, shape, "batch_size + 1", "torch.int32")
    words = "batch_size, seqlen_k_new" if new.cu_seqlens is None else "total_k_new"
    words += ", num_heads_k, head_size"
    checks.check_rank(function, "k_new", new.k, words)
    checks.check_rank(function, "v_new", new.v, f"{words}_v")
    tokens = (batch, new.k.shape[1]) if new.cu_seqlens is None else new.k.shape[:1]
    for name, x, cache, last in (("k_new", new.k, k_cache, ""), ("v_new", new.v, v_cache, "_v")):
        if x.dtype != q.dtype:
            raise checks.FlashAttnError(
                f"{function}: {name} must have the same dtype as query, got {x.dtype} and {q.dtype}"
            )
        checks.check_device(function, q, name, x)
        checks.check_shape(function, name, x, (*tokens, *cache.shape[2:]), words + last)
