"""The LightLLM drop-ins, under the original signatures, against plain NumPy."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import flashport
from flashport import lightllm
from helpers import BF16, assert_close
from lightllm_call import HEAD_DIM, HEADS, LENS, answer, make_state


@pytest.mark.parametrize("block_seq", [16, 128, 256])
@pytest.mark.parametrize("keyword", ["O", "Out", None])
def test_the_two_stages(block_seq, keyword):
    x = make_state()
    blocks = -(-max(LENS) // block_seq) + 1
    mid_out = np.full((len(LENS), HEADS, blocks, HEAD_DIM), np.nan, np.float32)
    mid_lse = np.full((len(LENS), HEADS, blocks), np.nan, np.float32)
    s = x.state
    lightllm.flash_decode_stage1(
        x.q,
        x.k,
        x.v,
        s.req_manager.req_to_token_indexs,
        s.b_req_idx,
        s.b_seq_len,
        max(LENS),
        mid_out,
        mid_lse,
        block_seq,
    )
    for block in range(blocks):
        truth, truth_lse = answer(x, block * block_seq, (block + 1) * block_seq)
        for b, length in enumerate(LENS):
            if block * block_seq < length:
                assert_close(mid_out[b, :, block], truth[b])
                assert_close(mid_lse[b, :, block], truth_lse[b], 1e-4)
            else:  # not written
                assert np.isnan(mid_out[b, :, block]).all()
                assert np.isnan(mid_lse[b, :, block]).all()

    out = np.full(x.q.shape, np.nan, BF16)
    if keyword is None:
        lightllm.flash_decode_stage2(mid_out, mid_lse, s.b_seq_len, out, block_seq)
    else:
        lightllm.flash_decode_stage2(mid_out, mid_lse, s.b_seq_len, block_seq=block_seq, **{keyword: out})
    assert_close(out, answer(x)[0])
    assert not out[LENS.index(0)].astype(np.float32).any()


def test_results_of_the_stages_may_be_slices_of_one_array():
    x = make_state()
    s = x.state
    blocks = -(-max(LENS) // 128)
    both = np.full((len(LENS), HEADS, blocks, HEAD_DIM + 1), np.nan, np.float32)
    mid_out, mid_lse, out = both[..., :HEAD_DIM], both[..., HEAD_DIM], np.empty(x.q.shape, BF16)
    table = s.req_manager.req_to_token_indexs
    lightllm.flash_decode_stage1(
        x.q, x.k, x.v, table, s.b_req_idx, s.b_seq_len, max(LENS), mid_out, mid_lse, block_seq=128
    )
    lightllm.flash_decode_stage2(mid_out, mid_lse, s.b_seq_len, out, block_seq=128)
    assert_close(out, answer(x)[0])
    with pytest.raises(ValueError, match=r"^flash_decode_stage1: mid_out_logsumexp must not share memory with mid_out"):
        lightllm.flash_decode_stage1(
            x.q, x.k, x.v, table, s.b_req_idx, s.b_seq_len, max(LENS), mid_out, both[..., 5], block_seq=128
        )


def test_scale_of_stage1():
    x = make_state()
    s = x.state
    mid_out = np.zeros((len(LENS), HEADS, 2, HEAD_DIM), np.float32)
    mid_lse = np.zeros((len(LENS), HEADS, 2), np.float32)
    arguments = (x.k, x.v, s.req_manager.req_to_token_indexs, s.b_req_idx, s.b_seq_len, max(LENS))
    lightllm.flash_decode_stage1(x.q, *arguments, mid_out, mid_lse, 256, sm_scale=0.0)
    np.testing.assert_allclose(mid_lse[0, :, 0], np.log(256), rtol=1e-5)
    lightllm.flash_decode_stage1(x.q, *arguments, mid_out, mid_lse, 256, 0.0)
    np.testing.assert_allclose(mid_lse[0, :, 1], np.log(44), rtol=1e-5)


@pytest.mark.parametrize(
    "wrapper",
    [lightllm.token_decode_attention_flash_decoding, lightllm.gqa_token_decode_attention_flash_decoding],
)
def test_the_wrappers(wrapper):
    x = make_state()
    truth = answer(x)[0]
    got = wrapper(x.q, x.state, HEADS, HEAD_DIM, x.k, x.v)
    assert got.dtype == BF16
    assert_close(got, truth)
    flat = wrapper(x.q.reshape(len(LENS), -1), x.state, HEADS, HEAD_DIM, x.k, x.v)
    assert flat.shape == (len(LENS), HEADS * HEAD_DIM)
    assert_close(flat.reshape(truth.shape), truth)
    out = np.empty((len(LENS), HEADS * HEAD_DIM), BF16)
    assert wrapper(x.q, x.state, HEADS, HEAD_DIM, x.k, x.v, out=out) is out
    assert_close(out.reshape(truth.shape), truth)
    with pytest.raises(ValueError, match="contiguous"):
        wrapper(x.q, x.state, HEADS, HEAD_DIM, x.k, x.v, out=np.empty((len(LENS), 2 * HEADS * HEAD_DIM), BF16)[:, ::2])


def test_the_wrappers_name_what_q_must_be():
    x = make_state()
    with pytest.raises(TypeError, match=r"^token_decode_attention_flash_decoding: q must be a tensor of torch"):
        lightllm.token_decode_attention_flash_decoding(x.q.tolist(), x.state, HEADS, HEAD_DIM, x.k, x.v)


def test_alloc_tensor_func_is_used():
    x = make_state()
    asked = []

    def allocate(shape, dtype, device):
        asked.append((tuple(shape), np.dtype(dtype), device))
        return np.full(shape, np.nan, dtype)

    got = lightllm.gqa_token_decode_attention_flash_decoding(
        x.q, x.state, HEADS, HEAD_DIM, x.k, x.v, alloc_tensor_func=allocate
    )
    assert_close(got, answer(x)[0])
    assert [shape for shape, _, _ in asked] == [(5, HEADS, HEAD_DIM), (5, HEADS, 3, HEAD_DIM), (5, HEADS, 3)]
    assert [dtype for _, dtype, _ in asked] == [BF16, np.float32, np.float32]


def test_arrays_of_cupy_are_made_on_the_device_of_q(monkeypatch):
    """With a module in CuPy's place that records where each array is made."""
    current, made = [0], []

    class FakeDevice:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            current.pop()

    class FakeArray:
        shape, dtype, device = (2, HEADS, HEAD_DIM), BF16, FakeDevice(3)

    def empty(shape, dtype):
        made.append((tuple(shape), np.dtype(dtype), current[-1]))
        return np.full(shape, np.nan, dtype)

    FakeArray.__module__ = "cupy"
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=FakeArray, empty=empty))
    allocate = lightllm._allocator(FakeArray(), None)
    allocate(FakeArray.shape)
    allocate((2, 3), "float32")
    assert made == [(FakeArray.shape, BF16, 3), ((2, 3), np.float32, 3)]
    assert current == [0]


def test_torch_tensors_through_the_wrappers():
    torch = pytest.importorskip("torch")
    x = make_state()

    def tensor(array):
        if array.dtype == BF16:
            return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    state = SimpleNamespace(
        batch_size=x.state.batch_size,
        max_len_in_batch=x.state.max_len_in_batch,
        req_manager=SimpleNamespace(req_to_token_indexs=tensor(x.state.req_manager.req_to_token_indexs)),
        b_req_idx=tensor(x.state.b_req_idx),
        b_seq_len=tensor(x.state.b_seq_len),
    )
    for allocate in (None, torch.empty):
        got = lightllm.token_decode_attention_flash_decoding(
            tensor(x.q), state, HEADS, HEAD_DIM, tensor(x.k), tensor(x.v), alloc_tensor_func=allocate
        )
        assert got.dtype is torch.bfloat16
        assert_close(got.float().numpy(), answer(x)[0])


def quantised(x, fmt):
    """The state's pool in LightLLM's int8 or int4: (k, its scales, v, its scales), and the state with what they hold.

    Scales of slots that no request has are NaN. Both sides are slices of one buffer.
    """
    values = np.concatenate([x.k, x.v], axis=1).astype(np.float32)
    scale = np.empty((*values.shape[:-1], HEAD_DIM // 8), np.float16)
    stored = flashport.quantize_kv(values, fmt, scale=scale)
    held = flashport.dequantize_kv(stored, fmt, scale=scale)
    heads = x.k.shape[1]
    sides = (stored[:, :heads], scale[:, :heads], stored[:, heads:], scale[:, heads:])
    return sides, SimpleNamespace(q=x.q, k=held[:, :heads], v=held[:, heads:], state=x.state)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_wrappers_of_quantised_caches(fmt):
    x = make_state()
    wrapper = getattr(lightllm, f"ppl_{fmt}kv_token_decode_attention_flash_decoding")
    (k, k_scale, v, v_scale), held = quantised(x, fmt)
    assert np.isnan(k_scale).any()
    truth = answer(held)[0]
    got = wrapper(x.q, x.state, HEADS, HEAD_DIM, k, k_scale, v, v_scale)
    assert got.dtype == BF16
    assert_close(got, truth)
    out = np.empty(x.q.shape, BF16)
    assert wrapper(x.q, x.state, HEADS, HEAD_DIM, k, k_scale, v, v_scale, out) is out
    assert_close(out, truth)
    of_groups = lightllm.gqa_token_decode_attention_flash_decoding(
        x.q, x.state, HEADS, HEAD_DIM, k, v, k_scale=k_scale, v_scale=v_scale, k_format=fmt, v_format=fmt
    )
    assert_close(of_groups, truth)


def test_quantised_caches_are_refused_by_name():
    x = make_state()
    (k, k_scale, v, v_scale), _ = quantised(x, "int8")
    call = lightllm.ppl_int8kv_token_decode_attention_flash_decoding
    with pytest.raises(ValueError, match=r"^flash_decode_stage1: v_scale must have shape .*got \(695, 2, 32\) for v"):
        call(x.q, x.state, HEADS, HEAD_DIM, k, k_scale, v, np.repeat(v_scale, 2, axis=-1))
    with pytest.raises(TypeError, match=r"^flash_decode_stage1: k_scale must be float32 or float16, got bfloat16"):
        call(x.q, x.state, HEADS, HEAD_DIM, k, k_scale.astype(BF16), v, v_scale)


def test_stage1_takes_scales_of_heads():
    x = make_state()
    s = x.state
    blocks = max(LENS) // 128 + 1
    results = []
    for factor in (1, 2):
        mid_out = np.zeros((len(LENS), HEADS, blocks, HEAD_DIM), np.float32)
        mid_lse = np.zeros((len(LENS), HEADS, blocks), np.float32)
        arguments = (s.req_manager.req_to_token_indexs, s.b_req_idx, s.b_seq_len, max(LENS), mid_out, mid_lse, 128)
        scale = np.full(2, factor, np.float32)
        lightllm.flash_decode_stage1(x.q, x.k, x.v, *arguments, HEAD_DIM**-0.5 / factor, k_scale=scale, v_scale=scale)
        results.append(mid_out)
    np.testing.assert_allclose(results[1], 2 * results[0], rtol=1e-5, atol=1e-6)


def test_stage2_wants_one_output():
    mid = np.zeros((1, 1, 1, 64), np.float32)
    lse = np.zeros((1, 1, 1), np.float32)
    lens = np.array([1], np.int32)
    out = np.zeros((1, 1, 64), np.float32)
    with pytest.raises(TypeError, match="exactly one of O and Out"):
        lightllm.flash_decode_stage2(mid, lse, lens, out, 16, Out=out)
    with pytest.raises(TypeError, match="exactly one of O and Out"):
        lightllm.flash_decode_stage2(mid, lse, lens, block_seq=16)
    with pytest.raises(TypeError, match="block_seq must be given"):
        lightllm.flash_decode_stage2(mid, lse, lens, out)
