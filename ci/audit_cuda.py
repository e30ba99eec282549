#!/usr/bin/env python3
"""Audits the kernels inside libflashport_cuda.so: what each costs, and that the instructions meant are in it.

For every kernel of a target: registers, spilled bytes, static shared memory, tensor core instructions (HMMA), loads
from global memory of 16 bytes or more (LDG, LDGSTS, bulk copies), and signals between blocks with their fences
(ci/memory_order.py), held against ci/cuda_resources/<target>.txt: a kernel that begins to spill, or spills more, is
red. Fewer signals, releases or acquires than the table has, or more bare signals, are red with any compiler. Red
whatever the table says is
- a kernel of attention, of decode or of the chunked gated delta rule without tensor core instructions,
- a kernel of these, or of the gated delta rule's update, without such loads,
- a plain kernel of attention that spills,
- a memory descriptor in an odd uniform register, which no card executes: nvcc 13.0 was seen to write that.

usage: ci/audit_cuda.py [--update] [--tools FOLDER] TARGET LIBRARY
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from memory_order import Instruction, sass_instruction, sass_order
from resource_table import ORDER_COLUMNS, Column, compare, finish, write_table

COLUMNS = [
    Column("registers", 1),
    Column("spilled", 1),
    Column("shared", 1),
    Column("matrix", -1),
    Column("loads128", -1),
    *ORDER_COLUMNS,
]

PATTERNS = {
    "matrix": re.compile(r"HMMA|HGMMA"),
    "loads128": re.compile(r"LDG(STS)?\.\S*128\b|UBLKCP"),
}
# Kernels that multiply matrices.
MULTIPLIES = (
    "attention_bf16",
    "attention_fp16",
    "decode_bf16",
    "decode_fp16",
    "decode_append_bf16",
    "decode_append_fp16",
    "decode_plain_bf16",
    "decode_plain_fp16",
    "gated_delta_prepare",
    "gated_delta_chunk",
)
NEVER_SPILLS = re.compile(r"attention_\w+_plain(_|$)")
ODD_DESCRIPTOR = re.compile(r"desc\[UR\d*[13579]\]")


def run(tool: Path, *arguments: str | Path) -> str:
    """Output of a toolkit program, which finds its helpers in its own folder."""
    environment = os.environ | {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True, env=environment).stdout


def audit(target: str, library: Path, cuobjdump: Path) -> tuple[dict[str, dict[str, int]], list[str], list[str]]:
    """Figures of every kernel, what is wrong whatever the table says, and why signals are bare."""
    prefix = f"flashport_{target}_"
    rows: dict[str, dict[str, int]] = {}
    errors: list[str] = []
    notes: list[str] = []
    usage = run(cuobjdump, "--dump-resource-usage", library)
    for name, text in re.findall(rf"Function {prefix}(\S+):\s*\n\s*(.*)", usage):
        values = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", text)}
        rows[name] = {
            "registers": values["REG"],
            "spilled": values["STACK"] + values["LOCAL"],
            "shared": values["SHARED"],
            **dict.fromkeys(PATTERNS, 0),
        }
    code: dict[str, list[Instruction]] = {name: [] for name in rows}
    function = ""
    for line in run(cuobjdump, "-sass", library).splitlines():
        if match := re.match(r"\s*Function : (\S+)", line):
            function = match[1].removeprefix(prefix)
        elif function in rows and (instruction := sass_instruction(line)):
            code[function].append(instruction)
            for name, pattern in PATTERNS.items():
                rows[function][name] += bool(pattern.match(instruction.name))
            if odd := ODD_DESCRIPTOR.search(instruction.operands):
                errors.append(f"{function}: {odd[0]} is no instruction of the card; the compiler has gone wrong")
    for name, row in rows.items():
        order = sass_order(code[name])
        row |= order.figures()
        notes += [f"{name}: {finding}" for finding in order.findings.values()]
        if name.startswith(MULTIPLIES) and not row["matrix"]:
            errors.append(f"{name}: no tensor core instructions")
        if name.startswith((*MULTIPLIES, "gated_delta")) and not row["loads128"]:
            errors.append(f"{name}: no loads of 16 bytes or more")
        if NEVER_SPILLS.match(name) and row["spilled"]:
            errors.append(f"{name}: a plain kernel of attention spills {row['spilled']} bytes")
    return dict(sorted(rows.items())), errors, notes


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("library", type=Path)
    parser.add_argument("--update", action="store_true", help="write the table from this build")
    parser.add_argument("--tools", help="folder of cuobjdump, nvdisasm and nvcc")
    arguments = parser.parse_args()
    cuobjdump = shutil.which("cuobjdump", path=arguments.tools)
    nvcc = shutil.which("nvcc", path=arguments.tools) or shutil.which("nvcc")
    if not cuobjdump or not nvcc:
        sys.exit("audit_cuda.py: no cuobjdump or nvcc; name their folder with --tools (ci/cuda_prefix.sh makes one)")
    version = re.search(r"release \S+ V(\S+)", run(Path(nvcc), "--version"))
    compiler = f"nvcc {version[1]}" if version else "unknown"
    rows, errors, notes = audit(arguments.target, arguments.library, Path(cuobjdump))
    if not rows:
        sys.exit(f"audit_cuda.py: no kernels of {arguments.target} in {arguments.library}")
    table = Path(__file__).parent / "cuda_resources" / f"{arguments.target}.txt"
    if arguments.update:
        table.parent.mkdir(exist_ok=True)
        write_table(table, f"Kernels of {arguments.target}, as ci/audit_cuda.py reads them.", compiler, COLUMNS, rows)
    report = compare(table, compiler, COLUMNS, rows)
    report.errors[:0] = errors
    report.notes += notes
    return 0 if finish(f"audit of {arguments.target}", report, COLUMNS, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
