#include "common/host/decode/plan.h"

#include <algorithm>
#include <limits>
#include <string>

#include "common/device/decode/chunks.h"
#include "common/host/check.h"
#include "common/host/decode/kernel_choice.h"
#include "common/host/decode/stored_segments.h"
#include "common/host/published_splits.h"
#include "common/host/rounding.h"
#include "common/host/workspace.h"

namespace flashport {
namespace {

static_assert(kCounterBytes <= kCounterAreaBytes);

int to_int(std::int64_t value) {
  return static_cast<int>(std::min<std::int64_t>(value, std::numeric_limits<int>::max()));
}

// Query tiles of the whole batch.
std::int64_t tile_count(const DecodeParams& p) { return std::int64_t{p.batch} * p.num_kv_heads * p.row_tiles; }

// Tiles that the query rows of a kv head are.
std::int64_t row_tiles(const DecodeParams& p, const DecodeShape& shape) {
  return ceil_div(std::int64_t{p.group_size} * p.max_q_len, shape.rows);
}

// Sets how tiles of up to `keys` keys become chunks, and how their partial results lie in the workspace.
void plan_partials(DecodePlan& plan, const ChunkRule& rule, std::int64_t keys) {
  DecodeParams& p = plan.params;
  const DecodeShape& shape = plan.kernel->shape.decode.shape;
  const DecodeSplit& split = plan.kernel->decode_split;
  const std::int64_t packed_rows = std::int64_t{p.group_size} * p.max_q_len;
  const auto rows = static_cast<int>(std::min<std::int64_t>(shape.rows / split.row_slices, packed_rows));
  p.slices = split.row_slices * split.column_slices;
  p.slice_floats = slice_floats(rows, shape.head_dim_v / split.column_slices);
  p.chunk_rule = rule;
  p.side_partials = most_partials(most_chunks(std::max<std::int64_t>(leaves_of(keys), 1), p.chunk_rule));
}

std::int64_t partials_bytes_of(const DecodePlan& plan) {
  return partials_bytes(plan.grid, plan.params.side_partials, plan.params.slices * plan.params.slice_floats);
}

// Keys that all sequences together have room for. A CSR table's pages are those of all of them.
std::int64_t room_of_batch(const DecodeProblem& problem, const DecodeParams& p) {
  return p.cache.kv_indptr != nullptr ? problem.bounds.table_entries * p.cache.page_size
                                      : std::int64_t{p.batch} * p.cache.max_len;
}

// The line of work is counted in 32 bits.
void check_line(const DecodeProblem& problem, const Check& check, const DecodeParams& p) {
  const bool csr = p.cache.kv_indptr != nullptr;
  const std::int64_t room = csr ? room_of_batch(problem, p) : p.cache.max_len;
  const std::int64_t leaves = room_of_batch(problem, p) / kLeafKeys + p.batch;
  const std::int64_t tiles = std::int64_t{p.num_kv_heads} * p.row_tiles;
  if (leaves <= kLongestLine / std::max<std::int64_t>(kMostConcurrentTiles, tiles)) return;
  check.not_supported("batch " + std::to_string(p.batch) + " with room for " + std::to_string(room) + " keys" +
                      (csr ? " in all" : " each") + " and " + std::to_string(tiles) +
                      " query tiles a sequence is more than one call takes; pass fewer sequences" +
                      (csr ? "" : " or a narrower table"));
}

// Most chunks of a tile.
int tile_chunks(const DecodeParams& p) {
  return most_chunks(std::max<std::int64_t>(leaves_of(p.cache.max_len), 1), p.chunk_rule);
}

// Where there are few tiles, few blocks would combine them and read many states for long, while the others have ended:
// a second launch spreads that, and lets the next call begin meanwhile. It pays where a wave would make some six trips
// to L2: for each piece of a lane two that find its place and write it, and one for every eight results. Where tiles
// are more, one may be much longer than the others, and be combined when these have ended; there more results must be
// possible. Kernels of large states leave it to that launch always; for others it does not pay before one that merges.
constexpr int kFewTilesShare = 4, kMoreTilesShare = 2;  // multiprocessors for each tile
constexpr int kTripsOfFewTiles = 6, kTripsOfMoreTiles = 9;
constexpr int kResultsOfMoreTiles = 25;
bool wants_second_launch(const DecodePlan& plan, bool is_partial, int multiprocessors) {
  const DecodeParams& p = plan.params;
  const DecodeShape& shape = plan.kernel->shape.decode.shape;
  const DecodeSplit& split = plan.kernel->decode_split;
  if (reads_segments(shape)) return false;  // that launch knows one cache
  const int chunks = tile_chunks(p);
  if (split.large) return chunks > 1;
  if (is_partial) return false;
  if (split.column_slices == 1 || chunks == 1) return false;
  const std::int64_t tiles = tile_count(p);
  constexpr int kVectors = 32 * 4;  // columns that the lanes of a wave read at once
  const auto rows =
      static_cast<int>(std::min<std::int64_t>(shape.rows / split.row_slices, std::int64_t{p.group_size} * p.max_q_len));
  const std::int64_t pieces = ceil_div(std::int64_t{rows} * (shape.head_dim_v / split.column_slices), kVectors);
  // Blocks of three chunks and more publish mostly whole groups.
  const bool groups = chunks * tiles >= 3 * plan.grid;
  const std::int64_t results = groups ? ceil_div(chunks, kGroupChunks) : chunks;
  const std::int64_t trips = pieces * (2 + ceil_div(results, 8));
  if (kFewTilesShare * tiles <= multiprocessors) return trips >= kTripsOfFewTiles;
  return kMoreTilesShare * tiles <= multiprocessors && trips >= kTripsOfMoreTiles && results >= kResultsOfMoreTiles;
}

// How many blocks combine each of `results` results of `floats` numbers. Each finds its tile anew, so there are no more
// than the device holds at once.
std::int32_t combine_parts(const KernelEntry& kernel, std::int64_t results, std::int64_t floats, const Check& check,
                           DeviceContext& device) {
  constexpr int kFloatsOfThread = 4;
  const std::int64_t most = ceil_div(floats / kFloatsOfThread, std::int64_t{kernel.threads});
  const std::int64_t resident = std::int64_t{device.multiprocessors()} * device.occupancy(check, kernel);
  return to_int(std::clamp<std::int64_t>(resident / results, 1, most));
}

void plan_combine(DecodePlan& plan, const Check& check, DeviceContext& device) {
  const DecodeShape& shape = plan.kernel->shape.decode.shape;
  const DecodeSplit& split = plan.kernel->decode_split;
  const KernelTag tag = shape.has_wide_segments ? KernelTag::kDecodeSegmentsCombine
                        : shape.appends         ? KernelTag::kDecodeAppendCombine
                        : shape.plain           ? KernelTag::kDecodePlainCombine
                                                : KernelTag::kDecodeCombine;
  plan.combine_kernel = &device.plain_kernel(check, tag);
  CombineLaunch& combine = plan.params.combine;
  combine.rows = shape.rows / split.row_slices;
  combine.columns = shape.head_dim_v / split.column_slices;
  combine.column_slices = split.column_slices;
  const std::int64_t slices = tile_count(plan.params) * plan.params.slices;
  const std::int64_t floats = std::int64_t{combine.rows} * combine.columns;
  combine.parts = combine_parts(*plan.combine_kernel, slices, floats, check, device);
  plan.combine_grid = slices * combine.parts;
}

// A side's scales as kernels read them (FactorDecodeParams), with what they are to these: of groups of eight values, if
// they are of fp16, lie side by side and can be copied in whole units; of rows, if those of fp16 lie in words alike
// for all tokens of even numbers, and for all of odd ones; else nothing.
constexpr int kUnit = 16;
Factors factors_of(const KeyScales& scales, int head_dim, const PagedCache& cache, CacheParams& rows) {
  const int size = element_size(scales.dtype), count = scales.dims_per_scale == 0 ? 1 : head_dim / kFactoredValues;
  rows = {scales.data,
          size * scales.stride_page,
          size * scales.stride_token,
          size * scales.stride_head,
          size * count,
          scales.dims_per_scale == 0 ? size : kUnit};
  if (scales.data == nullptr || std::min({rows.page_stride, rows.token_stride, rows.head_stride}) < 0) {
    return Factors::kNone;
  }
  const bool is_paged = cache.table != nullptr;
  if (is_paged && cache.page_size == 1) rows.token_stride = 0;
  const bool is_half = scales.dtype == DType::kFloat16;
  const auto places = reinterpret_cast<std::uintptr_t>(scales.data) | static_cast<std::uint64_t>(rows.page_stride);
  const auto token = static_cast<std::uint64_t>(rows.token_stride);
  if (scales.dims_per_scale == 0) {
    constexpr int kWord = 4;
    const bool has_odd_pages = is_paged && cache.page_size % 2 != 0;
    const bool lies_alike = (places | (has_odd_pages ? token : 0)) % kWord == 0;
    return !is_half || lies_alike ? Factors::kOfRows : Factors::kNone;
  }
  const bool in_units = (places | token | static_cast<std::uint64_t>(rows.head_stride | rows.row_bytes)) % kUnit == 0;
  const bool of_eight = is_half && scales.dims_per_scale == kFactoredValues && scales.stride_group == 1;
  return of_eight && in_units ? Factors::kOfGroups : Factors::kNone;
}
FactorRows factor_rows(const DecodeProblem& problem) {
  const MixedProblem* mixed = problem.mixed.get();
  if (mixed == nullptr || mixed->segment_count != 1 || mixed->bias.data != nullptr) return {};
  FactorRows rows{};
  const DecodeParams& p = problem.params;
  const CacheSegment& only = mixed->segments[0];
  const Factors of_keys = factors_of(only.k_scale, p.head_dim_qk, only.cache, rows.k);
  const Factors of_values = factors_of(only.v_scale, p.head_dim_v, only.cache, rows.v);
  const bool one_has_none = only.k_scale.data == nullptr || only.v_scale.data == nullptr;
  const bool are_of_rows = of_keys == Factors::kOfRows || of_values == Factors::kOfRows;
  if (of_keys == of_values) {
    rows.kind = of_keys;
  } else if (one_has_none && are_of_rows) {
    rows.kind = Factors::kOfRows;
  }
  return rows;
}

// Whether kv heads are a multiple of `count` and lie side by side, so that blocks may copy the rows of so many at once.
bool has_heads_side_by_side(const DecodePlan& plan, const DecodeShape& shape, int count) {
  const DecodeParams& p = plan.params;
  const auto has = [](const CacheParams& cache, KvFormat format, int dim) {
    return flashport::has_heads_side_by_side(cache, reinterpret_cast<std::uintptr_t>(cache.data),
                                             kv_row_bytes(format, dim), kUnit);
  };
  if (factors_of(shape) == Factors::kOfGroups) {
    for (const CacheParams* side : {&plan.factors.k, &plan.factors.v}) {
      const auto address = reinterpret_cast<std::uintptr_t>(side->data);
      if (!flashport::has_heads_side_by_side(*side, address, side->row_bytes, kUnit)) return false;
    }
  }
  return p.num_kv_heads % count == 0 && has(p.cache.k, p.k_format, shape.head_dim_qk) &&
         has(p.cache.v, p.v_format, shape.head_dim_v);
}

void plan_invariant(DecodePlan& plan, const DecodeProblem& problem, const Check& check, DeviceContext& device) {
  DecodeParams& p = plan.params;
  const DecodeShape& shape = plan.kernel->shape.decode.shape;
  check_line(problem, check, p);
  plan_partials(plan, chunk_rule(p.num_kv_heads, plan.kernel->decode_split), p.cache.max_len);
  // No more blocks than there are leaves; where teams help, one of a device block is all that has work.
  const std::int64_t units = tile_count(p) * std::max<std::int64_t>(leaves_of(p.cache.max_len), 1) * plan.kernel->teams;
  const std::int64_t resident = std::int64_t{device.multiprocessors()} * device.occupancy(check, *plan.kernel);
  plan.grid = std::min({resident, kCounterCapacity / p.slices, units});
  const std::int64_t tiles = std::int64_t{p.num_kv_heads} * p.row_tiles;
  const int teams = plan.kernel->teams;
  p.heads_side_by_side =
      teams > 1 && (shape.has_wide_segments ? has_heads_side_by_side(*problem.mixed, p.num_kv_heads, teams)
                                            : has_heads_side_by_side(plan, shape, teams));
  // Teams that read segments as stored always share their rows: with one head they can only help.
  p.teams_help = teams_may_help(shape, teams) && (tile_chunks(p) * tile_count(p) <= plan.grid / teams ||
                                                  (shape.has_wide_segments && !p.heads_side_by_side));
  const std::int64_t blocks = p.teams_help ? plan.grid / teams : plan.grid;
  p.cuts[0] = line_cut(tiles, blocks, 1, 0);
  const bool copies_heads_at_once = p.heads_side_by_side && has_format(shape, KvFormat::kQ8_0);
  p.cuts[1] = line_cut(tiles, blocks, concurrent_tiles(tiles, blocks),
                       copies_heads_at_once ? kLeastLeavesOfTeams : kLeastConcurrentLeaves);
  if (shape.has_wide_segments && !p.teams_help) {
    const int concurrent = teams * concurrent_tiles(tiles / teams, blocks / teams, kMostConcurrentTiles / teams);
    p.cuts[0] = p.cuts[1] = line_cut(tiles, blocks, concurrent, 0);
  }
  plan.partials_offset = kCounterBytes;
  plan.workspace_bytes = kCounterBytes + partials_bytes_of(plan);
  if (wants_second_launch(plan, problem.is_partial, device.multiprocessors())) plan_combine(plan, check, device);
}

constexpr std::int64_t kLargeCacheBytes = 400'000'000;
constexpr std::int64_t kLargeBlockCacheKeys = 400'000;  // of all heads
// Blocks with minima or fifth bits gain from fewer keys on, but not with few heads of all sequences: 16 lose, 64 gain
// (docs/tuning.md).
constexpr std::int64_t kLargeLongBlockCacheKeys = 250'000, kManyLongBlockHeads = 32;
std::int64_t large_cache_keys(const DecodeParams& p, const DecodeShape& shape) {
  const bool long_blocks = chooses_formats(shape) && (header_bytes(p.k_format) > 2 || header_bytes(p.v_format) > 2);
  const bool many_heads = std::int64_t{p.batch} * p.num_kv_heads >= kManyLongBlockHeads;
  return long_blocks && many_heads ? kLargeLongBlockCacheKeys : kLargeBlockCacheKeys;
}

// Whether there is room for many keys, and `large`, the kernel for such caches, finds so many kv heads side by side as
// its blocks have teams, which walk through them concurrently. It brings their rows at once, which pays where most of
// them come from memory; in formats of blocks it also takes fewer instructions a key, and longer for each leaf
// (docs/tuning.md).
constexpr std::int64_t kManyBlocks = 840;  // which each number of tiles up to 8 divides
bool is_large_cache(const DecodeProblem& problem, const DecodePlan& plan, const KernelEntry& large) {
  const DecodeParams& p = plan.params;
  const CacheParams &k = p.cache.k, &v = p.cache.v;
  const DecodeShape& shape = large.shape.decode.shape;
  const bool in_teams = row_tiles(p, shape) == 1 && concurrent_tiles(p.num_kv_heads, kManyBlocks) % large.teams == 0 &&
                        has_heads_side_by_side(plan, shape, large.teams);
  const std::int64_t keys = room_of_batch(problem, p) * p.num_kv_heads;
  const bool by_keys = kv_format_trait(shape.k_format).block_values > 1 || reads_factors(shape);
  return in_teams &&
         (by_keys ? keys >= large_cache_keys(p, shape) : keys * (k.row_bytes + v.row_bytes) >= kLargeCacheBytes);
}

// The same for segments that are read as they are stored.
bool are_large_segments(const DecodeProblem& problem, const DecodeParams& p, int teams) {
  return has_heads_side_by_side(*problem.mixed, p.num_kv_heads, teams) &&
         std::int64_t{p.batch} * problem.params.cache.max_len * p.num_kv_heads >= kLargeBlockCacheKeys;
}

// Whether 9 to 16 rows of a kv head are two tiles of eight in place of one, where their kernels have the same bits:
// over few keys two blocks end sooner than one (docs/tuning.md).
constexpr std::int64_t kFewBlockCacheKeys = 100'000;  // of all heads
bool takes_two_tiles(const DecodeProblem& problem, const DecodeParams& p, const DecodeShape& shape) {
  return is_chosen_format(shape.k_format) && shape.rows == 16 && p.row_tiles == 1 &&
         room_of_batch(problem, p) * p.num_kv_heads < kFewBlockCacheKeys;
}

// A kernel of the same bits for plain calls, for large caches, for few keys, or for two of these. What a call asks for
// changes neither grid nor workspace: on caches of one size, the kernel for plain calls and that for all calls have one
// schedule.
const KernelEntry* kernel_of_call(const DecodeProblem& problem, const DecodePlan& plan, DeviceContext& device) {
  if (plan.kernel->shape.decode.shape.has_wide_segments) {
    const KernelEntry* large = find_twin(device.kernels(), *plan.kernel, KernelTag::kDecodeSegmentsLarge);
    return large != nullptr && are_large_segments(problem, plan.params, large->teams) ? large : plan.kernel;
  }
  const KernelEntry* short_tile = takes_two_tiles(problem, plan.params, plan.kernel->shape.decode.shape)
                                      ? find_twin(device.kernels(), *plan.kernel, KernelTag::kDecode, 8)
                                      : nullptr;
  const KernelEntry& kernel = short_tile != nullptr ? *short_tile : *plan.kernel;
  const int kernel_rows = kernel.shape.decode.shape.rows;
  const auto twin = [&](KernelTag tag, int rows) {
    return device.has_kernel(tag) ? find_twin(device.kernels(), kernel, tag, rows) : nullptr;
  };
  const bool plain = is_plain(plan.params, kernel.shape.decode.shape);
  const bool appends = kernel.shape.decode.shape.appends;
  const bool serves_large = !appends && short_tile == nullptr;
  const bool has_two_tiles = plan.params.row_tiles == 2;
  const KernelEntry* large =
      plain && serves_large && !has_two_tiles ? twin(KernelTag::kDecodePlainLarge, kernel_rows) : nullptr;
  if (large == nullptr && serves_large) large = twin(KernelTag::kDecodeLarge, has_two_tiles ? 16 : kernel_rows);
  if (large != nullptr && is_large_cache(problem, plan, *large)) return large;
  const KernelEntry* for_plain_calls =
      plain ? twin(appends ? KernelTag::kDecodeAppendPlain : KernelTag::kDecodePlain, kernel_rows) : nullptr;
  return for_plain_calls != nullptr ? for_plain_calls : &kernel;
}

// One block per chunk of at most `keys` keys, which the kernel cuts into chunks of its own as long as they may be.
// Where it is one of those, no workspace is needed.
void plan_chunks(DecodePlan& plan, std::int64_t chunks, std::int64_t keys) {
  DecodeParams& p = plan.params;
  p.num_chunks = static_cast<std::int32_t>(chunks);
  plan.grid = tile_count(p) * chunks;
  const int least_shift = chunk_rule(p.num_kv_heads, plan.kernel->decode_split).least_shift;
  plan_partials(plan, {0, least_shift, false}, keys);
  if (p.side_partials == 1) return;
  plan.partials_offset = kCounterBytes;
  plan.workspace_bytes = kCounterBytes + partials_bytes_of(plan);
}

// Partial results lie after the counters, which must stay zero for the invariant schedule.
void plan_splits(DecodePlan& plan, const DecodeProblem& problem, int splits, const Check& check,
                 const DeviceContext& device) {
  DecodeParams& p = plan.params;
  // More chunks than leaves would only be empty ones.
  const std::int64_t leaves = std::max<std::int64_t>(leaves_of(p.cache.max_len), 1);
  const std::int64_t chunks = std::clamp<std::int64_t>(splits, 1, leaves);
  p.chunk_keys = 0;
  p.write_empty_chunks = 1;
  plan_chunks(plan, chunks, ceil_div(leaves, chunks) * kLeafKeys);
  if (chunks == 1) return;
  plan.merge = plan_merge(p, problem.total_q, chunks, check, device);
  p.out_stride_chunk = plan.merge.params.mid_stride_chunk;
  p.lse_stride_chunk = plan.merge.params.mid_lse_stride_chunk;
  plan.merge.offset = std::max(plan.workspace_bytes, kCounterBytes);
  plan.workspace_bytes = plan.merge.offset + plan.merge.bytes;
}

void plan_fixed_chunks(DecodePlan& plan, const DecodeProblem& problem) {
  plan.params.chunk_keys = problem.chunk_keys;
  plan.params.write_empty_chunks = 0;
  plan_chunks(plan, problem.fixed_chunks, std::min<std::int64_t>(problem.chunk_keys, plan.params.cache.max_len));
}

// Kernels of GPUs have no room for factors of groups beside the longest rows of 16 bits.
void check_group_factors(const DecodeProblem& problem, const Check& check, const DecodeShape& shape) {
  if (problem.mixed == nullptr || shape.math == MathType::kFp32 || shape.head_dim_qk <= 256) return;
  for (std::int32_t i = 0; i < problem.mixed->segment_count; ++i) {
    const CacheSegment& s = problem.mixed->segments[i];
    for (const auto& [format, scales] : {std::pair(s.k_format, &s.k_scale), std::pair(s.v_format, &s.v_scale)}) {
      if (scales->dims_per_scale == 0 || kv_format_trait(format).largest > 0) continue;
      check.not_supported(std::string("factors of groups of ") + kv_format_name(format) +
                          " values at a head_dim above 256 are read on the CPU alone; pass factors of rows");
    }
  }
}

// To append as well takes a block about 1 us a query tile; a launch that appends takes 7 to 9 us before all of them.
constexpr int kMostAppendTiles = 6;  // of a block
bool may_append(const DecodePlan& plan, int blocks) {
  return tile_count(plan.params) <= std::int64_t{kMostAppendTiles} * blocks;
}

KernelRequest request_of(const DecodeProblem& problem, Factors factors) {
  const DecodeParams& p = problem.params;
  const std::uint32_t segment_formats = problem.mixed == nullptr ? 0 : problem.mixed->formats;
  return {p.q.dtype,
          problem.k_format,
          problem.v_format,
          p.head_dim_qk,
          p.head_dim_v,
          p.group_size,
          p.max_q_len,
          segment_formats,
          problem.mixed != nullptr && segment_formats == 0,
          factors,
          problem.segments_as_stored};
}

}  // namespace

bool reads_segments_as_stored(const DecodeProblem& problem, DeviceContext& device) {
  if (!problem.segments_as_stored || !device.has_kernel(KernelTag::kDecodeSegments)) return false;
  const KernelEntry* kernel =
      choose_decode_kernel(device.kernels(), device.target(), request_of(problem, Factors::kNone), nullptr);
  return kernel != nullptr && kernel->shape.decode.shape.has_wide_segments;
}

MergeLaunch plan_merge(DecodeParams& p, std::int64_t total_q, std::int64_t parts, const Check& check,
                       const DeviceContext& device) {
  const bool ragged = p.cu_seqlens_q != nullptr;
  const std::int64_t rows = total_q * p.num_q_heads;
  MergeLaunch launch;
  Stage2Params& merge = launch.params;
  merge.batch = static_cast<std::int32_t>(ragged ? total_q : p.batch);
  merge.tokens = ragged ? 1 : p.max_q_len;
  merge.num_heads = p.num_q_heads;
  merge.head_dim = p.head_dim_v;
  merge.max_chunks = static_cast<std::int32_t>(parts);
  merge.out = p.out;
  merge.lse = p.lse;

  const auto partial_rows = [&](std::int64_t dim) -> StridedRows {
    const std::int64_t stride_token = p.num_q_heads * parts * dim;
    return {nullptr, DType::kFloat32, p.max_q_len * stride_token, stride_token, parts * dim, 1};
  };
  p.out = merge.mid = partial_rows(p.head_dim_v);
  p.lse = merge.mid_lse = partial_rows(1);
  merge.mid_stride_chunk = p.head_dim_v;
  merge.mid_lse_stride_chunk = 1;
  if (ragged) {  // the merge takes each token of the batch for a sequence of its own
    merge.end = p.cu_seqlens_q + p.batch;
    for (StridedRows* its : {&merge.out, &merge.lse, &merge.mid, &merge.mid_lse}) its->stride_seq = its->stride_token;
  }

  launch.kernel = &device.plain_kernel(check, KernelTag::kDecodeStage2);
  launch.grid = rows;
  launch.lse_offset = align_up(rows * parts * p.head_dim_v * 4, 16);
  launch.bytes = launch.lse_offset + align_up(rows * parts * 4, 16);
  return launch;
}

void MergeLaunch::bind(char* workspace) {
  params.mid.data = workspace + offset;
  params.mid_lse.data = workspace + offset + lse_offset;
}

SegmentsDecodeParams segments_params(const DecodeProblem& problem, const DecodePlan& plan) {
  SegmentsDecodeParams params{mixed_params(problem, plan)};
  params.cache.max_len = problem.params.cache.max_len;  // keys, not room in leaves
  return params;
}

MixedDecodeParams mixed_params(const DecodeProblem& problem, const DecodePlan& plan) {
  MixedDecodeParams mixed{};
  static_cast<DecodeParams&>(mixed) = plan.params;
  if (problem.mixed != nullptr) {
    std::copy(std::begin(problem.mixed->segments), std::end(problem.mixed->segments), mixed.segments);
    mixed.segment_count = problem.mixed->segment_count;
    mixed.bias = problem.mixed->bias;
    return mixed;
  }
  mixed.segments[0] = {plan.params.cache, problem.k_format, problem.v_format, {}, {}};
  mixed.segment_count = 1;
  return mixed;
}

DecodePlan plan_decode(const DecodeProblem& problem, DeviceContext& device) {
  const Check check(problem.function);
  DecodePlan plan;
  plan.params = problem.params;
  plan.factors = factor_rows(problem);
  DecodeParams& p = plan.params;
  p.k_format = problem.k_format;
  p.v_format = problem.v_format;
  const KernelRequest request = request_of(problem, plan.factors.kind);
  plan.kernel = choose_decode_kernel(device.kernels(), device.target(), request, nullptr);
  if (plan.kernel == nullptr) {
    std::string reason;
    (void)choose_decode_kernel(device.kernels(), device.target(), request, &reason);
    check.not_supported(reason);
  }
  check_group_factors(problem, check, plan.kernel->shape.decode.shape);
  if (reads_factors(plan.kernel->shape.decode.shape) && problem.mixed != nullptr) {
    const std::int32_t max_len = p.cache.max_len;
    p.cache = problem.mixed->segments[0].cache;
    p.cache.max_len = std::min(p.cache.max_len, max_len);
  }
  if (plan.kernel->shape.decode.shape.has_wide_segments) {
    p.cache.max_len = static_cast<std::int32_t>(room_in_leaves(*problem.mixed, p.cache.max_len));
  }
  p.row_tiles = static_cast<std::int32_t>(row_tiles(p, plan.kernel->shape.decode.shape));
  if (problem.appends) {
    const KernelEntry* appending = find_twin(device.kernels(), *plan.kernel, KernelTag::kDecodeAppend);
    if (appending != nullptr && may_append(plan, device.multiprocessors() * device.occupancy(check, *appending))) {
      plan.kernel = appending;
    }
  }
  p.by_group_size = make_divisor(p.group_size);
  p.by_row_tiles = make_divisor(p.row_tiles);
  if (problem.chunk_keys > 0) {
    plan_fixed_chunks(plan, problem);
  } else if (problem.num_splits == kInvariantSplits) {
    plan.kernel = kernel_of_call(problem, plan, device);
    p.row_tiles = static_cast<std::int32_t>(row_tiles(p, plan.kernel->shape.decode.shape));
    p.by_row_tiles = make_divisor(p.row_tiles);
    plan_invariant(plan, problem, check, device);
  } else {
    const SplitShape shape{std::int64_t{p.batch} * p.num_kv_heads, std::int64_t{p.group_size} * p.max_q_len,
                           p.cache.max_len, p.head_dim_qk};
    const int splits = problem.num_splits > 0 ? problem.num_splits : published_splits(shape, device.multiprocessors());
    plan_splits(plan, problem, splits, check, device);
  }
  return plan;
}

void bind_workspace(DecodePlan& plan, void* workspace) {
  char* base = static_cast<char*>(workspace);
  DecodeParams& p = plan.params;
  p.counters = reinterpret_cast<std::uint32_t*>(base);
  p.partials = reinterpret_cast<float*>(base + plan.partials_offset);
  if (plan.merge.kernel == nullptr) return;
  plan.merge.bind(base);
  p.out.data = plan.merge.params.mid.data;
  p.lse.data = plan.merge.params.mid_lse.data;
}

}  // namespace flashport
