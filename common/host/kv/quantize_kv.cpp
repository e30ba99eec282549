// quantize_kv and dequantize_kv: validate -> collapse the axes before the last to three -> a thread for each block.
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
#include "common/host/query.h"

namespace flashport {
namespace {

constexpr DTypes kValueTypes = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
constexpr DTypes kBlockTypes = {DType::kUInt8};
constexpr std::int64_t kMaxBlocks = 1 << 20;  // the kernel strides over what is left
constexpr int kAxes = 3;

ArgumentTable<2> table_of(const QuantizeKvArgs& args) {
  const auto& [x, out, format] = args;
  ArgumentTable<2> table;
  table.add(x, "x", kRead, kValueTypes, Strides::kAny);
  table.add(out, "out", kWritten, kBlockTypes, Strides::kUnitInner);
  return table;
}

ArgumentTable<2> table_of(const DequantizeKvArgs& args) {
  const auto& [x, out, format] = args;
  ArgumentTable<2> table;
  table.add(x, "x", kRead, kBlockTypes, Strides::kUnitInner);
  table.add(out, "out", kWritten, kValueTypes, Strides::kAny);
  return table;
}

void check_rank(const Check& check, const TensorView& x, const TensorView& out, const char* axes) {
  if (x.rank < 1 || x.rank > kMaxRank) {
    check.value_error("x must have 1 to " + std::to_string(kMaxRank) + " dimensions " + axes + ", got " +
                      std::to_string(x.rank) + ": " + shape_text(x));
  }
  check.rank(out, "out", x.rank, "as x has");
}

// Empty, or why the format is none of blocks.
std::string format_problem(KvFormat format) {
  if (kv_format_trait(format).block_values != 1) return "";
  std::string names;
  for (int i = 0; i < kKvFormats; ++i) {
    const auto each = static_cast<KvFormat>(i);
    if (kv_format_trait(each).block_values != 1)
      names += (names.empty() ? "" : ", ") + std::string(kv_format_name(each));
  }
  return "format must be one of blocks (" + names + "), got " + kv_format_name(format) +
         "; for an element type's own format convert the array";
}

void check_format(const Check& check, KvFormat format) {
  if (const std::string problem = format_problem(format); !problem.empty()) check.value_error(problem);
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
  std::int64_t extent = 1, values = 0, blocks = 0;  // the strides of each
};

// Joins neighbours that both tensors walk with one stride; the last axis is the rows' own.
void collapse(const Check& check, const TensorView& values, const TensorView& blocks, Axis (&axes)[kAxes]) {
  Axis kept[kMaxRank];
  int size = 0;
  for (int i = 0; i < values.rank - 1; ++i) {
    const Axis axis{values.shape[i], values.strides[i], blocks.strides[i]};
    if (axis.extent == 1) continue;
    Axis* before = size > 0 ? &kept[size - 1] : nullptr;
    if (before != nullptr && before->values == axis.values * axis.extent &&
        before->blocks == axis.blocks * axis.extent) {
      *before = {before->extent * axis.extent, axis.values, axis.blocks};
    } else {
      kept[size++] = axis;
    }
  }
  if (size > kAxes) {
    check.value_error("x and out must be strided so that the axes before the last collapse to " +
                      std::to_string(kAxes) + "; pass contiguous copies");
  }
  std::copy(kept, kept + size, axes + kAxes - size);
}

void run(const Check& check, const TensorView& x, const TensorView& values, const TensorView& blocks, KvFormat format,
         KernelTag tag, std::span<const Argument> table, Stream stream) {
  const auto call = [&] {
    return CallText(check.function(), table).word("format", kv_format_name(format), "").text() + ": ";
  };
  if (!has_elements(values)) return log_call([&] { return call() + kNothingToDo; });
  Axis axes[kAxes];
  collapse(check, values, blocks, axes);
  QuantizeParams p{};
  p.values = {values.data,    values.dtype,   axes[0].values,
              axes[1].values, axes[2].values, values.strides[values.rank - 1]};
  p.blocks = {blocks.data, blocks.dtype, axes[0].blocks, axes[1].blocks, axes[2].blocks, 1};
  p.rows = axes[0].extent * axes[1].extent * axes[2].extent;
  p.tokens = axes[1].extent;
  p.heads = axes[2].extent;
  p.format = format;
  p.unit_bytes = unit_bytes(format);
  p.units = static_cast<std::int32_t>(values.shape[values.rank - 1] / kv_format_trait(format).block_values);
  DeviceContext& device = device_context(check, x, "x");
  const KernelEntry& kernel = device.plain_kernel(check, tag);
  const std::int64_t threads = std::max(kernel.threads, 1), work = p.rows * p.units;
  const LaunchGrid grid{std::min((work + threads - 1) / threads, kMaxBlocks)};
  device.launch(check, stream, kernel, grid, p);
  log_call([&] { return call() + launch_text(kernel, grid.x); });
}

// That blocks begin at even addresses.
void check_even(const Check& check, const TensorView& blocks, const char* name) {
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

void quantize_kv(const QuantizeKvArgs& a, Stream stream) {
  constexpr Check check("quantize_kv");
  check_rank(check, a.x, a.out, "(..., head_dim)");
  check_format(check, a.format);
  const std::int64_t dim = a.x.shape[a.x.rank - 1];
  if (const std::string problem = block_problem(a.format, "head_dim", dim); !problem.empty()) {
    check.not_supported(problem);
  }
  check_out(check, a.out, a.x, stored_extent(a.format, dim));
  const ArgumentTable<2> table = table_of(a);
  check_tensors(check, table);
  check_even(check, a.out, "out");
  run(check, a.x, a.x, a.out, a.format, KernelTag::kQuantizeKv, table, stream);
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
  const ArgumentTable<2> table = table_of(a);
  check_tensors(check, table);
  check_even(check, a.x, "x");
  run(check, a.x, a.out, a.x, a.format, KernelTag::kDequantizeKv, table, stream);
}

}  // namespace flashport
