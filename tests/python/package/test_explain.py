"""explain: the schedules of decode and attention, and the texts of wrong questions."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import flashport


def test_a_schedule_is_explained():
    """What the host knows of a decode call: the kernel, blocks, chunks, and where partial results are combined."""
    shape = {"q_dtype": "bf16", "head_dim": 64, "group_size": 4, "target": "cpu"}
    plan = flashport.explain("decode", batch=3, num_kv_heads=8, max_kv_len=2048, **shape)
    assert plan.kernel == flashport.which_kernel("decode", **shape)
    (cpu,) = (device for backend in flashport.backends() if backend.name == "cpu" for device in backend.devices)
    assert plan.blocks == 4 * cpu.multiprocessors
    assert (plan.query_tiles, plan.most_chunks, plan.shortest_chunk, plan.longest_chunk) == (24, 16, 64, 128)
    assert plan.combine == "launch"
    assert str(plan) == plan.text
    assert plan.text == (
        f"{plan.kernel}: {plan.blocks} block{'s' * (plan.blocks > 1)} for 24 query tiles, each in at most 16 chunks of "
        f"64 to 128 keys; combined in the launch; {plan.workspace_bytes} bytes of workspace"
    )
    q, cache = np.zeros((3, 32, 64), ml_dtypes.bfloat16), np.zeros((3, 2048, 8, 64), ml_dtypes.bfloat16)
    lengths = np.zeros(3, np.int32)
    for splits in (None, 0, 1, 4):
        plan = flashport.explain("decode", batch=3, num_kv_heads=8, max_kv_len=2048, num_splits=splits, **shape)
        assert plan.workspace_bytes == flashport.decode_workspace_size(q, cache, cache, lengths, num_splits=splits)
    assert (plan.most_chunks, plan.combine) == (4, "second launch")
    assert flashport.explain("decode", target="cpu").combine == "none"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"operation": "merge"}, ValueError, 'operation must be "decode" or "attention", got "merge"'),
        ({"operation": None}, TypeError, 'operation must be "decode" or "attention", got NoneType'),
        ({"batch": 0}, ValueError, "batch must be from 1 to 16777216, got 0"),
        ({"batch": None}, TypeError, "batch must be an integer, got NoneType"),
        ({"num_kv_heads": -1}, ValueError, "num_kv_heads must be from 1 to 16777216, got -1"),
        ({"max_kv_len": 1 << 31}, ValueError, f"max_kv_len must be from 0 to 2147418112, got {1 << 31}"),
        (
            {"num_splits": -1},
            ValueError,
            "num_splits must be None (the batch-invariant schedule), 0 (the heuristic) or a positive count, got -1",
        ),
        (
            {"kv_len": 5},
            TypeError,
            '"decode" has no option kv_len; it has q_dtype, k_format, v_format, head_dim, head_dim_v, group_size, '
            "q_len, segment_formats, scales_beside, batch, num_kv_heads, max_kv_len, num_splits, target",
        ),
        ({"head_dim": 1024}, NotImplementedError, "head_dim 1024 > 512"),
    ],
)
def test_a_schedule_is_not_explained_so(options, error, text):
    with pytest.raises(error, match=rf"^explain: {re.escape(text)}$"):
        flashport.explain(**{"operation": "decode", "target": "cpu", **options})


def test_a_schedule_of_attention_is_explained():
    shape = {"dtype": "bf16", "head_dim": 64, "causal": True, "target": "cpu"}
    plan = flashport.explain("attention", batch=3, num_q_heads=8, num_kv_heads=2, q_len=500, kv_len=700, **shape)
    assert plan.kernel == flashport.which_kernel("attention", **shape)
    assert plan.work_tiles == 3 * 8 * -(-500 // plan.rows)
    assert min(plan.rows, plan.keys, plan.stages, plan.threads, plan.blocks, plan.shared_bytes) > 0
    assert plan.pieces == 1
    assert str(plan) == plan.text
    assert plan.text.startswith(f"{plan.kernel}: {plan.blocks} block")
    assert f"for {plan.work_tiles} work tiles of {plan.rows} rows; key tiles of {plan.keys} keys" in plan.text
    q, k = np.zeros((3, 500, 8, 64), ml_dtypes.bfloat16), np.zeros((3, 700, 2, 64), ml_dtypes.bfloat16)
    assert plan.workspace_bytes == flashport.attention_workspace_size(q, k, k)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batch": 0}, ValueError, "batch must be from 1 to 16777216, got 0"),
        ({"q_len": 0}, ValueError, "q_len must be from 1 to 1073741824, got 0"),
        ({"kv_len": -1}, ValueError, "kv_len must be from 0 to 1073741824, got -1"),
        (
            {"num_q_heads": 5, "num_kv_heads": 2},
            ValueError,
            "num_q_heads must be a multiple of num_kv_heads, got 5 and 2",
        ),
        ({"causal": 1}, TypeError, "causal must be True or False, got int"),
        ({"bias": None}, TypeError, "bias must be True or False, got NoneType"),
        ({"head_dim": 1024}, NotImplementedError, "head_dim must be a multiple of 8 from 16 to 512, got 1024"),
        ({"dtype": "int32"}, NotImplementedError, "q must be float16, bfloat16, float32 or float8_e4m3fn, got int32"),
        (
            {"max_kv_len": 5},
            TypeError,
            '"attention" has no option max_kv_len; it has dtype, head_dim, head_dim_v, k_format, v_format, paged, '
            "causal, softcap, alibi, bias, dropout, seqused_k, appends, scales_beside, batch, num_q_heads, "
            "num_kv_heads, q_len, kv_len, num_splits, target",
        ),
    ],
)
def test_a_schedule_of_attention_is_not_explained_so(options, error, text):
    with pytest.raises(error, match=rf"^explain: {re.escape(text)}$"):
        flashport.explain("attention", **{"target": "cpu", **options})
