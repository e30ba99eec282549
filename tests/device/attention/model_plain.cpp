#include "tests/device/attention/model_kernels.h"
#include "tests/device/attention/model_tables.h"

namespace flashport::machine {

void add_plain_kernels(std::vector<KernelEntry>& table) {
  using enum MathType;
  using enum ScoreForm;
  using enum KeySources;
  table.push_back(attention_kernel<kBf16, 64, kPlain, kPages>("attention/bf16/hd64/plain/sm90a"));
  table.push_back(attention_kernel<kBf16, 128, kPlain, kPages>("attention/bf16/hd128/plain/sm90a"));
  table.push_back(attention_kernel<kBf16, 256, kPlain, kPages>("attention/bf16/hd256/plain/sm90a"));
  table.push_back(attention_merge_kernel("attention_merge/sm90a"));
}

}  // namespace flashport::machine
