// flash_decode against the oracle, over the whole case list; and that the list reaches every kernel of the target.
#include <gtest/gtest.h>

#include <flashport/backend.h>
#include <flashport/decode.h>

#include <set>

#include "tests/ops/decode_call.h"
#include "tests/support/expected_support.h"

namespace flashport_test {
namespace {

// Suites named Full are left out of the emulator tier by main.
class DecodeCases : public testing::TestWithParam<DecodeCase> {};

TEST_P(DecodeCases, MatchesTheOracle) {
  const DecodeCase& c = GetParam();
  FLASHPORT_REQUIRE_SUPPORT(c.name, flashport::supports(c.query()));
  const std::string key = flashport::which_kernel(c.query());
  EXPECT_NE(key.find(std::string("/kv=") + type_name(c.kv) + "/"), std::string::npos) << key;
  DecodeCall call(c);
  call.upload();
  call.run();
  EXPECT_EQ(call.check(math_of_key(key)), "") << "kernel " << key;
}

INSTANTIATE_TEST_SUITE_P(Emulator, DecodeCases, testing::ValuesIn(decode_cases("emulator")),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Full, DecodeCases, testing::ValuesIn(decode_cases("full")),
                         [](const auto& info) { return info.param.name; });

TEST(DecodeInstances, CasesReachEveryKernel) {
  std::set<std::string> reached;
  for (const DecodeCase& c : chosen_decode_cases()) {
    if (flashport::supports(c.query()).supported) reached.insert(flashport::which_kernel(c.query()));
  }
  const std::vector<std::string> keys = flashport::kernel_keys(query_target());
  EXPECT_FALSE(keys.empty());
  for (const std::string& key : keys) {
    if (!key.starts_with("decode/")) continue;
    EXPECT_TRUE(reached.contains(key)) << "no case runs " << key;
  }
}

}  // namespace
}  // namespace flashport_test
