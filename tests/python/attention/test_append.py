"""New keys that a call of attention writes first, and rotary embedding: held against both done by hand in fp64."""

from __future__ import annotations

import re

import numpy as np
import pytest

import flashport
from attention_call import HEADS, KV_HEADS

B, ROOM, D = 3, 64, 32
BEFORE = np.array([0, 7, 40], np.int32)


def rotated(x, cos, sin, positions, interleaved):
    """x [B, S, H, D] in fp64; positions [B, S]."""
    half = cos.shape[1]
    c, s = (table[positions][:, :, None].astype(np.float64) for table in (cos, sin))
    x = x.astype(np.float64).copy()
    first, second = (
        (x[..., : 2 * half : 2].copy(), x[..., 1 : 2 * half : 2].copy())
        if interleaved
        else (x[..., :half].copy(), x[..., half : 2 * half].copy())
    )
    turned = first * c - second * s, first * s + second * c
    if interleaved:
        x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2] = turned
    else:
        x[..., :half], x[..., half : 2 * half] = turned
    return x


def attended(q, k, v, lengths, causal):
    """(B, S, H, D) in fp64 of the first `lengths` keys."""
    out = np.zeros_like(q)
    for b, length in enumerate(lengths):
        for h in range(q.shape[2]):
            keys, values = (x[b, :length, h * KV_HEADS // HEADS] for x in (k, v))
            scores = q[b, :, h] @ keys.T / np.sqrt(D)
            if causal:
                rows, columns = np.indices(scores.shape)
                scores[columns > rows + length - q.shape[1]] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[b, :, h] = weights / weights.sum(-1, keepdims=True) @ values
    return out


@pytest.fixture
def call():
    rng = np.random.default_rng(3)

    def make(q_len, new_len, rotary_dim=0):
        normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
        k, v = (np.full((B, ROOM, KV_HEADS, D), np.nan, np.float32) for _ in "kv")
        for b, length in enumerate(BEFORE):
            k[b, :length], v[b, :length] = normal(length, KV_HEADS, D), normal(length, KV_HEADS, D)
        arguments = {
            "q": normal(B, q_len, HEADS, D), "k": k, "v": v, "seqused_k": BEFORE,
            "k_new": normal(B, new_len, KV_HEADS, D), "v_new": normal(B, new_len, KV_HEADS, D),
        }  # fmt: skip
        if rotary_dim:
            angles = rng.uniform(0, 6, (ROOM + 8, rotary_dim // 2))
            arguments.update(rotary_cos=np.cos(angles).astype(np.float32), rotary_sin=np.sin(angles).astype(np.float32))
        return arguments

    return make


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [0, 16, 32])
@pytest.mark.parametrize(
    ("q_len", "new_len", "causal"), [(1, 1, False), (4, 4, True), (20, 20, True), (5, 5, False), (3, 9, True)]
)
def test_appends_and_attends(call, q_len, new_len, causal, rotary_dim, interleaved):
    arguments = call(q_len, new_len, rotary_dim)
    k_wanted, v_wanted = arguments["k"].astype(np.float64), arguments["v"].astype(np.float64)
    q, k_new = arguments["q"].astype(np.float64), arguments["k_new"].astype(np.float64)
    if rotary_dim:
        cos, sin = arguments["rotary_cos"], arguments["rotary_sin"]
        steps = BEFORE[:, None] + np.arange(q_len) * (1 if causal else 0)
        q = rotated(q, cos, sin, steps, interleaved)
        k_new = rotated(k_new, cos, sin, BEFORE[:, None] + np.arange(new_len), interleaved)
    for b, length in enumerate(BEFORE):
        k_wanted[b, length : length + new_len], v_wanted[b, length : length + new_len] = k_new[b], arguments["v_new"][b]
    out = flashport.attention(**arguments, causal=causal, rotary_interleaved=interleaved)
    np.testing.assert_allclose(arguments["k"], k_wanted, rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(arguments["v"], v_wanted.astype(np.float32))
    np.testing.assert_allclose(out, attended(q, k_wanted, v_wanted, BEFORE + new_len, causal), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("q_len", [1, 20])
def test_sequences_are_rows_of_a_larger_cache(call, q_len):
    arguments = call(q_len, 2, 32)
    rows = np.array([4, 0, 3], np.int32)  # flash-attn's cache_batch_idx
    caches = {name: np.full((5, *arguments[name].shape[1:]), np.nan, np.float32) for name in "kv"}
    for name, cache in caches.items():
        cache[rows] = arguments[name]
    out = flashport.attention(**arguments | caches, block_table=rows[:, None], causal=True)
    np.testing.assert_array_equal(out, flashport.attention(**arguments, causal=True))
    for name, cache in caches.items():
        np.testing.assert_array_equal(cache[rows], arguments[name])
        assert np.isnan(cache[[1, 2]]).all()


def test_queries_say_in_how_many_launches():
    call = {"target": "cpu", "dtype": "bfloat16", "causal": True, "seqused_k": True, "appends": True}
    kernel = flashport.which_kernel("attention", **call, q_len=1, group_size=4)
    assert kernel.startswith("decode/fp32/kv=bf16/hd128/")  # no kernel of CPUs decodes and appends
    shape = {"num_q_heads": 8, "num_kv_heads": 2, "kv_len": 512}
    target = kernel.rpartition("/")[2]
    few = str(flashport.explain("attention", **call, **shape, q_len=1))
    assert few.startswith(f"append_rotary/{target}, then flash_decode's {kernel}: ")
    many = str(flashport.explain("attention", **call, **shape, q_len=100))
    assert many.startswith(f"append_rotary/{target}, then attention/")
    without = str(flashport.explain("attention", **call | {"appends": False}, **shape, q_len=1))
    assert without.startswith(f"flash_decode's {kernel}: ")


def test_a_workspace_serves_calls_of_other_lengths(call):
    arguments = call(4, 4, 32)
    size = flashport.attention_workspace_size(**arguments, causal=True)
    workspace = np.zeros(size, np.uint8)
    copies = {name: arguments[name].copy() for name in "kv"}
    wanted = flashport.attention(**arguments, causal=True)
    got = flashport.attention(**arguments | copies, causal=True, workspace=workspace)
    np.testing.assert_array_equal(got, wanted)
    with pytest.raises(ValueError, match="workspace must"):
        flashport.attention(**arguments, causal=True, workspace=workspace[: size - 1])


def wrong(error, text, **changes):
    return pytest.param(error, text, changes, id=text[:50])


NEW = np.zeros((B, 4, KV_HEADS, D), np.float32)
WRONG = [
    wrong(ValueError, "k_new and v_new must be given together, got k_new alone", v_new=None),
    wrong(ValueError, "rotary_cos must come with k_new and v_new", k_new=None, v_new=None),
    wrong(ValueError, "seqused_k must come with k_new: how many keys each sequence has before them", seqused_k=None),
    wrong(ValueError, "rotary_cos and rotary_sin must be given together, got rotary_cos alone", rotary_sin=None),
    wrong(
        ValueError,
        "k_new must have shape (batch, new_len, num_kv_heads, head_dim) = (3, any, 2, 32)",
        k_new=NEW[:, :, :1],
    ),
    wrong(
        ValueError, "v_new must have shape (batch, new_len, num_kv_heads, head_dim_v) = (3, 4, 2, 32)", v_new=NEW[:, :3]
    ),
    wrong(ValueError, "k_new must have 4 dimensions (batch, new_len, num_kv_heads, head_dim), got 3", k_new=NEW[0]),
    wrong(TypeError, "k_new must be float32, got float16", k_new=NEW.astype(np.float16)),
    wrong(
        ValueError,
        "rotary_cos must have half of rotary_dim columns, a multiple of 16 up to head_dim = 32, got (50, 20)",
        rotary_cos=np.zeros((50, 20), np.float32),
        rotary_sin=np.zeros((50, 20), np.float32),
    ),
    wrong(
        ValueError,
        "rotary_sin must have shape (positions, rotary_dim / 2) = (72, 16)",
        rotary_sin=np.zeros((50, 16), np.float32),
    ),
    wrong(ValueError, "seqused_k[2] = 61 and 4 new keys must lie in [0, 64]", seqused_k=np.array([0, 7, 61], np.int32)),
]


@pytest.mark.parametrize(("error", "text", "changes"), WRONG)
def test_wrong_arguments_change_nothing(call, error, text, changes):
    arguments = call(4, 4, 32) | changes
    before = {name: arguments[name].copy() for name in "kv"}
    out = np.full(arguments["q"].shape, np.nan, np.float32)
    with pytest.raises(error, match=r"^attention: " + re.escape(text)):
        flashport.attention(**arguments, causal=True, out=out)
    assert np.isnan(out).all()
    for name, array in before.items():
        np.testing.assert_array_equal(arguments[name], array)


def test_a_cache_that_may_not_be_written_is_refused(call):
    arguments = call(4, 4)
    arguments["k"].flags.writeable = False
    with pytest.raises((ValueError, BufferError), match=r"read-only|readonly"):
        flashport.attention(**arguments)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("changes", [{"q_len": 17}, {"num_splits": 1}, {"seqused_k": False}])
def test_what_is_not_decoded(causal, changes):
    query = {"head_dim": 64, "dtype": "bfloat16", "target": "cpu", "causal": causal, "q_len": 4, "seqused_k": True}
    assert flashport.explain("attention", **query, kv_len=500).kernel.startswith("decode/")
    assert flashport.explain("attention", **query | changes, kv_len=500).kernel.startswith("attention/")


def test_few_queries_have_the_bits_of_flash_decode(call):
    arguments = call(4, 4)
    lengths = BEFORE + 4
    out = flashport.attention(**arguments, causal=True)
    np.testing.assert_array_equal(out, flashport.flash_decode(arguments["q"], arguments["k"], arguments["v"], lengths))


def test_torch_compiles_a_call_that_appends(call):
    torch = pytest.importorskip("torch")
    arguments = {name: torch.from_numpy(x) for name, x in call(4, 4, 32).items()}
    copies = {name: arguments[name].clone() for name in "kv"}
    wanted = flashport.attention(**arguments, causal=True)
    compiled = torch.compile(
        lambda **given: flashport.attention(**given, causal=True), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(**arguments | copies), wanted)
    for name in "kv":
        assert torch.equal(copies[name].nan_to_num(7), arguments[name].nan_to_num(7))
