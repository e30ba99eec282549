// Fibers of one thread: contexts with stacks of their own.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace flashport::machine {

inline constexpr std::size_t kStackBytes = 256 * 1024;

struct Fiber {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  [[maybe_unused]] void* stack = nullptr;  // null: the thread's own
  [[maybe_unused]] void* fake_stack = nullptr;
};

#if defined(__x86_64__)
// Saves what a function keeps, and goes on with what another fiber has saved. swapcontext() would make two system
// calls.
extern "C" void flashport_switch_stacks(void** from, void* to);
asm(R"(
.text
.type flashport_switch_stacks, @function
flashport_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size flashport_switch_stacks, .-flashport_switch_stacks
)");
#endif

// Memory that fibers have left as they stood in it: what ASan knows of their frames no longer holds.
inline void forget_frames([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
#endif
}

#if defined(__SANITIZE_ADDRESS__)
inline const void* thread_stack = nullptr;
inline std::size_t thread_stack_bytes = 0;
#endif

inline void switch_fiber(Fiber& from, Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom = to.stack != nullptr ? to.stack : thread_stack;
  const std::size_t bytes = to.stack != nullptr ? kStackBytes : thread_stack_bytes;
  __sanitizer_start_switch_fiber(&from.fake_stack, bottom, bytes);
#endif
#if defined(__x86_64__)
  flashport_switch_stacks(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

using FiberEntry = void (*)();
inline FiberEntry fiber_entry = nullptr;
inline void enter_fiber() {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (thread_stack == nullptr) thread_stack = bottom, thread_stack_bytes = bytes;
#endif
  fiber_entry();
  __builtin_trap();  // its last act is to switch away
}

inline void start_fiber(Fiber& fiber, void* stack, FiberEntry entry) {
  fiber_entry = entry;
  fiber.stack = stack;
  forget_frames(stack, kStackBytes);
#if defined(__x86_64__)
  auto** top = reinterpret_cast<void**>(static_cast<char*>(stack) + kStackBytes);
  *--top = nullptr;                               // where enter_fiber would return to
  *--top = reinterpret_cast<void*>(enter_fiber);  // the stack is then as after a call
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter_fiber, 0);
#endif
}

}  // namespace flashport::machine
