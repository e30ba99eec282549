// What the handle of a HIP kernel's entry points at: a symbol in a code object that is embedded in the backend.
#pragma once

namespace flashport::hip_runtime {

// One translation unit's code for one target, as hipModuleLoadData takes it. Objects are static: their address is
// their identity, so a device loads each at most once.
struct CodeObject {
  const unsigned char* begin;
  const unsigned char* end;
};

struct KernelSymbol {
  const char* name;
  const CodeObject* object;
};

}  // namespace flashport::hip_runtime
