// Rows of random bytes of every format but e4m3, in which blocks have scales of ordinary size, and their values.
#pragma once

#include <random>
#include <vector>

#include "common/device/kv/format.h"
#include "tests/reference/blocks.h"

namespace flashport::host_words {

inline double stored_value(const unsigned char* row, reference::Type type, int at) {
  if (reference::is_blocks(type)) return reference::read_block_value(type, row, at);
  if (type == reference::Type::kI4) return static_cast<signed char>((row[at / 2] >> at % 2 * 4 & 15) << 4) / 16;
  return reference::read_number(row + at * reference::type_bytes(type), type);
}

struct Format {
  KvFormat format;
  reference::Type type;
};
inline constexpr Format kFormats[] = {
    {KvFormat::kFp16, reference::Type::kF16},     {KvFormat::kBf16, reference::Type::kBF16},
    {KvFormat::kFp8E5M2, reference::Type::kE5M2}, {KvFormat::kInt8, reference::Type::kI8},
    {KvFormat::kInt4, reference::Type::kI4},      {KvFormat::kQ8_0, reference::Type::kQ8_0},
    {KvFormat::kQ4_0, reference::Type::kQ4_0},    {KvFormat::kQ4_1, reference::Type::kQ4_1},
    {KvFormat::kQ5_0, reference::Type::kQ5_0},    {KvFormat::kQ5_1, reference::Type::kQ5_1},
    {KvFormat::kIq4Nl, reference::Type::kIq4Nl}};

inline std::vector<unsigned char> random_row(KvFormat format, int dims, std::mt19937& random) {
  const KvFormatTrait trait = kv_format_trait(format);
  std::vector<unsigned char> row(static_cast<std::size_t>(kv_row_bytes(format, dims)) + 2);
  for (unsigned char& byte : row) byte = static_cast<unsigned char>(random());
  std::uniform_real_distribution<double> scale(-2.0, 2.0);
  for (int block = 0; trait.scale_bytes > 0 && block < dims / trait.block_values; ++block) {
    for (int byte = 0; byte < trait.scale_bytes; byte += 2) {
      reference::write_number(row.data() + block * trait.block_bytes + byte, reference::Type::kF16, scale(random));
    }
  }
  return row;
}

}  // namespace flashport::host_words
