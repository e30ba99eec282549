#!/usr/bin/env python3
"""Checks that no code compiled for a wider CPU target can be run by a narrower one.

An inline function or template that is not inlined becomes a weak symbol, of which the linker keeps one copy for the
whole library: one compiled with AVX-512 would then run on processors without it. So whatever an object of a CPU target
defines for the linker must be named after the target. And no object may run code of its own accord: kernel entries,
which every processor reads, are data, and nothing is initialised when the library is loaded.

usage: ci/check_target_symbols.py BUILD_FOLDER
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def breaches(target: str, objects: list[Path]) -> list[str]:
    """What the objects define for other objects without the target's name, and code that others would run."""
    listed = subprocess.run(
        ["nm", "--defined-only", "--extern-only", "--format=posix", *objects],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    symbols = {tuple(line.split(" ")[:2]) for line in listed.splitlines() if line and not line.endswith(":")}
    found = [f"{name} is not named after it" for name, _ in symbols if target not in name]
    found += [f"{name} is no data" for name, kind in symbols if name.endswith("_entry") and kind not in "DR"]
    if not any(name.endswith("_entry") for name, _ in symbols):
        found.append("there is no kernel entry")
    for file in objects:
        sections = subprocess.run(["readelf", "--sections", "--wide", file], check=True, capture_output=True, text=True)
        if re.search(r"\.(init_array|ctors)", sections.stdout):
            found.append(f"{file.name} initialises something at load time")
    return sorted(found)


def main() -> int:
    """Command line."""
    status = 0
    for folder in sorted(Path(sys.argv[1]).glob("cpu/CMakeFiles/flashport_cpu_*.dir/__/kernels/cpu_*")):
        if not folder.is_dir():
            continue
        objects = sorted(folder.glob("*.o"))
        found = breaches(folder.name, objects)
        print(*(f"error: {folder.name}: {breach}" for breach in found), sep="\n", end="\n" if found else "")
        print(f"symbols of {folder.name}: {len(objects)} objects, {len(found)} breaches")
        status |= bool(found) or not objects
    return status


if __name__ == "__main__":
    sys.exit(main())
