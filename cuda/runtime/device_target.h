// Which target serves an NVIDIA device.
#pragma once

#include <string>

namespace flashport::cuda_runtime {

// The compute capability as the toolkit spells it: "sm_90".
inline std::string architecture_name(int major, int minor) {
  return "sm_" + std::to_string(major) + std::to_string(minor);
}

// "sm90a" is compiled for Hopper's own instructions, which no other architecture has. Empty: no target of ours.
inline const char* target_of(int major, int minor) { return major == 9 && minor == 0 ? "sm90a" : ""; }

}  // namespace flashport::cuda_runtime
