#!/usr/bin/env python3
"""Checks that no code compiled for a wider CPU target can be run by a narrower one.

An inline function or template that is not inlined becomes a weak symbol, of which the linker keeps one copy for the
whole library: one compiled with AVX-512 would then run on processors without it. So whatever an object of a CPU target
defines for the linker must be named after the target.

usage: ci/check_target_symbols.py BUILD_FOLDER
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def foreign_symbols(target: str, objects: list[Path]) -> list[str]:
    """Symbols that the objects define for other objects and that do not carry the target's name."""
    listed = subprocess.run(
        ["nm", "--defined-only", "--extern-only", "--format=posix", *objects],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = {line.split(" ")[0] for line in listed.splitlines() if line and not line.endswith(":")}
    return sorted(name for name in names if target not in name)


def main() -> int:
    """Command line."""
    status = 0
    for folder in sorted(Path(sys.argv[1]).glob("cpu/CMakeFiles/flashport_cpu_*.dir/__/kernels/cpu_*")):
        if not folder.is_dir():
            continue
        objects = sorted(folder.glob("*.o"))
        foreign = foreign_symbols(folder.name, objects)
        print(*(f"error: {folder.name} defines {name}" for name in foreign), sep="\n", end="\n" if foreign else "")
        print(f"symbols of {folder.name}: {len(objects)} objects, {len(foreign)} foreign symbols")
        status |= bool(foreign) or not objects
    return status


if __name__ == "__main__":
    sys.exit(main())
