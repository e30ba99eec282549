// Plain types of the structs that cross from host to device. Each kernel family has one struct, which is
// passed by value as the kernel's only argument. Every vendor's compiler reads them, so they have no methods and no std
// types. Strides count elements; only those of a cache count bytes, because a q8_0 row has no element size. Every
// offset has 64 bits.
#pragma once

#include <cstdint>

#include <flashport/enums.h>

namespace flashport {

enum class MathType : std::int32_t { kFp32, kFp16, kBf16 };

// An integer array of 32 or 64 bits an element.
struct IndexArray {
  const void* data;
  std::int32_t is_int64;  // 1: 64 bits an element; 0: 32, or no array
};

// A tensor that is read or written row by row: one row for each sequence, token and head. The innermost stride need not
// be 1. Where sequences are packed along the tokens, stride_seq is unused.
struct StridedRows {
  void* data;
  DType dtype;
  std::int64_t stride_seq, stride_token, stride_head, stride_dim;
};

}  // namespace flashport
