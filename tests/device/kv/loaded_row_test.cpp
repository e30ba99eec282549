// The values of a row that lanes put together from their loads and their neighbours' (hip/kv/loaded_row.h), against the
// reference's codecs.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <type_traits>

#define FLASHPORT_TARGET host_words
#define FLASHPORT_WORDS_HEADER "tests/device/kv/word_verbs.h"
#include "hip/kv/loaded_row.h"
#include "tests/device/kv/random_rows.h"

namespace flashport::host_words {
namespace {

constexpr unsigned kLanes = 8;

// Loads of neighbouring lanes, and one of these.
template <int kCount>
struct Lanes {
  const std::array<std::array<unsigned, kCount / 2>, kLanes>& loads;
  unsigned lane, first;  // its first value

  [[nodiscard]] unsigned word(int i) const { return loads[lane].at(static_cast<std::size_t>(i)); }
  template <kv::LaneOf kWhich, class F>
  unsigned take(const F& f) const {
    const unsigned other = kv::lane_of(kWhich, lane);
    const Lanes theirs{loads, other, first + (other - lane) * kCount};
    return f(theirs, theirs.first);
  }
};

template <KvFormat kFormat, int kCount>
void expect_row(reference::Type type, const std::vector<unsigned char>& bytes, int dims) {
  using Row = kv::LoadedRow<kFormat, kCount>;
  const auto end = static_cast<unsigned>(dims), row_bytes = static_cast<unsigned>(kv_row_bytes(kFormat, dims));
  for (unsigned group = 0; group < end; group += kLanes * kCount) {
    std::array<std::array<unsigned, kCount / 2>, kLanes> loads{};
    for (unsigned lane = 0; lane < kLanes && group + lane * kCount < end; ++lane) {
      const unsigned begin = Row::begin(group + lane * kCount, end);
      ASSERT_EQ(begin, kv::load_begin<kCount>(kFormat, group + lane * kCount, end));
      ASSERT_LE(begin + 2 * kCount, row_bytes);
      for (unsigned i = 0; i < kCount / 2; ++i) {
        loads[lane][i] = reference::load_as<std::uint32_t>(bytes.data() + begin + 4 * i);
      }
    }
    for (unsigned lane = 0; lane < kLanes && group + lane * kCount < end; ++lane) {
      const unsigned first = group + lane * kCount;
      const Row row(Lanes<kCount>{loads, lane, first}, first, end);
      for (int i = 0; i < kCount; ++i) {
        const Words2 four =
            kv::load_four<MathType::kFp16, kFormat, false>(row, static_cast<int>(Row::base(first)) + i / 4 * 4, 0.0f);
        const unsigned two = i % 4 < 2 ? four.x : four.y;
        const double got = reference::decode(two >> i % 2 * 16 & 0xffff, reference::kHalf);
        const double want =
            reference::round_to(stored_value(bytes.data(), type, static_cast<int>(first) + i), reference::Type::kF16);
        ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want)))
            << kv_format_trait(kFormat).name << ", " << kCount << " a lane, value " << first + i << " of " << dims
            << ": " << got << ", expected " << want;
      }
    }
  }
}

TEST(LoadedRow, ValuesAreTheReferences) {
  std::mt19937 random(4);
  for (const Format& f : kFormats) {
    for (const int dims : {16, 24, 32, 40, 64, 96, 104, 128, 192}) {
      if (dims % kv_format_trait(f.format).block_values != 0) continue;
      for (int repeat = 0; repeat < 20; ++repeat) {
        const std::vector<unsigned char> bytes = random_row(f.format, dims, random);
        kv::with_format(f.format, [&](auto constant) {
          constexpr KvFormat kFormat = constant;
          expect_row<kFormat, 8>(f.type, bytes, dims);
          expect_row<kFormat, 4>(f.type, bytes, dims);
        });
      }
    }
  }
}

}  // namespace
}  // namespace flashport::host_words
