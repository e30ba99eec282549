"""Results against the oracle: every option alone, packed and dense, and random combinations of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashport
from attention_call import FORMATS, HEADS, KV_HEADS, check, make_attention, poisoned_outputs
from flashport.testing import attention_oracle
from helpers import BF16, same

PACKED = pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])


def sinks(rng, heads=HEADS):
    return rng.standard_normal(heads).astype(np.float32)


def slopes(rng, *shape):
    return (2.0 ** -rng.uniform(1, 8, shape)).astype(np.float32)


def random_bias(rng, *shape, dtype=np.float32):
    """A third of the entries hide a key, and in the first row all."""
    bias = rng.standard_normal(shape).astype(dtype)
    bias[rng.random(shape) < 0.3] = -np.inf
    bias[..., :1, :] = -np.inf
    return bias


RNG = np.random.default_rng(11)
OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.3},
    "negative scale": {"softmax_scale": -0.3},
    "scale 0": {"softmax_scale": 0.0},
    "window": {"window": (13, 6)},
    "window to the left": {"window": (63, -1)},
    "window to the right": {"window": (-1, 0)},
    "window of the own key": {"window": (0, 0)},
    "causal window": {"causal": True, "window": (64, 5)},
    "window past everything": {"window": (10**6, 10**6)},
    "softcap": {"softcap": 0.7},
    "ALiBi": {"alibi_slopes": slopes(RNG, HEADS)},
    "ALiBi of sequences": {"alibi_slopes": slopes(RNG, 4, HEADS)},
    "sinks": {"sinks": sinks(RNG)},
    "dropout": {"dropout_p": 0.3, "rng_state": np.array([5, 1 << 35 | 7])},
    "one split": {"num_splits": 1},
    "three splits": {"num_splits": 3},
    "splits of the heuristic": {"num_splits": 0},
}


@PACKED
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, fmt, packed):
    check(make_attention(fmt=fmt, packed=packed) | options)


@pytest.mark.parametrize("dims", [(16, 16), (24, 40), (64, 64), (128, 128), (192, 128), (256, 256), (512, 512)])
def test_head_dims(dims):
    check(make_attention(q_lens=(33, 3), kv_lens=(70, 3), dims=dims) | {"causal": True})


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (5, 1)])
def test_groups_of_heads(heads):
    check(make_attention(q_lens=(33, 3), kv_lens=(70, 3), heads=heads) | {"causal": True})


@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (113, 203), (203, 113), (191, 64), (192, 65), (193, 63), (64, 0), (1, 500)]
)
@pytest.mark.parametrize("options", ["none", "causal", "causal window"])
def test_sizes(q_len, kv_len, options):
    check(make_attention(q_lens=(q_len,), kv_lens=(kv_len,), packed=False) | OPTIONS[options])


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", [(2, HEADS), (1, HEADS), (2, 1), (1, 1)])
def test_bias(shape, dtype):
    bias = random_bias(np.random.default_rng(3), *shape, 70, 90, dtype=dtype)
    arguments = make_attention(q_lens=(70, 70), kv_lens=(90, 90), packed=False) | {"bias": bias}
    out, lse = check(arguments)
    assert not out[:, 0].astype(np.float32).any()
    assert (lse[..., 0] == -np.inf).all()
    check(arguments | {"causal": True, "sinks": sinks(RNG)})


def test_a_bias_of_any_strides():
    whole = random_bias(np.random.default_rng(4), 2, HEADS, 90, 140)
    bias = whole[..., ::2].swapaxes(2, 3)  # (2, heads, 70, 90)
    arguments = make_attention(q_lens=(70, 70), kv_lens=(90, 90), packed=False)
    same(check(arguments | {"bias": bias})[0], check(arguments | {"bias": bias.copy()})[0])


@PACKED
def test_pads_on_the_left(packed):
    arguments = make_attention(q_lens=(5, 3, 2), kv_lens=(40, 9, 2), packed=packed) | {
        "leftpad_k": np.array([7, 0, 2], np.int32),
        "causal": True,
        "alibi_slopes": slopes(RNG, HEADS),
    }
    arguments["k"][0 if packed else (0, 0)] = np.nan  # a key that does not exist
    arguments["v"][0 if packed else (0, 0)] = np.nan
    check(arguments)


def test_lengths_in_use_of_packed_sequences():
    arguments = make_attention(q_lens=(30, 4), kv_lens=(50, 8))
    for name in "kv":
        arguments[name][40:50] = np.nan
    arguments["q"][20:30] = np.nan
    used = {"seqused_q": np.array([20, 4], np.int32), "seqused_k": np.array([40, 0], np.int32)}
    check(arguments | used | {"causal": True})


def test_without_sequences_queries_or_keys():
    for q_lens, kv_lens in (((), ()), ((0, 0), (3, 4)), ((2, 0), (0, 0))):
        check(make_attention(q_lens=q_lens, kv_lens=kv_lens))
    for shape in ((0, 5, HEADS, 32), (2, 0, HEADS, 32)):
        q, k = np.zeros(shape, BF16), np.zeros((shape[0], 7, KV_HEADS, 32), BF16)
        out, lse = flashport.attention(q, k, k, return_lse=True)
        assert (out.shape, lse.shape) == (shape, (shape[0], HEADS, shape[1]))


def test_a_query_without_keys():
    arguments = make_attention(q_lens=(5,), kv_lens=(2,)) | {"causal": True}
    out, lse = check(arguments)
    assert not out[:3].astype(np.float32).any()
    assert (lse[:, :3] == -np.inf).all()
    _, lse = check(arguments | {"sinks": np.arange(HEADS, dtype=np.float32)})
    np.testing.assert_allclose(lse[:, :3], np.arange(HEADS)[:, None].repeat(3, 1), rtol=1e-6)


@pytest.mark.parametrize("rng_state", [(5, 9), (-3, 1 << 62), (1 << 63 - 1, 0)])
@pytest.mark.parametrize("dropout_p", [0.0, 1e-6, 0.1, 0.5, 0.99999])
def test_dropout_mask(rng_state, dropout_p):
    shape, state = (2, 3, 17, 70), np.array(rng_state)
    mask = flashport.dropout_mask(shape, state, dropout_p)
    assert mask.dtype == np.uint8
    np.testing.assert_array_equal(mask, attention_oracle.dropout_mask(shape, state, dropout_p))
    wide = np.full((2, 17, 140, 3), 7, np.uint8)
    view = wide[:, :, ::2].transpose(0, 3, 1, 2)
    assert flashport.dropout_mask(shape, state, dropout_p, mask=view) is view
    np.testing.assert_array_equal(view, mask)
    assert (wide[:, :, 1::2] == 7).all()


def test_dropout_keeps_as_many_as_it_says():
    mask = flashport.dropout_mask((4, 8, 100, 300), np.array([1, 2]), 0.2)
    assert abs(mask.mean() - 0.8) < 4 * np.sqrt(0.2 * 0.8 / mask.size)
    other = flashport.dropout_mask((4, 8, 100, 300), np.array([1, 3]), 0.2)
    assert abs((mask & other).mean() - 0.64) < 0.005  # states are independent


def test_dropout_of_a_call_is_that_of_the_mask():
    """Values that are one key's each, and so the output is the weights."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((2, 24, heads, 32)).astype(np.float32) for heads in (HEADS, KV_HEADS))
    v = np.broadcast_to(np.eye(24, dtype=np.float32)[:, None], (2, 24, KV_HEADS, 24)).copy()
    state = np.array([17, 3])
    weights = flashport.attention(q, k, v, dropout_p=0.4, rng_state=state)
    mask = flashport.dropout_mask((2, HEADS, 24, 24), state, 0.4)
    np.testing.assert_array_equal(weights.transpose(0, 2, 1, 3) > 0, mask == 1)


def test_results_are_new_arrays_of_their_shapes():
    for packed in (True, False):
        arguments = make_attention(dims=(32, 48), packed=packed)
        wanted = poisoned_outputs(arguments)
        out, lse = flashport.attention(**arguments, return_lse=True)
        assert (out.shape, out.dtype) == (wanted["out"].shape, BF16)
        assert (lse.shape, lse.dtype) == (wanted["lse"].shape, np.float32)
        alone = flashport.attention(**arguments)
        assert alone.shape == out.shape


@given(data=st.data())
@settings(max_examples=500, deadline=None)
def test_random_combinations(data):
    packed = data.draw(st.booleans(), label="packed")
    batch = data.draw(st.integers(1, 4), label="batch")
    lengths = st.lists(st.sampled_from([0, 1, 2, 31, 63, 64, 65, 130, 200]), min_size=batch, max_size=batch)
    q_lens, kv_lens = data.draw(lengths, label="q_lens"), data.draw(lengths, label="kv_lens")
    heads = data.draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]), label="heads")
    dims = data.draw(st.sampled_from([(16, 16), (40, 24), (64, 64), (72, 136)]), label="dims")
    fmt = data.draw(st.sampled_from(list(FORMATS)), label="fmt")
    seed = data.draw(st.integers(0, 99), label="seed")
    rng = np.random.default_rng(seed)
    arguments = make_attention(q_lens, kv_lens, dims, fmt, packed, heads, seed)
    names = ["causal", "window", "softcap", "alibi", "sinks", "bias", "dropout", "leftpad", "scale"]
    chosen = data.draw(st.sets(st.sampled_from(names), max_size=4), label="options")
    side = st.sampled_from([-1, 0, 1, 62, 63, 64, 100])
    if "causal" in chosen:
        arguments["causal"] = True
    if "window" in chosen:
        arguments["window"] = (data.draw(side), data.draw(side))
    if "softcap" in chosen:
        arguments["softcap"] = data.draw(st.sampled_from([0.5, 30.0]))
    if "alibi" in chosen:
        arguments["alibi_slopes"] = slopes(rng, *data.draw(st.sampled_from([(heads[0],), (batch, heads[0])])))
    if "sinks" in chosen:
        arguments["sinks"] = sinks(rng, heads[0])
    if "bias" in chosen and not packed:
        shape = (data.draw(st.sampled_from([1, batch])), data.draw(st.sampled_from([1, heads[0]])))
        arguments["bias"] = random_bias(rng, *shape, max(q_lens), max(kv_lens))
    elif "leftpad" in chosen:
        arguments["leftpad_k"] = np.array([rng.integers(0, length + 1) for length in kv_lens], np.int32)
    if "dropout" in chosen:
        arguments |= {"dropout_p": 0.25, "rng_state": rng.integers(-(2**62), 2**62, 2)}
    if "scale" in chosen:
        arguments["softmax_scale"] = data.draw(st.sampled_from([0.05, 1.0, -0.2]))
    check(arguments)
