// Requests that live in one paged cache and can be decoded in any company: what tests of batch invariance are made of.
// run() returns the bits of every request, so that callers only compare.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <flashport/decode.h>

#include "tests/support/tensor.h"

namespace flashport_test {

struct PoolShape {
  std::string name;
  reference::Type q, kv;
  std::int64_t dk, dv, hq, hkv, page;
  std::int64_t q_len;     // of every request, and max_q_len of ragged calls
  bool lse = true;        // without it calls are plain, unless they are ragged (PlainDecodeParams)
  std::int64_t room = 0;  // keys that tables have room for, where that is more than the longest request has
  reference::Type v = kv;

  [[nodiscard]] flashport::DecodeQuery query(std::int64_t with_q_len) const;
};

class RequestPool {
 public:
  using Bits = std::vector<std::vector<unsigned char>>;  // of out and, where it is wanted, lse; one entry a request

  RequestPool(const PoolShape& shape, std::vector<std::int64_t> lens, std::uint64_t seed);

  [[nodiscard]] const std::vector<std::int64_t>& lens() const { return lens_; }
  // Decodes these requests as one batch. `ragged`: through cu_seqlens_q.
  [[nodiscard]] Bits run(const std::vector<std::int64_t>& ids, bool ragged = false) const;
  // The bits of query token `token` of a request, decoded alone with the keys that it may see.
  [[nodiscard]] std::vector<unsigned char> run_token(std::int64_t id, std::int64_t token) const;

  // A call whose tensors stay: for repeats and for graphs, where lengths change under the same arguments.
  class Call {
   public:
    Call(const RequestPool& pool, const std::vector<std::int64_t>& ids, bool ragged);
    [[nodiscard]] const flashport::DecodeArgs& args() const { return args_; }
    flashport::DecodeArgs& args() { return args_; }
    // Other lengths, at most those that the call was made with.
    void set_lengths(const std::vector<std::int64_t>& lens);
    void poison_outputs();
    [[nodiscard]] Bits fetch();

   private:
    std::int64_t q_len_, out_row_, lse_row_;
    Tensor q_, seqlens_, table_, out_, lse_;
    std::optional<Tensor> starts_;
    flashport::DecodeArgs args_;
  };

 private:
  PoolShape shape_;
  std::vector<std::int64_t> lens_;
  std::int64_t max_pages_;
  Tensor q_, k_, v_;
  std::vector<std::vector<std::int64_t>> pages_;
};

}  // namespace flashport_test
