// On a GPU the kernel "read_bandwidth/<target>" of the backend; on the CPU one thread per hardware thread, each summing
// an equal contiguous range.
#include "bindings/python/read_memory.h"

#include <cstring>
#include <string_view>
#include <thread>
#include <vector>

#include "bindings/python/call.h"
#include "common/host/check.h"
#include "common/host/devices.h"

namespace flashport::python {
namespace {

std::uint64_t sum_words(const std::uint64_t* words, std::size_t count) {
  // Eight chains, so that neither the addition's latency nor one vector register is the limit.
  std::uint64_t sums[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (std::size_t lane = 0; lane < 8; ++lane) sums[lane] += words[i + lane];
  }
  for (; i < count; ++i) sums[0] += words[i];
  std::uint64_t total = 0;
  for (const std::uint64_t sum : sums) total += sum;
  return total;
}

void read_on_cpu(const void* data, std::size_t bytes) {
  const auto* words = static_cast<const std::uint64_t*>(data);
  const std::size_t count = bytes / sizeof(std::uint64_t);
  const std::size_t workers = std::max(1U, std::thread::hardware_concurrency());
  std::vector<std::uint64_t> sums(workers);
  std::vector<std::thread> threads;
  for (std::size_t worker = 0; worker < workers; ++worker) {
    const std::size_t begin = count * worker / workers;
    const std::size_t end = count * (worker + 1) / workers;
    const auto work = [=, &sums] { sums[worker] = sum_words(words + begin, end - begin); };
    if (worker + 1 == workers) {
      work();
    } else {
      threads.emplace_back(work);
    }
  }
  for (std::thread& thread : threads) thread.join();
  // The sum must look used.
  volatile std::uint64_t sink = sums[0];
  (void)sink;
}

}  // namespace

void define_read_memory(py::module_& module) {
  module.def(
      "read_memory",
      [](const py::object& array, const py::object& stream_object) {
        Call call("read_memory", stream_object.ptr());
        const TensorView view = call.input("array", array.ptr());
        const Check check("read_memory");
        check.readable(view, "array");
        check.contiguous(view, "array");
        const auto bytes = view.numel() * element_size(view.dtype);
        call.run([&](Stream stream) {
          if (view.device.kind == DeviceKind::kCpu) {
            read_on_cpu(view.data, static_cast<std::size_t>(bytes));
            return;
          }
          DeviceContext& context = device_context(check, view, "array");
          for (const KernelEntry& kernel : context.kernels()) {
            if (!std::string_view(kernel.key).starts_with("read_bandwidth/")) continue;
            ReadBandwidthParams params{};
            params.data = view.data;
            params.bytes = bytes;
            const int blocks = context.multiprocessors() * context.occupancy(check, kernel);
            context.launch(check, stream, kernel, blocks, params);
            return;
          }
          check.not_supported("target " + context.target() + " has no kernel read_bandwidth");
        });
      },
      py::arg("array"), py::arg("stream") = py::none(),
      "Reads every byte of a contiguous array once, asynchronously on a GPU: the ceiling of memory-bound kernels.");
}

}  // namespace flashport::python
