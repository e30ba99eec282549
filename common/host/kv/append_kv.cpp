// append_kv: validate -> params -> a thread for each unit of 32 values. A token's position is its slot of the cache:
// one number that says page and offset.
#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include <flashport/decode.h>

#include "common/device/kv/params.h"
#include "common/host/arguments.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/contents.h"
#include "common/host/devices.h"
#include "common/host/kv/cache_layout.h"
#include "common/host/launch_plan.h"
#include "common/host/query.h"

namespace flashport {
namespace {

constexpr Check kCheck("append_kv");
constexpr DTypes kSourceTypes = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
constexpr DTypes kCacheTypes = {DType::kFloat32,     DType::kFloat16, DType::kBFloat16, DType::kFp8E4M3,
                                DType::kFp8E4M3Fnuz, DType::kFp8E5M2, DType::kInt8,     DType::kUInt8};

ArgumentTable<7> table_of(const AppendKvArgs& args) {
  const auto& [k, v, k_cache, v_cache, positions, kv_layout, k_scale, v_scale, k_format, v_format] = args;
  using enum Strides;
  ArgumentTable<7> table;
  table.add(k, "k", kRead, kSourceTypes, kAny, {3, "(tokens, num_kv_heads, head_dim)"});
  table.add(v, "v", kRead, {k.dtype}, kAny, {3, "(tokens, num_kv_heads, head_dim_v)"});
  // cache_params() checks how caches lie.
  table.add(k_cache, "k_cache", kWritten, kCacheTypes, kAny, {4, cache_axes_text(4, kv_layout, false)},
            {3, cache_axes_text(3, kv_layout, false)});
  table.add(v_cache, "v_cache", kWritten, kCacheTypes, kAny,
            {k_cache.rank, cache_axes_text(k_cache.rank, kv_layout, true)});
  table.add(positions, "positions", kRead, {DType::kInt32, DType::kInt64}, kContiguous, {1, "(tokens)"});
  add_scale_argument(table, k_scale, "k_scale", k_cache, kWritten);
  add_scale_argument(table, v_scale, "v_scale", k_cache, kWritten);
  return table;
}

struct Formats {
  KvFormat k, v;
};

void check_scale(const std::optional<TensorView>& scale, const char* name, const TensorView& cache,
                 const char* cache_name, KvFormat format, std::int64_t num_kv_heads, std::int64_t head_dim) {
  if (!lies_beside(scale, cache)) {
    if (format == KvFormat::kInt4) {
      kCheck.value_error(std::string(name) + " must be given for int4, and have shape " + beside_text(cache_name) +
                         ", got " + (scale ? shape_text(*scale) : "none") + "; the scales are written there");
    }
    return check_scale_shape(kCheck, scale, name, num_kv_heads);
  }
  if (kv_format_trait(format).largest == 0) {
    kCheck.value_error(std::string(name) + " must have shape (1,) or (num_kv_heads,) = (" +
                       std::to_string(num_kv_heads) + ",) for " + kv_format_name(format) + ", got " +
                       shape_text(*scale) + "; rows of fp8, int8 and int4 alone have scales of their own");
  }
  check_cache_scale(kCheck, scale, name, cache, cache_name, num_kv_heads, head_dim);
}

// The extents of a cache's rows follow from its format, which must be known before shapes are compared.
Formats validate(const AppendKvArgs& a, CacheAxes& axes) {
  const ArgumentTable<7> table = table_of(a);
  check_ranks(kCheck, table);

  axes = cache_axes(a.k_cache.rank, a.kv_layout);
  const std::int64_t tokens = a.k.shape[0];
  const std::int64_t heads = a.k.shape[1];
  kCheck.shape(a.v, "v", "(tokens, num_kv_heads, head_dim_v)", {tokens, heads, kAnyExtent});
  const Formats formats{cache_format(kCheck, a.k_cache, "k_cache", a.k_format, "k_format"),
                        cache_format(kCheck, a.v_cache, "v_cache", a.v_format, "v_format")};
  for (const std::string& problem :
       {block_problem(formats.k, "head_dim", a.k.shape[2]), block_problem(formats.v, "head_dim_v", a.v.shape[2])}) {
    if (!problem.empty()) kCheck.not_supported(problem);
  }
  const char* k_text = cache_axes_text(a.k_cache.rank, a.kv_layout, false);
  const char* v_text = cache_axes_text(a.k_cache.rank, a.kv_layout, true);
  const std::int64_t k_extent = stored_extent(formats.k, a.k.shape[2]);
  const std::int64_t v_extent = stored_extent(formats.v, a.v.shape[2]);
  const std::int64_t* cache = a.k_cache.shape;
  if (a.k_cache.rank == 3) {
    kCheck.shape(a.k_cache, "k_cache", k_text, {kAnyExtent, heads, k_extent});
    kCheck.shape(a.v_cache, "v_cache", v_text, {cache[0], heads, v_extent});
  } else {
    const bool nhd = a.kv_layout == KvLayout::kNHD;
    kCheck.shape(a.k_cache, "k_cache", k_text,
                 {kAnyExtent, nhd ? kAnyExtent : heads, nhd ? heads : kAnyExtent, k_extent});
    kCheck.shape(a.v_cache, "v_cache", v_text, {cache[0], cache[1], cache[2], v_extent});
  }
  kCheck.shape(a.positions, "positions", "(tokens)", {tokens});
  check_scale(a.k_scale, "k_scale", a.k_cache, "k_cache", formats.k, heads, a.k.shape[2]);
  check_scale(a.v_scale, "v_scale", a.v_cache, "v_cache", formats.v, heads, a.v.shape[2]);
  for (std::int64_t extent : {heads, a.k.shape[2], a.v.shape[2]}) {
    if (extent > std::numeric_limits<std::int32_t>::max()) {
      kCheck.value_error("k must have extents below 2^31, got " + shape_text(a.k));
    }
  }

  check_tensors(kCheck, table);
  return formats;
}

// The kernel that writes both sides; `beside`: with scales beside a cache.
KernelTag kernel_tag(Formats formats, bool beside) {
  const auto is_simple = [](KvFormat format) { return format <= KvFormat::kQ8_0; };
  return beside || !is_simple(formats.k) || !is_simple(formats.v) ? KernelTag::kAppendAny : KernelTag::kAppendKv;
}

AppendSide append_side(const TensorView& source, const TensorView& cache, const char* name, CacheAxes axes,
                       KvFormat format, const std::optional<TensorView>& scale) {
  AppendSide side{};
  side.rows = {source.data, source.dtype, 0, source.strides[0], source.strides[1], source.strides[2]};
  side.cache = cache_params(kCheck, cache, name, axes, format, source.shape[2]);
  side.head_dim = static_cast<std::int32_t>(source.shape[2]);
  side.format = format;
  side.unit_bytes = unit_bytes(format);
  if (lies_beside(scale, cache)) {
    side.row_scales = key_scales(scale, cache, axes, source.shape[2]);
  } else if (scale) {
    side.scale = static_cast<const float*>(scale->data);
    side.scale_stride = is_per_head(*scale) ? 1 : 0;
  }
  return side;
}

const KernelEntry* answer(const AppendQuery& query, std::string& reason) {
  reason = dtype_problem("k", query.dtype, kSourceTypes);
  if (!reason.empty()) return nullptr;
  const KvFormat own = *own_format(query.dtype);
  const Formats formats{query.k_format.value_or(own), query.v_format.value_or(own)};
  for (const auto& [name, dim] : {std::pair{"head_dim", query.head_dim_qk}, {"head_dim_v", query.head_dim_v}}) {
    if (dim >= 1 && dim <= std::numeric_limits<std::int32_t>::max()) continue;
    reason = std::string(name) + " must be 1 or more and below 2^31, got " + std::to_string(dim);
    return nullptr;
  }
  reason = block_problem(formats.k, "head_dim", query.head_dim_qk);
  if (reason.empty()) reason = block_problem(formats.v, "head_dim_v", query.head_dim_v);
  if (!reason.empty()) return nullptr;
  const TargetView target = find_target(query.target, reason);
  return reason.empty() ? find_plain_kernel(target, kernel_tag(formats, query.scales_beside), reason) : nullptr;
}

}  // namespace

Support supports(const AppendQuery& query) {
  return support_answer([&](std::string& reason) { return answer(query, reason); });
}

std::string which_kernel(const AppendQuery& query) {
  return kernel_answer([&](std::string& reason) { return answer(query, reason); });
}

LaunchSchedule explain(const AppendScheduleQuery& query) {
  constexpr Check check("explain");
  check.range(query.num_kv_heads, "num_kv_heads", 1, std::numeric_limits<std::int32_t>::max());
  check.range(query.tokens, "tokens", 1, kMostExplainedRows / query.num_kv_heads);
  return explain_launch(
      check, query.call.target, [&](std::string& reason) { return answer(query.call, reason); },
      [&](const KernelEntry& kernel) {
        return plan_units(kernel, query.tokens * query.num_kv_heads,
                          std::max(query.call.head_dim_qk, query.call.head_dim_v));
      });
}

void append_kv(const AppendKvArgs& args, Stream stream) {
  CacheAxes axes{};
  const Formats formats = validate(args, axes);
  AppendParams p{};
  p.k = append_side(args.k, args.k_cache, "k_cache", axes, formats.k, args.k_scale);
  p.v = append_side(args.v, args.v_cache, "v_cache", axes, formats.v, args.v_scale);
  p.tokens = args.k.shape[0];
  p.num_kv_heads = static_cast<std::int32_t>(args.k.shape[1]);
  p.slots = index_array(args.positions);
  const std::int64_t page_size = axes.token < 0 ? 1 : args.k_cache.shape[axes.token];
  p.page_size = std::max<std::int64_t>(page_size, 1);
  p.num_slots = args.k_cache.shape[axes.page] * page_size;

  const std::int64_t rows = p.tokens * p.num_kv_heads, longest = std::max(p.k.head_dim, p.v.head_dim);
  const auto call = [&] {
    return CallText(kCheck.function(), table_of(args))
               .word("kv_layout", args.kv_layout == KvLayout::kHND ? "HND" : "NHD", "NHD")
               .word("k_format", args.k_format ? kv_format_name(*args.k_format) : "", "")
               .word("v_format", args.v_format ? kv_format_name(*args.v_format) : "", "")
               .text() +
           ": ";
  };
  if (rows == 0 || longest == 0) return log_call([&] { return call() + kNothingToDo; });
  DeviceContext& device = device_context(kCheck, args.k, "k");
  const bool beside = p.k.row_scales.data != nullptr || p.v.row_scales.data != nullptr;
  const LaunchPlan plan = plan_units(device.plain_kernel(kCheck, kernel_tag(formats, beside)), rows, longest);
  if (checks_contents(kCheck, device, stream)) {
    check_index_range(kCheck, device, stream, p.slots, p.tokens, "positions", -1, p.num_slots - 1,
                      "-1 skips a token; page * page_size + offset otherwise");
    check_scales(kCheck, device, stream, p.k.scale, p.k.scale_stride == 0 ? 1 : p.num_kv_heads, "k_scale");
    check_scales(kCheck, device, stream, p.v.scale, p.v.scale_stride == 0 ? 1 : p.num_kv_heads, "v_scale");
  }
  device.launch(kCheck, stream, *plan.kernel, LaunchGrid{plan.blocks}, p);
  log_call([&] { return call() + schedule_of(plan).text; });
}

}  // namespace flashport
