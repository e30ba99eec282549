// Operands of blocks whose header is longer than a scale: q4_1 (scale, minimum), q5_0 (scale, fifth bits) and q5_1 (all
// three). Their codes are in two units of 16 bytes that `ldmatrix` brings for each block anew. Where these lie follows
// from the byte in the row at which the head begins (row_layout.h), in few instructions for each block of a turn.
//
// A value is d (code - middle) + (m + d middle). Codes become subnormals (block_widening.h); what they have too much is
// `middle`, and the products of that and of the second term are multiples of the same sums of queries, or of
// probabilities. So minima come as -(d + m / middle), for the operands that take off what is too much.
#pragma once

#include "cuda/decode/kv_operand.h"

namespace flashport::FLASHPORT_TARGET::decode {

inline constexpr unsigned kFiveBits = 0x001f001f;

template <KvFormat kFormat>
struct LongHeader {
  static constexpr int kBlockBytes = kv_format_trait(kFormat).block_bytes;
  static constexpr float kMiddle = has_fifth_bits(kFormat) ? 16.0f : 8.0f;
  static_assert(block_widening(kFormat).values_too_much[0][0] % 256 == (has_fifth_bits(kFormat) ? 0x10 : 0x88));
  static constexpr unsigned kInverse = has_fifth_bits(kFormat) ? 0x2c002c00u : 0x30003000u;  // 1 / kMiddle, twice
  static constexpr int kFifthBitsByte = kv_format_trait(kFormat).scale_bytes;
  static_assert(units_of_block(kFormat) == 1 && kFifthBitsByte == (has_minimum(kFormat) ? 4 : 2));
};

template <DecodeConfig kCfg, KvFormat kFormat>
  requires(has_long_header(kFormat))
struct KeyOperand<kCfg, kFormat> : LongHeader<kFormat> {
  using Format = LongHeader<kFormat>;
  using Layout = typename KvTiles<kCfg>::template KeysOf<kFormat>;
  static_assert(Layout::kExchanged <= 32, "where a unit lies follows from its row modulo eight");
  static_assert(kCfg.shape.head_dim_qk == 128, "a head begins with an even block");

  FLASHPORT_DEVICE KeyOperand(int lane, int first_key, const HeadPlace& head)
      : lane_(lane),
        head_byte_(head.byte),
        code_row_(Layout::row_offset(first_key + lane % 16)),
        header_row_(Layout::row_offset(first_key + lane / 4)) {
    for (int block = 0; block < kBlocks; ++block) {
      selectors_[block] = block_selector(kFormat, head.block + block, lane % 4);
      asm volatile("" : "+r"(selectors_[block]));  // once, not for each leaf
    }
  }

  FLASHPORT_DEVICE void load(unsigned (&a)[2][4], KeyFactors& factors, unsigned (&)[kept_words(kFormat)],
                             const char* tile, int key, int group) const {
    const int begin = head_byte_ + Format::kBlockBytes * group, end = begin + Format::kBlockBytes;
    unsigned units[4];
    const int units_byte = block_units_byte(end, lane_) ^ Layout::swizzle(lane_ % 16);
    ldmatrix_x4(units, tile + (code_row_ + units_byte) + Layout::row_offset(key));
    for (int half = 0; half < 2; ++half) {
      const Header header(tile + header_row_ + Layout::row_offset(key + 8 * half), group, begin,
                          Layout::swizzle(lane_ / 4));
      factors.scale[half] = to_float(header.scale);
      if constexpr (has_minimum(kFormat)) {
        factors.minimum[half] = fma_rn(to_float(header.minimum), -1.0f / Format::kMiddle, -factors.scale[half]);
      }
      const unsigned four = __byte_perm(units[half], units[2 + half], selectors_[group]);
      if constexpr (has_fifth_bits(kFormat)) {
        const int first = (4 * lane_ - end) & 15;  // the lane's first code is that of this value
        const unsigned low = with_fifth_bits(four, header.fifth_bits[0] >> first);
        const unsigned high = with_fifth_bits(four >> 4, header.fifth_bits[1] >> first);
        for (int i = 0; i < 2; ++i) {
          a[0][half + 2 * i] = low >> 8 * i & kFiveBits;
          a[1][half + 2 * i] = high >> 8 * i & kFiveBits;
        }
      } else {
        for (int i = 0; i < 2; ++i) {
          a[0][half + 2 * i] = four >> 8 * i & kLowCodes;
          a[1][half + 2 * i] = four >> 8 * i & kHighCodes;
        }
      }
    }
  }

 private:
  // A block's, in a row of the tile.
  struct Header {
    Half scale, minimum;
    unsigned fifth_bits[2];  // of its first 16 values and of the others, so that what is shifted out comes in again
    FLASHPORT_DEVICE Header(const char* row, int block, int begin, int exchanged) {
      const auto at = [&](int byte) { return row + ((begin + byte) ^ exchanged); };
      if constexpr (!has_minimum(kFormat)) {
        // Words begin at multiples of four bytes: the scale and what follows it in every second block, else the rest.
        if (block % 2 == 0) {
          const auto word = *reinterpret_cast<const unsigned*>(at(0));
          scale = __builtin_bit_cast(Half, static_cast<std::uint16_t>(word));
          fifth_bits[0] = __byte_perm(word, 0, 0x3232);
          fifth_bits[1] = *reinterpret_cast<const std::uint16_t*>(at(4)) * 0x10001u;
        } else {
          scale = *reinterpret_cast<const Half*>(at(0));
          const auto word = *reinterpret_cast<const unsigned*>(at(2));
          fifth_bits[0] = __byte_perm(word, 0, 0x1010);
          fifth_bits[1] = __byte_perm(word, 0, 0x3232);
        }
      } else {
        unsigned scale_and_minimum;
        if constexpr (has_fifth_bits(kFormat)) {  // at multiples of eight bytes
          const auto words = *reinterpret_cast<const uint2*>(at(0));
          scale_and_minimum = words.x;
          fifth_bits[0] = words.y;
          fifth_bits[1] = words.y >> 16;
        } else {
          scale_and_minimum = *reinterpret_cast<const unsigned*>(at(0));
        }
        scale = __builtin_bit_cast(Half, static_cast<std::uint16_t>(scale_and_minimum));
        minimum = __builtin_bit_cast(Half, static_cast<std::uint16_t>(scale_and_minimum >> 16));
      }
    }
  };

  // Codes of a byte each, in the order 0, 2, 1, 3 and with anything above their four bits, and bits 0 to 3 of `bits`.
  FLASHPORT_DEVICE static unsigned with_fifth_bits(unsigned codes, unsigned bits) {
    return select_bits<0x0f0f0f0fu>(codes, (bits & 15u) * 0x02080410u);  // to bits 4, 20, 12 and 28
  }

  static constexpr int kBlocks = kCfg.shape.head_dim_qk / 32;
  int lane_, head_byte_, code_row_, header_row_;
  unsigned selectors_[kBlocks];
};

template <DecodeConfig kCfg, KvFormat kFormat, int kGroups>
  requires(has_long_header(kFormat))
struct ValueOperand<kCfg, kFormat, kGroups> : LongHeader<kFormat> {
  using Format = LongHeader<kFormat>;
  using Layout = typename KvTiles<kCfg>::template ValuesOf<kFormat>;
  static constexpr int kTiles = value_tiles(kFormat);
  static_assert(Layout::kExchanged <= 32, "where a unit lies follows from its row modulo eight");

  FLASHPORT_DEVICE ValueOperand(int lane, int first_group, const HeadPlace& head)
      : lane_(lane), head_byte_(head.byte), first_byte_(head.byte + Format::kBlockBytes * first_group) {}

  static_assert(kCfg.shape.head_dim_v == 128);
  // Blocks of q4_1 and q5_1 are turned alike in all heads. Those of q5_0 begin half a unit later in odd heads.
  FLASHPORT_DEVICE int first_block(int) const { return head_byte_ % 16 == 0 ? 0 : 4; }

  FLASHPORT_DEVICE void load(unsigned (&a)[kTiles][4], ValueFactors& factors, unsigned (&)[kept_words(kFormat)],
                             const char* tile, int key, int group) const {
    const int begin = first_byte_ + Format::kBlockBytes * group, end = begin + Format::kBlockBytes;
    const char* row = tile + Layout::row_offset(lane_ % 16) + Layout::row_offset(key);
    const auto unit = [&](int byte) { return row + (byte ^ Layout::swizzle(lane_ % 16)); };
    const int place = lane_ / 4 * 2;  // of the two bytes of a unit that are the lane's
    unsigned units[4], headers[2];
    ldmatrix_x4_trans(units, unit(block_units_byte(end, lane_)));
    if constexpr (kFormat == KvFormat::kQ5_0) ldmatrix_x2_trans(headers, unit(begin & ~15));
    for (int half = 0; half < 2; ++half) {
      const unsigned first = units[half], last = units[2 + half];
      // A header of q5_0 may be in two units, the others are in the first.
      unsigned header = first;
      if constexpr (kFormat == KvFormat::kQ5_0) header = place >= (begin & 15) ? headers[half] : first;
      const auto header_at = [&](int byte) { return __shfl_sync(~0u, header, 2 * (begin + byte) + lane_ % 4); };
      factors.scale[half] = header_at(0);
      if constexpr (has_minimum(kFormat)) {
        factors.minimum[half] = minus_fma_halves(header_at(2), Format::kInverse, factors.scale[half]);
      }
      const unsigned two = place > ((end - 1) & 15) ? first : last;  // bytes of two keys
      if constexpr (has_fifth_bits(kFormat)) {
        // Codes of the operand's upper rows are twice as large, those of the second tile 16 times.
        const int value = (place - end) & 15;
        const unsigned low = header_at(Format::kFifthBitsByte), high = header_at(Format::kFifthBitsByte + 2);
        const unsigned of_low = __funnelshift_r(low, low, value - 4), of_high = __funnelshift_r(high, high, value - 8);
        const unsigned doubled = two >> 7;
        a[0][2 * half] = (two & 0x000f000fu) | (of_low & 0x00100010u);
        a[0][2 * half + 1] = (doubled & 0x001e001eu) | (of_low & 0x00200020u);
        a[1][2 * half] = (two & 0x00f000f0u) | (of_high & 0x01000100u);
        a[1][2 * half + 1] = (doubled & 0x01e001e0u) | (of_high & 0x02000200u);
      } else {
        whole_bytes_and_high_codes(a, half, two);
      }
    }
  }

 private:
  int lane_, head_byte_, first_byte_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
