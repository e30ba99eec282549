# The compilers of the targets that were asked for. Asking for a target whose compiler is missing is an error.
if(FLASHPORT_CUDA_TARGETS)
  if(NOT CMAKE_CUDA_COMPILER)
    flashport_find_cuda_compiler(compiler)
    if(NOT compiler)
      message(FATAL_ERROR "FLASHPORT_TARGETS asks for ${FLASHPORT_CUDA_TARGETS}, but there is no nvcc: put it on PATH or "
                          "pass -DCMAKE_CUDA_COMPILER=<nvcc> (ci/cuda_prefix.sh fetches one).")
    endif()
    set(CMAKE_CUDA_COMPILER "${compiler}")
  endif()
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # each target names its own
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
endif()

if(FLASHPORT_HIP_TARGETS)
  flashport_find_hip_compiler(compiler)
  if(NOT compiler)
    message(FATAL_ERROR "FLASHPORT_TARGETS asks for ${FLASHPORT_HIP_TARGETS}, but there is no HIP compiler: put amdclang++ or "
                        "hipcc on PATH or pass -DFLASHPORT_HIP_COMPILER=<compiler> (ci/hip_prefix.sh unpacks one).")
  endif()
  set(FLASHPORT_HIP_COMPILER "${compiler}")
  message(STATUS "HIP compiler: ${compiler}")
  enable_language(ASM)
endif()
