// Factors that lie beside keys and values, one for each row or group of its values: how they come to shared memory with
// the rows, and how the widened rows of a tile are multiplied by them. A tile without factors asks once whether it has
// any.
//
// Codes and values of 8 bits are exact in fp16, so a product with their factor is rounded once. Values of blocks and of
// bf16 have been rounded to fp16 before.
#pragma once

#include "common/device/kv/paged_kv.h"
#include "common/device/kv/widen.h"
#include "cuda/arch/mma.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The place of a tile's factors. Those of a row begin at bytes + row * pitch + begins[row], and have as many bytes as
// their values share.
struct FactorRows {
  unsigned char* bytes;  // it and pitch are multiples of 16
  std::uint8_t* begins;
  int pitch;
};

FLASHPORT_DEVICE int factor_bytes(const KeyScales& scales) { return scales.dtype == DType::kFloat16 ? 2 : 4; }
FLASHPORT_DEVICE int factors_of_row(const KeyScales& scales, int dims) {
  return scales.dims_per_scale == 0 ? 1 : dims / scales.dims_per_scale;
}

// Bytes that a row's factors take at most, where copies are of words.
FLASHPORT_DEVICE int factor_room(const KeyScales& scales, int dims) {
  if (scales.data == nullptr) return 0;
  const auto strides = static_cast<std::uint64_t>(scales.stride_page | scales.stride_token | scales.stride_head);
  const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(scales.data) | strides * factor_bytes(scales);
  return (factors_of_row(scales, dims) * factor_bytes(scales) + static_cast<int>(bits & 2) + 15) / 16 * 16;
}

// A lane copies the factors of a row from element `first` on; of a row that is not there they are zeros.
FLASHPORT_DEVICE void copy_factors(const FactorRows& to, int row, const KeyScales& scales, int dims, bool is_there,
                                   std::int64_t first) {
  const int size = factor_bytes(scales), count = factors_of_row(scales, dims), bytes = count * size;
  const char* from = static_cast<const char*>(scales.data) + (is_there ? first * size : 0);
  unsigned char* at = to.bytes + row * to.pitch;
  const auto address = reinterpret_cast<std::uintptr_t>(from);
  const int begin = count > 1 && scales.stride_group != 1 ? 0 : static_cast<int>(address % 4);
  to.begins[row] = static_cast<std::uint8_t>(begin);
  if (count > 1 && scales.stride_group != 1) {  // one by one
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const char* its = from + i * size * scales.stride_group;
      if (size == 2) {
        reinterpret_cast<std::uint16_t*>(at)[i] = is_there ? *reinterpret_cast<const std::uint16_t*>(its) : 0;
      } else {
        reinterpret_cast<unsigned*>(at)[i] = is_there ? *reinterpret_cast<const unsigned*>(its) : 0;
      }
    }
  } else if ((address | static_cast<unsigned>(bytes)) % 16 == 0) {
#pragma unroll 1
    for (int byte = 0; byte < bytes; byte += 16) copy_async<16>(at + byte, from + byte, is_there);
  } else {
#pragma unroll 1
    for (int byte = 0; byte < begin + bytes; byte += 4) {
      copy_async_first<4>(at + byte, from - begin + byte, is_there ? minimum(begin + bytes - byte, 4) : 0);
    }
  }
}

// Multiplies the warp's rows of a tile of kVectors vectors of 8 values a row, whose factors have landed. row_at(i): its
// i-th row, kRows or more: there are no more. Other lanes may have written what a lane reads.
template <int kVectors, int kRows, class RowAt>
FLASHPORT_DEVICE void multiply_rows(unsigned char* tile, const FactorRows& factors, const KeyScales& scales,
                                    int columns, int lane, const RowAt& row_at) {
  constexpr int kLanes = kVectors < kWaveSize ? kVectors : kWaveSize;  // of a row
  const bool is_half = scales.dtype == DType::kFloat16;
#pragma unroll 1
  for (int vector = lane % kLanes; vector < kVectors && vector * 8 < columns; vector += kLanes) {
    const int group = scales.dims_per_scale == 0 ? 0 : vector * 8 / scales.dims_per_scale;
    const unsigned char* of_row = factors.bytes + group * factor_bytes(scales);
#pragma unroll 1
    for (int i = lane / kLanes; row_at(i) < kRows; i += kWaveSize / kLanes) {
      const int row = row_at(i);
      const unsigned char* factor = of_row + row * factors.pitch + factors.begins[row];
      uint4& x = *reinterpret_cast<uint4*>(tile + vector / 8 * (kRows * 128) + row * 128 + (vector ^ row) % 8 * 16);
      uint4 values = x;
      if (is_half) {
        const unsigned both = kv::both_halves(*reinterpret_cast<const std::uint16_t*>(factor));
        values = {multiply_halves(values.x, both), multiply_halves(values.y, both), multiply_halves(values.z, both),
                  multiply_halves(values.w, both)};
      } else {
        const kv::Factor both = kv::factor_of(*reinterpret_cast<const float*>(factor));
        values = {kv::multiply_halves(values.x, both), kv::multiply_halves(values.y, both),
                  kv::multiply_halves(values.z, both), kv::multiply_halves(values.w, both)};
      }
      x = values;
    }
  }
}

}  // namespace flashport::FLASHPORT_TARGET::attention
