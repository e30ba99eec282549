// The format of keys or of values: the kernel's own or, in kernels of blocks and of bytes, the call's, a uniform
// branch for each use. So those have code for each format of a side, and not for each pair.
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
  template <class F>
  FLASHPORT_DEVICE decltype(auto) with_rows(F&& f) const {
    return with(f);
  }
};

struct FormatOfCall {
  KvFormat format;
  FLASHPORT_DEVICE explicit FormatOfCall(KvFormat of_call) : format(of_call) {}
  FLASHPORT_DEVICE KvFormat value() const { return format; }
};

template <>
struct SideFormat<KvFormat::kBlocks> : FormatOfCall {
  using FormatOfCall::FormatOfCall;
  template <class F>
  FLASHPORT_DEVICE decltype(auto) with(F&& f) const {
    return format == KvFormat::kIq4Nl ? f(FormatConstant<KvFormat::kIq4Nl>{}) : with_rows(f);
  }
  // The same for what rows of iq4_nl and of q4_0 have in common: where their blocks lie.
  template <class F>
  FLASHPORT_DEVICE decltype(auto) with_rows(F&& f) const {
    switch (format) {
      case KvFormat::kQ4_0:
      case KvFormat::kIq4Nl: return f(FormatConstant<KvFormat::kQ4_0>{});
      case KvFormat::kQ4_1: return f(FormatConstant<KvFormat::kQ4_1>{});
      case KvFormat::kQ5_0: return f(FormatConstant<KvFormat::kQ5_0>{});
      case KvFormat::kQ5_1: return f(FormatConstant<KvFormat::kQ5_1>{});
      default: return f(FormatConstant<KvFormat::kQ8_0>{});
    }
  }
};

template <>
struct SideFormat<KvFormat::kBytes> : FormatOfCall {
  using FormatOfCall::FormatOfCall;
  template <class F>
  FLASHPORT_DEVICE decltype(auto) with(F&& f) const {
    switch (format) {
      case KvFormat::kFp8E4M3: return f(FormatConstant<KvFormat::kFp8E4M3>{});
      case KvFormat::kFp8E4M3Fnuz: return f(FormatConstant<KvFormat::kFp8E4M3Fnuz>{});
      case KvFormat::kFp8E5M2: return f(FormatConstant<KvFormat::kFp8E5M2>{});
      default: return f(FormatConstant<KvFormat::kInt8>{});
    }
  }
  // Rows of all lie alike.
  template <class F>
  FLASHPORT_DEVICE decltype(auto) with_rows(F&& f) const {
    return f(FormatConstant<KvFormat::kInt8>{});
  }
};

}  // namespace flashport::FLASHPORT_TARGET::decode
