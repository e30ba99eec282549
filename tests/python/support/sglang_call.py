"""Calls of SGLang's functions, under its names and in its order."""

from __future__ import annotations

import numpy as np

from chunk_call import make_chunk
from delta_call import make_delta
from flashport import sglang
from helpers import BF16

UPDATE = sglang.fused_sigmoid_gating_delta_rule_update


CHUNK = sglang.chunk_gated_delta_rule


NAMES = {
    "lower_bound": "lower_bound",
    "intermediate_states": "intermediate_states_buffer",
    "intermediate_indices": "intermediate_state_indices",
    "parent_tokens": "retrieve_parent_token",
    "state_layout": "state_layout",
}


CALLS = {
    "decode": {"batch": 4, "slots": "padded"},
    "packed decode": {"lens": (1, 1, 0, 1), "scale": 0.25},
    "verify": {"batch": 3, "tokens": 5, "steps": 8, "update_state": False},
    "tree": {"batch": 2, "tokens": 5, "steps": 5, "tree": True, "update_state": False},
    "kda": {"tokens": 2, "is_kda": True, "a_form": "channels", "lower_bound": -5.0},
    "old pool": {"tokens": 2, "layout": "kv", "state_dtype": BF16},
    "no pool": {"tokens": 2, "slots": None},
}


def make(name):
    """(call, what SGLang would hand in by position, what by keyword)."""
    call = make_delta(use_qk_l2norm=True, **CALLS[name])
    x = call.arguments
    positional = [
        x["A_log"], x["a"], x["dt_bias"], 1.0, 20.0, x["q"], x["k"], x["v"], x["b"], x.get("state"),
        x.get("state_indices"), x.get("scale"), True, x.get("cu_seqlens"), x.get("is_kda", False),
    ]  # fmt: skip
    keywords = {NAMES[name]: value for name, value in x.items() if name in NAMES}
    keywords["disable_state_update"] = not x["update_state"]
    return call, positional, keywords


CHUNKS = {
    "dense": {"batch": 2, "tokens": 130},
    "packed": {"lens": (70, 0, 1, 128), "slots": "padded"},
    "no pool": {"lens": (70, 3), "slots": None},
    "old pool": {"tokens": 70, "layout": "kv", "state_dtype": BF16, "scale": 0.25},
    "kept pool": {"tokens": 70, "update_state": False},
}


def make_prompt(name):
    """(call of gated_delta_chunk, what SGLang would hand in by position, what by keyword)."""
    call = make_chunk(use_qk_l2norm=True, heads=2, **CHUNKS[name])
    x = call.arguments
    positional = [x["q"], x["k"], x["v"], x["g"], x["beta"], x.get("scale"), x.get("state"), x.get("state_indices"),
                  x.get("cu_seqlens"), False, True, x["update_state"]]  # fmt: skip
    return call, positional, {"state_layout": x["state_layout"]}


def with_chunk_states(call):
    """The call with room for exactly the states that enter its chunks."""
    chunks = sum(-(-n // 64) for n in call.lens) if "cu_seqlens" in call.arguments else -(-call["q"].shape[1] // 64)
    heads, keys, values = call["v"].shape[2], call["q"].shape[3], call["v"].shape[3]
    inner = (keys, values) if call["state_layout"] == "kv" else (values, keys)
    batch = call["q"].shape[0]
    call.arguments["chunk_states"] = np.full((batch, chunks, heads, *inner), np.nan, call["q"].dtype)
    call.memory["chunk_states"] = call["chunk_states"].reshape(batch, -1)
    return call
