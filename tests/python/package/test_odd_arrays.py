"""Arrays and streams that misbehave: each is refused by name, and what is no error of theirs passes through."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import flashport
from decode_call import make_decode
from helpers import BF16, from_torch, same


class Array:
    """An array of a library that nobody knows, which says of itself what a test wants."""

    def __init__(self, array, place=None, capsule=None):
        self.array, self.place, self.capsule = array, place, capsule

    def __dlpack_device__(self):
        if isinstance(self.place, BaseException):
            raise self.place
        return self.array.__dlpack_device__() if self.place is None else self.place

    def __dlpack__(self, **options):
        if isinstance(self.capsule, BaseException):
            raise self.capsule
        return self.array.__dlpack__() if self.capsule is None else self.capsule


@pytest.fixture
def odd(x):
    """Calls with a query that is wrapped so."""
    q = np.ones(x.q.shape, np.float32)
    k, v = (np.nan_to_num(part.astype(np.float32)) for part in (x.k, x.v))
    return lambda **options: flashport.flash_decode(Array(q, **options), k, v, x.seqlens)


@pytest.mark.parametrize(
    "place", [5, None.__class__, (1,), (1, 0, 0), [1, 0], ("cpu", 0), (1.0, 0), (1 << 40, 0), (1, 1 << 70)]
)
def test_a_wrong_dlpack_device(odd, place):
    text = f"must have a __dlpack_device__() that gives (device type, index) as two integers, got {place!r}"
    with pytest.raises(TypeError, match=rf"^flash_decode: q {re.escape(text)}$"):
        odd(place=place)


@pytest.mark.parametrize("kind", [0, 8, 99, -3])
def test_an_unknown_device(odd, kind):
    text = f"q must be in host, CUDA or ROCm memory, got DLPack device type {kind}; pass a copy there"
    with pytest.raises(ValueError, match=f"^flash_decode: {text}$"):
        odd(place=(kind, 0))


def test_a_capsule_of_another_device(odd):
    text = r"q must be on the device of its __dlpack_device__\(\), DLPack device type 2, got memory on cpu$"
    with pytest.raises(ValueError, match=f"^flash_decode: {text}"):
        odd(place=(2, 0))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("method", ["place", "capsule"])
def test_an_interrupt_in_an_arrays_method_passes(odd, method, error):
    raised = error()
    with pytest.raises(error) as caught:
        odd(**{method: raised})
    assert caught.value is raised


@pytest.mark.parametrize("method", ["place", "capsule"])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("two\nlines"), "two"),
        (RuntimeError(), "RuntimeError"),
        (AttributeError("inner"), "inner"),
        (TypeError("no such argument"), "no such argument"),
    ],
)
def test_an_error_in_an_arrays_method_is_told(odd, method, error, text):
    with pytest.raises(TypeError, match=rf"^flash_decode: q cannot be read through DLPack: {text} \(Array\)$"):
        odd(**{method: error})


def test_an_array_that_failed_once_is_read_the_next_time(odd):
    """What a type's export takes is learnt of exports that succeed."""
    with pytest.raises(TypeError, match="no such argument"):
        odd(capsule=TypeError("no such argument"))
    assert odd().dtype == "float32"


class Stream:
    def __init__(self, handle):
        self.cuda_stream = handle


class CudaStream:
    def __init__(self, given):
        self.given = given

    def __cuda_stream__(self):
        if isinstance(self.given, BaseException):
            raise self.given
        return self.given


@pytest.mark.parametrize("handle", [-1, 1 << 64, 1 << 70])
@pytest.mark.parametrize("kind", [int, Stream, lambda handle: CudaStream((0, handle))])
def test_a_stream_that_is_no_handle(x, kind, handle):
    with pytest.raises(ValueError, match=rf"^flash_decode: stream must have a handle from 0 to .* - 1, got {handle}$"):
        flashport.flash_decode(x.q, x.k, x.v, x.seqlens, stream=kind(handle))


@pytest.mark.parametrize("stream", [True, 1.5, "0", Stream(None), Stream("0"), object()])
def test_a_stream_that_is_none(x, stream):
    name = type(stream).__name__
    with pytest.raises(TypeError, match=f"^flash_decode: stream must be a stream or its integer handle, got {name}$"):
        flashport.flash_decode(x.q, x.k, x.v, x.seqlens, stream=stream)


@pytest.mark.parametrize("given", [5, (0,), (0, "a"), None])
def test_a_wrong_cuda_stream(x, given):
    text = f"stream must have a __cuda_stream__() that gives (0, handle), got {given!r}"
    with pytest.raises(TypeError, match=f"^flash_decode: {re.escape(text)}$"):
        flashport.flash_decode(x.q, x.k, x.v, x.seqlens, stream=CudaStream(given))


def test_the_largest_handle_and_an_interrupt(x):
    flashport.flash_decode(x.q, x.k, x.v, x.seqlens, stream=(1 << 64) - 1)  # the CPU has no streams
    with pytest.raises(KeyboardInterrupt):
        flashport.flash_decode(x.q, x.k, x.v, x.seqlens, stream=CudaStream(KeyboardInterrupt()))


def frozen(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_read_only_arrays_of_any_type_and_numpy_are_read(dtype):
    """NumPy before 2.1 does not export them through DLPack."""
    x = make_decode(dtype=dtype)
    expected = flashport.flash_decode(x.q, x.k, x.v, x.seqlens)
    k, v = frozen(x.k), frozen(x.v.swapaxes(1, 2)).swapaxes(1, 2)
    same(flashport.flash_decode(frozen(x.q), k, v, frozen(x.seqlens)), expected)
    first = np.broadcast_to(x.q[:1], x.q.shape)
    same(flashport.flash_decode(first, k, v, x.seqlens)[0], expected[0])
    out = frozen(expected)
    with pytest.raises(ValueError, match=r"^flash_decode: out is written and must not be read-only; pass a copy$"):
        flashport.flash_decode(x.q, x.k, x.v, x.seqlens, out=out)


def test_elements_that_are_not_whole_strides_apart(x):
    q = np.zeros(x.q.shape, [("value", "<f4"), ("mark", "u1")])["value"]
    with pytest.raises(ValueError, match=r"^flash_decode: q must have strides of whole elements, got 5 bytes "):
        flashport.flash_decode(q, x.k, x.v, x.seqlens)


@pytest.mark.parametrize("dtype", [">f4", object, "datetime64[s]", ml_dtypes.float8_e5m2fnuz])
def test_elements_that_numpy_does_not_export(x, dtype):
    q = np.zeros(x.q.shape, dtype)
    text = rf"q cannot be read through DLPack: .* \(element type {re.escape(str(q.dtype))}\)$"
    with pytest.raises(TypeError, match=f"^flash_decode: {text}"):
        flashport.flash_decode(q, x.k, x.v, x.seqlens)


@pytest.mark.parametrize("name", ["q", "k_cache", "seqlens", "out"])
def test_masked_arrays(x, name):
    arguments = {"q": x.q, "k_cache": x.k, "v_cache": x.v, "seqlens": x.seqlens, "out": x.q.copy()}

    class Own(np.ma.MaskedArray):
        pass

    text = rf"^flash_decode: {name} must not be a masked array, whose mask has no effect; pass its filled\(\) or data$"
    for masked in (np.ma.masked_array(arguments[name]), arguments[name].view(Own)):
        with pytest.raises(TypeError, match=text):
            flashport.flash_decode(**arguments | {name: masked})
        flashport.flash_decode(**arguments | {name: masked.data})


def test_views_of_torch_whose_bits_are_not_their_values():
    torch = pytest.importorskip("torch")
    x = make_decode(dtype=np.float32)
    q, k, v, seqlens = (torch.from_numpy(np.nan_to_num(part)) for part in (x.q, x.k, x.v, x.seqlens))
    negated = torch.complex(q, q).conj().imag
    assert negated.is_neg()
    text = r"must not be a view with torch's negative bit, .*; pass its resolve_neg\(\)$"
    with pytest.raises(TypeError, match=rf"^flash_decode: q {text}"):
        flashport.flash_decode(negated, k, v, seqlens)
    with pytest.raises(TypeError, match=rf"^flash_decode: out {text}"):
        flashport.flash_decode(q, k, v, seqlens, out=negated)
    single = torch.complex(q[..., :1], q[..., :1]).conj().imag.unsqueeze(-1)  # a stride of 1, where one element lies
    assert single.stride(-1) == 1
    lse = torch.zeros(single.shape[:-1])
    with pytest.raises(TypeError, match=rf"^merge_state: o_a {text}"):
        flashport.merge_state(single, lse, single, lse)
    one = torch.complex(torch.ones(1), torch.ones(1)).conj().imag
    with pytest.raises(TypeError, match=rf"^flash_decode: k_scale {text}"):
        flashport.flash_decode(q, k, v, seqlens, k_scale=one)
    resolved = flashport.flash_decode(negated.resolve_neg(), k, v, seqlens)
    same(from_torch(resolved), from_torch(flashport.flash_decode(-q, k, v, seqlens)))
    strided = torch.complex(q, q).imag  # every second element, and no bit
    same(
        from_torch(flashport.flash_decode(strided, k, v, seqlens)),
        from_torch(flashport.flash_decode(q, k, v, seqlens)),
    )
    with pytest.raises(TypeError, match=r"^flash_decode: q .*(complex64, which no argument may have|conjugate bit)"):
        flashport.flash_decode(torch.complex(q, q).conj(), k, v, seqlens)


def test_jax_arrays_where_an_output_cannot_be_made_or_written():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    q = np.random.default_rng(0).standard_normal((2, 3, 4, 16), np.float32)
    gates = np.zeros((2, 3, 4), np.float32)
    jq, jgates = jnp.asarray(q), jnp.asarray(gates)
    to_be_given = (
        r"out must be given, since none can be made like q \(.*ArrayImpl\) in the shape of v \(.*ArrayImpl\); "
    )
    with pytest.raises(TypeError, match=f"^gated_delta_update: {to_be_given}pass an array of torch, NumPy or CuPy or"):
        flashport.gated_delta_update(jq, jq, jq)
    with pytest.raises(TypeError, match=f"^gated_delta_chunk: {to_be_given}pass an array of torch, NumPy or CuPy or"):
        flashport.gated_delta_chunk(jq, jq, jq, jgates, jgates)
    same(flashport.gated_delta_update(jq, jq, jq, out=np.empty_like(q)), flashport.gated_delta_update(q, q, q))
    size = flashport.gated_delta_chunk_workspace_size(jq, jq, jq, jgates, jgates)
    assert size == flashport.gated_delta_chunk_workspace_size(q, q, q, gates, gates) > 0

    read_only = "is written and must not be read-only, as arrays of JAX are; pass an array of NumPy or CuPy or a flash"
    state = jnp.zeros((2, 4, 16, 16))
    with pytest.raises(ValueError, match=f"^gated_delta_update: state {read_only}"):
        flashport.gated_delta_update(jq, jq, jq, state=state, out=np.empty_like(q))
    flashport.gated_delta_update(jq, jq, jq, state=state, update_state=False, out=np.empty_like(q))
    cache = jnp.zeros((2, 4, 4, 16))
    with pytest.raises(ValueError, match=f"^append_kv: k_cache {read_only}"):
        flashport.append_kv(jq[0], jq[0], cache, cache, jnp.arange(3))
    lse = jnp.zeros((2, 3, 4))
    merged, merged_lse = flashport.merge_states(jq, lse)
    assert type(merged) is type(merged_lse) is type(jq)
    with pytest.raises(ValueError, match=f"^merge_states: out {read_only}"):
        flashport.merge_states(jq, lse, out=jq[0])
    with pytest.raises(
        TypeError, match=r"^merge_states: o must be an array with values, got .*Tracer; call it outside "
    ):
        jax.jit(lambda o: flashport.merge_states(o, lse))(jq)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (((8.5,), "float32"), TypeError, r"shape\[0\] must be an integer, got float"),
        ((8, "float32"), TypeError, "shape must be a tuple of integers, got int"),
        (("ab", "float32"), TypeError, "shape must be a tuple of integers, got str"),
        (((2, 1 << 70), "float32"), ValueError, r"shape\[1\] must fit in 64 bits"),
        (((2, -1), "float32"), ValueError, r"shape\[1\] must be non-negative, got -1"),
        (((0, 1 << 62, 1 << 62), "float32"), ValueError, "shape must have extents whose product fits in memory"),
        (((1,) * 9, "float32"), ValueError, "shape must have at most 8 dimensions, got 9"),
        (((2,), 5), TypeError, "dtype must be an element type or its name, got int"),
        (((2,), "float32", 5), TypeError, "device must be a str, got int"),
        (((2,), "float32", "gpu"), ValueError, 'device must be "cpu", "cuda:<index>" or "hip:<index>", got "gpu"'),
    ],
)
def test_a_device_array_is_not_made_of(arguments, error, text):
    with pytest.raises(error, match=f"^DeviceArray: {text}"):
        flashport.DeviceArray(*arguments)


@pytest.mark.parametrize(
    ("shape", "error", "text"),
    [
        ((-2, -3), ValueError, r"shape\[0\] must be non-negative, got -2"),
        ((-1,), ValueError, r"shape\[0\] must be non-negative, got -1"),
        ((1.5, 4), TypeError, r"shape\[0\] must be an integer, got float"),
        (6, TypeError, "shape must be a tuple of integers, got int"),
        (None, TypeError, "shape must be a tuple of integers, got NoneType"),
        ((6, *(1,) * 8), ValueError, "shape must have at most 8 dimensions, got 9"),
        ((1 << 33, 1 << 33, 1 << 62), ValueError, "shape must have extents whose product fits in memory"),
        ((0,), ValueError, "shape must keep the number of elements, 6, got 0"),
        ((7,), ValueError, "shape must keep the number of elements, 6, got 7"),
    ],
)
def test_a_device_array_is_not_reshaped_to(shape, error, text):
    array = flashport.DeviceArray((2, 3), "float32")
    with pytest.raises(error, match=f"^reshape: {text}"):
        array.reshape(shape)
    assert array.reshape([3, 1, 2]).shape == (3, 1, 2)
    assert array.shape == (2, 3)


def test_a_device_array_without_elements_is_reshaped():
    array = flashport.DeviceArray((0, 3), "float32")
    assert array.reshape((5, 0)).shape == (5, 0)
    with pytest.raises(ValueError, match=r"^reshape: shape\[0\] must be non-negative, got -1"):
        array.reshape((-1, 0))


def test_what_a_device_array_is_not_copied_from():
    array = flashport.DeviceArray((2, 3), "bfloat16")
    values = np.arange(6).reshape(2, 3).astype(BF16)
    array.copy_from(values.view(np.uint16))
    back = np.zeros((2, 3), np.uint16)
    array.copy_to(back)
    same(back, values.view(np.uint16))
    expected = "array must be a host array that offers its memory as a buffer"
    for wrong in ([1], None, values):
        with pytest.raises(TypeError, match=rf"^copy_from: {expected}, got .*{type(wrong).__name__}"):
            array.copy_from(wrong)
    with pytest.raises(TypeError, match=rf"^copy_to: {expected}, not read-only, got numpy.ndarray \("):
        array.copy_to(frozen(back))
    with pytest.raises(
        ValueError, match=r"^copy_to: array must be contiguous and have .* \(2, 3\), got \(3, 2\); pass"
    ):
        array.copy_to(np.zeros((3, 2), np.uint16))
