#!/usr/bin/env python3
"""Counts the hot loops of attention's plain kernels in AMD code objects, by a small table of clocks.

The hot loops of a kernel are the innermost ones with the most matrix instructions. Where a kernel has one for key tiles
without masks and others for tiles with masks, the one with the fewest vector clocks is that without; the next, which
hides the keys after a query, is what causal calls end with. Figures of a kernel, of its loop without masks unless said:

matrix      clocks of the matrix unit on one SIMD
vector      clocks of the vector unit for 100 of the matrix unit
causal      the same in the loop that hides the keys after a query
lds         bytes that a wave reads from LDS for 64 matrix instructions of 32x32x8, or for as much work
transposed  reads from LDS that transpose (CDNA4)
wide        matrix instructions of CDNA4's wide shapes
barriers    barriers
vm_waits    waits for all of a wave's loads from memory: vmcnt(0)
lds_waits   waits for all of its reads of LDS and of scalars: lgkmcnt(0)

They are held against ci/amd_loops/<target>.txt. Red whatever the table says are a missed row of BARS and, on gfx950, a
loop whose reads do not transpose or whose matrix instructions are not wide. None of it is a speed.

Clocks: CDNA3 ISA 7.6 (a 16-bit MFMA does 512 floating-point operations a clock and SIMD; CDNA4's wide shapes 1024), a
vector instruction takes 4, a transcendental 16; RDNA3 ISA 7.9: WMMA 32, vector 1, transcendental 4.

usage: ci/loop_audit.py [--update] [--tools FOLDER] TARGET FOLDER_OF_CODE_OBJECTS
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from audit_amd import compiler_version, find_tool
from resource_table import Column, compare, finish, write_table

COLUMNS = [
    Column("matrix", 0),
    Column("vector", 1),
    Column("causal", 1),
    Column("lds", 1),
    Column("transposed", -1),
    Column("wide", -1),
    Column("barriers", 1),
    Column("vm_waits", 1),
    Column("lds_waits", 1),
]

INSTRUCTION = re.compile(r"^\s+(\S+)(.*?)//\s*([0-9A-F]+):\s*([0-9A-F]{8})")
MFMA = re.compile(r"v_mfma_f32_(\d+)x(\d+)x(\d+)")
TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
PLAIN = re.compile(r"attention_\w+_plain(_|$)")
WORK = 64 * 2 * 32 * 32 * 8  # floating-point operations of 64 MFMA of 32x32x8


@dataclass(frozen=True)
class Bars:
    """What BARRED must keep to; None where nothing is asked."""

    vector: float | None = None  # most clocks of the vector unit for one of the matrix unit
    causal: float | None = None  # the same in the loop that hides the keys after a query
    kilobytes: float | None = None  # most of `lds`
    share: float | None = None  # least clocks of the matrix unit for one of both


BARRED = "attention_bf16_128x128_plain"
BARS = {"gfx942": Bars(vector=0.88, kilobytes=32), "gfx950": Bars(vector=1.0, causal=1.2), "gfx11": Bars(share=0.45)}


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly."""

    address: int
    name: str
    operands: str
    word: int  # its first

    @property
    def multiplies(self) -> bool:
        """Whether it is a product of matrices."""
        return self.name.startswith(("v_mfma", "v_wmma"))


@dataclass
class Loop:
    """Figures of one loop."""

    matrix: float = 0.0
    vector: float = 0.0
    flops: float = 0.0
    lds_bytes: int = 0
    products: int = 0
    wide: int = 0
    transposed: int = 0
    barriers: int = 0
    vm_waits: int = 0
    lds_waits: int = 0

    def add(self, instruction: Instruction, target: str) -> None:
        """Counts one instruction."""
        name = instruction.name
        rdna = target == "gfx11"
        if instruction.multiplies:
            flops, clocks, is_wide = matrix_cost(name, target)
            self.flops += flops
            self.matrix += clocks
            self.products += 1
            self.wide += is_wide
        elif TRANSCENDENTAL.match(name):
            self.vector += 4 if rdna else 16
        elif name.startswith("v_"):
            self.vector += 1 if rdna else 4
        elif name.startswith(("ds_read", "ds_load")):
            self.lds_bytes += (32 if rdna else 64) * read_bytes(name)
            self.transposed += "_tr_" in name
        elif name == "s_barrier":
            self.barriers += 1
        elif name == "s_waitcnt":
            self.vm_waits += "vmcnt(0)" in instruction.operands
            self.lds_waits += "lgkmcnt(0)" in instruction.operands

    @property
    def quotient(self) -> float:
        """Clocks of the vector unit for one of the matrix unit."""
        return self.vector / self.matrix

    @property
    def bytes_of_work(self) -> float:
        """Bytes read from LDS for WORK."""
        return self.lds_bytes * WORK / self.flops


def matrix_cost(name: str, target: str) -> tuple[float, float, bool]:
    """Floating-point operations and clocks of a matrix instruction, and whether its shape is a wide one."""
    if target == "gfx11":
        return 2.0 * 16 * 16 * 16, 32.0, False
    match = MFMA.match(name)
    if not match:
        raise SystemExit(f"loop_audit.py: the clocks of {name} are not known")
    rows, columns, inner = map(int, match.groups())
    flops = 2.0 * rows * columns * inner
    is_wide = target == "gfx950" and inner >= (16 if rows == 32 else 32)
    return flops, flops / (1024 if is_wide else 512), is_wide


def read_bytes(name: str) -> int:
    """Bytes of a lane that a read from LDS brings."""
    width = re.search(r"_[bui](\d+)", name)
    if not width:
        raise SystemExit(f"loop_audit.py: the width of {name} is not known")
    return (2 if "read2" in name or "load_2" in name else 1) * int(width[1]) // 8


def kernels(text: str) -> dict[str, list[Instruction]]:
    """The instructions of each kernel of a disassembly."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if symbol := re.match(r"^[0-9a-f]+ <(\w+)>:", line):
            current = found.setdefault(symbol[1], [])
        elif match := INSTRUCTION.match(line):
            current.append(Instruction(int(match[3], 16), match[1], match[2].strip(), int(match[4], 16)))
    return found


def hot_loops(rows: list[Instruction], target: str) -> list[Loop]:
    """The innermost loops with the most matrix instructions, those with the fewest vector clocks first."""
    index = {row.address: i for i, row in enumerate(rows)}
    loops = []
    for end, row in enumerate(rows):
        if not row.name.startswith(("s_cbranch", "s_branch")):
            continue
        offset = row.word & 0xFFFF
        begin = index.get(row.address + 4 + 4 * (offset - 0x10000 if offset > 0x7FFF else offset))
        if begin is None or begin > end:
            continue
        count = sum(row.multiplies for row in rows[begin:end])
        if count:
            loops.append((begin, end, count))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    most = max((count for _, _, count in inner), default=0)
    found = []
    for begin, end, count in inner:
        if count == most:
            found.append(Loop())
            for row in rows[begin : end + 1]:
                found[-1].add(row, target)
    # Loops with masks are as long in products and longer in all else.
    return sorted(found, key=lambda loop: loop.vector)


def figures(loops: list[Loop]) -> dict[str, int]:
    """The columns of the table."""
    loop = loops[0]
    return {
        "matrix": round(loop.matrix),
        "vector": round(100 * loop.quotient),
        "causal": round(100 * loops[min(1, len(loops) - 1)].quotient),
        "lds": round(loop.bytes_of_work),
        "transposed": loop.transposed,
        "wide": loop.wide,
        "barriers": loop.barriers,
        "vm_waits": loop.vm_waits,
        "lds_waits": loop.lds_waits,
    }


def missed(target: str, name: str, loops: list[Loop]) -> list[str]:
    """What is wrong with a kernel whatever the table says."""
    loop = loops[0]
    errors = []
    if target == "gfx950":
        if not loop.transposed:
            errors.append("no reads from LDS that transpose (ds_read_b64_tr_b16)")
        if loop.wide < loop.products:
            errors.append(f"{loop.products - loop.wide} of {loop.products} matrix instructions are not of a wide shape")
    if name == BARRED:
        bars = BARS[target]
        causal = loops[min(1, len(loops) - 1)].quotient
        share = loop.matrix / (loop.matrix + loop.vector)
        kilobytes = loop.bytes_of_work / 1024
        if bars.vector is not None and loop.quotient > bars.vector:
            errors.append(f"{loop.quotient:.2f} vector clocks for one of the matrix unit, at most {bars.vector}")
        if bars.causal is not None and causal > bars.causal:
            errors.append(f"causal, {causal:.2f} vector clocks for one of the matrix unit, at most {bars.causal}")
        if bars.kilobytes is not None and kilobytes > bars.kilobytes:
            errors.append(f"{kilobytes:.1f} KB from LDS, at most {bars.kilobytes}")
        if bars.share is not None and share < bars.share:
            errors.append(f"the matrix unit has {share:.2f} of the clocks, at least {bars.share}")
    return [f"{name}: {text}" for text in errors]


def audit(target: str, listings: list[str]) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Figures of every plain kernel in these disassemblies, and what is wrong whatever the table says."""
    rows: dict[str, dict[str, int]] = {}
    errors: list[str] = []
    for listing in listings:
        for symbol, instructions in kernels(listing).items():
            name = symbol.removeprefix(f"flashport_{target}_")
            if not PLAIN.match(name):
                continue
            loops = hot_loops(instructions, target)
            if loops:
                rows[name] = figures(loops)
                errors += missed(target, name, loops)
            else:
                errors.append(f"{name}: no loop with matrix instructions")
    return dict(sorted(rows.items())), errors


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=sorted(BARS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--update", action="store_true", help="write the table from this build")
    parser.add_argument("--tools", help="folder of llvm-readelf and llvm-objdump")
    arguments = parser.parse_args()
    objdump = find_tool("llvm-objdump", arguments.tools)
    paths = sorted(arguments.folder.glob("attention_*.co"))
    listings = [
        subprocess.run([objdump, "-d", path], check=True, capture_output=True, text=True).stdout for path in paths
    ]
    rows, errors = audit(arguments.target, listings)
    if not rows:
        sys.exit(f"loop_audit.py: no hot loops of attention in {arguments.folder}")
    compiler = compiler_version(paths[0], arguments.tools)
    table = Path(__file__).parent / "amd_loops" / f"{arguments.target}.txt"
    if arguments.update:
        table.parent.mkdir(exist_ok=True)
        title = f"Hot loops of attention's plain kernels on {arguments.target}, as ci/loop_audit.py reads them."
        write_table(table, title, compiler, COLUMNS, rows)
    report = compare(table, compiler, COLUMNS, rows)
    report.errors[:0] = errors
    return 0 if finish(f"hot loops of {arguments.target}", report, COLUMNS, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
