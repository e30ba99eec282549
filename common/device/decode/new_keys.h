// The new keys of a sequence in a launch that appends (AppendParamsOf). Every block reads those of its leaves from
// where the caller has them, and never from the cache: so it need not know when another block writes them there. The
// block that has a leaf writes them, or the blocks of all query tiles that have it, the same bytes to the same place.
#pragma once

#include "common/device/decode/params.h"
#include "common/device/kv/new_rows.h"

namespace flashport::FLASHPORT_TARGET::decode {

// Keys at positions [before, before + count), which are the rows from `row` on of the new keys and values.
struct NewKeys {
  int before, count;
  std::int64_t row;
};

// As append_rotary counts them: those that there is room for. None where the offsets point to rows that are not there.
// load(p): what p points to, of the cache.
template <class Params, class Load = kv::PlainLoad>
FLASHPORT_DEVICE NewKeys new_keys(const AppendParamsOf<Params>& p, int seq, const Load& load = {}) {
  const int before = kv::sequence_length<Params::kPlain>(p.cache, seq, load);
  const int room = maximum(kv::sequence_room<Params::kPlain>(p.cache, seq, load) - before, 0);
  const int count = minimum(kv::sequence_new_rows(p.append, seq), room);
  if (p.append.cu_seqlens_k_new == nullptr) return {before, count, 0};
  const std::int64_t row = p.append.cu_seqlens_k_new[seq];
  return {before, row < 0 || row + count > p.append.total_new ? 0 : count, row};
}

}  // namespace flashport::FLASHPORT_TARGET::decode
