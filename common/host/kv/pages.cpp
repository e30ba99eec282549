#include "common/host/kv/pages.h"

#include <algorithm>
#include <bit>
#include <string>

#include "common/host/contents.h"
#include "common/host/host_indices.h"

namespace flashport {

void check_page_presence(const Check& check, const PageArguments& a) {
  const bool csr = a.kv_indptr.has_value() || a.kv_indices.has_value() || a.kv_last_page_len.has_value();
  const int layouts =
      static_cast<int>(a.block_table.has_value()) + static_cast<int>(a.token_table.has_value()) + static_cast<int>(csr);
  if (layouts > 1) {
    check.value_error("give at most one of block_table, token_table, and kv_indptr with kv_indices");
  }
  if (csr && (!a.kv_indptr || !a.kv_indices)) check.value_error("kv_indptr and kv_indices must be given together");
  if (a.request_index && !a.token_table) check.value_error("request_index must come with token_table");
}

void check_page_shapes(const Check& check, const PageArguments& a, std::int64_t batch) {
  check.shape(a.block_table, "block_table", "(batch, max_pages)", {batch, kAnyExtent});
  check.shape(a.request_index, "request_index", "(batch)", {batch});
  if (a.token_table && !a.request_index && a.token_table->shape[0] < batch) {
    check.value_error("token_table must have a row per request, or request_index be given: batch is " +
                      std::to_string(batch) + ", got " + shape_text(*a.token_table));
  }
  check.shape(a.kv_indptr, "kv_indptr", "(batch + 1)", {batch + 1});
  check.shape(a.kv_last_page_len, "kv_last_page_len", "(batch)", {batch});
}

std::int64_t fill_pages(const PageArguments& a, std::int64_t pages, std::int64_t page_size, PagedCache& cache,
                        IndexBounds& bounds) {
  const std::int64_t size = std::max<std::int64_t>(page_size, 1);
  cache.page_size = size;
  const auto bits = static_cast<std::uint64_t>(size);
  cache.page_shift = std::has_single_bit(bits) ? std::countr_zero(bits) : -1;
  cache.kv_last_page_len = data_of<std::int32_t>(a.kv_last_page_len);
  bounds.pages = pages;
  if (a.block_table || a.token_table) {
    const TensorView& table = a.block_table ? *a.block_table : *a.token_table;
    bounds.table_name = a.block_table ? "block_table" : "token_table";
    bounds.table_rows = table.shape[0];
    cache.table = static_cast<const std::int32_t*>(table.data);
    cache.table_stride = table.strides[0];
    cache.table_row = index_array(a.request_index);
    return table.shape[1] * page_size;
  }
  if (a.kv_indptr) {
    bounds.table_name = "kv_indices";
    bounds.table_entries = a.kv_indices->shape[0];
    cache.table = data_of<std::int32_t>(a.kv_indices);
    cache.kv_indptr = data_of<std::int32_t>(a.kv_indptr);
    return a.kv_indices->shape[0] * page_size;
  }
  return page_size;
}

void check_pages(const Check& check, const DeviceContext& device, Stream stream, const PagedCache& cache,
                 std::int64_t batch, const IndexBounds& bounds) {
  const HostIndices lengths(check, device, stream, cache.seqlens, batch);
  const HostIndices rows(check, device, stream, cache.table_row, batch);
  const HostIndices indptr(check, device, stream, {cache.kv_indptr, 0}, batch + 1);
  const HostIndices last_page_len(check, device, stream, {cache.kv_last_page_len, 0}, batch);

  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int32_t* pages = nullptr;  // of this request, where it has a table
    std::int64_t capacity = cache.max_len;
    std::int64_t length = capacity;
    if (cache.kv_indptr != nullptr) {
      const std::int64_t begin = indptr[b];
      const std::int64_t count = indptr[b + 1] - begin;
      if (begin < 0 || count < 0 || begin + count > bounds.table_entries) {
        check.value_error("kv_indptr must rise within the " + std::to_string(bounds.table_entries) +
                          " entries of kv_indices, got " + std::to_string(begin) + " and " +
                          std::to_string(begin + count) + " for request " + std::to_string(b));
      }
      capacity = count * cache.page_size;
      pages = cache.table + begin;
      length = 0;
      if (cache.seqlens.data == nullptr && count > 0) {
        if (last_page_len[b] < 1 || last_page_len[b] > cache.page_size) {
          check.value_error(entry_text("kv_last_page_len", b, last_page_len[b]) + " must lie in " +
                            range_text(1, cache.page_size) + " (the page size)");
        }
        length = (count - 1) * cache.page_size + last_page_len[b];
      }
    } else if (cache.table != nullptr) {
      const std::int64_t row = cache.table_row.data != nullptr ? rows[b] : b;
      if (row < 0 || row >= bounds.table_rows) {
        check.value_error(entry_text(bounds.rows_name, b, row) + " must lie in " +
                          range_text(0, bounds.table_rows - 1) + " (the rows of " + bounds.table_name + ")");
      }
      pages = cache.table + row * cache.table_stride;
    }
    if (cache.seqlens.data != nullptr) {
      const std::int64_t added = bounds.added.empty() ? 0 : bounds.added[static_cast<std::size_t>(b)];
      length = lengths[b] + added;
      if (lengths[b] < 0 || length > capacity) {
        check.value_error(entry_text(bounds.lengths_name, b, lengths[b]) +
                          (added > 0 ? " and " + counted(added, "new key") : "") + " must lie in " +
                          range_text(0, capacity) + " (what " +
                          (bounds.capacity_name != nullptr ? bounds.capacity_name : bounds.table_name) + " can hold)");
      }
    }
    if (pages == nullptr) continue;
    const std::int64_t used = (length + cache.page_size - 1) / cache.page_size;
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
