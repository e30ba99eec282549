"""Benchmark cases of decode over caches of several formats: ``formats_*`` are one cache, ``mixed_*`` two segments.

The peer is :func:`flashport.flash_decode` over the same number of keys in bf16, so that a ratio below 1 is what a
format saves. Caches are contiguous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashport import _core, _mixed, _quantize, decode
from flashport.benchmarks import harness

_HEAD_DIM = 128
_ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}  # of the others 1


@dataclass(frozen=True)
class Segment:
    """Keys of each sequence, formats of keys and values, and how many values share a scale beside them (0: none)."""

    keys: int
    k_format: str
    v_format: str
    scale_group: int = 0

    @property
    def scale_type(self) -> str:
        """Of a row's scale, as vLLM has it, or of a group's, as LightLLM does."""
        return "fp32" if self.scale_group == _HEAD_DIM else "fp16"

    @property
    def bytes_of_key(self) -> int:
        """K and V together, of one kv head."""
        scales = _HEAD_DIM // self.scale_group * _ELEMENT_BYTES[self.scale_type] if self.scale_group else 0
        return sum(_row_bytes(fmt) + scales for fmt in (self.k_format, self.v_format))


def _row_bytes(fmt: str) -> int:
    values, elements = _core.kv_format_blocks()[fmt]
    return _HEAD_DIM // values * elements * _ELEMENT_BYTES.get(fmt, 1)


@dataclass(frozen=True)
class MixedCase:
    """``batch`` sequences of these segments."""

    name: str
    batch: int
    segments: tuple[Segment, ...]
    by_segment: bool = False
    heads: tuple[int, int] = (32, 8)  # query heads and kv heads
    has_mask: bool = False  # of fp16, that all heads share

    @property
    def title(self) -> str:
        """The shape in a few words."""
        parts = " + ".join(f"{s.keys} of {s.k_format}/{s.v_format}" for s in self.segments)
        way = (", mask" if self.has_mask else "") + (", by segment" if self.by_segment else "")
        return f"decode, {self.batch} x ({parts}), {self.heads[0]}/{self.heads[1]}, {_HEAD_DIM}{way}"

    @property
    def bytes(self) -> int:
        """All keys and values."""
        return self.batch * self.heads[1] * sum(s.keys * s.bytes_of_key for s in self.segments)

    @property
    def query(self) -> dict[str, Any]:
        """The options of :func:`flashport.supports`."""
        query = {"q_dtype": "bf16", "head_dim": _HEAD_DIM, "group_size": self.heads[0] // self.heads[1]}
        if len(self.segments) == 1:
            only = self.segments[0]
            beside = {"scales_beside": True, "scale_group": only.scale_group} if only.scale_group else {}
            return {**query, "k_format": only.k_format, "v_format": only.v_format, **beside}
        return {**query, "segment_formats": [fmt for s in self.segments for fmt in (s.k_format, s.v_format)]}


def _one_cache(
    size: str, batch: int, keys: int, pairs: list[tuple[str, str]], heads: tuple[int, int] = (32, 8)
) -> list[MixedCase]:
    return [
        MixedCase(f"formats_{size}_{k if k == v else f'{k}_{v}'}", batch, (Segment(keys, k, v),), heads=heads)
        for k, v in pairs
    ]


def _sized(batch: int, keys: int) -> list[MixedCase]:
    size = f"{batch}x{keys // 1024}k"
    pairs = [(fmt, fmt) for fmt in ("bf16", "q8_0", "fp8_e4m3", "q4_0", "iq4_nl", "q4_1", "q5_0", "q5_1")]
    pairs += [("q8_0", "q4_0"), ("q4_0", "q8_0"), ("iq4_nl", "q8_0"), ("q4_0", "iq4_nl"), ("bf16", "q8_0")]
    pairs += [("q8_0", "q5_1"), ("q5_0", "q4_1"), ("q8_0", "bf16"), ("bf16", "q4_0"), ("q5_1", "bf16")]
    pairs += [("fp8_e5m2", "fp8_e5m2"), ("fp8_e4m3fnuz", "fp8_e4m3fnuz"), ("int8", "int8"), ("fp8_e5m2", "fp8_e4m3")]
    found = _one_cache(size, batch, keys, pairs)
    for fmt, group in (("int8", 8), ("int4", 8), ("int8", _HEAD_DIM), ("fp8_e4m3", _HEAD_DIM)):
        name = f"formats_{size}_{fmt}_{'rows' if group == _HEAD_DIM else 'groups'}"
        found.append(MixedCase(name, batch, (Segment(keys, fmt, fmt, group),)))
    hot = Segment(keys // 8, "bf16", "bf16")
    for old in ("q8_0", "q4_0"):
        both = Segment(keys - keys // 8, old, old), hot
        for has_mask in (False, True):
            name = f"mixed_{size}_{old}_bf16" + ("_mask" if has_mask else "")
            found.append(MixedCase(name, batch, both, has_mask=has_mask))
            found.append(MixedCase(f"{name}_by_segment", batch, both, by_segment=True, has_mask=has_mask))
    return found


def _grouped(batch: int, keys: int, heads: tuple[int, int]) -> list[MixedCase]:
    """Sixteen query heads a kv head."""
    size = f"{batch}x{keys // 1024}k_{heads[0]}_{heads[1]}"
    pairs = [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("iq4_nl", "iq4_nl"), ("q8_0", "q4_0"), ("q4_0", "q8_0")]
    return _one_cache(size, batch, keys, pairs, heads)


_CASES = (
    *(
        case
        for batch, keys in ((64, 8192), (32, 8192), (8, 4096), (4, 8192), (1, 8192))
        for case in _sized(batch, keys)
    ),
    *_grouped(64, 8192, (64, 4)),
    *_grouped(8, 4096, (128, 8)),
    *_grouped(64, 2048, (32, 2)),
    *_grouped(1, 8192, (128, 8)),
)


def cases(match: str = "") -> list[MixedCase]:
    """All cases; ``match`` selects by name or title."""
    return [case for case in _CASES if match in case.name or match in case.title]


def run_case(case: MixedCase, device: str, target: str, rounds: int = 9, largest: float = math.inf) -> harness.Row:
    """Times one case on a device; ``largest`` limits the bytes of its cache."""
    row = harness.Row(case.name, case.title, case.bytes)
    candidates = partial(_candidates, case=case, device=device)
    where = device, target, rounds
    harness.run_in_torch(
        row, "decode", case.query, where, case.bytes, largest, "in whose arrays the cache lies", candidates
    )
    return row


def _candidates(torch: Any, case: MixedCase, device: str) -> tuple[harness.Call, dict[str, harness.Call]]:
    where = harness.torch_device(device)

    def lens(keys: int) -> Any:
        return torch.full((case.batch,), keys, dtype=torch.int32, device=where)

    def cache(keys: int, fmt: str) -> Any:
        return harness.random_tensor(torch, (case.batch, keys, case.heads[1], _HEAD_DIM), fmt, where)

    def scaled(s: Segment, fmt: str) -> tuple[Any, Any]:
        """Rows of one sequence for all, and their scales."""
        shape = (s.keys, case.heads[1], _HEAD_DIM // s.scale_group)
        scale = torch.empty(
            shape[:2] if s.scale_group == _HEAD_DIM else shape,
            dtype={"fp16": torch.float16, "fp32": torch.float32}[s.scale_type],
            device=where,
        )
        rows = _quantize.quantize_kv(torch.randn(*shape[:2], _HEAD_DIM, device=where), fmt, scale=scale)
        return tuple(x.expand(case.batch, *x.shape).contiguous() for x in (rows, scale))

    def segment(s: Segment) -> Any:
        if not s.scale_group:
            k, v, scales = cache(s.keys, s.k_format), cache(s.keys, s.v_format), {}
        else:
            (k, k_scale), (v, v_scale) = scaled(s, s.k_format), scaled(s, s.v_format)
            scales = {"k_scale": k_scale, "v_scale": v_scale}
        return _mixed.KvSegment(k, v, lens(s.keys), k_format=s.k_format, v_format=s.v_format, **scales)

    q = harness.random_tensor(torch, (case.batch, case.heads[0], _HEAD_DIM), "bf16", where)
    out, other_out = torch.empty_like(q), torch.empty_like(q)
    segments = [segment(s) for s in case.segments]
    keys = sum(s.keys for s in case.segments)
    k, v, length = cache(keys, "bf16"), cache(keys, "bf16"), lens(keys)
    mask = torch.zeros(case.batch, 1, 1, keys, dtype=torch.float16, device=where) if case.has_mask else None

    def ours() -> object:
        return _mixed.flash_decode_segments(q, segments, mask=mask, by_segment=case.by_segment, out=out)

    return ours, {"bf16": lambda: decode.flash_decode(q, k, v, length, out=other_out)}
