"""Stubs, docstrings and types agree with what is there; the self-check's own parts are right."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import flashport
from flashport import _core
from flashport.testing import numerics, oracle, selfcheck
from flashport.typing import CacheFormat, Operation

PACKAGE = Path(flashport.__file__).parent


def test_the_stub_names_what_the_module_has():
    tree = ast.parse((PACKAGE / "_core.pyi").read_text())
    stub = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    there = {name for name in dir(_core) if not name.startswith("_")}
    assert stub == there
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            members = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            known = {name for name in vars(getattr(_core, node.name)) if not name.startswith("_")}
            assert {name for name in members if not name.startswith("_")} == known
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("name", sorted({*flashport.__all__} & {*vars(_core)} - {"DeviceArray"}))
def test_the_stub_has_the_arguments_of_the_package_in_their_order(name):
    tree = ast.parse((PACKAGE / "_core.pyi").read_text())
    node = next(node for node in tree.body if getattr(node, "name", "") == name)
    own = list(inspect.signature(getattr(flashport, name)).parameters)
    assert [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)] == own


@pytest.mark.parametrize(
    ("name", "module", "options"),
    [("flash_decode", "decode.py", "_DecodeOptions"), ("attention", "_attention.py", "_AttentionOptions")],
)
def test_type_checkers_see_every_argument(name, module, options):
    tree = ast.parse((PACKAGE / module).read_text())
    options = next(node for node in ast.walk(tree) if getattr(node, "name", "") == options)
    overloaded = next(node for node in tree.body if getattr(node, "name", "") == name)
    seen = [argument.arg for argument in (*overloaded.args.args, *overloaded.args.kwonlyargs)]
    seen += [node.target.id for node in options.body if isinstance(node, ast.AnnAssign)]
    assert sorted(seen) == sorted(inspect.signature(getattr(flashport, name)).parameters)


def test_rooms_that_are_not_public_stay_out_of_the_interface():
    """Public modules lie flat, and importing them brings in neither torch, NumPy nor what judges and times."""
    flat = {path.stem for path in PACKAGE.glob("*.py")} - {
        "__init__",
        "__main__",
        "_attention",
        "_flash_attn_3",
        "_sglang",
        "_shim_finder",
        "_shims",
        "_transformers_attention",
        "flash_attn_3",  # imports torch, as what it stands in for does
    }
    assert flat == {"arrays", "decode", "devices", "fla", "gated_delta", "lightllm", "sglang", "transformers", "typing"}
    code = f"""
import sys
{"".join(f"import flashport.{name}; " for name in sorted(flat))}
rooms = {{name for name in sys.modules if name.startswith("flashport.")}} | {{"torch", "numpy"}} & set(sys.modules)
print(*sorted(rooms))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    rooms = {
        "flashport._attention",
        "flashport._core",
        "flashport._sglang",
        "flashport._shims",
        "flashport._transformers_attention",
        "flashport.torch",
        "flashport.torch.gradients",
        "flashport.torch.tracing",
    }
    assert set(found) == rooms | {f"flashport.{name}" for name in flat}


def test_signatures_match_the_specification():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(flashport.flash_decode_stage1)[:10] == [
        "q", "k", "v", "Req_to_tokens", "B_req_idx", "B_Seqlen", "max_len_in_batch", "mid_out", "mid_out_logsumexp",
        "block_seq",
    ]  # fmt: skip
    assert names(flashport.flash_decode_stage2)[:5] == ["mid_out", "mid_out_logexpsum", "B_Seqlen", "Out", "block_seq"]
    assert names(flashport.num_splits_heuristic) == ["batch_nheads_mblocks", "num_SMs", "num_n_blocks", "max_splits"]
    assert names(flashport.merge_state)[:4] == ["o_a", "lse_a", "o_b", "lse_b"]
    assert names(flashport.append_kv)[:5] == ["k", "v", "k_cache", "v_cache", "positions"]


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
        ({"k_format": np.float16}, "a cache of fp16 goes with q of the same type, got bfloat16"),
        ({"v_format": "fp32"}, "a cache of fp32 goes with q of the same type, got bfloat16"),
        (
            {"k_format": "q8_0"},
            "cpu has no kernel for k=q8_0 with v=bf16; it has fp32, bf16, fp16, fp8_e4m3, q8_0",
        ),
        (
            {"k_format": "fp8_e4m3", "v_format": "q8_0"},
            "cpu has no kernel for k=fp8_e4m3 with v=q8_0; it has fp32, bf16, fp16, fp8_e4m3, q8_0",
        ),
        ({"v_format": "q8_0", "head_dim_v": 80}, "q8_0 needs a head_dim_v that is a multiple of 32, got 80"),
    ],
)
def test_support_says_no_to(options, reason):
    refused = flashport.supports("decode", target="cpu", **options)
    assert not refused
    assert refused.reason == reason
    with pytest.raises(NotImplementedError, match=re.escape("which_kernel: " + reason)):
        flashport.which_kernel("decode", target="cpu", **options)


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


FORMATS = '"fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e4m3fnuz" or "q8_0"'


# Targets that have all kernels of another besides some of their own.
BASES = {"cpu_amx": "cpu_avx512"}
OWN = {("attention", "cpu_amx"): "attention/bf16/hd512/plain/cpu_amx"}  # what a target has beside its base


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
        ({"v_format": "fp8_e5m2"}, ValueError, f'v_format must be {FORMATS}, got "fp8_e5m2"'),
        ({"v_format": np.uint8}, ValueError, f'v_format must be {FORMATS}, got "uint8"'),
        ({"kv": "bf16"}, TypeError, '"decode" has no option kv; it has q_dtype, k_format, v_format, head_dim, '),
        ({"target": 5}, TypeError, "target must be a str, got int"),
    ],
)
def test_support_is_not_asked_so(function, options, error, text):
    with pytest.raises(error, match=rf"^{function.__name__}: {re.escape(text)}"):
        function("decode", **{"target": "cpu", **options})


OPERATIONS = '"decode", "decode_stage2", "append", "merge", "gated_delta", "gated_delta_chunk" or "attention"'
KEYS = {
    "decode": "decode/fp32/kv=bf16/hd128/r16",
    "decode_stage2": "decode_stage2",
    "append": "append_kv",
    "merge": "merge_states",
    "gated_delta": "gated_delta_update/state=fp32/vk/gate=head/k256",
    "gated_delta_chunk": "gated_delta_chunk/fp32/k256",
    "attention": "attention/fp32/hd512/plain",
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
    wanted = OWN.get((operation, target), f"{key}/{BASES.get(target, target)}")
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
        ("append", {"k_format": "q8_0"}, "no kernel writes k=q8_0 with v=bf16; K and V must have one format"),
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
        flashport.supports("decode", k_format="q4_0")
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
            assert {key.partition("/")[0] for key in own} == {"attention"}


def test_cpu_amx_computes_bf16_on_tiles_and_all_else_as_its_base():
    """Only where it is compiled: on x86."""
    targets = [target for backend in flashport.backends() for target in backend.targets]
    kernels = {
        ("attention", "bfloat16"): "attention/bf16/hd512/plain/cpu_amx",
        ("attention", "float16"): "attention/fp32/hd512/plain/cpu_avx512",
        ("attention", "float32"): "attention/fp32/hd512/plain/cpu_avx512",
    }
    for (operation, dtype), key in kernels.items() if "cpu_amx" in targets else ():
        assert flashport.which_kernel(operation, dtype=dtype, target="cpu_amx") == key


@pytest.mark.parametrize(
    ("kv", "dtype", "largest"),
    [
        ("bf16", ml_dtypes.bfloat16, 1e30),
        ("fp8_e4m3", ml_dtypes.float8_e4m3fn, 448),
        ("fp8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz, 240),
    ],
)
def test_codecs(kv, dtype, largest):
    rng = np.random.default_rng(0)
    values = np.concatenate([scale * rng.standard_normal(4000) for scale in (1e-3, 1, 50)]).astype(np.float32)
    codes = np.arange(1 << 8 * np.dtype(dtype).itemsize).astype(numerics.CARRIER[kv])
    exact = codes.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(numerics.decode(codes, kv), exact)
    finite = np.sort(exact[np.isfinite(exact)])
    with np.errstate(over="ignore"):
        middles = (finite[:-1] + finite[1:]) / 2  # ties go to even
    values = np.clip(np.concatenate([values, finite, middles]), -largest, largest)
    np.testing.assert_array_equal(numerics.encode(values, kv), values.astype(dtype).view(codes.dtype))
    assert np.isnan(numerics.decode(numerics.nan_bits((3,), kv), kv)).all()


def test_q8_0_codec():
    values = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    values[2, 32:64] = 0
    bits = numerics.encode(values, "q8_0")
    assert bits.shape == (5, 102)
    largest = np.abs(values).reshape(5, 3, 32).max(-1).repeat(32, axis=-1)
    assert (np.abs(numerics.decode(bits, "q8_0") - values) <= largest / 127 * 0.51 + 1e-7).all()


def test_oracle_by_hand():
    """One key: its value; two equal keys: the mean; a sink takes a third; the window hides."""
    k = np.zeros((2, 1, 4), np.float32)
    v = np.stack([np.zeros((1, 4)), np.full((1, 4), 6.0)]).astype(np.float32)
    q = np.ones((1, 2, 4), np.float32)
    out, lse = oracle.attend(oracle.Request(q, k, v))
    np.testing.assert_allclose(out, 3)
    np.testing.assert_allclose(lse, np.log(2))
    out, lse = oracle.attend(oracle.Request(q, k, v, sinks=np.zeros(2, np.float32)))
    np.testing.assert_allclose(out, 2)
    np.testing.assert_allclose(lse, np.log(3))
    out, _ = oracle.attend(oracle.Request(q, k, v, window=(0, 0)))
    np.testing.assert_allclose(out, 6)
    out, lse = oracle.attend(oracle.Request(q, k[:0], v[:0]))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    tree = np.array([0b01, 0b11], np.uint32)
    out, _ = oracle.attend(oracle.Request(np.ones((2, 1, 4), np.float32), k, v, tree=tree))
    np.testing.assert_allclose(out[:, 0, 0], [0, 3])


def test_a_wrong_result_is_called_wrong():
    truth = np.ones((2, 3))
    plain = truth + 0.01
    assert not oracle.compare(truth + 0.0149, truth, plain).problem
    assert oracle.compare(truth + 0.02, truth, plain).problem
    spoiled = truth.copy()
    spoiled[0, 0] = np.nan
    assert oracle.compare(spoiled, truth, plain).problem


CHECKS = list(selfcheck.checks("cpu", "cpu", ("emulator",)))


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_selfcheck(check):
    outcome = check.run()
    if outcome.status == "unsupported":
        pytest.skip(outcome.detail)
    assert outcome.status == "passed", outcome.detail


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
            "q_len, batch, num_kv_heads, max_kv_len, num_splits, target",
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
            "causal, softcap, alibi, bias, dropout, batch, num_q_heads, num_kv_heads, q_len, kv_len, num_splits, "
            "target",
        ),
    ],
)
def test_a_schedule_of_attention_is_not_explained_so(options, error, text):
    with pytest.raises(error, match=rf"^explain: {re.escape(text)}$"):
        flashport.explain("attention", **{"target": "cpu", **options})
