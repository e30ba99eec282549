"""Options that are not arrays: words, numbers, counts and booleans, each by one rule for all functions."""

from __future__ import annotations

import numpy as np
import pytest

import flashport
from decode_arguments import FUNCTIONS, call, decode_arguments, expect, stage1_arguments
from decode_call import make_decode


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"kv_layout": "NDH"}, ValueError, 'kv_layout must be "NHD" or "HND", got "NDH"'),
        ({"kv_layout": 1}, TypeError, 'kv_layout must be "NHD" or "HND", got int'),
        ({"window": 5}, TypeError, r"window must be a tuple \(left, right\), got 5"),
        ({"window": (1.5, 0)}, TypeError, r"window\[0\] must be an integer, got float"),
        ({"softcap": "x"}, TypeError, "softcap must be a number, got str"),
        ({"softmax_scale": []}, TypeError, "softmax_scale must be a number, got list"),
        ({"num_splits": -1}, ValueError, "num_splits must be None .*got -1"),
        ({"num_splits": 1.0}, TypeError, "num_splits must be an integer, got float"),
        ({"num_splits": 1 << 70}, ValueError, "num_splits must fit in 64 bits"),
        ({"return_lse": 1}, TypeError, "return_lse must be True or False, got int"),
        ({"max_q_len": "1"}, TypeError, "max_q_len must be an integer, got str"),
        ({"seqlens": None}, TypeError, "seqlens may be None only with"),
        ({"block_table": np.zeros((3, 1), np.int32), "token_table": np.zeros((3, 1), np.int32)}, ValueError,
         "at most one of"),
        ({"request_index": np.zeros(3, np.int32)}, ValueError, "request_index must come with token_table"),
        ({"softcap": float("nan")}, ValueError, "softcap"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"softmax_scale": float("inf")}, ValueError, "softmax_scale"),
        ({"window": (-2, 0)}, ValueError, "window"),
    ],
)  # fmt: skip
def test_options(change, error, text):
    expect("flash_decode", decode_arguments() | change, error, rf"^flash_decode: .*{text}")


@pytest.mark.parametrize(
    ("function", "change", "text"),
    [
        ("flash_decode", {"softmax_scale": 1e39}, r"softmax_scale must be finite in fp32, .*, got 1e\+39"),
        ("flash_decode", {"softcap": 1e300}, r"softcap must be 0 .* of fp32 .*, got 1e\+300"),
        ("flash_decode", {"softcap": 1e-50}, r"softcap must be 0 .* of fp32 .*, got 1e-50"),
        ("flash_decode", {"k_scale": np.zeros(1, np.float32)}, r"k_scale\[0\] = 0 must be finite and not 0; pass None"),
        ("flash_decode", {"v_scale": np.array([1, np.nan], np.float32)}, r"v_scale\[1\] = nan must be finite and not "),
        ("flash_decode_stage1", {"sm_scale": 1e39}, r"sm_scale must be finite in fp32, .*, got 1e\+39"),
    ],
)
def test_numbers_that_fp32_does_not_have(function, change, text):
    expect(function, FUNCTIONS[function][0]() | change, ValueError, rf"^{function}: {text}")


@pytest.mark.parametrize("scale", [0, np.nan, np.inf, -np.inf])
def test_scales_of_append_kv(scale):
    k, cache = np.ones((3, 2, 64), np.float32), np.zeros((4, 2, 2, 64), np.float32)
    for name in ("k_scale", "v_scale"):
        scales = np.array([1, scale], np.float32)
        with pytest.raises(ValueError, match=rf"^append_kv: {name}\[1\] = .*{scale:g} must be finite and not 0"):
            flashport.append_kv(k, k, cache, cache.copy(), np.arange(3), **{name: scales})
    assert not cache.any()


def test_the_heuristic():
    assert flashport.num_splits_heuristic(110, 132, 64, 128) == 1  # at least 80% of the multiprocessors
    assert flashport.num_splits_heuristic(8, 132, 64, 128) == 16
    assert flashport.num_splits_heuristic(1, 132, 1, 128) == 1


@pytest.mark.parametrize(
    ("place", "value", "error", "text"),
    [
        (0, 1.5, TypeError, "batch_nheads_mblocks must be an integer, got float"),
        (1, "a", TypeError, "num_SMs must be an integer, got str"),
        (2, None, TypeError, "num_n_blocks must be an integer, got NoneType"),
        (3, -1, ValueError, "max_splits must be from 0 to 2147483647, got -1"),
        (1, 1 << 40, ValueError, f"num_SMs must be from 0 to 2147483647, got {1 << 40}"),
        (1, 1 << 70, ValueError, "num_SMs must fit in 64 bits"),
    ],
)
def test_the_heuristic_takes_counts(place, value, error, text):
    arguments = [8, 132, 64, 128]
    arguments[place] = value
    with pytest.raises(error, match=rf"^num_splits_heuristic: {text}"):
        flashport.num_splits_heuristic(*arguments)


def test_the_heuristic_of_the_largest_and_smallest_counts():
    most = (1 << 31) - 1
    assert flashport.num_splits_heuristic(most, most, most, 1) == 1
    assert flashport.num_splits_heuristic(1, most, most, 2) == 2
    assert flashport.num_splits_heuristic(0, 0, 0, 0) == 1


@pytest.mark.parametrize("value", [1, 0, None, "yes", 1.0])
def test_one_rule_for_booleans(value):
    """True, False and NumPy's own; all operations say of anything else that it is none."""
    x = decode_arguments()
    text = rf"must be True or False, got {type(value).__name__}$"
    with pytest.raises(TypeError, match=rf"^flash_decode: return_lse {text}"):
        call("flash_decode", x | {"return_lse": value})
    q = np.zeros((2, 3, 4, 16), np.float32)
    gates = np.zeros((2, 3, 4), np.float32)
    for name in ("use_qk_l2norm", "is_kda", "update_state", "allow_neg_eigval"):
        with pytest.raises(TypeError, match=rf"^gated_delta_update: {name} {text}"):
            flashport.gated_delta_update(q, q, q, **{name: value})
    for name in ("use_qk_l2norm", "beta_sigmoid", "update_state", "allow_neg_eigval"):
        with pytest.raises(TypeError, match=rf"^gated_delta_chunk: {name} {text}"):
            flashport.gated_delta_chunk(q, q, q, gates, gates, **{name: value})


@pytest.mark.parametrize("value", [True, np.bool_(False)])
def test_a_boolean_is_no_number(value):
    got = f"got {'bool' if value is True else 'numpy.bool'}"  # before NumPy 2 numpy.bool_
    for change, text in (
        ({"softmax_scale": value}, "softmax_scale must be a number"),
        ({"softcap": value}, "softcap must be a number"),
        ({"window": (value, 0)}, r"window\[0\] must be an integer"),
        ({"window": (0, value)}, r"window\[1\] must be an integer"),
        ({"num_splits": value}, "num_splits must be an integer"),
        ({"max_q_len": value}, "max_q_len must be an integer"),
    ):
        expect("flash_decode", decode_arguments() | change, TypeError, rf"^flash_decode: {text}, {got}")
    wrong = stage1_arguments() | {"block_seq": value}
    expect("flash_decode_stage1", wrong, TypeError, rf"^flash_decode_stage1: block_seq must be an integer, {got}")
    q = np.zeros((2, 3, 4, 16), np.float32)
    for name in ("scale", "lower_bound", "softplus_beta", "softplus_threshold"):
        with pytest.raises(TypeError, match=rf"^gated_delta_update: {name} must be a number, {got}"):
            flashport.gated_delta_update(q, q, q, **{name: value})
    with pytest.raises(TypeError, match=rf"^merge_states: lse_base must be a number, {got}"):
        flashport.merge_states(q, q[..., 0], lse_base=value)
    with pytest.raises(TypeError, match=rf"^supports: head_dim must be an integer, {got}"):
        flashport.supports("decode", head_dim=value, target="cpu")
    with pytest.raises(TypeError, match=rf"^DeviceArray: shape\[1\] must be an integer, {got}"):
        flashport.DeviceArray((2, value), "float32")


def test_booleans_of_numpy_are_booleans():
    x = make_decode()
    _, lse = flashport.flash_decode(x.q, x.k, x.v, x.seqlens, return_lse=np.bool_(True))
    assert lse.shape == x.q.shape[:2]
    q = np.random.default_rng(0).standard_normal((2, 3, 4, 16), np.float32)
    for ours, numpys in ((True, np.bool_(True)), (False, np.bool_(False))):
        np.testing.assert_array_equal(
            flashport.gated_delta_update(q, q, q, use_qk_l2norm=numpys),
            flashport.gated_delta_update(q, q, q, use_qk_l2norm=ours),
        )
    assert flashport.flash_decode(x.q, x.k, x.v, x.seqlens, return_lse=np.bool_(False)).shape == x.q.shape


def test_an_integer_that_no_double_holds():
    expect("flash_decode", decode_arguments() | {"softcap": 10**400}, ValueError, r"^flash_decode: softcap must be fin")


class Interrupting:
    """A number whose making is interrupted."""

    def __init__(self, error):
        self.error = error

    def __float__(self):
        raise self.error

    __index__ = __float__


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", ["softcap", "num_splits"])
def test_an_interrupt_is_no_wrong_number(name, error):
    with pytest.raises(error):
        call("flash_decode", decode_arguments() | {name: Interrupting(error())})
    with pytest.raises(TypeError, match=rf"^flash_decode: {name} must be an?"):
        call("flash_decode", decode_arguments() | {name: Interrupting(RuntimeError())})
