// Which target serves an AMD device.
#pragma once

#include <algorithm>
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

}  // namespace flashport::hip_runtime
