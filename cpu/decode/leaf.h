// The rows of a leaf as products on a CPU read them, and tiles of floats.
#pragma once

#include <cstddef>

#include "common/device/decode/chunks.h"

namespace flashport::FLASHPORT_TARGET::decode {

// The rows of one leaf: keys [low, high) of its 64 exist.
struct Leaf {
  const char* keys[kLeafKeys];
  const char* values[kLeafKeys];
  int low, high;
  const Leaf* next;  // what is asked for while this leaf is worked on; null: nothing
};

// A tile of floats, its rows `stride` apart.
template <class Float>
struct FloatRows {
  Float* data;
  int stride;
  FLASHPORT_DEVICE Float* operator[](int row) const { return data + static_cast<std::ptrdiff_t>(row) * stride; }
};

}  // namespace flashport::FLASHPORT_TARGET::decode
