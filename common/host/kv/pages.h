// On which pages the keys and values of sequences lie: the arguments for it, which operations share, as kernels take
// them (common/device/kv/paged_kv.h).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <flashport/types.h>

#include "common/device/kv/params.h"
#include "common/host/arguments.h"
#include "common/host/check.h"
#include "common/host/devices.h"

namespace flashport {

// As in DecodeArgs.
struct PageArguments {
  const std::optional<TensorView>&block_table, &token_table, &request_index, &kv_indptr, &kv_indices, &kv_last_page_len;

  [[nodiscard]] bool is_given() const { return block_table || token_table || kv_indptr || kv_indices; }
};

// What indices in device memory are checked against, where they are checked.
struct IndexBounds {
  const char* lengths_name = "seqlens";
  const char* rows_name = "request_index";
  const char* table_name = "the cache";
  const char* capacity_name = nullptr;  // what bounds a length; null: table_name
  std::int64_t pages = 0;               // of the cache: an entry lies in [0, pages)
  std::int64_t table_rows = 0;
  std::int64_t table_entries = 0;        // of kv_indices
  std::vector<std::int64_t> added = {};  // keys that a call adds to each sequence; empty: none
};

// At most one way is given, and what belongs to it.
void check_page_presence(const Check& check, const PageArguments& arguments);
void check_page_shapes(const Check& check, const PageArguments& arguments, std::int64_t batch);

template <std::size_t kMost>
void add_page_arguments(ArgumentTable<kMost>& table, const PageArguments& arguments) {
  constexpr DTypes kInt = {DType::kInt32}, kInts = {DType::kInt32, DType::kInt64};
  using enum Strides;
  table.add(arguments.block_table, "block_table", kRead, kInt, kUnitInner, {2, "(batch, max_pages)"});
  table.add(arguments.token_table, "token_table", kRead, kInt, kUnitInner, {2, "(requests, max_len)"});
  table.add(arguments.request_index, "request_index", kRead, kInts, kContiguous, {1, "(batch)"});
  table.add(arguments.kv_indptr, "kv_indptr", kRead, kInt, kContiguous, {1, "(batch + 1)"});
  table.add(arguments.kv_indices, "kv_indices", kRead, kInt, kContiguous, {1, "(pages)"});
  table.add(arguments.kv_last_page_len, "kv_last_page_len", kRead, kInt, kContiguous, {1, "(batch)"});
}

// Describes the pages, of which the cache has `pages`, in `cache` and `bounds`, and returns how many tokens a sequence
// can have. Without a table a sequence is a page.
std::int64_t fill_pages(const PageArguments& arguments, std::int64_t pages, std::int64_t page_size, PagedCache& cache,
                        IndexBounds& bounds);

// Lengths and page numbers in device memory. The call waits for them.
void check_pages(const Check& check, const DeviceContext& device, Stream stream, const PagedCache& cache,
                 std::int64_t batch, const IndexBounds& bounds);

}  // namespace flashport
