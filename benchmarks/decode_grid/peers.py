"""The peers of the grid, each on the data that it likes best: pages for FlashInfer, contiguous keys for all others.

A maker takes the inputs of a shape and gives a call, which is captured in a graph, and its output as ours is. What a
peer plans on the host it plans here, outside of what is timed. A peer that is not installed has no column; one that
refuses a shape raises, and the row says why.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from decode_grid.inputs import Inputs
from decode_grid.shapes import Shape

_WORKSPACE = 1 << 29  # bytes of FlashInfer's partial results


class Candidate(NamedTuple):
    """A peer's call on some inputs."""

    call: Callable[[], Any]
    output: Callable[[Any], Any]  # what the call returned, as [B, q_len, Hq, D]


Maker = Callable[[Inputs], Candidate]


def peers_of(shape: Shape, device: str) -> dict[str, Maker]:
    """The installed peers that might serve a shape of the grid; rows beside the grid have none."""
    if not shape.in_grid:
        return {}
    if device == "cpu":
        return {} if shape.ragged else {"torch SDPA": lambda x: _sdpa(x, None)}
    found: dict[str, tuple[str, Maker]] = {}
    if shape.ragged:
        found["flash varlen"] = ("torch", _flash_varlen)
    else:
        found["SDPA cuDNN"] = ("torch", _sdpa_cudnn)
        found["SDPA flash"] = ("torch", _sdpa_flash)
        found["FlashAttention 2"] = ("flash_attn", lambda x: _with_kvcache(x, "flash_attn"))
        found["FlashAttention 3"] = ("flash_attn_interface", lambda x: _with_kvcache(x, "flash_attn_interface"))
    if shape.q_len == 1 and shape.group in (1, 2, 3, 4, 6, 8, 16):  # what its decode kernel is compiled for
        found["FlashInfer"] = ("flashinfer", lambda x: _flashinfer_decode(x, tensor_cores=False))
    found["FlashInfer TC"] = ("flashinfer", lambda x: _flashinfer_decode(x, tensor_cores=True))
    if shape.q_len > 1 or shape.group > 16:
        found["FlashInfer prefill"] = ("flashinfer", _flashinfer_prefill)
    return {name: make for name, (package, make) in found.items() if importlib.util.find_spec(package)}


@functools.cache
def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except Exception as error:  # a broken package is tried once, not for every shape
        return error


def _load(package: str) -> Any:
    found = _import(package)
    if isinstance(found, Exception):
        raise found
    return found


def _heads_first(out: Any) -> Any:
    return out.transpose(1, 2)


def _sdpa_cudnn(x: Inputs) -> Candidate:
    from torch.nn.attention import SDPBackend

    return _sdpa(x, SDPBackend.CUDNN_ATTENTION)


def _sdpa(x: Inputs, backend: Any) -> Candidate:
    """By a mask where there are several new tokens: the causal mask of torch's function is aligned to the first key."""
    from torch.nn.attention import sdpa_kernel

    torch, q = x.torch, x.q.transpose(1, 2).contiguous()
    k, v = x.contiguous(x.k_cache), x.contiguous(x.v_cache)
    mask, (q_len, length) = None, (x.shape.q_len, x.shape.lens[0])
    if q_len > 1:
        seen = torch.ones(q_len, length, dtype=torch.bool, device=x.device).tril(length - q_len)
        mask = torch.zeros(1, 1, q_len, length, dtype=q.dtype, device=x.device).masked_fill(~seen, float("-inf"))

    def call() -> Any:
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return Candidate(call, _heads_first)


def _sdpa_flash(x: Inputs) -> Candidate:
    """By torch's operator below scaled_dot_product_attention, whose causal mask is aligned to the last key."""
    q = x.q.transpose(1, 2).contiguous()
    k, v = x.contiguous(x.k_cache), x.contiguous(x.v_cache)
    attend, causal = x.torch.ops.aten._scaled_dot_product_flash_attention, x.shape.q_len > 1
    return Candidate(lambda: attend(q, k, v, 0.0, causal, False)[0], _heads_first)


def _with_kvcache(x: Inputs, package: str) -> Candidate:
    attend = _load(package).flash_attn_with_kvcache
    k, v = (x.contiguous(cache).transpose(1, 2).contiguous() for cache in (x.k_cache, x.v_cache))
    return Candidate(lambda: attend(x.q, k, v, cache_seqlens=x.lens, causal=True), lambda out: out)


def _flash_varlen(x: Inputs) -> Candidate:
    """On the rows of all requests one after another. cuDNN has no such form that torch lets users call."""
    torch, shape = x.torch, x.shape
    q, k, v = x.q.flatten(0, 1), x.packed(x.k_cache), x.packed(x.v_cache)
    bounds = torch.nn.functional.pad(x.lens.cumsum(0), (1, 0)).int()
    lengths = (_bounds(x, shape.q_len), bounds, shape.q_len, max(shape.lens))
    attend, causal = torch.ops.aten._flash_attention_forward, shape.q_len > 1
    return Candidate(
        lambda: attend(q, k, v, *lengths, 0.0, causal, False)[0], lambda out: out.unflatten(0, (-1, shape.q_len))
    )


def _bounds(x: Inputs, step: int) -> Any:
    return x.torch.arange(len(x.shape.lens) + 1, dtype=x.torch.int32, device=x.device) * step


@functools.cache
def _workspace(torch: Any, device: str) -> Any:
    """Shared by all shapes, one after another; zero before the first use, as FlashInfer asks."""
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


def _page_list(x: Inputs) -> tuple[Any, Any, Any]:
    """Bounds of each request in the list of pages, that list, and the tokens in each request's last page."""
    torch, page = x.torch, x.shape.page
    counts = torch.tensor([0, *x.pages_of], dtype=torch.int32, device=x.device)
    return counts.cumsum(0).int(), x.indices, ((x.lens - 1) % page + 1).int()


def _flashinfer_decode(x: Inputs, tensor_cores: bool) -> Candidate:
    """Its decode wrapper, planned for graphs."""
    flashinfer = _load("flashinfer")
    shape, pages = x.shape, _page_list(x)
    buffers = [tensor.clone() for tensor in pages]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(x.torch, x.device), "NHD", True, tensor_cores, *buffers
    )
    several = {"q_len_per_req": shape.q_len} if shape.q_len > 1 else {}
    wrapper.plan(
        *pages, shape.heads, shape.kv_heads, shape.head_dim, shape.page, q_data_type=x.q.dtype,
        kv_data_type=x.k_cache.dtype, **several,
    )  # fmt: skip
    return _run(x, wrapper)


def _flashinfer_prefill(x: Inputs) -> Candidate:
    """Its prefill wrapper, planned for graphs; on Hopper by its FlashAttention-3 kernels."""
    flashinfer = _load("flashinfer")
    shape, pages = x.shape, _page_list(x)
    bounds_q = _bounds(x, shape.q_len)
    buffers = [tensor.clone() for tensor in (bounds_q, *pages)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(x.torch, x.device), "NHD", True, *buffers)
    wrapper.plan(
        bounds_q, *pages, shape.heads, shape.kv_heads, shape.head_dim, shape.page, causal=True, q_data_type=x.q.dtype,
        kv_data_type=x.k_cache.dtype,
    )  # fmt: skip
    return _run(x, wrapper)


def _run(x: Inputs, wrapper: Any) -> Candidate:
    q, out = x.q.flatten(0, 1), x.torch.empty_like(x.q)
    rows, caches = out.flatten(0, 1), (x.k_cache, x.v_cache)
    return Candidate(lambda: wrapper.run(q, caches, out=rows), lambda _: out)
