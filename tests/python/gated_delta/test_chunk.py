"""gated_delta_chunk against the fp64 recurrence, the plain WY form as yardstick, and what it promises about bits."""

from __future__ import annotations

import numpy as np
import pytest

import flashport
from chunk_call import check_chunk, expected, make_chunk
from delta_call import pairs_of
from flashport.testing import gated_delta_oracle as oracle
from helpers import BF16

DIMS = (16, 64, 96, 128, 192, 256)
OPTIONS = {
    "keys": DIMS,
    "values": DIMS,
    "group": (1, 2, 4, 8),
    "tokens": (0, 1, 2, 63, 64, 65, 127, 128, 300),
    "packed": (False, True),
    "dtype": (np.float32, np.float16, BF16),
    "gate_dtype": (np.float32, np.float16, BF16),
    "state_dtype": (np.float32, BF16, np.float16),
    "index_dtype": (np.int32, np.int64),
    "layout": ("vk", "kv"),
    "slots": ("permuted", "padded", None),
    "final_dtype": (None, np.float32, BF16, np.float16),
    "chunks": (False, True),
    "gap": (0, 24),
    "update_state": (True, False),
    "own_gate": (None, "A_log", "dt_bias"),
    "beta": ({}, {"beta_sigmoid": True}, {"beta_sigmoid": True, "allow_neg_eigval": True}),
    "use_qk_l2norm": (True, False),
    "scale": (None, 0.5),
    "head_map": ("consecutive", "modulo"),
}


def call_of(row, seed):
    """A row of OPTIONS as a call."""
    row = dict(row)
    tokens, packed, beta = (row.pop(name) for name in ("tokens", "packed", "beta"))
    if packed:
        row["lens"] = (0, tokens, 1, 0, min(tokens, 70), 0)
    heads = 1 if row["group"] >= 4 else 2
    if beta.get("allow_neg_eigval"):
        row["use_qk_l2norm"] = True  # with longer keys the state grows without bound
    return make_chunk(tokens=tokens, heads=heads, seed=seed, **row, **beta)


PAIRS = pairs_of(OPTIONS)


def id_of(row):
    return f"k{row['keys']}-v{row['values']}-g{row['group']}-t{row['tokens']}-{np.dtype(row['dtype'])}"


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=[f"{n}-{id_of(row)}" for n, row in enumerate(PAIRS)])
def test_options_in_pairs(number):
    check_chunk(call_of(PAIRS[number], number))


@pytest.mark.parametrize("lens", [(0, 1, 64, 0, 65, 700), (0, 0, 5), (7, 0, 0), (0, 0), (300,)])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_packed_sequences(lens, dtype):
    check_chunk(make_chunk(lens=lens, dtype=dtype, final_dtype=np.float32, chunks=True, use_qk_l2norm=True))


def test_tokens_that_nobody_has():
    call = make_chunk(lens=(70, 30), use_qk_l2norm=True)
    call["cu_seqlens"][2] = 80
    for name in ("q", "k", "v", "g", "beta"):
        call[name][0, 80:] = np.nan
    check_chunk(call)


@pytest.mark.parametrize("keys", [64, 128])
def test_layouts_hold_the_same_state(keys):
    """With K = V no shape tells the layouts apart; from the same state both give the same bits."""
    first, second = (
        make_chunk(tokens=70, keys=keys, values=keys, layout=layout, use_qk_l2norm=True) for layout in ("vk", "kv")
    )
    second["state"][...] = first["state"].swapaxes(2, 3)
    check_chunk(first)
    check_chunk(second)
    named = first["state_indices"]
    np.testing.assert_array_equal(first["out"].astype(np.float32), second["out"].astype(np.float32))
    np.testing.assert_array_equal(first["state"][named], second["state"][named].swapaxes(2, 3))


GATES = {
    "far below": [-1e6, -1e-3, -1e-3, -1e-3],
    "some hundreds": [-300.0, -1e-3, -20.0, -1e-2],
    "infinite": [-np.inf, -0.1, -0.2, -0.1],
    "tiny": [-1e-6],
    "none": [0.0],
    "growing": [0.02, -0.01],
}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_extreme_gates(gates, dtype):
    """No NaN and no digits lost, though an extreme gate stands among usual ones."""
    call = make_chunk(batch=1, tokens=200, dtype=dtype, use_qk_l2norm=True)
    rng = np.random.default_rng(5)
    call["g"][...] = rng.choice(GATES[gates], call["g"].shape)
    out = check_chunk(call)
    if dtype is np.float32:
        truth = expected(make_again(call, gates)).out
        assert np.abs(out - truth).max() <= 1e-5 * np.abs(truth).max()


def make_again(call, gates):
    """The arguments of ``call`` before it ran."""
    fresh = make_chunk(batch=1, tokens=200, dtype=call["q"].dtype.type, use_qk_l2norm=True)
    fresh["g"][...] = np.random.default_rng(5).choice(GATES[gates], fresh["g"].shape)
    return fresh.arguments


@pytest.mark.parametrize("a", [80.0, -80.0, -17.0])
def test_extreme_inputs_of_the_gate(a):
    """A_log of 10 with a of +-80: everything is forgotten, or e^10 log1p(e^-17) keeps its digits."""
    call = make_chunk(tokens=130, dtype=np.float32, own_gate="dt_bias", use_qk_l2norm=True)
    call["g"][...], call["A_log"][...], call["dt_bias"][...] = a, 10, 0
    check_chunk(call)


def test_extreme_rates():
    call = make_chunk(tokens=130, dtype=np.float32, use_qk_l2norm=True, beta_sigmoid=True)
    call["beta"][...] = np.random.default_rng(1).choice([100.0, -100.0, 0.0], call["beta"].shape)
    check_chunk(call)


def test_zero_keys_and_large_values():
    call = make_chunk(tokens=70, use_qk_l2norm=True, dtype=np.float32)
    call["k"][:, 1] = 0
    call["q"][:, 2] = 0
    call["v"][...] *= 1e4
    out = check_chunk(call)
    assert not out[:, 2].any()


def test_orthonormal_keys_recall_their_values():
    call = make_chunk(batch=1, tokens=64, keys=64, heads=1, group=1, dtype=np.float32, slots=None, scale=1.0)
    x = call.arguments
    x["q"][0, :, 0] = x["k"][0, :, 0] = np.eye(64)
    x["g"][...], x["beta"][...] = 0, 1  # keeps everything, learns everything
    np.testing.assert_allclose(call.run(), x["v"], rtol=1e-6)
    x["q"][0, 32:, 0] = np.eye(64)[:32]
    np.testing.assert_allclose(call.run()[0, 32:], x["v"][0, :32], rtol=1e-6)


def test_what_learns_nothing_only_forgets():
    call = make_chunk(batch=1, tokens=100, dtype=np.float32)
    call["beta"][...] = 0
    slot = call["state_indices"][0]
    before = call["state"][slot].copy()
    check_chunk(call)
    factor = np.exp(call["g"][0].astype(np.float64).sum(axis=0))
    np.testing.assert_allclose(call["state"][slot], before * factor[:, None, None], rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_bits_alone_and_in_a_batch(dtype):
    lens = (70, 1, 0, 130, 64)
    call = make_chunk(lens=lens, dtype=dtype, use_qk_l2norm=True, values=96)
    alone = make_chunk(lens=lens, dtype=dtype, use_qk_l2norm=True, values=96)
    call.run()
    first = 0
    for n in reversed(range(len(lens))):
        first = sum(lens[:n])
        x = dict(alone.arguments)
        for name in ("q", "k", "v", "g", "beta", "out"):
            x[name] = x[name][:, first : first + lens[n]]
        del x["cu_seqlens"]
        x["state_indices"] = x["state_indices"][n : n + 1]
        flashport.gated_delta_chunk(**x)
    assert alone["out"].tobytes() == call["out"].tobytes()
    assert alone.memory["state"].tobytes() == call.memory["state"].tobytes()


@pytest.mark.parametrize("limit", [1, 3])
def test_bits_do_not_depend_on_processors(limit):
    call, other = (make_chunk(lens=(70, 130), use_qk_l2norm=True) for _ in range(2))
    call.run()
    flashport._core.set_multiprocessor_limit(limit)
    try:
        other.run()
    finally:
        flashport._core.set_multiprocessor_limit(0)
    assert other["out"].tobytes() == call["out"].tobytes()
    assert other.memory["state"].tobytes() == call.memory["state"].tobytes()


def cut_in_two(call, at):
    """The same call as two, of ``at`` tokens and of the others."""
    for part in (slice(0, at), slice(at, None)):
        x = {n: v[:, part] if n in ("q", "k", "v", "g", "beta", "out") else v for n, v in call.arguments.items()}
        flashport.gated_delta_chunk(**x)


@pytest.mark.parametrize("at", [64, 128, 192])
def test_a_cut_between_chunks_changes_no_bits(at):
    call, parts = (make_chunk(tokens=200, use_qk_l2norm=True) for _ in range(2))
    call.run()
    cut_in_two(parts, at)
    assert parts["out"].tobytes() == call["out"].tobytes()
    assert parts.memory["state"].tobytes() == call.memory["state"].tobytes()


@pytest.mark.parametrize("at", [1, 63, 100])
def test_a_cut_within_a_chunk_stays_in_tolerance(at):
    call = make_chunk(tokens=200, use_qk_l2norm=True)
    truth, plain = expected(call.arguments), expected(call.arguments, "bf16")
    cut_in_two(call, at)
    assert not oracle.compare(call["out"], truth.out, plain.out, "bf16").problem
    for slot in call["state_indices"]:
        assert not oracle.compare(call["state"][slot], truth.state[slot], plain.state[slot], "fp32").problem


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_a_prompt_by_chunks_and_then_token_by_token(dtype):
    """As updates throughout, and within the tolerance of the chunked form."""
    prompt, more = 150, 64
    call = make_chunk(batch=2, tokens=prompt + more, dtype=dtype, use_qk_l2norm=True, own_gate="dt_bias",
                      beta_sigmoid=True)  # fmt: skip
    x = call.arguments
    truth, plain = expected(x), expected(x, {np.float32: "fp32", BF16: "bf16"}[dtype])
    start = x["state"].copy()
    heads = {n: v[:, :prompt] if n in ("q", "k", "v", "g", "beta", "out") else v for n, v in x.items()}
    flashport.gated_delta_chunk(**heads)
    common = {"use_qk_l2norm": True, "state_indices": x["state_indices"]}
    gates = {"A_log": x["A_log"], "dt_bias": x["dt_bias"]}
    for t in range(prompt, prompt + more):
        now = slice(t, t + 1)
        flashport.gated_delta_update(
            x["q"][:, now], x["k"][:, now], x["v"][:, now], x["g"][:, now], x["beta"][:, now], **gates, **common,
            state=x["state"], out=x["out"][:, now],
        )  # fmt: skip
    throughout = flashport.gated_delta_update(x["q"], x["k"], x["v"], x["g"], x["beta"], **gates, **common, state=start)
    fmt = "fp32" if dtype is np.float32 else "bf16"
    for got in (x["out"], throughout):
        assert not oracle.compare(got, truth.out, plain.out, fmt).problem
    for slot in x["state_indices"]:
        for got in (x["state"][slot], start[slot]):
            assert not oracle.compare(got, truth.state[slot], plain.state[slot], "fp32").problem


@pytest.mark.parametrize("tokens", [16384, 66000])
def test_many_tokens_of_one_head(tokens):
    """Also more than 65,536."""
    call = make_chunk(batch=1, tokens=tokens, keys=16, values=16, group=1, use_qk_l2norm=True, final_dtype=np.float32)
    check_chunk(call)


def test_a_strided_output():
    call = make_chunk(tokens=70, use_qk_l2norm=True)
    dense = call.run().copy()
    batch, tokens, heads, values = dense.shape
    memory = np.full((batch, tokens, heads, 2 * values), np.nan, BF16)
    again = make_chunk(tokens=70, use_qk_l2norm=True)
    again.arguments["out"] = memory[..., :values]
    again.run()
    assert memory[..., :values].tobytes() == dense.tobytes()
    assert np.isnan(memory[..., values:].astype(np.float32)).all()


def test_an_own_workspace():
    call, own = (make_chunk(lens=(70, 1, 130), use_qk_l2norm=True) for _ in range(2))
    x = own.arguments
    shapes = {name: x[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens")}
    count = flashport.gated_delta_chunk_workspace_size(**shapes)
    memory = np.full(count + 64, 255, np.uint8)
    begin = -memory.ctypes.data % 16
    x["workspace"] = memory[begin : begin + count]
    call.run()
    own.run()
    assert own["out"].tobytes() == call["out"].tobytes()
    assert (memory[:begin] == 255).all()
    assert (memory[begin + count :] == 255).all()
    x["workspace"] = memory[begin : begin + count - 1]
    with pytest.raises(ValueError, match=rf"^gated_delta_chunk: workspace must have at least {count} bytes"):
        own.run()


def test_decode_calls_do_not_find_what_chunks_leave_behind():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 8, 128), np.float32).astype(BF16)
    k, v = rng.standard_normal((2, 2, 4000, 2, 128), np.float32).astype(BF16)
    lengths = np.array([4000, 2500], np.int32)
    before = flashport.flash_decode(q, k, v, lengths)
    for _ in range(3):
        make_chunk(tokens=500, group=4, use_qk_l2norm=True).run()
        assert flashport.flash_decode(q, k, v, lengths).tobytes() == before.tobytes()


def test_defaults():
    """out is new; without a pool states start from zero."""
    call = make_chunk(tokens=70, slots=None, use_qk_l2norm=True)
    x = call.arguments
    out = flashport.gated_delta_chunk(x["q"], x["k"], x["v"], x["g"], x["beta"], use_qk_l2norm=True)
    assert out.flags.c_contiguous
    assert out.dtype == BF16
    assert out.tobytes() == call.run().tobytes()


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    call = make_chunk(tokens=70, dtype=np.float32, use_qk_l2norm=True, slots="permuted")
    x = {n: torch.from_numpy(np.ascontiguousarray(v)) if isinstance(v, np.ndarray) else v
         for n, v in call.arguments.items()}  # fmt: skip
    del x["out"]
    out = flashport.gated_delta_chunk(**x)
    np.testing.assert_array_equal(out.numpy(), call.run())
    np.testing.assert_array_equal(x["state"].numpy(), call["state"])


# --- Errors: the text names the argument, and nothing has been written ------------------------------------------------


def refuse(change, error, text, **options):
    call = make_chunk(final_dtype=np.float32, chunks=True, use_qk_l2norm=True, **options)
    before = {name: x.tobytes() for name, x in call.memory.items()}
    x = call.arguments
    out = x["out"]
    change(x)
    with pytest.raises(error, match=rf"^gated_delta_chunk: {text}"):
        flashport.gated_delta_chunk(**x)
    assert {name: x.tobytes() for name, x in call.memory.items()} == before
    assert np.isnan(out.astype(np.float32)).all()


WRONG = {
    "rank": (lambda x: x.update(q=x["q"][0]), ValueError, "q must have 4 dimensions"),
    "beta per V": (lambda x: x.update(beta=np.zeros_like(x["v"])), ValueError, "beta must have 3 dimensions"),
    "tokens": (lambda x: x.update(g=x["g"][:, 1:]), ValueError, "g must have shape"),
    "keys": (lambda x: x.update(k=x["k"][..., :32]), ValueError, "k must have shape"),
    "type": (lambda x: x.update(v=np.zeros(x["v"].shape, np.float16)), TypeError, "v must be bfloat16, got float16"),
    "states' type": (lambda x: x.update(state=np.zeros(x["state"].shape, np.int16)), TypeError, "state must be"),
    "chunk states' type": (
        lambda x: x.update(chunk_states=np.zeros(x["chunk_states"].shape, np.float32)),
        TypeError,
        "chunk_states must be bfloat16",
    ),
    "final states": (
        lambda x: x.update(final_states=x["final_states"][:1]),
        ValueError,
        r"final_states must have shape .* = \(2, 2, 64, 64\), got \(1, 2, 64, 64\)",
    ),
    "slot": (lambda x: x["state_indices"].__setitem__(0, 4), ValueError, r"state_indices\[0\] = 4 must be below 4"),
    "twice": (
        lambda x: x["state_indices"].__setitem__(slice(None), 1),
        ValueError,
        r"state_indices\[0\] and state_indices\[1\] must not be the same slot",
    ),
    "pool": (lambda x: x.pop("state"), ValueError, "state_indices needs state"),
    "bias": (lambda x: x.update(dt_bias=np.zeros(2, np.float32)), ValueError, "dt_bias needs A_log"),
    "doubled": (lambda x: x.update(allow_neg_eigval=True), ValueError, "allow_neg_eigval needs beta_sigmoid"),
    "scale": (lambda x: x.update(scale=0.0), ValueError, "scale must be positive"),
    "layout": (lambda x: x.update(state_layout="kk"), ValueError, "state_layout must be"),
    "overlap": (lambda x: x.update(out=x["v"]), ValueError, "out must not share memory with v"),
    "no array": (lambda x: x.update(g=3), TypeError, "g must"),
    "batch": (
        lambda x: x.update(cu_seqlens=np.array([0, 65, 130], np.int32)),
        ValueError,
        "q must have batch 1 with cu_seqlens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what):
    refuse(*WRONG[what])


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ((1, 70, 100), "cu_seqlens must begin with 0, got 1"),
        ((0, 71, 70), "cu_seqlens must rise within the 100 tokens of q, got 71 and 70 for sequence 1"),
        ((0, 70, 101), "cu_seqlens must rise within the 100 tokens of q, got 70 and 101 for sequence 1"),
    ],
)
def test_wrong_offsets(offsets, text):
    refuse(lambda x: x["cu_seqlens"].__setitem__(slice(None), offsets), ValueError, text, lens=(70, 30))


def test_too_few_chunks():
    def cut(x):
        x["chunk_states"] = x["chunk_states"][:, :2]

    refuse(cut, ValueError, "chunk_states must have a chunk for each 64 tokens of every sequence, 3 together",
           lens=(70, 30))  # fmt: skip


def test_a_slot_that_is_only_read_may_be_named_twice():
    call = make_chunk(update_state=False, use_qk_l2norm=True)
    call["state_indices"][...] = call["state_indices"][0]
    check_chunk(call)


@pytest.mark.parametrize("batch", [0, 3])
def test_nothing_to_do(batch):
    """No tokens or no sequences are no error, and write nothing."""
    call = make_chunk(batch=batch, tokens=0 if batch else 1)
    before = call.memory["state"].tobytes()
    assert call.run() is call["out"]
    assert call.memory["state"].tobytes() == before
