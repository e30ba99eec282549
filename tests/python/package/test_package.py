"""Stubs, signatures and types agree with what is there, and importing the package brings in little."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import flashport
from flashport import _core

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
        "_explain",
        "_flash_attn_3",
        "_flashinfer_checks",
        "_mixed",
        "_mixed_cache",
        "_quantize",
        "_rewording",
        "_sglang",
        "_shim_errors",
        "_shim_finder",
        "_shims",
        "_transformers_attention",
        "flash_attn_3",  # imports torch, as what it stands in for does
    }
    assert flat == {
        "arrays", "cascade", "decode", "devices", "fla", "flashinfer", "gated_delta", "lightllm", "sglang",
        "transformers", "typing", "vllm",
    }  # fmt: skip
    code = f"""
import sys
{"".join(f"import flashport.{name}; " for name in [*sorted(flat), "ggml"])}
rooms = {{name for name in sys.modules if name.startswith("flashport.")}} | {{"torch", "numpy"}} & set(sys.modules)
print(*sorted(rooms))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    rooms = {
        "flashport._attention",
        "flashport._core",
        "flashport._explain",
        "flashport._flashinfer_checks",
        "flashport._mixed",
        "flashport._mixed_cache",
        "flashport._quantize",
        "flashport._rewording",
        "flashport._sglang",
        "flashport._shim_errors",
        "flashport._shims",
        "flashport._transformers_attention",
        "flashport.ggml",
        "flashport.ggml._layout",
        "flashport.ggml._operators",
        "flashport.ggml._tensor",
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
