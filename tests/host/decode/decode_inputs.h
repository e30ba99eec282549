// A decode call over host memory that tests bend one argument at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <flashport/decode.h>
#include <flashport/error.h>

namespace flashport::test {

// Calls `call` and gives the text of the Exception that it throws; "" if it throws none.
template <class Exception, class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Exception& error) {
    return error.what();
  }
  return "";
}

// Memory that every tensor of a test points into: contents are not looked at unless they are indices.
inline void* scratch() {
  alignas(64) static unsigned char memory[48 << 20];
  return memory;
}
inline void* scratch_at(std::int64_t bytes) { return static_cast<unsigned char*>(scratch()) + bytes; }

struct DecodeInputs {
  // 3 requests of 8 / 2 heads over 64 pages of 16 tokens; room for 10 pages a request.
  std::vector<std::int32_t> lengths = {5, 0, 160};
  std::vector<std::int32_t> pages = std::vector<std::int32_t>(30, 7);
  DecodeArgs args;

  explicit DecodeInputs(Device device = {}, std::int64_t head_dim = 128) {
    args.q = TensorView(scratch_at(0), DType::kBFloat16, device, {3, 8, head_dim});
    args.k_cache = TensorView(scratch_at(16 << 20), DType::kBFloat16, device, {64, 16, 2, head_dim});
    args.v_cache = TensorView(scratch_at(32 << 20), DType::kBFloat16, device, {64, 16, 2, head_dim});
    args.seqlens = TensorView(lengths.data(), DType::kInt32, device, {3});
    args.block_table = TensorView(pages.data(), DType::kInt32, device, {3, 10});
    args.out = TensorView(scratch_at(1 << 19), DType::kBFloat16, device, {3, 8, head_dim});
  }
};

}  // namespace flashport::test
