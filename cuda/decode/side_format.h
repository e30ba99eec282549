// The format of keys or of values: the kernel's own or, in kernels of blocks, the call's, a uniform branch for each
// use. So those have code for each format of a side, and not for each pair.
#pragma once

#include <type_traits>

#include "common/device/decode/config.h"
#include "cuda/arch/block.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <KvFormat kFormat>
using FormatConstant = std::integral_constant<KvFormat, kFormat>;

template <KvFormat kFormat>
struct SideFormat {
  FLASHPORT_DEVICE explicit SideFormat(KvFormat) {}
  FLASHPORT_DEVICE static constexpr KvFormat value() { return kFormat; }
  // f(FormatConstant)
  template <class F>
  FLASHPORT_DEVICE decltype(auto) with(F&& f) const {
    return f(FormatConstant<kFormat>{});
  }
};

template <>
struct SideFormat<KvFormat::kBlocks> {
  KvFormat format;
  FLASHPORT_DEVICE explicit SideFormat(KvFormat of_call) : format(of_call) {}
  FLASHPORT_DEVICE KvFormat value() const { return format; }
  template <class F>
  FLASHPORT_DEVICE decltype(auto) with(F&& f) const {
    switch (format) {
      case KvFormat::kQ4_0: return f(FormatConstant<KvFormat::kQ4_0>{});
      case KvFormat::kIq4Nl: return f(FormatConstant<KvFormat::kIq4Nl>{});
      default: return f(FormatConstant<KvFormat::kQ8_0>{});
    }
  }
};

}  // namespace flashport::FLASHPORT_TARGET::decode
