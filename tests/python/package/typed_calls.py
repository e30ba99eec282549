"""Calls as users write them, which mypy reads in ``ci/test lint`` and nothing runs.

``assert_type`` says what a checker must find, and an ignored error what it must refuse: strict mypy also refuses an
``ignore`` that ignores nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import assert_type

import flashport
from flashport import CascadeLevel, fla, flashinfer, ggml, lightllm, sglang, trace, vllm
from flashport.typing import KvLayout, StateLayout

Matrix = np.ndarray[Any, np.dtype[np.float32]]


def mixed_caches(q: Matrix, k: Matrix, asked: bool) -> None:
    """The cache gives what flash_decode gives, and ggml's attention its own tensors."""
    cache = flashport.MixedKVCache(q, 1, 8, 128, max_tokens=100, k_format="q4_0", sink_tokens=4)
    cache.append(k, k, lengths=[3])
    assert_type(cache.attend(q), Matrix)
    assert_type(cache.attend(q, k, softcap=3.0, return_lse=True), tuple[Matrix, Matrix])
    assert_type(cache.attend(q, return_lse=asked), Matrix | tuple[Matrix, Matrix])
    flashport.MixedKVCache(q, 1, 8, 128, max_tokens=100, k_format="q3_k")  # type: ignore[arg-type]
    tensor = ggml.Tensor(q, "q8_0", (64, 8, 4), (68, 68, 544)).permute(0, 2, 1, 3)
    assert_type(ggml.flash_attn_ext(tensor, tensor, tensor, max_bias=8.0), ggml.Tensor)
    assert_type(ggml.mixed_attention(tensor, tensor, tensor, None, tensor, ggml.Tensor.of(q)), ggml.Tensor)
    assert_type(ggml.slopes(32, 8.0), list[float])
    ggml.flash_attn_ext(q, tensor, tensor)  # type: ignore[arg-type]


def decoding(q: Matrix, cache: Matrix, seqlens: np.ndarray[Any, np.dtype[np.int32]], asked: bool, mine: Matrix) -> None:
    """The type of a result follows from the query's and from whether the lse is asked for."""
    assert_type(flashport.flash_decode(q, cache, cache, seqlens), Matrix)
    assert_type(flashport.flash_decode(q, cache, cache, seqlens, out=mine, window=(30, -1)), Matrix)
    assert_type(flashport.flash_decode(q, cache, cache, seqlens, return_lse=True), tuple[Matrix, Matrix])
    assert_type(flashport.flash_decode(q, cache, cache, seqlens, lse=mine), tuple[Matrix, Matrix])
    found = flashport.flash_decode(q, cache, cache, seqlens, return_lse=asked)
    assert_type(found, Matrix | tuple[Matrix, Matrix])
    assert_type(flashport.merge_states(q, cache), tuple[Matrix, Matrix])
    levels = [CascadeLevel(cache, cache), CascadeLevel(cache, cache, cache, kv_layout="HND")]
    assert_type(flashport.cascade_decode(q, levels), Matrix)
    assert_type(flashport.cascade_decode(q, levels, softcap=1.0, return_lse=True), tuple[Matrix, Matrix])
    assert_type(flashport.cascade_decode(q, levels, lse=q), tuple[Matrix, Matrix])
    assert_type(flashport.cascade_workspace_size(q, levels), int)
    assert_type(flashport.decode_workspace_size(q, cache, cache, seqlens, block_table=seqlens), int)
    flashport.flash_decode(q, cache, cache, None, kv_indptr=seqlens, kv_indices=seqlens, kv_last_page_len=seqlens)

    flashport.flash_decode(q, cache, cache, seqlens, kv_layout="NDH")  # type: ignore[call-overload]
    assert_type(flashport.flash_decode(q, cache, cache, seqlens, k_format="q8_0", v_format="q8_0"), Matrix)
    flashport.flash_decode(q, cache, cache, seqlens, k_format="q9")  # type: ignore[call-overload]
    flashport.append_kv(q, q, cache, cache, seqlens, v_format="int3")  # type: ignore[arg-type]
    flashport.flash_decode([1.0], cache, cache, seqlens)  # type: ignore[call-overload]
    flashport.flash_decode(q, cache, cache, seqlens, softmax_scal=1.0)  # type: ignore[call-overload]
    flashport.append_kv(q, q, cache, cache, seqlens, kv_layout="NDH")  # type: ignore[arg-type]
    flashport.append_kv(q, q, cache, cache, [1, 2])  # type: ignore[arg-type]


def attending(q: Matrix, offsets: np.ndarray[Any, np.dtype[np.int32]], asked: bool, mine: Matrix) -> None:
    """As in decoding."""
    assert_type(flashport.attention(q, q, q), Matrix)
    assert_type(flashport.attention(q, q, q, out=mine, causal=True, window=(30, -1)), Matrix)
    assert_type(flashport.attention(q, q, q, return_lse=True), tuple[Matrix, Matrix])
    assert_type(flashport.attention(q, q, q, lse=mine, dropout_p=0.1, rng_state=offsets), tuple[Matrix, Matrix])
    assert_type(flashport.attention(q, q, q, return_lse=asked), Matrix | tuple[Matrix, Matrix])
    packed = flashport.attention(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=3, max_seqlen_k=3)
    assert_type(packed, Matrix)
    assert_type(flashport.attention_workspace_size(q, q, q, bias=mine), int)
    assert_type(flashport.dropout_mask((1, 2, 3, 4), mine, 0.1), Matrix)
    assert_type(flashport.quantize_kv(q, "q4_0"), Matrix)
    assert_type(flashport.dequantize_kv(q, "iq4_nl", dtype=np.float16), Matrix)
    flashport.quantize_kv(q, "bf16")  # type: ignore[arg-type]

    flashport.attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    flashport.attention(q, q, q, window=3)  # type: ignore[call-overload]
    flashport.attention(q, q)  # type: ignore[call-overload]


def arrays_of_the_package(q: flashport.DeviceArray, layout: KvLayout, states: StateLayout) -> None:
    """A :class:`flashport.DeviceArray` is an array; its results are of its type."""
    assert_type(flashport.flash_decode(q, q, q, q, kv_layout=layout), flashport.DeviceArray)
    assert_type(flashport.gated_delta_update(q, q, q, state_layout=states), flashport.DeviceArray)
    assert_type(flashport.gated_delta_chunk(q, q, q, q, q, out=q, stream=0), flashport.DeviceArray)
    flashport.gated_delta_chunk(q, q, q, q, q, state_layout="hv")  # type: ignore[arg-type]
    flashport.gated_delta_update(q, q, q, head_map="any")  # type: ignore[arg-type]
    flashport.gated_delta_update(q, q, q, stream="cuda")  # type: ignore[arg-type]


def support() -> None:
    """Words are checked, element types may be those of any library."""
    assert_type(flashport.supports("decode", q_dtype=np.float16, k_format="q8_0"), flashport.Support)
    assert_type(flashport.supports("append", dtype="fp16", v_format=np.float16), flashport.Support)
    assert_type(flashport.which_kernel("gated_delta_chunk", gate="head"), str)
    assert_type(flashport.which_kernel("merge", head_dim=3, target=None), str)
    assert_type(flashport.explain("decode", batch=2, max_kv_len=100, num_splits=None), flashport.DecodeSchedule)
    assert_type(flashport.explain("merge", rows=3), flashport.LaunchSchedule)
    assert_type(flashport.explain("append", tokens=3, num_kv_heads=2), flashport.LaunchSchedule)
    assert_type(flashport.explain("decode_stage2", batch=3), flashport.LaunchSchedule)
    assert_type(flashport.explain("dequantize", format="q4_0", rows=3), flashport.LaunchSchedule)
    assert_type(flashport.explain("gated_delta", num_v_heads=2), flashport.GatedDeltaSchedule)
    assert_type(flashport.explain("gated_delta_chunk", tokens=9, packed=True), flashport.GatedDeltaChunkSchedule)
    flashport.explain("merge", tokens=3)  # type: ignore[call-overload]
    flashport.explain("gated_delta", tokens=3)  # type: ignore[call-overload]
    flashport.explain("prefill")  # type: ignore[call-overload]
    flashport.supports("prefill")  # type: ignore[call-overload]
    assert_type(flashport.supports("attention", dtype=np.float16, causal=True), flashport.Support)
    assert_type(flashport.explain("attention", q_len=8, kv_len=9, alibi=True), flashport.AttentionSchedule)
    assert_type(flashport.explain("attention", total_q=8, window=(9, -1)), flashport.AttentionSchedule)
    flashport.supports("attention", q_dtype="fp16")  # type: ignore[call-overload]
    flashport.supports("append", q_len=2)  # type: ignore[call-overload]
    flashport.supports("gated_delta", gate="kda")  # type: ignore[call-overload]


def drop_ins(q: Matrix, asked: bool, infer_state: Any) -> None:
    """What the drop-ins return follows from their own flags."""
    assert_type(fla.chunk_gated_delta_rule(q, q, q, q, q), tuple[Matrix, None])
    assert_type(fla.chunk_gated_delta_rule(q, q, q, q, q, None, None, True), tuple[Matrix, Matrix])
    assert_type(fla.chunk_gdn(q, q, q, q, q, output_final_state=True, chunk_size=32), tuple[Matrix, Matrix])
    assert_type(fla.chunk_gated_delta_rule(q, q, q, q, q, output_final_state=asked), tuple[Matrix, Matrix | None])
    assert_type(fla.fused_recurrent_gated_delta_rule(q, q, q, q, beta=q), tuple[Matrix, None])
    recurrent = fla.fused_recurrent_gated_delta_rule(q, q, q, beta=q, output_final_state=True, use_gate_in_kernel=True)
    assert_type(recurrent, tuple[Matrix, Matrix])
    assert_type(sglang.chunk_gated_delta_rule(q, q, q, q, q), tuple[Matrix, None, Matrix])
    assert_type(sglang.chunk_gated_delta_rule(q, q, q, q, q, output_h=asked), tuple[Matrix, None, Matrix | None])
    assert_type(sglang.fused_gdn_gating(q, q, q, q), tuple[Matrix, Matrix])
    assert_type(lightllm.token_decode_attention_flash_decoding(q, infer_state, 8, 128, q, q, k_format="q8_0"), Matrix)
    assert_type(lightllm.token_decode_attention_flash_decoding(q, infer_state, 8, 128, q, q), Matrix)
    assert_type(flashinfer.merge_state(q, q, q, q), tuple[Matrix, Matrix])
    assert_type(flashinfer.merge_states(q, q), tuple[Matrix, Matrix])
    flashinfer.merge_state_in_place(q, q, q, q, mask=q)
    vllm.paged_attention_rocm(q, q, q, q, q, q, q, 8, 0.1, q, q, None, 16, 512, None, "auto", q, q)


def traces(path: Path, q: Matrix) -> None:
    """Steps have tensors, and a recording is a context with its writer."""
    loaded = trace.load(path, arrays="torch", softcap=30.0)
    assert_type(loaded, trace.Trace)
    assert_type(loaded[0], trace.Step)
    assert_type(loaded.select(layer=1), list[trace.Step])
    assert_type(loaded[0].need("k_quant").ne, tuple[int, int, int, int])
    with trace.record(path, layers=2) as writer:
        assert_type(writer.add(q, q, q, q, mask=q, types={"k": "Q8_0"}), int)
    trace.load(path, arrays="jax")  # type: ignore[arg-type]
    loaded[0].find("keys")  # type: ignore[arg-type]
