// quantize_kv and dequantize_kv: validate -> collapse the axes before the last to three -> a thread for each unit of 32
// values.
#include <algorithm>
#include <limits>
#include <string>

#include <flashport/decode.h>

#include "common/device/kv/params.h"
#include "common/host/arguments.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/devices.h"
#include "common/host/kv/cache_layout.h"
#include "common/host/launch_plan.h"
#include "common/host/query.h"

namespace flashport {
namespace {

constexpr DTypes kValueTypes = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
constexpr DTypes kScaleTypes = {DType::kFloat32, DType::kFloat16};
constexpr int kAxes = 3;

ArgumentTable<3> table_of(const QuantizeKvArgs& args) {
  const auto& [x, out, format, scale] = args;
  ArgumentTable<3> table;
  table.add(x, "x", kRead, kValueTypes, Strides::kAny);
  table.add(out, "out", kWritten, {kv_format_trait(format).dtype}, Strides::kUnitInner);
  table.add(scale, "scale", kWritten, kScaleTypes, Strides::kAny);
  return table;
}

ArgumentTable<3> table_of(const DequantizeKvArgs& args) {
  const auto& [x, out, format, scale] = args;
  ArgumentTable<3> table;
  table.add(x, "x", kRead, {kv_format_trait(format).dtype}, Strides::kUnitInner);
  table.add(out, "out", kWritten, kValueTypes, Strides::kAny);
  table.add(scale, "scale", kRead, kScaleTypes, Strides::kAny);
  return table;
}

void check_rank(const Check& check, const TensorView& x, const TensorView& out, const char* axes) {
  if (x.rank < 1 || x.rank > kMaxRank) {
    check.value_error("x must have 1 to " + std::to_string(kMaxRank) + " dimensions " + axes + ", got " +
                      std::to_string(x.rank) + ": " + shape_text(x));
  }
  check.rank(out, "out", x.rank, "as x has");
}

// Whether scales lie beside what the format stores; else it is one of ggml's blocks, or an element type's own.
bool has_scales(KvFormat format) { return kv_format_trait(format).largest != 0; }

// Empty, or why the format is none that quantises.
std::string format_problem(KvFormat format) {
  if (is_cache_format(format) && is_quantised(format)) return "";
  std::string names;
  for (int i = 0; i < kKvFormats; ++i) {
    const auto each = static_cast<KvFormat>(i);
    if (is_quantised(each)) names += (names.empty() ? "" : ", ") + std::string(kv_format_name(each));
  }
  return "format must be one of " + names + ", got " + kv_format_name(format) +
         "; for an element type's own format convert the array";
}

void check_format(const Check& check, KvFormat format) {
  if (const std::string problem = format_problem(format); !problem.empty()) check.value_error(problem);
}

void check_scale(const Check& check, const std::optional<TensorView>& scale, const TensorView& values,
                 KvFormat format) {
  if (!has_scales(format)) {
    if (!scale) return;
    check.value_error("scale must be None for " + std::string(kv_format_name(format)) + ", whose blocks hold theirs");
  }
  const std::int64_t dim = values.shape[values.rank - 1];
  if (scale && (is_row_scale(*scale, values) || is_group_scale(*scale, values, dim))) return;
  check.value_error(std::string("scale must be given for ") + kv_format_name(format) + " and have the shape " +
                    tuple_text(values.shape, values.rank) + " of the numbers without its last axis, or with a group " +
                    "of 8 values or a multiple of it in place of each value, got " +
                    (scale ? shape_text(*scale) : "none"));
}

void check_out(const Check& check, const TensorView& out, const TensorView& x, std::int64_t last) {
  std::int64_t wanted[kMaxRank];
  std::copy(x.shape, x.shape + x.rank, wanted);
  wanted[x.rank - 1] = last;
  if (std::equal(wanted, wanted + x.rank, out.shape)) return;
  check.value_error("out must have shape " + tuple_text(wanted, x.rank) + " as x has " + shape_text(x) + ", got " +
                    shape_text(out));
}

struct Axis {
  std::int64_t extent = 1, values = 0, stored = 0, scales = 0;  // the strides of each
};

// Joins neighbours that all tensors walk with one stride; the last axis is the rows' own.
void collapse(const Check& check, const TensorView& values, const TensorView& stored,
              const std::optional<TensorView>& scale, Axis (&axes)[kAxes]) {
  Axis kept[kMaxRank];
  int size = 0;
  for (int i = 0; i < values.rank - 1; ++i) {
    const Axis axis{values.shape[i], values.strides[i], stored.strides[i], scale ? scale->strides[i] : 0};
    if (axis.extent == 1) continue;
    Axis* before = size > 0 ? &kept[size - 1] : nullptr;
    if (before != nullptr && before->values == axis.values * axis.extent &&
        before->stored == axis.stored * axis.extent && before->scales == axis.scales * axis.extent) {
      *before = {before->extent * axis.extent, axis.values, axis.stored, axis.scales};
    } else {
      kept[size++] = axis;
    }
  }
  if (size > kAxes) {
    check.value_error((scale ? "x, out and scale" : "x and out") +
                      std::string(" must be strided so that the axes before the last collapse to ") +
                      std::to_string(kAxes) + "; pass contiguous copies");
  }
  std::copy(kept, kept + size, axes + kAxes - size);
}

template <class Args>
void run(const Check& check, const Args& a, const TensorView& values, const TensorView& stored, KernelTag tag,
         Stream stream) {
  const KvFormat format = a.format;
  const auto table = table_of(a);
  const auto call = [&] {
    return CallText(check.function(), table).word("format", kv_format_name(format), "").text() + ": ";
  };
  if (!has_elements(values)) return log_call([&] { return call() + kNothingToDo; });
  Axis axes[kAxes];
  collapse(check, values, stored, a.scale, axes);
  QuantizeParams p{};
  p.values = {values.data,    values.dtype,   axes[0].values,
              axes[1].values, axes[2].values, values.strides[values.rank - 1]};
  p.stored = {stored.data, stored.dtype, axes[0].stored, axes[1].stored, axes[2].stored, 1};
  if (a.scale) {
    const bool has_groups = a.scale->rank == values.rank;
    const int last = values.rank - 1;
    p.scales = {
        .data = a.scale->data,
        .dtype = a.scale->dtype,
        .stride_page = axes[0].scales,
        .stride_token = axes[1].scales,
        .stride_head = axes[2].scales,
        .stride_group = has_groups ? a.scale->strides[last] : 0,
        .dims_per_scale = has_groups ? static_cast<std::int32_t>(values.shape[last] / a.scale->shape[last]) : 0};
  }
  p.rows = axes[0].extent * axes[1].extent * axes[2].extent;
  p.tokens = axes[1].extent;
  p.heads = axes[2].extent;
  p.format = format;
  p.unit_bytes = unit_bytes(format);
  p.head_dim = static_cast<std::int32_t>(values.shape[values.rank - 1]);
  DeviceContext& device = device_context(check, a.x, "x");
  const LaunchPlan plan = plan_units(device.plain_kernel(check, tag), p.rows, p.head_dim);
  device.launch(check, stream, *plan.kernel, LaunchGrid{plan.blocks}, p);
  log_call([&] { return call() + schedule_of(plan).text; });
}

// That ggml's blocks begin at even addresses.
void check_even(const Check& check, const TensorView& blocks, const char* name, KvFormat format) {
  if (has_scales(format)) return;
  bool even = reinterpret_cast<std::uintptr_t>(blocks.data) % 2 == 0;
  for (int axis = 0; axis < blocks.rank - 1; ++axis) {
    even = even && (blocks.shape[axis] <= 1 || blocks.strides[axis] % 2 == 0);
  }
  if (even || !has_elements(blocks)) return;
  check.value_error(std::string(name) + " must have its data and all rows at even addresses, got strides " +
                    tuple_text(blocks.strides, blocks.rank) + " of 1-byte elements");
}

const KernelEntry* answer(const QuantizeQuery& query, std::string& reason) {
  reason = dtype_problem(query.dequantize ? "out" : "x", query.dtype, kValueTypes);
  if (reason.empty()) reason = format_problem(query.format);
  if (reason.empty() && (query.head_dim < 1 || query.head_dim > std::numeric_limits<std::int32_t>::max())) {
    reason = "head_dim must be 1 or more and below 2^31, got " + std::to_string(query.head_dim);
  }
  if (reason.empty()) reason = block_problem(query.format, "head_dim", query.head_dim);
  if (!reason.empty()) return nullptr;
  const TargetView target = find_target(query.target, reason);
  if (!reason.empty()) return nullptr;
  return find_plain_kernel(target, query.dequantize ? KernelTag::kDequantizeKv : KernelTag::kQuantizeKv, reason);
}

}  // namespace

Support supports(const QuantizeQuery& query) {
  return support_answer([&](std::string& reason) { return answer(query, reason); });
}

std::string which_kernel(const QuantizeQuery& query) {
  return kernel_answer([&](std::string& reason) { return answer(query, reason); });
}

LaunchSchedule explain(const QuantizeScheduleQuery& query) {
  constexpr Check check("explain");
  check.range(query.rows, "rows", 1, kMostExplainedRows);
  return explain_launch(
      check, query.call.target, [&](std::string& reason) { return answer(query.call, reason); },
      [&](const KernelEntry& kernel) { return plan_units(kernel, query.rows, query.call.head_dim); });
}

void quantize_kv(const QuantizeKvArgs& a, Stream stream) {
  constexpr Check check("quantize_kv");
  check_rank(check, a.x, a.out, "(..., head_dim)");
  check_format(check, a.format);
  const std::int64_t dim = a.x.shape[a.x.rank - 1];
  if (const std::string problem = block_problem(a.format, "head_dim", dim); !problem.empty()) {
    check.not_supported(problem);
  }
  check_out(check, a.out, a.x, stored_extent(a.format, dim));
  check_scale(check, a.scale, a.x, a.format);
  check_tensors(check, table_of(a));
  check_even(check, a.out, "out", a.format);
  run(check, a, a.x, a.out, KernelTag::kQuantizeKv, stream);
}

void dequantize_kv(const DequantizeKvArgs& a, Stream stream) {
  constexpr Check check("dequantize_kv");
  check_rank(check, a.x, a.out, "(..., bytes of a row)");
  check_format(check, a.format);
  const std::int64_t bytes = a.x.shape[a.x.rank - 1], block = block_elements(a.format);
  if (bytes % block != 0) {
    check.value_error("x must have rows of whole blocks, " + std::to_string(block) + " bytes each in " +
                      kv_format_name(a.format) + ", got " + shape_text(a.x));
  }
  check_out(check, a.out, a.x, stored_head_dim(a.format, bytes));
  check_scale(check, a.scale, a.out, a.format);
  check_tensors(check, table_of(a));
  check_even(check, a.x, "x", a.format);
  run(check, a, a.out, a.x, KernelTag::kDequantizeKv, stream);
}

}  // namespace flashport
