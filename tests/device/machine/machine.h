// A multiprocessor of warps on the host, for tests that run whole CUDA kernels by their own text. Each lane is a fiber,
// which runs until it has to wait: for the other lanes of its warp, at a named barrier, or for the phase of a barrier
// in shared memory. The next one is drawn by lot. When none can go on the launch fails, and says where the warps wait.
//
// What hardware may do late is done late: bytes of an asynchronous copy are poison from the moment it is asked for
// until it lands, which is at any time before its thread waits for it, or before the barrier that it arrives at. So are
// the sums of a matrix product until they are waited for (products.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/device/machine/products.h"

namespace flashport::machine {

inline constexpr int kNamedBarriers = 16;

struct Launch {
  std::int64_t blocks = 1;
  int threads = 32;
  std::size_t shared_bytes = 0;
  std::uint64_t seed = 0;  // of the lots
  int resident = 1;        // blocks that take turns
  int cluster = 1;         // of neighbouring blocks, which are resident together
  std::function<void(void* shared)> kernel;
  std::function<void()> kernel_before = {};  // what the kernel before it does last
};
// Runs all blocks, in an order drawn by lot. Empty, or what went wrong.
[[nodiscard]] std::string run(const Launch& launch);

// What follows is for the lane that runs.

[[nodiscard]] unsigned thread_index();
[[nodiscard]] unsigned block_index();
[[nodiscard]] unsigned block_count();
[[nodiscard]] unsigned block_threads();

// Ends the launch with this text. The fiber stays where it is: what it owns is never released.
[[noreturn]] void fail(const char* text);

// One instruction of all lanes of a warp: the last one that comes calls run(operands of lane 0, 1, ..., 31).
using WarpOperation = void (*)(void* const* operands);
void meet(const char* what, WarpOperation run, void* operands);

// Waits for the kernel before: the first thread that does so runs what that kernel does last.
void await_kernel_before();

void named_barrier(int barrier, int threads, bool waits);

// An address of shared memory as the 32 bits that instructions take.
[[nodiscard]] unsigned shared_address(const void* pointer);
[[nodiscard]] char* shared_pointer(unsigned address, int bytes);

// The first `bytes` of `unit` come from memory, zeros follow.
void copy_later(char* to, const void* from, int unit, int bytes);
void finish_copies();
// Copies since the last commit are a group, of which all but the last `later` are awaited.
void commit_copies();
void await_copy_groups(int later);
void arrive_on_copies(std::uint64_t* barrier);

void init_barrier(std::uint64_t* barrier, int arrivals);
void arrive(std::uint64_t* barrier);
void await_phase(std::uint64_t* barrier, unsigned parity);

// A phase of the barrier ends when its arrivals are complete and so many more bytes of boxes have landed.
void expect_bytes(std::uint64_t* barrier, int bytes);
// read(to) writes them when they land.
void bring_box(char* to, int bytes, std::function<void(char*)> read, std::uint64_t* barrier);

// Blocks of a cluster (cluster.cpp). Addresses of shared memory have the rank of their block; copies to another block
// may come late, and both blocks must be there then.
[[nodiscard]] int cluster_rank();
void cluster_barrier();
[[nodiscard]] unsigned address_in_block(unsigned own, int rank);
void arrive_in_block(unsigned barrier);
// `read` as for boxes, from this block's shared memory if `reads_shared`.
void bring_to_block(unsigned to, int bytes, std::function<void(char*)> read, unsigned barrier, bool reads_shared);

// The block's shared memory as products read it, by the asynchronous proxy: what copy_later() has brought is poison
// until a lane has made the fence between the proxies. Ordinary stores are seen at once.
class AsyncView {
 public:
  AsyncView();
  [[nodiscard]] unsigned word(unsigned address) const;  // of shared memory, a multiple of 4

 private:
  const char* shared_;
  const std::vector<bool>& unseen_;
};
void fence_async_proxy();

// The lane's warp, whose lanes are together, does this with its Products.
void fence_products();
void start_product(const LaneRegisters& registers, int count, Multiply multiply);
void commit_products();
void await_products(int later);

}  // namespace flashport::machine
