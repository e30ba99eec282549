// The kernel that this thread chose last from a table, and for what: calls mostly follow calls of the same kind, and a
// table is long.
#pragma once

#include <span>

#include "common/host/backend_abi.h"

namespace flashport {

template <class Request>
class LastChoice {
 public:
  // Null where the last request was another one.
  [[nodiscard]] const KernelEntry* find(std::span<const KernelEntry> table, const Request& request) const {
    return table.data() == table_ && request == request_ ? kernel_ : nullptr;
  }
  void keep(std::span<const KernelEntry> table, const Request& request, const KernelEntry* kernel) {
    table_ = table.data();
    request_ = request;
    kernel_ = kernel;
  }

 private:
  const KernelEntry* table_ = nullptr;
  Request request_{};
  const KernelEntry* kernel_ = nullptr;
};

}  // namespace flashport
