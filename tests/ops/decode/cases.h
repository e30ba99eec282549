// The case list of flash_decode (tests/cases/decode.csv, written by make_cases.py), parsed.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include <flashport/decode.h>

#include "tests/reference/codecs.h"

namespace flashport_test {

struct DecodeCase {
  std::string name, tier;
  reference::Type q, k_format, v_format;
  std::int64_t dk, dv, hq, hkv, q_len;
  std::string q_form;  // token, uniform, ragged
  std::string layout;  // nhd, hnd, token, block_nhd, block_hnd, csr_nhd, csr_hnd
  std::int64_t page;   // 0 where the layout has no pages
  std::vector<std::int64_t> lens;
  std::int64_t room = 0;  // keys that tables have room for, where that is more than the longest sequence has
  std::int64_t window_left, window_right;
  double softcap;
  std::string alibi;  // none, heads, batch
  bool sinks, tree;
  std::string scales;  // none, tensor, head
  bool index64;
  bool out_fp32, lse;
  std::string strides;
  int splits;

  [[nodiscard]] flashport::DecodeQuery query() const;
};

std::ostream& operator<<(std::ostream& out, const DecodeCase& c);

// Cases of a tier, in file order.
[[nodiscard]] std::vector<DecodeCase> decode_cases(const std::string& tier);
// The cases that the command line asks for: --tier=emulator, or both tiers.
[[nodiscard]] std::vector<DecodeCase> chosen_decode_cases();

}  // namespace flashport_test
