#include "tests/support/graphs.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "tests/support/device.h"

namespace flashport_test {
namespace {

constexpr unsigned kNonBlocking = 1;

struct Driver {
  int (*set_device)(int);                      // HIP
  int (*retain_primary_context)(void**, int);  // CUDA, whose devices are numbered as the runtime's
  int (*set_current_context)(void*);
  int (*create_stream)(void**, unsigned);
  int (*destroy_stream)(void*);
  int (*synchronize)(void*);
  int (*begin_capture)(void*, int);
  int (*end_capture)(void*, void**);
  int (*instantiate)(void**, void*, unsigned long long);
  int (*launch)(void*, void*);
  int (*destroy_graph)(void*);
  int (*destroy_executable)(void*);
};

void* open_first(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_NOW)) return library;
  }
  throw std::runtime_error(std::string("cannot open ") + *names.begin());
}

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string("the driver has no ") + name);
}

const Driver& driver() {
  static const Driver loaded = [] {
    const bool hip = device().kind == flashport::DeviceKind::kHip;
    void* library =
        hip ? open_first({"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}) : open_first({"libcuda.so.1"});
    Driver d{};
    if (hip) {
      find(library, "hipSetDevice", d.set_device);
    } else {
      find(library, "cuDevicePrimaryCtxRetain", d.retain_primary_context);
      find(library, "cuCtxSetCurrent", d.set_current_context);
    }
    find(library, hip ? "hipStreamCreateWithFlags" : "cuStreamCreate", d.create_stream);
    find(library, hip ? "hipStreamDestroy" : "cuStreamDestroy_v2", d.destroy_stream);
    find(library, hip ? "hipStreamSynchronize" : "cuStreamSynchronize", d.synchronize);
    find(library, hip ? "hipStreamBeginCapture" : "cuStreamBeginCapture_v2", d.begin_capture);
    find(library, hip ? "hipStreamEndCapture" : "cuStreamEndCapture", d.end_capture);
    find(library, hip ? "hipGraphInstantiateWithFlags" : "cuGraphInstantiateWithFlags", d.instantiate);
    find(library, hip ? "hipGraphLaunch" : "cuGraphLaunch", d.launch);
    find(library, hip ? "hipGraphDestroy" : "cuGraphDestroy", d.destroy_graph);
    find(library, hip ? "hipGraphExecDestroy" : "cuGraphExecDestroy", d.destroy_executable);
    return d;
  }();
  return loaded;
}

void check(int status, const char* what) {
  if (status != 0) throw std::runtime_error(std::string(what) + " failed with code " + std::to_string(status));
}

// Streams are made on the current device, which need not be the one under test.
void make_current() {
  flashport_test::synchronize();  // the driver is initialised
  if (driver().set_device != nullptr) return check(driver().set_device(device().index), "setting the device");
  void* context = nullptr;  // kept while the program runs
  check(driver().retain_primary_context(&context, device().index), "retaining the device's context");
  check(driver().set_current_context(context), "setting the device's context");
}

}  // namespace

bool has_graphs() { return device().kind != flashport::DeviceKind::kCpu; }

DeviceStream::DeviceStream() {
  make_current();
  check(driver().create_stream(&stream_, kNonBlocking), "creating a stream");
}
DeviceStream::~DeviceStream() { driver().destroy_stream(stream_); }
flashport::Stream DeviceStream::handle() const { return reinterpret_cast<flashport::Stream>(stream_); }
void DeviceStream::synchronize() const { check(driver().synchronize(stream_), "waiting for a stream"); }

DeviceGraph::DeviceGraph(const DeviceStream& stream, const std::function<void()>& work, CaptureMode mode) {
  void* handle = reinterpret_cast<void*>(stream.handle());
  check(driver().begin_capture(handle, static_cast<int>(mode)), "beginning a capture");
  work();
  check(driver().end_capture(handle, &graph_), "ending a capture");
  check(driver().instantiate(&executable_, graph_, 0), "instantiating a graph");
}
DeviceGraph::~DeviceGraph() {
  driver().destroy_executable(executable_);
  driver().destroy_graph(graph_);
}
void DeviceGraph::launch(const DeviceStream& stream) const {
  check(driver().launch(executable_, reinterpret_cast<void*>(stream.handle())), "launching a graph");
}

}  // namespace flashport_test
