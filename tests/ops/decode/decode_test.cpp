// flash_decode against the oracle, over the whole case list; and that the list reaches every kernel of the target.
#include <gtest/gtest.h>

#include <flashport/backend.h>
#include <flashport/decode.h>

#include <algorithm>
#include <set>

#include "tests/ops/decode/call.h"
#include "tests/reference/blocks.h"
#include "tests/support/expected_support.h"

namespace flashport_test {
namespace {

// Whether the tile of a kernel's key ("/hd128/", "/hd192x128/") takes the case's head dims.
bool has_room(const std::string& key, const DecodeCase& c) {
  const std::string dims = key.substr(key.find("/hd") + 3);
  const int qk = std::stoi(dims);
  const std::size_t cross = dims.substr(0, dims.find('/')).find('x');
  return qk >= c.dk && (cross == std::string::npos ? qk : std::stoi(dims.substr(cross + 1))) >= c.dv;
}

// Suites named Full are left out of the emulator tier by main.
class DecodeCases : public testing::TestWithParam<DecodeCase> {};

TEST_P(DecodeCases, MatchesTheOracle) {
  const DecodeCase& c = GetParam();
  FLASHPORT_REQUIRE_SUPPORT(c.name, flashport::supports(c.query()));
  const std::string key = flashport::which_kernel(c.query());
  const std::string formats = c.k_format == c.v_format
                                  ? std::string("/kv=") + type_name(c.k_format) + "/"
                                  : std::string("/k=") + type_name(c.k_format) + "/v=" + type_name(c.v_format) + "/";
  // A target that has no kernel of the very formats, or none for the head dims, reads them by one of blocks or of
  // bytes, or widens them.
  const std::vector<std::string> keys = flashport::kernel_keys(query_target());
  const auto has = [&](const std::string& kernel_formats) {
    return std::ranges::any_of(keys, [&](const std::string& each) {
      return each.starts_with("decode/") && each.find(kernel_formats) != std::string::npos && has_room(each, c);
    });
  };
  const auto as_read = [](reference::Type type) {
    return reference::is_blocks(type) ? "blocks" : reference::is_of_bytes(type) ? "bytes" : type_name(type);
  };
  const std::string k = as_read(c.k_format), v = as_read(c.v_format);
  const std::string family = k == v ? "/kv=" + k + "/" : "/k=" + k + "/v=" + v + "/";
  EXPECT_NE(key.find(has(formats) ? formats : has(family) ? family : "/kv=any/"), std::string::npos) << key;
  DecodeCall call(c);
  call.upload();
  call.run();
  EXPECT_EQ(call.check(math_of_key(key)), "") << "kernel " << key;
}

// Few blocks have long work ranges: the heads of a sequence run concurrently and one block has whole groups of chunks.
// With many blocks every group is divided.
class DecodeOnMultiprocessors : public DecodeCases {
 protected:
  void TearDown() override { flashport::set_multiprocessor_limit(options().emulator ? 3 : 0); }
};

TEST_P(DecodeOnMultiprocessors, MatchesTheOracle) {
  const DecodeCase& c = GetParam();
  FLASHPORT_REQUIRE_SUPPORT(c.name, flashport::supports(c.query()));
  DecodeCall call(c);
  call.upload();
  flashport::set_multiprocessor_limit(1);
  call.run();
  EXPECT_EQ(call.check(math_of_key(flashport::which_kernel(c.query()))), "");
  const auto bits = call.bits();
  for (int limit : {2, 0}) {
    flashport::set_multiprocessor_limit(limit);
    call.run();
    EXPECT_TRUE(call.bits() == bits) << limit << " multiprocessors";
  }
}

// Those of many heads, and those of long sequences.
std::vector<DecodeCase> cases_that_are_cut_in_many_ways() {
  std::vector<DecodeCase> cases = decode_cases("emulator");
  std::erase_if(cases, [](const DecodeCase& c) {
    return c.splits != flashport::kInvariantSplits || (c.hkv < 4 && std::ranges::max(c.lens) <= 2048);
  });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Emulator, DecodeOnMultiprocessors, testing::ValuesIn(cases_that_are_cut_in_many_ways()),
                         [](const auto& info) { return info.param.name; });
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
  const std::string own = keys.front().substr(keys.front().rfind('/'));  // the first ones are no base's
  for (const std::string& key : keys) {
    if (!key.starts_with("decode/") || key.find("/kv=any/") != std::string::npos) continue;  // mixed_test.cpp
    if (reads_scales_beside(key)) continue;                                                  // the same
    if (key.find("/large/") != std::string::npos) continue;                                  // plain_test.cpp
    if (!key.ends_with(own)) continue;
    EXPECT_TRUE(reached.contains(key)) << "no case runs " << key;
  }
}

}  // namespace
}  // namespace flashport_test
