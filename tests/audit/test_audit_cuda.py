"""What is red in a kernel of sm90a whatever the table says, and with --update, on listings of cuobjdump."""

from __future__ import annotations

import sys
from pathlib import Path

import audit_cuda
import pytest

CUOBJDUMP = """#!/bin/sh
case "$1" in
--dump-resource-usage) cat <<'END'
{usage}
END
;;
-sass) cat <<'END'
{code}
END
;;
esac
"""
HGMMA = "        /*0010*/ HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ; /* 0x0 */"
LOAD = "        /*0020*/ LDG.E.128 R4, desc[UR6][R4.64] ; /* 0x0 */"


def tools(folder: Path, name: str, stack: int, lines: list[str]) -> Path:
    """A folder of a cuobjdump that knows one kernel, and of an nvcc."""
    usage = f"  Function flashport_sm90a_{name}:\n    REG:168 STACK:{stack} SHARED:1024 LOCAL:0 CONSTANT[0]:900"
    code = "\n".join([f"\t\tFunction : flashport_sm90a_{name}", *lines, "        /*0030*/ EXIT ; /* 0x0 */"])
    for tool, text in (
        ("cuobjdump", CUOBJDUMP.format(usage=usage, code=code)),
        ("nvcc", "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"),
    ):
        (folder / tool).write_text(text)
        (folder / tool).chmod(0o755)
    return folder


def errors(folder: Path, name: str, stack: int = 0, lines: list[str] | None = None) -> list[str]:
    tools(folder, name, stack, [HGMMA, LOAD] if lines is None else lines)
    rows, found, _ = audit_cuda.audit("sm90a", folder / "library.so", folder / "cuobjdump")
    assert list(rows) == [name]
    return found


@pytest.mark.parametrize("name", ["attention_bf16_128x128_plain", "attention_fp16_128x128_plain_scaled"])
def test_plain_attention_never_spills(tmp_path, name):
    assert errors(tmp_path, name) == []
    assert errors(tmp_path, name, 8) == [f"{name}: a plain kernel of attention spills 8 bytes"]


@pytest.mark.parametrize("name", ["attention_bf16_128x128_any", "decode_bf16_bf16_64x64_r16", "append_rotary"])
def test_spills_of_other_kernels_are_the_tables_matter(tmp_path, name):
    assert errors(tmp_path, name, 160) == []


@pytest.mark.parametrize(
    "name", ["attention_bf16_64x64_plain", "attention_fp16_256x256_any", "decode_append_bf16_bf16_64x64_r8"]
)
def test_kernels_that_multiply_have_tensor_core_instructions(tmp_path, name):
    assert errors(tmp_path, name, lines=[LOAD]) == [f"{name}: no tensor core instructions"]
    assert errors(tmp_path, name, lines=[HGMMA]) == [f"{name}: no loads of 16 bytes or more"]


def test_merging_pieces_of_attention_multiplies_nothing(tmp_path):
    assert errors(tmp_path, "attention_merge", lines=[]) == []


@pytest.mark.parametrize(("stack", "status"), [(0, 0), (8, 1)])
def test_update_admits_no_spill_of_plain_attention(tmp_path, monkeypatch, capsys, stack, status):
    folder = tools(tmp_path, "attention_bf16_128x128_plain", stack, [HGMMA, LOAD])
    monkeypatch.setattr(audit_cuda, "__file__", str(tmp_path / "audit_cuda.py"))  # beside which the tables lie
    monkeypatch.setattr(sys, "argv", ["audit_cuda.py", "--update", "--tools", str(folder), "sm90a", "library.so"])
    assert audit_cuda.main() == status
    assert (tmp_path / "cuda_resources/sm90a.txt").exists()
    assert ("plain kernel of attention spills" in capsys.readouterr().out) == bool(status)
