"""A wrong argument is an exception whose text names function and argument, and outputs stay untouched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashport
from conftest import BF16, make_decode, same, share_memory, to_torch

BATCH, HEADS, KV_HEADS, HEAD_DIM, BLOCKS, BLOCK_SEQ, SLOTS = 3, 8, 2, 128, 4, 16, 80


def stage1_arguments():
    rng = np.random.default_rng(1)
    pool = rng.standard_normal((SLOTS, 2, KV_HEADS, HEAD_DIM)).astype(BF16)
    return {
        "q": rng.standard_normal((BATCH, HEADS, HEAD_DIM)).astype(BF16),
        "k": pool[:, 0],
        "v": pool[:, 1],
        "Req_to_tokens": rng.integers(0, SLOTS, (BATCH + 1, 64), np.int32),
        "B_req_idx": np.arange(BATCH, dtype=np.int32),
        "B_Seqlen": np.array([64, 17, 0], np.int32),
        "max_len_in_batch": 64,
        "mid_out": np.full((BATCH, HEADS, BLOCKS, HEAD_DIM), np.nan, np.float32),
        "mid_out_logsumexp": np.full((BATCH, HEADS, BLOCKS), np.nan, np.float32),
        "block_seq": BLOCK_SEQ,
    }


def stage2_arguments():
    rng = np.random.default_rng(2)
    return {
        "mid_out": rng.standard_normal((BATCH, HEADS, BLOCKS, HEAD_DIM), np.float32),
        "mid_out_logexpsum": rng.standard_normal((BATCH, HEADS, BLOCKS), np.float32),
        "B_Seqlen": np.array([64, 17, 0], np.int32),
        "Out": np.full((BATCH, HEADS, HEAD_DIM), np.nan, BF16),
        "block_seq": BLOCK_SEQ,
    }


def decode_arguments():
    x = make_decode((40, 7, 1))
    return {
        "q": x.q,
        "k_cache": x.k,
        "v_cache": x.v,
        "seqlens": x.seqlens,
        "sinks": np.zeros(HEADS, np.float32),
        "out": np.full(x.q.shape, np.nan, BF16),
        "lse": np.full(x.q.shape[:2], np.nan, np.float32),
    }


FUNCTIONS = {
    "flash_decode_stage1": (stage1_arguments, ("mid_out", "mid_out_logsumexp")),
    "flash_decode_stage2": (stage2_arguments, ("Out",)),
    "flash_decode": (decode_arguments, ("out", "lse")),
}
ARRAYS = [
    (function, name)
    for function, (make, _) in FUNCTIONS.items()
    for name, value in make().items()
    if isinstance(value, np.ndarray)
]


def call(function, arguments):
    positional = arguments
    keywords = {}
    if function == "flash_decode":
        names = ("q", "k_cache", "v_cache", "seqlens")
        positional = {name: arguments[name] for name in names}
        keywords = {name: value for name, value in arguments.items() if name not in names}
    return getattr(flashport, function)(*positional.values(), **keywords)


def expect(function, arguments, error, text):
    """The call fails so, and leaves its outputs as they were."""
    outputs = [arguments[name] for name in FUNCTIONS[function][1]]
    before = [np.array(output).tobytes() for output in outputs]
    with pytest.raises(error, match=text):
        call(function, arguments)
    assert [np.array(output).tobytes() for output in outputs] == before


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_arguments_are_right_unchanged(function):
    arguments = FUNCTIONS[function][0]()
    call(function, arguments)
    out = arguments[FUNCTIONS[function][1][0]]
    if function != "flash_decode_stage1":  # rows past a length stay as they are there
        assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize(("function", "name"), ARRAYS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_wrong_rank(function, name, data):
    arguments = FUNCTIONS[function][0]()
    array = arguments[name]
    if data.draw(st.booleans(), label="one more"):
        wrong = np.expand_dims(array, data.draw(st.integers(0, array.ndim), label="axis"))
    else:
        wrong = array[(0,) * data.draw(st.integers(1, array.ndim), label="fewer")]
        wrong = np.asarray(wrong, array.dtype)
    if function == "flash_decode" and wrong.ndim in {"q": (4,), "k_cache": (3,)}.get(name, ()):
        return  # that rank has a meaning of its own
    arguments[name] = wrong
    # A cache's rank decides what is expected of its fellow.
    told = {"q": "(q|out)", "k_cache": "(k_cache|v_cache)"}.get(name, name)
    expect(function, arguments, ValueError, rf"^{function}: {told} must have .*dimensions? \(.*got {'[0-9]+'}: \(")


@pytest.mark.parametrize(("function", "name"), ARRAYS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_wrong_shape(function, name, data):
    arguments = FUNCTIONS[function][0]()
    array = arguments[name]
    axis = data.draw(st.integers(0, array.ndim - 1), label="axis")
    free = {"k": (0,), "v": (), "Req_to_tokens": (0, 1), "k_cache": (1,)}.get(name, ())
    if axis in free:
        return
    change = data.draw(st.sampled_from([-1, 1]), label="change")
    shape = list(array.shape)
    shape[axis] += change
    arguments[name] = np.zeros(shape, array.dtype)
    expect(function, arguments, ValueError, rf"^{function}: \w+ must .*got ")


@pytest.mark.parametrize(("function", "name"), ARRAYS)
@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.bool_, np.complex64, np.int16])
def test_an_element_type_that_nobody_has(function, name, dtype):
    arguments = FUNCTIONS[function][0]()
    arguments[name] = np.zeros(arguments[name].shape, dtype)
    text = rf"{name} must be [a-z0-9_, ]+, got {np.dtype(dtype).name}$"
    if dtype is np.complex64:
        text = f"{name} has element type complex64, which no argument may have$"
    expect(function, arguments, TypeError, rf"^{function}: {text}")


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("q", "float16, bfloat16 or float32"),
        ("k_cache", "bfloat16, float8_e4m3fn, float8_e4m3fnuz or uint8"),
        ("v_cache", "bfloat16"),
        ("seqlens", "int32 or int64"),
        ("sinks", "float32"),
        ("out", "float16, bfloat16 or float32"),
    ],
)
def test_a_refused_element_type_is_told_what_its_argument_may_be(name, types):
    arguments = decode_arguments()
    arguments[name] = np.zeros(arguments[name].shape, np.float64)
    expect("flash_decode", arguments, TypeError, rf"^flash_decode: {name} must be {types}, got float64$")


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int16, np.bool_])
def test_such_a_query_is_refused_before_its_output_is_made(dtype):
    torch = pytest.importorskip("torch")
    arguments = decode_arguments()
    q = np.zeros(arguments["q"].shape, dtype)
    arrays = [arguments[name] for name in ("k_cache", "v_cache", "seqlens")]
    text = rf"^flash_decode: q must be float16, bfloat16 or float32, got {np.dtype(dtype).name}$"
    with pytest.raises(TypeError, match=text):
        flashport.flash_decode(q, *arrays)
    with pytest.raises(TypeError, match=text):
        flashport.flash_decode(torch.from_numpy(q), *map(to_torch, arrays))


def test_out_of_another_head_dim():
    arguments = decode_arguments()
    arguments["out"] = np.full((BATCH, HEADS, HEAD_DIM // 2), np.nan, BF16)
    text = r"out must have shape \(batch, num_q_heads, head_dim_v of v_cache\) = \(3, 8, 128\), got \(3, 8, 64\)$"
    expect("flash_decode", arguments, ValueError, rf"^flash_decode: {text}")


def test_pages_without_a_table():
    arguments = decode_arguments()
    for name in ("k_cache", "v_cache"):
        arguments[name] = np.zeros((64, 16, KV_HEADS, HEAD_DIM), BF16)
    text = r"k_cache must have a row for each request: batch is 3, got \(64, 16, 2, 128\); a cache in pages needs "
    expect("flash_decode", arguments, ValueError, rf"^flash_decode: {text}block_table, or kv_indptr and kv_indices$")


@pytest.mark.parametrize(("function", "name"), ARRAYS)
def test_an_element_type_of_another_argument(function, name):
    arguments = FUNCTIONS[function][0]()
    array = arguments[name]
    floats = array.dtype == BF16 or array.dtype == np.float32
    arguments[name] = np.zeros(array.shape, np.int32 if floats else np.float32)
    expect(function, arguments, TypeError, rf"^{function}: \w+ must .*got ")


@pytest.mark.parametrize(("function", "name"), ARRAYS)
@pytest.mark.parametrize("value", [[1, 2], 3, "q", object()])
def test_no_array(function, name, value):
    arguments = FUNCTIONS[function][0]()
    arguments[name] = value
    text = rf"^{function}: {name} must be an array that speaks DLPack .*got {type(value).__name__}"
    with pytest.raises(TypeError, match=text):
        call(function, arguments)


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


def test_lengths_in_host_memory_are_checked():
    arguments = decode_arguments()
    arguments["seqlens"] = np.array([41, 7, 1], np.int32)
    expect("flash_decode", arguments, ValueError, r"^flash_decode: seqlens")
    arguments = stage2_arguments()
    arguments["B_Seqlen"] = np.array([65, 1, 1], np.int32)
    expect("flash_decode_stage2", arguments, ValueError, r"^flash_decode_stage2: B_Seqlen")


def test_the_ranks_that_a_port_once_got_wrong():
    arguments = stage2_arguments()
    arguments["mid_out"] = np.zeros((2, 3, 4, 5, 6), np.float32)
    expect(
        "flash_decode_stage2",
        arguments,
        ValueError,
        r"^flash_decode_stage2: mid_out must have 4 dimensions \(batch, num_q_heads, blocks, head_dim\), got 5: "
        r"\(2, 3, 4, 5, 6\)$",
    )


def test_too_many_dimensions():
    arguments = decode_arguments()
    arguments["q"] = np.zeros((1,) * 9, np.float32)
    expect("flash_decode", arguments, ValueError, r"^flash_decode: q must have at most 8 dimensions, got 9")


def test_outputs_that_overlap_inputs_or_themselves():
    arguments = decode_arguments()
    arguments["out"] = arguments["q"]
    expect("flash_decode", arguments, ValueError, r"^flash_decode: out ")
    arguments["out"] = np.broadcast_to(np.zeros((1, 1, HEAD_DIM), BF16), (3, HEADS, HEAD_DIM)).copy()
    arguments["out"] = np.lib.stride_tricks.as_strided(arguments["out"], strides=(0, 256, 2))
    expect("flash_decode", arguments, ValueError, r"^flash_decode: out ")


@pytest.mark.parametrize(("function", "name"), ARRAYS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_outputs_that_share_memory_with_another_argument(function, name, data):
    make, outputs = FUNCTIONS[function]
    arguments = make()
    others = [output for output in outputs if output != name]
    if not others:
        return
    output = data.draw(st.sampled_from(others))
    share_memory(arguments, output, name, data.draw(st.integers(0, (arguments[output].nbytes - 1) // 16)))
    text = rf"({output} must not share memory with {name}|{name} must not share memory with {output}); pass another"
    expect(function, arguments, ValueError, rf"^{function}: {text} tensor$")


def test_outputs_over_tables_and_lengths():
    """What ended the process, or gave wrong numbers."""
    x = make_decode((40, 7, 1))
    table = np.arange(3, dtype=np.int32).reshape(3, 1)
    memory = np.zeros(3 * HEADS * HEAD_DIM, BF16)
    in_table = np.ndarray(table.shape, np.int32, memory)
    in_table[...] = table
    with pytest.raises(ValueError, match=r"^flash_decode: out must not share memory with block_table; pass another"):
        flashport.flash_decode(x.q, x.k, x.v, x.seqlens, block_table=in_table, out=memory.reshape(x.q.shape))
    assert np.array_equal(in_table, table)
    wide = np.zeros((3, 2, HEADS, HEAD_DIM), BF16)
    wide[:, 0] = x.q
    queries = wide[:, 0]
    shifted = wide.reshape(-1)[1 : 1 + 3 * HEADS * HEAD_DIM].reshape(x.q.shape)
    with pytest.raises(ValueError, match=r"^flash_decode: out must not share memory with q; pass another tensor$"):
        flashport.flash_decode(queries, x.k, x.v, x.seqlens, out=shifted)
    wanted = flashport.flash_decode(x.q, x.k, x.v, x.seqlens)
    flashport.flash_decode(queries, x.k, x.v, x.seqlens, out=wide[:, 1])  # interleaved, and no element is shared
    same(wide[:, 1], wanted)
    same(wide[:, 0], x.q)


def test_shared_memory_of_append_and_merges():
    k = np.ones((3, 2, 64), np.float32)
    cache, other = np.zeros((2, 4, 2, 2, 64), np.float32)
    inside = cache.reshape(-1, 2, 64)[:3]
    for arguments, text in (
        ((inside, k, cache, other, np.arange(3)), "k_cache must not share memory with k"),
        ((k, inside, cache, other, np.arange(3)), "k_cache must not share memory with v"),
        ((k, k, cache, cache, np.arange(3)), "v_cache must not share memory with k_cache"),
        ((k, k, other, cache, cache.view(np.int64).reshape(-1)[:3]), "v_cache must not share memory with positions"),
    ):
        with pytest.raises(ValueError, match=rf"^append_kv: {text}; pass another tensor$"):
            flashport.append_kv(*arguments)
    assert not cache.any()
    pool = np.zeros((5, 2, 2, 64), np.float32)  # keys and values side by side
    flashport.append_kv(k, k, pool[:, 0], pool[:, 1], np.arange(3))
    assert pool[:3].all()
    assert not pool[3:].any()
    o, lse = np.zeros((3, 64), np.float32), np.zeros(3, np.float32)
    out = flashport.merge_state(o, lse, o, lse)  # one tensor as both states
    assert not out[0].any()
    with pytest.raises(ValueError, match=r"^merge_state: out_lse must not share memory with o_b; pass another tensor$"):
        flashport.merge_state(o.copy(), lse, o, lse, out_lse=o[:, 0])
    both = np.zeros((2, 3, 129), np.float32)
    with pytest.raises(ValueError, match=r"^merge_states: out must not share memory with lse; pass another tensor$"):
        flashport.merge_states(both[..., :64], both[..., 64], out=both[0, :, 64:128])


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


def test_stage1_without_keys_checks_lengths_and_rows():
    arguments = stage1_arguments() | {"max_len_in_batch": 0, "B_Seqlen": np.zeros(BATCH, np.int32)}
    flashport.flash_decode_stage1(**arguments)
    assert np.isnan(arguments["mid_out"]).all()
    late = arguments | {"B_Seqlen": np.array([0, 0, 5], np.int32)}
    expect("flash_decode_stage1", late, ValueError, r"^flash_decode_stage1: B_Seqlen\[2\] = 5 must lie in \[0, 0\]")
    far = arguments | {"B_req_idx": np.array([0, 9, 1], np.int32)}
    expect("flash_decode_stage1", far, ValueError, r"^flash_decode_stage1: B_req_idx\[1\] = 9 must lie in \[0, 3\]")


@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_ragged_rows_that_nobody_owns_are_not_written(num_splits):
    x = make_decode((400, 300))
    q = np.concatenate([x.q, x.q, x.q])
    out, lse = np.full(q.shape, 7, BF16), np.full(q.shape[:2], 7, np.float32)
    offsets = np.array([0, 2, 3], np.int32)
    flashport.flash_decode(
        q, x.k, x.v, x.seqlens, cu_seqlens_q=offsets, max_q_len=2, num_splits=num_splits, out=out, lse=lse
    )
    assert (out[3:] == 7).all()
    assert (lse[3:] == 7).all()
    assert not (lse[:3] == 7).any()


def test_what_no_kernel_serves_says_why():
    x = make_decode(head_dim=24)
    support = flashport.supports(head_dim=1024, target="cpu")
    assert not support
    assert support.reason
    q = np.zeros((1, 1, 1024), BF16)
    cache = np.zeros((1, 4, 1, 1024), BF16)
    with pytest.raises(NotImplementedError, match=r"^flash_decode: "):
        flashport.flash_decode(q, cache, cache, np.array([1], np.int32))
    with pytest.raises(NotImplementedError):
        flashport.which_kernel(head_dim=1024, target="cpu")
    assert x.q.shape[-1] == 24


def test_append_and_merge_refusals():
    rng = np.random.default_rng(0)
    k = rng.standard_normal((3, 2, 64), np.float32)
    cache = np.zeros((4, 2, 2, 64), np.float32)
    with pytest.raises(ValueError, match=r"^append_kv: v_cache must"):
        flashport.append_kv(k, k, cache, np.zeros((4, 2, 3, 64), np.float32), np.arange(3))
    with pytest.raises(TypeError, match=r"^append_kv: positions must"):
        flashport.append_kv(k, k, cache, cache.copy(), np.zeros(3, np.float32))
    assert not cache.any()
    o, lse = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"^merge_states: lse_base must be None .* or 2, got 10"):
        flashport.merge_states(o, lse, lse_base=10)
    with pytest.raises(ValueError, match=r"^merge_states: lse must"):
        flashport.merge_states(o, lse[:1])
    with pytest.raises(ValueError, match=r"^merge_state: "):
        flashport.merge_state(o, lse, o[:1], lse)


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
