#!/usr/bin/env bash
# Puts NVIDIA's CUDA compiler and the disassembler that the audit calls into a folder, from PyPI, for machines without a
# CUDA toolkit. No driver and no card is needed. Afterwards PREFIX/bin/nvcc is the compiler.
#
# usage: ci/cuda_prefix.sh PREFIX     (does nothing where PREFIX is complete)
set -euo pipefail
prefix=$(realpath -m "${1:?usage: ci/cuda_prefix.sh PREFIX}")
[ -e "$prefix/complete" ] && exit 0

python3 -m venv "$prefix/venv"
"$prefix/venv/bin/pip" install -qq --disable-pip-version-check \
  nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 \
  nvidia-cuda-cccl==13.0.85 nvidia-cuda-cuobjdump==13.2.51 nvidia-cuda-nvdisasm==13.2.51
toolkit=$(echo "$prefix"/venv/lib/python3*/site-packages/nvidia/cu13)
# nvcc looks for the runtime in lib64, where toolkits have it, and CMake for a library without a version.
ln -sfn lib "$toolkit/lib64"
ln -sfn libcudart.so.13 "$toolkit/lib/libcudart.so"
# CMake takes bin/.. of nvcc's path for the toolkit, without following a link.
for folder in bin include lib lib64 nvvm; do ln -sfn "$toolkit/$folder" "$prefix/$folder"; done
touch "$prefix/complete"
