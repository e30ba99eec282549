// Validation of attention: presence, then ranks, shapes, types, devices, memory, values; each over all arguments.
#include "common/host/attention/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "common/host/arguments.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/scores.h"

namespace flashport {
namespace {

constexpr Check kCheck("attention");

constexpr char kPackedQuery[] = "(total_q, num_q_heads, head_dim)";
constexpr char kPackedKey[] = "(total_k, num_kv_heads, head_dim)";
constexpr char kPackedValue[] = "(total_k, num_kv_heads, head_dim_v)";
constexpr char kPackedOut[] = "(total_q, num_q_heads, head_dim_v)";
constexpr char kDenseQuery[] = "(batch, q_len, num_q_heads, head_dim)";
constexpr char kDenseKey[] = "(batch, kv_len, num_kv_heads, head_dim)";
constexpr char kDenseValue[] = "(batch, kv_len, num_kv_heads, head_dim_v)";
constexpr char kDenseOut[] = "(batch, q_len, num_q_heads, head_dim_v)";

// The extents that the arguments must agree on. Packed: q_len and kv_len are those of the longest sequence.
struct Extents {
  bool packed;
  std::int64_t batch, q_len, kv_len, num_q_heads, num_kv_heads, head_dim, head_dim_v;
};

bool drops(const AttentionArgs& a) { return a.dropout_p != 0.0; }

void check_presence(const AttentionArgs& a) {
  if (a.cu_seqlens_q.has_value() != a.cu_seqlens_k.has_value()) {
    kCheck.value_error(std::string("cu_seqlens_q and cu_seqlens_k must be given together, got ") +
                       (a.cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_k") + " alone");
  }
  if (!a.cu_seqlens_q) {
    if (a.max_seqlen_q != 0) kCheck.value_error("max_seqlen_q must come with cu_seqlens_q");
    if (a.max_seqlen_k != 0) kCheck.value_error("max_seqlen_k must come with cu_seqlens_k");
  }
  if (a.bias) {
    const char* other = a.cu_seqlens_q ? "cu_seqlens_q"
                        : a.seqused_q  ? "seqused_q"
                        : a.seqused_k  ? "seqused_k"
                        : a.leftpad_k  ? "leftpad_k"
                                       : nullptr;
    if (other != nullptr) {
      kCheck.value_error(std::string("bias is of sequences that have all q_len queries and kv_len keys, and must not "
                                     "come with ") +
                         other + "; hide keys by entries of -inf");
    }
  }
  if (drops(a) && !a.rng_state) {
    kCheck.value_error("rng_state (seed and offset) must come with dropout_p, got dropout_p " +
                       number_text(a.dropout_p) + " alone");
  }
}

ArgumentTable<16> table_of(const AttentionArgs& args) {
  const auto& [q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, leftpad_k,
               softmax_scale, causal, window_left, window_right, softcap, alibi_slopes, sinks, bias, dropout_p,
               rng_state, num_splits, out, lse, workspace] = args;
  const bool packed = cu_seqlens_q.has_value();
  const auto axes = [packed](const char* packed_text, const char* dense_text) {
    return packed ? Axes{3, packed_text} : Axes{4, dense_text};
  };
  constexpr DTypes kFloats = {DType::kFloat16, DType::kBFloat16, DType::kFloat32}, kFloat = {DType::kFloat32};
  constexpr DTypes kInt = {DType::kInt32};
  const DTypes bias_types = q.dtype == DType::kFloat32 ? kFloat : DTypes{DType::kFloat32, q.dtype};
  using enum Strides;

  ArgumentTable<16> table;
  table.add(q, "q", kRead, kFloats, kUnitInner, axes(kPackedQuery, kDenseQuery));
  table.add(k, "k", kRead, {q.dtype}, kUnitInner, axes(kPackedKey, kDenseKey));
  table.add(v, "v", kRead, {q.dtype}, kUnitInner, axes(kPackedValue, kDenseValue));
  table.add(cu_seqlens_q, "cu_seqlens_q", kRead, kInt, kContiguous, {1, "(batch + 1)"});
  table.add(cu_seqlens_k, "cu_seqlens_k", kRead, kInt, kContiguous, {1, "(batch + 1)"});
  table.add(seqused_q, "seqused_q", kRead, kInt, kContiguous, {1, "(batch)"});
  table.add(seqused_k, "seqused_k", kRead, kInt, kContiguous, {1, "(batch)"});
  table.add(leftpad_k, "leftpad_k", kRead, kInt, kContiguous, {1, "(batch)"});
  table.add(alibi_slopes, "alibi_slopes", kRead, kFloat, kUnitInner, {1, "(num_q_heads)"}, {2, "(batch, num_q_heads)"});
  table.add(sinks, "sinks", kRead, kFloat, kContiguous, {1, "(num_q_heads)"});
  table.add(bias, "bias", kRead, bias_types, kAny, {4, "(batch or 1, num_q_heads or 1, q_len, kv_len)"});
  table.add(rng_state, "rng_state", kRead, {DType::kInt64}, kContiguous, {1, "(2)"});
  table.add(out, "out", kWritten, {q.dtype}, kAny, axes(kPackedOut, kDenseOut));
  table.add(lse, "lse", kWritten, kFloat, kAny,
            packed ? Axes{2, "(num_q_heads, total_q)"} : Axes{3, "(batch, num_q_heads, q_len)"});
  table.add(workspace, "workspace", kWritten, {DType::kUInt8}, kAny, {1, "(bytes)"});
  return table;
}

// The longest sequence of a packed tensor. A call without tokens may well have a longest of 0.
std::int64_t longest(std::int64_t most, std::int64_t total, const char* name, const char* offsets) {
  if (most < (total > 0 ? 1 : 0)) {
    kCheck.value_error(std::string(name) + " must be 1 or more with " + offsets + ", got " + std::to_string(most));
  }
  return std::min(most, total);
}

Extents packed_extents(const AttentionArgs& a) {
  if (a.cu_seqlens_q->shape[0] < 1) {
    kCheck.value_error("cu_seqlens_q must have shape (batch + 1,), got " + shape_text(*a.cu_seqlens_q));
  }
  Extents e{};
  e.packed = true;
  e.batch = a.cu_seqlens_q->shape[0] - 1;
  e.q_len = longest(a.max_seqlen_q, a.q.shape[0], "max_seqlen_q", "cu_seqlens_q");
  e.kv_len = longest(a.max_seqlen_k, a.k.shape[0], "max_seqlen_k", "cu_seqlens_k");
  kCheck.shape(a.cu_seqlens_k, "cu_seqlens_k", "(batch + 1)", {e.batch + 1});
  return e;
}

Extents dense_extents(const AttentionArgs& a) {
  Extents e{};
  e.batch = a.q.shape[0];
  e.q_len = a.q.shape[1];
  e.kv_len = a.k.shape[1];
  return e;
}

Extents check_shapes(const AttentionArgs& a) {
  Extents e = a.cu_seqlens_q ? packed_extents(a) : dense_extents(a);
  const std::int64_t total_q = a.q.shape[0], total_k = a.k.shape[0];  // where sequences are packed
  e.num_q_heads = a.q.shape[a.q.rank - 2];
  e.head_dim = a.q.shape[a.q.rank - 1];
  e.num_kv_heads = a.k.shape[a.k.rank - 2];
  e.head_dim_v = a.v.shape[a.v.rank - 1];
  if (e.packed) {
    kCheck.shape(a.k, "k", kPackedKey, {kAnyExtent, kAnyExtent, e.head_dim});
    kCheck.shape(a.v, "v", kPackedValue, {total_k, e.num_kv_heads, kAnyExtent});
  } else {
    kCheck.shape(a.k, "k", kDenseKey, {e.batch, kAnyExtent, kAnyExtent, e.head_dim});
    kCheck.shape(a.v, "v", kDenseValue, {e.batch, e.kv_len, e.num_kv_heads, kAnyExtent});
  }
  if (e.num_q_heads > 0 && (e.num_kv_heads == 0 || e.num_q_heads % e.num_kv_heads != 0)) {
    kCheck.value_error("num_q_heads must be a multiple of num_kv_heads, got q " + shape_text(a.q) + " and k " +
                       shape_text(a.k));
  }
  kCheck.shape(a.seqused_q, "seqused_q", "(batch)", {e.batch});
  kCheck.shape(a.seqused_k, "seqused_k", "(batch)", {e.batch});
  kCheck.shape(a.leftpad_k, "leftpad_k", "(batch)", {e.batch});
  if (a.alibi_slopes && a.alibi_slopes->rank == 1) {
    kCheck.shape(*a.alibi_slopes, "alibi_slopes", "(num_q_heads)", {e.num_q_heads});
  } else {
    kCheck.shape(a.alibi_slopes, "alibi_slopes", "(batch, num_q_heads)", {e.batch, e.num_q_heads});
  }
  kCheck.shape(a.sinks, "sinks", "(num_q_heads)", {e.num_q_heads});
  if (a.bias) {
    const std::int64_t* shape = a.bias->shape;
    kCheck.shape(*a.bias, "bias", "(batch or 1, num_q_heads or 1, q_len, kv_len)",
                 {shape[0] == 1 ? 1 : e.batch, shape[1] == 1 ? 1 : e.num_q_heads, e.q_len, e.kv_len});
  }
  kCheck.shape(a.rng_state, "rng_state", "(2)", {2});
  if (e.packed) {
    kCheck.shape(a.out, "out", "(total_q, num_q_heads, head_dim_v of v)", {total_q, e.num_q_heads, e.head_dim_v});
    kCheck.shape(a.lse, "lse", "(num_q_heads, total_q)", {e.num_q_heads, total_q});
  } else {
    kCheck.shape(a.out, "out", "(batch, q_len, num_q_heads, head_dim_v of v)",
                 {e.batch, e.q_len, e.num_q_heads, e.head_dim_v});
    kCheck.shape(a.lse, "lse", "(batch, num_q_heads, q_len)", {e.batch, e.num_q_heads, e.q_len});
  }
  const auto check_extents = [](const TensorView& view, const char* name, std::int64_t tokens,
                                std::initializer_list<std::int64_t> others) {
    if (tokens > kMostTokens) {
      kCheck.value_error(std::string(name) + " must have at most 2^30 tokens a sequence, got " + shape_text(view));
    }
    for (const std::int64_t extent : others) {
      if (extent <= std::numeric_limits<std::int32_t>::max()) continue;
      kCheck.value_error(std::string(name) + " must have a batch and heads below 2^31, got " + shape_text(view));
    }
  };
  check_extents(a.q, "q", e.q_len, {e.batch, e.num_q_heads});
  check_extents(a.k, "k", e.kv_len, {e.num_kv_heads});
  return e;
}

void check_values(const AttentionArgs& a) {
  check_score_numbers(kCheck, "softmax_scale", a.softmax_scale, a.softcap);
  check_window(kCheck, a.window_left, a.window_right);
  check_dropout(kCheck, a.dropout_p);
  if (a.num_splits == kInvariantSplits || a.num_splits == 1) return;
  const std::string got = "got " + std::to_string(a.num_splits);
  if (a.num_splits < kInvariantSplits) {
    kCheck.value_error("num_splits must be None (the invariant schedule), 0 (the heuristic) or a count, " + got);
  }
  kCheck.not_supported("num_splits must be None (the invariant schedule) or 1, " + got +
                       "; no kernel cuts the keys of a query into pieces");
}

// Axes: [seq] token head dim.
StridedRows rows_of(const TensorView& view) {
  const std::int64_t* token = view.strides + (view.rank - 3);
  return {view.data, view.dtype, view.rank == 4 ? view.strides[0] : 0, token[0], token[1], token[2]};
}

void fill_tensors(const AttentionArgs& a, const Extents& e, AttentionParams& p) {
  p.batch = static_cast<std::int32_t>(e.batch);
  p.q_len = static_cast<std::int32_t>(e.q_len);
  p.kv_len = static_cast<std::int32_t>(e.kv_len);
  p.num_q_heads = static_cast<std::int32_t>(e.num_q_heads);
  p.num_kv_heads = static_cast<std::int32_t>(e.num_kv_heads);
  p.group_size = p.num_q_heads / p.num_kv_heads;
  p.head_dim_qk = static_cast<std::int32_t>(e.head_dim);
  p.head_dim_v = static_cast<std::int32_t>(e.head_dim_v);
  p.q = rows_of(a.q);
  p.k = rows_of(a.k);
  p.v = rows_of(a.v);
  p.out = rows_of(a.out);
  p.total_q = e.packed ? a.q.shape[0] : e.batch * e.q_len;
  p.total_k = e.packed ? a.k.shape[0] : e.batch * e.kv_len;
  p.cu_seqlens_q = data_of<std::int32_t>(a.cu_seqlens_q);
  p.cu_seqlens_k = data_of<std::int32_t>(a.cu_seqlens_k);
  p.seqused_q = data_of<std::int32_t>(a.seqused_q);
  p.seqused_k = data_of<std::int32_t>(a.seqused_k);
  p.leftpad_k = data_of<std::int32_t>(a.leftpad_k);
  if (a.lse) {
    const int head = e.packed ? 0 : 1;
    p.lse = static_cast<float*>(a.lse->data);
    p.lse_stride_seq = e.packed ? 0 : a.lse->strides[0];
    p.lse_stride_head = a.lse->strides[head];
    p.lse_stride_token = a.lse->strides[head + 1];
  }
}

// A side of a window that hides no key from any query is infinite. `reach`: no query and key lie further apart.
std::int32_t window_side(std::int64_t keys, std::int64_t reach) {
  return keys >= reach ? -1 : static_cast<std::int32_t>(keys);
}

void fill_options(const AttentionArgs& a, const Extents& e, AttentionParams& p) {
  fill_scores(p, a.softmax_scale, a.softcap);
  // The last query stands at the last key, whatever the lengths of a sequence are.
  p.window_left = window_side(a.window_left, e.kv_len - 1);
  p.window_right = window_side(a.causal ? 0 : a.window_right, e.q_len - 1);
  p.alibi_slopes = data_of<float>(a.alibi_slopes);
  if (a.alibi_slopes && a.alibi_slopes->rank == 2) p.alibi_stride_seq = a.alibi_slopes->strides[0];
  p.sinks = data_of<float>(a.sinks);
  if (a.bias) {
    const auto stride = [&](int axis) { return a.bias->shape[axis] == 1 ? 0 : a.bias->strides[axis]; };
    p.bias = {a.bias->data, a.bias->dtype, stride(0), stride(1), stride(2), stride(3)};
  }
  if (drops(a)) p.dropout = dropout_params(*a.rng_state, a.dropout_p);
}

ScoreNeeds needs_of(const AttentionParams& p) {
  return score_needs(p.cap_scale != 0.0f, p.alibi_slopes != nullptr, p.bias.data != nullptr,
                     p.dropout.rng_state != nullptr, p.score_scale >= std::numeric_limits<float>::min());
}

AttentionProblem validate(const AttentionArgs& args, Outputs outputs) {
  check_presence(args);
  const ArgumentTable<16> table = table_of(args);
  check_ranks(kCheck, table);
  const Extents extents = check_shapes(args);
  check_tensors(kCheck, table, outputs);
  check_values(args);

  AttentionProblem problem;
  problem.function = kCheck.function();
  problem.q = args.q;
  problem.workspace = args.workspace;
  problem.empty = extents.batch == 0 || extents.q_len == 0 || extents.num_q_heads == 0;
  if (problem.empty) return problem;
  fill_tensors(args, extents, problem.params);
  fill_options(args, extents, problem.params);
  problem.needs = needs_of(problem.params);
  return problem;
}

// `out` as a call makes it, without memory; as it is where q or v has no axes to take its shape from.
TensorView output_like(const AttentionArgs& a) {
  TensorView out;
  if (a.q.rank < 1 || a.v.rank < 1) return out;
  out = a.q;
  out.data = nullptr;
  out.shape[out.rank - 1] = a.v.shape[a.v.rank - 1];
  return out;
}

}  // namespace

AttentionProblem validate_attention(const AttentionArgs& args) { return validate(args, Outputs::kWritten); }

AttentionProblem validate_attention_size(const AttentionArgs& args) {
  if (is_given(args.out)) return validate(args, Outputs::kSizedOnly);
  AttentionArgs with_out = args;
  with_out.out = output_like(args);
  return validate(with_out, Outputs::kSizedOnly);
}

std::string call_text(const AttentionArgs& a) {
  return CallText(kCheck.function(), table_of(a))
      .count("max_seqlen_q", a.max_seqlen_q, 0)
      .count("max_seqlen_k", a.max_seqlen_k, 0)
      .number("softmax_scale", a.softmax_scale)
      .flag("causal", a.causal)
      .window(a.window_left, a.window_right)
      .number("softcap", a.softcap, 0.0)
      .number("dropout_p", a.dropout_p, 0.0)
      .count("num_splits", a.num_splits, kInvariantSplits)
      .text();
}

void check_dropout(const Check& check, double dropout_p) {
  if (dropout_p >= 0.0 && dropout_p < 1.0) return;
  check.value_error("dropout_p must be at least 0 and below 1, got " + number_text(dropout_p));
}

DropoutParams dropout_params(const TensorView& rng_state, double dropout_p) {
  constexpr double kValues = 65536;  // of a weight's 16 random bits; some weight is always kept
  const double below = std::min(std::nearbyint(dropout_p * kValues), kValues - 1);
  return {static_cast<const std::int64_t*>(rng_state.data), static_cast<std::uint32_t>(below),
          static_cast<float>(1.0 / (1.0 - dropout_p))};
}

}  // namespace flashport
