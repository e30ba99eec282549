#include "tests/host/fake_backend.h"

#include <cstdlib>
#include <string_view>

#include "common/host/loader.h"
#include "common/host/workspace.h"

namespace flashport::test {
namespace {

constexpr MathType kF32 = MathType::kFp32;
constexpr MathType kF16 = MathType::kFp16;
constexpr MathType kB16 = MathType::kBf16;

constexpr KernelEntry decode(const char* key, DecodeShape shape, DecodeSplit split = {}) {
  return {.key = key,
          .tag = KernelTag::kDecode,
          .threads = 128,
          .shared_bytes = 65536,
          .shape = {.decode = {shape, {.waves = 4, .stages = 3, .blocks_per_multiprocessor = 2}}},
          .decode_split = split};
}
constexpr KernelEntry widening(KernelEntry kernel) {
  kernel.formats = format_bit(KvFormat::kInt8) | format_bit(KvFormat::kFp8E5M2) | format_bit(KvFormat::kFp16) |
                   format_bit(KvFormat::kQ4_0) | format_bit(KvFormat::kIq4Nl);
  return kernel;
}
constexpr KernelEntry appending(KernelEntry kernel, bool plain = false) {
  kernel.tag = plain ? KernelTag::kDecodeAppendPlain : KernelTag::kDecodeAppend;
  kernel.shape.decode.shape.appends = true;
  kernel.shape.decode.shape.plain = plain;
  return kernel;
}
constexpr KernelEntry for_plain_calls(KernelEntry kernel) {
  kernel.tag = KernelTag::kDecodePlain;
  kernel.shape.decode.shape.plain = true;
  return kernel;
}
constexpr KernelEntry for_large_caches(KernelEntry kernel, bool plain = true) {
  kernel.tag = plain ? KernelTag::kDecodePlainLarge : KernelTag::kDecodeLarge;
  kernel.shape.decode.shape.plain = plain;
  kernel.shape.decode.shape.large_cache = true;
  return kernel;
}
// One that reads segments of blocks and of 16 bits as they are stored.
constexpr KernelEntry reading_segments(KernelEntry kernel, bool large = false) {
  kernel.tag = large ? KernelTag::kDecodeSegmentsLarge : KernelTag::kDecodeSegments;
  kernel.shape.decode.shape.has_wide_segments = true;
  kernel.shape.decode.shape.large_cache = large;
  return kernel;
}
constexpr KernelEntry plain(const char* key, KernelTag tag, int threads) {
  return {.key = key, .tag = tag, .threads = threads};
}
constexpr KernelEntry update(const char* key, int head_dim_k, GateForm gate, DType state = DType::kFloat32) {
  return {.key = key,
          .tag = KernelTag::kGatedDeltaUpdate,
          .threads = 1,
          .shared_bytes = 2048,
          .shape = {.gated_delta_update = {.shape = {head_dim_k, state, 0, gate},
                                           .tuning = {.columns = 16, .waves = 1, .blocks_per_multiprocessor = 1}}}};
}
constexpr KernelEntry chunk(const char* key, KernelTag tag, MathType math, int head_dim_k) {
  return {.key = key, .tag = tag, .threads = 128, .shape = {.gated_delta_chunk = {math, head_dim_k}}};
}
constexpr KernelEntry attention(const char* key, AttentionShape shape, AttentionTuning tuning = {128, 64, 2}) {
  return {.key = key,
          .tag = KernelTag::kAttention,
          .threads = 384,
          .shared_bytes = 98304,
          .shape = {.attention = {shape, tuning}}};
}
// One whose blocks have teams, and which signals its work.
constexpr KernelEntry signalling(KernelEntry kernel, int threads, int teams) {
  kernel.threads = threads;
  kernel.teams = teams;
  kernel.signals = true;
  return kernel;
}

constexpr KernelEntry in_teams(KernelEntry kernel, int teams) {
  kernel.teams = teams;
  return kernel;
}

const KernelEntry kGpuKernels[] = {
    decode("decode/bf16/kv=bf16/hd64/r16/fakegpu", {64, 64, 16, kB16, KvFormat::kBf16, KvFormat::kBf16}),
    decode("decode/bf16/kv=bf16/hd128/r16/fakegpu", {128, 128, 16, kB16, KvFormat::kBf16, KvFormat::kBf16}),
    decode("decode/bf16/kv=bf16/hd128/r64/fakegpu", {128, 128, 64, kB16, KvFormat::kBf16, KvFormat::kBf16},
           {.large = true}),
    decode("decode/bf16/kv=bf16/hd192x128/r16/fakegpu", {192, 128, 16, kB16, KvFormat::kBf16, KvFormat::kBf16}),
    decode("decode/bf16/kv=bf16/hd256/r16/fakegpu", {256, 256, 16, kB16, KvFormat::kBf16, KvFormat::kBf16},
           {.column_slices = 4}),
    decode("decode/bf16/kv=bf16/hd512/r16/fakegpu", {512, 512, 16, kB16, KvFormat::kBf16, KvFormat::kBf16}),
    decode("decode/fp16/kv=fp8_e4m3/hd128/r16/fakegpu", {128, 128, 16, kF16, KvFormat::kFp8E4M3, KvFormat::kFp8E4M3},
           {.turn_leaves = 2, .row_slices = 2, .column_slices = 4, .finer = true}),
    in_teams(decode("decode/fp16/kv=q8_0/hd128/r16/fakegpu", {128, 128, 16, kF16, KvFormat::kQ8_0, KvFormat::kQ8_0}),
             4),
    decode("decode/fp16/k=q8_0/v=fp8_e4m3/hd128/r16/fakegpu",
           {128, 128, 16, kF16, KvFormat::kQ8_0, KvFormat::kFp8E4M3}),
    in_teams(
        decode("decode/fp16/kv=blocks/hd128/r16/fakegpu", {128, 128, 16, kF16, KvFormat::kBlocks, KvFormat::kBlocks}),
        2),
    in_teams(for_large_caches(decode("decode/fp16/kv=blocks/hd128/r16/large/fakegpu",
                                     {128, 128, 16, kF16, KvFormat::kBlocks, KvFormat::kBlocks}),
                              false),
             4),
    in_teams(for_large_caches(decode("decode/fp16/k=q8_0/v=fp8_e4m3/hd128/r16/large/fakegpu",
                                     {128, 128, 16, kF16, KvFormat::kQ8_0, KvFormat::kFp8E4M3}),
                              false),
             4),
    widening(decode("decode/fp16/kv=any/hd128/r16/fakegpu", {128, 128, 16, kF16, KvFormat::kAny, KvFormat::kAny})),
    appending(
        decode("decode_append/bf16/kv=bf16/hd128/r16/fakegpu", {128, 128, 16, kB16, KvFormat::kBf16, KvFormat::kBf16})),
    appending(decode("decode_append/bf16/kv=bf16/hd128/r16/plain/fakegpu",
                     {128, 128, 16, kB16, KvFormat::kBf16, KvFormat::kBf16}),
              true),
    appending(decode("decode_append/bf16/kv=bf16/hd256/r16/fakegpu",
                     {256, 256, 16, kB16, KvFormat::kBf16, KvFormat::kBf16}, {.column_slices = 4})),
    for_plain_calls(
        decode("decode_plain/bf16/kv=bf16/hd64/r16/fakegpu", {64, 64, 16, kB16, KvFormat::kBf16, KvFormat::kBf16})),
    in_teams(for_large_caches(decode("decode_plain/bf16/kv=bf16/hd64/r16/large/fakegpu",
                                     {64, 64, 16, kB16, KvFormat::kBf16, KvFormat::kBf16})),
             2),
    for_plain_calls(decode("decode_plain/bf16/kv=bf16/hd128/r64/fakegpu",
                           {128, 128, 64, kB16, KvFormat::kBf16, KvFormat::kBf16}, {.large = true})),
    in_teams(for_plain_calls(decode("decode_plain/fp16/kv=q8_0/hd128/r16/fakegpu",
                                    {128, 128, 16, kF16, KvFormat::kQ8_0, KvFormat::kQ8_0})),
             4),
    in_teams(for_large_caches(decode("decode_plain/fp16/kv=q8_0/hd128/r16/large/fakegpu",
                                     {128, 128, 16, kF16, KvFormat::kQ8_0, KvFormat::kQ8_0}, {.column_slices = 2})),
             4),
    in_teams(for_large_caches(decode("decode/fp16/kv=q8_0/hd128/r16/large/fakegpu",
                                     {128, 128, 16, kF16, KvFormat::kQ8_0, KvFormat::kQ8_0}, {.column_slices = 2}),
                              false),
             4),
    in_teams(reading_segments(decode("decode_segments/fp16/kv=q4_0/hd128/r8/fakegpu",
                                     {128, 128, 8, kF16, KvFormat::kQ4_0, KvFormat::kQ4_0},
                                     {.turn_leaves = 2, .column_slices = 4})),
             2),
    in_teams(reading_segments(
                 decode("decode_segments/fp16/kv=q4_0/hd128/r8/large/fakegpu",
                        {128, 128, 8, kF16, KvFormat::kQ4_0, KvFormat::kQ4_0}, {.turn_leaves = 2, .column_slices = 2}),
                 true),
             4),
    plain("decode_segments_combine/fakegpu", KernelTag::kDecodeSegmentsCombine, 128),
    plain("decode_combine/fakegpu", KernelTag::kDecodeCombine, 128),
    plain("decode_plain_combine/fakegpu", KernelTag::kDecodePlainCombine, 128),
    plain("decode_append_combine/fakegpu", KernelTag::kDecodeAppendCombine, 128),
    plain("append_rotary/fakegpu", KernelTag::kAppendRotary, 128),
    plain("decode_stage2/fakegpu", KernelTag::kDecodeStage2, 128),
    plain("merge_states/fakegpu", KernelTag::kMergeStates, 128),
    plain("append_kv/fakegpu", KernelTag::kAppendKv, 128),
    plain("append_any/fakegpu", KernelTag::kAppendAny, 128),
    plain("quantize_kv/fakegpu", KernelTag::kQuantizeKv, 128),
    plain("dequantize_kv/fakegpu", KernelTag::kDequantizeKv, 128),
    signalling(chunk("gated_delta_prepare/bf16/k64/fakegpu", KernelTag::kGatedDeltaPrepare, kB16, 64), 512, 4),
    chunk("gated_delta_chunk/bf16/k64/fakegpu", KernelTag::kGatedDeltaChunk, kB16, 64),
    chunk("gated_delta_prepare/bf16/k128/fakegpu", KernelTag::kGatedDeltaPrepare, kB16, 128),
    chunk("gated_delta_chunk/bf16/k128/fakegpu", KernelTag::kGatedDeltaChunk, kB16, 128),
    chunk("gated_delta_chunk/fp16/k128/fakegpu", KernelTag::kGatedDeltaChunk, kF16, 128),
    attention("attention/bf16/hd256/any/fakegpu", {kB16, 256, 256, ScoreForm::kAny, KeySources::kRows}),
    attention("attention/bf16/hd256/bias/fakegpu", {kB16, 256, 256, ScoreForm::kBias, KeySources::kRows}),
    attention("attention/bf16/hd128/any/fakegpu", {kB16, 128, 128, ScoreForm::kAny, KeySources::kRows}),
    attention("attention/bf16/hd128/softcap/fakegpu", {kB16, 128, 128, ScoreForm::kSoftcap, KeySources::kRows}),
    attention("attention/bf16/hd128/plain/fakegpu", {kB16, 128, 128, ScoreForm::kPlain, KeySources::kBytes}),
    attention("attention/bf16/hd64/plain/fakegpu", {kB16, 64, 64, ScoreForm::kPlain, KeySources::kRows}, {192, 128, 3}),
    attention("attention/bf16/hd192x128/plain/fakegpu", {kB16, 192, 128, ScoreForm::kPlain, KeySources::kRows}),
    attention("attention/fp16/hd128/plain/fakegpu", {kF16, 128, 128, ScoreForm::kPlain, KeySources::kRows}),
    plain("attention_merge/fakegpu", KernelTag::kAttentionMerge, 128),
    plain("dropout_mask/fakegpu", KernelTag::kDropoutMask, 128),
};

const KernelEntry kCpuKernels[] = {
    decode("decode/fp32/kv=fp32/hd128/r16/fakecpu", {128, 128, 16, kF32, KvFormat::kFp32, KvFormat::kFp32}),
    decode("decode/fp32/kv=bf16/hd128/r16/fakecpu", {128, 128, 16, kF32, KvFormat::kBf16, KvFormat::kBf16}),
    decode("decode/fp32/kv=q8_0/hd128/r16/fakecpu", {128, 128, 16, kF32, KvFormat::kQ8_0, KvFormat::kQ8_0}),
    plain("decode_stage2/fakecpu", KernelTag::kDecodeStage2, 1),
    plain("merge_states/fakecpu", KernelTag::kMergeStates, 1),
    plain("append_kv/fakecpu", KernelTag::kAppendKv, 1),
    plain("append_any/fakecpu", KernelTag::kAppendAny, 1),
    plain("quantize_kv/fakecpu", KernelTag::kQuantizeKv, 1),
    plain("dequantize_kv/fakecpu", KernelTag::kDequantizeKv, 1),
    update("gated_delta_update/state=fp32/vk/k64/fakecpu", 64, GateForm::kHead),
    update("gated_delta_update/state=fp32/vk/k256/fakecpu", 256, GateForm::kHead),
    update("gated_delta_update/kda/fakecpu", 256, GateForm::kKey),
    update("gated_delta_update/any/fakecpu", 256, GateForm::kAny),
    update("gated_delta_update/fp16/fakecpu", 256, GateForm::kAny, DType::kFloat16),
    chunk("gated_delta_prepare/fp32/k256/fakecpu", KernelTag::kGatedDeltaPrepare, kF32, 256),
    chunk("gated_delta_chunk/fp32/k256/fakecpu", KernelTag::kGatedDeltaChunk, kF32, 256),
    attention("attention/fp32/hd512/any/fakecpu", {kF32, 512, 512, ScoreForm::kAny, KeySources::kRows}, {32, 64, 1}),
    attention("attention/bf16/hd256/any/fakecpu", {kB16, 256, 256, ScoreForm::kAny, KeySources::kRows}, {32, 64, 1}),
    plain("attention_merge/fakecpu", KernelTag::kAttentionMerge, 1),
    plain("dropout_mask/fakecpu", KernelTag::kDropoutMask, 1),
};

const char* one_device(int* count) {
  *count = 1;
  return nullptr;
}

const char* describe(BackendDevice* info, const char* name, const char* architecture, const char* target) {
  *info = {};
  std::strcpy(info->name, name);
  std::strcpy(info->architecture, architecture);
  std::strcpy(info->target, target);
  info->multiprocessors = fake_state().multiprocessors;
  return nullptr;
}

template <std::size_t kSize>
const KernelEntry* table(const KernelEntry (&entries)[kSize], int* count) {
  *count = static_cast<int>(kSize);
  return entries;
}

const char* occupancy(int, const KernelEntry*, int* blocks) {
  *blocks = fake_state().occupancy;
  return nullptr;
}

const char* launch(int, Stream stream, const KernelEntry* kernel, const LaunchGrid& grid, const void* params,
                   std::size_t bytes) {
  const auto* begin = static_cast<const unsigned char*>(params);
  fake_state().launches.push_back({kernel->key, grid.x, stream, {begin, begin + bytes}, grid});
  return nullptr;
}

const char* allocate(int, std::size_t bytes, void** memory) {
  if (fake_state().fail_allocations) return "fake: out of memory";
  *memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  std::memset(*memory, 0xff, bytes);
  ++fake_state().allocations;
  ++fake_state().live_allocations;
  return nullptr;
}

const char* release(int, void* memory) {
  std::free(memory);
  --fake_state().live_allocations;
  return nullptr;
}

const char* copy(int, Stream, void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
  return nullptr;
}

const char* fill_zero(int, Stream, void* memory, std::size_t bytes) {
  std::memset(memory, 0, bytes);
  return nullptr;
}

const char* synchronize(int, Stream) { return nullptr; }

const char* capture_id(int, Stream, std::uint64_t* id) {
  *id = fake_state().capture;
  return nullptr;
}

constexpr BackendAbi backend(DeviceKind kind, const char* name, const char* const* targets,
                             const char* (*info)(int, BackendDevice*),
                             const KernelEntry* (*kernels)(const char*, int*)) {
  return {.abi_version = kBackendAbiVersion,
          .kind = kind,
          .name = name,
          .targets = targets,
          .device_count = one_device,
          .device_info = info,
          .kernels = kernels,
          .occupancy = occupancy,
          .launch = launch,
          .allocate = allocate,
          .release = release,
          .copy = copy,
          .fill_zero = fill_zero,
          .synchronize = synchronize,
          .capture_id = capture_id};
}

const char* const kGpuTargets[] = {"fakegpu", nullptr};
const char* const kCpuTargets[] = {"fakecpu", nullptr};
const char* const kHipTargets[] = {"fakehip", nullptr};

const KernelEntry* no_kernels(int* count) {
  *count = 0;
  return nullptr;
}

const BackendAbi kFakeGpu = backend(
    DeviceKind::kCuda, "cuda", kGpuTargets,
    [](int, BackendDevice* info) { return describe(info, "Fake GPU", "fake_1", "fakegpu"); },
    [](const char* target, int* count) {
      return std::string_view(target) == "fakegpu" ? table(kGpuKernels, count) : no_kernels(count);
    });
const BackendAbi kFakeCpu = backend(
    DeviceKind::kCpu, "cpu", kCpuTargets,
    [](int, BackendDevice* info) { return describe(info, "Fake CPU", "fake", "cpu"); },
    [](const char* target, int* count) {
      const std::string_view name = target;
      return name == "fakecpu" || name == "cpu" ? table(kCpuKernels, count) : no_kernels(count);
    });
const BackendAbi kUnservedHip = backend(
    DeviceKind::kHip, "hip", kHipTargets,
    [](int, BackendDevice* info) { return describe(info, "Old Card", "gfx900", ""); },
    [](const char*, int* count) { return no_kernels(count); });

}  // namespace

FakeState& fake_state() {
  static FakeState state;
  return state;
}

FakeBackends::FakeBackends() {
  fake_state() = {};
  replace_backend_for_test(DeviceKind::kCpu, &kFakeCpu);
  replace_backend_for_test(DeviceKind::kCuda, &kFakeGpu);
  replace_backend_for_test(DeviceKind::kHip, &kUnservedHip);
}

FakeBackends::~FakeBackends() {
  release_workspaces_for_test();
  for (DeviceKind kind : kAllKinds) replace_backend_for_test(kind, nullptr);
}

}  // namespace flashport::test
