"""Arrays of every library come in through DLPack, and results have the caller's own type."""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import flashport
from decode_call import answer, make_decode
from helpers import assert_close


def test_numpy_bf16_results_are_numpy_bf16(x):
    out, lse = flashport.flash_decode(x.q, x.k, x.v, x.seqlens, return_lse=True)
    assert type(out) is np.ndarray
    assert out.dtype == ml_dtypes.bfloat16
    assert lse.dtype == np.float32
    truth, truth_lse = answer(x)
    assert_close(out, truth)
    assert_close(lse, truth_lse, 1e-4)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_numpy_types(dtype):
    x = make_decode(dtype=dtype)
    support = flashport.supports("decode", q_dtype=np.dtype(dtype).name, target="cpu")
    if not support:
        with pytest.raises(NotImplementedError, match="has no kernel"):
            flashport.flash_decode(x.q, x.k, x.v, x.seqlens)
        return
    out = flashport.flash_decode(x.q, x.k, x.v, x.seqlens)
    assert out.dtype == dtype
    assert_close(out, answer(x)[0], 0.01 if dtype is np.float16 else 1e-5)


def test_strided_views_are_honoured(x):
    pool = np.full((*x.k.shape[:2], 2, *x.k.shape[2:]), np.nan, x.k.dtype)
    pool[:, :, 0], pool[:, :, 1] = x.k, x.v
    wide = np.full((*x.q.shape[:2], 2 * x.head_dim), np.nan, x.q.dtype)
    wide[..., ::2] = x.q
    out = np.zeros((x.q.shape[1], len(x.lens), x.head_dim), x.q.dtype).swapaxes(0, 1)
    got = flashport.flash_decode(wide[..., ::2], pool[:, :, 0], pool[:, :, 1], x.seqlens, out=out)
    assert got is out
    np.testing.assert_array_equal(out.view(np.uint16), flashport.flash_decode(x.q, x.k, x.v, x.seqlens).view(np.uint16))


def test_out_and_lse_are_returned_as_given(x):
    out, lse = np.empty_like(x.q), np.empty(x.q.shape[:2], np.float32)
    got = flashport.flash_decode(x.q, x.k, x.v, x.seqlens, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    assert_close(lse, answer(x)[1], 1e-4)


def test_read_only_inputs_are_read_and_outputs_refused(x):
    out = np.zeros_like(x.q)
    for array in (x.q, x.k, x.v, x.seqlens, out):
        array.flags.writeable = False
    flashport.flash_decode(x.q, x.k, x.v, x.seqlens)
    with pytest.raises(ValueError, match=r"^flash_decode: out is written and must not be read-only"):
        flashport.flash_decode(x.q, x.k, x.v, x.seqlens, out=out)
    assert not out.view(np.uint16).any()


class OnlyDlpack:
    """An array of a library that nobody knows."""

    def __init__(self, array, versioned):
        self.array = array
        self.versioned = versioned

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self.versioned and options:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        return self.array.__dlpack__(**options)


class OldArray(OnlyDlpack):
    """The same, older: a type of its own, since what a type can do is remembered."""


@pytest.mark.parametrize(("kind", "versioned"), [(OnlyDlpack, True), (OldArray, False)])
def test_unknown_libraries_and_unversioned_capsules(x, kind, versioned):
    k, v = (np.nan_to_num(part.astype(np.float32)) for part in (x.k, x.v))
    if not flashport.supports("decode", q_dtype="float32", target="cpu"):
        pytest.skip("no fp32 kernel in this build")
    q = kind(x.q.astype(np.float32), versioned)
    out = flashport.flash_decode(q, kind(k, versioned), kind(v, versioned), x.seqlens)
    assert type(out) is flashport.DeviceArray
    assert_close(np.from_dlpack(out), answer(x)[0], 1e-2)


def test_borrowed_arrays_are_released(x):
    class Array(np.ndarray):
        pass

    q = x.q.view(Array)
    gone = weakref.ref(q)
    flashport.flash_decode(q, x.k, x.v, x.seqlens)
    del q
    gc.collect()
    assert gone() is None


def test_device_array_round_trip():
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    array = flashport.DeviceArray((2, 3, 4), "float32")
    array.copy_from(values)
    assert (array.shape, array.dtype, array.device, array.nbytes) == ((2, 3, 4), "float32", "cpu", 96)
    back = np.empty_like(values)
    array.reshape((6, 4)).copy_to(back.reshape(6, 4))
    np.testing.assert_array_equal(back, values)
    shared = np.from_dlpack(array)
    del array
    gc.collect()
    np.testing.assert_array_equal(shared, values)


@pytest.mark.parametrize(
    ("action", "error", "text"),
    [
        (lambda: flashport.DeviceArray((2,), "float64"), ValueError, "dtype must be one of"),
        (lambda: flashport.DeviceArray((2,), "float32", "gpu"), ValueError, "device must be"),
        (lambda: flashport.DeviceArray((-1,), "float32"), ValueError, "non-negative"),
        (lambda: flashport.DeviceArray((1 << 40, 1 << 40), "float32"), ValueError, "fits"),
        (lambda: flashport.DeviceArray((2,), "float32").reshape((3,)), ValueError, "number of elements"),
        (lambda: flashport.DeviceArray((2,), "float32").copy_from(np.zeros(3, np.float32)), ValueError, "shape"),
        (lambda: flashport.DeviceArray((2,), "float32").copy_from(np.zeros(2, np.float64)), TypeError, "4 bytes"),
    ],
)
def test_device_array_refusals(action, error, text):
    with pytest.raises(error, match=text):
        action()


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    x = make_decode()
    q, k, v = (torch.from_numpy(part.view(np.int16)).view(torch.bfloat16) for part in (x.q, x.k, x.v))
    out, lse = flashport.flash_decode(q, k, v, torch.from_numpy(x.seqlens), return_lse=True)
    assert type(out) is torch.Tensor
    assert out.dtype is torch.bfloat16
    assert lse.dtype is torch.float32
    assert_close(out.float().numpy(), answer(x)[0])
    parameter = torch.nn.Parameter(q)
    with torch.no_grad():
        same = flashport.flash_decode(parameter, k, v, torch.from_numpy(x.seqlens))
    assert type(same) is torch.Tensor
    assert torch.equal(same, out)
    mixed = flashport.flash_decode(q, x.k, x.v, x.seqlens)
    assert torch.equal(mixed, out)


def test_jax_arrays_are_inputs_and_results_but_never_outputs():
    jnp = pytest.importorskip("jax.numpy")
    x = make_decode()
    q, k, v, seqlens = (jnp.asarray(part) for part in (x.q, x.k, x.v, x.seqlens))
    out = flashport.flash_decode(q, k, v, seqlens)
    assert type(out) is type(q)
    assert_close(out, answer(x)[0])
    with pytest.raises(ValueError, match=r"^flash_decode: out is written and must not be read-only"):
        flashport.flash_decode(q, k, v, seqlens, out=out)


def test_merge_and_append_take_the_callers_type():
    rng = np.random.default_rng(3)
    o = rng.standard_normal((2, 4, 8, 64), np.float32)
    lse = rng.standard_normal((2, 4, 8), np.float32)
    merged, merged_lse = flashport.merge_states(o, lse)
    weight = 1 / (1 + np.exp(lse[1] - lse[0]))
    np.testing.assert_allclose(merged, o[0] * weight[..., None] + o[1] * (1 - weight[..., None]), atol=1e-5)
    np.testing.assert_allclose(merged_lse, np.logaddexp(lse[0], lse[1]), atol=1e-5)
    pair = flashport.merge_state(o[0], lse[0], o[1], lse[1], lse_base=2)
    np.testing.assert_allclose(pair[1], np.logaddexp2(lse[0], lse[1]), atol=1e-5)

    k, v = (rng.standard_normal((3, 2, 64), np.float32) for _ in range(2))
    k_cache, v_cache = (np.zeros((4, 2, 2, 64), ml_dtypes.bfloat16) for _ in range(2))
    flashport.append_kv(k, v, k_cache, v_cache, np.array([5, -1, 0]))
    np.testing.assert_array_equal(k_cache.reshape(8, 2, 64)[5], k[0].astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(v_cache.reshape(8, 2, 64)[0], v[2].astype(ml_dtypes.bfloat16))
    assert not k_cache.reshape(8, 2, 64)[[1, 2, 3, 4, 6, 7]].astype(np.float32).any()


def test_stream_is_a_handle_or_an_object(x):
    class Stream:
        cuda_stream = 0

    class Cuda:
        def __cuda_stream__(self):
            return (0, 0)

    for stream in (0, Stream(), Cuda()):
        flashport.flash_decode(x.q, x.k, x.v, x.seqlens, stream=stream)
    with pytest.raises(TypeError, match=r"^flash_decode: stream must be a stream or its integer handle, got str"):
        flashport.flash_decode(x.q, x.k, x.v, x.seqlens, stream="0")


def test_workspace_size_and_callers_workspace(x):
    size = flashport.decode_workspace_size(x.q, x.k, x.v, x.seqlens)
    assert size >= 0
    workspace = np.zeros(size, np.uint8)
    first = flashport.flash_decode(x.q, x.k, x.v, x.seqlens, workspace=workspace)
    again = flashport.flash_decode(x.q, x.k, x.v, x.seqlens, workspace=workspace)
    np.testing.assert_array_equal(first.view(np.uint16), again.view(np.uint16))
