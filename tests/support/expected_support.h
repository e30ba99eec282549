// Skips that are allowed: ci/expected_support/<target>.txt, lines of `case-pattern reason`. '*' in a pattern stands for
// any text; the reason is a part of what the library says. Anything else that cannot run is a failure, and so is a case
// that runs though its line says that it cannot: coverage is neither lost nor gained unseen.
#pragma once

#include <functional>
#include <string>

namespace flashport_test {

[[nodiscard]] bool matches(const std::string& pattern, const std::string& text);

// Empty: go on. "skip ...": the library declined as expected. Else the failure.
[[nodiscard]] std::string verdict(const std::string& case_name, bool supported, const std::string& reason);

[[nodiscard]] std::string skip_summary();

}  // namespace flashport_test

// In a test body: leaves it when the case is not supported; a failure where that was not expected.
#define FLASHPORT_REQUIRE_SUPPORT(name, support)                                                                      \
  if (const std::string said = flashport_test::verdict(name, (support).supported, (support).reason); !said.empty()) { \
    if (said.starts_with("skip")) GTEST_SKIP() << said;                                                               \
    FAIL() << said;                                                                                                   \
  }
