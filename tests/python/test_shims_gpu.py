"""The shims of the gated delta rule on torch tensors of a GPU, against the oracle. Skipped, and said so, without."""

from __future__ import annotations

import pytest

import test_fla
import test_fla_recurrent
import test_sglang
from chunk_call import check_chunk
from conftest import from_torch, to_torch
from delta_call import check

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)


def on_gpu(call, shim, positional, keywords, returns, written=()):
    """The call, made by the shim on the GPU.

    ``returns`` is what the call names the shim's results; of ``written`` each is (what the call names it, place or name
    of the shim's argument).
    """

    def move(x):
        x = to_torch(x)
        return x.cuda() if isinstance(x, torch.Tensor) else x

    def fetch(name, tensor):
        assert tensor.is_cuda
        x = from_torch(tensor.cpu())
        rows = sum(call.lens)
        if name == "out" and rows < x.shape[0] * x.shape[1]:  # tokens of no sequence
            call[name][0, :rows] = x[0, :rows]
        else:
            call[name][...] = x

    def run():
        arguments, named = [move(x) for x in positional], {name: move(x) for name, x in keywords.items()}
        results = shim(*arguments, **named)
        for name, tensor in zip(returns, results if isinstance(results, tuple) else (results,), strict=True):
            if name is not None:
                fetch(name, tensor)
        for name, at in written:
            if name in call.arguments:
                fetch(name, arguments[at] if isinstance(at, int) else named[at])
        return call["out"]

    call.run = run
    return call


@pytest.mark.parametrize("name", test_sglang.CALLS)
def test_sglangs_update(name):
    call, positional, keywords = test_sglang.make(name)
    written = [("state", 9), ("intermediate_states", "intermediate_states_buffer")]
    check(on_gpu(call, test_sglang.UPDATE, positional, keywords, ["out"], written))


@pytest.mark.parametrize("name", test_sglang.CHUNKS)
def test_sglangs_prompts(name):
    call, positional, keywords = test_sglang.make_prompt(name)
    call = test_sglang.with_chunk_states(call)
    check_chunk(on_gpu(call, test_sglang.CHUNK, positional, keywords, ["out", None, "chunk_states"], [("state", 6)]))


@pytest.mark.parametrize("name", test_fla_recurrent.CALLS)
def test_flas_recurrence(name):
    call, positional, keywords = test_fla_recurrent.make(name)
    returns = ["out", "final_states"]
    test_fla_recurrent.judged(on_gpu(call, test_fla_recurrent.RECURRENT, positional, keywords, returns, [("state", 8)]))


@pytest.mark.parametrize("name", sorted(set(test_fla.CALLS) - {"fp32"}))
def test_flas_prompts(name):
    call, positional, keywords = test_fla.make(name)
    check_chunk(on_gpu(call, test_fla.CHUNK, positional, keywords, ["out", "final_states"], [("state", 6)]))


def test_fp32_prompts_are_refused():
    _, positional, keywords = test_fla.make("fp32")
    with pytest.raises(NotImplementedError, match="no kernel gated_delta_chunk for float32"):
        test_fla.CHUNK(*(to_torch(x).cuda() if hasattr(x, "dtype") else x for x in positional), **keywords)
