"""The shipped correctness cases of attention, against its NumPy oracle, on one device.

Tokens that no sequence has hold NaN before a call, and so do outputs; what a call is to leave alone holds it after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import flashport
from flashport import _core, devices
from flashport.testing import attention_oracle, numerics, oracle
from flashport.testing.cases import HostArray, to_host
from flashport.testing.outcomes import CheckOf, Outcome, guarded, judge


@dataclass(frozen=True)
class AttentionCase:
    """One call of attention."""

    name: str
    tier: str = "emulator"
    fmt: str = "bf16"
    dims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (4, 2)
    q_lens: tuple[int, ...] = (70, 5, 0, 1)
    kv_lens: tuple[int, ...] = (200, 5, 7, 0)
    packed: bool = True  # else dense, with lengths in use
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    bias: bool = False  # of dense sequences that are all the longest
    dropout_p: float = 0.0
    leftpad: bool = False

    @property
    def query(self) -> dict[str, Any]:
        """The options of :func:`flashport.supports`."""
        return {
            "dtype": self.fmt, "head_dim": self.dims[0], "head_dim_v": self.dims[1], "causal": self.causal,
            "softcap": self.softcap > 0, "alibi": self.alibi, "bias": self.bias, "dropout": self.dropout_p > 0,
        }  # fmt: skip


_EQUAL = {"packed": False, "q_lens": (113, 113), "kv_lens": (203, 203)}
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "bias": {"bias": True, **_EQUAL},
    "dropout": {"dropout_p": 0.2},
    "all": {"softcap": 2.0, "alibi": True, "bias": True, "dropout_p": 0.2, **_EQUAL},
}
_DIMS = ((64, 64), (96, 96), (128, 128), (256, 256), (192, 128), (512, 512))


def load_cases(*tiers: str) -> list[AttentionCase]:
    """The cases of some tiers ("emulator", "full")."""
    return [case for case in (*_named_cases(), *_kernels()) if case.tier in tiers]


def _named_cases() -> list[AttentionCase]:
    return [
        AttentionCase("attention_packed"),
        AttentionCase("attention_lengths_in_use", packed=False),
        AttentionCase("attention_full", causal=False, **_EQUAL),
        AttentionCase("attention_fp16_window", fmt="fp16", window=(33, 0), dims=(64, 64)),
        AttentionCase("attention_window_both_sides", causal=False, window=(20, 70), dims=(64, 64)),
        AttentionCase("attention_more_queries_than_keys", q_lens=(203,), kv_lens=(113,)),
        AttentionCase("attention_leftpad_sinks", leftpad=True, sinks=True, kv_lens=(200, 9, 7, 3)),
        AttentionCase("attention_softcap", softcap=2.0),
        AttentionCase("attention_alibi", alibi=True, heads=(6, 3)),
        AttentionCase("attention_bias", bias=True, **_EQUAL),
        AttentionCase("attention_dropout", dropout_p=0.2),
        AttentionCase("attention_all_options", sinks=True, window=(90, 3), **_OPTIONS["all"]),
        AttentionCase("attention_d256", dims=(256, 256), heads=(2, 1)),
        AttentionCase("attention_192_128", dims=(192, 128), heads=(2, 2)),
        AttentionCase("attention_d40_72", dims=(40, 72)),
        AttentionCase("attention_fp32", fmt="fp32", dims=(16, 24)),
    ]


def _kernels() -> Iterator[AttentionCase]:
    """Every kernel that a target may have, and a layer of Llama-3.1-8B."""
    for fmt, (dim, dim_v), (name, options) in itertools.product(("bf16", "fp16", "fp32"), _DIMS, _OPTIONS.items()):
        dims = str(dim) if dim == dim_v else f"{dim}_{dim_v}"
        yield AttentionCase(
            f"attention_{fmt}_d{dims}_{name}", tier="full", fmt=fmt, dims=(dim, dim_v), heads=(2, 1),
            window=(150, -1), **options,
        )  # fmt: skip
    yield AttentionCase("attention_llama", tier="full", heads=(32, 8), q_lens=(500, 333), kv_lens=(500, 400))


def checks(device: str, target: str, tiers: tuple[str, ...]) -> Iterator[CheckOf]:
    """All checks for a device, in order."""
    for case in load_cases(*tiers):
        yield guarded(case.name, partial(check, case, device, target))
    for name, run in {"attention_invariance": check_invariance, "dropout_mask": check_dropout_mask}.items():
        yield guarded(name, partial(run, name, device, target))


def make_data(case: AttentionCase) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a call: as the oracle takes them, and with arrays that are yet to be put on a device."""
    rng = np.random.default_rng([*case.name.encode()])
    heads, kv_heads = case.heads
    values: dict[str, Any] = {}
    arrays: dict[str, Any] = {}

    def add(name: str, array: np.ndarray, fmt: str = "fp32") -> None:
        bits = numerics.encode(array, fmt)
        values[name] = numerics.decode(bits, fmt)
        arrays[name] = HostArray(bits, numerics.DTYPE[fmt])

    def add_indices(name: str, indices: Any, dtype: Any = np.int32) -> None:
        values[name] = np.asarray(indices, dtype)
        arrays[name] = HostArray(values[name], np.dtype(dtype).name)

    lens = {"q": case.q_lens, "k": case.kv_lens, "v": case.kv_lens}
    widths = {"q": (heads, case.dims[0]), "k": (kv_heads, case.dims[0]), "v": (kv_heads, case.dims[1])}
    for name, own in lens.items():
        longest = max(own)
        tokens = (sum(own) + 3,) if case.packed else (len(own), longest)
        array = rng.standard_normal((*tokens, *widths[name]), np.float32)
        if case.packed:
            array[sum(own) :] = np.nan
        else:
            for b, length in enumerate(own):
                array[b, length:] = np.nan
        add(name, array, case.fmt)
        if name == "v":
            continue
        if case.packed:
            add_indices(f"cu_seqlens_{name}", np.cumsum([0, *own]))
            values[f"max_seqlen_{name}"] = longest
        elif min(own) < longest:
            add_indices(f"seqused_{name}", own)
    if case.leftpad:
        add_indices("leftpad_k", [length // 3 for length in case.kv_lens])
    if case.alibi:
        add("alibi_slopes", 2.0 ** -rng.uniform(1, 8, heads))
    if case.sinks:
        add("sinks", rng.standard_normal(heads))
    if case.bias:
        bias = rng.standard_normal((len(case.q_lens), 1, max(case.q_lens), max(case.kv_lens)), np.float32)
        add("bias", np.where(rng.random(bias.shape) < 0.2, -np.inf, bias))
    if case.dropout_p > 0:
        add_indices("rng_state", rng.integers(0, 1 << 62, 2), np.int64)
    values |= {name: getattr(case, name) for name in ("causal", "window", "softcap", "dropout_p")}
    return values, {**values, **arrays}


def _run(case: AttentionCase, arguments: dict[str, Any], device: str) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a call over outputs that hold NaN."""
    given = {name: x.on(device) if isinstance(x, HostArray) else x for name, x in arguments.items()}
    q, v = given["q"].shape, given["v"].shape
    shapes = {"out": (*q[:-1], v[-1]), "lse": (q[1], q[0]) if case.packed else (q[0], q[2], q[1])}
    formats = {"out": case.fmt, "lse": "fp32"}
    outputs = {
        name: HostArray(numerics.nan_bits(shape, formats[name]), numerics.DTYPE[formats[name]]).on(device)
        for name, shape in shapes.items()
    }
    flashport.attention(**given, **outputs)
    return to_host(outputs["out"], case.fmt), to_host(outputs["lse"], "fp32")


def check(case: AttentionCase, device: str, target: str) -> Outcome:
    """One case: outputs in tolerance, and unwritten where no sequence has a query."""
    support = devices.supports("attention", target=target, **case.query)
    if not support:
        return Outcome(case.name, "unsupported", support.reason)
    values, arguments = make_data(case)
    results = _run(case, arguments, device)
    truth, plain = (attention_oracle.attention(values, plain=fmt) for fmt in (None, case.fmt))
    compared = []
    for name, got, wanted, usual in zip(("out", "lse"), results, truth, plain, strict=True):
        written = ~np.isnan(wanted)
        compared.append(oracle.compare(got[written], wanted[written], usual[written], name, 5e-7 * case.softcap))
        if not np.isnan(got[~written]).all():
            compared.append(oracle.Comparison(problem=f"{name} was written where no sequence has a query"))
    return judge(case.name, devices.which_kernel("attention", target=target, **case.query), *compared)


def check_invariance(name: str, device: str, target: str) -> Outcome:
    """A sequence's bits in a batch, again, on one multiprocessor, alone, and for a prompt in two parts."""
    case = AttentionCase(name, q_lens=(300, 1, 64, 0, 130), kv_lens=(300, 500, 64, 9, 200))
    support = devices.supports("attention", target=target, **case.query)
    if not support:
        return Outcome(name, "unsupported", support.reason)
    kernel = devices.which_kernel("attention", target=target, **case.query)
    _, arguments = make_data(case)
    first = _run(case, arguments, device)
    for what, limit in (("repeated", 0), ("on one multiprocessor", 1), ("on seven multiprocessors", 7)):
        _core.set_multiprocessor_limit(limit)
        try:
            again = _run(case, arguments, device)
        finally:
            _core.set_multiprocessor_limit(0)
        if not all(np.array_equal(one, other, equal_nan=True) for one, other in zip(first, again, strict=True)):
            return Outcome(name, "failed", f"bits differ {what}", kernel)
    q_ends, k_ends = (np.cumsum([0, *lens]) for lens in (case.q_lens, case.kv_lens))
    parts = [(f"of sequence {b} alone", b, 0, case.q_lens[b], case.kv_lens[b]) for b in range(len(case.q_lens))]
    parts += [("of a prompt in two parts", 0, 0, 77, 77), ("of a prompt in two parts", 0, 77, 300, 300)]
    for what, b, start, end, keys in parts:
        alone = dict(arguments)
        rows = slice(q_ends[b] + start, q_ends[b] + end)
        for side, where in (("q", rows), ("k", slice(k_ends[b], k_ends[b] + keys))):
            for part in ("q",) if side == "q" else ("k", "v"):
                alone[part] = HostArray(arguments[part].bits[where], arguments[part].dtype)
            alone[f"cu_seqlens_{side}"] = HostArray(np.array([0, where.stop - where.start], np.int32), "int32")
        out, lse = _run(case, alone, device)
        if not (np.array_equal(out, first[0][rows]) and np.array_equal(lse, first[1][:, rows])):
            return Outcome(name, "failed", f"bits differ {what}", kernel)
    return Outcome(name, "passed", "", kernel)


def check_dropout_mask(name: str, device: str, target: str) -> Outcome:
    """The mask is that of the oracle, element for element."""
    shape, state = (2, 3, 17, 133), np.array([-5, 3 << 33 | 1])
    mask = flashport.dropout_mask(shape, HostArray(state, "int64").on(device), 0.3)
    bits = np.empty(shape, np.uint8)
    mask.copy_to(bits)
    right = np.array_equal(bits, attention_oracle.dropout_mask(shape, state, 0.3))
    kernel = next(key for key in _core.kernel_keys(target) if key.startswith("dropout_mask/"))
    return Outcome(name, "passed" if right else "failed", "" if right else "other weights are dropped", kernel)
