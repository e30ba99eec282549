# What a build can be asked for, and the compiler settings that hold for all of it.
set(FLASHPORT_TARGETS "" CACHE STRING
    "Targets to build, e.g. \"cpu;sm90a;gfx942;gfx950;gfx11\", or single CPU targets in place of cpu, \"cpu_generic;cpu_avx2\"; \
empty: the CPU, and the GPUs whose driver is in sight")
set(FLASHPORT_INSTANCES "all" CACHE STRING
    "Rows of cmake/decode_instances.txt to build: all, or minimal (bf16 at head_dim 128, for development)")
set_property(CACHE FLASHPORT_INSTANCES PROPERTY STRINGS all minimal)
set(FLASHPORT_HIP_COMPILER "" CACHE FILEPATH
    "Compiler of AMD code objects (amdclang++, hipcc, or clang++ with ROCm's headers); empty: look for one")
set(FLASHPORT_SANITIZE "" CACHE STRING "Sanitizers for host code, e.g. \"address,undefined\"")
option(FLASHPORT_BUILD_TESTS "Build the test suites" ${PROJECT_IS_TOP_LEVEL})
option(FLASHPORT_BUILD_PYTHON "Build the Python module" OFF)
option(FLASHPORT_INSTALL "Generate install rules for C++ consumers" ${PROJECT_IS_TOP_LEVEL})
option(BUILD_SHARED_LIBS "Build flashport as a shared library" ON)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
include(cxx20)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

include(GNUInstallDirs)
find_package(Threads REQUIRED)

# Libraries and programs of the build tree share one folder: a library looks for backends in its own folder.
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")

# Usage requirements that every source of the project has in common.
add_library(flashport_settings INTERFACE)
target_include_directories(flashport_settings INTERFACE
  "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/common/include")
target_compile_features(flashport_settings INTERFACE cxx_std_20)
target_compile_definitions(flashport_settings INTERFACE "FLASHPORT_VERSION=\"${PROJECT_VERSION}\"")
target_compile_options(flashport_settings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 warns of std::string's own concatenation (GCC bug 105651).
  target_compile_options(flashport_settings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>")
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  # GCC clears and copies the structs of a call, 0.2 to 3 KB, by string instructions, which take some 50 ns a call longer.
  target_compile_options(flashport_settings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:\
-mmemset-strategy=unrolled_loop:512:noalign,libcall:-1:noalign;\
-mmemcpy-strategy=unrolled_loop:1024:noalign,libcall:-1:noalign>")
endif()
if(FLASHPORT_SANITIZE)
  set(sanitize "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${FLASHPORT_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  target_compile_options(flashport_settings INTERFACE "${sanitize}")
  target_link_options(flashport_settings INTERFACE "-fsanitize=${FLASHPORT_SANITIZE}")
endif()
