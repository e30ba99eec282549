"""Benchmark cases of decode: the bench tier of the case list, beside torch's own attention.

Page tables are random permutations.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flashport import _core, decode, devices
from flashport.benchmarks import harness
from flashport.testing import numerics
from flashport.testing.cases import DecodeCase, load_cases, make_data

STAGE2 = "stage2_64x8192_d128_b128"  # the second stage alone, beside the case list
STAGE2_TITLE = "stage 2 alone, 64 x 8192 in blocks of 128, 32, 128, fp32 to bf16"


def cases(match: str = "") -> list[DecodeCase]:
    """The bench tier; ``match`` selects by name or title."""
    return [case for case in load_cases("bench") if match in case.name or match in case.title]


def run_case(case: DecodeCase, device: str, target: str, rounds: int = 9, largest: float = math.inf) -> harness.Row:
    """Times one case of the list on a device; ``largest`` limits its bytes."""
    row = harness.Row(case.name, case.title, case.kv_bytes)
    support = devices.supports("decode", target=target, **case.query)
    if not support:
        row.skipped = support.reason
    elif case.kv_bytes > largest:
        row.skipped = harness.too_large(case.kv_bytes)
    if row.skipped:
        return row
    row.kernel = devices.which_kernel("decode", target=target, **case.query)
    torch = harness.find_torch(device)
    ours, peers = _candidates_torch(torch, case, device) if torch else _candidates_plain(case, device)
    harness.measure(row, torch, device, ours, peers, rounds)
    return row


def run_stage2(device: str, target: str, rounds: int = 9) -> harness.Row:
    """Times stage 2 alone at 64 requests of 8k in blocks of 128, 32 heads of 128."""
    batch, heads, blocks, head_dim, block_seq = 64, 32, 64, 128, 128
    count = batch * heads * blocks * (head_dim + 1) * 4
    row = harness.Row(STAGE2, STAGE2_TITLE, count)
    row.kernel = devices.which_kernel("decode_stage2", target=target)
    torch = harness.find_torch(device)
    if torch:
        mid = torch.randn(batch, heads, blocks, head_dim, device=harness.torch_device(device))
        mid_lse = torch.randn(batch, heads, blocks, device=harness.torch_device(device))
        lens = torch.full((batch,), blocks * block_seq, dtype=torch.int32, device=harness.torch_device(device))
        out = torch.empty(batch, heads, head_dim, dtype=torch.bfloat16, device=harness.torch_device(device))
    else:
        rng = np.random.default_rng(0)
        mid = harness.on(rng.standard_normal((batch, heads, blocks, head_dim), np.float32), device)
        mid_lse = harness.on(rng.standard_normal((batch, heads, blocks), np.float32), device)
        lens = harness.on(np.full(batch, blocks * block_seq, np.int32), device)
        out = _core.DeviceArray((batch, heads, head_dim), "bfloat16", device)
    harness.measure(
        row, torch, device, lambda: decode.flash_decode_stage2(mid, mid_lse, lens, out, block_seq), {}, rounds
    )
    return row


def _candidates_plain(case: DecodeCase, device: str) -> tuple[harness.Call, dict[str, harness.Call]]:
    data = make_data(case, check=False)
    arguments = data.on(device)
    out = _core.DeviceArray(data.out_shape, numerics.DTYPE[case.q], device)
    return (lambda: decode.flash_decode(**arguments, out=out)), {}


def _candidates_torch(torch: Any, case: DecodeCase, device: str) -> tuple[harness.Call, dict[str, harness.Call]]:
    """Our call on random data made on the device, and torch's own kernels on contiguous keys and values."""
    where = harness.torch_device(device)
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[case.q]
    batch = len(case.lens)
    q = torch.randn(batch, case.hq, case.dk, device=where).to(dtype)
    lens = torch.tensor(case.lens, dtype=torch.int32, device=where)
    page = case.page or (1 if case.layout == "token" else max(case.lens))
    counts = [-(-length // page) for length in case.lens]
    shape = (sum(counts), page, case.hkv)
    k_cache = harness.random_tensor(torch, (*shape, case.dk), case.k_format, where)
    v_cache = harness.random_tensor(torch, (*shape, case.dv), case.v_format, where)
    arguments: dict[str, Any] = {"k_format": case.k_format, "v_format": case.v_format}
    if case.layout != "nhd":
        pages = torch.randperm(sum(counts), device=where, dtype=torch.int32)
        table = torch.zeros(batch, max(counts), dtype=torch.int32, device=where)
        for b, own in enumerate(torch.split(pages, counts)):
            table[b, : counts[b]] = own
        arguments["token_table" if case.layout == "token" else "block_table"] = table
    if case.layout == "token":
        k_cache, v_cache = k_cache.squeeze(1), v_cache.squeeze(1)
    out = torch.empty(batch, case.hq, case.dv, dtype=dtype, device=where)

    def ours() -> None:
        decode.flash_decode(q, k_cache, v_cache, lens, out=out, **arguments)

    peers: dict[str, harness.Call] = {}
    if len(set(case.lens)) == 1 and case.k_format == case.v_format == case.q and case.dk == case.dv:
        peers = _sdpa_peers(torch, case, q, where)
    return ours, peers


def _sdpa_peers(torch: Any, case: DecodeCase, q: Any, where: str) -> dict[str, harness.Call]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, length = len(case.lens), case.lens[0]
    query = q.unsqueeze(2)
    k = harness.random_tensor(torch, (batch, case.hkv, length, case.dk), case.k_format, where)
    v = harness.random_tensor(torch, (batch, case.hkv, length, case.dv), case.v_format, where)
    attend = torch.nn.functional.scaled_dot_product_attention
    if where == "cpu":
        return {"torch SDPA": lambda: attend(query, k, v, enable_gqa=True)}
    peers = {}
    for name, backend in (("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION), ("SDPA flash", SDPBackend.FLASH_ATTENTION)):

        def peer(backend: Any = backend) -> None:
            with sdpa_kernel(backend):
                attend(query, k, v, enable_gqa=True)

        try:
            peer()
        except RuntimeError:  # this build or card does not have it
            continue
        peers[name] = peer
    return peers
