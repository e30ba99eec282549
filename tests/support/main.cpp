// Entry of every device test executable: takes --target and --tier, then gtest's own arguments.
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/support/device.h"
#include "tests/support/expected_support.h"

int main(int argc, char** argv) {
  if (const int code = flashport_test::start(&argc, argv); code != 0) return code;
  testing::InitGoogleTest(&argc, argv);
  if (flashport_test::options().emulator) {
    std::string filter = testing::GTEST_FLAG(filter);
    filter += filter.find('-') == std::string::npos ? "-" : ":";
    testing::GTEST_FLAG(filter) = filter + "Full*";
  }
  const int result = RUN_ALL_TESTS();
  std::printf("%s\n", flashport_test::skip_summary().c_str());
  return result;
}
