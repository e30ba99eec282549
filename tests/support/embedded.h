// Text files that travel inside the test executables, so that these run wherever they are carried.
#pragma once

#include <string>

namespace flashport_test {

// tests/cases/decode.csv and cmake/decode_instances.txt.
[[nodiscard]] const char* decode_cases_csv();
[[nodiscard]] const char* decode_instances_text();
// ci/expected_support/<target>.txt; empty where there is none.
[[nodiscard]] const char* expected_support(const std::string& target);

}  // namespace flashport_test
