"""A wrong argument of gated_delta_chunk is an exception that names function and argument; nothing has been written.

What single mistakes say word for word is in test_gated_delta_chunk.py.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashport
from chunk_call import OUTPUTS, make_chunk
from helpers import BF16, expect_refusal, share_memory

POOLS = ("state", "final_states", "chunk_states")
GATES = ("g", "beta")
few = settings(max_examples=12, deadline=None)


def dense():
    """Three sequences of seventy tokens, with all that they can take; K, V, heads and sequences all differ."""
    call = make_chunk(
        batch=3, tokens=70, heads=2, keys=64, values=32, own_gate="dt_bias", beta_sigmoid=True, allow_neg_eigval=True,
        final_dtype=np.float32, chunks=True, use_qk_l2norm=True,
    )  # fmt: skip
    return call.arguments


def logarithms():
    """The same with the gate's logarithm, layout kv, bf16 states and int64 indices."""
    return make_chunk(
        batch=3, tokens=70, heads=2, keys=64, values=32, layout="kv", state_dtype=BF16, final_dtype=BF16,
        index_dtype=np.int64,
    ).arguments  # fmt: skip


def packed():
    """Three sequences in one row of the batch, and a workspace."""
    arguments = make_chunk(lens=(70, 0, 5), heads=2, keys=64, values=32, final_dtype=np.float32, chunks=True).arguments
    shapes = {name: arguments[name] for name in ("q", "k", "v", *GATES, "cu_seqlens")}
    arguments["workspace"] = aligned(flashport.gated_delta_chunk_workspace_size(**shapes))
    return arguments


def aligned(count):
    memory = np.zeros(count + 16, np.uint8)
    begin = -memory.ctypes.data % 16
    return memory[begin : begin + count]


FORMS = {"dense": dense, "logarithms": logarithms, "packed": packed}
ARRAYS = [(form, name) for form, make in FORMS.items() for name, x in make().items() if isinstance(x, np.ndarray)]
NAMES = sorted({name for _, name in ARRAYS})


def form_with(name):
    """Arguments of which ``name`` is one."""
    return FORMS[next(form for form, other in ARRAYS if other == name)]()


def expect(arguments, error, text):
    """The call fails so, and leaves its outputs as they were."""
    expect_refusal(flashport.gated_delta_chunk, arguments, OUTPUTS, error, text)


@pytest.mark.parametrize("form", FORMS)
def test_the_arguments_are_right_unchanged(form):
    arguments = FORMS[form]()
    assert np.isfinite(flashport.gated_delta_chunk(**arguments).astype(np.float32)).all()
    assert np.isfinite(arguments["final_states"].astype(np.float32)).all()


@pytest.mark.parametrize(("form", "name"), ARRAYS)
@given(data=st.data())
@few
def test_a_wrong_rank(form, name, data):
    arguments = FORMS[form]()
    array = arguments[name]
    if data.draw(st.booleans(), label="one more"):
        wrong = np.expand_dims(array, data.draw(st.integers(0, array.ndim), label="axis"))
    else:
        wrong = np.asarray(array[(0,) * data.draw(st.integers(1, array.ndim), label="fewer")], array.dtype)
    if name in ("A_log", "dt_bias") and wrong.ndim >= 1:
        wrong = np.asarray(0, array.dtype)  # their shape does not matter, but they have one
    arguments[name] = wrong
    expect(arguments, ValueError, rf"{name} must have .*dimensions? \(.*got {wrong.ndim}")


@pytest.mark.parametrize(("form", "name"), ARRAYS)
@given(data=st.data())
@few
def test_a_wrong_shape(form, name, data):
    arguments = FORMS[form]()
    array = arguments[name]
    # As many slots, and with cu_seqlens at least as many chunks, as the caller likes; no less workspace.
    free = {"state": {0: (1,)}, "workspace": {0: (1,)}}.get(name, {})
    if name == "chunk_states" and form == "packed":
        free = {1: (1,)}
    axis = data.draw(st.integers(0, array.ndim - 1), label="axis")
    change = data.draw(st.sampled_from([change for change in (-1, 1) if change not in free.get(axis, ())]))
    if name == "chunk_states" and form == "packed" and axis == 1:
        change = 1 - array.shape[1]  # there is room for one chunk more than there are
    if name == "state" and axis == 0:
        change = arguments["state_indices"].max() - array.shape[0]  # as many slots as the largest index
    shape = list(array.shape)
    shape[axis] += 8 * change if name == "v" and axis == 3 else change  # 31 values are not served at all
    wrong = np.zeros(shape, array.dtype)
    arguments[name] = aligned(shape[0]) if name == "workspace" else wrong
    expect(arguments, ValueError, r"\w+.* must .*")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", [0, -1])
def test_an_axis_without_elements(name, axis):
    """An array of no elements is refused wherever the others have some."""
    arguments = form_with(name)
    shape = list(arguments[name].shape)
    shape[axis] = 0
    arguments[name] = np.zeros(shape, arguments[name].dtype)
    no_values = (name, axis) == ("v", -1)
    error, text = (NotImplementedError, "head_dim_v must be .*got 0") if no_values else (ValueError, r"\w+.* must .*")
    expect(arguments, error, text)


@pytest.mark.parametrize(("form", "name"), ARRAYS)
@given(data=st.data())
@few
def test_an_element_type_that_nobody_has(form, name, data):
    arguments = FORMS[form]()
    dtype = np.dtype(data.draw(st.sampled_from([np.float64, np.int8, np.bool_, np.complex64, np.int16, np.uint32])))
    arguments[name] = np.zeros(arguments[name].shape, dtype)
    expect(arguments, TypeError, rf"{name} (has element type {dtype.name}|must .*got {dtype.name})")


@pytest.mark.parametrize(("form", "name"), ARRAYS)
def test_an_element_type_of_another_argument(form, name):
    arguments = FORMS[form]()
    array = arguments[name]
    floats = array.dtype == BF16 or array.dtype == np.float32
    arguments[name] = np.zeros(array.shape, np.int32 if floats else np.float32)
    expect(arguments, TypeError, rf"{name} must .*got ")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("k", np.float32), ("v", np.float16), ("A_log", np.int32), ("out", np.float32), ("state", np.int32),
     ("final_states", np.int32), ("chunk_states", np.float32)],
)  # fmt: skip
def test_an_element_type_that_does_not_go_with_the_others(name, dtype):
    arguments = dense()
    arguments[name] = np.zeros(arguments[name].shape, dtype)
    expect(arguments, TypeError, rf"{name} must ")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [[1, 2], 3, "q", object()])
def test_no_array(name, value):
    arguments = form_with(name)
    arguments[name] = value
    text = rf"{name} must be an array that speaks DLPack .*got {type(value).__name__}"
    expect(arguments, TypeError, text)


class OnAnotherDevice:
    """An array of host memory that says of itself to lie on another device."""

    def __init__(self, shape, dtype, device):
        self.array, self.device, self.shape = flashport.DeviceArray(shape, dtype), device, shape

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # A DLTensor is the address of its data, its device, and more.
        device = (ctypes.c_int32 * 2).from_address(pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p))
        assert tuple(device) == (1, 0)
        device[:] = self.device
        return capsule


@pytest.mark.parametrize("name", [name for name in NAMES if name != "q"])
@pytest.mark.parametrize("device", [(2, 0), (2, 3), (10, 0)])
def test_another_device(name, device):
    """The first and fourth of CUDA, and the first of ROCm, which need not be there."""
    arguments = form_with(name)
    arguments[name] = OnAnotherDevice(arguments[name].shape, arguments[name].dtype.name, device)
    expect(arguments, ValueError, rf"{name} must be on .*")


@pytest.mark.parametrize("name", ["q", "k", "v", "A_log", "dt_bias", "out", "state_indices", "cu_seqlens"])
def test_the_last_axis_is_contiguous(name):
    arguments = form_with(name)
    x = arguments[name]
    arguments[name] = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., ::2]
    expect(arguments, ValueError, rf"{name} must .*contiguous")


@pytest.mark.parametrize("name", ["q", "k", "v", "A_log", "dt_bias", "state_indices", "cu_seqlens", *OUTPUTS])
def test_a_last_axis_that_runs_backwards(name):
    arguments = form_with(name)
    arguments[name] = arguments[name][..., ::-1]
    expect(arguments, ValueError, rf"{name} must ")


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("form", FORMS)
def test_strides_of_the_gates_do_not_matter(form, name):
    plain, strided = FORMS[form](), FORMS[form]()
    x = strided[name]
    wide = np.full((*x.shape[:-1], 3 * x.shape[-1]), np.nan, x.dtype)
    wide[..., ::3] = x
    strided[name] = wide[..., ::3]
    flashport.gated_delta_chunk(**plain)
    flashport.gated_delta_chunk(**strided)
    for output in OUTPUTS:
        if output in plain:
            assert strided[output].tobytes() == plain[output].tobytes()


@pytest.mark.parametrize("name", POOLS)
def test_slots_are_contiguous(name):
    arguments = dense()
    x = arguments[name]
    arguments[name] = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., ::2]
    expect(arguments, ValueError, rf"{name} must .*contiguous")
    arguments[name] = np.zeros((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype).swapaxes(-1, -2)
    expect(arguments, ValueError, rf"{name} must .*contiguous")


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_not_read_only(name):
    arguments = dense()
    arguments[name].flags.writeable = False
    expect(arguments, ValueError, f"{name} is written and must not be read-only")


def test_read_only_inputs_are_read():
    arguments = dense() | {"update_state": False}
    for name, x in arguments.items():
        if isinstance(x, np.ndarray) and name not in ("out", "final_states", "chunk_states"):
            x.flags.writeable = False  # the pool too: it is not written
    flashport.gated_delta_chunk(**arguments)


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_do_not_overlap_themselves(name):
    arguments = dense()
    x = arguments[name]
    arguments[name] = np.lib.stride_tricks.as_strided(x, strides=(x.strides[1], *x.strides[1:]))
    expect(arguments, ValueError, f"{name} ")


@pytest.mark.parametrize(("form", "other"), ARRAYS)
@given(data=st.data())
@few
def test_outputs_do_not_overlap_others(form, other, data):
    arguments = FORMS[form]()
    name = data.draw(st.sampled_from([x for x in (*OUTPUTS, "workspace") if x != other and x in arguments]))
    share_memory(arguments, name, other, data.draw(st.integers(0, (arguments[name].nbytes - 1) // 16)))
    expect(arguments, ValueError, rf"({name} must not share memory with {other}|{other} must not share .* {name});")


def test_a_pool_that_is_only_read_is_an_input():
    arguments = dense() | {"update_state": False}
    share_memory(arguments, "out", "state", 1)
    expect(arguments, ValueError, "out must not share memory with state;")
    arguments = dense() | {"update_state": False}
    share_memory(arguments, "A_log", "state", 0)
    flashport.gated_delta_chunk(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"head_map": "grouped"}, ValueError, "head_map must be .*grouped"),
        ({"head_map": 1}, TypeError, "head_map must be .*int"),
        ({"state_layout": "KV"}, ValueError, "state_layout must be .*KV"),
        ({"state_layout": 3}, TypeError, "state_layout must be .*int"),
        ({"state_layout": "kv"}, ValueError, r"state must have shape"),
        ({"scale": "x"}, TypeError, "scale must be a number, got str"),
        ({"scale": float("inf")}, ValueError, "scale must be positive"),
        ({"scale": float("nan")}, ValueError, "scale must be positive"),
        ({"scale": -0.5}, ValueError, "scale must be positive"),
        ({"use_qk_l2norm": 1.0}, TypeError, "use_qk_l2norm must be True or False, got float"),
        ({"beta_sigmoid": 1}, TypeError, "beta_sigmoid must be True or False, got int"),
        ({"beta_sigmoid": False}, ValueError, "allow_neg_eigval needs beta_sigmoid"),
        ({"allow_neg_eigval": "no"}, TypeError, "allow_neg_eigval must be True or False, got str"),
        ({"update_state": "yes"}, TypeError, "update_state must be True or False, got str"),
        ({"A_log": None}, ValueError, "dt_bias needs A_log"),
        ({"state": None}, ValueError, "state_indices needs state"),
        ({"state_indices": None, "state": np.zeros((2, 4, 32, 64), np.float32)}, ValueError, "state must have a slot"),
    ],
)  # fmt: skip
def test_options(change, error, text):
    expect(dense() | change, error, text)


# --- Contents in host memory -----------------------------------------------------------------------------------------


@given(data=st.data())
@few
def test_a_slot_is_named_once(data):
    arguments = dense()
    first, second = sorted(data.draw(st.permutations(range(3)), label="sequences")[:2])
    slot = data.draw(st.integers(0, 4), label="slot")
    arguments["state_indices"][...] = -1
    arguments["state_indices"][[first, second]] = slot
    expect(arguments, ValueError, rf"state_indices\[{first}\] and state_indices\[{second}\] must not be the same .*")


@given(data=st.data())
@few
def test_a_slot_beyond_its_pool(data):
    arguments = data.draw(st.sampled_from([dense, logarithms]), label="form")()
    slots, most = len(arguments["state"]), np.iinfo(arguments["state_indices"].dtype).max
    slot = data.draw(st.one_of(st.just(slots), st.integers(slots, int(most))), label="slot")
    sequence = data.draw(st.integers(0, 2), label="sequence")
    arguments["state_indices"][...] = -1
    arguments["state_indices"][sequence] = slot
    expect(arguments, ValueError, rf"state_indices\[{sequence}\] = {slot} must be below {slots}")


@given(slots=st.lists(st.integers(np.iinfo(np.int32).min, -1), min_size=3, max_size=3))
@few
def test_any_negative_slot_is_padding(slots):
    """Also twice the same; the pool stays as it is."""
    arguments = dense()
    arguments["state_indices"][...] = slots
    before = arguments["state"].tobytes()
    flashport.gated_delta_chunk(**arguments)
    assert arguments["state"].tobytes() == before


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_cu_seqlens(data):
    arguments = packed()
    bounds = data.draw(st.lists(st.integers(-3, 80), min_size=4, max_size=4), label="cu_seqlens")
    if data.draw(st.booleans(), label="in order"):
        bounds = [0, *sorted(max(x, 0) for x in bounds[1:])]
    arguments["cu_seqlens"] = np.array(bounds, data.draw(st.sampled_from([np.int32, np.int64]), label="type"))
    lens = np.diff(bounds)
    if bounds[0] != 0 or (lens < 0).any() or bounds[-1] > 75:
        expect(arguments, ValueError, "cu_seqlens must ")
    elif (-(-lens // 64)).sum() > arguments["chunk_states"].shape[1]:
        expect(arguments, ValueError, "chunk_states must have a chunk for each")
    else:
        flashport.gated_delta_chunk(**arguments)


def test_packed_sequences_have_one_row():
    arguments = packed()
    for name in ("q", "k", "v", "out", *GATES, "chunk_states"):
        x = arguments[name]
        arguments[name] = np.zeros((3, 25, *x.shape[2:]), x.dtype)
    expect(arguments, ValueError, r"q must have batch 1 with cu_seqlens")


# --- Heads, dims, workspace -------------------------------------------------------------------------------------------


def test_value_heads_are_a_multiple_of_heads():
    arguments = dense()
    for name in ("q", "k"):
        arguments[name] = np.zeros((3, 70, 3, 64), BF16)
    expect(arguments, ValueError, r"num_v_heads must be a multiple of num_heads")


@pytest.mark.parametrize(("keys", "values"), [(8, 64), (64, 8), (264, 64), (64, 264), (20, 64), (64, 20)])
def test_dims_that_no_kernel_serves(keys, values):
    arguments = make_chunk(keys=keys, values=values, final_dtype=np.float32).arguments
    expect(arguments, NotImplementedError, r".*head_dim_(k|v)")


def test_a_workspace_that_is_not_aligned():
    arguments = packed()
    arguments["workspace"] = aligned(len(arguments["workspace"]) + 8)[8:]
    expect(arguments, ValueError, "workspace must .*align")
