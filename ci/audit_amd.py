#!/usr/bin/env python3
"""Audits AMD code objects: what each kernel costs, and that the instructions meant are in it.

For every kernel of the code objects given: VGPRs (arch and accumulation together), AGPRs, SGPRs, SGPRs that are kept in
lanes of a VGPR, LDS bytes, blocks that one multiprocessor holds (a CU; on RDNA a work-group processor), MFMA or WMMA
instructions, 16-byte global loads, and signals between blocks with their fences (ci/memory_order.py), held against
ci/amd_resources/<target>.txt. Spills to memory and scratch are always red, as is a kernel of decode or of the
chunked gated delta rule without matrix instructions, or one of decode or the gated delta rule without 16-byte loads.
Fewer signals, releases or acquires than the table has, or more bare signals, are red with any compiler.

usage: ci/audit_amd.py [--update] [--tools FOLDER] TARGET FOLDER_OF_CODE_OBJECTS
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from memory_order import amd_instructions, amd_order
from resource_table import ORDER_COLUMNS, Column, compare, finish, write_table

COLUMNS = [
    Column("vgpr", 1),
    Column("agpr", 0),
    Column("sgpr", 0),
    Column("sgpr_spills", 1),
    Column("lds", 1),
    Column("blocks", -1),
    Column("matrix", -1),
    Column("loads128", -1),
    *ORDER_COLUMNS,
]

# Registers of a SIMD lane, their allocation granule, most waves of a SIMD, SIMDs and LDS bytes of a multiprocessor, LDS
# bytes that a block can have.
# gfx11: the smaller of the register files that the generic target covers; a work-group processor has two CUs.
MACHINES = {
    "gfx942": {"vgprs": 512, "granule": 8, "waves": 8, "simds": 4, "lds": 65536, "block_lds": 65536},
    "gfx950": {"vgprs": 512, "granule": 8, "waves": 8, "simds": 4, "lds": 163840, "block_lds": 163840},
    "gfx11": {"vgprs": 1024, "granule": 16, "waves": 16, "simds": 4, "lds": 131072, "block_lds": 65536},
}

# Kernels that multiply matrices.
MULTIPLIES = ("decode_bf16", "decode_fp16", "gated_delta_prepare", "gated_delta_chunk")
MATRIX = re.compile(r"v_(mfma|wmma)_")
LOADS_128 = re.compile(r"(global|buffer)_load_(lds_)?(dwordx4|b128)")


def find_tool(name: str, folder: str | None) -> str:
    """Path of an LLVM binary utility: in `folder`, on PATH, or in a ROCm installation."""
    places = [folder] if folder else [None, "/opt/rocm/llvm/bin"]
    for place in places:
        tool = shutil.which(name, path=place)
        if tool:
            return tool
    sys.exit(f"audit_amd.py: no {name}; name its folder with --tools")


def kernel_notes(text: str) -> list[dict[str, str]]:
    """Scalar fields of each kernel in the metadata that `llvm-readelf --notes` prints."""
    kernels: list[dict[str, str]] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("amdhsa."):
            inside = line.startswith("amdhsa.kernels:")
        elif inside and line.startswith("  - ."):
            kernels.append({})
        if inside and (match := re.match(r"  [- ] \.(\w+):\s*(\S+)\s*$", line)):
            kernels[-1][match[1]] = match[2]
    return kernels


def figures_of_code(target: str, listing: str) -> tuple[dict[str, dict[str, int]], dict[str, list[str]], list[str]]:
    """Per symbol of a disassembly: matrix instructions, 16-byte loads, memory order; why signals are bare; errors."""
    figures: dict[str, dict[str, int]] = {}
    findings: dict[str, list[str]] = {}
    errors: list[str] = []
    for symbol, instructions in amd_instructions(listing).items():
        order = amd_order(target, instructions)
        figures[symbol] = {
            "matrix": sum(bool(MATRIX.match(instruction.name)) for instruction in instructions),
            "loads128": sum(bool(LOADS_128.match(instruction.name)) for instruction in instructions),
            **order.figures(),
        }
        findings[symbol] = list(order.findings.values())
        if order.error:
            errors.append(f"{symbol}: {order.error}")
    return figures, findings, errors


def blocks_per_multiprocessor(machine: dict[str, int], vgprs: int, lds: int, waves_per_block: int) -> int:
    """Blocks that registers, wave slots and LDS leave room for."""
    granule = machine["granule"]
    allocated = max(granule, (vgprs + granule - 1) // granule * granule)
    waves = min(machine["waves"], machine["vgprs"] // allocated) * machine["simds"]
    blocks = waves // waves_per_block
    return min(blocks, machine["lds"] // lds) if lds else blocks


def audit(target: str, folder: Path, tools: str | None) -> tuple[dict[str, dict[str, int]], list[str], list[str]]:
    """Figures of every kernel, what is wrong whatever the table says, and why signals are bare."""
    readelf, objdump = find_tool("llvm-readelf", tools), find_tool("llvm-objdump", tools)
    machine = MACHINES[target]
    rows: dict[str, dict[str, int]] = {}
    found_in: dict[str, str] = {}
    errors: list[str] = []
    notes: list[str] = []
    for code_object in sorted(folder.glob("*.co")):
        metadata = subprocess.run([readelf, "--notes", code_object], check=True, capture_output=True, text=True).stdout
        code = subprocess.run([objdump, "-d", code_object], check=True, capture_output=True, text=True).stdout
        counts, findings, unfollowed = figures_of_code(target, code)
        errors += unfollowed
        for kernel in kernel_notes(metadata):
            name = kernel["name"].removeprefix(f"flashport_{target}_")
            if name in found_in:
                errors.append(f"{name}: in {found_in[name]} and in {code_object.name}; remove what an older build left")
            found_in[name] = code_object.name
            waves = int(kernel["max_flat_workgroup_size"]) // int(kernel["wavefront_size"])
            vgprs, lds = int(kernel["vgpr_count"]), int(kernel["group_segment_fixed_size"])
            rows[name] = {
                "vgpr": vgprs,
                "agpr": int(kernel.get("agpr_count", 0)),
                "sgpr": int(kernel["sgpr_count"]),
                "sgpr_spills": int(kernel["sgpr_spill_count"]),
                "lds": lds,
                "blocks": blocks_per_multiprocessor(machine, vgprs, lds, waves),
                **counts[kernel["name"]],
            }
            notes += [f"{name}: {finding}" for finding in findings[kernel["name"]]]
            for field, what in (
                ("vgpr_spill_count", "spilled VGPRs"),
                ("private_segment_fixed_size", "bytes of scratch"),
            ):
                if int(kernel[field]):
                    errors.append(f"{name}: {kernel[field]} {what}")
            if lds > machine["block_lds"]:
                errors.append(f"{name}: {lds} bytes of LDS, a block can have {machine['block_lds']}")
            if name.startswith(MULTIPLIES) and not rows[name]["matrix"]:
                errors.append(f"{name}: no matrix instructions")
            if name.startswith((*MULTIPLIES, "gated_delta")) and not rows[name]["loads128"]:
                errors.append(f"{name}: no 16-byte loads")
    if not rows:
        errors.append(f"no kernels in {folder}")
    return rows, errors, notes


def compiler_version(code_object: Path, tools: str | None) -> str:
    """The producer that the compiler left in a code object's comment section."""
    readelf = find_tool("llvm-readelf", tools)
    text = subprocess.run([readelf, "-p", ".comment", code_object], check=True, capture_output=True, text=True).stdout
    match = re.search(r"clang version (\S+)", text)
    return f"clang {match[1]}" if match else "unknown"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=sorted(MACHINES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--update", action="store_true", help="write the table from this build")
    parser.add_argument("--tools", help="folder of llvm-readelf and llvm-objdump")
    arguments = parser.parse_args()
    rows, errors, notes = audit(arguments.target, arguments.folder, arguments.tools)
    if not rows:
        sys.exit(f"audit_amd.py: {errors[0]}")
    compiler = compiler_version(next(arguments.folder.glob("*.co")), arguments.tools)
    table = Path(__file__).parent / "amd_resources" / f"{arguments.target}.txt"
    if arguments.update:
        table.parent.mkdir(exist_ok=True)
        write_table(table, f"Kernels of {arguments.target}, as ci/audit_amd.py reads them.", compiler, COLUMNS, rows)
    report = compare(table, compiler, COLUMNS, rows)
    report.errors[:0] = errors
    report.notes += notes
    return 0 if finish(f"audit of {arguments.target}", report, COLUMNS, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
