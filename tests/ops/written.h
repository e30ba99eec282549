// What a call has to write to one tensor: elements that are compared with the exact and the plain result; all the
// others keep their bits.
#pragma once

#include <string>
#include <vector>

#include "tests/support/tensor.h"

namespace flashport_test {

class Written {
 public:
  // `tensor` as it is before the call.
  explicit Written(Tensor& tensor)
      : tensor_(tensor), before_(tensor.element_bytes()), written_(static_cast<std::size_t>(tensor.numel())) {}

  void expect(const Shape& at, double exact, double plain);
  // The state of a head after `outer`, [HV][K][V] whatever the layout.
  void expect_state(const Shape& outer, bool key_major, std::int64_t heads, std::int64_t dim_k, std::int64_t dim_v,
                    const std::vector<double>& exact, const std::vector<double>& plain);
  // After the call and its download.
  void judge(const std::string& what);

 private:
  Tensor& tensor_;
  std::vector<unsigned char> before_;
  std::vector<bool> written_;
  std::vector<Shape> indices_;
  std::vector<double> exact_, plain_;
};

}  // namespace flashport_test
