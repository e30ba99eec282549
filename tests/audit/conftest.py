"""Options of the audits' tests: the compilers of the kernels that they audit."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))


def pytest_addoption(parser):
    parser.addoption("--hip-compiler", default="amdclang++", help="compiler of AMD code objects")
    parser.addoption("--hip-tools", default="/opt/rocm/llvm/bin", help="folder of llvm-readelf and llvm-objdump")
    parser.addoption("--nvcc", default="nvcc", help="CUDA's compiler")
    parser.addoption("--cuda-tools", default="/usr/local/cuda/bin", help="folder of cuobjdump")
