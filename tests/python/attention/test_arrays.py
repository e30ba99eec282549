"""Arrays of every library are taken, and results have the type of the query."""

from __future__ import annotations

import numpy as np
import pytest

import flashport
from attention_call import expect_right, make_attention
from helpers import BF16, same, to_torch


@pytest.fixture(params=[True, False], ids=["packed", "dense"])
def x(request):
    """A small call with offsets or lengths."""
    return make_attention((5, 3), (9, 4), (32, 48), packed=request.param) | {"causal": True}


def test_torch(x):
    torch = pytest.importorskip("torch")
    out, lse = flashport.attention(**{name: to_torch(value) for name, value in x.items()}, return_lse=True)
    assert (type(out), type(lse)) == (torch.Tensor, torch.Tensor)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    wanted = flashport.attention(**x, return_lse=True)
    used = slice(8) if "cu_seqlens_q" in x else 0
    same(out.view(torch.int16).numpy().view(BF16)[used], wanted[0][used])
    parameter = torch.nn.Parameter(to_torch(x["q"]))
    with torch.no_grad():
        again = flashport.attention(**{**x, "q": parameter})
    assert type(again) is torch.Tensor
    assert torch.equal(again[used], out[used])
    with pytest.raises(NotImplementedError, match=r"^attention: q requires a gradient and there is no backward yet"):
        flashport.attention(**{**x, "q": parameter})


def test_jax(x):
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]  # whose bits those of NumPy's arrays are
    arrays = {name: jax.device_put(value, cpu) if isinstance(value, np.ndarray) else value for name, value in x.items()}
    out, lse = flashport.attention(**arrays, return_lse=True)
    assert (type(out), type(lse)) == (type(arrays["q"]),) * 2
    wanted = flashport.attention(**x, return_lse=True)
    used = slice(8) if "cu_seqlens_q" in x else 0
    same(np.asarray(out)[used], wanted[0][used])
    with pytest.raises(ValueError, match=r"^attention: out is written and must not be read-only"):
        flashport.attention(**arrays, out=out)


def test_device_arrays(x):
    arrays = {}
    for name, value in x.items():
        if isinstance(value, np.ndarray):
            arrays[name] = flashport.DeviceArray(value.shape, value.dtype)
            arrays[name].copy_from(value.view(np.uint16) if value.dtype == BF16 else value)
        else:
            arrays[name] = value
    out, lse = flashport.attention(**arrays, return_lse=True)
    assert (type(out), out.dtype, lse.dtype) == (flashport.DeviceArray, "bfloat16", "float32")
    found = np.empty(out.shape, np.uint16), np.empty(lse.shape, np.float32)
    out.copy_to(found[0])
    lse.copy_to(found[1])
    if "cu_seqlens_q" in x:  # rows that no sequence has hold anything in a new array
        found[0][8:], found[1][:, 8:] = 0x7FFF, np.nan
    else:
        found[0][1, 3:], found[1][1, :, 3:] = 0x7FFF, np.nan
    expect_right(x, found[0].view(BF16), found[1])


def test_dropout_masks_are_of_the_library_of_the_state():
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    state = np.array([1, 1 << 40])
    wanted = flashport.dropout_mask((1, 2, 3, 40), state, 0.5)
    assert type(wanted) is np.ndarray
    mask = flashport.dropout_mask((1, 2, 3, 40), torch.from_numpy(state), 0.5)
    assert (type(mask), mask.dtype) == (torch.Tensor, torch.uint8)
    same(mask.numpy(), wanted)
    with pytest.raises(TypeError, match="rng_state must be int64, got int32"):
        flashport.dropout_mask((1, 2, 3, 40), jnp.asarray([1, 2]), 0.5)  # JAX has no 64 bits by default


def test_streams(x):
    class Stream:
        cuda_stream = 0

    for stream in (0, Stream()):
        flashport.attention(**x, stream=stream)
