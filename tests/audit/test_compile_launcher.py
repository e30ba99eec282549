"""The compile launcher: what a compiler says and how it ends, serialized wgmma, and budgets of compile time."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).resolve().parents[2] / "ci/cpu_time.py"
LOSS = "Potential Performance Loss: wgmma.mma_async instructions are serialized due to"

# Products whose sum is scaled after each: where STAGES is defined, it is there by then; else one element comes early.
PRODUCTS = """
#include <cstdint>
__device__ void begin() { asm volatile("wgmma.fence.sync.aligned;"); }
__device__ void end() {
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
}
#ifdef STAGES
constexpr bool kStages = true;
#else
constexpr bool kStages = false;
#endif
__global__ void products(float* out, std::uint64_t a, std::uint64_t b, int n) {
  float c[4] = {0, 0, 0, 0};
  if (!kStages) begin();
  for (int i = 0; i < n; ++i) {
    if (kStages) begin();
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "l"(a + i), "l"(b + i));
    if (kStages) end();
    for (int j = 0; j < (kStages ? 4 : 1); ++j) c[j] *= out[i];
  }
  if (!kStages) end();
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = c[i];
}
"""


def compiler(folder: Path, text: str, status: int = 0) -> list[str]:
    """A command that says `text` on stderr, writes its output, and ends with `status`."""
    code = f"import sys; sys.stderr.write({text!r}); open(sys.argv[2], 'w').close(); print('done'); sys.exit({status})"
    return [sys.executable, "-c", code, "-o", str(folder / "unit.o")]


def launch(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, LAUNCHER, folder / "log", *command], check=False, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "text",
    [
        f"ptxas info    : (C7510) {LOSS} insufficient register resources for the wgmma pipeline in function 'f'\n",
        f"ptxas info    : (C7511) {LOSS} non wgmma instructions defining accumulator registers in function 'f'\n",
        f"unit.cu(1): warning: a\nptxas info    : (C7518) {LOSS} ill formed pipeline stage in function 'f'\nb\n",
        "ptxas info    : (C7510) in other words\n",
    ],
)
def test_serialized_wgmma_fails_the_compile(tmp_path, text):
    ended = launch(tmp_path, compiler(tmp_path, text))
    assert ended.returncode == 1
    assert ended.stdout == "done\n"
    assert ended.stderr == f"{text}error: ptxas serializes wgmma in {tmp_path / 'unit.o'}\n"
    assert not (tmp_path / "unit.o").exists()
    assert not (tmp_path / "log").exists()


def test_serialized_wgmma_fails_without_a_named_output(tmp_path):
    code = f"import sys; sys.stderr.write({LOSS!r})"
    ended = launch(tmp_path, [sys.executable, "-c", code])
    assert ended.returncode == 1
    assert ended.stderr == f"{LOSS}error: ptxas serializes wgmma in what was compiled\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unit.cu(1): warning: wgmma\n",
        "ptxas info    : (C7519) warpgroup.arrive is injected in function 'serialized'\n",
    ],
)
def test_other_texts_are_passed_on(tmp_path, text):
    ended = launch(tmp_path, compiler(tmp_path, text))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", text)
    assert not (tmp_path / "log").exists()  # no kernel


def test_a_kernel_is_logged_with_the_reference_unit(tmp_path):
    folder = tmp_path / "kernels/sm90a"
    folder.mkdir(parents=True)
    assert launch(tmp_path, compiler(folder, "")).returncode == 0
    cost, slowness, output = (tmp_path / "log").read_text().split()
    assert 0 <= float(cost) < 60
    assert 0.1 < float(slowness) < 100
    assert output == str(folder / "unit.o")

    (tmp_path / "log.gcc").write_text("12.34")  # times as long
    assert launch(tmp_path, compiler(folder, "")).returncode == 0
    assert (tmp_path / "log").read_text().splitlines()[1].split()[1] == "12.340"
    os.utime(tmp_path / "log.gcc", (0, 0))
    assert launch(tmp_path, compiler(folder, "")).returncode == 0
    assert float((tmp_path / "log").read_text().splitlines()[2].split()[1]) < 12


def test_nvcc_has_a_reference_of_its_own(request, tmp_path):
    folder = tmp_path / "kernels/sm90a"
    folder.mkdir(parents=True)
    (tmp_path / "log.gcc").write_text("12.34")
    source = tmp_path / "nothing.cu"
    source.write_text("__global__ void nothing() {}\n")
    command = [request.config.getoption("--nvcc"), "-c", "-arch=sm_90a", str(source), "-o", str(folder / "unit.o")]
    ended = launch(tmp_path, command)
    assert ended.returncode == 0, ended.stderr
    assert 0.1 < float((tmp_path / "log").read_text().split()[1]) < 12
    assert (tmp_path / "log.nvcc").exists()


# (lines of the log, how much longer it took, whether the budget is kept), for decode's 4 core-minutes
@pytest.mark.parametrize(
    ("lines", "factor", "kept"),
    [
        (["55 0.70 a"] * 3 + ["55 1.00 b", "55 1.00 c", "55 1.00 d", "20 1.00 e"], "1.00", True),
        (["55 0.70 a", "55 1.00 b", "55 1.00 c", "55 1.00 d", "21 1.00 e"], "1.00", False),
        (["55 2.00 a", "55 0.93 b", "55 0.93 c", "55 0.93 d", "20 0.93 e"], "1.06", True),
        (["55 1.00 a", "55 1.00 b", "55 1.00 c", "55 1.00 d", "21 1.00 e"], "1.00", False),
        (["110 2.00 a", "110 2.00 b", "55 1.00 c", "55 1.00 d", "19 1.00 e"], "1.46", True),
        (["110 1.00 a", "55 2.00 b", "55 2.00 c", "55 2.00 d", "21 1.00 e"], "1.39", False),
        (["61 1.00 a", "1 1.00 b", "1 1.00 c"], "1.00", False),
        (["61 1.00 a", "59 1.00 a"], "1.00", True),
    ],
)
def test_budgets(tmp_path, lines, factor, kept):
    log = tmp_path / "log"
    log.write_text("".join(line[:-1] + f"kernels/sm90a/decode_{line[-1]}.cu.o\n" for line in lines))
    ended = subprocess.run([sys.executable, LAUNCHER, "--report", log], check=False, capture_output=True, text=True)
    assert ended.returncode == (0 if kept else 1), ended.stderr
    assert f"compiling took {factor} times as long here" in ended.stdout
    assert ("error: over the compile-time budget" in ended.stdout) != kept


def test_a_failed_compile_keeps_its_status(tmp_path):
    ended = launch(tmp_path, compiler(tmp_path, f"error\n{LOSS} a\n", status=7))
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "done\n", f"error\n{LOSS} a\n")
    assert not (tmp_path / "log").exists()


def test_stderr_comes_while_the_compiler_runs(tmp_path):
    code = "import sys; sys.stderr.write('half a line'); sys.stderr.flush(); sys.stdin.read()"
    command = [sys.executable, LAUNCHER, tmp_path / "log", sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert select.select([running.stderr], [], [], 60)[0]
        assert os.read(running.stderr.fileno(), 100) == b"half a line"
        running.stdin.close()
        assert running.wait(60) == 0


@pytest.mark.parametrize(("options", "status"), [(["-DSTAGES"], 0), ([], 1)])
def test_what_ptxas_says(request, tmp_path, options, status):
    source = tmp_path / "products.cu"
    source.write_text(PRODUCTS)
    command = [request.config.getoption("--nvcc"), "-cubin", "-gencode=arch=compute_90a,code=sm_90a", *options]
    ended = launch(tmp_path, [*command, str(source), "-o", str(tmp_path / "products.cubin")])
    assert ended.returncode == status, ended.stderr
    assert (LOSS in ended.stderr) == bool(status)
