// Exceptions of the public interface. Each text names the function, the argument, what was expected and what came.
// The Python module maps them one to one: ValueError, TypeError, NotImplementedError, RuntimeError.
#pragma once

#include <stdexcept>
#include <string>

#include <flashport/export.h>

namespace flashport {

struct FLASHPORT_API Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A wrong rank, shape, stride, device or value.
struct FLASHPORT_API ValueError : Error {
  using Error::Error;
};
// A wrong element type, or an argument of the wrong kind.
struct FLASHPORT_API TypeError : Error {
  using Error::Error;
};
// A valid request that no kernel of the tensors' target serves; the text is what supports() returns as reason.
struct FLASHPORT_API NotSupportedError : Error {
  using Error::Error;
};
// A driver or runtime call failed; the text carries its name and code.
struct FLASHPORT_API BackendError : Error {
  using Error::Error;
};

}  // namespace flashport
