// The kernel "read_bandwidth/<target>" over as many blocks as the device holds at a time.
#include "bindings/python/read_memory.h"

#include "bindings/python/call.h"
#include "common/device/core/read_params.h"
#include "common/host/check.h"
#include "common/host/devices.h"

namespace flashport::python {
namespace {

constexpr std::uintptr_t kAlignment = 16;

void read_memory(const Check& check, const TensorView& view, Stream stream) {
  DeviceContext& device = device_context(check, view, "array");
  const KernelEntry& kernel = device.plain_kernel(check, KernelTag::kReadBandwidth);
  const ReadBandwidthParams params{view.data, view.numel() * element_size(view.dtype)};
  const std::int64_t blocks = std::int64_t{device.multiprocessors()} * device.occupancy(check, kernel);
  device.launch(check, stream, kernel, LaunchGrid{blocks}, params);
}

}  // namespace

void define_read_memory(py::module_& module) {
  module.def(
      "read_memory",
      [](const py::object& array, const py::object& stream_object) {
        Call call("read_memory", stream_object.ptr());
        TensorView view;
        call.input("array", array.ptr(), view);
        const Check check("read_memory");
        check.readable(view, "array");
        check.contiguous(view, "array");
        if (reinterpret_cast<std::uintptr_t>(view.data) % kAlignment != 0) {
          call.fail_value("array", "must be aligned to 16 bytes");
        }
        call.run([&](Stream stream) { read_memory(check, view, stream); });
      },
      py::arg("array"), py::arg("stream") = py::none(),
      "Reads every byte of a contiguous array once, asynchronously on a GPU: the ceiling of memory-bound kernels.");
}

}  // namespace flashport::python
