"""Calls of fla's recurrent function, under its names and in its order."""

from __future__ import annotations

import numpy as np

from delta_call import check, make_delta
from flashport import fla
from helpers import BF16

RECURRENT = fla.fused_recurrent_gated_delta_rule


CALLS = {
    "dense": {"tokens": 5},
    "packed": {"lens": (7, 0, 1, 12)},
    "empty": {"lens": (0, 0)},
    "from zero": {"lens": (7, 3), "slots": None},
    "keys": {"tokens": 5, "gate": None, "key_gates": True},
    "columns": {"tokens": 5, "column_gates": True, "rate": "rates"},
    "all": {"lens": (7, 0, 3), "key_gates": True, "column_gates": True, "values": 40},
    "no gate": {"tokens": 5, "gate": None, "rate": None},
    "logits": {"tokens": 5, "rate": "logit", "allow_neg_eigval": True},
    "logits of columns": {"tokens": 5, "rate": "logits"},
    "v first": {"tokens": 5, "layout": "vk", "scale": 0.25, "column_gates": True},
    "bf16 state": {"tokens": 5, "state_dtype": BF16},
    "fp16 state": {"tokens": 5, "state_dtype": np.float16},
    "own gate": {"tokens": 5, "gate": "made", "key_gates": True},
    "gate without bias": {"tokens": 5, "gate": "without bias"},
    "fp32": {"tokens": 5, "dtype": np.float32, "keys": 128, "values": 24},
    "fp16": {"tokens": 1, "dtype": np.float16},
}


def make(name):
    """(call of gated_delta_update, what fla would be given by position, what by keyword)."""
    options = {"layout": "kv", "gate": "log", "rate": "rate"} | CALLS[name]
    call = make_delta(a_form="rows", use_qk_l2norm=True, update_state=False, final_dtype=np.float32, **options)
    x = call.arguments
    if "state" in x:  # fla has no indices: states lie in the order of the sequences
        x["state"] = np.ascontiguousarray(x["state"][x.pop("state_indices")])
        call.memory["state"] = x["state"].reshape(len(x["state"]), -1)
    positional = [
        x["q"], x["k"], x["v"], x.get("a", x.get("g")), x.get("gk"), x.get("gv"), x.get("b", x.get("beta")),
        x.get("scale"), x.get("state"), True, True,
    ]  # fmt: skip
    keywords = {
        "use_beta_sigmoid_in_kernel": "b" in x,
        "allow_neg_eigval": x.get("allow_neg_eigval", False),
        "state_v_first": x["state_layout"] == "vk",
        "cu_seqlens": x.get("cu_seqlens"),
    }
    if "A_log" in x:
        keywords |= {"use_gate_in_kernel": True, "A_log": x["A_log"], "dt_bias": x.get("dt_bias")}
    return call, positional, keywords


def judged(call):
    """Runs the call against the oracle, whose judgement holds for what equals it."""
    x = call.arguments
    if "state" in x:
        x["state_indices"] = np.arange(len(x["state"]), dtype=np.int32)
    check(call)
    return call
