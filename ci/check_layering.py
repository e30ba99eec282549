#!/usr/bin/env python3
"""Checks that the layers of the tree hold: vendors stay in their folders, and includes point down.

Four rules, over every tracked or new source of C++, CUDA and HIP:
1. Outside cpu/, cuda/ and hip/ there is no preprocessor conditional on a vendor, a compiler or an architecture.
2. Outside them no vendor's API, keyword or header is named (kCuda and kHip, the device kinds, are our own words).
3. A folder includes only what LAYERS allows it, also where a macro names the header.
4. Sources are named in a CMakeLists.txt, public headers in that of tests/ (they are compiled alone): none is forgotten.

usage: ci/check_layering.py [--graph]
    prints file:line of each breach; exit status 1 when there is one
    --graph     prints the rooms of common/device instead, and which of them the headers of each include
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".hip", ".c"}
BACKENDS = ("cpu", "cuda", "hip")

CONDITIONAL = re.compile(
    r"^\s*#\s*(el)?if(n?def)?\b.*(HIP|CUDA|NVCC|AMDGCN|AMDGPU|__gfx|__SM_|__AVX|__SSE|__ARM|__clang|__GNUC|_MSC_VER)"
)
VENDOR_WORD = re.compile(
    r"\b(?:cuda|hip)[A-Z]\w*|__(?:global|device|host|shared|launch_bounds|constant|forceinline)__"
    r"|\b(?:threadIdx|blockIdx|blockDim|gridDim|warpSize)\b|\b__shfl\w*|\b__builtin_(?:amdgcn|nvvm|ia32)\w*|\b_mm\d*_\w+"
    r"|#\s*include\s*[<\"](?:cuda|hip|cub|rocprim|hipcub|immintrin|mma)\b"
)
INCLUDE = re.compile(r"^\s*#\s*include\s*([<\"])([^>\"]+)[>\"]")
INCLUDE_MACRO = re.compile(r"^\s*#\s*include\s+(FLASHPORT_\w+_HEADER)\b")
DEFINE_HEADER = re.compile(r"^\s*#\s*define\s+(FLASHPORT_\w+_HEADER)\s+\"([^\"]+)\"", re.MULTILINE)

# The rooms that operations share, and the operations. A room of common/device may include those that are listed here,
# and itself; an operation includes core, kv, merge and itself, never another operation.
SHARED_ROOMS = {"core": (), "kv": ("core",), "merge": ("core",)}
OPERATIONS = ("attention", "decode", "gated_delta")
ROOMS = SHARED_ROOMS | {operation: tuple(SHARED_ROOMS) for operation in OPERATIONS}

# Folder -> folders whose headers it may include (longest match decides; a folder may always include itself).
# "flashport" stands for the public headers, "<folder>/*" for the headers that lie in a folder and in none below it.
LAYERS: dict[str, tuple[str, ...]] = {
    "common/include/flashport": (),
    "common/host": ("flashport", "common/device"),
    "common/host/capi": ("flashport", "common/host/*"),
    "bindings": ("flashport", "common/host", "common/device/core"),
    "examples": ("flashport",),
    # The oracle shares no code with what it judges: only the public value types.
    "tests/reference": ("flashport", "tests/support/random.h"),
    "tests": ("flashport", "common", "tests", "bindings", *BACKENDS),
    "benchmarks": ("flashport", "common", *BACKENDS),
}
for _room, _below in ROOMS.items():
    _device = tuple(f"common/device/{room}" for room in (_room, *_below))
    LAYERS[f"common/device/{_room}"] = ("flashport", *_device[1:])
    LAYERS[f"common/host/{_room}"] = (
        "flashport",
        "common/host/*",
        *_device,
        *(f"common/host/{room}" for room in _below),
    )
    for _backend in BACKENDS:
        LAYERS[f"{_backend}/{_room}"] = (
            "flashport",
            *_device,
            *(f"{_backend}/{room}" for room in (*_below, "arch", "runtime/kernel_entry.h", "runtime/tensor_map.h")),
            f"{_backend}/tuning/{_room}",
        )
        LAYERS[f"{_backend}/tuning/{_room}"] = (f"common/device/{_room}",)
for _backend in BACKENDS:
    LAYERS[f"{_backend}/arch"] = ("common/device/core", "common/host/kernel_entry.h", f"{_backend}/tuning")
    LAYERS[f"{_backend}/tuning"] = ()
    LAYERS[f"{_backend}/runtime"] = ("flashport", "common/device", "common/host", f"{_backend}/tuning")


def sources() -> list[Path]:
    """Files that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return [Path(name) for name in sorted(set(listed)) if Path(name).suffix in SUFFIXES and (ROOT / name).exists()]


def layer_of(path: str) -> str | None:
    """The entry of LAYERS that holds `path`."""
    fitting = [layer for layer in LAYERS if path.startswith(layer + "/")]
    return max(fitting, key=len) if fitting else None


def without_comments(text: str) -> str:
    """The text with comments blanked out; lines keep their numbers."""
    blank = re.compile(r"//[^\n]*|/\*.*?\*/|(\"(?:\\.|[^\"\\\n])*\")", re.DOTALL)
    return blank.sub(lambda match: match[1] or re.sub(r"[^\n]", " ", match[0]), text)


def is_within(name: str, part: str) -> bool:
    """Whether a header lies in a part that LAYERS allows."""
    if part.endswith("/*"):
        return Path(name).parent.as_posix() == part.removesuffix("/*")
    return name == part or name.startswith(part + "/")


def check_include(path: str, layer: str, quote: str, name: str) -> str | None:
    """What is wrong with an include, or None."""
    folder = name.split("/")[0]
    if quote == "<" and folder != "flashport":
        return None
    included = "flashport" if folder == "flashport" else name
    if quote == '"' and "/" not in name:
        included = str(Path(path).parent / name)
    own = included.startswith(layer + "/") or (layer.endswith("/flashport") and included == "flashport")
    if own or any(is_within(included, part) for part in LAYERS[layer]):
        return None
    return f"{layer} may not include {name}"


def macro_headers(paths: list[Path]) -> dict[str, set[str]]:
    """What a macro that names a header may stand for: as sources define it, or as the build does."""
    headers: dict[str, set[str]] = {"FLASHPORT_TARGET_HEADER": set(), "FLASHPORT_TUNING_HEADER": set()}
    for path in paths:
        for macro, header in DEFINE_HEADER.findall((ROOT / path).read_text()):
            headers.setdefault(macro, set()).add(header)
    for backend in BACKENDS:
        headers["FLASHPORT_TARGET_HEADER"].add(f"{backend}/arch/")
        headers["FLASHPORT_TUNING_HEADER"].add(f"{backend}/tuning/")
    return headers


def check_macro_include(path: str, layer: str, macro: str, headers: dict[str, set[str]]) -> list[str]:
    """What is wrong with an include through a macro: a vendor's part of a text lies in the room of that text."""
    if macro not in headers:
        return [f"no header defines {macro}"]
    if layer.startswith("tests"):
        return []
    if layer.startswith("common/device/"):
        room = layer.removeprefix("common/device/")
        allowed = [f"{backend}/{part}/" for backend in BACKENDS for part in (room, "arch", f"tuning/{room}")]
        wrong = [header for header in sorted(headers[macro]) if not header.startswith(tuple(allowed))]
        return [f"{layer} may not include {header} (as {macro})" for header in wrong if not header.startswith("tests/")]
    own = [header for header in sorted(headers[macro]) if header.startswith(path.split("/")[0] + "/")]
    problems = [check_include(path, layer, '"', header) for header in own]
    return [f"{problem} (as {macro})" for problem in problems if problem]


def is_listed(path: Path) -> bool:
    """Whether a CMakeLists.txt above a source names it."""
    name = path.as_posix()
    if name.startswith("common/include/"):
        return path.name in (ROOT / "tests/CMakeLists.txt").read_text()
    if path.suffix == ".h":
        return True
    lists = [folder / "CMakeLists.txt" for folder in path.parents if (ROOT / folder / "CMakeLists.txt").exists()]
    return any(path.relative_to(file.parent).as_posix() in (ROOT / file).read_text() for file in lists)


def breaches(path: Path, headers: dict[str, set[str]]) -> list[str]:
    """Each breach in a file, as file:line: text."""
    name = path.as_posix()
    layer = layer_of(name)
    if layer is None:
        return [f"{name}:1: no layer in ci/check_layering.py holds this file"]
    vendor_folder = name.split("/")[0] in BACKENDS
    found = [] if is_listed(path) else [f"{name}:1: no CMakeLists.txt names this file"]
    for number, line in enumerate(without_comments((ROOT / path).read_text()).splitlines(), 1):
        where = f"{name}:{number}"
        if not vendor_folder and CONDITIONAL.match(line):
            found.append(f"{where}: conditional on a vendor or compiler: {line.strip()}")
        if not vendor_folder and layer not in ("tests", "benchmarks"):
            found += [f"{where}: vendor word {word}" for word in VENDOR_WORD.findall(line)]
        if match := INCLUDE.match(line):
            problem = check_include(name, layer, match[1], match[2])
            if problem:
                found.append(f"{where}: {problem}")
        elif match := INCLUDE_MACRO.match(line):
            found += [f"{where}: {problem}" for problem in check_macro_include(name, layer, match[1], headers)]
    return found


def room_graph(paths: list[Path]) -> dict[str, set[str]]:
    """The rooms of common/device, and the other rooms that the headers of each include."""
    prefix = "common/device/"
    graph: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in paths:
        if not path.as_posix().startswith(prefix):
            continue
        room = path.parts[2]
        for line in without_comments((ROOT / path).read_text()).splitlines():
            match = INCLUDE.match(line)
            if match and match[2].startswith(prefix):
                graph.setdefault(room, set()).add(match[2].removeprefix(prefix).split("/")[0])
    return {room: included - {room} for room, included in graph.items()}


def main() -> int:
    """Command line."""
    paths = sources()
    if sys.argv[1:] == ["--graph"]:
        for room, included in room_graph(paths).items():
            print(f"{room} -> {' '.join(sorted(included)) or '-'}")
        return 0
    headers = macro_headers(paths)
    found = [text for path in paths for text in breaches(path, headers)]
    print(*found, sep="\n", end="\n" if found else "")
    print(f"layering: {len(paths)} files, {len(found)} breaches")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
