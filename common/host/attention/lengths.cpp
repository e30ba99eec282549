#include "common/host/attention/lengths.h"

#include <string>

#include "common/host/contents.h"
#include "common/host/host_indices.h"

namespace flashport {
namespace {

// One side of the call: its queries or its keys.
struct Side {
  const std::int32_t *offsets, *used;
  std::int64_t most, total;
  const char *offsets_name, *used_name, *most_name, *total_name;
};

void check_offsets(const Check& check, const HostIndices& offsets, std::int64_t batch, const Side& side) {
  const std::string name = side.offsets_name;
  if (offsets[0] != 0) check.value_error(name + " must begin with 0, got " + std::to_string(offsets[0]));
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = offsets[b + 1] - offsets[b];
    if (length >= 0 && length <= side.most) continue;
    check.value_error(name + " must rise by 0 to " + side.most_name + " = " + std::to_string(side.most) +
                      " a sequence, got " + std::to_string(length) + " for sequence " + std::to_string(b));
  }
  if (offsets[batch] > side.total) {
    check.value_error(name + " must end within the " + std::to_string(side.total) + " rows of " + side.total_name +
                      ", got " + std::to_string(offsets[batch]));
  }
}

// Checks the offsets and the lengths in use of a side. `pad`: first rows that do not exist; null: none.
void check_side(const Check& check, const DeviceContext& device, Stream stream, std::int64_t batch, const Side& side,
                const std::int32_t* pad) {
  const HostIndices offsets(check, device, stream, {side.offsets, 0}, batch + 1);
  const HostIndices used(check, device, stream, {side.used, 0}, batch);
  const HostIndices pads(check, device, stream, {pad, 0}, batch);
  if (side.offsets != nullptr) check_offsets(check, offsets, batch, side);
  for (std::int64_t b = 0; b < batch; ++b) {
    std::int64_t length = side.offsets != nullptr ? offsets[b + 1] - offsets[b] : side.most;
    if (side.used != nullptr) {
      if (used[b] < 0 || used[b] > length) {
        check.value_error(entry_text(side.used_name, b, used[b]) + " must lie in " + range_text(0, length) +
                          " (the sequence's rows of " + side.total_name + ")");
      }
      length = used[b];
    }
    if (pad == nullptr || (pads[b] >= 0 && pads[b] <= length)) continue;
    check.value_error(entry_text("leftpad_k", b, pads[b]) + " must lie in " + range_text(0, length) +
                      " (the sequence's keys in use)");
  }
}

// New keys have room, on pages that the cache has.
void check_new_keys(const Check& check, const DeviceContext& device, Stream stream, const AttentionProblem& problem) {
  const AppendRotaryParams& p = problem.append;
  IndexBounds bounds = problem.bounds;
  bounds.added.assign(static_cast<std::size_t>(p.batch), p.new_len);
  if (p.cu_seqlens_k_new != nullptr) {
    const HostIndices offsets(check, device, stream, {p.cu_seqlens_k_new, 0}, std::int64_t{p.batch} + 1);
    const Side rows = {p.cu_seqlens_k_new, nullptr, p.total_new, p.total_new,
                       "cu_seqlens_k_new", nullptr, "total_new", "k_new"};
    check_offsets(check, offsets, p.batch, rows);
    for (std::int64_t b = 0; b < p.batch; ++b) bounds.added[static_cast<std::size_t>(b)] = offsets[b + 1] - offsets[b];
  }
  check_pages(check, device, stream, p.cache, p.batch, bounds);
}

}  // namespace

void check_attention_contents(const Check& check, const DeviceContext& device, Stream stream,
                              const AttentionProblem& problem) {
  const AttentionParams& p = problem.params;
  if (p.cu_seqlens_q != nullptr || p.seqused_q != nullptr) {
    const Side queries = {p.cu_seqlens_q, p.seqused_q, p.q_len,        p.total_q,
                          "cu_seqlens_q", "seqused_q", "max_seqlen_q", "q"};
    check_side(check, device, stream, p.batch, queries, nullptr);
  }
  if (problem.appends) check_new_keys(check, device, stream, problem);
  if (problem.paged && !problem.appends) check_pages(check, device, stream, p.cache, p.batch, problem.bounds);
  const auto* used = static_cast<const std::int32_t*>(p.cache.seqlens.data);
  if (p.cu_seqlens_k != nullptr || used != nullptr || p.leftpad_k != nullptr) {
    const Side keys = {p.cu_seqlens_k, used, p.kv_len, p.total_k, "cu_seqlens_k", "seqused_k", "max_seqlen_k", "k"};
    check_side(check, device, stream, p.batch, keys, p.leftpad_k);
  }
}

}  // namespace flashport
