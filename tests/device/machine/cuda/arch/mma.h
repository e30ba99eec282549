// In place of CUDA's own, for kernels that run on machine.h: the same names.
#pragma once

#include <vector>

#include "common/device/core/types.h"
#include "cuda/arch/block.h"

namespace flashport::FLASHPORT_TARGET {

inline unsigned shared_address(const void* pointer) { return machine::shared_address(pointer); }

template <int kBytes>
void copy_async_first(void* to, const void* from, int bytes) {
  machine::copy_later(static_cast<char*>(to), from, kBytes, bytes);
}
template <int kBytes>
void copy_async(void* to, const void* from, bool valid) {
  copy_async_first<kBytes>(to, from, valid ? kBytes : 0);
}
constexpr std::uint64_t kReadOncePolicy = 1, kNormalPolicy = 2;
template <int kBytes>
void copy_async(unsigned to, const void* from, bool zeros, std::uint64_t) {
  copy_async<kBytes>(machine::shared_pointer(to, kBytes), from, !zeros);
}
struct NoPolicy {};
template <int kBytes>
void copy_async(unsigned to, const void* from, bool zeros, NoPolicy) {
  copy_async<kBytes>(machine::shared_pointer(to, kBytes), from, !zeros);
}
inline void copy_async_unit(unsigned to, const void* from) { copy_async<16>(to, from, false, NoPolicy()); }
inline void copy_async_or_zeros(unsigned to, const void* from, int sign, bool zeros) {
  machine::copy_later(machine::shared_pointer(to, 16), from, 16, sign < 0 || zeros ? 0 : 16);
}
inline void await_copies() { machine::finish_copies(); }
inline void commit_copies() { machine::commit_copies(); }
template <int kLater>
void await_copy_groups() {
  machine::await_copy_groups(kLater);
}

inline void mbarrier_init(std::uint64_t* barrier, int arrivals) { machine::init_barrier(barrier, arrivals); }
inline void mbarrier_arrive_on_copies(std::uint64_t* barrier) { machine::arrive_on_copies(barrier); }
inline void mbarrier_arrive(std::uint64_t* barrier) { machine::arrive(barrier); }
inline void mbarrier_arrive_wave(std::uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % kWaveSize == 0) mbarrier_arrive(barrier);
}
inline void mbarrier_wait(std::uint64_t* barrier, unsigned phase) { machine::await_phase(barrier, phase); }

template <int kStages>
struct PipelineState {
  int stage = 0;
  unsigned phase = 0;
  void next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

inline void load_shared(unsigned (&r)[4], const unsigned (&from)[4]) {
  (void)shared_address(from);
  std::memcpy(r, from, sizeof r);
}

// kCount matrices of 8 x 8 halves, whose rows the lanes 8 i to 8 i + 7 name.
template <int kCount, bool kTransposed>
struct Matrices {
  const std::uint16_t* row;
  unsigned words[kCount];
  static void load(void* const* all) {
    const auto row = [&](int i) { return static_cast<const Matrices*>(all[i])->row; };
    for (int lane = 0; lane < kWaveSize; ++lane) {
      const int g = lane / 4, c = lane % 4;
      for (int i = 0; i < kCount; ++i) {
        const unsigned low = kTransposed ? row(8 * i + 2 * c)[g] : row(8 * i + g)[2 * c];
        const unsigned high = kTransposed ? row(8 * i + 2 * c + 1)[g] : row(8 * i + g)[2 * c + 1];
        static_cast<Matrices*>(all[lane])->words[i] = low | high << 16;
      }
    }
  }
};
template <bool kTransposed, int kCount>
void ldmatrix(const char* what, unsigned (&r)[kCount], const void* row) {
  Matrices<kCount, kTransposed> mine{static_cast<const std::uint16_t*>(row), {}};
  if (static_cast<int>(threadIdx.x % kWaveSize) < 8 * kCount && shared_address(row) % 16 != 0) {
    machine::fail("ldmatrix of a row that is not aligned");
  }
  machine::meet(what, Matrices<kCount, kTransposed>::load, &mine);
  std::memcpy(r, mine.words, sizeof r);
}
inline void ldmatrix_x4(unsigned (&r)[4], const void* row) { ldmatrix<false>("ldmatrix.x4", r, row); }
inline void ldmatrix_x2(unsigned (&r)[2], const void* row) { ldmatrix<false>("ldmatrix.x2", r, row); }
inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) { ldmatrix<true>("ldmatrix.x4.trans", r, row); }
inline void ldmatrix_x2_trans(unsigned (&r)[2], const void* row) { ldmatrix<true>("ldmatrix.x2.trans", r, row); }

// Every fp16 number: where the compiler has no instruction for one, a call would take most of the time of a product.
inline float half_number(unsigned bits) {
  static const std::vector<float> kAll = [] {
    std::vector<float> all(0x10000);
    for (unsigned i = 0; i < all.size(); ++i) all[i] = to_float(std::bit_cast<Half>(static_cast<std::uint16_t>(i)));
    return all;
  }();
  return kAll[bits];
}

template <MathType kMath>
struct Product {
  float c[4];
  unsigned a[4], b[2];
  static float number(unsigned two, int half) {
    const unsigned bits = half == 0 ? two & 0xffffu : two >> 16;
    return kMath == MathType::kBf16 ? std::bit_cast<float>(bits << 16) : half_number(bits);
  }
  static void multiply(void* const* all) {
    double rows[16][16], columns[8][16];
    for (int lane = 0; lane < kWaveSize; ++lane) {
      const auto& its = *static_cast<const Product*>(all[lane]);
      const int g = lane / 4, c = lane % 4;
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < 4; ++i) rows[g + i % 2 * 8][2 * c + i / 2 * 8 + half] = number(its.a[i], half);
        for (int i = 0; i < 2; ++i) columns[g][2 * c + i * 8 + half] = number(its.b[i], half);
      }
    }
    for (int lane = 0; lane < kWaveSize; ++lane) {
      auto& its = *static_cast<Product*>(all[lane]);
      for (int i = 0; i < 4; ++i) {
        its.c[i] = machine::sum_of_products(rows[lane / 4 + i / 2 * 8], columns[lane % 4 * 2 + i % 2], its.c[i]);
      }
    }
  }
};
template <MathType kMath>
void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  Product<kMath> mine{{c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  machine::meet("mma", Product<kMath>::multiply, &mine);
  std::memcpy(c, mine.c, sizeof c);
}

template <MathType kMath>
unsigned pack(float low, float high) {
  return kMath == MathType::kBf16 ? floats_to_bf16({low, high}) : floats_to_halves({low, high});
}

}  // namespace flashport::FLASHPORT_TARGET
