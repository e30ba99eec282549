// New keys and values of a call of attention, and rotary position embedding: the checks of their arguments, and the
// params of the kernel that runs before the attention.
#pragma once

#include <cstdint>

#include <flashport/attention.h>

#include "common/device/attention/params.h"
#include "common/host/arguments.h"
#include "common/host/check.h"

namespace flashport {

inline constexpr DTypes kNewTypes = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

void check_append_presence(const Check& check, const AttentionArgs& args);

template <std::size_t kMost>
void add_append_arguments(ArgumentTable<kMost>& table, const AttentionArgs& a) {
  using enum Strides;
  const bool packed = a.cu_seqlens_k_new.has_value();
  const auto axes = [packed](const char* packed_text, const char* dense_text) {
    return packed ? Axes{3, packed_text} : Axes{4, dense_text};
  };
  const DTypes types = a.rotary_cos ? DTypes{a.q.dtype} : kNewTypes;
  table.add(a.k_new, "k_new", kRead, types, kAny,
            axes("(total_new, num_kv_heads, head_dim)", "(batch, new_len, num_kv_heads, head_dim)"));
  table.add(a.v_new, "v_new", kRead, types, kAny,
            axes("(total_new, num_kv_heads, head_dim_v)", "(batch, new_len, num_kv_heads, head_dim_v)"));
  table.add(a.cu_seqlens_k_new, "cu_seqlens_k_new", kRead, {DType::kInt32}, kContiguous, {1, "(batch + 1)"});
  table.add(a.rotary_cos, "rotary_cos", kRead, kNewTypes, kUnitInner, {2, "(positions, rotary_dim / 2)"});
  if (a.rotary_cos) {
    table.add(a.rotary_sin, "rotary_sin", kRead, {a.rotary_cos->dtype}, kUnitInner, {2, "(positions, rotary_dim / 2)"});
  }
}

// The extents that new keys must agree with.
struct CacheExtents {
  std::int64_t batch, num_kv_heads, head_dim, head_dim_v;
};
void check_append_shapes(const Check& check, const AttentionArgs& args, const CacheExtents& cache);

// The params without their places in the workspace, from those of the attention. The cache has `pages` pages.
[[nodiscard]] AppendRotaryParams append_params(const AttentionArgs& args, const AttentionParams& p, std::int64_t pages);

// As much of them as says which launch and workspace a call of such shapes needs, `turns` with rotary_cos.
[[nodiscard]] AppendRotaryParams append_room(const AttentionParams& p, bool turns);

// Bytes after the rest of the workspace: the copies of the queries, if they are turned, and the lengths.
[[nodiscard]] std::int64_t append_bytes(const AppendRotaryParams& params);
// Points the params there, and gives the queries and lengths that the attention takes in place of the given ones.
struct AppendedCall {
  StridedRows q;
  const std::int32_t* seqlens;
};
[[nodiscard]] AppendedCall bind_append(AppendRotaryParams& params, const StridedRows& q, void* area);

// Axes: [seq] token head dim.
[[nodiscard]] StridedRows rows_of(const TensorView& view);

}  // namespace flashport
