# From the instance table to translation units. cmake/kernels.in becomes one source per target and group of rows that
# share (kv, head_dim_qk, head_dim_v), and one more for the kernels without a template shape; cmake/kernel_table.cpp.in,
# for HIP cmake/hip_kernel_table.cpp.in, becomes the table of a backend's entries.

set(FLASHPORT_INSTANCE_TABLE "${PROJECT_SOURCE_DIR}/cmake/decode_instances.txt")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${FLASHPORT_INSTANCE_TABLE}")

# Kernels that every target has besides those of the table; each takes the params struct beside it.
set(FLASHPORT_PLAIN_KERNELS decode_stage2 merge_states append_kv read_bandwidth)
# And those of one backend alone.
set(FLASHPORT_PLAIN_KERNELS_cpu gated_delta_update)

# The rows of the table that `target` has, each as "math|kv|dk|dv|rows".
function(flashport_instances target backend out)
  set(name ${target})
  if(backend STREQUAL "cpu")
    set(name cpu)
  endif()
  file(STRINGS "${FLASHPORT_INSTANCE_TABLE}" lines REGEX "^[a-z]")
  set(rows "")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE " +" ";" fields "${line}")
    list(LENGTH fields count)
    if(NOT count EQUAL 6)
      message(FATAL_ERROR "${FLASHPORT_INSTANCE_TABLE}: expected 6 columns, got ${count}: \"${line}\"")
    endif()
    list(GET fields 5 targets)
    string(REPLACE "," ";" targets "${targets}")
    list(POP_BACK fields)
    list(JOIN fields "|" row)
    if(NOT name IN_LIST targets OR (FLASHPORT_INSTANCES STREQUAL "minimal" AND NOT row MATCHES "[|]bf16[|]128[|]128[|]"))
      continue()
    endif()
    list(APPEND rows "${row}")
  endforeach()
  set(${out} "${rows}" PARENT_SCOPE)
endfunction()

# Spells a row as C++ and as names: sets symbol, key, arguments and group in the caller.
function(flashport_spell_instance target row)
  string(REPLACE "|" ";" fields "${row}")
  list(GET fields 0 math)
  list(GET fields 1 kv)
  list(GET fields 2 dk)
  list(GET fields 3 dv)
  list(GET fields 4 rows)
  set(dims ${dk})
  if(NOT dk EQUAL dv)
    set(dims ${dk}x${dv})
  endif()
  set(math_fp32 kFp32)
  set(math_fp16 kFp16)
  set(math_bf16 kBf16)
  set(kv_fp32 kFp32)
  set(kv_fp16 kFp16)
  set(kv_bf16 kBf16)
  set(kv_fp8_e4m3 kFp8E4M3)
  set(kv_fp8_e4m3fnuz kFp8E4M3Fnuz)
  set(kv_q8_0 kQ8_0)
  if(NOT DEFINED math_${math} OR NOT DEFINED kv_${kv})
    message(FATAL_ERROR "${FLASHPORT_INSTANCE_TABLE}: unknown type in row \"${row}\"")
  endif()
  set(symbol flashport_${target}_decode_${math}_${kv}_${dk}x${dv}_r${rows} PARENT_SCOPE)
  set(key decode/${math}/kv=${kv}/hd${dims}/r${rows}/${target} PARENT_SCOPE)
  set(arguments "MathType::${math_${math}}, KvFormat::${kv_${kv}}, ${dk}, ${dv}, ${rows}" PARENT_SCOPE)
  set(group decode_${kv}_${dk}x${dv} PARENT_SCOPE)
endfunction()

# Writes the sources of a target. Sets in the caller:
#   <out_sources>  the generated files
#   <out_kernels>  one element per kernel: "symbol|key|arguments|group"; arguments are empty for plain kernels
function(flashport_generate_kernels target backend extension out_sources out_kernels)
  set(FLASHPORT_BACKEND ${backend})
  set(groups "")
  set(kernels "")
  flashport_instances(${target} ${backend} rows)
  foreach(row IN LISTS rows)
    flashport_spell_instance(${target} "${row}")
    if(NOT group IN_LIST groups)
      list(APPEND groups ${group})
      set(text_${group} "")
    endif()
    string(APPEND text_${group} "FLASHPORT_DEFINE_DECODE(${symbol}, \"${key}\", ${arguments})\n")
    list(APPEND kernels "${symbol}|${key}|${arguments}|${group}")
  endforeach()
  list(APPEND groups plain)
  set(text_plain "")
  foreach(kernel IN LISTS FLASHPORT_PLAIN_KERNELS FLASHPORT_PLAIN_KERNELS_${backend})
    set(symbol flashport_${target}_${kernel})
    string(TOUPPER ${kernel} macro)
    string(APPEND text_plain "FLASHPORT_DEFINE_${macro}(${symbol}, \"${kernel}/${target}\")\n")
    list(APPEND kernels "${symbol}|${kernel}/${target}||plain")
  endforeach()
  set(sources "")
  foreach(group IN LISTS groups)
    set(FLASHPORT_DEFINITIONS "${text_${group}}")
    set(source "${PROJECT_BINARY_DIR}/kernels/${target}/${group}.${extension}")
    configure_file("${PROJECT_SOURCE_DIR}/cmake/kernels.in" "${source}" @ONLY)
    list(APPEND sources "${source}")
  endforeach()
  set(${out_sources} "${sources}" PARENT_SCOPE)
  set(${out_kernels} "${kernels}" PARENT_SCOPE)
endfunction()

# The definitions that pick a target's header and namespace.
function(flashport_target_definitions target backend out)
  set(${out} "FLASHPORT_TARGET=${target}"
             "FLASHPORT_TARGET_HEADER=\"${backend}/target/${target}.h\"" PARENT_SCOPE)
endfunction()

# Table of a backend whose translation units define `KernelEntry <symbol>_entry()` (CPU, CUDA). `kernels_<target>` must
# hold what flashport_generate_kernels gave.
function(flashport_generate_table backend targets out_source)
  set(FLASHPORT_BACKEND ${backend})
  set(FLASHPORT_DECLARATIONS "")
  set(FLASHPORT_TABLES "")
  set(FLASHPORT_ROWS "")
  foreach(target IN LISTS targets)
    string(APPEND FLASHPORT_TABLES "  static const KernelEntry k_${target}[] = {\n")
    foreach(kernel IN LISTS kernels_${target})
      string(REGEX REPLACE "[|].*" "" symbol "${kernel}")
      string(APPEND FLASHPORT_DECLARATIONS "flashport::KernelEntry ${symbol}_entry();\n")
      string(APPEND FLASHPORT_TABLES "      ${symbol}_entry(),\n")
    endforeach()
    string(APPEND FLASHPORT_TABLES "  };\n")
    string(APPEND FLASHPORT_ROWS "      {\"${target}\", k_${target}, static_cast<int>(std::size(k_${target}))},\n")
  endforeach()
  set(source "${PROJECT_BINARY_DIR}/kernels/${backend}_kernel_table.cpp")
  configure_file("${PROJECT_SOURCE_DIR}/cmake/kernel_table.cpp.in" "${source}" @ONLY)
  set(${out_source} "${source}" PARENT_SCOPE)
endfunction()

# Compiles a HIP source to the code object of one target: device code alone, no host part, no bundle. Products fuse with
# sums only where the source says so, as on the CPU.
function(flashport_compile_code_object target source code_object)
  flashport_target_definitions(${target} hip definitions)
  list(TRANSFORM definitions PREPEND -D)
  add_custom_command(
    OUTPUT "${code_object}"
    COMMAND ${CMAKE_HIP_COMPILER_LAUNCHER} "${FLASHPORT_HIP_COMPILER}" -x hip --offload-arch=${FLASHPORT_ARCH_${target}} --offload-device-only --no-gpu-bundle-output
            -O3 -std=c++20 -ffp-contract=off -Wall -Wextra ${definitions}
            "-I${PROJECT_SOURCE_DIR}" "-I${PROJECT_SOURCE_DIR}/common/include"
            -Xclang -dependency-file -Xclang "${code_object}.d" -Xclang -MT -Xclang "${code_object}"
            -c "${source}" -o "${code_object}"
    DEPENDS "${source}"
    DEPFILE "${code_object}.d"
    COMMENT "Building code object ${code_object}"
    VERBATIM)
endfunction()

# Embeds the code objects of a HIP target: an assembler source that brings each <group>.co in as data.
function(flashport_generate_embedding target device_sources out_source)
  set(FLASHPORT_EMBEDDED "")
  foreach(device_source IN LISTS device_sources)
    cmake_path(GET device_source STEM group)
    cmake_path(REPLACE_EXTENSION device_source LAST_ONLY co OUTPUT_VARIABLE code_object)
    string(APPEND FLASHPORT_EMBEDDED "FLASHPORT_EMBED flashport_${target}_${group}, \"${code_object}\"\n")
  endforeach()
  set(source "${PROJECT_BINARY_DIR}/kernels/${target}_code_objects.S")
  configure_file("${PROJECT_SOURCE_DIR}/cmake/code_objects.S.in" "${source}" @ONLY)
  set(${out_source} "${source}" PARENT_SCOPE)
endfunction()

# Entries of one HIP target, whose kernels live in embedded code objects. `kernels_<target>` as above.
function(flashport_generate_hip_entries target device_sources out_source)
  set(FLASHPORT_NAME ${target})
  set(FLASHPORT_DECLARATIONS "")
  set(FLASHPORT_OBJECTS "")
  set(FLASHPORT_SYMBOLS "")
  set(FLASHPORT_ROWS "")
  foreach(device_source IN LISTS device_sources)
    cmake_path(GET device_source STEM group)
    set(object flashport_${target}_${group})
    string(APPEND FLASHPORT_DECLARATIONS "extern const unsigned char ${object}_begin[], ${object}_end[];\n")
    string(APPEND FLASHPORT_OBJECTS "const CodeObject k_${group} = {${object}_begin, ${object}_end};\n")
  endforeach()
  foreach(kernel IN LISTS kernels_${target})
    string(REPLACE "|" ";" kernel "${kernel}")
    list(GET kernel 0 symbol)
    list(GET kernel 1 key)
    list(GET kernel 2 arguments)
    list(GET kernel 3 group)
    string(APPEND FLASHPORT_SYMBOLS "const KernelSymbol k_${symbol} = {\"${symbol}\", &k_${group}};\n")
    if(arguments)
      string(APPEND FLASHPORT_ROWS "    decode_entry(\"${key}\", &k_${symbol}, ${arguments}),\n")
    else()
      string(APPEND FLASHPORT_ROWS "    plain_entry(\"${key}\", &k_${symbol}),\n")
    endif()
  endforeach()
  set(source "${PROJECT_BINARY_DIR}/kernels/${target}_entries.cpp")
  configure_file("${PROJECT_SOURCE_DIR}/cmake/hip_entries.cpp.in" "${source}" @ONLY)
  set(${out_source} "${source}" PARENT_SCOPE)
endfunction()

# Table of the HIP backend, out of the entries of its targets.
function(flashport_generate_hip_table targets out_source)
  set(FLASHPORT_DECLARATIONS "")
  set(FLASHPORT_ROWS "")
  foreach(target IN LISTS targets)
    string(APPEND FLASHPORT_DECLARATIONS "std::span<const KernelEntry> ${target}_entries();\n")
    string(APPEND FLASHPORT_ROWS "      {\"${target}\", ${target}_entries().data(), "
                                 "static_cast<int>(${target}_entries().size())},\n")
  endforeach()
  set(source "${PROJECT_BINARY_DIR}/kernels/hip_kernel_table.cpp")
  configure_file("${PROJECT_SOURCE_DIR}/cmake/hip_kernel_table.cpp.in" "${source}" @ONLY)
  set(${out_source} "${source}" PARENT_SCOPE)
endfunction()
