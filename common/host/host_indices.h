// Index tensors as the host reads them, to check their contents.
#pragma once

#include <cstdint>
#include <vector>

#include "common/host/check.h"
#include "common/host/devices.h"

namespace flashport {

// Bytes of a tensor as the host sees them: on the CPU the memory itself, else a copy of GPU memory.
class HostBytes {
 public:
  HostBytes(const Check& check, const DeviceContext& device, Stream stream, const void* data, std::int64_t bytes) {
    if (device.is_cpu() || bytes == 0) {
      data_ = data;
      return;
    }
    copy_.resize(static_cast<std::size_t>(bytes));
    const BackendAbi& abi = device.abi();
    device.expect(check, abi.copy(device.device().index, stream, copy_.data(), data, copy_.size()));
    device.expect(check, abi.synchronize(device.device().index, stream));
    data_ = copy_.data();
  }

  template <class T>
  [[nodiscard]] const T* as() const {
    return static_cast<const T*>(data_);
  }

 private:
  const void* data_;
  std::vector<char> copy_;
};

class HostIndices {
 public:
  HostIndices(const Check& check, const DeviceContext& device, Stream stream, const IndexArray& array,
              std::int64_t count)
      : is_int64_(array.is_int64 != 0),
        bytes_(check, device, stream, array.data, array.data == nullptr ? 0 : count * (array.is_int64 != 0 ? 8 : 4)) {}

  [[nodiscard]] std::int64_t operator[](std::int64_t i) const {
    return is_int64_ ? bytes_.as<std::int64_t>()[i] : bytes_.as<std::int32_t>()[i];
  }

 private:
  bool is_int64_;
  HostBytes bytes_;
};

}  // namespace flashport
