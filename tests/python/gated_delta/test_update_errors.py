"""A wrong argument of gated_delta_update is an exception that names function and argument; nothing has been written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashport
from delta_call import make_delta
from helpers import BF16, expect_refusal, share_memory

POOLS = ("state", "intermediate_states")
OUTPUTS = ("out", *POOLS)


def dense():
    """Three sequences of four tokens, with all that a draft tree takes."""
    arguments = make_delta(batch=3, tokens=4, heads=2, group=2, keys=64, values=32, steps=4, tree=True).arguments
    arguments["parent_tokens"] = arguments["parent_tokens"][:, :4]
    return arguments


def kda():
    """The same with a gate a channel, a and b by rows of the batch, and layout kv."""
    return make_delta(
        batch=3, tokens=4, keys=64, values=32, is_kda=True, a_form="rows", layout="kv", index_dtype=np.int64
    ).arguments


def packed():
    """Three sequences in one row of the batch."""
    return make_delta(lens=(3, 0, 5), keys=64, values=32, steps=6).arguments


FORMS = {"dense": dense, "kda": kda, "packed": packed}
ARRAYS = [(form, name) for form, make in FORMS.items() for name, x in make().items() if isinstance(x, np.ndarray)]


def expect(arguments, error, text):
    """The call fails so, and leaves its outputs as they were."""
    expect_refusal(flashport.gated_delta_update, arguments, OUTPUTS, error, text)


@pytest.mark.parametrize("form", FORMS)
def test_the_arguments_are_right_unchanged(form):
    out = flashport.gated_delta_update(**FORMS[form]())
    assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize(("form", "name"), ARRAYS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_wrong_rank(form, name, data):
    arguments = FORMS[form]()
    array = arguments[name]
    if data.draw(st.booleans(), label="one more"):
        wrong = np.expand_dims(array, data.draw(st.integers(0, array.ndim), label="axis"))
    else:
        wrong = np.asarray(array[(0,) * data.draw(st.integers(1, array.ndim), label="fewer")], array.dtype)
    if name in ("a", "b") and wrong.ndim in (2, 3, 4):
        return  # they have several forms; what does not fit one is a wrong shape
    if name in ("A_log", "dt_bias") and wrong.ndim > 1:
        return  # their shape does not matter
    arguments[name] = wrong
    expect(arguments, ValueError, rf"{name} must .*dimensions?")


@pytest.mark.parametrize(("form", "name"), ARRAYS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_wrong_shape(form, name, data):
    arguments = FORMS[form]()
    array = arguments[name]
    axis = data.draw(st.integers(0, array.ndim - 1), label="axis")
    change = data.draw(st.sampled_from([-1, 1]), label="change")
    if name in POOLS and axis == 0:
        return  # as many as the caller likes
    if name in ("intermediate_states", "parent_tokens") and axis == 1 and (change > 0 or form == "packed"):
        return  # no fewer than tokens
    shape = list(array.shape)
    shape[axis] += 8 * change if name == "v" and axis == 3 else change  # 31 values are not served at all
    arguments[name] = np.zeros(shape, array.dtype)
    expect(arguments, ValueError, r"\w+.* must .*got ")


@pytest.mark.parametrize(("form", "name"), ARRAYS)
@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.bool_, np.complex64, np.int16])
def test_an_element_type_that_nobody_has(form, name, dtype):
    arguments = FORMS[form]()
    arguments[name] = np.zeros(arguments[name].shape, dtype)
    text = "has element type complex64, which" if dtype is np.complex64 else rf"must be .*got {np.dtype(dtype).name}$"
    expect(arguments, TypeError, rf"{name} {text}")


@pytest.mark.parametrize(("form", "name"), ARRAYS)
def test_an_element_type_of_another_argument(form, name):
    arguments = FORMS[form]()
    array = arguments[name]
    floats = array.dtype == BF16 or array.dtype == np.float32
    arguments[name] = np.zeros(array.shape, np.int32 if floats else np.float32)
    expect(arguments, TypeError, rf"{name} ")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("k", np.float32), ("v", np.float16), ("A_log", np.int32), ("out", np.float32), ("state", np.int32),
     ("intermediate_states", np.int32)],
)  # fmt: skip
def test_an_element_type_that_does_not_go_with_the_others(name, dtype):
    arguments = dense()
    arguments[name] = np.zeros(arguments[name].shape, dtype)
    expect(arguments, TypeError, rf"\w*{name}")


def test_states_of_two_types_of_16_bits():
    arguments = dense()
    arguments["state"] = arguments["state"].astype(np.float16)
    arguments["intermediate_states"] = arguments["intermediate_states"].astype(BF16)
    text = "state, final_states and intermediate_states must not be float16 and bfloat16 in one call$"
    expect(arguments, NotImplementedError, text)


@pytest.mark.parametrize("name", [name for form, name in ARRAYS if form == "dense"])
@pytest.mark.parametrize("value", [[1, 2], 3, "q", object()])
def test_no_array(name, value):
    arguments = dense()
    arguments[name] = value
    text = rf"{name} must be an array that speaks DLPack .*got {type(value).__name__}"
    expect(arguments, TypeError, text)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"head_map": "grouped"}, ValueError, "head_map must be .*grouped"),
        ({"head_map": 1}, TypeError, "head_map must be .*int"),
        ({"state_layout": "KV"}, ValueError, "state_layout must be .*KV"),
        ({"state_layout": 3}, TypeError, "state_layout must be .*int"),
        ({"scale": "x"}, TypeError, "scale must be a number, got str"),
        ({"scale": float("inf")}, ValueError, "scale"),
        ({"scale": float("nan")}, ValueError, "scale"),
        ({"softplus_beta": 0.0}, ValueError, "softplus_beta"),
        ({"softplus_beta": float("nan")}, ValueError, "softplus_beta"),
        ({"softplus_beta": []}, TypeError, "softplus_beta must be a number, got list"),
        ({"softplus_threshold": float("nan")}, ValueError, "softplus_threshold"),
        ({"softplus_threshold": "x"}, TypeError, "softplus_threshold must be a number, got str"),
        ({"scale": 0.0}, ValueError, "scale must be positive"),
        ({"softplus_beta": -1.0}, ValueError, "softplus_beta must be positive"),
        ({"lower_bound": 1.0}, ValueError, "lower_bound"),
        ({"lower_bound": "low"}, TypeError, "lower_bound must be a number, got str"),
        ({"is_kda": 1}, TypeError, "is_kda must be True or False, got int"),
        ({"use_qk_l2norm": 1.0}, TypeError, "use_qk_l2norm must be True or False, got float"),
        ({"update_state": "yes"}, TypeError, "update_state must be True or False, got str"),
        ({"intermediate_states": None}, ValueError, "intermediate_states and intermediate_indices must be given toge"),
        ({"intermediate_indices": None}, ValueError, "intermediate_states and intermediate_indices must be given toge"),
        ({"intermediate_indices": None, "intermediate_states": None}, ValueError, "parent_tokens needs intermediate_s"),
        ({"state": None}, ValueError, "state_indices needs state"),
        ({"state_indices": None, "state": np.zeros((2, 4, 32, 64), np.float32)}, ValueError, "state must have a slot"),
        ({"is_kda": True}, ValueError, r"(a|dt_bias) must"),
    ],
)  # fmt: skip
def test_options(change, error, text):
    expect(dense() | change, error, text)


# --- Contents in host memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["state_indices", "intermediate_indices"])
def test_a_slot_is_named_once(name):
    arguments = dense()
    arguments[name][...] = (2, 1, 2)
    expect(arguments, ValueError, rf"{name}\b.*\b2\b")
    arguments[name][...] = (-1, 1, -1)  # padding may repeat
    flashport.gated_delta_update(**arguments)


@pytest.mark.parametrize(("name", "pool"), [("state_indices", "state"), ("intermediate_indices", POOLS[1])])
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_slot_beyond_its_pool(name, pool, data):
    arguments = kda() if name == "state_indices" and data.draw(st.booleans(), label="int64") else dense()
    slots = len(arguments[pool])
    most = np.iinfo(arguments[name].dtype).max
    slot = data.draw(st.one_of(st.just(slots), st.integers(slots, int(most))), label="slot")
    arguments[name][...] = -1
    arguments[name][data.draw(st.integers(0, 2), label="sequence")] = slot
    expect(arguments, ValueError, rf"{name}\b.*\b{slot}\b")


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_cu_seqlens(data):
    arguments = packed()
    bounds = data.draw(st.lists(st.integers(-3, 12), min_size=4, max_size=4), label="cu_seqlens")
    arguments["cu_seqlens"] = np.array(bounds, np.int32)
    lens = np.diff(bounds)
    if bounds[0] == 0 and (lens >= 0).all() and bounds[-1] <= 8 and (lens <= 6).all():
        flashport.gated_delta_update(**arguments)
    elif bounds[0] == 0 and (lens >= 0).all() and bounds[-1] <= 8:
        kept = arguments["intermediate_indices"]
        if (kept[lens > 6] < 0).all():
            flashport.gated_delta_update(**arguments)
        else:
            expect(arguments, ValueError, "(cu_seqlens|intermediate_states)")
    else:
        expect(arguments, ValueError, "cu_seqlens")


def test_packed_sequences_have_one_row():
    arguments = packed()
    for name in ("q", "k", "v", "out"):
        arguments[name] = arguments[name].reshape(2, 4, *arguments[name].shape[2:]).copy()
    expect(arguments, ValueError, r".*cu_seqlens")


def test_more_tokens_than_steps():
    arguments = dense()
    arguments["parent_tokens"] = None
    arguments["intermediate_states"] = arguments["intermediate_states"][:, :3].copy()
    expect(arguments, ValueError, "intermediate_states")


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_parent_that_is_no_earlier_token(data):
    arguments = dense()
    arguments["intermediate_indices"][...] = (2, 0, 3)
    sequence = data.draw(st.integers(0, 2), label="sequence")
    token = data.draw(st.integers(1, 3), label="token")
    parent = data.draw(st.one_of(st.integers(token, 1 << 30), st.integers(-(1 << 30), -1)), label="parent")
    arguments["parent_tokens"][sequence, token] = parent
    expect(arguments, ValueError, rf"parent_tokens\b.*{parent}\b")


# --- Heads, dims, memory ---------------------------------------------------------------------------------------------


def test_value_heads_are_a_multiple_of_heads():
    arguments = dense()
    for name in ("q", "k"):
        arguments[name] = np.zeros((3, 4, 3, 64), BF16)
    expect(arguments, ValueError, r"num_v_heads must be a multiple of num_heads")


@pytest.mark.parametrize(("keys", "values"), [(8, 64), (64, 8), (264, 64), (64, 264), (20, 64), (64, 20)])
def test_dims_that_no_kernel_serves(keys, values):
    arguments = make_delta(keys=keys, values=values).arguments
    expect(arguments, NotImplementedError, r".*head_dim_(k|v)")


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_not_read_only(name):
    arguments = dense()
    arguments[name].flags.writeable = False
    expect(arguments, ValueError, f"{name} is written and must not be read-only")


def test_read_only_inputs_are_read():
    arguments = dense() | {"update_state": False}
    for name, x in arguments.items():
        if isinstance(x, np.ndarray) and name not in ("out", "intermediate_states"):
            x.flags.writeable = False  # the pool too: it is not written
    flashport.gated_delta_update(**arguments)


@pytest.mark.parametrize("name", ["q", "k", "v", "A_log", "dt_bias", "out"])
def test_the_last_axis_is_contiguous(name):
    arguments = dense()
    x = arguments[name]
    arguments[name] = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., ::2]
    expect(arguments, ValueError, rf"{name} must .*contiguous")


@pytest.mark.parametrize("form", ["dense", "kda"])
def test_strides_of_the_gates_do_not_matter(form):
    plain, strided = FORMS[form](), FORMS[form]()
    for name in ("a", "b"):
        x = strided[name]
        wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)
        wide[..., ::2] = x
        strided[name] = wide[..., ::2]
    out = flashport.gated_delta_update(**strided)
    assert out.tobytes() == flashport.gated_delta_update(**plain).tobytes()
    assert strided["state"].tobytes() == plain["state"].tobytes()


def test_a_slot_that_is_only_read_may_be_named_twice():
    arguments = dense() | {"update_state": False}
    arguments["state_indices"][...] = arguments["state_indices"][0]
    flashport.gated_delta_update(**arguments)


@pytest.mark.parametrize("name", POOLS)
def test_slots_are_contiguous(name):
    arguments = dense()
    x = arguments[name]
    arguments[name] = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., ::2]
    expect(arguments, ValueError, rf"{name} must .*contiguous")
    arguments[name] = np.zeros((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype).swapaxes(-1, -2)
    expect(arguments, ValueError, rf"{name} must .*contiguous")


def rates():
    """Logarithms of gates of heads, keys and columns, rates of columns, and final states."""
    return make_delta(
        batch=3, tokens=4, keys=64, values=32, gate="log", key_gates=True, column_gates=True, rate="rates",
        final_dtype=np.float32,
    ).arguments  # fmt: skip


SHARED = [(make, name) for make in (*FORMS.values(), rates) for name, x in make().items() if isinstance(x, np.ndarray)]


@pytest.mark.parametrize(("make", "other"), SHARED)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_outputs_do_not_overlap_others(make, other, data):
    arguments = make()
    name = data.draw(st.sampled_from([x for x in (*OUTPUTS, "final_states") if x != other and x in arguments]))
    share_memory(arguments, name, other, data.draw(st.integers(0, (arguments[name].nbytes - 1) // 16)))
    expect(arguments, ValueError, rf"({name} must not share memory with {other}|{other} must not share .* {name});")


def test_outputs_do_not_overlap_themselves():
    arguments = dense()
    overlapping = np.lib.stride_tricks.as_strided(
        arguments["state"], strides=(arguments["state"].strides[1], *arguments["state"].strides[1:])
    )
    expect(arguments | {"state": overlapping}, ValueError, "state ")
    broadcast = np.lib.stride_tricks.as_strided(arguments["out"], strides=(0, *arguments["out"].strides[1:]))
    expect(arguments | {"out": broadcast}, ValueError, "out ")


@pytest.mark.parametrize("batch", [0, 3])
def test_nothing_to_do(batch):
    """No tokens or no sequences are no error, and write nothing."""
    call = make_delta(batch=batch, tokens=0 if batch else 1)
    before = call["state"].tobytes()
    assert call.run() is call["out"]
    assert call["state"].tobytes() == before
