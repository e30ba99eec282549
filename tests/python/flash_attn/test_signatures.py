"""Names, order and defaults of arguments are those of flash-attn 2.8.4, whose callers pass them by position."""

from __future__ import annotations

import inspect

import pytest

torch = pytest.importorskip("torch")

from flashport.flash_attn import flash_attn_2_cuda, flash_attn_interface  # noqa: E402
from flashport.flash_attn.layers import rotary  # noqa: E402

NONE = inspect.Parameter.empty
OPTIONS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
CU = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
# As in flash_attn/flash_attn_interface.py: arguments without a default, and the others.
FUNCTIONS = {
    "flash_attn_func": ("q k v", OPTIONS),
    "flash_attn_kvpacked_func": ("q kv", OPTIONS),
    "flash_attn_qkvpacked_func": ("qkv", OPTIONS),
    "flash_attn_varlen_func": (f"q k v {CU}", OPTIONS | {"block_table": None}),
    "flash_attn_varlen_kvpacked_func": (f"q kv {CU}", OPTIONS),
    "flash_attn_varlen_qkvpacked_func": ("qkv cu_seqlens max_seqlen", OPTIONS),
    "flash_attn_with_kvcache": (
        "q k_cache v_cache",
        dict.fromkeys(
            ("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table")
        )
        | {"softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True}
        | {"alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False},
    ),
    "_flash_attn_forward": (
        "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes return_softmax",
        {},
    ),
    "_flash_attn_varlen_forward": (
        f"q k v {CU} dropout_p softmax_scale causal",
        {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
        | {"return_softmax": False, "block_table": None, "leftpad_k": None, "seqused_k": None, "zero_tensors": False}
        | {"num_splits": 0},
    ),
}
FUNCTIONS |= {f"{name}_fake": FUNCTIONS[name] for name in ("_flash_attn_forward", "_flash_attn_varlen_forward")}
BACKWARD = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes deterministic"
FUNCTIONS["_flash_attn_backward"] = (f"dout q k v out softmax_lse dq dk dv {BACKWARD}", {"rng_state": None})
FUNCTIONS["_flash_attn_varlen_backward"] = (
    f"dout q k v out softmax_lse dq dk dv {CU} {BACKWARD}",
    {"rng_state": None, "zero_tensors": False},
)
WINDOW = "window_size_left window_size_right softcap"
# As in csrc/flash_attn/flash_api.cpp, by position.
COMPILED = {
    "fwd": f"q k v out alibi_slopes p_dropout softmax_scale is_causal {WINDOW} return_softmax gen",
    "varlen_fwd": "q k v out cu_seqlens_q cu_seqlens_k seqused_k leftpad_k block_table alibi_slopes max_seqlen_q "
    f"max_seqlen_k p_dropout softmax_scale zero_tensors is_causal {WINDOW} return_softmax gen num_splits",
    "bwd": "dout q k v out softmax_lse dq dk dv alibi_slopes p_dropout softmax_scale is_causal "
    f"{WINDOW} deterministic gen rng_state",
    "varlen_bwd": "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k alibi_slopes max_seqlen_q "
    f"max_seqlen_k p_dropout softmax_scale zero_tensors is_causal {WINDOW} deterministic gen rng_state",
    "fwd_kvcache": "q kcache vcache k v seqlens_k rotary_cos rotary_sin cache_batch_idx leftpad_k block_table "
    f"alibi_slopes out softmax_scale is_causal {WINDOW} is_rotary_interleaved num_splits",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    found = inspect.signature(getattr(flash_attn_interface, name)).parameters
    required, others = FUNCTIONS[name]
    wanted = dict.fromkeys(required.split(), NONE) | others
    assert [(x.name, x.default) for x in found.values()] == list(wanted.items())


@pytest.mark.parametrize("name", COMPILED)
def test_the_compiled_half(name):
    assert list(inspect.signature(getattr(flash_attn_2_cuda, name)).parameters) == COMPILED[name].split()


APPLIED = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_softmax"
# As their forward there, after the context; all go by position.
CLASSES = {
    "FlashAttnFunc": f"q k v {APPLIED} is_grad_enabled",
    "FlashAttnKVPackedFunc": f"q kv {APPLIED} is_grad_enabled",
    "FlashAttnQKVPackedFunc": f"qkv {APPLIED} is_grad_enabled",
    "FlashAttnVarlenFunc": f"q k v {CU} {APPLIED} block_table is_grad_enabled",
    "FlashAttnVarlenKVPackedFunc": f"q kv {CU} {APPLIED} is_grad_enabled",
    "FlashAttnVarlenQKVPackedFunc": f"qkv cu_seqlens max_seqlen {APPLIED} is_grad_enabled",
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name):
    found = inspect.signature(getattr(flash_attn_interface, name).apply).parameters.values()
    assert [x.name for x in found] == CLASSES[name].split()
    assert {(x.default, x.kind) for x in found} == {(NONE, inspect.Parameter.POSITIONAL_ONLY)}


ROTARY = {
    "rotate_half": ("x", {"interleaved": False}),
    "apply_rotary_emb_torch": ("x cos sin", {"interleaved": False}),
    "apply_rotary_emb": (
        "x cos sin",
        {"interleaved": False, "inplace": False, "seqlen_offsets": 0, "cu_seqlens": None, "max_seqlen": None},
    ),
    "apply_rotary_emb_qkv_": (
        "qkv cos sin",
        {"cos_k": None, "sin_k": None, "interleaved": False, "seqlen_offsets": 0, "num_heads_q": None},
    ),
    "apply_rotary_emb_kv_": ("kv cos sin", {"interleaved": False, "seqlen_offsets": 0}),
    "_apply_rotary_emb_qkv": (
        "qkv cos sin",
        {"cos_k": None, "sin_k": None, "interleaved": False, "inplace": False, "conjugate": False}
        | {"seqlen_offsets": 0, "num_heads_q": None},
    ),
    "RotaryEmbedding": ("dim", {"base": 10000.0, "interleaved": False, "scale_base": None, "device": None}),
    "RotaryEmbedding.forward": (
        "self qkv",
        {"kv": None, "seqlen_offset": 0, "max_seqlen": None, "num_heads_q": None},
    ),
}


@pytest.mark.parametrize("name", ROTARY)
def test_rotary(name):
    head, _, method = name.partition(".")
    function = getattr(rotary, head)
    found = inspect.signature(getattr(function, method) if method else function).parameters
    required, others = ROTARY[name]
    wanted = dict.fromkeys(required.split(), NONE) | others
    assert [(x.name, x.default) for x in found.values()] == list(wanted.items())


def test_rotary_classes():
    for name in ("", "_qkv_", "_kv_"):
        function = getattr(rotary, f"apply_rotary_emb{name}")
        assert getattr(rotary, f"ApplyRotaryEmb{name.replace('_', '', 1).upper()}").apply is function


def test_other_names():
    assert flash_attn_interface.USE_TRITON_ROCM is False
    assert flash_attn_interface.flash_attn_gpu is flash_attn_2_cuda
    for side in ("forward", "backward", "varlen_forward", "varlen_backward"):
        wrapped = getattr(flash_attn_interface, f"_wrapped_flash_attn_{side}")
        assert wrapped is getattr(flash_attn_interface, f"_flash_attn_{side}")
        assert callable(getattr(flash_attn_interface, f"_flash_attn_{side}_fake"))
    assert flash_attn_interface._torch_custom_op_wrapper is torch.library.custom_op
    assert flash_attn_interface._torch_register_fake_wrapper is torch.library.register_fake
    rows = torch.rand(4, 6)[::2]
    assert flash_attn_interface.maybe_contiguous(rows) is rows
    assert flash_attn_interface.maybe_contiguous(rows.t()).stride() == (2, 1)
    assert flash_attn_interface.maybe_contiguous(None) is None
    assert [flash_attn_interface.round_multiple(x, 128) for x in (0, 1, 128, 129)] == [0, 128, 128, 256]
