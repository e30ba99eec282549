# Stops at configure time where the compiler cannot do C++20 as the sources use it: a first error of the build, in the
# middle of a header, would not say so. A compiler may know the flag and lack the library (GCC 10 has no std::bit_cast).
include(CheckCXXSourceCompiles)

set(FLASHPORT_CXX20 FALSE)
if("cxx_std_20" IN_LIST CMAKE_CXX_COMPILE_FEATURES)
  check_cxx_source_compiles([[
    #include <bit>
    #include <cstdint>
    #include <span>
    #include <string_view>
    struct Point {
      int x = 0, y = 0;
      friend bool operator==(const Point&, const Point&) = default;
    };
    int main() {
      const Point points[] = {{.x = 1, .y = 2}, {.x = 1, .y = 2}};
      const std::span<const Point> all(points);
      const bool same = all.front() == all.back() && std::bit_cast<std::uint32_t>(1.0f) != 0;
      return same && std::string_view("flashport").starts_with("flash") ? 0 : 1;
    }
  ]] FLASHPORT_COMPILES_CXX20)
  set(FLASHPORT_CXX20 ${FLASHPORT_COMPILES_CXX20})
  unset(FLASHPORT_COMPILES_CXX20 CACHE)  # a newer compiler may be there next time, under the same name
endif()
if(NOT FLASHPORT_CXX20)
  message(FATAL_ERROR "flashport needs C++20, which ${CMAKE_CXX_COMPILER} (${CMAKE_CXX_COMPILER_ID} "
                      "${CMAKE_CXX_COMPILER_VERSION}) cannot compile: install GCC 12 or newer (Debian 12: apt install "
                      "g++), or name a compiler with -DCMAKE_CXX_COMPILER=<compiler>.")
endif()
