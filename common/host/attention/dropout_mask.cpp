// dropout_mask: validate -> params -> launch.
#include <algorithm>
#include <limits>
#include <string>

#include <flashport/attention.h>

#include "common/device/attention/params.h"
#include "common/host/arguments.h"
#include "common/host/attention/problem.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/devices.h"

namespace flashport {
namespace {

constexpr Check kCheck("dropout_mask");
constexpr std::int64_t kMostBlocks = 1 << 16;

ArgumentTable<2> table_of(const DropoutMaskArgs& args) {
  const auto& [mask, rng_state, dropout_p] = args;
  using enum Strides;
  ArgumentTable<2> table;
  table.add(mask, "mask", kWritten, {DType::kUInt8}, kAny, {4, "(batch, num_q_heads, q_len, kv_len)"});
  table.add(rng_state, "rng_state", kRead, {DType::kInt64}, kContiguous, {1, "(2)"});
  return table;
}

void validate(const DropoutMaskArgs& args) {
  const auto& [mask, rng_state, dropout_p] = args;
  const ArgumentTable<2> table = table_of(args);
  check_ranks(kCheck, table);
  kCheck.shape(rng_state, "rng_state", "(2)", {2});
  for (int axis = 0; axis < 4; ++axis) {
    if (mask.shape[axis] <= (axis < 2 ? std::int64_t{std::numeric_limits<std::int32_t>::max()} : kMostTokens)) continue;
    kCheck.value_error("mask must have a batch and heads below 2^31 and at most 2^30 tokens, got " + shape_text(mask));
  }
  check_tensors(kCheck, table);
  check_dropout(kCheck, dropout_p);
}

}  // namespace

void dropout_mask(const DropoutMaskArgs& args, Stream stream) {
  validate(args);
  const TensorView& mask = args.mask;
  const auto call = [&] {
    return CallText(kCheck.function(), table_of(args)).number("dropout_p", args.dropout_p).text() + ": ";
  };
  if (!has_elements(mask)) return log_call([&] { return call() + kNothingToDo; });
  DeviceContext& device = device_context(kCheck, mask, "mask");
  DropoutMaskParams p{};
  p.mask = static_cast<std::uint8_t*>(mask.data);
  std::copy(mask.strides, mask.strides + 4, p.strides);
  p.batch = static_cast<std::int32_t>(mask.shape[0]);
  p.num_heads = static_cast<std::int32_t>(mask.shape[1]);
  p.q_len = static_cast<std::int32_t>(mask.shape[2]);
  p.kv_len = static_cast<std::int32_t>(mask.shape[3]);
  p.dropout = dropout_params(args.rng_state, args.dropout_p);
  const std::int64_t rows = mask.shape[0] * mask.shape[1] * mask.shape[2];
  const std::int64_t most = multiprocessor_limit() > 0 ? multiprocessor_limit() : kMostBlocks;
  const KernelEntry& kernel = device.plain_kernel(kCheck, KernelTag::kDropoutMask);
  const LaunchGrid grid{std::min(rows, most)};
  device.launch(kCheck, stream, kernel, grid, p);
  log_call([&] { return call() + launch_text(kernel, grid.x); });
}

}  // namespace flashport
