// Lengths of sequences, and how many blocks share them, for kernels on a multiprocessor of the host.
#pragma once

#include <cstdint>
#include <vector>

#include <flashport/backend.h>

namespace flashport_test {

using Lengths = std::vector<std::int64_t>;
inline const std::vector<Lengths> kShort = {{0}, {1}, {63}, {64}, {65}, {127}, {128}, {129}, {0, 1, 63}, {64, 65, 127}};
inline const std::vector<Lengths> kLong = {{1500}, {700, 0, 1100}};

// Blocks of a kernel that takes a multiprocessor for itself.
inline void set_blocks(int blocks) { flashport::set_multiprocessor_limit(blocks); }

}  // namespace flashport_test
