"""Benchmark cases of attention, beside torch's own kernels: cuDNN's and flash on a GPU, its choice on a CPU.

Peers get the same values in the layout that torch wants, (B, H, S, D) views of contiguous (B, S, H, D). Their causal
mask is that of equally many queries and keys; of packed sequences, of fewer queries than keys and with what torch does
not have, ours stands alone. Figures are the time of a call and the rate of both products over the pairs of queries and
keys that the mask leaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
    option: str = ""  # softcap, ALiBi, bias or dropout
    tier: str = "all"  # or "cpu", which a CPU's run has

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
            ]
        )

    @property
    def query(self) -> dict[str, Any]:
        """The options of :func:`flashport.supports`."""
        options = {name.lower(): name == self.option for name in ("softcap", "ALiBi", "bias", "dropout")}
        return {
            "dtype": self.fmt,
            "head_dim": self.dims[0],
            "head_dim_v": self.dims[1],
            "causal": self.causal,
            **options,
        }

    @property
    def flops(self) -> float:
        """Of both products, over the pairs that the mask leaves."""
        return sum(2.0 * self.heads[0] * sum(self.dims) * pairs(*one, self.causal, self.window) for one in self.lens)

    @property
    def bytes(self) -> int:
        """Of queries, keys, values and outputs."""
        queries, keys = (sum(lens) for lens in zip(*self.lens, strict=True))
        rows = (queries * self.heads[0] + keys * self.heads[1]) * sum(self.dims)
        return rows * np.dtype(numerics.CARRIER[self.fmt]).itemsize


def pairs(q_len: int, kv_len: int, causal: bool, window: int = -1) -> int:
    """Pairs of queries and keys that a mask leaves; ``window`` is the keys to the left."""
    position = np.arange(q_len, dtype=np.int64) + kv_len - q_len
    high = np.clip(position + 1, 0, kv_len) if causal else np.full(q_len, kv_len)
    low = np.clip(position - window, 0, kv_len) if window >= 0 else np.zeros(q_len, np.int64)
    return int(np.maximum(high - low, 0).sum())


def _log_uniform(count: int, low: int, high: int) -> tuple[tuple[int, int], ...]:
    lens = np.exp(np.random.default_rng(0).uniform(np.log(low), np.log(high), count)).astype(int)
    return tuple((int(length), int(length)) for length in lens)


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


def cases(match: str = "", cpu: bool = False) -> list[AttentionCase]:
    """The cases of a CPU's run or of a GPU's; ``match`` selects by name or title among them."""
    tier = "cpu" if cpu else "all"
    return [case for case in _CASES if case.tier == tier and (match in case.name or match in case.title)]


def run_case(case: AttentionCase, device: str, target: str, rounds: int = 9, most: float = math.inf) -> harness.Row:
    """Times one case on a device; ``most`` limits its FLOP. It is bound by products: no read stands beside it."""
    row = harness.Row(case.name, case.title, case.bytes, flops=case.flops)
    support = devices.supports("attention", target=target, **case.query)
    if not support:
        row.skipped = support.reason
    elif case.flops > most:
        row.skipped = f"{case.flops / 1e9:.0f} GFLOP are too many for this device's run"
    if row.skipped:
        return row
    row.kernel = devices.which_kernel("attention", target=target, **case.query)
    torch = harness.find_torch(device)
    arguments = _arguments(torch, case, device)
    peers = _peers(torch, case, arguments, device) if torch else {}
    harness.measure(row, torch, device, lambda: _attention.attention(**arguments), peers, rounds, read=False)
    return row


def _arguments(torch: Any, case: AttentionCase, device: str) -> dict[str, Any]:
    """Of a call, with tensors of torch if it is given."""
    rng = np.random.default_rng(0)

    def random(*shape: int, fmt: str = case.fmt) -> Any:
        if torch:
            return harness.random_tensor(torch, shape, fmt, harness.torch_device(device))
        array = _core.DeviceArray(shape, numerics.DTYPE[fmt], device)
        array.copy_from(numerics.encode(rng.standard_normal(shape, np.float32), fmt))
        return array

    def place(values: np.ndarray) -> Any:
        return torch.from_numpy(values).to(harness.torch_device(device)) if torch else harness.on(values, device)

    (heads, kv_heads), (dim, dim_v) = case.heads, case.dims
    q_lens, kv_lens = (list(lens) for lens in zip(*case.lens, strict=True))
    queries, keys = ((sum(q_lens),), (sum(kv_lens),))
    if not case.packed:
        queries, keys = (len(q_lens), q_lens[0]), (len(kv_lens), kv_lens[0])
    arguments: dict[str, Any] = {
        "q": random(*queries, heads, dim),
        "k": random(*keys, kv_heads, dim),
        "v": random(*keys, kv_heads, dim_v),
        "out": random(*queries, heads, dim_v),
        "causal": case.causal,
        "window": (case.window, -1),
    }
    if case.packed:
        for side, lens in (("q", q_lens), ("k", kv_lens)):
            arguments[f"cu_seqlens_{side}"] = place(np.cumsum([0, *lens], dtype=np.int32))
            arguments[f"max_seqlen_{side}"] = max(lens)
    if case.option == "softcap":
        arguments["softcap"] = 30.0
    elif case.option == "ALiBi":
        arguments["alibi_slopes"] = place((2.0 ** -np.linspace(1, 8, heads)).astype(np.float32))
    elif case.option == "bias":
        arguments["bias"] = random(1, heads, q_lens[0], kv_lens[0])
    elif case.option == "dropout":
        arguments |= {"dropout_p": 0.1, "rng_state": place(np.array([1, 2], np.int64))}
    return arguments


def _peers(torch: Any, case: AttentionCase, arguments: dict[str, Any], device: str) -> dict[str, harness.Call]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    equal = all(q_len == kv_len for q_len, kv_len in case.lens)
    if case.packed or not equal or case.window >= 0 or case.option:
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
