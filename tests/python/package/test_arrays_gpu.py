"""Arrays of CuPy and JAX on an NVIDIA GPU: values, types, places and streams. Skipped, and said so, without."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import flashport
from attention_call import expect_right, make_attention, poisoned_outputs
from chunk_call import expected as expected_of_chunk
from chunk_call import make_chunk
from decode_call import answer, make_decode
from delta_call import FORMAT, hold
from flashport import fla, lightllm
from helpers import assert_close, same
from lightllm_call import HEAD_DIM, HEADS, make_state
from lightllm_call import answer as answer_to_state

TYPES = [np.float16, ml_dtypes.bfloat16]


@pytest.fixture(scope="module")
def cp():
    """CuPy, where it has a GPU."""
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("CuPy finds no GPU")
    return cupy


@pytest.fixture(scope="module")
def jax_gpu():
    """A GPU of JAX's."""
    jax = pytest.importorskip("jax")
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    if not gpus:
        pytest.skip("JAX finds no GPU")
    return gpus[0]


def occupy(cp):
    """Some ten milliseconds of work on the current stream."""
    wide = cp.ones(1 << 26, cp.float32)
    for _ in range(50):
        cp.sin(wide, out=wide)


@pytest.mark.parametrize("dtype", TYPES)
def test_cupy_in_and_out(cp, dtype):
    x = make_decode(dtype=dtype)
    q, k, v, seqlens = (cp.asarray(part) for part in (x.q, x.k, x.v, x.seqlens))
    out, lse = flashport.flash_decode(q, k, v, seqlens, return_lse=True)
    assert type(out) is type(lse) is cp.ndarray
    assert (out.dtype, lse.dtype, out.device) == (q.dtype, np.float32, q.device)
    truth, truth_lse = answer(x)
    assert_close(cp.asnumpy(out), truth)
    assert_close(cp.asnumpy(lse), truth_lse, 1e-4)
    wide = cp.full((*q.shape[:2], 2 * x.head_dim), np.nan, dtype)
    wide[..., ::2] = q
    given = cp.full((q.shape[1], q.shape[0], x.head_dim), np.nan, dtype).swapaxes(0, 1)
    assert flashport.flash_decode(wide[..., ::2], k, v, seqlens, out=given) is given
    same(cp.asnumpy(given), cp.asnumpy(out))


@pytest.mark.parametrize("explicit", [False, True])
def test_cupys_current_stream_is_followed(cp, explicit):
    x = make_decode()
    q, k, v, seqlens = (cp.asarray(part) for part in (x.q, x.k, x.v, x.seqlens))
    late, out = cp.full_like(q, np.nan), cp.full_like(q, np.nan)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:  # kernels are compiled, and a stream's first call may allocate: both would let the work below end
        occupy(cp)
        late[...] = cp.nan
        once = cp.asnumpy(flashport.flash_decode(q, k, v, seqlens))
    with stream:
        occupy(cp)
        late[...] = q
        if not explicit:
            flashport.flash_decode(late, k, v, seqlens, out=out)
    if explicit:
        flashport.flash_decode(late, k, v, seqlens, out=out, stream=stream)
    assert not stream.done  # else the test shows nothing
    stream.synchronize()
    same(cp.asnumpy(out), once)


def test_cupy_caches_are_appended_to(cp):
    rng = np.random.default_rng(3)
    k, v = (rng.standard_normal((3, 2, 64), np.float32) for _ in range(2))
    k_cache, v_cache = (cp.zeros((4, 2, 2, 64), cp.float16) for _ in range(2))
    flashport.append_kv(cp.asarray(k), cp.asarray(v), k_cache, v_cache, cp.asarray([5, -1, 0]))
    for cache, new in ((k_cache, k), (v_cache, v)):
        wanted = np.zeros((8, 2, 64), np.float16)
        wanted[[5, 0]] = new[[0, 2]]
        np.testing.assert_array_equal(cp.asnumpy(cache).reshape(8, 2, 64), wanted)


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_attention_with_cupy(cp, packed, fmt):
    x = make_attention((70, 5), (90, 33), (64, 64), fmt=fmt, packed=packed) | {"causal": True}
    arrays = {name: cp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in x.items()}
    given = {name: cp.asarray(value) for name, value in poisoned_outputs(x).items()}
    assert flashport.attention(**arrays, **given)[0] is given["out"]
    expect_right(x, **{name: cp.asnumpy(value) for name, value in given.items()})
    out, lse = flashport.attention(**arrays, return_lse=True)
    assert (type(out), type(lse), out.device) == (cp.ndarray, cp.ndarray, arrays["q"].device)


def test_lightllms_wrapper_with_cupy(cp):
    x = make_state(np.float16)
    state = x.state
    for owner, name in ((state.req_manager, "req_to_token_indexs"), (state, "b_req_idx"), (state, "b_seq_len")):
        setattr(owner, name, cp.asarray(getattr(owner, name)))
    q, k, v = (cp.asarray(part) for part in (x.q, x.k, x.v))
    out = lightllm.token_decode_attention_flash_decoding(q, state, HEADS, HEAD_DIM, k, v)
    assert type(out) is cp.ndarray
    for owner, name in ((state.req_manager, "req_to_token_indexs"), (state, "b_req_idx"), (state, "b_seq_len")):
        setattr(owner, name, cp.asnumpy(getattr(owner, name)))
    assert_close(cp.asnumpy(out), answer_to_state(x)[0])


@pytest.mark.parametrize("dtype", TYPES)
def test_fla_with_cupy(cp, dtype):
    call = make_chunk(tokens=130, heads=2, dtype=dtype, layout="kv", slots=None, use_qk_l2norm=True)
    x = call.arguments
    arrays = [cp.asarray(np.ascontiguousarray(x[name])) for name in ("q", "k", "v", "g", "beta")]
    out, final = fla.chunk_gated_delta_rule(*arrays, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert type(out) is type(final) is cp.ndarray
    fmt = FORMAT[x["q"].dtype]
    truth, plain = expected_of_chunk(x), expected_of_chunk(x, fmt)
    hold(cp.asnumpy(out), truth.out, plain.out, fmt, "out")
    hold(cp.asnumpy(final), truth.final_states, plain.final_states, "fp32", "final states")


def test_cupy_and_torch_in_one_call(cp):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    x = make_decode(dtype=np.float16)
    q, k, v, seqlens = (cp.asarray(part) for part in (x.q, x.k, x.v, x.seqlens))
    out = flashport.flash_decode(torch.from_dlpack(q), k, v, torch.from_dlpack(seqlens))
    assert type(out) is torch.Tensor
    assert_close(out.float().cpu().numpy(), answer(x)[0])


@pytest.mark.parametrize("dtype", TYPES)
def test_jax_on_a_gpu(jax_gpu, dtype):
    import jax

    x = make_decode(dtype=dtype)
    q, k, v, seqlens = (jax.device_put(part, jax_gpu) for part in (x.q, x.k, x.v, x.seqlens))
    out, lse = flashport.flash_decode(q, k, v, seqlens, return_lse=True)
    assert isinstance(out, jax.Array)
    assert (out.dtype, lse.dtype, out.devices()) == (q.dtype, np.float32, {jax_gpu})
    truth, truth_lse = answer(x)
    assert_close(out, truth)
    assert_close(lse, truth_lse, 1e-4)
    with pytest.raises(ValueError, match=r"^flash_decode: out is written and must not be read-only"):
        flashport.flash_decode(q, k, v, seqlens, out=out)


def test_jax_arrays_that_are_still_being_computed(jax_gpu):
    import jax

    x = make_decode()
    q, k, v, seqlens = (jax.device_put(part, jax_gpu) for part in (x.q, x.k, x.v, x.seqlens))
    once = np.asarray(flashport.flash_decode(q, k, v, seqlens))

    @jax.jit
    def late(q, work):
        work = jax.lax.fori_loop(0, 50, lambda _, y: jax.numpy.sin(y), work)
        return jax.numpy.where(work.sum() < 2 * work.size, q, jax.numpy.nan)

    work = jax.device_put(np.ones(1 << 26, np.float32), jax_gpu)
    late(q, work).block_until_ready()  # compiled
    same(np.asarray(flashport.flash_decode(late(q, work), k, v, seqlens)), once)
