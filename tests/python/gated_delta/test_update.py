"""gated_delta_update against the fp64 recurrence, and what it promises about bits."""

from __future__ import annotations

import numpy as np
import pytest

import flashport
from delta_call import FORMAT, Call, check, expected, make_delta, pairs_of
from flashport.testing import gated_delta_oracle as oracle
from helpers import BF16, from_torch, same, to_torch

DIMS = (16, 64, 96, 128, 192, 256)
OPTIONS = {
    "keys": DIMS,
    "values": DIMS,
    "group": (1, 2, 4, 8),
    "tokens": (0, 1, 2, 65),
    "packed": (False, True),
    "dtype": (np.float32, np.float16, BF16),
    "gate_dtype": (None, np.float32, np.float16),
    "state_dtype": (np.float32, BF16, np.float16),
    "index_dtype": (np.int32, np.int64),
    "layout": ("vk", "kv"),
    "slots": ("permuted", "padded", None),
    "gap": (0, 24),
    "update_state": (True, False),
    "verify": ("none", "fp32", "narrow", "tree fp32", "tree narrow"),
    "is_kda": (False, True),
    "gate": ({}, {"lower_bound": -5.0}, {"softplus_beta": 2.0, "softplus_threshold": 1.0}),
    "use_qk_l2norm": (True, False),
    "scale": (None, 0.5),
    "head_map": ("consecutive", "modulo"),
    "a_form": ("flat", "rows", "channels"),
}


def call_of(row, seed):
    """A row of OPTIONS as a call."""
    row = dict(row)
    tokens, packed, verify, gate = (row.pop(name) for name in ("tokens", "packed", "verify", "gate"))
    if verify != "none":
        tokens = min(tokens, 9)  # so many states have to be kept
        row["steps"] = max(tokens, 1) + 1
        narrow = np.float16 if row["state_dtype"] is np.float16 else BF16  # a call has one type of 16 bits
        row["intermediate_dtype"] = narrow if "narrow" in verify else np.float32
        row["tree"] = verify.startswith("tree")
    if packed:
        row["lens"] = (0, tokens, 1, 0, min(tokens, 3), 0)
        row["steps"] = row.get("steps", 0) and max(row["steps"], 2)
    heads = 1 if row["group"] >= 4 else 2
    return make_delta(tokens=tokens, heads=heads, seed=seed, **row, **gate)


PAIRS = pairs_of(OPTIONS)


def id_of(row):
    return f"k{row['keys']}-v{row['values']}-g{row['group']}-t{row['tokens']}-{row['verify'].replace(' ', '_')}"


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=[f"{n}-{id_of(row)}" for n, row in enumerate(PAIRS)])
def test_options_in_pairs(number):
    check(call_of(PAIRS[number], number))


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("head_map", ["consecutive", "modulo"])
def test_value_heads_of_a_query_head(group, head_map):
    check(make_delta(group=group, head_map=head_map, tokens=2, use_qk_l2norm=True, dtype=np.float32))


@pytest.mark.parametrize("keys", [64, 128])
def test_layouts_hold_the_same_state(keys):
    """With K = V no shape tells the layouts apart; from the same state both give the same results."""
    first, second = (
        make_delta(tokens=3, keys=keys, values=keys, layout=layout, use_qk_l2norm=True, dtype=np.float32)
        for layout in ("vk", "kv")
    )
    second["state"][...] = first["state"].swapaxes(2, 3)
    truth, other = (expected(call.arguments, np.float64) for call in (first, second))
    np.testing.assert_array_equal(truth.out, other.out)
    np.testing.assert_array_equal(truth.state, other.state.swapaxes(2, 3))
    check(first)
    check(second)


@pytest.mark.parametrize("is_kda", [False, True])
@pytest.mark.parametrize("gate_speed", [10.0, -10.0])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_extreme_gates(is_kda, gate_speed, dtype):
    """No NaN, and no digits lost: a of +-80 and of -17, where fp32 log(1 + e^a) is 0, and b of +-100."""
    call = make_delta(
        batch=15, tokens=4, group=1, is_kda=is_kda, use_qk_l2norm=True, dtype=dtype, gate_dtype=np.float32
    )
    x = call.arguments
    inputs = np.array([(a, b) for a in (80, -80, -17, 0, 1) for b in (100, -100, 0)], np.float32)
    x["a"].reshape(15, 4, -1)[...] = inputs[:, 0, None, None]
    x["b"].reshape(15, 4, -1)[...] = inputs[:, 1, None, None]
    x["a"].reshape(15, 4, -1)[:, 2] *= -1  # a state that was kept is forgotten, and the other way round
    x["A_log"][...] = gate_speed
    x["dt_bias"][...] = 0
    check(call)


def test_the_gate_of_a_slow_head_keeps_its_digits():
    """Decays alone (b = -100), 200 tokens of g = -9e-4 = -e^10 log1p(e^-17): a gate that rounds to 0 would show."""
    call = make_delta(tokens=200, keys=16, values=16, group=1, dtype=np.float32, slots="permuted")
    x = call.arguments
    x["a"][...], x["b"][...], x["A_log"][...], x["dt_bias"][...] = -17, -100, 10, 0
    before = x["state"].copy()
    check(call)
    factor = np.exp(-200 * np.exp(10) * np.log1p(np.exp(-17)))
    named = x["state_indices"]
    np.testing.assert_allclose(x["state"][named], before[named] * factor, rtol=2e-5)


def test_zero_keys_and_large_values():
    call = make_delta(tokens=3, use_qk_l2norm=True, dtype=np.float32)
    call["k"][:, 1] = 0
    call["q"][:, 2] = 0
    call["v"][...] *= 1e4
    out = check(call)
    assert not out[:, 2].any()


def test_orthonormal_keys_recall_their_values():
    call = make_delta(batch=1, tokens=16, keys=16, heads=1, group=1, dtype=np.float32, slots=None, scale=1.0)
    x = call.arguments
    x["q"][0, :, 0] = x["k"][0, :, 0] = np.eye(16)
    x["a"][...], x["b"][...] = -200, 100  # keeps everything, learns everything
    np.testing.assert_allclose(call.run(), x["v"], rtol=1e-6)
    x["q"][0, 8:, 0] = np.eye(16)[:8]
    np.testing.assert_allclose(call.run()[0, 8:], x["v"][0, :8], rtol=1e-6)


def test_an_offset_past_two_to_the_31():
    """A slot far away in a pool of which the system gives pages only to what is touched."""
    call = make_delta(batch=1, tokens=1, state_dtype=BF16, use_qk_l2norm=True)
    x = call.arguments
    first = x["state"][x["state_indices"][0]].copy()
    out = call.run().copy()
    stride = (1 << 30) + 64  # elements
    memory = np.zeros(2 * stride + first.size, BF16)
    strides = (stride * memory.itemsize, *x["state"].strides[1:])
    pool = np.lib.stride_tricks.as_strided(memory, (3, *first.shape), strides)
    pool[2] = first
    final = x["state"][x["state_indices"][0]]
    same(flashport.gated_delta_update(**x | {"state": pool, "state_indices": np.array([2], np.int32)}), out)
    same(pool[2], final)
    assert not _bits(pool[:2]).any()


# --- Bits ------------------------------------------------------------------------------------------------------------


def _bits(x):
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def _tokens_of(call, rows, tokens):
    """The call's inputs at some rows of the batch and some tokens of them, in new memory."""
    batch, length = call["q"].shape[:2]
    part = {name: call[name][rows][:, tokens].copy() for name in ("q", "k", "v")}
    for name in ("a", "b"):
        part[name] = call[name].reshape(batch, length, -1)[rows][:, tokens].copy()
    return part


def _run_part(call, rows, tokens, **changes):
    """(out, arguments) of the call on a part of its tokens; pools are shared with the call."""
    arguments = call.arguments | _tokens_of(call, rows, tokens) | {"out": None} | changes
    return flashport.gated_delta_update(**arguments), arguments


@pytest.mark.parametrize("is_kda", [False, True])
@pytest.mark.parametrize("keys", [64, 128, 256])
def test_intermediate_states_are_those_of_single_steps(is_kda, keys):
    shape = {"batch": 3, "tokens": 5, "keys": keys, "is_kda": is_kda, "use_qk_l2norm": True}
    call, single = make_delta(**shape, steps=6), make_delta(**shape)
    call.arguments["intermediate_indices"] = np.array([2, 0, 3], np.int32)
    out = call.run()
    for t in range(5):
        step, _ = _run_part(single, slice(None), [t])
        same(step[:, 0], out[:, t])
        same(single["state"][single["state_indices"]], call["intermediate_states"][[2, 0, 3], t])
    same(single["state"], call["state"])


@pytest.mark.parametrize("is_kda", [False, True])
def test_a_tree_is_each_of_its_paths(is_kda):
    parents = np.array([-1, 0, 0, 1, 1, 2, 4])
    call = make_delta(batch=2, tokens=7, steps=7, is_kda=is_kda, use_qk_l2norm=True, update_state=False)
    call.arguments |= {
        "parent_tokens": np.stack([parents, parents]).astype(np.int32),
        "intermediate_indices": np.array([1, 2], np.int32),
    }
    out = call.run().copy()
    states = call["intermediate_states"].copy()
    for leaf in (3, 5, 6):
        path = [leaf]
        while path[0]:
            path.insert(0, int(parents[path[0]]))
        alone, arguments = _run_part(
            call, slice(None), path, parent_tokens=None, update_state=True, state=call["state"].copy(),
            intermediate_states=None, intermediate_indices=None,
        )  # fmt: skip
        same(alone, out[:, path])
        same(arguments["state"][call["state_indices"]], states[[1, 2], leaf])


def test_a_chain_of_parents_is_no_tree():
    """Also with strides in the table of parents, and where nothing is kept to start from."""
    call = make_delta(batch=3, tokens=5, steps=5, use_qk_l2norm=True)
    plain = make_delta(batch=3, tokens=5, use_qk_l2norm=True)
    chain = np.full((3, 14), 77, np.int64)
    chain[:, ::2][:, :5] = np.arange(-1, 4)
    call.arguments["parent_tokens"] = chain[:, ::2]
    same(call.run(), plain.run())
    same(call["state"], plain["state"])


@pytest.mark.parametrize("state_dtype", [np.float32, BF16, np.float16])
def test_bits_alone_and_in_a_batch(state_dtype):
    call = make_delta(batch=7, tokens=3, keys=128, state_dtype=state_dtype, use_qk_l2norm=True, slots="padded")
    start = call["state"].copy()
    out = call.run().copy()
    for n in range(7):
        alone, arguments = _run_part(
            call, [n], slice(None), state=start.copy(), state_indices=call["state_indices"][n : n + 1]
        )
        same(alone[0], out[n])
        slot = call["state_indices"][n]
        if slot >= 0:
            same(arguments["state"][slot], call["state"][slot])
    again, arguments = _run_part(
        call, slice(None, None, -1), slice(None), state=start.copy(), state_indices=call["state_indices"][::-1].copy()
    )
    same(again[::-1], out)
    same(arguments["state"], call["state"])


def test_packed_sequences_are_sequences():
    lens = (0, 1, 65, 0, 3, 1, 0)
    call = make_delta(lens=lens, keys=96, use_qk_l2norm=True, layout="kv")
    start = call["state"].copy()
    out = check(call)
    first = 0
    for n, length in enumerate(lens):
        alone, arguments = _run_part(
            call, slice(None), slice(first, first + length), cu_seqlens=None, state=start.copy(),
            state_indices=call["state_indices"][n : n + 1],
        )  # fmt: skip
        same(alone[0], out[0, first : first + length])
        slot = call["state_indices"][n]
        same(arguments["state"][slot], call["state"][slot])
        first += length


def test_decoding_as_packed_sequences_of_one_token():
    """What SGLang's decode hands in: B = 1 and cu_seqlens = 0, 1, 2, ..."""
    call = make_delta(batch=6, keys=128, values=128, use_qk_l2norm=True)
    start = call["state"].copy()
    dense = call.run().copy()
    packed = {name: call[name].reshape(1, 6, *call[name].shape[2:]) for name in ("q", "k", "v")}
    out = flashport.gated_delta_update(
        **call.arguments | packed | {"out": None, "state": start, "cu_seqlens": np.arange(7, dtype=np.int32)}
    )
    same(out[0], dense[:, 0])
    same(start, call["state"])


def test_tokens_that_belong_to_nobody():
    call = make_delta(lens=(2, 3, 4), use_qk_l2norm=True)
    call["cu_seqlens"][...] = (0, 2, 2, 5)
    check(call)


def test_one_call_or_two():
    """With an fp32 pool a prefill may stop anywhere and go on."""
    call = make_delta(tokens=40, use_qk_l2norm=True, is_kda=True)
    start = call["state"].copy()
    out = call.run().copy()
    for part in (slice(0, 13), slice(13, 40)):
        got, _ = _run_part(call, slice(None), part, state=start)
        same(got, out[:, part])
    same(start, call["state"])


# --- Defaults, and arrays of other libraries -------------------------------------------------------------------------


def test_defaults_are_what_the_docstring_says():
    call = make_delta(batch=3, tokens=2, dtype=np.float32)
    call["state"][...] = np.random.default_rng(1).standard_normal(call["state"].shape)
    call["state_indices"][...] = np.arange(3)
    short = dict(call.arguments) | {"state": call["state"].copy()}
    for name in ("state_indices", "state_layout", "update_state", "out"):
        del short[name]
    call.arguments |= {
        "scale": 64**-0.5, "softplus_beta": 1.0, "softplus_threshold": 20.0, "lower_bound": None,
        "use_qk_l2norm": False, "is_kda": False, "head_map": "consecutive",
    }  # fmt: skip
    out = flashport.gated_delta_update(**short)
    assert type(out) is np.ndarray
    assert out.flags.c_contiguous
    same(out, call.run())
    same(short["state"], call["state"])


def test_a_new_output_is_contiguous_whatever_v_is():
    call = make_delta(tokens=3, dtype=np.float32)
    tensors = {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in call.arguments.items()}
    tensors |= {"v": tensors["v"].permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3), "out": None}
    out = flashport.gated_delta_update(**tensors)
    assert out.is_contiguous()
    same(out.numpy(), call.run())


def test_a_device_array_makes_device_arrays():
    call = make_delta(dtype=np.float32)
    q = flashport.DeviceArray(call["q"].shape, "float32")
    q.copy_from(np.ascontiguousarray(call["q"]))
    state = call["state"].copy()
    out = flashport.gated_delta_update(**call.arguments | {"q": q, "out": None, "state": state})
    assert type(out) is flashport.DeviceArray
    same(np.from_dlpack(out), call.run())


def test_without_a_pool():
    call = make_delta(tokens=2, slots=None)
    check(call)
    padded = make_delta(tokens=2)
    padded["state_indices"][...] = -1
    same(padded.run(), call["out"])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_types_of_dt_bias(dtype):
    call = make_delta(dtype=np.float32)
    call.arguments["dt_bias"] = call["dt_bias"].astype(dtype)
    check(call)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
def test_torch_tensors(state_dtype):
    torch = pytest.importorskip("torch")
    call = make_delta(batch=3, tokens=2, steps=2, use_qk_l2norm=True, state_dtype=getattr(np, state_dtype, BF16))
    tensors = {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in call.arguments.items()}
    out = flashport.gated_delta_update(**tensors | {"out": None})
    assert out.dtype is torch.bfloat16
    assert out.is_contiguous()
    call.run()
    same(from_torch(out), call["out"])
    for name in ("state", "intermediate_states"):
        same(from_torch(tensors[name]), call[name])


# --- Drift -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [np.float32, BF16])
@pytest.mark.parametrize("steps", [512, pytest.param(4096, marks=pytest.mark.slow)])
def test_drift_of_the_state(steps, state_dtype):
    """Single steps, one after the other: the state's error stays within 1.5 times the fp32 recurrence's."""
    call = make_delta(
        batch=1, tokens=steps, keys=64, values=64, dtype=BF16, state_dtype=state_dtype, use_qk_l2norm=True
    )
    slot = call["state_indices"][0]
    states = {dtype: call["state"].astype(dtype) for dtype in (np.float64, np.float32)}
    for t in range(steps):
        got, arguments = _run_part(call, slice(None), [t])
        results = {}
        for dtype, state in states.items():
            given = {name: x for name, x in arguments.items() if name not in ("out", "state", "use_qk_l2norm")}
            results[dtype] = oracle.update(
                **given, state=state, dtype=dtype, out_type="bf16", state_type=FORMAT[np.dtype(state_dtype)],
                rule=oracle.Rule(use_qk_l2norm=True),
            )  # fmt: skip
            states[dtype] = results[dtype].state
        if (t + 1) % 256 == 0:
            truth, plain = results[np.float64], results[np.float32]
            for what, x, y, z in (("out", got, truth.out, plain.out),
                                  ("state", call["state"][slot], truth.state[slot], plain.state[slot])):  # fmt: skip
                problem = oracle.compare(x, y, z, FORMAT[x.dtype], f"{what} after {t + 1} steps").problem
                assert not problem, problem


def test_the_pairs_are_all_there():
    names = list(OPTIONS)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            met = {(str(row[first]), str(row[second])) for row in PAIRS}
            assert len(met) == len(OPTIONS[first]) * len(OPTIONS[second])


def test_the_judge_sees_what_is_wrong():
    """A call whose state was transposed, or that wrote beside its slots, is not in tolerance."""
    call = make_delta(tokens=2, use_qk_l2norm=True)
    truth, plain = (expected(call.arguments, dtype) for dtype in (np.float64, np.float32))
    swapped = call.arguments | {"state": call["state"].swapaxes(2, 3)}
    wrong = expected(swapped, np.float32)
    assert oracle.compare(wrong.out, truth.out, plain.out, "bf16").problem
    assert isinstance(call, Call)
