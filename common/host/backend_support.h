// Common to the three backends: the error text that a BackendAbi function returns, and look-up in kernel tables.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/host/kernel_table.h"

namespace flashport {

// Keeps `text` until this thread's next failing call, as BackendAbi promises.
inline const char* keep_error(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

// The tables of one backend. Every kernel has an index over all of them, for state that is kept by that index.
class KernelIndex {
 public:
  explicit KernelIndex(std::span<const TargetKernels> tables) : tables_(tables) {
    for (const TargetKernels& table : tables) {
      names_.push_back(table.target);
      size_ += table.count;
    }
    names_.push_back(nullptr);
  }

  [[nodiscard]] int size() const { return size_; }
  // The targets' names, ended by null.
  [[nodiscard]] const char* const* names() const { return names_.data(); }

  // Null where `target` was not compiled.
  [[nodiscard]] const TargetKernels* find(std::string_view target) const {
    for (const TargetKernels& table : tables_) {
      if (target == table.target) return &table;
    }
    return nullptr;
  }

  // `kernel` must point into the tables.
  [[nodiscard]] int index_of(const KernelEntry* kernel) const {
    int base = 0;
    for (const TargetKernels& table : tables_) {
      if (kernel >= table.entries && kernel < table.entries + table.count) {
        return base + static_cast<int>(kernel - table.entries);
      }
      base += table.count;
    }
    return -1;
  }

 private:
  std::span<const TargetKernels> tables_;
  std::vector<const char*> names_;
  int size_ = 0;
};

}  // namespace flashport
