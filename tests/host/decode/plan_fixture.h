// What the tests of decode's plan share: plans on the fake backends.
#pragma once

#include <gtest/gtest.h>

#include "common/host/decode/plan.h"
#include "common/host/decode/problem.h"
#include "tests/host/decode/decode_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {

class PlanDecode : public ::testing::Test {
 protected:
  DecodePlan plan(const DecodeArgs& args) {
    const DecodeProblem problem = validate_flash_decode(args);
    return plan_decode(problem, device_context(Check("flash_decode"), problem.q, "q"));
  }
  FakeBackends backends_;
};

inline TensorView ints(void* data, std::initializer_list<std::int64_t> shape) {
  return TensorView(data, DType::kInt32, kGpu, shape);
}

}  // namespace flashport::test
