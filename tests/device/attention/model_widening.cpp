#include "tests/device/attention/model_kernels.h"
#include "tests/device/attention/model_tables.h"

namespace flashport::machine {

void add_kernels_that_widen(std::vector<KernelEntry>& table) {
  table.push_back(attention_kernel<MathType::kFp16, 128, ScoreForm::kPlain, KeySources::kScaled>(
      "attention/fp16/hd128/plain/scaled/sm90a"));
}

}  // namespace flashport::machine
