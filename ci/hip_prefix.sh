#!/usr/bin/env bash
# Unpacks a HIP compiler and ROCm's headers for AMD targets into a folder, from the Debian packages of this machine's own
# mirror, for machines without ROCm. Nothing of the system is changed, no card is needed; about 90 MB to fetch and 430 MB
# unpacked. Afterwards PREFIX/hipclang is the compiler: -DFLASHPORT_HIP_COMPILER=PREFIX/hipclang.
#
# usage: ci/hip_prefix.sh PREFIX      (Debian 12; does nothing where PREFIX is complete)
set -euo pipefail
prefix=$(realpath -m "${1:?usage: ci/hip_prefix.sh PREFIX}")
[ -x "$prefix/hipclang" ] && exit 0

clang_packages=(clang-22 clang-tools-22 libclang-cpp22 libllvm22 libclang-common-22-dev lld-22 llvm-22 llvm-22-runtime
                llvm-22-linker-tools libz3-4)
# HIP's headers and device libraries; the release in Debian 12 is too old for C++20 and gfx942.
rocm_packages=(libamdhip64-dev libamdhip64-7 rocm-device-libs-22 librocprim-dev libhipcub-dev librocthrust-dev
               librocwmma-dev)

mkdir -p "$prefix/debs/partial" "$prefix/apt/lists/partial" "$prefix/root"
cd "$prefix/debs"
[ "$(id -u)" != 0 ] || apt-get update -qq  # else the package lists are taken as they are
apt-get -o APT::Sandbox::User=root download -qq "${clang_packages[@]}"

mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' | awk '$2 == "bookworm" {print $1; exit}')
[ -n "$mirror" ] || { echo "hip_prefix.sh: apt knows no Debian 12 mirror" >&2; exit 1; }
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keyring] $mirror experimental main" > "$prefix/apt/experimental.list"
experimental=(-o "Dir::Etc::SourceList=$prefix/apt/experimental.list" -o Dir::Etc::SourceParts=/dev/null
              -o "Dir::State::Lists=$prefix/apt/lists" -o "Dir::Cache=$prefix/apt" -o Acquire::Check-Valid-Until=false
              -o APT::Sandbox::User=root)
apt-get "${experimental[@]}" update -qq
apt-get "${experimental[@]}" download -qq "${rocm_packages[@]/%//experimental}"

for package in *.deb; do dpkg -x "$package" "$prefix/root"; done
rm -rf "$prefix/debs" "$prefix/apt"

llvm=$prefix/root/usr/lib/llvm-22
cat > "$prefix/hipclang.new" <<END
#!/bin/sh
export LD_LIBRARY_PATH=$prefix/root/usr/lib/x86_64-linux-gnu:$llvm/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
exec $llvm/bin/clang++ --rocm-path=$prefix/root/usr \\
  --rocm-device-lib-path=$llvm/lib/clang/22/amdgcn/bitcode -isystem $prefix/root/usr/include "\$@"
END
# The binary utilities that the audit calls, by the names that ROCm gives them.
for tool in llvm-readelf llvm-objdump; do
  cat > "$prefix/$tool" <<END
#!/bin/sh
export LD_LIBRARY_PATH=$prefix/root/usr/lib/x86_64-linux-gnu:$llvm/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
exec $llvm/bin/$tool "\$@"
END
  chmod +x "$prefix/$tool"
done
chmod +x "$prefix/hipclang.new"
mv "$prefix/hipclang.new" "$prefix/hipclang"
