#include "tests/device/attention/model_kernels.h"
#include "tests/device/attention/model_tables.h"

namespace flashport::machine {

void add_kernels_with_options(std::vector<KernelEntry>& table) {
  using enum MathType;
  using enum ScoreForm;
  using enum KeySources;
  table.push_back(attention_kernel<kBf16, 64, kSoftcap, kPages>("attention/bf16/hd64/softcap/sm90a"));
  table.push_back(attention_kernel<kBf16, 256, kSoftcap, kPages>("attention/bf16/hd256/softcap/sm90a"));
  table.push_back(attention_kernel<kFp16, 128, kBias, kRows>("attention/fp16/hd128/bias/sm90a"));
  table.push_back(attention_kernel<kBf16, 64, kBias, kRows>("attention/bf16/hd64/bias/sm90a"));
  table.push_back(attention_kernel<kBf16, 192, kBias, kRows, 128>("attention/bf16/hd192x128/bias/sm90a"));
  table.push_back(attention_kernel<kBf16, 256, kBias, kRows>("attention/bf16/hd256/bias/sm90a"));
  table.push_back(attention_kernel<kBf16, 128, kAny, kPages>("attention/bf16/hd128/any/sm90a"));
  table.push_back(attention_kernel<kBf16, 512, kAny, kPages>("attention/bf16/hd512/any/sm90a"));
}

}  // namespace flashport::machine
