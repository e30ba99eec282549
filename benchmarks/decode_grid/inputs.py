"""Inputs of one shape on a device, and the reference that every result is held against.

Keys and values are random and lie in pages in random order. Peers that read contiguous ones get copies of the same
rows, so one reference serves all.
"""

from __future__ import annotations

from typing import Any

from decode_grid.shapes import Shape
from flashport.benchmarks import harness

# Error over the norm of a row of the output: rounding to bf16 gives about 0.003, a leaf of 64 keys left out of 8k 0.09.
TOLERANCE = 0.01


class Inputs:
    """Tensors of one shape: q [B, q_len, Hq, D], caches [pages, page, Hkv, row], table [B, pages of the longest]."""

    def __init__(self, torch: Any, shape: Shape, device: str) -> None:
        where = harness.torch_device(device)
        self.torch, self.shape, self.device = torch, shape, where
        requests = len(shape.lens)
        self.q = harness.random_tensor(torch, (requests, shape.q_len, shape.heads, shape.head_dim), "bf16", where)
        self.lens = torch.tensor(shape.lens, dtype=torch.int32, device=where)
        self.pages_of = [-(-length // shape.page) for length in shape.lens]
        self.indices = torch.randperm(sum(self.pages_of), device=where).int()  # pages, request by request
        rows = (len(self.indices), shape.page, shape.kv_heads, shape.head_dim)
        self.k_cache, self.v_cache = (harness.random_tensor(torch, rows, shape.kv_format, where) for _ in range(2))
        self.table = torch.zeros(requests, max(self.pages_of), dtype=torch.int32, device=where)
        for row, own in zip(self.table, torch.split(self.indices, self.pages_of), strict=True):
            row[: len(own)] = own

    def slots(self, request: int) -> Any:
        """Where the tokens of a request lie in a cache, counted over its pages."""
        own = self.table[request, : self.pages_of[request]].long() * self.shape.page
        offsets = self.torch.arange(self.shape.page, device=self.device)
        return (own[:, None] + offsets).flatten()[: self.shape.lens[request]]

    def packed(self, cache: Any) -> Any:
        """The rows of all requests one after another, [total, Hkv, D]."""
        slots = self.torch.cat([self.slots(request) for request in range(len(self.shape.lens))])
        return cache.flatten(0, 1)[slots]

    def contiguous(self, cache: Any) -> Any:
        """The rows of requests of one length, [B, Hkv, S, D]."""
        rows = self.packed(cache).unflatten(0, (len(self.shape.lens), -1))
        return rows.transpose(1, 2).contiguous()


class Reference:
    """softmax(q k^T / sqrt(D)) v in fp64, of a few requests and kv heads."""

    def __init__(self, x: Inputs) -> None:
        shape, torch = x.shape, x.torch
        by_length = sorted(range(len(shape.lens)), key=lambda request: shape.lens[request])
        requests = dict.fromkeys((0, len(shape.lens) - 1, by_length[0], by_length[-1]))
        self.rows = []
        for request in requests:
            slots, length = x.slots(request), shape.lens[request]
            last = torch.arange(shape.q_len, device=x.device) + length - shape.q_len  # the last key that a token sees
            hidden = torch.arange(length, device=x.device) > last[:, None]
            for kv_head in dict.fromkeys((0, shape.kv_heads - 1)):
                heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
                k, v = (
                    _values(torch, _stored(torch, cache)[slots, kv_head], shape.kv_format)
                    for cache in (x.k_cache, x.v_cache)
                )
                q = x.q[request, :, heads].double().transpose(0, 1)  # [group, q_len, D]
                scores = (q @ k.mT * shape.head_dim**-0.5).masked_fill(hidden, float("-inf"))
                self.rows.append((request, heads, (scores.softmax(-1) @ v).transpose(0, 1)))

    def check(self, out: Any) -> None:
        """Raises ValueError where a row of out [B, q_len, Hq, D] is off."""
        for request, heads, expected in self.rows:
            found = out[request, :, heads].double()
            error = ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
            if not error <= TOLERANCE:  # nor NaN
                raise ValueError(
                    f"rows of request {request}, heads {heads.start} to {heads.stop - 1}, differ from the fp64 "
                    f"reference by up to {error:.2g} of their norm; at most {TOLERANCE} is rounding"
                )


def _stored(torch: Any, cache: Any) -> Any:
    """The rows of a cache, as bytes where elements are bytes: old torch takes no parts of fp8 arrays."""
    rows = cache.flatten(0, 1)
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def _values(torch: Any, rows: Any, fmt: str) -> Any:
    """Stored rows in fp64."""
    if fmt != "q8_0":
        return (rows.view(torch.float8_e4m3fn) if fmt == "fp8_e4m3" else rows).double()
    blocks = rows.unflatten(-1, (-1, 34))  # a scale in fp16, then 32 quants
    scales = blocks[..., :2].contiguous().view(torch.float16)
    return (scales.double() * blocks[..., 2:].contiguous().view(torch.int8).double()).flatten(-2)
