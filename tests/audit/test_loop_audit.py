"""The audit of attention's hot loops on small listings: which loops it finds, what it counts, and what is red."""

from __future__ import annotations

import sys
from pathlib import Path

import loop_audit
import pytest

WIDE = "v_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[20:23], v[0:15]"  # 32 clocks
NARROW = "v_mfma_f32_32x32x8_bf16_1k v[0:15], v[16:17], v[18:19], v[0:15]"  # 32 clocks
WMMA = "v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7]"  # 32 clocks
READ = "ds_read_b64_tr_b16 v[16:17], v3"
NAME = "attention_bf16_128x128_plain"


def loop(*lines: str) -> list[str]:
    return [*lines, f"s_cbranch_scc1 -{len(lines) + 1}"]


def listing(target: str, lines: list[str], name: str = NAME) -> str:
    """A disassembly of one kernel, whose instructions have four bytes each; a branch has its offset in words."""
    text = [f"0000000000001000 <flashport_{target}_{name}>:"]
    for i, line in enumerate(lines):
        offset = int(line.split()[1]) & 0xFFFF if line.startswith("s_cbranch") else 0
        text.append(f"\t{line:50} // {0x1000 + 4 * i:012X}: {0xBF850000 + offset:08X}")
    return "\n".join(text)


def kernel(product: str, vector: int, causal: int, *others: str) -> list[str]:
    """Two products in each of three loops: with most masks, with none, and with those after a query."""
    return [
        "s_nop 0",
        *loop(product, product, *["v_add_f32_e32 v1, v1, v2"] * (causal + 9), *others),
        *loop(product, product, *["v_add_f32_e32 v1, v1, v2"] * vector, *others),
        *loop(product, product, *["v_add_f32_e32 v1, v1, v2"] * causal, *others),
        *loop("v_add_f32_e32 v1, v1, v2"),
        product,
        "s_endpgm",
    ]


def audit(target: str, lines: list[str], name: str = NAME) -> tuple[dict[str, int], list[str]]:
    rows, errors = loop_audit.audit(target, [listing(target, lines, name)])
    assert list(rows) == [name]
    return rows[name], errors


def test_figures_of_the_loops_without_masks_and_of_causal_ones():
    lines = kernel(WIDE, 8, 16, READ, "s_barrier", "s_waitcnt vmcnt(0) lgkmcnt(0)", "s_waitcnt vmcnt(1) lgkmcnt(0)")
    row, errors = audit("gfx950", lines)
    assert row == {
        "matrix": 64,
        "vector": 50,  # 8 x 4 clocks for 64
        "causal": 100,
        "lds": 8 * 64 * 64 // 4,  # two products of 32x32x16 are four of 32x32x8
        "transposed": 1,
        "wide": 2,
        "barriers": 1,
        "vm_waits": 1,
        "lds_waits": 2,
    }
    assert errors == []


def test_what_costs_more_than_a_vector_instruction():
    rows, _ = audit("gfx942", loop(NARROW, "v_exp_f32_e32 v1, v2", "v_mul_f32_e32 v1, v2, v3", "s_mov_b32 s1, s2"))
    assert rows["vector"] == round(100 * (16 + 4) / 32)
    rows, _ = audit("gfx11", loop(WMMA, "v_exp_f32_e32 v1, v2", "v_mul_f32_e32 v1, v2, v3", "ds_load_b128 v[0:3], v4"))
    assert rows["vector"] == round(100 * (4 + 1) / 32)
    assert rows["lds"] == 16 * 32 * 64 * 2  # 64 products of 32x32x8 are 128 of 16x16x16


def test_the_innermost_loop_counts():
    inner = loop(NARROW, NARROW, "v_add_f32_e32 v1, v1, v2")
    lines = ["v_mov_b32_e32 v1, v2", *inner, NARROW, "s_barrier"]
    row, _ = audit("gfx942", [*lines, f"s_cbranch_scc1 -{len(lines) + 1}", "s_endpgm"])
    assert (row["matrix"], row["vector"], row["barriers"]) == (64, round(100 * 4 / 64), 0)


@pytest.mark.parametrize(("vector", "causal", "text"), [(16, 19, ""), (17, 19, "1.06"), (16, 20, "causal, 1.25")])
def test_bars_of_gfx950(vector, causal, text):
    # Two products are 64 clocks, a vector instruction 4: quotients of 1.0, 1.0625, 1.1875 and 1.25.
    most = "at most 1.2" if "causal" in text else "at most 1.0"
    expected = [f"{NAME}: {text} vector clocks for one of the matrix unit, {most}"] if text else []
    assert audit("gfx950", kernel(WIDE, vector, causal, READ))[1] == expected
    # They are those of one kernel.
    for name in ("attention_bf16_64x64_plain", "attention_bf16_128x128_plain_fp8", "attention_fp16_128x128_plain"):
        assert audit("gfx950", kernel(WIDE, vector, causal, READ), name)[1] == []


@pytest.mark.parametrize(
    ("target", "lines", "text"),
    [
        ("gfx942", kernel(NARROW, 14, 99), ""),  # 0.875
        ("gfx942", kernel(NARROW, 15, 15), "0.94 vector clocks for one of the matrix unit, at most 0.88"),
        ("gfx942", kernel(NARROW, 1, 1, *["ds_read_b128 v[0:3], v4"] * 1), ""),  # 32 KB for 64 products
        ("gfx942", kernel(NARROW, 1, 1, *["ds_read_b128 v[0:3], v4"] * 2), "64.0 KB from LDS, at most 32"),
        ("gfx11", kernel(WMMA, 78, 99), ""),
        ("gfx11", kernel(WMMA, 79, 99), "the matrix unit has 0.45 of the clocks, at least 0.45"),
    ],
)
def test_bars_of_other_targets(target, lines, text):
    assert audit(target, lines)[1] == ([f"{NAME}: {text}"] if text else [])


@pytest.mark.parametrize("name", [NAME, "attention_fp16_64x64_plain_bytes"])
def test_gfx950_transposes_and_has_wide_shapes_in_every_plain_kernel(name):
    assert audit("gfx950", kernel(WIDE, 1, 1, "ds_read_b64 v[16:17], v3"), name)[1] == [
        f"{name}: no reads from LDS that transpose (ds_read_b64_tr_b16)"
    ]
    assert audit("gfx950", kernel(NARROW, 1, 1, READ), name)[1] == [
        f"{name}: 2 of 2 matrix instructions are not of a wide shape"
    ]


def test_other_kernels_are_left_out_and_a_plain_one_without_products_is_red():
    text = listing("gfx942", kernel(NARROW, 1, 1), "attention_bf16_128x128_any")
    assert loop_audit.audit("gfx942", [text]) == ({}, [])
    text = listing("gfx942", loop("v_add_f32_e32 v1, v1, v2"))
    assert loop_audit.audit("gfx942", [text]) == ({}, [f"{NAME}: no loop with matrix instructions"])


def test_the_table(tmp_path, monkeypatch, capsys):
    """--update writes it; later builds are held against it, and bars hold whatever it says."""
    code = tmp_path / "attention_bf16_128.co"
    for tool, text in (
        ("llvm-objdump", f"#!/bin/sh\ncat {code}\n"),
        ("llvm-readelf", "#!/bin/sh\necho 'clang version 22.1.8'\n"),
    ):
        (tmp_path / tool).write_text(text)
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setattr(loop_audit, "__file__", str(tmp_path / "loop_audit.py"))  # beside which the tables lie

    def run(lines: list[str], *options: str) -> tuple[int, list[str]]:
        code.write_text(listing("gfx950", lines))
        monkeypatch.setattr(sys, "argv", ["loop_audit.py", *options, "--tools", str(tmp_path), "gfx950", str(tmp_path)])
        status = loop_audit.main()
        return status, [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]

    wait = "s_waitcnt vmcnt(0)"
    assert run(kernel(WIDE, 8, 16, READ))[0] == 1  # no table
    assert run(kernel(WIDE, 8, 16, READ), "--update") == (0, [])
    assert "compiler: clang 22.1.8" in Path(tmp_path / "amd_loops/gfx950.txt").read_text()
    assert run(kernel(WIDE, 8, 16, READ)) == (0, [])
    assert run(kernel(WIDE, 9, 17, READ, wait)) == (
        1,
        [
            f"error: {NAME}: vector is 56, the table says 50",
            f"error: {NAME}: causal is 106, the table says 100",
            f"error: {NAME}: vm_waits is 1, the table says 0",
        ],
    )
    assert run(kernel(WIDE, 7, 15, READ)) == (0, [])
    status, errors = run(kernel(WIDE, 8, 20, READ), "--update")
    assert status == 1
    assert len(errors) == 1
    assert "causal, 1.25" in errors[0]
