// Which views share memory: the search against all addresses of small views, and the views that servers make.
#include "common/host/overlap.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <string>
#include <vector>

#include "common/host/arguments.h"
#include "tests/host/decode/decode_inputs.h"

namespace flashport {
namespace {

constexpr std::uintptr_t kBase = 1 << 20;

TensorView view_at(std::int64_t bytes, DType type, std::initializer_list<std::int64_t> shape,
                   std::initializer_list<std::int64_t> strides) {
  // Never read: overlap is a matter of addresses.
  TensorView view(reinterpret_cast<void*>(kBase + static_cast<std::uintptr_t>(bytes)), type, Device{}, shape);
  std::copy(strides.begin(), strides.end(), view.strides);
  return view;
}

void mark(const TensorView& view, std::int64_t at, int axis, std::vector<bool>& bytes) {
  const int size = element_size(view.dtype);
  if (axis == view.rank) {
    for (int i = 0; i < size; ++i) bytes[static_cast<std::size_t>(at + i)] = true;
    return;
  }
  for (std::int64_t i = 0; i < view.shape[axis]; ++i) mark(view, at + i * view.strides[axis] * size, axis + 1, bytes);
}

Overlap by_all_addresses(const TensorView& a, const TensorView& b) {
  const auto begin = static_cast<std::int64_t>(std::min(byte_range(a).begin, byte_range(b).begin));
  const auto end = static_cast<std::int64_t>(std::max(byte_range(a).end, byte_range(b).end));
  std::vector<bool> bytes[2];
  for (const TensorView* view : {&a, &b}) {
    std::vector<bool>& own = bytes[view == &b];
    own.resize(static_cast<std::size_t>(end - begin));
    mark(*view, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(view->data)) - begin, 0, own);
  }
  for (std::size_t i = 0; i < bytes[0].size(); ++i) {
    if (bytes[0][i] && bytes[1][i]) return Overlap::kShared;
  }
  return Overlap::kNone;
}

std::string text_of(const TensorView& view) {
  std::string text = "at " + std::to_string(reinterpret_cast<std::uintptr_t>(view.data) - kBase) + " of " +
                     std::to_string(element_size(view.dtype)) + " bytes:";
  for (int axis = 0; axis < view.rank; ++axis) {
    text += " " + std::to_string(view.shape[axis]) + " x " + std::to_string(view.strides[axis]);
  }
  return text;
}

struct Spread {
  int most_rank, most_extent, most_stride, most_offset, pairs;
};

class OverlapOfRandomViews : public testing::TestWithParam<Spread> {};

TEST_P(OverlapOfRandomViews, IsThatOfAllAddresses) {
  const Spread s = GetParam();
  std::mt19937 random(7);
  const auto number = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  constexpr DType kTypes[] = {DType::kUInt8, DType::kBFloat16, DType::kFloat32, DType::kInt64};
  const auto make = [&] {
    TensorView view = view_at(number(0, s.most_offset), kTypes[number(0, 3)], {}, {});
    view.rank = number(0, s.most_rank);
    for (int axis = 0; axis < view.rank; ++axis) {
      view.shape[axis] = number(1, s.most_extent);
      view.strides[axis] = number(-s.most_stride, s.most_stride);
    }
    return view;
  };
  int apart = 0, shared = 0;
  for (int pair = 0; pair < s.pairs; ++pair) {
    const TensorView a = make(), b = make();
    if (!byte_range(a).meets(byte_range(b))) continue;
    const Overlap wanted = by_all_addresses(a, b);
    ++(wanted == Overlap::kNone ? apart : shared);
    ASSERT_EQ(find_overlap(a, b), wanted) << text_of(a) << "; " << text_of(b);
    ASSERT_EQ(find_overlap(b, a), wanted) << text_of(b) << "; " << text_of(a);
  }
  EXPECT_GT(apart, s.pairs / 40);
  EXPECT_GT(shared, s.pairs / 40);
}

INSTANTIATE_TEST_SUITE_P(Overlap, OverlapOfRandomViews,
                         testing::Values(Spread{4, 4, 9, 90, 40000}, Spread{3, 12, 60, 900, 4000},
                                         Spread{2, 40, 500, 9000, 4000}, Spread{8, 3, 40, 300, 2000}));

// LightLLM's mid_out and its logsumexp are slices of one array.
TEST(Overlap, NoneWhereSlicesOfRowsInterleave) {
  const auto slices = [](std::int64_t lse_at, std::int64_t steps) {
    const TensorView mid_out = view_at(0, DType::kFloat32, {64, 32, 17, 128}, {32 * 17 * 129, 17 * 129, 129, 1});
    const TensorView lse = view_at(lse_at * 4, DType::kFloat32, {64, 32, 17}, {32 * 17 * 129, 17 * 129, 129});
    return find_overlap(mid_out, lse, steps);
  };
  EXPECT_EQ(slices(128, 0), Overlap::kNone);  // without a search
  EXPECT_EQ(slices(127, 0), Overlap::kShared);
  EXPECT_EQ(slices(129, 0), Overlap::kShared);
}

TEST(Overlap, OfKeysAndValuesOfOnePool) {
  const auto pool = [](std::int64_t head) {
    return view_at(head * 256, DType::kBFloat16, {100000, 4, 128}, {8 * 128, 128, 1});
  };
  EXPECT_EQ(find_overlap(pool(0), pool(4), 0), Overlap::kNone);
  EXPECT_EQ(find_overlap(pool(0), pool(3), 0), Overlap::kShared);
}

TEST(Overlap, OfWhatIsOneElementEach) {
  const TensorView a = view_at(8, DType::kFloat32, {}, {});
  EXPECT_EQ(find_overlap(a, view_at(8, DType::kUInt8, {}, {})), Overlap::kShared);
  EXPECT_EQ(find_overlap(a, view_at(11, DType::kUInt8, {}, {})), Overlap::kShared);
  EXPECT_EQ(find_overlap(a, view_at(12, DType::kUInt8, {}, {})), Overlap::kNone);
  EXPECT_EQ(find_overlap(a, view_at(8, DType::kFloat32, {0}, {1})), Overlap::kNone);
}

TEST(Overlap, PastTwoToThe32Bytes) {
  constexpr std::int64_t kFar = std::int64_t{1} << 40;
  const TensorView a = view_at(0, DType::kFloat32, {8, 8}, {kFar + 3, kFar - 1});
  EXPECT_EQ(find_overlap(a, view_at(16, DType::kFloat32, {8, 8}, {kFar + 3, kFar - 1})), Overlap::kShared);  // 3 + 1
  EXPECT_EQ(find_overlap(a, view_at(8, DType::kFloat32, {8, 8}, {kFar + 3, kFar - 1})), Overlap::kNone);
}

TEST(Overlap, OfStridesThatNoMemoryHasIsNotDecided) {
  constexpr std::int64_t kAbsurd = std::int64_t{1} << 62;
  const TensorView a = view_at(0, DType::kFloat32, {4, 4}, {2, 4});
  EXPECT_EQ(find_overlap(a, view_at(4, DType::kFloat32, {9, 4}, {kAbsurd, 2})), Overlap::kUndecided);
}

// Strides without a common measure: no more steps than it may take, and what is not known by then is refused.
TEST(Overlap, SearchIsBounded) {
  const TensorView a = view_at(0, DType::kFloat32, {99, 99, 99}, {100003, 10007, 4});
  const TensorView b = view_at(8, DType::kFloat32, {98, 97, 50}, {99991, 9973, 4});
  EXPECT_EQ(find_overlap(a, b, 0), Overlap::kUndecided);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(find_overlap(a, b), Overlap::kUndecided);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
  ArgumentTable<2> table;
  table.add(b, "x", kRead, {DType::kFloat32}, Strides::kAny);
  table.add(a, "y", kWritten, {DType::kFloat32}, Strides::kAny);
  EXPECT_EQ(test::error_of<ValueError>([&] { check_outputs_apart(Check("f"), table); }),
            "f: y must not share memory with x, and their strides are too irregular to find out whether they do; pass "
            "another tensor");
}

}  // namespace
}  // namespace flashport
