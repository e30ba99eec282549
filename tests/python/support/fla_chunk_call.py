"""Calls of fla's chunked function, under its names and in its order."""

from __future__ import annotations

import numpy as np

from chunk_call import make_chunk
from flashport import fla
from helpers import BF16

CHUNK = fla.chunk_gated_delta_rule


CALLS = {
    "dense": {"batch": 2, "tokens": 130},
    "packed": {"lens": (70, 0, 1, 128)},
    "from zero": {"lens": (70, 3), "slots": None},
    "logits": {"tokens": 70, "beta_sigmoid": True, "allow_neg_eigval": True},
    "v first": {"tokens": 70, "layout": "vk", "scale": 0.25},
    "bf16 state": {"tokens": 70, "state_dtype": BF16},
    "fp16 state": {"tokens": 70, "state_dtype": np.float16},
    "own gate": {"tokens": 70, "own_gate": "dt_bias"},
    "gate without bias": {"tokens": 70, "own_gate": "A_log"},
    "fp32": {"tokens": 70, "dtype": np.float32},
}


def make(name):
    """(call of gated_delta_chunk, what fla would be given by position, what by keyword)."""
    options = {"layout": "kv"} | CALLS[name]
    call = make_chunk(use_qk_l2norm=True, heads=2, update_state=False, final_dtype=np.float32, **options)
    x = call.arguments
    if "state" in x:  # fla has no indices: states lie in the order of the sequences
        x["state"] = np.ascontiguousarray(x["state"][x.pop("state_indices")])
        call.memory["state"] = x["state"].reshape(len(x["state"]), -1)
    positional = [x["q"], x["k"], x["v"], x["g"], x["beta"], x.get("scale"), x.get("state"), True, True]
    keywords = {
        "use_beta_sigmoid_in_kernel": x.get("beta_sigmoid", False),
        "allow_neg_eigval": x.get("allow_neg_eigval", False),
        "state_v_first": x["state_layout"] == "vk",
        "cu_seqlens": x.get("cu_seqlens"),
    }
    if "A_log" in x:
        keywords |= {"use_gate_in_kernel": True, "A_log": x["A_log"], "dt_bias": x.get("dt_bias")}
    return call, positional, keywords
