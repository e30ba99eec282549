"""A small right call of each function of the package, with tensors of torch by name and NaN where results go."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import flashport
from flashport import sglang

NAMES = [
    "append_kv",
    "attention",
    "dequantize_kv",
    "dropout_mask",
    "flash_decode",
    "flash_decode_mixed",
    "flash_decode_stage1",
    "flash_decode_stage2",
    "gated_delta_chunk",
    "gated_delta_update",
    "merge_state",
    "merge_states",
    "quantize_kv",
]
PAIR = ["flash_decode_stage1", "flash_decode_stage2"]  # LightLLM's, which run as under torch.no_grad()
REFUSING = [name for name in NAMES if name not in [*PAIR, "dropout_mask", "dequantize_kv"]]  # which read no floats


class WithoutExchangeApi(torch.Tensor):
    """A tensor as a torch before 2.10 has it to show."""

    __dlpack_c_exchange_api__ = None
    __c_dlpack_exchange_api__ = None
    __torch_function__ = torch._C._disabled_torch_function_impl


def make(name, kind=None):
    """(arguments, inputs that are differentiated by, outputs): all arguments by name, the other two as names of them.

    Tensors are made to be of the class ``kind`` where it is given.
    """
    generator = torch.Generator().manual_seed(7)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    def nan(*shape):
        return torch.full(shape, torch.nan)

    lens = torch.tensor([40, 7, 1], dtype=torch.int32)
    arguments, outputs = {}, ["out"]
    if name == "flash_decode":
        arguments = {"q": random(3, 8, 64), "k_cache": random(3, 40, 2, 64), "v_cache": random(3, 40, 2, 64)}
        arguments |= {"seqlens": lens, "sinks": random(8), "out": nan(3, 8, 64), "lse": nan(3, 8)}
        outputs = ["out", "lse"]
    elif name == "flash_decode_mixed":
        arguments = {"q": random(3, 8, 64), "k_hot": random(3, 40, 2, 64), "v_hot": random(3, 40, 2, 64)}
        arguments |= {"mask": random(3, 1, 1, 60), "hot_seqlens": lens, "quant_seqlens": lens % 16}
        arguments |= {"k_quant": flashport.quantize_kv(random(3, 20, 2, 64), "q8_0")}
        arguments |= {"v_quant": flashport.quantize_kv(random(3, 20, 2, 64), "q8_0"), "sinks": random(8)}
        arguments |= {"k_quant_format": "q8_0", "v_quant_format": "q8_0"}
        arguments |= {"out": nan(3, 8, 64), "lse": nan(3, 8)}
        outputs = ["out", "lse"]
    elif name == "flash_decode_segments":
        old = flashport.quantize_kv(random(3, 20, 2, 64), "q4_0"), random(3, 20, 2, 64)
        segments = [flashport.KvSegment(*old, lens % 16, k_format="q4_0")]
        segments += [flashport.KvSegment(random(3, 40, 2, 64), random(3, 40, 2, 64), lens)]
        arguments = {"q": random(3, 8, 64), "segments": segments, "mask": random(3, 1, 1, 60)}
        arguments |= {"out": nan(3, 8, 64), "lse": nan(3, 8)}
        outputs = ["out", "lse"]
    elif name == "flash_decode_stage1":
        table = torch.arange(120, dtype=torch.int32).reshape(3, 40)
        arguments = {"q": random(3, 8, 64), "k": random(120, 2, 64), "v": random(120, 2, 64), "Req_to_tokens": table}
        arguments |= {"B_req_idx": torch.arange(3, dtype=torch.int32), "B_Seqlen": lens, "max_len_in_batch": 40}
        arguments |= {"mid_out": nan(3, 8, 3, 64), "mid_out_logsumexp": nan(3, 8, 3), "block_seq": 16}
        outputs = ["mid_out", "mid_out_logsumexp"]
    elif name == "flash_decode_stage2":
        arguments = {"mid_out": random(3, 8, 3, 64), "mid_out_logexpsum": random(3, 8, 3), "B_Seqlen": lens}
        arguments |= {"Out": nan(3, 8, 64), "block_seq": 16, "lse": nan(3, 8)}
        outputs = ["Out", "lse"]
    elif name == "attention":
        arguments = {"q": random(2, 9, 4, 32), "k": random(2, 12, 2, 32), "v": random(2, 12, 2, 48)}
        arguments |= {"causal": True, "window": (5, -1), "sinks": random(4), "bias": random(1, 4, 9, 12)}
        arguments |= {"alibi_slopes": random(4), "dropout_p": 0.2, "rng_state": torch.tensor([3, 4])}
        arguments |= {"out": nan(2, 9, 4, 48), "lse": nan(2, 4, 9)}
        outputs = ["out", "lse"]
    elif name == "attention_append":  # attention's operator where it writes to a cache
        arguments = {"q": random(2, 3, 4, 32), "k": random(2, 12, 2, 32), "v": random(2, 12, 2, 48), "causal": True}
        arguments |= {"k_new": random(2, 3, 2, 32), "v_new": random(2, 3, 2, 48), "seqused_k": lens[:2] % 8}
        arguments |= {"rotary_cos": random(12, 8), "rotary_sin": random(12, 8), "rotary_interleaved": True}
        arguments |= {"dropout_p": 0.0, "out": nan(2, 3, 4, 48), "lse": nan(2, 4, 3)}
        outputs = ["k", "v", "out", "lse"]
    elif name == "dropout_mask":
        arguments = {"shape": (1, 2, 3, 40), "rng_state": torch.tensor([3, 4]), "dropout_p": 0.3}
        arguments |= {"mask": torch.full((1, 2, 3, 40), 7, dtype=torch.uint8)}
        outputs = ["mask"]
    elif name == "append_kv":
        arguments = {"k": random(3, 2, 64), "v": random(3, 2, 64), "k_cache": nan(2, 4, 2, 64)}
        arguments |= {"v_cache": nan(2, 4, 2, 64), "positions": torch.tensor([5, 0, 3])}
        outputs = ["k_cache", "v_cache"]
    elif name == "quantize_kv":
        arguments = {"x": random(3, 2, 64), "format": "q5_1", "out": torch.full((3, 2, 48), 255, dtype=torch.uint8)}
    elif name == "dequantize_kv":
        arguments = {"x": torch.arange(108, dtype=torch.uint8).reshape(3, 36), "format": "q4_0", "out": nan(3, 64)}
    elif name == "merge_state":
        arguments = {"o_a": random(3, 8, 64), "lse_a": random(3, 8), "o_b": random(3, 8, 64), "lse_b": random(3, 8)}
        arguments |= {"out": nan(3, 8, 64), "out_lse": nan(3, 8)}
        outputs = ["out", "out_lse"]
    elif name == "merge_states":
        arguments = {"o": random(2, 3, 8, 64), "lse": random(2, 3, 8), "out": nan(3, 8, 64), "out_lse": nan(3, 8)}
        outputs = ["out", "out_lse"]
    elif name == "gated_delta_packed_decode":  # SGLang's function, under its own names
        arguments = {"mixed_qkv": random(3, 2 * 2 * 32 + 4 * 16), "a": random(3, 4), "b": random(3, 4)}
        arguments |= {"A_log": random(4), "dt_bias": random(4), "scale": None, "initial_state": random(3, 4, 16, 32)}
        arguments |= {"out": nan(3, 1, 4, 16), "ssm_state_indices": torch.arange(3, dtype=torch.int32)}
        arguments |= {"use_qk_l2norm_in_kernel": True, "state_layout": "vk"}
        outputs = ["out", "initial_state"]
    else:
        tokens = 3 if name == "gated_delta_update" else 70
        arguments = {"q": random(2, tokens, 2, 32), "k": random(2, tokens, 2, 32), "v": random(2, tokens, 4, 16)}
        if name == "gated_delta_update":
            arguments |= {"a": random(2, tokens, 4), "b": random(2, tokens, 4)}
        else:
            arguments |= {"g": -random(2, tokens, 4).abs(), "beta": random(2, tokens, 4)}
        arguments |= {"A_log": random(4), "dt_bias": random(4), "state": random(2, 4, 16, 32)}
        arguments |= {"final_states": nan(2, 4, 16, 32), "out": nan(2, tokens, 4, 16), "use_qk_l2norm": True}
        outputs = ["out", "state", "final_states"]
    if kind is not None:
        arguments = {k: x.as_subclass(kind) if isinstance(x, torch.Tensor) else x for k, x in arguments.items()}
    floats = [k for k, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return SimpleNamespace(
        function=getattr(
            flashport, name.removesuffix("_append"), sglang.fused_recurrent_gated_delta_rule_packed_decode
        ),
        arguments=arguments,
        inputs=[k for k in floats if k not in outputs],
        outputs=outputs,
    )


CASES = [(name, argument) for name in REFUSING for argument in make(name).inputs]
WRITTEN = [(name, argument) for name in NAMES for argument in make(name).outputs]
FLOATS_WRITTEN = [(name, x) for name, x in WRITTEN if make(name).arguments[x].is_floating_point() and name in REFUSING]
