"""The audits on objects: a small kernel that signals as decode does is good, and red once a fence or a wait is taken
out of the text of the target's block.h.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import audit_amd
import audit_cuda
import pytest
from resource_table import ORDER_COLUMNS, compare, write_table

ROOT = Path(__file__).resolve().parents[2]

# What a lane adds is loaded after the stores, and waiting for it the compiler waits for them too. Later it takes
# nothing to be in flight, as in decode, and leaves out the wait for a write-back.
ARRIVE = """
#include FLASHPORT_TARGET_HEADER
namespace flashport::FLASHPORT_TARGET {
struct SignalParams {
  float* states;
  unsigned* counters;
  const int* adds;
  float* sum;
};
extern "C" __global__ void __launch_bounds__(256) FLASHPORT_SIGNAL_KERNEL(SignalParams p) {
  __shared__ unsigned flag;
  const Block block(&flag);
  p.states[block.index() * 256 + block.thread()] = 1;
  asm volatile("" ::: "memory");
  const unsigned last = block.arrive(2, [&](int i) { return Arrival{p.counters + i, p.adds[i], 8}; });
  if (last != 0) p.sum[block.thread()] = load_published(p.states + block.thread());
}
}
"""
ANNOUNCE = """
#include FLASHPORT_TARGET_HEADER
namespace flashport::FLASHPORT_TARGET {
extern "C" __global__ void __launch_bounds__(256) FLASHPORT_SIGNAL_KERNEL(float* states, unsigned* words) {
  if (blockIdx.x > 0) await_signal(words + blockIdx.x - 1);
  states[blockIdx.x * 256 + threadIdx.x] = states[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) send_signal(words + blockIdx.x);
}
}
"""


def with_text(folder: Path, header: str, changes: dict[str, str]) -> Path:
    """A folder to be looked through before the tree, in which `header` has other text at some places."""
    text = (ROOT / header).read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, f"{header} has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    (folder / header).parent.mkdir(parents=True)
    (folder / header).write_text(text)
    return folder


def includes(folder: Path) -> list[str]:
    return [f"-I{folder}", f"-I{ROOT}", f"-I{ROOT}/common/include"]


def definitions(target: str, backend: str) -> list[str]:
    return [
        f"-DFLASHPORT_TARGET={target}",
        f'-DFLASHPORT_TARGET_HEADER="{backend}/arch/{target}.h"',
        f"-DFLASHPORT_SIGNAL_KERNEL=flashport_{target}_signal",
    ]


def hip_audit(config, folder: Path, target: str, changes: dict[str, str]):
    """The figures of the kernel, and why its signals are bare."""
    source = folder / "signal.hip"
    source.write_text(ARRIVE)
    architecture = {"gfx11": "gfx11-generic"}.get(target, target)
    command = [config.getoption("--hip-compiler"), "-x", "hip", f"--offload-arch={architecture}"]
    command += ["--offload-device-only", "--no-gpu-bundle-output", "-O3", "-std=c++20"]
    command += [*definitions(target, "hip"), *includes(with_text(folder, "hip/arch/block.h", changes))]
    subprocess.run([*command, "-c", source, "-o", folder / "signal.co"], check=True)
    rows, errors, notes = audit_amd.audit(target, folder, config.getoption("--hip-tools"))
    assert errors == []
    return rows["signal"], notes


def listing_of(config, folder: Path) -> str:
    """The disassembly of what hip_audit compiled."""
    command = [f"{config.getoption('--hip-tools')}/llvm-objdump", "-d", folder / "signal.co"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def cuda_audit(config, folder: Path, text: str, changes: dict[str, str]):
    """The same of sm90a."""
    source, cubin = folder / "signal.cu", folder / "signal.cubin"
    source.write_text(text)
    command = [config.getoption("--nvcc"), "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++20"]
    command += [*definitions("sm90a", "cuda"), *includes(with_text(folder, "cuda/arch/block.h", changes))]
    subprocess.run([*command, source, "-o", cubin], check=True)
    cuobjdump = Path(config.getoption("--cuda-tools")) / "cuobjdump"
    rows, errors, notes = audit_cuda.audit("sm90a", cubin, cuobjdump)
    assert errors == []
    return rows["signal"], notes


def errors_against(folder: Path, good: dict[str, int], got: dict[str, int], compiler: str = "this one") -> list[str]:
    """What the audit says of `got` where the table has `good`."""
    table = folder / "table.txt"
    write_table(table, "Figures of one kernel.", "this one", ORDER_COLUMNS, {"signal": good})
    return compare(table, compiler, ORDER_COLUMNS, {"signal": got}).errors


CDNA = {"signals": 2, "releases": 1, "acquires": 1, "bare": 0}
RELEASE = '  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");\n'
RELEASE_WAIT = f"{RELEASE}  await_stores();\n"
BARRIER_WAIT = "    await_stores();  // the barrier"
ACQUIRE = '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");'


def order(row: dict[str, int]) -> dict[str, int]:
    return {column.name: row[column.name] for column in ORDER_COLUMNS}


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_cdna_as_it_is(request, tmp_path, target):
    row, notes = hip_audit(request.config, tmp_path, target, {})
    assert order(row) == CDNA
    assert notes == []


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("changes", "reason", "errors"),
    [
        (
            {RELEASE: ""},
            "stores before it are not released",
            ["releases is 0, the table says 1", "bare is 2, the table says 0"],
        ),
        (
            {BARRIER_WAIT: "    // the barrier"},
            "stores of other waves may be in flight: no wait for them before the barrier",
            ["bare is 2, the table says 0"],
        ),
        ({ACQUIRE: ";"}, "", ["acquires is 0, the table says 1"]),
    ],
    ids=["release", "stores", "acquire"],
)
def test_cdna_less_a_fence_or_a_wait(request, tmp_path, target, changes, reason, errors):
    row, notes = hip_audit(request.config, tmp_path, target, changes)
    assert [
        note for note in notes if note.startswith("signal: global_atomic_add") and note.endswith(reason)
    ] or not reason
    for compiler in ("this one", "another"):
        assert errors_against(tmp_path, CDNA, order(row), compiler) == [f"signal: {text}" for text in errors]


def test_kernel_in_two_code_objects(request, tmp_path):
    """As where a build has left what it no longer makes: then the table would have the figures of one of them."""
    hip_audit(request.config, tmp_path, "gfx942", {})
    shutil.copy(tmp_path / "signal.co", tmp_path / "stale.co")
    _, errors, _ = audit_amd.audit("gfx942", tmp_path, request.config.getoption("--hip-tools"))
    assert errors == ["signal: in signal.co and in stale.co; remove what an older build left"]


# A compiler may wait by itself, as clang does after 22.1: then the wait is taken out of the listing.
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_cdna_less_the_wait_for_the_write_back(request, tmp_path, target):
    hip_audit(request.config, tmp_path, target, {RELEASE_WAIT: RELEASE})
    listing = listing_of(request.config, tmp_path)
    before, after = listing.split("buffer_wbl2", 1)
    between, atomic, rest = after.partition("global_atomic_add")
    between = re.sub(r".*s_waitcnt vmcnt\(0\).*\n", "", between)
    figures, findings, errors = audit_amd.figures_of_code(target, f"{before}buffer_wbl2{between}{atomic}{rest}")
    got = figures[f"flashport_{target}_signal"]
    assert errors == []
    assert len(findings[f"flashport_{target}_signal"]) == 1
    assert findings[f"flashport_{target}_signal"][0].endswith("no vmcnt(0) after buffer_wbl2")
    for compiler in ("this one", "another"):
        assert errors_against(tmp_path, CDNA, order(got), compiler) == ["signal: bare is 1, the table says 0"]


# The compiler waits before every barrier by itself here: what is taken out is taken out of the listing.
def test_rdna3(request, tmp_path):
    row, notes = hip_audit(request.config, tmp_path, "gfx11", {})
    assert order(row) == {"signals": 1, "releases": 0, "acquires": 1, "bare": 0}
    assert notes == []
    listing = listing_of(request.config, tmp_path)
    waits = re.compile(r".*s_waitcnt_vscnt null, 0x0.*\n")
    figures, findings, _ = audit_amd.figures_of_code("gfx11", waits.sub("", listing))
    assert figures["flashport_gfx11_signal"]["bare"] == 1
    assert findings["flashport_gfx11_signal"][0].endswith("stores of its wave may be in flight")


def test_nvidia_as_it_is(request, tmp_path):
    for name, text in {"arrive": ARRIVE, "announce": ANNOUNCE}.items():
        (tmp_path / name).mkdir()
        row, notes = cuda_audit(request.config, tmp_path / name, text, {})
        assert order(row) == {"signals": 1, "releases": 1, "acquires": 1, "bare": 0}
        assert notes == []


@pytest.mark.parametrize(
    ("text", "changes", "errors"),
    [
        (ARRIVE, {"atom.add.acq_rel.gpu": "atom.add.acquire.gpu"}, ["releases is 0, the table says 1", "bare is 1"]),
        (ARRIVE, {"atom.add.acq_rel.gpu": "atom.add.release.gpu"}, ["acquires is 0, the table says 1"]),
        (ANNOUNCE, {"st.release.gpu": "st.relaxed.gpu"}, ["releases is 0, the table says 1", "bare is 1"]),
        (ANNOUNCE, {"ld.acquire.gpu": "ld.relaxed.gpu"}, ["acquires is 0, the table says 1"]),
    ],
    ids=["arrive-release", "arrive-acquire", "announce-release", "announce-acquire"],
)
def test_nvidia_less_a_fence(request, tmp_path, text, changes, errors):
    row, _ = cuda_audit(request.config, tmp_path, text, changes)
    good = {"signals": 1, "releases": 1, "acquires": 1, "bare": 0}
    for compiler in ("this one", "another"):
        got = errors_against(tmp_path, good, order(row), compiler)
        assert len(got) == len(errors)
        assert all(line.startswith(f"signal: {error}") for line, error in zip(got, errors, strict=True))
