"""FLASHPORT_LOG=calls: a line to stderr for each call, with what it was given and what runs; else there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import flashport

ARRAYS = """
import numpy as np
import flashport

rng = np.random.default_rng(0)

def random(*shape):
    return rng.standard_normal(shape, np.float32)

q, k = random(2, 4, 64), random(2, 40, 2, 64)
lens = np.array([40, 7], np.int32)
"""
CALLS = """
flashport.flash_decode(q, k, k, lens, softcap=20.0, window=(30, -1), num_splits=2)
flashport.flash_decode(q[:0], k[:0], k[:0], lens[:0])
table = np.arange(80, dtype=np.int32).reshape(2, 40)
mid, mid_lse = np.zeros((2, 4, 3, 64), np.float32), np.zeros((2, 4, 3), np.float32)
slots = k.reshape(80, 2, 64)
flashport.flash_decode_stage1(q, slots, slots, table, lens * 0, lens, 40, mid, mid_lse, 16)
flashport.flash_decode_stage2(mid, mid_lse, lens, np.empty_like(q), 16)
flashport.append_kv(q[:, :2], q[:, 2:], k.copy(), k.copy(), np.array([5, -1]))
flashport.merge_state(q, q[..., 0], q, q[..., 0], lse_base=2)
flashport.merge_states(random(3, 5, 64), random(3, 5))
x, gates = random(1, 70, 2, 32), -np.abs(random(1, 70, 2))
flashport.gated_delta_update(x, x, x, g=gates, scale=0.5)
flashport.gated_delta_chunk(x, x, x, gates, gates + 1, use_qk_l2norm=True)
y = random(2, 9, 4, 32)
state = np.array([1, 2])
flashport.attention(y, y[:, :, :2], y[:, :, 2:], causal=True, dropout_p=0.25, rng_state=state, return_lse=True)
flashport.dropout_mask((1, 2, 3, 4), state, 0.5)
flashport.dequantize_kv(flashport.quantize_kv(x, "q4_1"), "q4_1")
try:
    flashport.attention(y, y, y[0])
except ValueError:
    pass
"""


# Calls that are made of several launches, or of calls of other operations.
CALLS_OF_OTHERS = """
old, v_old, hot = random(2, 7, 2, 64), random(2, 7, 2, 64), random(2, 9, 2, 64)
k_quant, v_quant = flashport.quantize_kv(old, "q8_0"), flashport.quantize_kv(v_old, "q8_0")
blocks = flashport.KvSegment(k_quant, v_quant, k_format="q8_0", v_format="q8_0")
flashport.flash_decode_segments(q, [blocks, flashport.KvSegment(hot, hot)], window=(11, -1))
flashport.flash_decode_mixed(q, hot, hot, None, k_quant, v_quant)
flashport.flash_decode_mixed(q, hot, hot, None, k_quant, v_quant, by_segment=True)
places = np.full(18, -1, np.int32)
places[0] = 13
flashport.spill_kv(hot, hot, k_quant, v_quant, places)
flashport.cascade_decode(q, [flashport.CascadeLevel(random(1, 33, 2, 64), random(1, 33, 2, 64)),
                             flashport.CascadeLevel(k, k, lens)])
new, v, more = random(2, 1, 2, 64), k.copy(), random(2, 20, 4, 64)
flashport.attention(q[:, None], k, v, seqused_k=lens - 1, k_new=new, v_new=new, causal=True)
flashport.attention(more, k, v, seqused_k=lens - 1, k_new=new, v_new=new, causal=True)
"""


def run(calls=CALLS, **environment):
    """(lines, standard output) of a program above."""
    inherited = {name: value for name, value in os.environ.items() if name != "FLASHPORT_LOG"}
    done = subprocess.run(
        [sys.executable, "-c", ARRAYS + calls], env=inherited | environment, capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines(), done.stdout


@pytest.mark.parametrize("environment", [{}, {"FLASHPORT_LOG": ""}, {"FLASHPORT_LOG": "other"}])
def test_without_the_word_there_is_no_log(environment):
    assert run(**environment) == ([], "")


def test_each_call_has_a_line():
    lines, output = run(FLASHPORT_LOG="calls")
    assert output == ""
    found = [re.fullmatch(r"flashport: (\w+)\((.*)\) on cpu: (.*)", line) for line in lines]
    assert all(found), lines
    names = [
        "flash_decode", "flash_decode", "flash_decode_stage1", "flash_decode_stage2", "append_kv", "merge_state",
        "merge_states", "gated_delta_update", "gated_delta_chunk", "attention", "dropout_mask",
        "quantize_kv", "dequantize_kv",
    ]  # fmt: skip
    assert [match[1] for match in found] == names
    facts = {match[1]: match[3] for match in reversed(found)}
    given = {match[1]: match[2] for match in reversed(found)}

    assert given["flash_decode"] == (
        "q=float32(2, 4, 64), k_cache=float32(2, 40, 2, 64), v_cache=float32(2, 40, 2, 64), seqlens=int32(2,), "
        "out=float32(2, 4, 64), window=(30, -1), softcap=20, num_splits=2"
    )
    shape = {"q_dtype": "fp32", "head_dim": 64, "group_size": 2, "batch": 2, "num_kv_heads": 2, "max_kv_len": 40}
    assert facts["flash_decode"] == str(flashport.explain("decode", num_splits=2, target="cpu", **shape))
    assert found[1][3] == "nothing to do"
    assert "block_seq=16" in given["flash_decode_stage1"]
    assert "block_seq=16" in given["flash_decode_stage2"]
    kernel = flashport.which_kernel("decode_stage2", target="cpu")
    assert facts["flash_decode_stage2"] == str(flashport.explain("decode_stage2", batch=2, num_q_heads=4, target="cpu"))
    assert facts["flash_decode_stage2"].startswith(f"{kernel}: 8 blocks of 1 thread")
    assert given["append_kv"].startswith("k=float32(2, 2, 64) strides (256, 64, 1), v=")
    assert given["merge_state"].endswith("lse_base=2")
    append = flashport.explain("append", dtype="fp32", head_dim=64, tokens=2, num_kv_heads=2, target="cpu")
    assert facts["append_kv"] == str(append)
    assert facts["merge_states"] == str(flashport.explain("merge", rows=5, target="cpu"))
    assert facts["merge_state"] == str(flashport.explain("merge", rows=8, target="cpu"))
    assert given["gated_delta_update"].endswith("out=float32(1, 70, 2, 32), scale=0.5")
    delta = {"q_dtype": "fp32", "head_dim_k": 32, "num_v_heads": 2, "target": "cpu"}
    assert facts["gated_delta_update"] == str(flashport.explain("gated_delta", gate="any", **delta))
    assert given["gated_delta_chunk"].endswith("use_qk_l2norm=True")
    chain = flashport.which_kernel("gated_delta_chunk", q_dtype="fp32", head_dim_k=32, target="cpu")
    chunks = flashport.explain("gated_delta_chunk", num_heads=2, tokens=70, **delta)
    assert facts["gated_delta_chunk"] == str(chunks)
    assert re.fullmatch(
        rf"gated_delta_prepare/.*: 4 blocks of .* for 2 chunks of 64 tokens, then {chain}: 2 blocks of .* of workspace",
        str(chunks),
    )
    assert given["attention"] == (
        "q=float32(2, 9, 4, 32), k=float32(2, 9, 2, 32) strides (1152, 128, 32, 1), v=float32(2, 9, 2, 32) strides "
        "(1152, 128, 32, 1), rng_state=int64(2,), out=float32(2, 9, 4, 32), lse=float32(2, 4, 9), causal=True, "
        "dropout_p=0.25"
    )
    shape = {"dtype": "fp32", "head_dim": 32, "causal": True, "dropout": True, "batch": 2, "num_q_heads": 4}
    shape |= {"num_kv_heads": 2, "q_len": 9, "kv_len": 9}
    assert facts["attention"] == str(flashport.explain("attention", target="cpu", **shape))
    assert given["quantize_kv"] == "x=float32(1, 70, 2, 32), out=uint8(1, 70, 2, 20), format=q4_1"
    for name in ("quantize", "dequantize"):
        shape = {"dtype": "fp32", "format": "q4_1", "head_dim": 32, "rows": 140}
        assert facts[f"{name}_kv"] == str(flashport.explain(name, target="cpu", **shape))
    assert re.match(r"dequantize_kv/\w+: 140 blocks of 1 thread", facts["dequantize_kv"])
    assert given["dropout_mask"] == "mask=uint8(1, 2, 3, 4), rng_state=int64(2,), dropout_p=0.5"
    assert re.match(r"dropout_mask/\w+: 6 blocks of 1 thread", facts["dropout_mask"])


def test_calls_that_are_made_of_others_have_a_line_for_each():
    lines, _ = run(CALLS_OF_OTHERS, FLASHPORT_LOG="calls")
    found = [re.fullmatch(r"flashport: (\w+)\((.*)\) on cpu: (.*)", line) for line in lines]
    assert all(found), lines
    names, given, facts = zip(*(match.groups() for match in found), strict=True)
    assert list(names) == [
        "quantize_kv", "quantize_kv", "flash_decode_mixed", "flash_decode_mixed", "flash_decode_mixed", "append_kv",
        "attention", "flash_decode", "merge_states",  # cascade_decode
        "attention", "flash_decode", "attention",
    ]  # fmt: skip
    shape = {"q_dtype": "fp32", "head_dim": 64, "group_size": 2, "batch": 2, "num_kv_heads": 2, "target": "cpu"}
    segments = flashport.explain("decode", segment_formats=["q8_0", "fp32"], max_kv_len=16, **shape)
    assert "/kv=any/" in segments.kernel
    assert facts[2] == facts[3] == str(segments)
    assert "segments[0]: k=uint8(2, 7, 2, 68)" in given[2]
    assert "window=(11, -1)" in given[2]
    assert "window" not in given[3]
    assert "by_segment=True" in given[4]
    old = flashport.explain("decode", k_format="q8_0", v_format="q8_0", max_kv_len=7, **shape)
    newest = flashport.explain("decode", max_kv_len=9, **shape)
    by_each, merged = facts[4].split("; merged by ")
    for place, own in enumerate((old, newest)):
        assert f"segments[{place}] by {own.kernel}: " in by_each
    assert re.match(r"decode_stage2/\w+: 8 blocks of 1 thread", merged)
    spilled = {"dtype": "fp32", "k_format": "q8_0", "v_format": "q8_0", "head_dim": 64, "tokens": 18, "num_kv_heads": 2}
    assert facts[5] == str(flashport.explain("append", target="cpu", **spilled))
    assert "k_format=q8_0" in given[5]

    call = {"dtype": "fp32", "head_dim": 64, "num_q_heads": 4, "num_kv_heads": 2, "target": "cpu"}
    assert facts[6].startswith("attention/")
    assert facts[7] == str(flashport.explain("decode", max_kv_len=40, **shape))
    assert facts[8] == str(flashport.explain("merge", rows=8, target="cpu"))
    appends = call | {"batch": 2, "kv_len": 40, "causal": True, "seqused_k": True, "appends": True}
    append, rest = facts[9].split(", then ")
    assert rest == "flash_decode"
    assert facts[10] == str(flashport.explain("decode", max_kv_len=40, **shape))
    few = str(flashport.explain("attention", q_len=1, **appends))
    assert few.startswith(f"{append}, then flash_decode's {facts[10]}")
    assert facts[11] == str(flashport.explain("attention", q_len=20, **appends))
    assert facts[11].startswith(f"{append}, then attention/")


def test_a_call_of_this_process_writes_nothing(capfd):
    x = np.zeros((2, 3, 4, 32), np.float32)
    flashport.attention(x, x, x)
    assert capfd.readouterr() == ("", "")
