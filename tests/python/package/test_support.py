"""What is served: the answers of supports and which_kernel, and the texts of wrong questions."""

from __future__ import annotations

import re
import typing

import ml_dtypes
import numpy as np
import pytest

import flashport
from flashport import _core
from flashport.typing import CacheFormat, Operation


def test_support_is_true_or_has_a_reason():
    assert flashport.supports("decode", target="cpu")
    assert flashport.supports("decode", q_dtype="torch.bfloat16", target="cpu")
    refused = flashport.supports("decode", head_dim=1024, target="cpu")
    assert not refused
    assert refused.reason == "head_dim 1024 > 512"
    with pytest.raises(ValueError, match="dtype must be one of"):
        flashport.supports("decode", q_dtype="float64", target="cpu")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head_dim_v": 0}, "head_dim_v 0 < 16"),
        ({"head_dim_v": 520}, "head_dim_v 520 > 512"),
        ({"head_dim": 0}, "head_dim 0 < 16"),
        ({"q_dtype": "int32"}, "q must be float32, float16 or bfloat16, got int32"),
        ({"q_dtype": "fp8_e4m3"}, "q must be float32, float16 or bfloat16, got float8_e4m3fn"),
        ({"q_dtype": "int32", "k_format": "bf16"}, "q must be float32, float16 or bfloat16, got int32"),
        ({"v_format": "fp32"}, "a cache of fp32 goes with q of the same type, got bfloat16"),
        ({"v_format": "q8_0", "head_dim_v": 80}, "q8_0 needs a head_dim_v that is a multiple of 32, got 80"),
    ],
)
def test_support_says_no_to(options, reason):
    refused = flashport.supports("decode", target="cpu", **options)
    assert not refused
    assert refused.reason == reason
    with pytest.raises(NotImplementedError, match=re.escape("which_kernel: " + reason)):
        flashport.which_kernel("decode", target="cpu", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"k_format": "q8_0"},
        {"k_format": "fp8_e4m3", "v_format": "q8_0"},
        {"k_format": "q4_1", "v_format": "q4_1"},
        {"k_format": np.float16},
        {"q_dtype": "fp32", "k_format": "fp16", "v_format": "bf16"},
        {"segment_formats": ["q8_0", "bf16", "fp16"]},
        {"segment_formats": ("bf16",)},
    ],
)
def test_pairs_without_a_kernel_of_their_own_are_widened(options):
    assert flashport.supports("decode", target="cpu", **options)
    assert flashport.which_kernel("decode", target="cpu", **options).startswith("decode/fp32/kv=any/hd128/r16/cpu_")


def test_formats_of_segments_are_a_list_of_names():
    with pytest.raises(TypeError, match=r"^supports: segment_formats must be a list of formats, got str"):
        flashport.supports("decode", target="cpu", segment_formats="q8_0")
    with pytest.raises(ValueError, match=r'^supports: segment_formats must be "fp32", .*got "q9"'):
        flashport.supports("decode", target="cpu", segment_formats=["q9"])


def test_both_spellings_of_a_type_and_types_of_libraries():
    spellings = {
        "fp32": ["fp32", "float32", np.float32, np.dtype(np.float32), "torch.float32"],
        "fp16": ["fp16", "float16", np.float16, np.dtype(np.float16)],
        "bf16": ["bf16", "bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)],
        "fp8_e4m3": ["fp8_e4m3", "float8_e4m3fn", ml_dtypes.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)],
    }
    for name, types in spellings.items():
        q = "bf16" if name == "fp8_e4m3" else name
        key = flashport.which_kernel("decode", q_dtype=q, k_format=name, v_format=name, target="cpu")
        for spelled in types:
            options = {"q_dtype": q, "k_format": spelled, "v_format": name, "target": "cpu"}
            assert flashport.which_kernel("decode", **options) == key
            assert flashport.supports("append", k_format=spelled, v_format=spelled, target="cpu")
            if q == name:
                assert flashport.which_kernel("decode", q_dtype=spelled, target="cpu") == key
                assert flashport.supports("gated_delta_chunk", q_dtype=spelled, target="cpu")
    assert flashport.supports("gated_delta", state_dtype=np.float32, target="cpu")
    assert flashport.DeviceArray((2,), np.float16).dtype == "float16"


def test_types_of_torch_are_types():
    torch = pytest.importorskip("torch")
    fp8 = torch.float8_e4m3fn
    assert flashport.supports("decode", q_dtype=torch.bfloat16, k_format=fp8, v_format=fp8, target="cpu")
    assert flashport.supports("gated_delta", q_dtype=torch.float16, state_dtype=torch.bfloat16, target="cpu")


FORMATS = (
    '"fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e4m3fnuz", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", '
    '"fp8_e5m2", "int8" or "int4"'
)


# Targets that have all kernels of another besides some of their own.
BASES = {"cpu_vnni": "cpu_avx512", "cpu_amx": "cpu_vnni"}
OWN = {("attention", "cpu_amx"): "attention/bf16/hd512/plain/cpu_amx"}  # what a target has beside its base


def last_base(target: str) -> str:
    """The target that has most of its kernels."""
    return last_base(BASES[target]) if target in BASES else target


@pytest.mark.parametrize("function", [flashport.supports, flashport.which_kernel])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"head_dim": "a"}, TypeError, "head_dim must be an integer, got str"),
        ({"head_dim": None}, TypeError, "head_dim must be an integer, got NoneType"),
        ({"head_dim_v": 64.0}, TypeError, "head_dim_v must be an integer, got float"),
        ({"group_size": 1 << 70}, ValueError, f"group_size must fit in 64 bits, got {1 << 70}"),
        ({"q_len": []}, TypeError, "q_len must be an integer, got list"),
        ({"q_dtype": 5}, TypeError, "q_dtype must be an element type or its name, got int"),
        ({"q_dtype": "float64"}, ValueError, "q_dtype must be one of float32, float16, bfloat16, "),
        ({"k_format": 5}, TypeError, "k_format must be a format's name or an element type, got int"),
        ({"k_format": ""}, ValueError, f'k_format must be {FORMATS}, got ""'),
        ({"v_format": "fp8_e3m4"}, ValueError, f'v_format must be {FORMATS}, got "fp8_e3m4"'),
        ({"v_format": np.uint8}, ValueError, f'v_format must be {FORMATS}, got "uint8"'),
        ({"kv": "bf16"}, TypeError, '"decode" has no option kv; it has q_dtype, k_format, v_format, head_dim, '),
        ({"target": 5}, TypeError, "target must be a str, got int"),
    ],
)
def test_support_is_not_asked_so(function, options, error, text):
    with pytest.raises(error, match=rf"^{function.__name__}: {re.escape(text)}"):
        function("decode", **{"target": "cpu", **options})


OPERATIONS = (
    '"decode", "decode_stage2", "append", "merge", "gated_delta", "gated_delta_chunk", "attention", "quantize" or '
    '"dequantize"'
)
KEYS = {
    "decode": "decode/fp32/kv=bf16/hd128/r16",
    "decode_stage2": "decode_stage2",
    "append": "append_kv",
    "merge": "merge_states",
    "gated_delta": "gated_delta_update/state=fp32/vk/gate=head/k256",
    "gated_delta_chunk": "gated_delta_chunk/fp32/k256",
    "attention": "attention/fp32/hd512/plain",
    "quantize": "quantize_kv",
    "dequantize": "dequantize_kv",
}


@pytest.mark.parametrize("function", [flashport.supports, flashport.which_kernel])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"head_dim_k": "a"}, "head_dim_k must be an integer, got str"),
        ({"head_dim_v": "a"}, "head_dim_v must be an integer, got str"),
        ({"state_dtype": 5}, "state_dtype must be an element type or its name, got int"),
        ({"state_layout": 5}, 'state_layout must be "vk" or "kv", got int'),
        ({"gate": None}, 'gate must be "head", "key" or "any", got NoneType'),
        ({"operation": 3}, f"operation must be {OPERATIONS}, got int"),
        (
            {"q_len": 2},
            '"gated_delta" has no option q_len; it has q_dtype, state_dtype, head_dim_k, head_dim_v, state_layout, '
            "gate, target",
        ),
    ],
)
def test_support_of_the_gated_delta_rule_is_not_asked_so(function, options, text):
    with pytest.raises(TypeError, match=rf"^{function.__name__}: {re.escape(text)}$"):
        function(**{"operation": "gated_delta", "target": "cpu", **options})


@pytest.mark.parametrize(("operation", "key"), KEYS.items())
def test_support_of_every_operation(operation, key):
    """Yes or no with the reason, by options that are the operation's own."""
    target = _core.kernel_keys("cpu")[0].rpartition("/")[2]
    wanted = OWN.get((operation, target), f"{key}/{last_base(target)}")
    assert flashport.supports(operation, target="cpu") == flashport.Support(True, "")
    assert flashport.which_kernel(operation, target="cpu") == wanted
    assert flashport.which_kernel(operation, target=target) == wanted
    assert flashport.which_kernel(operation) in _core.kernel_keys("")
    refused = flashport.supports(operation, target="vax")
    assert not refused
    assert refused.reason.startswith('no target "vax" is compiled into this installation')
    with pytest.raises(NotImplementedError, match=f"^which_kernel: {re.escape(refused.reason)}$"):
        flashport.which_kernel(operation, target="vax")
    text = rf'^supports: "{operation}" has no option seqlens; it has .*, target$'
    with pytest.raises(TypeError, match=text):
        flashport.supports(operation, seqlens=1)


@pytest.mark.parametrize(
    ("operation", "options", "reason"),
    [
        ("decode_stage2", {"out_dtype": "int32"}, "Out must be float16, bfloat16 or float32, got int32"),
        ("append", {"dtype": "uint8"}, "k must be float16, bfloat16 or float32, got uint8"),
        ("append", {"head_dim": 0}, "head_dim must be 1 or more and below 2^31, got 0"),
        ("append", {"k_format": "q8_0", "head_dim": 80}, "q8_0 needs a head_dim that is a multiple of 32, got 80"),
        ("quantize", {"dtype": "uint8"}, "x must be float16, bfloat16 or float32, got uint8"),
        ("quantize", {"format": "q4_0", "head_dim": 80}, "q4_0 needs a head_dim that is a multiple of 32, got 80"),
        (
            "dequantize",
            {"format": "bf16"},
            "format must be one of fp8_e4m3, fp8_e4m3fnuz, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, fp8_e5m2, int8, int4, "
            "got bf16; for an element type's own format convert the array",
        ),
        ("merge", {"dtype": "fp8_e4m3"}, "o must be float16, bfloat16 or float32, got float8_e4m3fn"),
        ("merge", {"head_dim": -1}, "head_dim must be 1 or more and below 2^31, got -1"),
    ],
)
def test_support_of_the_companions_says_no_to(operation, options, reason):
    assert flashport.supports(operation, target="cpu", **options) == flashport.Support(False, reason)


def test_operations_and_formats_are_those_that_types_name():
    quoted = re.compile(r'"([^"]+)"')
    with pytest.raises(ValueError, match=r"^supports: operation must be ") as error:
        flashport.supports("prefill")
    *named, wrong = quoted.findall(str(error.value))
    assert (tuple(named), wrong) == (typing.get_args(Operation), "prefill")
    assert set(named) == set(KEYS)
    with pytest.raises(ValueError, match=r"^supports: k_format must be ") as error:
        flashport.supports("decode", k_format="q4_2")
    assert tuple(quoted.findall(str(error.value))[:-1]) == typing.get_args(CacheFormat)


@pytest.mark.parametrize("operation", ["gated_delta", "gated_delta_chunk"])
def test_support_of_the_gated_delta_rule(operation):
    family = KEYS[operation].partition("/")[0]
    for options in ({}, {"q_dtype": "torch.float32", "state_dtype": "bf16", "head_dim_v": 16, "state_layout": "kv"}):
        assert flashport.supports(operation, target="cpu", **options)
        assert flashport.which_kernel(operation, target="cpu", **options).startswith(family)
    for options, text in (
        ({"head_dim_k": 264}, "head_dim_k must be a multiple of 8 from 16 to 256, got 264"),
        ({"head_dim_v": 0}, "head_dim_v must be a multiple of 8 from 16 to 256, got 0"),
        ({"q_dtype": "int64"}, "q must be float16, bfloat16 or float32, got int64"),
        ({"state_dtype": "int32"}, "state must be float32, bfloat16 or float16, got int32"),
        ({"target": "vax"}, 'no target "vax" is compiled into this installation'),
    ):
        refused = flashport.supports(operation, **{"target": "cpu", **options})
        assert not refused
        assert refused.reason.startswith(text)
        with pytest.raises(NotImplementedError, match=re.escape(refused.reason)):
            flashport.which_kernel(operation, **{"target": "cpu", **options})
    for options, text in (
        ({"state_layout": "hv"}, 'state_layout must be "vk" or "kv", got "hv"'),
        ({"gate": "kda"}, 'gate must be "head", "key" or "any", got "kda"'),
        ({"state_dtype": "int4"}, "state_dtype must be one of"),
    ):
        with pytest.raises(ValueError, match=text):
            flashport.supports(operation, target="cpu", **options)


def test_support_of_the_gates_of_the_gated_delta_rule():
    for gate in ("head", "key", "any"):
        key = flashport.which_kernel("gated_delta", gate=gate, target="cpu")
        assert f"/gate={gate}/" in key
    assert flashport.supports("gated_delta", state_dtype="bfloat16", gate="any", target="cpu")
    refused = flashport.supports("gated_delta_chunk", gate="key", target="cpu")
    assert refused.reason == "gated_delta_chunk takes one gate for each head; gated_delta_update takes others"
    with pytest.raises(ValueError, match=f'^supports: operation must be {OPERATIONS}, got "update"$'):
        flashport.supports("update")


def test_every_kernel_key_is_unique():
    for backend in flashport.backends():
        for target in backend.targets:
            keys = _core.kernel_keys(target)
            assert keys
            assert len(set(keys)) == len(keys)
            own = [key for key in keys if key.endswith("/" + target)]
            assert own == keys[: len(own)]
            if target not in BASES:
                assert own == keys
                continue
            base = _core.kernel_keys(BASES[target])
            assert keys[len(own) :] == base
            assert {key.partition("/")[0] for key in own} == {"attention" if target == "cpu_amx" else "decode"}


def codes(kv: str, dtype: str) -> dict[str, str]:
    """The options of decode over a cache of one format."""
    return {"q_dtype": dtype, "k_format": kv, "v_format": kv}


@pytest.mark.parametrize(
    ("target", "operation", "options", "key"),
    [
        (target, "decode", codes(kv, dtype), key)
        for target in ("cpu_vnni", "cpu_amx")
        for kv, dtype, key in (
            ("q8_0", "float16", "decode/fp16/kv=q8_0/hd128/r16/cpu_vnni"),
            ("q4_0", "bfloat16", "decode/fp16/kv=q4_0/hd128/r16/cpu_vnni"),
            ("q8_0", "float32", "decode/fp32/kv=q8_0/hd128/r16/cpu_avx512"),  # which stays what it is
            ("fp8_e4m3", "float16", "decode/fp32/kv=fp8_e4m3/hd128/r16/cpu_avx512"),
        )
    ]
    + [
        ("cpu_amx", "attention", {"dtype": "bfloat16"}, "attention/bf16/hd512/plain/cpu_amx"),
        ("cpu_amx", "attention", {"dtype": "float16"}, "attention/fp32/hd512/plain/cpu_avx512"),
        ("cpu_amx", "attention", {"dtype": "float32"}, "attention/fp32/hd512/plain/cpu_avx512"),
    ],
)
def test_targets_run_the_kernels_of_their_base_but_for_a_few(target, operation, options, key):
    """Only where it is compiled: on x86."""
    if target in {target for backend in flashport.backends() for target in backend.targets}:
        assert flashport.which_kernel(operation, head_dim=128, target=target, **options) == key
