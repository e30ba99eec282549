// The rows of a leaf as products on a CPU read them, and tiles of floats.
#pragma once

#include <cstddef>

#include "common/device/decode/chunks.h"

namespace flashport::FLASHPORT_TARGET::decode {

// The rows of one leaf: keys [low, high) of its 64 exist, and the nearest of them stands in for each other one.
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

// f<4>, f<2> and f<1>(first row) of as many rows, until all are done.
template <class F>
FLASHPORT_DEVICE void for_row_groups(int rows, const F& f) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) f.template operator()<4>(row);
  if (row + 2 <= rows) f.template operator()<2>(row), row += 2;
  if (row < rows) f.template operator()<1>(row);
}

}  // namespace flashport::FLASHPORT_TARGET::decode
