"""Benchmark cases of attention, beside torch's own kernels: cuDNN's and flash on a GPU, its choice on a CPU.

Peers get the same values in the layout that torch wants, (B, H, S, D) views of contiguous (B, S, H, D). Their causal
mask is that of equally many queries and keys; of packed sequences, of fewer queries than keys and with what torch does
not have, ours stands alone. Figures are the time of a call and the rate of both products over the pairs of queries and
keys that the mask leaves.

This is the one list of cases: `flashport bench` runs those of a GPU or those of a CPU, and the project's
`benchmarks/attention.py` those of a GPU with the cases of a study, which are many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from flashport import _attention, _core, devices
from flashport.benchmarks import harness
from flashport.testing import numerics


@dataclass(frozen=True)
class AttentionCase:
    """Sequences of ``lens`` (queries, keys), packed where they differ."""

    name: str
    lens: tuple[tuple[int, int], ...]
    causal: bool = True
    dims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (32, 8)
    fmt: str = "bf16"
    window: int = -1  # keys to the left
    option: str = ""  # softcap, ALiBi, dropout, bias, or one of all heads: "shared", "float" and "odd bias" (see below)
    pages: int = 0  # keys lie on pages of so many tokens, in random order
    fp8: str = ""  # which of q, k and v are e4m3: "kv" or "qkv"
    cache: str = ""  # the format of k and v, where it is another than q's and not e4m3
    tier: str = "all"  # or "cpu", which a CPU's run has, or "study"

    @property
    def packed(self) -> bool:
        """Whether sequences are of different lengths."""
        return len(set(self.lens)) > 1

    @property
    def title(self) -> str:
        """The shape in a few words."""
        counts = {one: self.lens.count(one) for one in dict.fromkeys(self.lens)}
        if len(counts) > 3:
            shape = f"{len(self.lens)} packed, {sum(q for q, _ in self.lens)} tokens"
        else:
            shape = " + ".join(f"{count} x {q if q == k else f'{q} on {k}'}" for (q, k), count in counts.items())
        dims = str(self.dims[0]) if self.dims[0] == self.dims[1] else "/".join(map(str, self.dims))
        mask = ("causal" if self.causal else "full") + (f" window {self.window}" if self.window >= 0 else "")
        return ", ".join(
            [
                "attention",
                shape,
                "/".join(map(str, self.heads)),
                dims,
                self.fmt,
                mask,
                *([self.option] * bool(self.option)),
                *([f"pages of {self.pages}"] * bool(self.pages)),
                *([f"fp8 {self.fp8}"] * bool(self.fp8)),
                *([self.cache] * bool(self.cache)),
            ]
        )

    @property
    def query(self) -> dict[str, Any]:
        """The options of :func:`flashport.supports`."""
        options = {name.lower(): name in self.option for name in ("softcap", "ALiBi", "bias", "dropout")}
        return {
            "dtype": self.format_of("q"),
            "k_format": self.format_of("k"),
            "v_format": self.format_of("v"),
            "head_dim": self.dims[0],
            "head_dim_v": self.dims[1],
            "paged": self.pages > 0,
            "causal": self.causal,
            **options,
        }

    def format_of(self, tensor: str) -> str:
        """The element format of q, k or v."""
        if self.cache and tensor in ("k", "v"):
            return self.cache
        return "fp8_e4m3" if tensor in self.fp8 else self.fmt

    @property
    def flops(self) -> float:
        """Of both products, over the pairs that the mask leaves."""
        return sum(2.0 * self.heads[0] * sum(self.dims) * pairs(*one, self.causal, self.window) for one in self.lens)

    @property
    def bytes(self) -> int:
        """Of queries, keys, values and outputs."""
        queries, keys = (sum(lens) for lens in zip(*self.lens, strict=True))
        dim, dim_v = self.dims
        dims = {"q": dim, "k": dim, "v": dim_v, "out": dim_v}
        size = {name: numerics.row_bytes(dims[name], self.format_of(name)) for name in dims}
        of_query = size["q"] + size["out"]
        of_key = size["k"] + size["v"]
        return queries * self.heads[0] * of_query + keys * self.heads[1] * of_key


def pairs(q_len: int, kv_len: int, causal: bool, window: int = -1) -> int:
    """Pairs of queries and keys that a mask leaves; ``window`` is the keys to the left."""
    position = np.arange(q_len, dtype=np.int64) + kv_len - q_len
    high = np.clip(position + 1, 0, kv_len) if causal else np.full(q_len, kv_len)
    low = np.clip(position - window, 0, kv_len) if window >= 0 else np.zeros(q_len, np.int64)
    return int(np.maximum(high - low, 0).sum())


def _log_uniform(count: int, low: int, high: int) -> tuple[tuple[int, int], ...]:
    lens = (int(low * (high / low) ** (i / (count - 1))) for i in range(count))
    return tuple((length, length) for length in lens)


def _dense(count: int, length: int) -> tuple[tuple[int, int], ...]:
    return ((length, length),) * count


_LONG, _FOUR = _dense(1, 16384), _dense(4, 4096)
_CASES = (
    AttentionCase("attention_d128_causal_4x4k", _FOUR),
    AttentionCase("attention_d128_causal_1x16k", _LONG),
    AttentionCase("attention_d128_full_4x4k", _FOUR, causal=False),
    AttentionCase("attention_d128_full_1x16k", _LONG, causal=False),
    AttentionCase("attention_d64_causal_4x4k", _FOUR, dims=(64, 64)),
    AttentionCase("attention_d64_causal_1x16k", _LONG, dims=(64, 64)),
    AttentionCase("attention_d64_full_4x4k", _FOUR, causal=False, dims=(64, 64)),
    AttentionCase("attention_d64_full_1x16k", _LONG, causal=False, dims=(64, 64)),
    AttentionCase("attention_d256_causal_4x4k", _FOUR, dims=(256, 256), heads=(16, 4)),
    AttentionCase("attention_d256_causal_1x16k", _LONG, dims=(256, 256), heads=(16, 4)),
    AttentionCase("attention_d256_full_4x4k", _FOUR, causal=False, dims=(256, 256), heads=(16, 4)),
    AttentionCase("attention_d256_full_1x16k", _LONG, causal=False, dims=(256, 256), heads=(16, 4)),
    AttentionCase("attention_d96_causal_4x4k", _FOUR, dims=(96, 96)),
    AttentionCase("attention_d128_causal_16x1k", _dense(16, 1024)),
    AttentionCase("attention_d128_causal_1x256", _dense(1, 256)),  # small: its host time is measured
    AttentionCase("attention_d192_128_causal_4x4k", _FOUR, dims=(192, 128), heads=(16, 16)),
    AttentionCase("attention_d128_causal_packed_64", _log_uniform(64, 128, 8192)),
    AttentionCase("attention_d128_128_on_64k", ((128, 65536),) * 8),
    AttentionCase("attention_d128_window_1023_1x16k", _LONG, window=1023),
    AttentionCase("attention_d128_softcap_4x4k", _FOUR, option="softcap"),
    AttentionCase("attention_d128_alibi_4x4k", _FOUR, option="ALiBi"),
    AttentionCase("attention_d128_bias_4x4k", _FOUR, option="bias"),
    AttentionCase("attention_d128_dropout_4x4k", _FOUR, option="dropout"),
    *(
        AttentionCase(
            f"attention_{fmt}_d{dim}_{'causal' if causal else 'full'}_1x{length // 1024}k", _dense(1, length), causal,
            (dim, dim), (8, 2), fmt, tier="cpu",
        )
        for fmt in ("bf16", "fp16", "fp32")
        for dim in (64, 128)
        for causal in (True, False)
        for length in (2048, 8192)
    ),
)  # fmt: skip


def _study() -> Iterator[AttentionCase]:
    """More sizes, heads and options of a GPU."""
    case = partial(AttentionCase, tier="study")
    masks = (("causal", True), ("full", False))
    yield case("attention_d96_full_4x4k", _FOUR, False, (96, 96))
    yield case("attention_d128_full_16x1k", _dense(16, 1024), False)
    for mask, causal in masks:
        for dim, heads in ((64, (32, 8)), (128, (32, 8)), (128, (28, 4)), (128, (8, 1)), (256, (16, 4))):
            for count, length in ((32, 512), (8, 2048), (2, 8192), (3, 3000)):
                name = f"attention_d{dim}_{heads[0]}_{heads[1]}_{mask}_{count}x{length}"
                yield case(name, _dense(count, length), causal, (dim, dim), heads)
    yield case("attention_d192_128_32_8_causal_4x4k", _FOUR, dims=(192, 128))
    yield case("attention_d192_128_full_4x4k", _FOUR, False, (192, 128), (16, 16))
    for count, queries, keys in ((8, 128, 65536), (1, 512, 32768), (1, 128, 65536), (2, 128, 65536), (4, 128, 65536)):
        yield case(f"attention_d128_full_{count}x{queries}_on_{keys // 1024}k", ((queries, keys),) * count, False)
    for size in (1, 16, 64, 256):
        yield case(f"attention_d128_pages_{size}_4x4k", _FOUR, pages=size)
    for dim, heads in ((64, (32, 8)), (256, (16, 4))):
        yield case(f"attention_d{dim}_pages_16_4x4k", _FOUR, dims=(dim, dim), heads=heads, pages=16)
    for fp8 in ("qkv", "kv"):
        yield case(f"attention_d128_fp8_{fp8}_1x16k", _LONG, False, fp8=fp8)
    yield case("attention_d128_fp8_kv_4x4k", _FOUR, fp8="kv")
    yield case("attention_d128_pages_16_fp8_kv_4x4k", _FOUR, pages=16, fp8="kv")
    for cache in ("q8_0", "q4_0", "q5_1"):
        for pages in (0, 16):
            name = f"attention_d128_{f'pages_{pages}_' if pages else ''}{cache}_4x4k"
            yield case(name, _FOUR, pages=pages, cache=cache)
    known = {(one.lens, one.dims, one.causal, one.option) for one in _CASES}
    for dims, heads in (
        ((128, 128), (32, 8)),
        ((64, 64), (32, 8)),
        ((256, 256), (16, 4)),
        ((96, 96), (32, 8)),
        ((192, 128), (16, 16)),
    ):
        for mask, causal in masks:
            for option in ("softcap", "ALiBi", "shared bias", "float bias", "odd bias", "dropout"):
                if (_FOUR, dims, causal, option) not in known:
                    dim = "_".join(map(str, dict.fromkeys(dims)))
                    name = f"attention_d{dim}_{option.lower().replace(' ', '_')}_{mask}_4x4k"
                    yield case(name, _FOUR, causal, dims, heads, option=option)


def cases(match: str = "", cpu: bool = False, study: bool = False) -> list[AttentionCase]:
    """The cases of a CPU's run or of a GPU's, or a GPU's with those of a study; ``match`` selects by name or title."""
    tiers = ("cpu",) if cpu else ("all", "study") if study else ("all",)
    return [case for case in (*_CASES, *_study()) if case.tier in tiers and (match in case.name or match in case.title)]


def run_case(case: AttentionCase, device: str, target: str, rounds: int = 9, most: float = math.inf) -> harness.Row:
    """Times one case on a device; ``most`` limits its FLOP. It is bound by products: no read stands beside it."""
    row = harness.Row(case.name, case.title, case.bytes, flops=case.flops)
    support = devices.supports("attention", target=target, **case.query)
    if not support:
        row.skipped = support.reason
    elif case.flops > most:
        row.skipped = f"{case.flops / 1e9:.0f} GFLOP are too many for this device's run"
    torch = harness.find_torch(device)
    if case.option == "odd bias" and torch is None:
        row.skipped = "its bias is a view, which needs torch"
    if row.skipped:
        return row
    row.kernel = devices.which_kernel("attention", target=target, **case.query)
    arguments = make_arguments(torch, case, device)
    peers = _peers(torch, case, arguments, device) if torch else {}
    harness.measure(row, torch, device, lambda: _attention.attention(**arguments), peers, rounds, read=False)
    return row


def make_arguments(torch: Any, case: AttentionCase, device: str) -> dict[str, Any]:
    """The arguments of a case's call, with tensors of torch if it is given."""
    rng = np.random.default_rng(0)

    def random(*shape: int, fmt: str = case.fmt) -> Any:
        if torch:
            return harness.random_tensor(torch, shape, fmt, harness.torch_device(device))
        stored = numerics.encode(rng.standard_normal(shape, np.float32), fmt)
        array = _core.DeviceArray(stored.shape, numerics.DTYPE[fmt], device)
        array.copy_from(stored)
        return array

    def place(values: np.ndarray) -> Any:
        return torch.from_numpy(values).to(harness.torch_device(device)) if torch else harness.on(values, device)

    (heads, kv_heads), (dim, dim_v) = case.heads, case.dims
    q_lens, kv_lens = (list(lens) for lens in zip(*case.lens, strict=True))
    queries, keys = ((sum(q_lens),), (sum(kv_lens),))
    if not case.packed:
        queries, keys = (len(q_lens), q_lens[0]), (len(kv_lens), kv_lens[0])
    pages = -(-kv_lens[0] // case.pages) if case.pages else 0  # of a sequence
    if pages:
        keys = len(kv_lens) * pages, case.pages
    arguments: dict[str, Any] = {
        "q": random(*queries, heads, dim, fmt=case.format_of("q")),
        "k": random(*keys, kv_heads, dim, fmt=case.format_of("k")),
        "v": random(*keys, kv_heads, dim_v, fmt=case.format_of("v")),
        "out": random(*queries, heads, dim_v),
        "causal": case.causal,
        "window": (case.window, -1),
    }
    if case.packed:
        for side, lens in (("q", q_lens), ("k", kv_lens)):
            arguments[f"cu_seqlens_{side}"] = place(np.cumsum([0, *lens], dtype=np.int32))
            arguments[f"max_seqlen_{side}"] = max(lens)
    if pages:
        table = rng.permutation(len(kv_lens) * pages).astype(np.int32).reshape(-1, pages)
        arguments |= {"block_table": place(table), "seqused_k": place(np.array(kv_lens, np.int32))}
    if case.cache:
        arguments |= {"k_format": case.cache, "v_format": case.cache}
    if case.option == "softcap":
        arguments["softcap"] = 50.0
    elif case.option == "ALiBi":
        arguments["alibi_slopes"] = place((2.0 ** -np.linspace(1, 8, heads)).astype(np.float32))
    elif case.option in ("bias", "shared bias"):
        arguments["bias"] = random(1, heads if case.option == "bias" else 1, q_lens[0], kv_lens[0])
    elif case.option == "float bias":
        arguments["bias"] = random(1, 1, q_lens[0], kv_lens[0], fmt="fp32")
    elif case.option == "odd bias":  # a view without its first column: rows begin where only single loads can
        arguments["bias"] = random(1, 1, q_lens[0], kv_lens[0] + 1)[..., 1:]
    elif case.option == "dropout":
        arguments |= {"dropout_p": 0.1, "rng_state": place(np.array([1, 2], np.int64))}
    return arguments


def _peers(torch: Any, case: AttentionCase, arguments: dict[str, Any], device: str) -> dict[str, harness.Call]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    equal = all(q_len == kv_len for q_len, kv_len in case.lens)
    if case.packed or not equal or case.window >= 0 or case.option or case.pages:
        return {}
    if case.fp8 or case.cache:
        return {}
    q, k, v = (arguments[name].transpose(1, 2) for name in "qkv")
    attend = torch.nn.functional.scaled_dot_product_attention

    def call() -> None:
        attend(q, k, v, is_causal=case.causal, enable_gqa=q.shape[1] != k.shape[1])

    if device == "cpu":
        return {"torch SDPA": call}
    peers = {}
    for name, backend in (("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION), ("SDPA flash", SDPBackend.FLASH_ATTENTION)):

        def peer(backend: Any = backend) -> None:
            with sdpa_kernel(backend):
                call()

        try:
            peer()
        except RuntimeError:  # this build or card does not have it
            continue
        peers[name] = peer
    return peers
