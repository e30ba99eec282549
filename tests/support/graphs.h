// Streams and graphs of the device under test, through the functions of its driver that have the same shape at both
// vendors; looked up by name at run time.
#pragma once

#include <functional>

#include <flashport/types.h>

namespace flashport_test {

// Whether the device has graphs: every GPU, no CPU.
[[nodiscard]] bool has_graphs();

class DeviceStream {
 public:
  DeviceStream();
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  [[nodiscard]] flashport::Stream handle() const;
  void synchronize() const;

 private:
  void* stream_ = nullptr;
};

// What a capture forbids meanwhile of calls that might wait for the device: in global mode to every thread.
enum class CaptureMode { kGlobal = 0, kRelaxed = 2 };

// What `work` puts on `stream`, to be launched on any stream as often as wanted.
class DeviceGraph {
 public:
  DeviceGraph(const DeviceStream& stream, const std::function<void()>& work, CaptureMode mode = CaptureMode::kRelaxed);
  ~DeviceGraph();
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;

  void launch(const DeviceStream& stream) const;

 private:
  void* graph_ = nullptr;
  void* executable_ = nullptr;
};

}  // namespace flashport_test
