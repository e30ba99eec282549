"""The shipped correctness cases against the NumPy oracles, on one device: here every function of the decode family.

Needs nothing but NumPy, so the first owner of a card can run it: ``flashport selftest``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from flashport import _core, _quantize, decode, devices
from flashport.testing import blocks, numerics, oracle, selfcheck_attention, selfcheck_gated_delta
from flashport.testing.cases import DecodeCase, HostArray, load_cases, make_data, to_host
from flashport.testing.outcomes import CheckOf, Outcome, guarded, judge, poisoned


def checks(device: str, target: str, tiers: tuple[str, ...]) -> Iterator[CheckOf]:
    """All checks for a device, in order."""
    for case in load_cases(*tiers):
        yield guarded(case.name, partial(check_decode, case, device, target))
    for name, check in _COMPANIONS.items():
        yield guarded(name, partial(check, name, device, target))
    yield from selfcheck_gated_delta.checks(device, target, tiers)
    yield from selfcheck_attention.checks(device, target, tiers)


def check_decode(case: DecodeCase, device: str, target: str) -> Outcome:
    """flash_decode on one row of the case list, with the lse."""
    support = devices.supports("decode", target=target, **case.query)
    if not support:
        return Outcome(case.name, "unsupported", support.reason)
    kernel = devices.which_kernel("decode", target=target, **case.query)
    data = make_data(case)
    out_type = "fp32" if case.out == "fp32" else case.q
    out = poisoned(data.out_shape, out_type, device)
    lse = poisoned(data.out_shape[:-1], "fp32", device)
    decode.flash_decode(**data.on(device), out=out, lse=lse)
    math_type = case.q if case.k_format == case.q else "fp16"
    truth = [oracle.attend(request) for request in data.requests]
    plain = [oracle.attend(request, np.float32, math_type, out_type) for request in data.requests]
    return judge(
        case.name,
        kernel,
        *(
            oracle.compare(
                to_host(got, fmt),
                data.rows([one[part] for one in truth]),
                data.rows([one[part] for one in plain]),
                what,
            )
            for part, (what, got, fmt) in enumerate((("out", out, out_type), ("lse", lse, "fp32")))
        ),
    )


def check_stages(name: str, device: str, target: str) -> Outcome:
    """LightLLM's two stages over a token pool, blocks past a length holding NaN."""
    lens, heads, kv_heads, head_dim, block_seq = (1, 0, 130, 64, 300), 8, 2, 128, 64
    case = _case(name, lens, heads, kv_heads, head_dim, "token")
    data = make_data(case)
    arguments = data.on(device)
    blocks = -(-max(lens) // block_seq)
    mid_out = poisoned((len(lens), heads, blocks, head_dim), "fp32", device)
    mid_lse = poisoned((len(lens), heads, blocks), "fp32", device)
    out = poisoned(data.out_shape, "bf16", device)
    decode.flash_decode_stage1(
        arguments["q"], arguments["k_cache"], arguments["v_cache"], arguments["token_table"],
        arguments["request_index"], arguments["seqlens"], max(lens), mid_out, mid_lse, block_seq,
    )  # fmt: skip
    decode.flash_decode_stage2(mid_out, mid_lse, arguments["seqlens"], out, block_seq)
    return judge(name, devices.which_kernel("decode_stage2", target=target), _compare_out(data, out))


def check_invariance(name: str, device: str, target: str) -> Outcome:
    """A request's bits alone, in a batch, on one multiprocessor, and again."""
    lens = (700, 1, 2500, 64, 0, 1025)
    case = _case(name, lens, 8, 2, 128, "block_nhd")
    data = make_data(case)
    arguments = data.on(device)
    first = to_host(decode.flash_decode(**arguments), "bf16")
    kernel = devices.which_kernel("decode", group_size=4, target=target)
    for what, limit in (("repeated", 0), ("on one multiprocessor", 1), ("on seven multiprocessors", 7)):
        _core.set_multiprocessor_limit(limit)
        try:
            again = to_host(decode.flash_decode(**arguments), "bf16")
        finally:
            _core.set_multiprocessor_limit(0)
        if not np.array_equal(first, again):
            return Outcome(name, "failed", f"bits differ {what}", kernel)
    for b in range(len(lens)):
        alone = dict(arguments)
        for part in ("q", "block_table", "seqlens"):
            host = data.arguments[part]
            alone[part] = HostArray(host.bits[b : b + 1], host.dtype).on(device)
        if not np.array_equal(first[b], to_host(decode.flash_decode(**alone), "bf16")[0]):
            return Outcome(name, "failed", f"bits of request {b} differ alone", kernel)
    return judge(name, kernel, _compare_out(data, decode.flash_decode(**arguments)))


def check_append(name: str, device: str, target: str) -> Outcome:
    """append_kv into paged caches of both orders, for every format, with a skipped token."""
    rng = np.random.default_rng(5)
    tokens, heads, head_dim, pages, page = 9, 3, 64, 5, 4
    slots = rng.permutation(pages * page)[:tokens].astype(np.int64)
    slots[4] = -1
    kept = slots >= 0
    k, v = (rng.standard_normal((tokens, heads, head_dim), np.float32) for _ in range(2))
    kernel = devices.which_kernel("append", target=target)
    fp8 = "fp8_e4m3fnuz" if target == "gfx942" else "fp8_e4m3"
    for fmt in ("bf16", "fp16", fp8, *blocks.BYTES):
        for layout in ("NHD", "HND"):
            width = numerics.row_extent(head_dim, fmt)
            shape = (pages, page, heads, width) if layout == "NHD" else (pages, heads, page, width)
            before = np.zeros(shape, numerics.CARRIER[fmt])
            caches = [HostArray(before, numerics.DTYPE[fmt]).on(device) for _ in range(2)]
            source = "bf16" if fmt == "bf16" else "fp16"
            rows = [numerics.encode(values, source) for values in (k, v)]
            decode.append_kv(
                *(HostArray(bits, numerics.DTYPE[source]).on(device) for bits in rows),
                *caches,
                HostArray(slots, "int64").on(device),
                kv_layout=layout,
                k_format=fmt,
                v_format=fmt,
            )
            for bits, cache in zip(rows, caches, strict=True):
                expected = np.zeros((pages * page, heads, head_dim), np.float32)
                expected[slots[kept]] = numerics.rounded(numerics.decode(bits, source)[kept], fmt)
                got = to_host(cache, fmt)
                got = got if layout == "NHD" else got.swapaxes(1, 2)
                if not np.array_equal(got.reshape(expected.shape), expected):
                    return Outcome(name, "failed", f"{fmt} {layout}: stored values differ", kernel)
    return Outcome(name, "passed", "", kernel)


def check_quantize(name: str, device: str, target: str) -> Outcome:
    """quantize_kv to every format of blocks, bit for bit, and dequantize_kv of what it wrote."""
    rng = np.random.default_rng(7)
    values = rng.standard_normal((40, 3, 96), np.float32) * 10.0 ** rng.integers(-6, 4, (40, 3, 1))
    bits = numerics.encode(values, "fp16")
    kernel = devices.which_kernel("quantize", dtype="fp16", target=target)
    for fmt in blocks.BYTES:
        stored = numerics.encode(numerics.decode(bits, "fp16"), fmt)
        out = HostArray(np.zeros_like(stored), "uint8").on(device)
        _quantize.quantize_kv(HostArray(bits, "float16").on(device), fmt, out=out)
        got = np.empty_like(stored)
        out.copy_to(got)
        if not np.array_equal(got, stored):
            return Outcome(name, "failed", f"{fmt}: stored bytes differ", kernel)
        back = poisoned(values.shape, "fp32", device)
        _quantize.dequantize_kv(out, fmt, out=back)
        if not np.array_equal(to_host(back, "fp32"), numerics.decode(stored, fmt)):
            return Outcome(name, "failed", f"{fmt}: values read differ", kernel)
    return Outcome(name, "passed", "", kernel)


def check_merge(name: str, device: str, target: str) -> Outcome:
    """merge_state and merge_states, with states that saw nothing."""
    rng = np.random.default_rng(6)
    o = rng.standard_normal((3, 5, 4, 128), np.float32)
    lse = (4 * rng.standard_normal((3, 5, 4))).astype(np.float32)
    lse[0, 0], lse[:, 1, 2] = -np.inf, -np.inf
    o_on = HostArray(o, "float32").on(device)
    lse_on = HostArray(lse, "float32").on(device)
    compared = []
    for base in (None, 2):
        truth = oracle.merge(o, lse if base is None else lse * np.log(2))
        got = decode.merge_states(o_on, lse_on, lse_base=base)
        compared += _compare_merge(got, truth, base)
    pair = [HostArray(np.ascontiguousarray(part), "float32").on(device) for part in (o[0], lse[0], o[1], lse[1])]
    compared += _compare_merge(decode.merge_state(*pair), oracle.merge(o[:2], lse[:2]), None)
    return judge(name, devices.which_kernel("merge", dtype="fp32", target=target), *compared)


_COMPANIONS = {
    "flash_decode_stages": check_stages,
    "batch_invariance": check_invariance,
    "append_kv": check_append,
    "quantize_kv": check_quantize,
    "merge_states": check_merge,
}


def _case(name: str, lens: tuple[int, ...], heads: int, kv_heads: int, head_dim: int, layout: str) -> DecodeCase:
    return DecodeCase(
        name=name, tier="companion", q="bf16", k_format="bf16", v_format="bf16", dk=head_dim, dv=head_dim, hq=heads,
        hkv=kv_heads, q_len=1, q_form="token", layout=layout, page=0 if layout == "token" else 16, lens=lens,
        window=(-1, -1), softcap=0.0,
        alibi="none", sinks=False, tree=False, scales="none", index="i32", out="same", lse=False, strides="dense",
        splits=-1,
    )  # fmt: skip


def _compare_out(data: Any, out: Any) -> oracle.Comparison:
    truth = data.rows([oracle.attend(request)[0] for request in data.requests])
    plain = data.rows([oracle.attend(request, np.float32, "bf16", "bf16")[0] for request in data.requests])
    return oracle.compare(to_host(out, "bf16"), truth, plain)


def _compare_merge(got: tuple[Any, Any], truth: tuple[np.ndarray, np.ndarray], base: float | None) -> list[Any]:
    o, lse = (to_host(part, "fp32") for part in got)
    truth_lse = truth[1] if base is None else truth[1] / np.log(2)
    return [
        oracle.compare(o, truth[0], truth[0].astype(np.float32), "o"),
        oracle.compare(lse, truth_lse, truth_lse.astype(np.float32), "lse"),
    ]
