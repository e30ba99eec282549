// Whole decode kernels of sm90a as entries of the table of model_backend.h: their own text, on the host.
#pragma once

#define FLASHPORT_TARGET sm90a
#define FLASHPORT_TARGET_HEADER "tests/device/machine/target.h"
#include "cuda/decode/kernels.h"

#include "tests/device/machine/model_backend.h"

namespace flashport::machine {

template <DecodeConfig kCfg>
KernelEntry kernel_of_config(const char* key) {
  namespace decode = sm90a::decode;
  static const ModelKernel kRun = [](const void* params, void* shared) {
    decode::decode_block<kCfg>(*static_cast<const decode::DecodeParamsOf<kCfg>*>(params),
                               static_cast<decode::DecodeShared<kCfg>*>(shared));
  };
  return {.key = key,
          .tag = decode::decode_tag(kCfg.shape),
          .threads = decode::block_threads(kCfg),
          .shared_bytes = decode::shared_bytes<kCfg>(),
          .handle = &kRun,
          .shape = {.decode = kCfg},
          .teams = kCfg.tuning.teams,
          .decode_split = decode::decode_split(kCfg)};
}

template <MathType kMath, KvFormat kKeys, int kDim, int kRows, bool kPlain = false, bool kLargeCache = false,
          KvFormat kValues = kKeys>
KernelEntry decode_kernel(const char* key) {
  return kernel_of_config<sm90a::decode::decode_config(kMath, kKeys, kValues, kDim, kDim, kRows, false, kPlain,
                                                       kLargeCache)>(key);
}
// One that appends.
template <MathType kMath, KvFormat kFormat, int kDim, int kRows, bool kPlain>
KernelEntry append_kernel(const char* key) {
  return kernel_of_config<sm90a::decode::decode_config(kMath, kFormat, kFormat, kDim, kDim, kRows, true, kPlain)>(key);
}

// One that reads segments of blocks and of 16 bits as they are stored.
template <KvFormat kBlocks, int kDim, bool kLargeCache>
KernelEntry segments_kernel(const char* key) {
  return kernel_of_config<sm90a::decode::decode_config(MathType::kFp16, kBlocks, kBlocks, kDim, kDim, 8, false, false,
                                                       kLargeCache, true)>(key);
}

// The launch after one of few blocks that would combine much: body(params, shared).
template <class Params, class Shared, class Body>
KernelEntry combine_kernel(const char* key, KernelTag tag, const Body&) {
  static const ModelKernel kRun = [](const void* params, void* shared) {
    Body{}(*static_cast<const Params*>(params), *static_cast<Shared*>(shared));
  };
  return {.key = key, .tag = tag, .threads = 128, .shared_bytes = sizeof(Shared), .handle = &kRun};
}
template <class Params>
KernelEntry combine_kernel(const char* key, KernelTag tag) {
  namespace decode = sm90a::decode;
  return combine_kernel<Params, decode::CombineShared>(key, tag, [](const Params& p, decode::CombineShared& shared) {
    decode::decode_combine(p, sm90a::Block(nullptr), shared, [] {});
  });
}

}  // namespace flashport::machine
