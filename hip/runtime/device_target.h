// Which target serves an AMD device, and which HIP runtime loads a target's code.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

namespace flashport::hip_runtime {

// `architecture` is gcnArchName: a processor, then its features: "gfx942:sramecc+:xnack-". Empty: no target of ours.
// gfx11 is generic code for every processor of RDNA3 and RDNA3.5.
constexpr std::string_view target_of(std::string_view architecture) {
  constexpr std::string_view kRdna3[] = {"gfx1100", "gfx1101", "gfx1102", "gfx1103",
                                         "gfx1150", "gfx1151", "gfx1152", "gfx1153"};
  const std::string_view processor = architecture.substr(0, architecture.find(':'));
  if (processor == "gfx942") return "gfx942";
  if (processor == "gfx950") return "gfx950";
  if (std::find(std::begin(kRdna3), std::end(kRdna3), processor) != std::end(kRdna3)) return "gfx11";
  return "";
}

// The oldest runtime, as hipRuntimeGetVersion() counts: code objects are of version 6 (cmake/kernels.cmake), which HIP
// reads since 6.2, and generic ones since 6.3.
inline constexpr int kOldestHip = 60200000;
constexpr int oldest_hip(std::string_view target) { return target == "gfx11" ? 60300000 : kOldestHip; }

inline std::string hip_version_text(int version) {
  return "HIP " + std::to_string(version / 10000000) + "." + std::to_string(version / 100000 % 100);
}

}  // namespace flashport::hip_runtime
