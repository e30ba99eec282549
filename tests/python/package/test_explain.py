"""explain: the schedules of each operation, and the texts of wrong questions."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import flashport

OPERATIONS = (
    '"decode", "decode_stage2", "append", "merge", "gated_delta", "gated_delta_chunk", "attention", "quantize" or '
    '"dequantize"'
)


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
    assert (plan.rows, plan.keys, plan.stages, plan.threads, plan.teams) == (16, 64, 2, 1, 1)
    assert plan.shared_bytes > 0
    launch = f"{plan.blocks} block{'s' * (plan.blocks > 1)} of 1 thread and {plan.shared_bytes} bytes of shared memory"
    assert plan.text == (
        f"{plan.kernel}: {launch} for 24 query tiles of 16 rows, each in at most 16 chunks of 64 to 128 keys; 64 keys "
        f"a turn, 2 stages; combined in the launch; {plan.workspace_bytes} bytes of workspace"
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
        ({"operation": "prefill"}, ValueError, f'operation must be {OPERATIONS}, got "prefill"'),
        ({"operation": None}, TypeError, f"operation must be {OPERATIONS}, got NoneType"),
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
            "q_len, segment_formats, scales_beside, scale_group, batch, num_kv_heads, max_kv_len, num_splits, target",
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
        ({"window": 3}, TypeError, "window must be a tuple (left, right), got 3"),
        ({"window": (-2, -1)}, ValueError, "window must be two numbers from -1 (infinite) on, got (-2, -1)"),
        ({"total_q": -1}, ValueError, "total_q must be from 0 to 1099511627776, got -1"),
        ({"same_offsets": True}, ValueError, "same_offsets must come with total_q and total_k, got 0 and 0"),
        ({"bias": None}, TypeError, "bias must be True or False, got NoneType"),
        ({"head_dim": 1024}, NotImplementedError, "head_dim must be a multiple of 8 from 16 to 512, got 1024"),
        ({"dtype": "int32"}, NotImplementedError, "q must be float16, bfloat16, float32 or float8_e4m3fn, got int32"),
        (
            {"max_kv_len": 5},
            TypeError,
            '"attention" has no option max_kv_len; it has dtype, head_dim, head_dim_v, k_format, v_format, paged, '
            "causal, softcap, alibi, bias, dropout, seqused_k, appends, scales_beside, batch, num_q_heads, "
            "num_kv_heads, q_len, kv_len, num_splits, window, total_q, total_k, same_offsets, seqused_q, leftpad_k, "
            "rotary, target",
        ),
    ],
)
def test_a_schedule_of_attention_is_not_explained_so(options, error, text):
    with pytest.raises(error, match=rf"^explain: {re.escape(text)}$"):
        flashport.explain("attention", **{"target": "cpu", **options})


def test_windows_and_lengths_of_attention_are_explained():
    """Each changes how keys are cut, as it does the workspace of the call."""
    shape = {"dtype": "bf16", "num_q_heads": 32, "num_kv_heads": 8, "target": "cpu"}
    few = shape | {"q_len": 100, "kv_len": 65536, "causal": True}
    q, k = np.zeros((1, 100, 32, 128), ml_dtypes.bfloat16), np.zeros((1, 65536, 8, 128), ml_dtypes.bfloat16)
    offsets = np.array([0, 0, 100], np.int32)
    for pieces, window in ((4, (-1, -1)), (2, (2100, -1)), (1, (1024, -1))):
        plan = flashport.explain("attention", window=window, **few)
        assert plan.pieces == pieces
        assert plan.workspace_bytes == flashport.attention_workspace_size(q, k, k, causal=True, window=window)
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 100, "max_seqlen_k": 100}
    plan = flashport.explain("attention", batch=2, total_q=100, total_k=65536, **few | {"kv_len": 60000})
    assert plan.workspace_bytes == flashport.attention_workspace_size(
        q[0], k[0], k[0], causal=True, **packed | {"cu_seqlens_k": offsets.copy(), "max_seqlen_k": 60000}
    )
    assert plan.pieces > 1
    same = flashport.explain("attention", batch=2, total_q=100, total_k=100, same_offsets=True, **few | {"kv_len": 100})
    assert same.pieces == 1
    assert same.workspace_bytes == flashport.attention_workspace_size(q[0], k[0, :100], k[0, :100], **packed)


@pytest.mark.parametrize("causal", [True, False])
def test_few_queries_have_the_tiles_of_decode(causal):
    call = {"dtype": "bf16", "head_dim": 64, "causal": causal, "seqused_k": True, "target": "cpu"}
    plan = flashport.explain("attention", batch=3, num_q_heads=8, num_kv_heads=2, q_len=2, kv_len=700, **call)
    shape = {"q_dtype": "bf16", "head_dim": 64, "group_size": 4, "q_len": 2, "target": "cpu"}
    decode = flashport.explain("decode", batch=3, num_kv_heads=2, max_kv_len=700, **shape)
    assert plan.text == f"flash_decode's {decode}"
    assert (plan.rows, plan.keys, plan.stages) == (decode.rows, decode.keys, decode.stages)
    assert (plan.threads, plan.blocks, plan.shared_bytes) == (decode.threads, decode.blocks, decode.shared_bytes)
    assert (plan.work_tiles, plan.pieces) == (decode.query_tiles, decode.most_chunks)


@pytest.mark.parametrize(
    ("operation", "options", "work"),
    [
        ("decode_stage2", {"batch": 3, "num_q_heads": 8}, "24 rows"),
        ("append", {"tokens": 5, "num_kv_heads": 2, "head_dim": 96, "head_dim_v": 64}, "30 units of 32 values"),
        (
            "append",
            {"tokens": 1, "k_format": "q4_0", "v_format": "int8", "scales_beside": True},
            "4 units of 32 values",
        ),
        ("merge", {"rows": 1, "head_dim": 7}, "1 row"),
        ("quantize", {"rows": 3, "format": "iq4_nl"}, "12 units of 32 values"),
        ("dequantize", {"rows": 3, "format": "fp8_e4m3", "head_dim": 8}, "3 units of 32 values"),
    ],
)
def test_launches_are_explained(operation, options, work):
    """On a CPU a block is a thread, so there are as many as rows and units."""
    plan = flashport.explain(operation, target="cpu", **options)
    assert type(plan) is flashport.LaunchSchedule
    sizes = {"batch", "num_q_heads", "tokens", "num_kv_heads", "rows"}
    assert plan.kernel == flashport.which_kernel(
        operation, target="cpu", **{name: value for name, value in options.items() if name not in sizes}
    )
    assert plan.work == plan.blocks == int(work.split()[0])
    assert (plan.threads, plan.workspace_bytes) == (1, 0)
    assert str(plan) == plan.text
    assert re.fullmatch(
        rf"{plan.kernel}: {plan.blocks} blocks? of 1 thread( and \d+ bytes? of .*)? for {work}", plan.text
    )


def test_the_gated_delta_rule_is_explained():
    call = {"q_dtype": "bf16", "head_dim_k": 64, "head_dim_v": 96, "target": "cpu"}
    plan = flashport.explain("gated_delta", batch=3, num_v_heads=4, **call)
    assert plan.kernel == flashport.which_kernel("gated_delta", **call)
    assert plan.slices == -(-96 // plan.columns)
    assert plan.blocks == 3 * 4 * plan.slices
    assert (plan.threads, plan.teams, plan.workspace_bytes) == (1, 1, 0)
    assert str(plan) == plan.text

    plan = flashport.explain("gated_delta_chunk", batch=2, num_heads=2, num_v_heads=4, tokens=100, **call)
    assert plan.kernel == flashport.which_kernel("gated_delta_chunk", **call)
    assert (plan.chunk_tokens, plan.chunks, plan.columns) == (64, 4, 64)
    assert (plan.prepare_blocks, plan.blocks, plan.concurrent) == (4 * 2, 2 * 4 * 2, False)
    q, v = np.zeros((2, 100, 2, 64), ml_dtypes.bfloat16), np.zeros((2, 100, 4, 96), ml_dtypes.bfloat16)
    gates = np.zeros((2, 100, 4), np.float32)
    assert plan.workspace_bytes == flashport.gated_delta_chunk_workspace_size(q, q, v, gates, gates)
    packed = flashport.explain(
        "gated_delta_chunk", batch=5, num_heads=2, num_v_heads=4, tokens=100, packed=True, **call
    )
    assert packed.chunks == 100 // 64 + 5
    offsets = np.zeros(6, np.int32)
    assert packed.workspace_bytes == flashport.gated_delta_chunk_workspace_size(
        q[:1], q[:1], v[:1], gates[:1], gates[:1], cu_seqlens=offsets
    )


@pytest.mark.parametrize(
    ("operation", "options", "error", "text"),
    [
        ("merge", {"rows": 0}, ValueError, "rows must be from 1 to 68719476736, got 0"),
        ("merge", {"tokens": 2}, TypeError, '"merge" has no option tokens; it has dtype, head_dim, rows, target'),
        ("quantize", {"rows": None}, TypeError, "rows must be an integer, got NoneType"),
        ("append", {"tokens": 0}, ValueError, "tokens must be from 1 to 68719476736, got 0"),
        ("decode_stage2", {"batch": 0}, ValueError, "batch must be from 1 to 2147483647, got 0"),
        ("gated_delta", {"num_v_heads": 0}, ValueError, "num_v_heads must be from 1 to 8388607, got 0"),
        ("gated_delta", {"head_dim_k": 20}, NotImplementedError,
         "head_dim_k must be a multiple of 8 from 16 to 256, got 20"),
        ("gated_delta_chunk", {"num_heads": 2}, ValueError,
         "num_v_heads must be a multiple of num_heads, got 1 and 2"),
        ("gated_delta_chunk", {"packed": 1}, TypeError, "packed must be True or False, got int"),
    ],
)  # fmt: skip
def test_other_schedules_are_not_explained_so(operation, options, error, text):
    with pytest.raises(error, match=rf"^explain: {re.escape(text)}$"):
        flashport.explain(operation, **{"target": "cpu", **options})
