"""Inputs that lie apart, where SGLang's and FLA's functions make them contiguous: the same bits, and pools not lost."""

from __future__ import annotations

import numpy as np
import pytest

from chunk_call import make_chunk
from delta_call import check, make_delta
from flashport import fla, sglang
from helpers import BF16, assert_close, from_torch, same, to_torch

PACKED = sglang.fused_recurrent_gated_delta_rule_packed_decode


def apart(x):
    """The same values, neighbours of no axis in memory."""
    spread = np.zeros((*x.shape[:-1], x.shape[-1], 2), x.dtype)
    spread[..., 0] = x
    return spread[..., 0]


def turned(x):
    """The same values with the last axis' stride the largest, as a convolution leaves them."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -1, 0)), 0, -1)


def as_torch(x):
    """A tensor with the strides of the array, but for its bytes."""
    if not isinstance(x, np.ndarray):
        return x
    flat = to_torch(np.lib.stride_tricks.as_strided(x, (_span(x),), (x.itemsize,)))
    return flat.as_strided(x.shape, [step // x.itemsize for step in x.strides])


def _span(x):
    return sum((extent - 1) * step // x.itemsize for extent, step in zip(x.shape, x.strides, strict=True)) + 1


def sglang_chunk(x):
    o, _, h = sglang.chunk_gated_delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], None, x["state"], x["state_indices"], x["cu_seqlens"],
        use_qk_l2norm_in_kernel=1,
    )  # fmt: skip
    return o, h, x["state"]


def sglang_update(x):
    out = sglang.fused_recurrent_gated_delta_rule_update(
        x["q"], x["k"], x["v"], x["g"], x["beta"], None, x["state"], x["state_indices"], x["cu_seqlens"], 1,
    )  # fmt: skip
    return out, x["state"]


def fla_call(function, x):
    return function(
        x["q"], x["k"], x["v"], x["g"], beta=x["beta"], initial_state=x["state"], output_final_state=1,
        use_qk_l2norm_in_kernel=1, state_v_first=1, cu_seqlens=x["cu_seqlens"],
    )  # fmt: skip


CALLS = {
    "sglang chunk": sglang_chunk,
    "sglang update": sglang_update,
    "fla chunk": lambda x: fla_call(fla.chunk_gated_delta_rule, x),
    "fla recurrent": lambda x: fla_call(fla.fused_recurrent_gated_delta_rule, x),
}


def make(name):
    lens = (70, 3, 5)
    call = make_chunk(lens=lens, heads=2, values=32, gap=0)
    x = {key: call[key] for key in ("q", "k", "v", "g", "beta", "state", "state_indices", "cu_seqlens")}
    if name.startswith("fla"):
        x["state"] = np.ascontiguousarray(np.nan_to_num(x["state"][: len(lens)]))
    return x


# What is only read; SGLang's functions write the states.
INPUTS = [
    (name, argument)
    for name in CALLS
    for argument in ("q", "k", "v", "g", "beta", "cu_seqlens", "state" if name.startswith("fla") else "state_indices")
]


@pytest.mark.parametrize(("name", "argument"), INPUTS)
@pytest.mark.parametrize("lay", [apart, turned])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_inputs_that_lie_apart(name, argument, lay, library):
    convert = as_torch if library == "torch" else lambda x: x
    wanted = CALLS[name](make(name))
    x = make(name)
    x[argument] = lay(x[argument])
    x = {key: convert(value) for key, value in x.items()}
    before = x[argument]
    got = CALLS[name](x)
    assert x[argument] is before
    for one, other in zip(got, wanted, strict=True):
        same(from_torch(one) if library == "torch" else one, other)


@pytest.mark.parametrize("name", ["sglang chunk", "sglang update"])
@pytest.mark.parametrize("lay", [apart, turned])
def test_a_pool_that_is_written_is_never_copied(name, lay):
    """SGLang would write to the copy; here it is said, and slots that lie apart are served."""
    x = make(name)
    x["state"] = lay(x["state"])
    before = x["state"].copy()
    with pytest.raises(ValueError, match=r"state must be contiguous within a slot"):
        CALLS[name](x)
    same(x["state"], before)
    x, usual = make(name), make(name)
    wide = np.full((*x["state"].shape[:1], 3, *x["state"].shape[1:]), np.nan, x["state"].dtype)
    wide[:, 1] = x["state"]
    x["state"] = wide[:, 1]
    for one, other in zip(CALLS[name](x), CALLS[name](usual), strict=True):
        same(one, other)


@pytest.mark.parametrize("function", [fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_parameters_of_16_bits(function, dtype):
    """A_log as a model has it that was cast as a whole."""
    x = make("fla")
    rest = {"use_gate_in_kernel": True, "A_log": np.linspace(-1, 0, 4).astype(dtype)}
    rest["dt_bias"] = np.linspace(-2, 1, 4).astype(dtype)
    given = (x["q"], x["k"], x["v"], x["g"])
    got, _ = function(*given, beta=x["beta"], **rest)
    wanted, _ = function(*given, beta=x["beta"], **rest | {"A_log": rest["A_log"].astype(np.float32)})
    if function is fla.chunk_gated_delta_rule:
        same(got, wanted)
    assert_close(got, wanted.astype(np.float64))


@pytest.mark.parametrize("is_kda", [False, True])
@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_decode_with_parameters_of_16_bits(is_kda, dtype):
    call = make_delta(tokens=2, is_kda=is_kda, use_qk_l2norm=True)
    call.arguments["A_log"] = call["A_log"].astype(dtype)
    call.arguments["dt_bias"] = call["dt_bias"].astype(dtype)
    check(call)


@pytest.mark.parametrize("function", [fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule])
def test_parameters_that_lie_apart(function):
    x = make("fla")
    rest = {"use_gate_in_kernel": True, "A_log": np.linspace(-1, 0, 4, dtype=np.float32)}
    rest["dt_bias"] = np.linspace(-2, 1, 4, dtype=np.float32)
    given = (x["q"], x["k"], x["v"], x["g"])
    wanted, _ = function(*given, beta=x["beta"], **rest)
    rest |= {key: apart(rest[key]) for key in ("A_log", "dt_bias")}
    got, _ = function(*given, beta=x["beta"], **rest)
    same(got, wanted)


def pack(call):
    """mixed_qkv of a call of one token."""
    parts = [call[name].reshape(call[name].shape[0], -1) for name in ("q", "k", "v")]
    return np.ascontiguousarray(np.concatenate(parts, axis=1))


def packed(x, out, **changes):
    given = {
        "mixed_qkv": pack(x), "a": x["a"], "b": x["b"], "A_log": x["A_log"], "dt_bias": x["dt_bias"], "scale": 0.25,
        "initial_state": x["state"], "out": out, "ssm_state_indices": x["state_indices"],
        "use_qk_l2norm_in_kernel": 1,
    } | changes  # fmt: skip
    return PACKED(*given.values(), state_layout=x["state_layout"])


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_packed_decode(layout, state_dtype, index_dtype):
    """The bits of gated_delta_update; zeros where a slot is padding, whatever came in; indices of any stride."""

    def make_one():
        return make_delta(
            batch=4, slots="padded", a_form="flat", use_qk_l2norm=True, scale=0.25, layout=layout,
            state_dtype=state_dtype, index_dtype=index_dtype,
        )  # fmt: skip

    call = make_one()
    call.run()
    other = make_one()
    out = np.full((4, 1, *call["v"].shape[2:]), np.nan, call["q"].dtype)
    mixed = pack(other)
    mixed[::2] = np.nan
    indices = apart(other["state_indices"])
    got = packed(other, out, mixed_qkv=mixed, ssm_state_indices=indices)
    assert got[0] is out
    assert got[1] is other["state"]
    same(out[1::2], call["out"][1::2])
    same(out[::2], np.zeros_like(out[::2]))
    same(other.memory["state"], call.memory["state"])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mixed_qkv": np.zeros((2, 2, 8), np.float32)}, r"mixed_qkv must have 2 dimensions \(batch, 2 \* heads"),
        ({"mixed_qkv": np.zeros((2, 300), np.float32)}, r"mixed_qkv must have 2 \* heads \* 64 \+ 4 \* 64 columns by"),
        ({"mixed_qkv": np.zeros((2, 256), np.float32)}, r"mixed_qkv must have .* initial_state, got 256$"),
        ({"initial_state": np.zeros((2, 8), np.float32)}, r"initial_state must have 4 dimensions .*, got 2$"),
        ({"scale": 0.0}, "scale must be above 0, got 0.0$"),
    ],
)
def test_what_packed_decode_refuses(changes, text):
    call = make_delta(batch=2, a_form="flat")
    with pytest.raises(ValueError, match=f"^{PACKED.__name__}: {text}"):
        packed(call, np.zeros((2, 1, 4, 64), call["q"].dtype), **changes)


def test_no_output_is_asked_for():
    """States are written all the same; what comes back has the shape that SGLang gives it."""
    x, usual = make("sglang update"), make("sglang update")
    sglang_update(usual)
    given = (x["q"], x["k"], x["v"], x["g"], x["beta"], None, x["state"], x["state_indices"], x["cu_seqlens"], 1, 0, 1)
    out = sglang.fused_recurrent_gated_delta_rule_update(*given)
    assert out.shape == (1, 1, 1, 1)
    same(x["state"], usual["state"])
