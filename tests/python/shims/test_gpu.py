"""The shims of the gated delta rule on torch tensors of a GPU, against the oracle. Skipped, and said so, without."""

from __future__ import annotations

import pytest

import fla_chunk_call
import fla_recurrent_call
import sglang_call
from chunk_call import check_chunk
from delta_call import check
from helpers import from_torch, to_torch

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


@pytest.mark.parametrize("name", sglang_call.CALLS)
def test_sglangs_update(name):
    call, positional, keywords = sglang_call.make(name)
    written = [("state", 9), ("intermediate_states", "intermediate_states_buffer")]
    check(on_gpu(call, sglang_call.UPDATE, positional, keywords, ["out"], written))


@pytest.mark.parametrize("name", sglang_call.CHUNKS)
def test_sglangs_prompts(name):
    call, positional, keywords = sglang_call.make_prompt(name)
    call = sglang_call.with_chunk_states(call)
    check_chunk(on_gpu(call, sglang_call.CHUNK, positional, keywords, ["out", None, "chunk_states"], [("state", 6)]))


@pytest.mark.parametrize("name", fla_recurrent_call.CALLS)
def test_flas_recurrence(name):
    call, positional, keywords = fla_recurrent_call.make(name)
    returns = ["out", "final_states"]
    fla_recurrent_call.judged(on_gpu(call, fla_recurrent_call.RECURRENT, positional, keywords, returns, [("state", 8)]))


@pytest.mark.parametrize("name", sorted(set(fla_chunk_call.CALLS) - {"fp32"}))
def test_flas_prompts(name):
    call, positional, keywords = fla_chunk_call.make(name)
    check_chunk(on_gpu(call, fla_chunk_call.CHUNK, positional, keywords, ["out", "final_states"], [("state", 6)]))


def test_fp32_prompts_are_refused():
    _, positional, keywords = fla_chunk_call.make("fp32")
    with pytest.raises(NotImplementedError, match="no kernel gated_delta_chunk for float32"):
        fla_chunk_call.CHUNK(*(to_torch(x).cuda() if hasattr(x, "dtype") else x for x in positional), **keywords)
