"""Drop-ins for LightLLM's decode attention, under its names and signatures.

``from flashport.lightllm import flash_decode_stage1, flash_decode_stage2`` in place of the two Triton modules, or the
wrappers above them. ``infer_state`` is duck-typed: batch_size, max_len_in_batch, req_manager.req_to_token_indexs,
b_req_idx and b_seq_len are read from it. Tensors may be of any library that speaks DLPack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from flashport import decode
from flashport.arrays import new_array
from flashport.decode import flash_decode_stage1
from flashport.typing import Array, CacheFormat, SupportsDLPack

__all__ = [
    "flash_decode_stage1",
    "flash_decode_stage2",
    "gqa_token_decode_attention_flash_decoding",
    "ppl_int4kv_token_decode_attention_flash_decoding",
    "ppl_int8kv_token_decode_attention_flash_decoding",
    "token_decode_attention_flash_decoding",
]

_BLOCK_SEQ = 256
_GQA_BLOCK_SEQ = 128


def flash_decode_stage2(
    mid_out: SupportsDLPack,
    mid_out_logexpsum: SupportsDLPack,
    B_Seqlen: SupportsDLPack,  # noqa: N803 - LightLLM's names
    O: SupportsDLPack | None = None,  # noqa: E741, N803
    block_seq: int | None = None,
    *,
    Out: SupportsDLPack | None = None,  # noqa: N803
) -> None:
    """:func:`flashport.flash_decode_stage2`, whose fourth argument is ``O`` in LightLLM; ``Out`` is taken as well.

    Args:
        mid_out, mid_out_logexpsum, B_Seqlen: As in :func:`flashport.flash_decode_stage2`.
        O: ``Out`` of that function; written.
        block_seq: Keys of a block, 1 or more; to be given.
        Out: In place of ``O``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flashport.flash_decode_stage2`; TypeError
            also where not exactly one of ``O`` and ``Out`` is given, or no ``block_seq``.

    Source:
        bindings/python/flashport/lightllm.py over that function; the signature is LightLLM's.
    """
    if (O is None) == (Out is None):
        raise TypeError("flash_decode_stage2: exactly one of O and Out must be given")
    if block_seq is None:
        raise TypeError("flash_decode_stage2: block_seq must be given")
    written: Any = Out if O is None else O
    decode.flash_decode_stage2(mid_out, mid_out_logexpsum, B_Seqlen, written, block_seq)


def token_decode_attention_flash_decoding(
    q: Array,
    infer_state: Any,
    q_head_num: int,
    head_dim: int,
    cache_k: SupportsDLPack,
    cache_v: SupportsDLPack,
    out: Array | None = None,
    alloc_tensor_func: Callable[..., Any] | None = None,
    *,
    k_scale: SupportsDLPack | None = None,
    v_scale: SupportsDLPack | None = None,
    k_format: CacheFormat | None = None,
    v_format: CacheFormat | None = None,
) -> Array:
    """Attention of one new token of each request over the token pool, in blocks of 256 keys.

    Runs the two stages; a length of 0 gives 0.

    Args:
        q: (batch, q_head_num, head_dim), or (batch, q_head_num * head_dim); fp16 or bf16, fp32 on the CPU; a tensor of
            torch, or an array of NumPy or CuPy.
        infer_state: LightLLM's state of the batch: batch_size and max_len_in_batch (tokens) are numbers,
            req_manager.req_to_token_indexs is (max_requests, max_len) int32, b_req_idx and b_seq_len are (batch) int32
            or int64.
        q_head_num: Query heads.
        head_dim: Head dim, a multiple of 8 from 16 to 512.
        cache_k: (slots, Hkv, head_dim), the type of ``q`` or quantised as in :func:`flashport.flash_decode`.
        cache_v: (slots, Hkv, head_dim), as ``cache_k``.
        out: As ``q``; written. Default: a new tensor.
        alloc_tensor_func: Called as ``alloc_tensor_func(shape, dtype=..., device=...)`` for what is allocated: ``out``
            and the fp32 results of the blocks. Default: the library that ``q`` comes from.
        k_scale, v_scale, k_format, v_format: Scales of ``cache_k`` and ``cache_v`` and what these store, as in
            :func:`flashport.flash_decode_stage1`.

    Returns:
        ``out``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As the two stages.

    Source:
        bindings/python/flashport/lightllm.py over :func:`flashport.flash_decode_stage1` and
        :func:`flashport.flash_decode_stage2`; the signature is LightLLM's, but for scales and formats.
    """
    stored = _Stored(cache_k, cache_v, k_scale, v_scale, k_format, v_format)
    return _token_decode(q, infer_state, q_head_num, head_dim, stored, out, alloc_tensor_func, _BLOCK_SEQ)


def gqa_token_decode_attention_flash_decoding(
    q: Array,
    infer_state: Any,
    q_head_num: int,
    head_dim: int,
    cache_k: SupportsDLPack,
    cache_v: SupportsDLPack,
    out: Array | None = None,
    alloc_tensor_func: Callable[..., Any] | None = None,
    *,
    k_scale: SupportsDLPack | None = None,
    v_scale: SupportsDLPack | None = None,
    k_format: CacheFormat | None = None,
    v_format: CacheFormat | None = None,
) -> Array:
    """As :func:`token_decode_attention_flash_decoding`, in blocks of 128 keys.

    Args:
        q, infer_state, q_head_num, head_dim, cache_k, cache_v, out, alloc_tensor_func, k_scale, v_scale, k_format,
        v_format: As there.

    Returns:
        ``out``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As there.

    Source:
        bindings/python/flashport/lightllm.py; the signature is LightLLM's, but for scales and formats.
    """
    stored = _Stored(cache_k, cache_v, k_scale, v_scale, k_format, v_format)
    return _token_decode(q, infer_state, q_head_num, head_dim, stored, out, alloc_tensor_func, _GQA_BLOCK_SEQ)


def ppl_int8kv_token_decode_attention_flash_decoding(
    q: Array,
    infer_state: Any,
    q_head_num: int,
    head_dim: int,
    cache_k: SupportsDLPack,
    cache_k_scale: SupportsDLPack,
    cache_v: SupportsDLPack,
    cache_v_scale: SupportsDLPack,
    out: Array | None = None,
    alloc_tensor_func: Callable[..., Any] | None = None,
) -> Array:
    """:func:`token_decode_attention_flash_decoding` over LightLLM's int8 cache (``ppl_int8kv``).

    In LightLLM the function has that name in a module ``ppl_int8kv_flash_decoding``.

    Args:
        q, infer_state, q_head_num, head_dim: As there.
        cache_k: (slots, Hkv, head_dim) int8.
        cache_k_scale: (slots, Hkv, head_dim / 8) fp16 or fp32: one for each 8 values. Those of a model in bf16 are to
            be converted.
        cache_v: As ``cache_k``.
        cache_v_scale: As ``cache_k_scale``.
        out, alloc_tensor_func: As there.

    Returns:
        ``out``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As there.

    Source:
        bindings/python/flashport/lightllm.py; the signature is LightLLM's.
    """
    stored = _Stored(cache_k, cache_v, cache_k_scale, cache_v_scale, "int8", "int8")
    return _token_decode(q, infer_state, q_head_num, head_dim, stored, out, alloc_tensor_func, _BLOCK_SEQ)


def ppl_int4kv_token_decode_attention_flash_decoding(
    q: Array,
    infer_state: Any,
    q_head_num: int,
    head_dim: int,
    cache_k: SupportsDLPack,
    cache_k_scale: SupportsDLPack,
    cache_v: SupportsDLPack,
    cache_v_scale: SupportsDLPack,
    out: Array | None = None,
    alloc_tensor_func: Callable[..., Any] | None = None,
) -> Array:
    """As :func:`ppl_int8kv_token_decode_attention_flash_decoding`, over LightLLM's int4 cache (``ppl_int4kv``).

    Args:
        q, infer_state, q_head_num, head_dim: As there.
        cache_k: (slots, Hkv, head_dim / 2) int8, two values in each, the first in the low bits.
        cache_k_scale: As there.
        cache_v: As ``cache_k``.
        cache_v_scale, out, alloc_tensor_func: As there.

    Returns:
        ``out``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As there.

    Source:
        bindings/python/flashport/lightllm.py; the signature is LightLLM's.
    """
    stored = _Stored(cache_k, cache_v, cache_k_scale, cache_v_scale, "int4", "int4")
    return _token_decode(q, infer_state, q_head_num, head_dim, stored, out, alloc_tensor_func, _BLOCK_SEQ)


class _Stored(NamedTuple):
    """The token pool."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    k_format: CacheFormat | None
    v_format: CacheFormat | None


def _token_decode(
    q: Any,
    infer_state: Any,
    q_head_num: int,
    head_dim: int,
    stored: _Stored,
    out: Any,
    alloc_tensor_func: Any,
    block_seq: int,
) -> Any:
    batch = infer_state.batch_size
    max_len = infer_state.max_len_in_batch
    shape = (batch, q_head_num, head_dim)
    blocks = max_len // block_seq + 1
    allocate = _allocator(q, alloc_tensor_func)
    out = allocate(q.shape) if out is None else out
    mid_out = allocate((batch, q_head_num, blocks, head_dim), "float32")
    mid_out_logsumexp = allocate((batch, q_head_num, blocks), "float32")
    flash_decode_stage1(
        q.reshape(shape),
        stored.k,
        stored.v,
        infer_state.req_manager.req_to_token_indexs,
        infer_state.b_req_idx,
        infer_state.b_seq_len,
        max_len,
        mid_out,
        mid_out_logsumexp,
        block_seq,
        k_scale=stored.k_scale,
        v_scale=stored.v_scale,
        k_format=stored.k_format,
        v_format=stored.v_format,
    )
    rows = out if tuple(out.shape) == shape else _view(out, shape)
    decode.flash_decode_stage2(mid_out, mid_out_logsumexp, infer_state.b_seq_len, rows, block_seq)
    return out


def _allocator(q: Any, alloc_tensor_func: Any) -> Callable[..., Any]:
    """What makes an array of a shape, like ``q`` and of its type or the one named."""
    roots = (base.__module__.partition(".")[0] for base in type(q).__mro__)
    name = next((root for root in roots if root in ("torch", "numpy", "cupy")), None)
    if name is None:
        raise TypeError(
            "token_decode_attention_flash_decoding: q must be a tensor of torch, or an array of NumPy or CuPy, got "
            f"{type(q).__name__}"
        )
    if alloc_tensor_func is None:
        return partial(new_array, "token_decode_attention_flash_decoding", "q", q)

    def allocate(shape: Any, dtype: str | None = None) -> Any:
        own = q.dtype if dtype is None else getattr(sys.modules[name], dtype)
        return alloc_tensor_func(shape, dtype=own, device=getattr(q, "device", None))  # NumPy 1 knows no device

    return allocate


def _view(out: Any, shape: tuple[int, ...]) -> Any:
    """``out`` in another shape, never a copy."""
    if hasattr(out, "is_cuda"):
        return out.view(shape)
    if not out.flags.c_contiguous:
        raise ValueError("token_decode_attention_flash_decoding: out must be contiguous to be taken as rows of heads")
    return out.reshape(shape)
