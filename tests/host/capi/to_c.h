// What the tests of the C interface share: tensors as C has them, and the texts of refusals.
#pragma once

#include <cstdint>
#include <string>

#include <flashport/capi.h>
#include <flashport/types.h>

namespace flashport::test {

inline fp_tensor to_c(const TensorView& view) {
  fp_tensor c = {};
  c.data = view.data;
  c.dtype = static_cast<std::int32_t>(view.dtype);
  c.rank = view.rank;
  for (int i = 0; i < view.rank; ++i) {
    c.shape[i] = view.shape[i];
    c.strides[i] = view.strides[i];
  }
  return c;
}

// The text of a refusal of this kind.
inline std::string refusal(fp_status found, fp_status expected) {
  return found == expected ? fp_last_error() : "status " + std::to_string(found);
}

}  // namespace flashport::test
