// The binary layout of DLPack 1.x (https://dmlc.github.io/dlpack): the structs that array libraries hand to each
// other, declared here so that building needs no other project's headers. Field order and sizes are the standard's and
// never change within major version 1; the static_asserts below hold them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashport::dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr std::uint32_t kMinorVersion = 3;
inline constexpr std::uint64_t kFlagReadOnly = 1;

enum DeviceType : std::int32_t {
  kCpu = 1,
  kCuda = 2,
  kCudaHost = 3,
  kRocm = 10,
  kRocmHost = 11,
  kCudaManaged = 13,
};

enum TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4M3Fn = 10,
  kFloat8E4M3Fnuz = 11,
  kFloat8E5M2 = 12,
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct Device {
  std::int32_t type;
  std::int32_t index;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t rank;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // elements; null in producers older than 1.2 means contiguous
  std::uint64_t byte_offset;
};

// What a capsule named "dltensor" holds.
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

// What a capsule named "dltensor_versioned" holds.
struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

// The table behind a type's __dlpack_c_exchange_api__. Functions return 0, or -1 with a Python error set.
struct ExchangeApiHeader {
  Version version;
  ExchangeApiHeader* previous;
};

struct ExchangeApi {
  ExchangeApiHeader header;
  int (*allocate)(Tensor* prototype, ManagedTensorVersioned** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* message));
  int (*export_managed)(void* object, ManagedTensorVersioned** out);
  int (*import_managed)(ManagedTensorVersioned* tensor, void** out_object);  // takes ownership of `tensor`
  int (*export_view)(void* object, Tensor* out);                             // non-owning; may be null
  int (*current_stream)(std::int32_t device_type, std::int32_t device_index, void** out_stream);
};

static_assert(sizeof(Tensor) == 48 && offsetof(Tensor, shape) == 24);
static_assert(offsetof(ManagedTensorVersioned, tensor) == 32);
static_assert(sizeof(ExchangeApiHeader) == 16 && sizeof(ExchangeApi) == 56);

}  // namespace flashport::dlpack
