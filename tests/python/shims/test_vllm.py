"""vLLM's paged attention for ROCm, under the original signature, against the oracle."""

from __future__ import annotations

import inspect
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from flashport.testing import oracle
from flashport.vllm import paged_attention_rocm
from helpers import BF16, assert_close, expect_refusal, from_torch, to_torch

FP8 = ml_dtypes.float8_e4m3fn
LENS = (33, 1, 0, 64, 17)
HEADS, KV_HEADS = 8, 2


def make(dtype=BF16, cache="auto", lens=LENS, block_size=16, head_dim=64, q_lens=None, seed=0):
    """Arguments of a call by name, and the keys and values that the caches store, each (sequences, tokens, ...)."""
    rng = np.random.default_rng(seed)
    carrier = np.dtype(dtype if cache == "auto" else FP8)
    x = 16 // carrier.itemsize
    counts = [-(-length // block_size) for length in lens]
    blocks = sum(counts) + 3
    poison = np.full((blocks, KV_HEADS, head_dim, block_size), np.nan, np.float32)
    keys, values = poison.copy(), poison.copy()
    table = np.full((len(lens), max(counts) + 2), -7, np.int32)  # entries past a length are no blocks
    free = rng.permutation(blocks)
    stored = []
    for b, (length, count) in enumerate(zip(lens, counts, strict=True)):
        table[b, :count], free = free[:count], free[count:]
        rows = [rng.standard_normal((length, KV_HEADS, head_dim)).astype(carrier) for _ in "kv"]
        for t in range(length):
            page, place = table[b, t // block_size], t % block_size
            for pool, one in zip((keys, values), rows, strict=True):
                pool[page, :, :, place] = one[t].astype(np.float32)
        stored.append(rows)
    tokens = len(lens) if q_lens is None else sum(q_lens)
    query = rng.standard_normal((tokens, HEADS, head_dim)).astype(dtype)
    grouped = keys.reshape(blocks, KV_HEADS, head_dim // x, x, block_size).transpose(0, 1, 2, 4, 3)
    pools = [np.ascontiguousarray(pool.astype(carrier)) for pool in (grouped, values)]
    if cache != "auto":
        pools = [pool.view(np.uint8) for pool in pools]
    arguments = {
        "out": np.full(query.shape, np.nan, dtype),
        "exp_sum": np.full((tokens, HEADS, 1), np.nan, np.float32),
        "max_logits": np.full((tokens, HEADS, 1), np.nan, np.float32),
        "tmp_out": np.full((tokens, HEADS, 1, head_dim), np.nan, dtype),
        "query": query,
        "key_cache": pools[0],
        "value_cache": pools[1],
        "num_kv_heads": KV_HEADS,
        "scale": 0.1,
        "block_tables": table,
        "seq_lens": np.array(lens, np.int32),
        "query_start_loc": None if q_lens is None else np.cumsum([0, *q_lens], dtype=np.int32),
        "block_size": block_size,
        "max_seq_len": max(lens),
        "alibi_slopes": None,
        "kv_cache_dtype": cache,
        "k_scale": np.array(0.5, np.float32),
        "v_scale": np.array([2.0], np.float32),
    }
    return arguments, stored


def truth_of(arguments, stored, b, row):
    """The oracle's output of a row that is the one token of sequence ``b``."""
    fp8 = arguments["kv_cache_dtype"] != "auto"
    slopes = arguments["alibi_slopes"]
    k, v = (one.astype(np.float32) for one in stored[b])
    scales = [np.full(KV_HEADS, float(arguments[name].reshape(()) if fp8 else 1)) for name in ("k_scale", "v_scale")]
    request = oracle.Request(
        arguments["query"][row : row + 1].astype(np.float32), k, v, arguments["scale"], slopes=slopes,
        k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    return oracle.attend(request)[0][0]


def run(arguments, library):
    """Makes the call by position, as vLLM does, and gives ``out`` as an array."""
    if library == "numpy":
        paged_attention_rocm(*arguments.values())
        return arguments["out"]
    torch = pytest.importorskip("torch")
    device = "cpu"
    if library == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("torch finds no GPU")
        device = "cuda"

    def move(x):
        x = to_torch(x)
        return x.to(device) if isinstance(x, torch.Tensor) else x

    moved = {name: move(x) for name, x in arguments.items()}
    paged_attention_rocm(*moved.values())
    return from_torch(moved["out"].cpu())


CASES = {
    "bf16": {},
    "fp16": {"dtype": np.float16},
    "blocks of 1": {"block_size": 1},
    "blocks of 32": {"block_size": 32, "head_dim": 128},
    "fp8": {"cache": "fp8"},
    "fp8_e4m3": {"cache": "fp8_e4m3", "head_dim": 128},
    "nothing": {"lens": (0, 0)},
}


@pytest.mark.parametrize("library", ["numpy", "torch", "gpu"])
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name, library):
    arguments, stored = make(**CASES[name])
    before = {name: x.tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray) and name != "out"}
    out = run(arguments, library)
    for b, length in enumerate(arguments["seq_lens"]):
        if length:
            assert_close(out[b], truth_of(arguments, stored, b, b), 0.02)
        else:
            assert not out[b].astype(np.float32).any()
    assert {name: arguments[name].tobytes() for name in before} == before  # scratch, too


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_fp32_is_exact(library):
    arguments, stored = make(np.float32)
    out = run(arguments, library)
    for b in (0, 1, 3, 4):
        assert_close(out[b], truth_of(arguments, stored, b, b), 1e-5)


@pytest.mark.parametrize("library", ["numpy", "torch", "gpu"])
@pytest.mark.parametrize("q_lens", [(1, 1, 1, 1, 1), (1, 4, 0, 1, 9), (0, 1, 1, 3, 0), (2, 0, 3, 0, 2)])
def test_rows_of_prompts_are_not_written(library, q_lens):
    arguments, stored = make(q_lens=q_lens, lens=(33, 9, 5, 64, 17))
    row = np.cumsum([0, *q_lens])
    spare = [np.full((3, *arguments[name].shape[1:]), np.nan, BF16) for name in ("query", "out")]
    for name, rows in zip(("query", "out"), spare, strict=True):  # of no sequence
        arguments[name] = np.concatenate([arguments[name], rows])
    arguments["out"][...] = 7
    out = run(arguments, library).astype(np.float32)
    for b, q_len in enumerate(q_lens):
        if q_len == 1:
            assert_close(out[row[b]], truth_of(arguments, stored, b, row[b]), 0.02)
        else:
            assert (out[row[b] : row[b + 1]] == 7).all()
    assert (out[row[-1] :] == 7).all()


def test_alibi_and_strided_outputs():
    arguments, stored = make()
    arguments["alibi_slopes"] = (2.0 ** -np.arange(1, HEADS + 1)).astype(np.float32)
    both = np.full((len(LENS), 2 * HEADS, 64), np.nan, BF16)
    arguments["out"] = both[:, ::2]
    paged_attention_rocm(**arguments)
    for b in (0, 1, 3, 4):
        assert_close(both[b, ::2], truth_of(arguments, stored, b, b), 0.02)
    assert np.isnan(both[:, 1::2].astype(np.float32)).all()


def test_scales_are_of_fp8_alone():
    arguments, stored = make()
    arguments["k_scale"] = arguments["v_scale"] = None
    paged_attention_rocm(**arguments)
    assert_close(arguments["out"][0], truth_of(arguments, stored, 0, 0), 0.02)


def test_batches_do_not_matter():
    arguments, _ = make()
    paged_attention_rocm(**arguments)
    for b in (0, 3):
        alone = dict(arguments, out=np.zeros_like(arguments["out"][:1]))
        for name in ("query", "block_tables", "seq_lens"):
            alone[name] = arguments[name][b : b + 1]
        alone["max_seq_len"] = LENS[b]
        paged_attention_rocm(**alone)
        assert alone["out"].tobytes() == arguments["out"][b : b + 1].tobytes()


def test_blocks_that_are_not_named_are_not_copied():
    arguments, stored = make()
    for name in ("key_cache", "value_cache"):
        cache = arguments[name]
        arguments[name] = np.concatenate([cache, np.full((2000, *cache.shape[1:]), np.nan, BF16)])
    paged_attention_rocm(**arguments)
    tracemalloc.start()
    paged_attention_rocm(**arguments)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < arguments["key_cache"].nbytes / 8
    assert_close(arguments["out"][0], truth_of(arguments, stored, 0, 0), 0.02)


def test_the_signature_is_vllms():
    names = (
        "out exp_sum max_logits tmp_out query key_cache value_cache num_kv_heads scale block_tables seq_lens "
        "query_start_loc block_size max_seq_len alibi_slopes kv_cache_dtype k_scale v_scale fp8_out_scale mfma_type"
    )
    parameters = inspect.signature(paged_attention_rocm).parameters
    assert list(parameters) == names.split()
    given = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    assert given == {"fp8_out_scale": None, "mfma_type": "f16"}


WRONG = {
    "fp8_out_scale": (np.ones(1, np.float32), NotImplementedError, "fp8_out_scale must be None"),
    "mfma_type": ("bf8", ValueError, "mfma_type must be \"f16\" or \"fp8\", got 'bf8'"),
    "kv_cache_dtype": ("fp8_e5m2", NotImplementedError, 'kv_cache_dtype must be "auto", "fp8" or "fp8_e4m3", got'),
    "query": ([1], TypeError, "query must be an array of torch, NumPy or CuPy, got list"),
    "query ": (np.zeros((5, 512), BF16), ValueError, "query must have 3 dimensions .tokens, .* got 2"),
    "query  ": (np.zeros((4, HEADS, 64), BF16), ValueError, r"out must have shape \(4, 8, 64\), got \(5, 8, 64\)"),
    "query   ": (np.zeros((5, HEADS, 32), BF16), ValueError, "key_cache must have head_size / x times x of query's"),
    "out": (np.zeros((5, HEADS, 64), np.float32), TypeError, "out must be bfloat16, as query is, got float32"),
    "out ": (np.zeros((5, HEADS, 32), BF16), ValueError, "out must have shape"),
    "out  ": (None, TypeError, "out must be an array of numpy, as query is, got NoneType"),
    "key_cache": (np.zeros((13, 2, 8, 16, 8), np.float16), TypeError, 'key_cache must be bfloat16, .* with kv_cache'),
    "key_cache ": (np.zeros((9, 2, 64, 16), BF16), ValueError, "key_cache must have 5 dimensions"),
    "value_cache": (np.zeros((9, 2, 16, 64), BF16), ValueError, "value_cache must have shape"),
    "num_kv_heads": (4, ValueError, r"num_kv_heads must be 2 as key_cache has \(\d+, 2, 8, 16, 8\), got 4"),
    "num_kv_heads ": (2.0, TypeError, "num_kv_heads must be an integer, got float"),
    "scale": ("1", TypeError, "scale must be a number"),
    "scale ": (None, TypeError, "scale must be a number, got None"),
    "scale  ": (float("inf"), ValueError, "scale must"),
    "block_tables": (np.zeros((5, 6), np.float32), TypeError, "block_tables must be int32 or int64, got float32"),
    "block_tables ": (np.zeros(5, np.int32), ValueError, "block_tables must have 2 dimensions"),
    "block_tables  ": (np.full((5, 6), 99, np.int32), ValueError, r"block_tables must name blocks below \d+ .* got 99"),
    "block_tables   ": (np.full((5, 6), -1, np.int64), ValueError, r"block_tables must name .* got -1 at \(0, 0\)"),
    "seq_lens": (np.ones(4, np.int32), ValueError, r"seq_lens must have shape \(5,\), got \(4,\)"),
    "seq_lens ": (np.full(5, 65, np.int32), ValueError, "seq_lens must be 0 to 64, .* got 65 at 0"),
    "seq_lens  ": (np.full(5, -1, np.int32), ValueError, "seq_lens must be 0 to 64, .* got -1 at 0"),
    "query_start_loc": (np.zeros(5, np.int32), ValueError, r"query_start_loc must have shape \(6,\)"),
    "block_size": (32, ValueError, "block_size must be 16 as key_cache has"),
    "max_seq_len": (-1, ValueError, "max_seq_len must be 0 or more, got -1"),
    "max_seq_len ": (None, TypeError, "max_seq_len must be an integer, got NoneType"),
    "alibi_slopes": (np.zeros(3, np.float32), ValueError, "alibi_slopes must"),
    "k_scale": (np.zeros(3, np.float32), ValueError, "k_scale must"),
    "v_scale": (np.zeros(1, np.float32), ValueError, r"v_scale\[0\] = 0 must be finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_and_nothing_is_written(name):
    value, error, text = WRONG[name]
    arguments, _ = make(cache="fp8" if "_scale" in name and "out" not in name else "auto")
    arguments[name.strip()] = value
    expect_refusal(paged_attention_rocm, arguments, ["out", "key_cache", "value_cache"], error, text)


@pytest.mark.parametrize("other", ["query", "key_cache", "value_cache"])
def test_out_shares_memory_with_nothing(other):
    arguments, _ = make()
    arguments["out"] = arguments[other].reshape(-1)[: arguments["out"].size].reshape(arguments["out"].shape)
    text = f"out must not share memory with {other}; pass another tensor"
    expect_refusal(paged_attention_rocm, arguments, ["out"], ValueError, text)


def test_torch_tensors_do_not_mix_with_arrays():
    torch = pytest.importorskip("torch")
    arguments, _ = make(np.float32)
    arguments["seq_lens"] = to_torch(arguments["seq_lens"])
    expect_refusal(
        paged_attention_rocm, arguments, ["out"], TypeError, "seq_lens must be an array of numpy, as query is"
    )
    arguments = {name: to_torch(x) for name, x in make(np.float32)[0].items()}
    arguments["query"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^paged_attention_rocm: query requires a gradient"):
        paged_attention_rocm(**arguments)
    with torch.no_grad():
        paged_attention_rocm(**arguments)
