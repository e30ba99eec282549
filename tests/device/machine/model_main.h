// What a program does that runs public calls on the model of model_backend.h, once the model has its kernels.
#pragma once

#include <gtest/gtest.h>

#include "tests/device/machine/model_backend.h"
#include "tests/support/device.h"

namespace flashport_test {

inline int run_tests_on_model(int* argc, char** argv) {
  flashport::machine::install_model();
  testing::InitGoogleTest(argc, argv);
  char target[] = "--target=sm90a";
  char* arguments[] = {argv[0], target, nullptr};
  int count = 2;
  if (const int code = start(&count, arguments); code != 0) return code;
  return RUN_ALL_TESTS();
}

}  // namespace flashport_test
