"""SGLang's signatures over the gated delta rule: the same bits by position, by keyword, and from torch."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest

from chunk_call import check_chunk
from delta_call import check
from flashport import sglang
from helpers import BF16, from_torch, same, to_torch
from sglang_call import CALLS, CHUNK, CHUNKS, UPDATE, make, make_prompt, with_chunk_states

# SGLang's name of each argument that goes by keyword.


def test_the_signature_is_sglangs():
    parameters = inspect.signature(UPDATE).parameters
    positional = [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "A_log", "a", "dt_bias", "softplus_beta", "softplus_threshold", "q", "k", "v", "b", "initial_state_source",
        "initial_state_indices", "scale", "use_qk_l2norm_in_kernel", "cu_seqlens", "is_kda", "disable_state_update",
        "intermediate_states_buffer", "intermediate_state_indices", "cache_steps", "retrieve_parent_token",
    ]  # fmt: skip
    assert list(parameters)[len(positional) :] == [
        "lower_bound", "cache_ring", "replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta",
        "match_cutedsl_decode", "state_layout",
    ]  # fmt: skip
    text = inspect.getdoc(UPDATE)
    assert not [name for name in parameters if f"{name}:" not in text]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("by_name", [False, True])
def test_numpy(name, by_name):
    call, _, _ = make(name)
    check(call)
    other, positional, keywords = make(name)
    if by_name:
        names = list(inspect.signature(UPDATE).parameters)
        keywords |= dict(zip(names, positional, strict=False))
        positional = []
    out = UPDATE(*positional, **keywords)
    assert type(out) is np.ndarray
    assert out.dtype == call["q"].dtype
    assert out.flags.c_contiguous
    same(out, call["out"])
    for pool in call.memory:
        same(other.memory[pool], call.memory[pool])


@pytest.mark.parametrize("name", CALLS)
def test_torch(name):
    torch = pytest.importorskip("torch")

    call, positional, keywords = make(name)
    positional = [to_torch(x) for x in positional]
    keywords = {key: to_torch(value) for key, value in keywords.items()}
    out = UPDATE(*positional, **keywords)
    call.run()
    assert out.dtype is torch.bfloat16
    assert out.is_contiguous()
    assert tuple(out.shape) == call["v"].shape
    same(from_torch(out), call["out"])
    if positional[9] is not None:
        same(from_torch(positional[9]), call["state"])
    if "intermediate_states_buffer" in keywords:
        same(from_torch(keywords["intermediate_states_buffer"]), call["intermediate_states"])


def test_shapes_of_kimi():
    """A_log comes as (1, 1, HV, 1), dt_bias as HV * K elements of any shape."""
    call, positional, keywords = make("kda")
    call.run()
    _, positional, keywords = make("kda")
    positional[0] = positional[0].reshape(1, 1, -1, 1)
    positional[2] = positional[2].reshape(4, -1)
    same(UPDATE(*positional, **keywords), call["out"])


def test_what_is_not_read():
    """cache_steps, the rings without cache_ring, indices without a pool, parents without a buffer."""
    call, positional, keywords = make("no pool")
    call.run()
    positional[10] = np.array([700, 700], np.int32)
    unused = {"intermediate_state_indices": np.array([9, 9]), "retrieve_parent_token": np.full((2, 2), 9)}
    got = UPDATE(*positional, **keywords, **unused, cache_steps=3, replayssm_rawv=object(), replayssm_g=object())
    same(got, call["out"])


@pytest.mark.parametrize("name", ["verify", "tree"])
def test_late_arguments_go_by_position(name):
    """In SGLang's order, and flags as anything that has a truth value."""
    call, positional, keywords = make(name)
    call.run()
    positional[12] = np.True_
    buffer = keywords["intermediate_states_buffer"]
    late = [1, buffer, keywords["intermediate_state_indices"], buffer.shape[1]]
    same(UPDATE(*positional[:14], 0, *late, keywords.get("retrieve_parent_token")), call["out"])


def test_cache_steps_say_where_slots_begin():
    """Whatever the shape of the buffer, as in SGLang's kernel."""
    call, positional, keywords = make("verify")
    call.run()
    same(UPDATE(*positional, **keywords, cache_steps=8), call["out"])
    inner = keywords["intermediate_states_buffer"].shape[2:]
    apart = np.full((3, 7, *inner), np.nan, np.float32)
    keywords["intermediate_states_buffer"] = apart
    kept = keywords["intermediate_state_indices"]
    assert min(kept) == -1
    assert max(kept) == 3  # a slot that the buffer's shape has not
    same(UPDATE(*positional, **keywords, cache_steps=5), call["out"])
    as_slots = apart.reshape(-1, *inner)[: 21 // 5 * 5].reshape(4, 5, *inner)
    for n, slot in enumerate(kept):
        if slot >= 0:
            same(as_slots[slot], call["intermediate_states"][call["intermediate_indices"][n], :5])
    keywords["intermediate_states_buffer"] = apart[:, ::-1]
    text = r"must be contiguous where cache_steps, 5, are not its 7 steps; pass cache_steps=7, or a contiguous buffer$"
    with pytest.raises(ValueError, match=f"^{UPDATE.__name__}: intermediate_states_buffer {text}"):
        UPDATE(*positional, **keywords, cache_steps=5)
    with pytest.raises(TypeError, match=f"^{UPDATE.__name__}: cache_steps must be an integer, got str$"):
        UPDATE(*positional, **keywords, cache_steps="a")
    with pytest.raises(TypeError, match=f"^{UPDATE.__name__}: cache_steps must be an integer, got bool$"):
        UPDATE(*positional, **keywords, cache_steps=True)
    with pytest.raises(ValueError, match=f"^{UPDATE.__name__}: cache_steps must be above 0, got 0$"):
        UPDATE(*positional, **keywords, cache_steps=0)


@pytest.mark.parametrize("name", ["cache_ring", "match_cutedsl_decode"])
def test_refusals(name):
    call, positional, keywords = make("decode")
    before = call.memory["state"].tobytes()
    text = rf"^fused_sigmoid_gating_delta_rule_update: {name} must be False"
    with pytest.raises(NotImplementedError, match=text):
        UPDATE(*positional, **keywords, **{name: True})
    assert call.memory["state"].tobytes() == before


@pytest.mark.parametrize("scale", [0, -1.0, float("nan")])
def test_scale_is_above_0(scale):
    _, positional, keywords = make("decode")
    positional[11] = scale
    with pytest.raises(ValueError, match=r"^fused_sigmoid_gating_delta_rule_update: scale must be above 0"):
        UPDATE(*positional, **keywords)
    for positional[11], kind in (("a", "str"), (True, "bool")):
        text = f"scale must be a number or None, got {kind}$"
        with pytest.raises(TypeError, match=rf"^fused_sigmoid_gating_delta_rule_update: {text}"):
            UPDATE(*positional, **keywords)


@pytest.mark.parametrize("index", [0, 2, 5])
def test_a_gradient_is_refused(index):
    torch = pytest.importorskip("torch")
    _, positional, keywords = make("decode")
    positional = [
        torch.from_numpy(np.ascontiguousarray(x, np.int32 if x.dtype.kind == "i" else np.float32))
        if isinstance(x, np.ndarray)
        else x
        for x in positional
    ]
    state = torch.nan_to_num(positional[9])
    positional[9] = state.clone()
    positional[index].requires_grad_()
    name = list(inspect.signature(UPDATE).parameters)[index]
    with pytest.raises(NotImplementedError, match=rf"^{UPDATE.__name__}: {name} requires a gradient"):
        UPDATE(*positional, **keywords)
    assert torch.equal(positional[9], state)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            assert not UPDATE(*positional, **keywords).requires_grad


@pytest.mark.parametrize("name", ["mixed_qkv", "A_log", "initial_state", "out"])
def test_a_gradient_of_the_packed_decode_is_refused(name):
    torch = pytest.importorskip("torch")
    given = {
        "mixed_qkv": torch.zeros(1, 48), "a": torch.zeros(1, 1), "b": torch.zeros(1, 1), "A_log": torch.zeros(1),
        "dt_bias": torch.zeros(1), "scale": 1.0, "initial_state": torch.ones(1, 1, 16, 16),
        "out": torch.ones(1, 1, 1, 16), "ssm_state_indices": torch.zeros(1, dtype=torch.int32),
    }  # fmt: skip
    given[name].requires_grad_()
    decode = sglang.fused_recurrent_gated_delta_rule_packed_decode
    with pytest.raises(NotImplementedError, match=f"^{decode.__name__}: {name} requires a gradient"):
        decode(**given)
    assert given["initial_state"].eq(1).all()
    with torch.no_grad():
        assert not decode(**given)[0].eq(1).any()


def test_torch_is_not_imported():
    code = (
        "import sys, numpy as np\n"
        "from flashport.sglang import fused_sigmoid_gating_delta_rule_update as update\n"
        "x, f = np.ones((1, 1, 1, 16), np.float32), np.ones(1, np.float32)\n"
        "out = update(f, f[None], f, 1.0, 20.0, x, x, x, f[None], None, None)\n"
        "assert out.shape == x.shape and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_signature_of_the_chunked_form_is_sglangs():
    parameters = inspect.signature(CHUNK).parameters
    assert [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD] == [
        "q", "k", "v", "g", "beta", "scale", "initial_state", "initial_state_indices", "cu_seqlens", "head_first",
        "use_qk_l2norm_in_kernel", "inplace_update",
    ]  # fmt: skip
    assert list(parameters)[-2:] == ["output_h", "state_layout"]
    text = inspect.getdoc(CHUNK)
    assert not [name for name in parameters if f"{name}:" not in text]


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("by_name", [False, True])
def test_prompts_from_numpy(name, by_name):
    call, _, _ = make_prompt(name)
    check_chunk(with_chunk_states(call))
    other, positional, keywords = make_prompt(name)
    if by_name:
        keywords |= dict(zip(inspect.signature(CHUNK).parameters, positional, strict=False))
        positional = []
    o, nothing, h = CHUNK(*positional, **keywords)
    assert nothing is None
    same(o, call["out"])
    same(h, call["chunk_states"])
    assert o.dtype == h.dtype == BF16
    for pool in other.memory:
        same(other.memory[pool], call.memory[pool])


@pytest.mark.parametrize("name", CHUNKS)
def test_prompts_from_torch(name):
    torch = pytest.importorskip("torch")
    call, positional, keywords = make_prompt(name)
    positional = [to_torch(x) for x in positional]
    o, nothing, h = CHUNK(*positional, **keywords)
    with_chunk_states(call).run()
    assert nothing is None
    assert o.dtype is h.dtype is torch.bfloat16
    same(from_torch(o), call["out"])
    same(from_torch(h), call["chunk_states"])
    if positional[6] is not None:
        same(from_torch(positional[6]), call["state"])


def test_h_may_be_left_out():
    call, _, _ = make_prompt("packed")
    call.run()
    _, positional, keywords = make_prompt("packed")
    o, _, h = CHUNK(*positional, **keywords, output_h=False)
    assert h is None
    same(o, call["out"])


def test_other_objects_are_refused():
    class Foreign:
        def __init__(self, x):
            self.shape = x.shape

    _, positional, keywords = make_prompt("packed")
    text = (
        r"chunk_gated_delta_rule: q must be an array of torch.*, got Foreign; convert it, or call .* outputs of yours"
    )
    with pytest.raises(TypeError, match=f"^{text}$"):
        CHUNK(Foreign(positional[0]), *positional[1:], **keywords)


def test_indices_without_a_state_are_not_read():
    call, positional, keywords = make_prompt("no pool")
    positional[7] = np.array([700, 700], np.int32)
    o, _, _ = CHUNK(*positional, **keywords)
    call.run()
    same(o, call["out"])


def test_heads_come_last():
    _, positional, keywords = make_prompt("dense")
    positional[9] = True
    with pytest.raises(DeprecationWarning, match=r"^chunk_gated_delta_rule: head_first must be False"):
        CHUNK(*positional, **keywords)


@pytest.mark.parametrize("index", [0, 3, 6])
def test_a_gradient_of_a_prompt_is_refused(index):
    torch = pytest.importorskip("torch")
    _, positional, keywords = make_prompt("dense")
    positional = [
        torch.from_numpy(np.ascontiguousarray(x, np.int32 if x.dtype.kind == "i" else np.float32))
        if isinstance(x, np.ndarray)
        else x
        for x in positional
    ]
    positional[index].requires_grad_()
    name = list(inspect.signature(CHUNK).parameters)[index]
    with pytest.raises(NotImplementedError, match=rf"^chunk_gated_delta_rule: {name} requires a gradient"):
        CHUNK(*positional, **keywords)
    with torch.no_grad():
        assert not CHUNK(*positional, **keywords)[0].requires_grad


def test_errors_of_prompts_use_the_names_of_gated_delta_chunk():
    _, positional, keywords = make_prompt("dense")
    positional[4] = positional[4][..., None]
    with pytest.raises(ValueError, match=r"^gated_delta_chunk: beta must have 3 dimensions"):
        CHUNK(*positional, **keywords)
    positional[0] = positional[0][0]
    with pytest.raises(ValueError, match=r"^gated_delta_chunk: q must have 4 dimensions"):
        CHUNK(*positional, **keywords)
