#include "common/host/decode/lengths.h"

#include <string>

#include "common/host/contents.h"
#include "common/host/host_indices.h"

namespace flashport {
namespace {

void check_query_offsets(const Check& check, const HostIndices& offsets, const DecodeProblem& problem) {
  const DecodeParams& p = problem.params;
  if (offsets[0] != 0) check.value_error("cu_seqlens_q must begin with 0, got " + std::to_string(offsets[0]));
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t q_len = offsets[b + 1] - offsets[b];
    if (q_len < 0 || q_len > p.max_q_len) {
      check.value_error("cu_seqlens_q must rise by 0 to max_q_len = " + std::to_string(p.max_q_len) +
                        " a request, got " + std::to_string(q_len) + " for request " + std::to_string(b));
    }
  }
  if (offsets[p.batch] > problem.bounds.total_q) {
    check.value_error("cu_seqlens_q must end within the " + std::to_string(problem.bounds.total_q) +
                      " rows of q, got " + std::to_string(offsets[p.batch]));
  }
}

}  // namespace

void check_decode_contents(const Check& check, const DeviceContext& device, Stream stream,
                           const DecodeProblem& problem) {
  const DecodeParams& p = problem.params;
  const IndexBounds& bounds = problem.bounds;
  if (p.cu_seqlens_q != nullptr) {
    const HostIndices offsets(check, device, stream, {p.cu_seqlens_q, 0}, p.batch + 1);
    check_query_offsets(check, offsets, problem);
  }
  const std::int64_t scales = p.scale_stride == 0 ? 1 : p.num_kv_heads;
  check_scales(check, device, stream, p.k_scale, scales, "k_scale");
  check_scales(check, device, stream, p.v_scale, scales, "v_scale");
  const HostIndices lengths(check, device, stream, p.cache.seqlens, p.batch);
  const HostIndices rows(check, device, stream, p.cache.table_row, p.batch);
  const HostIndices indptr(check, device, stream, {p.cache.kv_indptr, 0}, p.batch + 1);
  const HostIndices last_page_len(check, device, stream, {p.cache.kv_last_page_len, 0}, p.batch);

  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int32_t* pages = nullptr;  // of this request, where it has a table
    std::int64_t capacity = p.cache.max_len;
    std::int64_t length = 0;
    if (p.cache.kv_indptr != nullptr) {
      const std::int64_t begin = indptr[b];
      const std::int64_t count = indptr[b + 1] - begin;
      if (begin < 0 || count < 0 || begin + count > bounds.table_entries) {
        check.value_error("kv_indptr must rise within the " + std::to_string(bounds.table_entries) +
                          " entries of kv_indices, got " + std::to_string(begin) + " and " +
                          std::to_string(begin + count) + " for request " + std::to_string(b));
      }
      capacity = count * p.cache.page_size;
      pages = p.cache.table + begin;
      if (p.cache.seqlens.data == nullptr && count > 0) {
        if (last_page_len[b] < 1 || last_page_len[b] > p.cache.page_size) {
          check.value_error(entry_text("kv_last_page_len", b, last_page_len[b]) + " must lie in " +
                            range_text(1, p.cache.page_size) + " (the page size)");
        }
        length = (count - 1) * p.cache.page_size + last_page_len[b];
      }
    } else if (p.cache.table != nullptr) {
      const std::int64_t row = p.cache.table_row.data != nullptr ? rows[b] : b;
      if (row < 0 || row >= bounds.table_rows) {
        check.value_error(entry_text(bounds.rows_name, b, row) + " must lie in " +
                          range_text(0, bounds.table_rows - 1) + " (the rows of " + bounds.table_name + ")");
      }
      pages = p.cache.table + row * p.cache.table_stride;
    }
    if (p.cache.seqlens.data != nullptr) {
      length = lengths[b];
      if (length < 0 || length > capacity) {
        check.value_error(entry_text(bounds.lengths_name, b, length) + " must lie in " + range_text(0, capacity) +
                          " (what " + (bounds.capacity_name != nullptr ? bounds.capacity_name : bounds.table_name) +
                          " can hold)");
      }
    }
    if (pages == nullptr) continue;
    const std::int64_t used = (length + p.cache.page_size - 1) / p.cache.page_size;
    const HostBytes entries(check, device, stream, pages, used * 4);
    for (std::int64_t i = 0; i < used; ++i) {
      const std::int64_t page = entries.as<std::int32_t>()[i];
      if (page >= 0 && page < bounds.pages) continue;
      check.value_error(std::string(bounds.table_name) + " entry " + std::to_string(i) + " of request " +
                        std::to_string(b) + " must lie in " + range_text(0, bounds.pages - 1) +
                        " (the pages of the cache), got " + std::to_string(page));
    }
  }
}

}  // namespace flashport
