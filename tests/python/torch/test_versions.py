"""A torch without DLPack's exchange API, which came with 2.10, is served as well as one that has it.

Where torch has it, tensors of a class without it take the other way.
"""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flashport  # noqa: E402
from decode_call import answer, make_decode  # noqa: E402
from helpers import assert_close, to_torch  # noqa: E402
from torch_calls import NAMES, WithoutExchangeApi, make  # noqa: E402

KINDS = pytest.mark.parametrize("kind", [torch.Tensor, WithoutExchangeApi], ids=["tensor", "no exchange API"])


def tensors(x, kind):
    return [to_torch(part).as_subclass(kind) for part in (x.q, x.k, x.v, x.seqlens)]


@KINDS
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_results_of_decode_are_tensors(kind, dtype):
    x = make_decode(dtype=dtype)
    out, lse = flashport.flash_decode(*tensors(x, kind), return_lse=True)
    assert type(out) is type(lse) is torch.Tensor
    assert out.dtype is to_torch(x.q).dtype
    assert lse.dtype is torch.float32
    assert_close(out.float().numpy(), answer(x)[0])
    assert_close(lse.numpy(), answer(x)[1], 1e-4)
    assert torch.equal(flashport.flash_decode(*tensors(x, kind)), out)


@KINDS
@pytest.mark.parametrize("name", ["merge_state", "merge_states"])
def test_results_of_merges_are_tensors(kind, name):
    x = make(name, kind)
    x.function(**x.arguments)
    given = {key: value for key, value in x.arguments.items() if key not in x.outputs}
    for got, wanted in zip(x.function(**given), (x.arguments[key] for key in x.outputs), strict=True):
        assert type(got) is torch.Tensor
        assert torch.equal(got, wanted)


@KINDS
@pytest.mark.parametrize("name", NAMES)
def test_all_functions_write_tensors(kind, name):
    x, plain = make(name, kind), make(name)
    x.function(**x.arguments)
    plain.function(**plain.arguments)
    for output in x.outputs:
        assert torch.equal(x.arguments[output].nan_to_num(), plain.arguments[output].nan_to_num())
        assert not torch.isnan(x.arguments[output][0, :1]).all()


@KINDS
def test_fp8_caches(kind):
    x = make_decode(dtype=np.float16)
    q, k, v, seqlens = tensors(x, torch.Tensor)
    k, v = (part.nan_to_num().to(torch.float8_e4m3fn) for part in (k, v))
    for name, part in (("k", k), ("v", v)):  # what the oracle reads
        setattr(x, name, part.float().numpy())
    out = flashport.flash_decode(q.as_subclass(kind), k.as_subclass(kind), v.as_subclass(kind), seqlens)
    assert_close(out.float().numpy(), answer(x)[0])
    cache = torch.zeros(2, 8, 2, 64, dtype=torch.float8_e4m3fn)
    rows = torch.randn(3, 2, 64)
    written = cache.as_subclass(kind)
    flashport.append_kv(rows, rows, written, cache.clone(), torch.tensor([5, 0, 3]))
    assert torch.equal(cache[0, 5].float(), rows[0].to(torch.float8_e4m3fn).float())
    assert written._version > 0


@KINDS
def test_fp8_of_other_makers_is_named(kind):
    x = make("flash_decode")
    cache = torch.zeros(3, 40, 2, 64).to(torch.float8_e4m3fnuz).as_subclass(kind)
    x.arguments |= {"k_cache": cache, "v_cache": cache.clone()}
    assert torch.equal(x.function(**x.arguments)[0], torch.zeros(3, 8, 64))
    x.arguments |= {"k_cache": torch.zeros(3, 40, 2, 64).to(torch.float8_e5m2fnuz).as_subclass(kind)}
    with pytest.raises(TypeError, match=r"^flash_decode: k_cache (has element type|cannot be read through DLPack: )"):
        x.function(**x.arguments)


@KINDS
def test_views_and_unsigned_masks(kind):
    x = make_decode((40, 7, 3))
    q, k, v, seqlens = tensors(x, torch.Tensor)
    pool = torch.stack([k, v], 2)
    q = torch.stack([q, q], 1)
    mask = torch.tensor([[1, 3], [1, 3], [1, 3]], dtype=torch.int64).to(torch.uint32)
    wanted = flashport.flash_decode(q, k, v, seqlens, tree_mask=mask)
    got = flashport.flash_decode(
        q.as_subclass(kind), pool.as_subclass(kind)[:, :, 0], pool.as_subclass(kind)[:, :, 1],
        seqlens.as_subclass(kind), tree_mask=mask.as_subclass(kind),
    )  # fmt: skip
    assert torch.equal(got, wanted)


def test_what_is_of_torch_and_no_tensor_is_no_array():
    x = make("flash_decode")
    for wrong in (torch.Size([1]), torch.float32, torch.device("cpu")):
        with pytest.raises(TypeError, match=r"^flash_decode: q must be an array that speaks DLPack"):
            x.function(**x.arguments | {"q": wrong})


def test_exported_tensors_are_released():
    class Array(np.ndarray):
        """Weak references need a class of its own."""

    x = make("flash_decode")
    memory = x.arguments["q"].numpy().copy().view(Array)
    gone = weakref.ref(memory)
    x.arguments["q"] = torch.from_numpy(memory).as_subclass(WithoutExchangeApi)
    x.function(**x.arguments)
    del memory, x.arguments["q"]
    gc.collect()
    assert gone() is None
