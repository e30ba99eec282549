"""Recording real calls: every way of passing queries and keys gives steps whose reference is what the call gave."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import warnings

import gguf
import numpy as np
import pytest

import flashport
from flashport import _attention, decode, trace
from flashport.flash_attn import flash_attn_interface
from flashport.testing import cases, numerics
from flashport.trace import _own, _reference
from trace_call import RNG, check, ints, paged, random, recorded

DECODE = {
    "plain": {},
    "window": {"window": (9, -1)},
    "softcap": {"softcap": 3.0, "softmax_scale": 0.5},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)},
    "sinks": {"sinks": np.array([0.5, -1, 2, 0], np.float32)},
    "scales": {"k_scale": np.array([0.5, 2], np.float32), "v_scale": np.array([3, 0.25], np.float32)},
    "lse": {"return_lse": True},
}


@pytest.mark.parametrize("options", DECODE.values(), ids=DECODE)
def test_decode(tmp_path, options):
    q, k, v, lens = random(2, 4, 64), random(2, 40, 2, 64), random(2, 40, 2, 32), ints(40, 7)
    k[1, 7:], v[1, 7:] = np.nan, np.nan
    loaded, result = recorded(tmp_path / "t.gguf", lambda: flashport.flash_decode(q, k, v, lens, **options))
    out = result[0] if isinstance(result, tuple) else result
    check(loaded)
    assert len(loaded) == 2
    assert np.array_equal(np.concatenate([step.out[0] for step in loaded]), out)
    assert np.array_equal(loaded[1].q[0, 0], q[1])
    if "k_scale" not in options:
        assert np.array_equal(loaded[1].k[0], k[1, :7])
    assert loaded[0].softcap == options.get("softcap", 0)
    assert loaded[0].scale == options.get("softmax_scale", 0.125)


@pytest.mark.parametrize("way", ["block_table", "HND", "csr", "token_table", "ragged", "tree", "contiguous HND"])
def test_decode_of_other_layouts(tmp_path, way):
    k, v, lens = random(2, 32, 2, 64), random(2, 32, 2, 64), ints(30, 13)
    q, call = random(2, 3, 4, 64), flashport.flash_decode
    (k_pages, table), (v_pages, _) = (paged(x, 1 if way == "token_table" else 8) for x in (k, v))
    hnd, k_hnd, v_hnd = (
        [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k_pages, v_pages)],
        *(np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k, v)),
    )
    csr = {"kv_indptr": ints(0, 4, 6), "kv_indices": np.concatenate([table[0], table[1, :2]])}
    pool = {"token_table": table, "request_index": ints(1, 0)}
    ragged = {"cu_seqlens_q": ints(0, 3, 4), "max_q_len": 3}
    run = {
        "block_table": lambda: call(q, k_pages, v_pages, lens, block_table=table),
        "HND": lambda: call(q, *hnd, lens, block_table=table, kv_layout="HND"),
        "csr": lambda: call(q, k_pages, v_pages, None, **csr, kv_last_page_len=ints(6, 5)),
        "token_table": lambda: call(q, k_pages[:, 0], v_pages[:, 0], lens[::-1].copy(), **pool),
        "ragged": lambda: call(q.reshape(6, 4, 64)[:4], k_pages, v_pages, lens, block_table=table, **ragged),
        "tree": lambda: call(q, k, v, lens, tree_mask=np.array([[1, 3, 5], [1, 2, 4]], np.uint32)),
        "contiguous HND": lambda: call(q, k_hnd, v_hnd, lens, kv_layout="HND"),
    }[way]
    order = [1, 0] if way == "token_table" else [0, 1]
    loaded, out = recorded(tmp_path / "t.gguf", run)
    check(loaded)
    assert len(loaded) == 2
    for step, b in zip(loaded, order, strict=True):
        assert np.array_equal(step.k[0], k[b, : lens[b]])
        assert np.array_equal(step.v[0], v[b, : lens[b]])
    expected = out if way == "ragged" else out.reshape(6, 4, 64)
    assert np.array_equal(np.concatenate([step.out[0] for step in loaded]), expected)


ATTENTION = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi_slopes": random(2, 4)},
    "bias": {"bias": random(2, 1, 9, 12)},
    "bias of heads": {"bias": random(1, 4, 9, 12), "causal": True},
    "sinks": {"sinks": random(4)},
    "used": {"seqused_q": ints(9, 2), "seqused_k": ints(5, 12)},
    "padded": {"leftpad_k": ints(3, 0), "causal": True},
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_attention(tmp_path, options):
    q, k, v = random(2, 9, 4, 32), random(2, 12, 2, 32), random(2, 12, 2, 48)
    loaded, out = recorded(tmp_path / "t.gguf", lambda: flashport.attention(q, k, v, **options))
    check(loaded)
    assert len(loaded) == 2
    used = options.get("seqused_q", ints(9, 9))
    for b, step in enumerate(loaded):
        assert np.array_equal(step.out[0], out[b, : used[b]])


@pytest.mark.parametrize("is_paged", [False, True])
def test_attention_that_appends(tmp_path, is_paged):
    """Steps have the cache as the call left it."""
    q, k, v = random(2, 3, 4, 32), random(2, 16, 2, 32), random(2, 16, 2, 32)
    (k_cache, table), (v_cache, _) = ((paged(x, 4) if is_paged else (x.copy(), None)) for x in (k, v))
    given = {"k_new": random(2, 3, 2, 32), "v_new": random(2, 3, 2, 32), "seqused_k": ints(5, 12), "causal": True}
    given |= {"block_table": table} if is_paged else {}
    loaded, _ = recorded(tmp_path / "t.gguf", lambda: flashport.attention(q, k_cache, v_cache, **given))
    check(loaded)
    for b, (step, before) in enumerate(zip(loaded, (5, 12), strict=True)):
        assert np.array_equal(step.k[0], np.concatenate([k[b, :before], given["k_new"][b]]))


def test_packed_attention(tmp_path):
    q, k = random(20, 4, 32), random(20, 2, 32)
    offsets = ints(0, 13, 13, 20)
    given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 13, "max_seqlen_k": 13, "causal": True}
    loaded, out = recorded(tmp_path / "t.gguf", lambda: flashport.attention(q, k, k, **given))
    check(loaded)
    assert [step.need("q").ne[1] for step in loaded] == [13, 7]
    assert np.array_equal(loaded[1].out[0], out[13:])
    assert loaded[1].options == "max_seqlen_q=13, max_seqlen_k=13, kv_layout=NHD, causal=True, sequence 2 of 3"


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp8_e4m3", "q8_0"])
def test_formats(tmp_path, fmt):
    """Of ggml's formats the bits are kept; others become fp32."""
    q = random(1, 4, 64)
    k, v = (numerics.encode(random(1, 40, 2, 64), fmt) for _ in range(2))
    given = {"k_format": fmt, "v_format": fmt} if fmt == "q8_0" else {}
    lens = cases.HostArray(ints(40), "int32").on("cpu")
    if fmt == "bf16":
        torch = pytest.importorskip("torch")
        arrays = [
            torch.from_numpy(q).bfloat16(),
            *(torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in (k, v)),
        ]
    else:
        arrays = [cases.HostArray(q.astype(np.float16), "float16").on("cpu")]
        arrays += [cases.HostArray(x, numerics.DTYPE[fmt]).on("cpu") for x in (k, v)]
    loaded, _ = recorded(tmp_path / "t.gguf", lambda: flashport.flash_decode(*arrays, lens, **given))
    check(loaded, {"fp16": 2e-3, "bf16": 2e-2, "q8_0": 1e-2, "fp8_e4m3": 1e-2}[fmt])
    step = loaded[0]
    expected = {"fp16": "F16", "bf16": "BF16", "fp8_e4m3": "F32", "q8_0": "Q8_0"}[fmt]
    assert (step.find("k").type, step.find("v").type) == (expected, expected)
    assert np.array_equal(step.k[0].astype(np.float32), numerics.decode(k[0], fmt))


def test_tensors_of_torch_and_of_the_library(tmp_path):
    torch = pytest.importorskip("torch")
    q, k = (torch.from_numpy(x) for x in (random(1, 9, 4, 32), random(1, 9, 2, 32)))
    check(recorded(tmp_path / "t.gguf", lambda: flashport.attention(q, k.transpose(1, 1), k))[0])

    def own(x):
        array = flashport.DeviceArray(x.shape, "float32", "cpu")
        array.copy_from(x.numpy())
        return array

    check(recorded(tmp_path / "d.gguf", lambda: flashport.attention(own(q), own(k), own(k)))[0])


def test_layers_and_counts(tmp_path):
    q, k = random(1, 4, 64), random(1, 40, 2, 64)

    def run():
        for length in range(36, 41):
            for _ in range(2):
                flashport.flash_decode(q, k, k, ints(length))

    loaded, _ = recorded(tmp_path / "t.gguf", run, layers=2)
    assert [step.layer for step in loaded] == [0, 1] * 5
    assert loaded.tensor_count == 50
    assert [step.need("k").ne[1] for step in loaded.select(layer=1)] == [36, 37, 38, 39, 40]
    # What the tools of llama.cpp list: their keys, names and types.
    reader = gguf.GGUFReader(tmp_path / "t.gguf")
    assert [int(reader.fields[f"kqv_trace.{key}"].parts[-1][0]) for key in ("total_steps", "tensor_count")] == [10, 50]
    names = [tensor.name for tensor in reader.tensors][:5]
    assert names == [
        "kqv_out-0_step_1", "Qcur-0 (view) (permuted)_step_1", "cache_k_l0 (view) (permuted)_step_1",
        "cache_v_l0 (view) (permuted)_step_1", "KQ_mask (copy)_step_1",
    ]  # fmt: skip


def test_our_files_are_read_right_by_names_alone(tmp_path, monkeypatch):
    """A reader that knows the rule of names, and nothing of our metadata, finds the same values."""
    q, k = random(1, 5, 4, 64), random(1, 12, 2, 64)
    loaded, _ = recorded(tmp_path / "t.gguf", lambda: flashport.attention(q, k, k, causal=True))
    with monkeypatch.context() as patched:
        patched.setattr(_own, "steps", trace._steps._steps_of_others)
        other = trace.load(tmp_path / "t.gguf")
    for role in ("q", "k", "v", "mask", "out"):
        assert np.array_equal(getattr(loaded[0], role), getattr(other[0], role)), role


def test_calls_of_the_flash_attn_package_are_recorded(tmp_path):
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 20, 4, 32, dtype=torch.float16)
    loaded, _ = recorded(tmp_path / "t.gguf", lambda: flash_attn_interface.flash_attn_func(q, q, q, causal=True))
    check(loaded, 2e-3)
    assert loaded[0].operation == "attention"


def test_nothing_is_left_of_a_recording(tmp_path):
    functions = [_attention.attention, decode.flash_decode]
    codes = [function.__code__ for function in functions]
    signatures = [inspect.signature(function) for function in functions]
    q = random(1, 4, 64)
    with trace.record(tmp_path / "a.gguf"):
        with trace.record(tmp_path / "b.gguf"):
            flashport.flash_decode(q, q[:, None], q[:, None], ints(1))
            assert all(function.__code__ is not code for function, code in zip(functions, codes, strict=True))
        flashport.flash_decode(q, q[:, None], q[:, None], ints(1))
    assert all(function.__code__ is code for function, code in zip(functions, codes, strict=True))
    assert [inspect.signature(function) for function in functions] == signatures
    assert (len(trace.load(tmp_path / "a.gguf")), len(trace.load(tmp_path / "b.gguf"))) == (2, 1)
    assert sorted(os.listdir(tmp_path)) == ["a.gguf", "b.gguf"]


def test_an_error_of_a_call_is_its_own(tmp_path):
    q = random(1, 4, 64)

    def run():
        flashport.flash_decode(q, q[:, None], q[:, None], ints(1))
        flashport.flash_decode(q, q, q, ints(1))

    with pytest.raises(ValueError, match="flash_decode: "):
        recorded(tmp_path / "t.gguf", run)
    assert len(trace.load(tmp_path / "t.gguf")) == 1


def test_arguments(tmp_path):
    with (
        pytest.raises(ValueError, match="layers must be a positive int, got 0"),
        trace.record(tmp_path / "t", layers=0),
    ):
        pass
    with pytest.raises(FileNotFoundError, match="path must be in a folder that exists"):
        trace.Writer(tmp_path / "no" / "t")
    with (
        trace.Writer(tmp_path / "t.gguf") as writer,
        pytest.raises(ValueError, match="q must have 4 dimensions, got 3"),
    ):
        writer.add(random(1, 4, 64), random(1, 4, 1, 64), random(1, 4, 1, 64), random(1, 1, 4, 64))
    with pytest.raises(ValueError, match="is closed"):
        writer.add(*(random(1, 1, 1, 64),) * 4)
    with pytest.raises(ValueError, match='arrays must be "numpy" or "torch"'):
        trace.load(tmp_path / "t.gguf", arrays="jax")


MIXED_FORMATS = [("q8_0", "q8_0"), ("q4_0", "iq4_nl"), ("fp16", "fp32")]


def mixed_parts(formats, counts, batch=2):
    """[(keys, values)] in formats, and their fp32 values, of parts with so many tokens."""
    parts, values = [], []
    for (k_format, v_format), count in zip(formats, counts, strict=True):
        pair = []
        for fmt, dim in ((k_format, 64), (v_format, 32)):
            x = random(batch, count, 2, dim)
            plain = {"fp16": np.float16, "fp32": np.float32}.get(fmt)
            pair.append(flashport.quantize_kv(x, fmt) if plain is None else x.astype(plain))
        parts.append(pair)
        values.append(
            [x.astype(np.float32) if x.dtype != np.uint8 else flashport.dequantize_kv(x, fmt)
             for x, fmt in zip(pair, (k_format, v_format), strict=True)]
        )  # fmt: skip
    return parts, values


@pytest.mark.parametrize("formats", MIXED_FORMATS, ids="-".join)
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("way", ["mixed", "mask", "three parts"])
def test_mixed_calls(tmp_path, formats, q_len, way):
    """7 tensors a step, stored as they are; the reference and our operator on them give what the call gave."""
    from flashport.trace import _operators

    q = random(2, q_len, 4, 64)
    parts, values = mixed_parts([formats, ("fp16", "fp16"), ("fp16", "fp16")], [40, 20, 5])
    (older, hot, first), seqlens = parts, [ints(40, 0), ints(20, 11)]
    masks = {"mask": np.where(RNG.random((1, 1, q_len + 2, 65)) < 0.4, -np.inf, RNG.random(65)).astype(np.float32)}
    masks["mask"][..., 0] = 0
    masks["mask_slopes"] = random(4) ** 2
    segments = [
        flashport.KvSegment(*older, seqlens[0], k_format=formats[0], v_format=formats[1]),
        flashport.KvSegment(*hot, seqlens[1]),
    ]
    run = {
        "mixed": lambda: flashport.flash_decode_mixed(
            q, *hot, None, *older, hot_seqlens=seqlens[1], quant_seqlens=seqlens[0], k_quant_format=formats[0],
            v_quant_format=formats[1],
        ),
        "mask": lambda: flashport.flash_decode_segments(q, segments, **masks, softcap=2.0),
        "three parts": lambda: flashport.flash_decode_segments(
            q, [flashport.KvSegment(*first, ints(5, 5)), *segments], sinks=random(4)
        ),
    }[way]  # fmt: skip
    loaded, out = recorded(tmp_path / "t.gguf", run)
    check(loaded)
    assert [step.kind for step in loaded] == ["mixed", "mixed" if way == "three parts" else "standard"]
    step = loaded[0]
    roles = ["out", "q", "k", "v", "mask", "k_quant", "v_quant"]
    assert [tensor.role for tensor in step.tensors] == roles + (
        ["k_first", "v_first", "sinks"] if way == "three parts" else []
    )
    assert step.operation == ("flash_decode_mixed" if way == "mixed" else "flash_decode_segments")
    expected = {"fp16": "F16", "fp32": "F32"}
    assert [step.find(role).type for role in ("k_quant", "v_quant")] == [expected.get(f, f.upper()) for f in formats]
    assert np.array_equal(step.k_quant[0].astype(np.float32), values[0][0][0])
    assert np.array_equal(step.v[0].astype(np.float32), values[1][1][0])
    assert np.array_equal(np.concatenate([one.out[0] for one in loaded]), out.reshape(2 * q_len, 4, 32))
    again = {each.operator: each for each in _operators.run_all(step, device="cpu")}
    result = again["flash_decode_segments"]
    own = "/".join(formats)
    assert result.way == ("fp16/fp16 + " if way == "three parts" else "") + own + " + fp16/fp16 natively"
    assert _reference.differences(result.out, step.out).within(2e-6)
    assert "flash_decode" not in again


def test_four_segments_are_too_many(tmp_path):
    parts, _ = mixed_parts([("fp16", "fp16")] * 4, [4] * 4, batch=1)
    segments = [flashport.KvSegment(*part) for part in parts]
    with pytest.warns(match="a trace has at most 3 segments of a sequence, got 4|no call was recorded"):
        recorded_nothing(tmp_path / "t.gguf", lambda: flashport.flash_decode_segments(random(1, 4, 64), segments))


def recorded_nothing(path, call):
    with trace.record(path):
        call()


def test_a_mixed_step_of_our_own(tmp_path):
    q, hot, older = random(1, 2, 4, 64), random(1, 8, 2, 64), random(1, 64, 2, 64)
    blocks = gguf.quants.quantize(older, gguf.GGMLQuantizationType.Q4_0)
    with trace.Writer(tmp_path / "t.gguf") as writer:
        types = {"k_quant": "Q4_0", "v_quant": "Q4_0"}
        writer.add(q, hot, hot, q, k_quant=blocks, v_quant=blocks, types=types, softcap=3.0, scale=0.2, layer=5)
    step = trace.load(tmp_path / "t.gguf")[0]
    assert (step.kind, step.softcap, step.scale, step.layer) == ("mixed", 3.0, 0.2, 5)
    assert np.array_equal(step.k_quant, gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0))
    assert np.array_equal(step.k, hot)


PROGRAM = """
import numpy as np
import flashport
q = np.ones((1, 4, 64), np.float32)
for i in range(4):
    flashport.flash_decode(q, q[:, None], q[:, None], np.ones(1, np.int32))
"""


def run(program, **environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPORT_TRACE")}
    return subprocess.run(
        [sys.executable, "-c", program], env=inherited | environment, capture_output=True, text=True, check=False
    )


def test_the_environment(tmp_path):
    done = run(PROGRAM, FLASHPORT_TRACE=str(tmp_path / "t.gguf"), FLASHPORT_TRACE_LAYERS="2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [step.layer for step in trace.load(tmp_path / "t.gguf")] == [0, 1, 0, 1]
    assert "trace" not in run("import sys, flashport; print([m for m in sys.modules if 'trace' in m])").stdout.replace(
        "traceback", ""
    ).replace("tracemalloc", "")
    done = run(PROGRAM, FLASHPORT_TRACE=str(tmp_path / "u.gguf"), FLASHPORT_TRACE_LAYERS="no")
    assert "FLASHPORT_TRACE_LAYERS must be a positive number, got 'no'" in done.stderr


def test_without_gguf(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    text = r"flashport.trace: needs the package gguf, .*pip install 'flashport\[trace\]'"
    with pytest.raises(ModuleNotFoundError, match=text):
        trace.load(tmp_path / "t.gguf")
    with pytest.raises(ModuleNotFoundError, match=text), trace.record(tmp_path / "t.gguf"):
        pass
    assert flashport.flash_decode.__code__.co_name == "flash_decode"


def test_compiled_callers_run_as_before(tmp_path):
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 9, 4, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with trace.record(tmp_path / "t.gguf"):
            compiled = torch.compile(lambda x: flashport.attention(x, x, x) * 2, backend="eager")
            expected = flashport.attention(q, q, q) * 2
            assert torch.equal(compiled(q), expected)


def test_compiled_callers_run_after_a_recording(tmp_path):
    """torch's compiler remembers the parameters of a function that it has seen."""
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 9, 4, 32)
    expected = flashport.attention(q, q, q) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with trace.record(tmp_path / "t.gguf"):
            torch.compile(lambda x: flashport.attention(x, x, x) * 2, backend="eager")(q)
    after = torch.compile(lambda x: flashport.attention(x, x, x) * 2, backend="eager", fullgraph=True)
    assert torch.equal(after(q), expected)
