// In place of CUDA's own, for the test of producers: a query tile that counts the threads that have brought it.
#pragma once

#include <atomic>

#include "common/device/decode/schedule.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg>
struct QueryTile {
  std::atomic<int> copies;
};
template <DecodeConfig kCfg>
void copy_query(const MixedDecodeParams&, const Segment&, const Block&, QueryTile<kCfg>& tile) {
  ++tile.copies;
}

}  // namespace flashport::FLASHPORT_TARGET::decode
