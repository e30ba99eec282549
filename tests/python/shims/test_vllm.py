"""vLLM's paged attention for ROCm, under the original signature, against the oracle."""

from __future__ import annotations

import inspect
import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from flashport.testing import oracle
from flashport.vllm import paged_attention_rocm
from helpers import BF16, assert_close, expect_refusal, expect_words, from_torch, to_torch

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


def expected(kind, name, found):
    """What torch's dispatcher says of an argument of another kind."""
    return (
        f"_rocm_C::paged_attention() Expected a value of type '{kind}' for argument '{name}' but instead found type "
        f"'{found}'. {name.removesuffix('s') if name == 'exp_sums' else name} must be a"
    )


def out_of_range(axis, axes):
    return f"Dimension out of range (expected to be in range of [-{axes}, {axes - 1}], but got {axis}); "


SCALAR = "Dimension specified as {} but tensor has no dimensions; "
INT = "expected scalar type Int but found"
NO_STORAGE = "Cannot access data pointer of Tensor that doesn't have storage; "
ONE = np.zeros(1, np.float32)

# argument, what it is, the words of vLLM or torch, their class where that is not RuntimeError
THEIRS = [
    ("kv_cache_dtype", "fp8_e5m2", 'Unsupported KV cache dtype: fp8_e5m2; kv_cache_dtype must be "auto", '),
    ("kv_cache_dtype", None, expected("str", "kv_cache_dtype", "NoneType")),
    ("kv_cache_dtype", 3, expected("str", "kv_cache_dtype", "int")),
    ("mfma_type", None, expected("str", "mfma_type", "NoneType")),
    ("fp8_out_scale", ONE, "fp8 out scale unsupported: fp8_out_scale must be None"),
    ("fp8_out_scale", 1.0, expected("Optional[Tensor]", "fp8_out_scale", "float")),
    ("query", [1], expected("Tensor", "query", "list")),
    ("query", None, out_of_range(2, 1) + "query must be an array", IndexError),
    ("query", np.zeros((5, 512), BF16), out_of_range(2, 2) + "query must have 3 dimensions (tokens, num", IndexError),
    ("query", np.zeros((), BF16), SCALAR.format(2), IndexError),
    ("query", np.zeros((5, HEADS, 64)), "Unsupported data type: double; query must be float16 or bfloat16"),
    ("query", np.zeros((5, HEADS, 64), np.int8), "Unsupported data type: signed char; query must be float16"),
    ("query", np.zeros((5, HEADS, 32), BF16), "Unsupported head size: 32; key_cache must have head_size / x times"),
    ("query", np.zeros((5, HEADS, 0), BF16), "Unsupported head size: 0; query must have a head_size of 1 or more"),
    ("query", np.zeros((5, 1, 64), BF16), "Unsupported gqa ratio: 0; num_heads of query must be a multiple of"),
    ("out", None, NO_STORAGE + "out must be an array"),
    ("out", 1.0, expected("Tensor", "out", "float")),
    ("exp_sum", [1], expected("Tensor", "exp_sums", "list")),
    ("max_logits", [1], expected("Tensor", "max_logits", "list")),
    ("tmp_out", [1], expected("Tensor", "tmp_out", "list")),
    ("key_cache", None, "strides() called on an undefined Tensor; key_cache must be an array"),
    ("key_cache", "a", expected("Tensor", "key_cache", "str")),
    ("key_cache", np.zeros(9, BF16), out_of_range(1, 1) + "key_cache must have 5 dimensions", IndexError),
    ("key_cache", np.zeros((), BF16), SCALAR.format(0), IndexError),
    ("value_cache", None, NO_STORAGE + "value_cache must be an array"),
    ("value_cache", {}, expected("Tensor", "value_cache", "dict")),
    ("num_kv_heads", 2.0, expected("int", "num_kv_heads", "float")),
    ("num_kv_heads", None, expected("int", "num_kv_heads", "NoneType")),
    ("num_kv_heads", -1, f"Unsupported gqa ratio: -{HEADS}; num_kv_heads must be 2 as key_cache has"),
    ("num_kv_heads", 100, "Unsupported gqa ratio: 0; num_kv_heads must be 2 as key_cache has"),
    ("scale", "1", expected("float", "scale", "str")),
    ("scale", None, expected("float", "scale", "NoneType")),
    ("scale", 1j, expected("float", "scale", "complex")),
    ("scale", np.ones(2), expected("float", "scale", "ndarray")),
    ("block_tables", None, out_of_range(1, 1) + "block_tables must be an array", IndexError),
    ("block_tables", [[1]], expected("Tensor", "block_tables", "list")),
    ("block_tables", np.zeros((5, 6), np.float32), f"{INT} Float; block_tables must be int32 or int64, got float32"),
    ("block_tables", np.zeros((5, 6), np.int16), f"{INT} Short; block_tables must be"),
    ("block_tables", np.zeros(5, np.int32), out_of_range(1, 1) + "block_tables must have 2 dimensions", IndexError),
    ("block_tables", np.zeros((), np.int32), SCALAR.format(0), IndexError),
    ("seq_lens", None, f"{INT} UNKNOWN_SCALAR; seq_lens must be an array"),
    ("seq_lens", [1], expected("Tensor", "seq_lens", "list")),
    ("seq_lens", np.ones(5, np.float64), f"{INT} Double; seq_lens must be int32 or int64, got float64"),
    ("query_start_loc", [1], expected("Optional[Tensor]", "query_start_loc", "list")),
    ("block_size", 8, "Unsupported block size: 8; block_size must be 16 as key_cache has"),
    ("block_size", 0, "Unsupported block size: 0; "),
    ("block_size", "16", expected("int", "block_size", "str")),
    ("max_seq_len", None, expected("int", "max_seq_len", "NoneType")),
    ("max_seq_len", 64.0, expected("int", "max_seq_len", "float")),
    ("max_seq_len", -1, "Unsupported npar_loops: 0; max_seq_len must be 0 or more, got -1"),
    ("max_seq_len", -(10**6), "Unsupported npar_loops: -60; max_seq_len must be 0 or more"),
    ("alibi_slopes", [1.0], expected("Optional[Tensor]", "alibi_slopes", "list")),
    ("k_scale", 1.0, expected("Tensor", "k_scale", "float")),
    ("v_scale", "1", expected("Tensor", "v_scale", "str")),
]  # fmt: skip

# What vLLM does not look at: argument, what it is, our class, our words
OURS = [
    ("mfma_type", "bf8", ValueError, "mfma_type must be \"f16\" or \"fp8\", got 'bf8'"),
    ("query", np.zeros((4, HEADS, 64), BF16), ValueError, r"out must have shape \(4, 8, 64\), got \(5, 8, 64\)"),
    ("query", np.zeros((5, HEADS, 64, 1), BF16), ValueError, "query must have 3 dimensions"),
    ("query", np.zeros((5, HEADS, 128), BF16), ValueError, "key_cache must have head_size / x times x of query's"),
    ("query", np.zeros((5, 3, 64), BF16), ValueError, "num_heads of query must be a multiple of .* got 3 and 2"),
    ("out", np.zeros((5, HEADS, 64), np.float32), TypeError, "out must be bfloat16, as query is, got float32"),
    ("out", np.zeros((5, HEADS, 32), BF16), ValueError, "out must have shape"),
    ("key_cache", np.zeros((13, 2, 8, 16, 8), np.float16), TypeError, 'key_cache must be bfloat16, .* with kv_cache'),
    ("key_cache", np.zeros((9, 2, 64, 16), BF16), ValueError, "key_cache must have 5 dimensions"),
    ("value_cache", np.zeros((9, 2, 16, 64), BF16), ValueError, "value_cache must have shape"),
    ("num_kv_heads", 4, ValueError, r"num_kv_heads must be 2 as key_cache has \(\d+, 2, 8, 16, 8\), got 4"),
    ("num_kv_heads", 0, ValueError, r"num_kv_heads must be 2 as key_cache has .* got 0"),
    ("scale", float("inf"), ValueError, "scale must"),
    ("block_tables", np.zeros((5, 6, 1), np.int32), ValueError, "block_tables must have 2 dimensions"),
    ("block_tables", np.full((5, 6), 99, np.int32), ValueError, r"block_tables must name blocks below \d+ .* got 99"),
    ("block_tables", np.full((5, 6), -1, np.int64), ValueError, r"block_tables must name .* got -1 at \(0, 0\)"),
    ("seq_lens", np.ones(4, np.int32), ValueError, r"seq_lens must have shape \(5,\), got \(4,\)"),
    ("seq_lens", np.full(5, 65, np.int32), ValueError, "seq_lens must be 0 to 64, .* got 65 at 0"),
    ("seq_lens", np.full(5, -1, np.int32), ValueError, "seq_lens must be 0 to 64, .* got -1 at 0"),
    ("query_start_loc", np.zeros(5, np.int32), ValueError, r"query_start_loc must have shape \(6,\)"),
    ("query_start_loc", np.zeros(6, np.float32), TypeError, "query_start_loc must be int32 or int64, got float32"),
    ("block_size", 32, ValueError, "block_size must be 16 as key_cache has"),
    ("alibi_slopes", np.zeros(3, np.float32), ValueError, "alibi_slopes must"),
    ("k_scale", np.zeros(3, np.float32), ValueError, "k_scale must"),
    ("v_scale", ONE, ValueError, r"v_scale\[0\] = 0 must be finite"),
]  # fmt: skip


def changed(name, value):
    """Right arguments but one."""
    arguments, _ = make(cache="fp8" if name in ("k_scale", "v_scale") else "auto")
    return arguments | {name: value}


@pytest.mark.parametrize(("name", "value", "words", "kind"), [(*row, RuntimeError)[:4] for row in THEIRS])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_vllms_words_and_class(library, name, value, words, kind):
    words = words.replace("'ndarray'", "'Tensor'") if library == "torch" else words
    expect_words(paged_attention_rocm, changed(name, value), library, words, kind)


@pytest.mark.parametrize("head_dim", [8, 1024])
def test_a_head_dim_that_neither_has(head_dim):
    arguments, _ = make(head_dim=head_dim)
    text = f"Unsupported head size: {head_dim}; head_dim {head_dim} "
    expect_refusal(paged_attention_rocm, arguments, ["out"], NotImplementedError, text)


@pytest.mark.parametrize(("name", "value", "error", "text"), OURS)
def test_a_wrong_argument_is_named_and_nothing_is_written(name, value, error, text):
    expect_refusal(paged_attention_rocm, changed(name, value), ["out", "key_cache", "value_cache"], error, text)


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
    mixed = arguments | {"seq_lens": np.array(LENS, np.int32)}
    with pytest.raises(RuntimeError, match=re.escape(expected("Tensor", "seq_lens", "ndarray"))):
        paged_attention_rocm(**mixed)
    arguments["query"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^paged_attention_rocm: query requires a gradient"):
        paged_attention_rocm(**arguments)
    with torch.no_grad():
        paged_attention_rocm(**arguments)
