"""The library's own operators on the inputs of a step, on every device that there is.

attention takes every step, its mask as a bias. Of steps of up to 16 tokens flash_decode also takes those whose mask is
a plain causal one, and flash_decode_segments those of mixed caches, part by part. Keys and values that an operator
reads in their own format are given so; all others, and for attention the parts of a mixed step, are widened and joined
first: each result says which way it went. None runs on a step with dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import flashport
from flashport import devices, ggml
from flashport.ggml._tensor import formats
from flashport.testing import blocks, numerics
from flashport.testing.cases import HostArray, to_host
from flashport.trace import _decide, _reference
from flashport.trace._steps import Step, Tensor

Values = np.ndarray[Any, Any]

_MOST_DECODE_TOKENS = 16
_NO_WEIGHTS = "refused: attention draws which weights it keeps, and takes none of a trace"
_ROUNDING = {"fp32": 0.0, "fp16": 4e-3, "bf16": 3e-2}
# ggml's types that operators may read, and those that stand for something else than the queries' own type.
_FORMATS = {name.upper(): fmt for name, fmt in formats().items()}
_NATIVE = {name: fmt for name, fmt in _FORMATS.items() if fmt != "fp32"}


@dataclass(frozen=True)
class Result:
    """What an operator gave: ``out`` as Step.out, or None with the reason in ``way``."""

    operator: str
    device: str
    way: str
    out: Values | None
    rounding: float = 0.0  # relative error that the type of its queries and output may bring


def served_devices() -> list[tuple[str, str]]:
    """(device, target) of all that a target of this build serves."""
    return [(each.device, each.target) for backend in devices.backends() for each in backend.devices if each.target]


def run_all(step: Step, rows: Values | None = None, device: str | None = None) -> list[Result]:
    """Every operator on every device, or on one; of some query rows."""
    found: list[Result | None] = []
    operators = (_attention, _flash_decode, _flash_decode_segments)
    for name, target in served_devices():
        if device is not None and name != device:
            continue
        if step.dropout_p > 0:
            found.append(Result("attention", name, _NO_WEIGHTS, None))
        else:
            found += [_guarded(operator, step, rows, name, target) for operator in operators]
    return [each for each in found if each is not None]


def _guarded(operator: Any, step: Step, rows: Values | None, device: str, target: str) -> Result | None:
    try:
        result: Result | None = operator(step, rows, device, target)
    except (NotImplementedError, ValueError, TypeError) as error:
        return Result(operator.__name__.strip("_"), device, f"refused: {error}", None)
    return result


def _on(device: str, values: Values, fmt: str) -> Any:
    bits = values if values.dtype == numerics.CARRIER[fmt] else numerics.encode(values, fmt)
    return HostArray(bits, numerics.DTYPE[fmt]).on(device)


def _queries(step: Step, target: str) -> tuple[Values, str]:
    """(queries, the type that the target computes them in)."""
    q = step.array("q")
    assert q is not None
    math_type = "fp32" if target.startswith("cpu") and q.dtype == np.float32 else "fp16"
    if step.need("q").type == "BF16":
        math_type = "bf16"
    return np.ascontiguousarray(q, np.float32), math_type


def _keys(step: Step, device: str, math_type: str, supports: Any) -> tuple[Any, Any, dict[str, Any], str]:
    """(k, v, their formats as options, which way they went), both (batch, tokens, heads, row)."""
    k, v = step.need("k"), step.need("v")
    formats = _NATIVE.get(k.type), _NATIVE.get(v.type)
    own = math_type in ("fp16", "bf16") and formats == (math_type, math_type)
    if (
        step.kind == "standard"
        and None not in formats
        and (own or blocks.BYTES.keys() & formats or math_type == "fp32")
    ):
        options = {"k_format": formats[0], "v_format": formats[1]}
        if supports(**options):
            rows = [np.ascontiguousarray(tensor.rows().transpose(0, 2, 1, 3)) for tensor in (k, v)]
            arrays = [
                HostArray(x.view(numerics.CARRIER[fmt]), numerics.DTYPE[fmt]).on(device)
                for x, fmt in zip(rows, formats, strict=True)
                if fmt is not None
            ]
            return arrays[0], arrays[1], options, f"{formats[0]}/{formats[1]} natively"
    joined = [
        np.ascontiguousarray(_reference.joined([step.array(part[side]) for part in step.parts]), np.float32)
        for side in (0, 1)
    ]
    types = dict.fromkeys(step.need(role).type for part in step.parts[::-1] for role in part)
    way = f"{'/'.join(types)} dequantised to {math_type}" if any(map(_is_block, step.tensors)) else f"as {math_type}"
    return _on(device, joined[0], math_type), _on(device, joined[1], math_type), {}, way


def _is_block(tensor: Any) -> bool:
    return bool(tensor.is_operand and tensor.is_quantised)


def _sinks(step: Step, device: str) -> dict[str, Any]:
    sinks = step.find("sinks")
    return {} if sinks is None else {"sinks": _on(device, sinks.values().reshape(-1).astype(np.float32), "fp32")}


def _attention(step: Step, rows: Values | None, device: str, target: str) -> Result:
    q, math_type = _queries(step, target)
    mask = _decide.mask(step)
    if rows is not None:
        q, mask = np.ascontiguousarray(q[:, rows]), None if mask is None else mask[:, :, rows]
    bias = _reference.bias(mask, q.shape[2], step.max_bias)

    def supports(**formats: Any) -> bool:
        return bool(
            flashport.supports(
                "attention", target=target, dtype=numerics.DTYPE[math_type], head_dim=q.shape[3],
                head_dim_v=step.need("v").ne[0], bias=bias is not None, softcap=step.softcap > 0, **formats,
            )
        )  # fmt: skip

    k, v, options, way = _keys(step, device, math_type, supports)
    if bias is not None:
        options["bias"] = _on(device, np.ascontiguousarray(bias, np.float32), "fp32")
    out = flashport.attention(
        _on(device, q, math_type),
        k,
        v,
        softmax_scale=step.scale,
        softcap=step.softcap,
        **options,
        **_sinks(step, device),
    )
    return Result("attention", device, way, _values(out, math_type), _ROUNDING[math_type])


def _flash_decode(step: Step, rows: Values | None, device: str, target: str) -> Result | None:
    """None where the step is no decoding."""
    q, math_type = _queries(step, target)
    seqlens = _lengths(step, q.shape[1])
    if seqlens is None or rows is not None or step.kind == "mixed":
        return None

    def supports(**formats: Any) -> bool:
        heads = step.need("k").ne[2]
        return bool(
            flashport.supports(
                "decode", target=target, q_dtype=numerics.DTYPE[math_type], head_dim=q.shape[3], q_len=q.shape[1],
                head_dim_v=step.need("v").ne[0], group_size=q.shape[2] // heads, **formats,
            )
        )  # fmt: skip

    k, v, options, way = _keys(step, device, math_type, supports)
    lengths = HostArray(seqlens, "int32").on(device)
    out = flashport.flash_decode(
        _on(device, q, math_type), k, v, lengths, softmax_scale=step.scale, softcap=step.softcap, **options,
        **_sinks(step, device),
    )  # fmt: skip
    return Result("flash_decode", device, way, _values(out, math_type), _ROUNDING[math_type])


def _flash_decode_segments(step: Step, rows: Values | None, device: str, target: str) -> Result | None:
    """None where the step is no decoding of a mixed cache."""
    q, math_type = _queries(step, target)
    if step.kind != "mixed" or q.shape[1] > _MOST_DECODE_TOKENS:
        return None
    mask = _decide.mask(step)
    if mask is None:  # every query sees every key
        mask = np.zeros((1, 1, q.shape[1], sum(step.need(keys).ne[1] for keys, _ in step.parts)), np.float32)
    if rows is not None:
        q, mask = q[:, rows], mask[:, :, rows]
    segments, ways = [], []
    for part in step.parts:
        (k, k_format), (v, v_format) = (_stored(step.need(role), device, math_type) for role in part)
        segments.append(flashport.KvSegment(k, v, k_format=k_format, v_format=v_format))
        ways.append(f"{k_format}/{v_format}")
    options = _sinks(step, device)
    if step.max_bias:
        options["mask_slopes"] = _on(device, np.array(ggml.slopes(q.shape[2], step.max_bias), np.float32), "fp32")
    out = flashport.flash_decode_segments(
        _on(device, np.ascontiguousarray(q), math_type),
        segments,
        mask=_on(device, np.ascontiguousarray(mask, np.float32), "fp32"),
        softmax_scale=step.scale,
        softcap=step.softcap,
        **options,
    )
    way = f"{' + '.join(ways)} natively"
    return Result("flash_decode_segments", device, way, _values(out, math_type), _ROUNDING[math_type])


def _stored(tensor: Tensor, device: str, math_type: str) -> tuple[Any, Any]:
    """(batch, tokens, heads, row) of keys or values in their own format, fp32 on GPUs in that of queries."""
    fmt = _FORMATS.get(tensor.type)
    if fmt is None or (fmt == "fp32" and device != "cpu"):
        return _on(
            device, np.ascontiguousarray(tensor.values().transpose(0, 2, 1, 3), np.float32), math_type
        ), math_type
    rows = np.ascontiguousarray(tensor.rows().transpose(0, 2, 1, 3))
    is_block = tensor.is_quantised
    bits, dtype = (rows, "uint8") if is_block else (rows.view(numerics.CARRIER[fmt]), numerics.DTYPE[fmt])
    return HostArray(bits, dtype).on(device), fmt


def _values(out: Any, math_type: str) -> Values:
    return to_host(out, math_type) if isinstance(out, flashport.DeviceArray) else np.asarray(out)


def _lengths(step: Step, tokens: int) -> Values | None:
    """(batch) int32, the keys of each sequence; None unless the mask is the causal one of these lengths."""
    if tokens > _MOST_DECODE_TOKENS:
        return None
    mask, batch = _decide.mask(step), step.need("q").ne[3]
    keys = step.need("k").ne[1]
    if mask is None:
        return np.full(batch, keys, np.int32) if tokens == 1 else None
    if mask.shape[1] != 1:
        return None
    seen = mask[:, 0] == 0
    lengths = seen[:, -1].sum(axis=-1)
    last = lengths[:, None] - tokens + np.arange(tokens)
    causal = np.arange(keys) <= last[..., None]
    if not np.array_equal(seen, causal) or not np.isneginf(mask[:, 0][~seen]).all() or (last < 0).any():
        return None
    return np.ascontiguousarray(np.broadcast_to(lengths, batch), np.int32)
