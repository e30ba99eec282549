// merge_state and merge_states: validate -> collapse the axes between states and head_dim to two -> one block per row.
#include <limits>
#include <string>

#include <flashport/decode.h>

#include "common/device/merge/params.h"
#include "common/host/arguments.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/devices.h"
#include "common/host/launch_plan.h"
#include "common/host/query.h"

namespace flashport {
namespace {

constexpr DTypes kMergeTypes = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

// The tensors that walk through the middle axes together; b is unused where all states come in one tensor.
enum Walker { kO, kLse, kOB, kLseB, kOut, kOutLse, kWalkers };

struct Axis {
  std::int64_t extent = 1;
  std::int64_t strides[kWalkers] = {};
};

struct Walk {
  const TensorView* tensor;
  int first_axis;  // of the middle axes in this tensor
};

// Joins neighbours that every tensor walks with one stride. Ends with axes[0] outer and axes[1] inner.
void collapse(const Check& check, const Walk (&walks)[kWalkers], int count, Axis (&axes)[2]) {
  Axis kept[kMaxRank];
  int size = 0;
  for (int i = 0; i < count; ++i) {
    Axis axis;
    axis.extent = walks[kOut].tensor->shape[walks[kOut].first_axis + i];
    for (int w = 0; w < kWalkers; ++w) {
      if (walks[w].tensor != nullptr) axis.strides[w] = walks[w].tensor->strides[walks[w].first_axis + i];
    }
    if (axis.extent == 1) continue;
    bool joins = size > 0;
    for (int w = 0; joins && w < kWalkers; ++w) {
      joins = kept[size - 1].strides[w] == axis.strides[w] * axis.extent;
    }
    if (joins) {
      axis.extent *= kept[size - 1].extent;
      kept[size - 1] = axis;
    } else {
      kept[size++] = axis;
    }
  }
  if (size > 2) {
    check.value_error(
        "o, lse, out and out_lse must be strided so that the axes between the states and head_dim collapse "
        "to two; pass contiguous copies");
  }
  axes[1] = size > 0 ? kept[size - 1] : Axis{};
  axes[0] = size > 1 ? kept[0] : Axis{};
}

constexpr DTypes kFloat = {DType::kFloat32};

// Ranks follow that of the first argument: check_rank_like() has them.
ArgumentTable<4> table_of(const MergeStatesArgs& args) {
  const auto& [o, lse, out, out_lse, lse_base_2] = args;
  ArgumentTable<4> table;
  table.add(o, "o", kRead, kMergeTypes, Strides::kAny);
  table.add(lse, "lse", kRead, kFloat, Strides::kAny);
  table.add(out, "out", kWritten, {o.dtype}, Strides::kAny);
  table.add(out_lse, "out_lse", kWritten, kFloat, Strides::kAny);
  return table;
}

ArgumentTable<6> table_of(const MergeStateArgs& args) {
  const auto& [o_a, lse_a, o_b, lse_b, out, out_lse, lse_base_2] = args;
  ArgumentTable<6> table;
  table.add(o_a, "o_a", kRead, kMergeTypes, Strides::kAny);
  table.add(lse_a, "lse_a", kRead, kFloat, Strides::kAny);
  table.add(o_b, "o_b", kRead, {o_a.dtype}, Strides::kAny);
  table.add(lse_b, "lse_b", kRead, kFloat, Strides::kAny);
  table.add(out, "out", kWritten, {o_a.dtype}, Strides::kAny);
  table.add(out_lse, "out_lse", kWritten, kFloat, Strides::kAny);
  return table;
}

// shape of `view` must be that of `like` without `skip` leading and `drop` trailing axes
void check_like(const Check& check, const TensorView& view, const char* name, const TensorView& like,
                const char* like_name, int skip, int drop) {
  bool same = view.rank == like.rank - skip - drop;
  for (int axis = 0; same && axis < view.rank; ++axis) same = view.shape[axis] == like.shape[axis + skip];
  if (same) return;
  check.value_error(std::string(name) + " must have shape " + tuple_text(like.shape + skip, like.rank - skip - drop) +
                    " as " + like_name + " has " + shape_text(like) + ", got " + shape_text(view));
}

void check_rank_like(const Check& check, const TensorView& view, const char* name, int rank, const char* axes,
                     const TensorView& o, const char* o_name) {
  if (view.rank != rank) {
    check.value_error(std::string(name) + " must have " + std::to_string(rank) +
                      (rank == 1 ? " dimension " : " dimensions ") + axes + " as " + o_name + " has " +
                      std::to_string(o.rank) + ", got " + std::to_string(view.rank) + ": " + shape_text(view));
  }
}

template <class Args>
void run(const Args& args, const Check& check, MergeStatesParams& p, const Walk (&walks)[kWalkers], int middle,
         Stream stream, const TensorView& o, const char* o_name) {
  const TensorView& out = *walks[kOut].tensor;
  const auto call = [&] {
    return CallText(check.function(), table_of(args)).count("lse_base", args.lse_base_2 ? 2 : 0, 0).text() + ": ";
  };
  if (!has_elements(*walks[kOutLse].tensor)) return log_call([&] { return call() + kNothingToDo; });
  Axis axes[2];
  collapse(check, walks, middle, axes);
  const int dim = out.rank - 1;
  p.head_dim = static_cast<std::int32_t>(out.shape[dim]);
  p.inner_rows = axes[1].extent;
  p.rows = axes[0].extent * axes[1].extent;
  p.dtype = out.dtype;
  const Walker o_of[2] = {kO, kOB};
  const Walker lse_of[2] = {kLse, kLseB};
  for (int t = 0; t < 2; ++t) {
    const TensorView* tensor = walks[o_of[t]].tensor;
    if (tensor == nullptr) continue;
    p.o[t] = tensor->data;
    p.lse[t] = static_cast<const float*>(walks[lse_of[t]].tensor->data);
    p.o_stride_outer[t] = axes[0].strides[o_of[t]];
    p.o_stride_inner[t] = axes[1].strides[o_of[t]];
    p.o_stride_dim[t] = tensor->strides[tensor->rank - 1];
    p.lse_stride_outer[t] = axes[0].strides[lse_of[t]];
    p.lse_stride_inner[t] = axes[1].strides[lse_of[t]];
  }
  p.out = out.data;
  p.out_stride_outer = axes[0].strides[kOut];
  p.out_stride_inner = axes[1].strides[kOut];
  p.out_stride_dim = out.strides[dim];
  p.out_lse = static_cast<float*>(walks[kOutLse].tensor->data);
  p.out_lse_stride_outer = axes[0].strides[kOutLse];
  p.out_lse_stride_inner = axes[1].strides[kOutLse];

  DeviceContext& device = device_context(check, o, o_name);
  const LaunchPlan plan = plan_rows(device.plain_kernel(check, KernelTag::kMergeStates), p.rows);
  device.launch(check, stream, *plan.kernel, LaunchGrid{plan.blocks}, p);
  log_call([&] { return call() + schedule_of(plan).text; });
}

bool is_head_dim(std::int64_t dim) { return dim >= 1 && dim <= std::numeric_limits<std::int32_t>::max(); }

void check_head_dim(const Check& check, const TensorView& o, const char* name) {
  if (!is_head_dim(o.shape[o.rank - 1])) {
    check.value_error(std::string(name) + " must have a head_dim of 1 or more, got " + shape_text(o));
  }
}

const KernelEntry* answer(const MergeQuery& query, std::string& reason) {
  reason = dtype_problem("o", query.dtype, kMergeTypes);
  if (reason.empty() && !is_head_dim(query.head_dim)) {
    reason = "head_dim must be 1 or more and below 2^31, got " + std::to_string(query.head_dim);
  }
  if (!reason.empty()) return nullptr;
  const TargetView target = find_target(query.target, reason);
  return reason.empty() ? find_plain_kernel(target, KernelTag::kMergeStates, reason) : nullptr;
}

}  // namespace

Support supports(const MergeQuery& query) {
  return support_answer([&](std::string& reason) { return answer(query, reason); });
}

std::string which_kernel(const MergeQuery& query) {
  return kernel_answer([&](std::string& reason) { return answer(query, reason); });
}

LaunchSchedule explain(const MergeScheduleQuery& query) {
  constexpr Check check("explain");
  check.range(query.rows, "rows", 1, kMostExplainedRows);
  return explain_launch(
      check, query.call.target, [&](std::string& reason) { return answer(query.call, reason); },
      [&](const KernelEntry& kernel) { return plan_rows(kernel, query.rows); });
}

void merge_states(const MergeStatesArgs& a, Stream stream) {
  constexpr Check check("merge_states");
  if (a.o.rank < 2 || a.o.rank > kMaxRank) {
    check.value_error("o must have 2 to " + std::to_string(kMaxRank) + " dimensions (states, ..., head_dim), got " +
                      std::to_string(a.o.rank) + ": " + shape_text(a.o));
  }
  check.rank(a.o, "o", a.o.rank, "(states, ..., head_dim)");
  check_rank_like(check, a.lse, "lse", a.o.rank - 1, "(states, ...)", a.o, "o");
  check_rank_like(check, a.out, "out", a.o.rank - 1, "(..., head_dim)", a.o, "o");
  check_rank_like(check, a.out_lse, "out_lse", a.o.rank - 2, "(...)", a.o, "o");
  check_like(check, a.lse, "lse", a.o, "o", 0, 1);
  check_like(check, a.out, "out", a.o, "o", 1, 0);
  check_like(check, a.out_lse, "out_lse", a.o, "o", 1, 1);
  check_head_dim(check, a.o, "o");
  if (a.o.shape[0] > std::numeric_limits<std::int32_t>::max()) {
    check.value_error("o must have fewer than 2^31 states, got " + shape_text(a.o));
  }
  check_tensors(check, table_of(a));

  MergeStatesParams p{};
  p.states = static_cast<std::int32_t>(a.o.shape[0]);
  p.o_stride_state = a.o.strides[0];
  p.lse_stride_state = a.lse.strides[0];
  p.lse_base_2 = a.lse_base_2;
  const Walk walks[kWalkers] = {{&a.o, 1}, {&a.lse, 1}, {nullptr, 0}, {nullptr, 0}, {&a.out, 0}, {&a.out_lse, 0}};
  run(a, check, p, walks, a.out_lse.rank, stream, a.o, "o");
}

void merge_state(const MergeStateArgs& a, Stream stream) {
  constexpr Check check("merge_state");
  if (a.o_a.rank < 1 || a.o_a.rank > kMaxRank) {
    check.value_error("o_a must have 1 to " + std::to_string(kMaxRank) + " dimensions (..., head_dim), got " +
                      std::to_string(a.o_a.rank) + ": " + shape_text(a.o_a));
  }
  check.rank(a.o_a, "o_a", a.o_a.rank, "(..., head_dim)");
  check_rank_like(check, a.lse_a, "lse_a", a.o_a.rank - 1, "(...)", a.o_a, "o_a");
  check_rank_like(check, a.o_b, "o_b", a.o_a.rank, "(..., head_dim)", a.o_a, "o_a");
  check_rank_like(check, a.lse_b, "lse_b", a.o_a.rank - 1, "(...)", a.o_a, "o_a");
  check_rank_like(check, a.out, "out", a.o_a.rank, "(..., head_dim)", a.o_a, "o_a");
  check_rank_like(check, a.out_lse, "out_lse", a.o_a.rank - 1, "(...)", a.o_a, "o_a");
  check_like(check, a.lse_a, "lse_a", a.o_a, "o_a", 0, 1);
  check_like(check, a.o_b, "o_b", a.o_a, "o_a", 0, 0);
  check_like(check, a.lse_b, "lse_b", a.o_a, "o_a", 0, 1);
  check_like(check, a.out, "out", a.o_a, "o_a", 0, 0);
  check_like(check, a.out_lse, "out_lse", a.o_a, "o_a", 0, 1);
  check_head_dim(check, a.o_a, "o_a");
  check_tensors(check, table_of(a));

  MergeStatesParams p{};
  p.states = 2;
  p.two_tensors = 1;
  p.lse_base_2 = a.lse_base_2;
  const Walk walks[kWalkers] = {{&a.o_a, 0}, {&a.lse_a, 0}, {&a.o_b, 0}, {&a.lse_b, 0}, {&a.out, 0}, {&a.out_lse, 0}};
  run(a, check, p, walks, a.out_lse.rank, stream, a.o_a, "o_a");
}

}  // namespace flashport
