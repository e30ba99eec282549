#include "tests/support/tensor.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>

namespace flashport_test {
namespace {

using reference::Type;

struct TypeRow {
  Type type;
  const char* name;
  flashport::DType dtype;
};
constexpr TypeRow kTypes[] = {
    {Type::kF32, "fp32", flashport::DType::kFloat32},
    {Type::kF16, "fp16", flashport::DType::kFloat16},
    {Type::kBF16, "bf16", flashport::DType::kBFloat16},
    {Type::kE4M3, "fp8_e4m3", flashport::DType::kFp8E4M3},
    {Type::kE4M3Fnuz, "fp8_e4m3fnuz", flashport::DType::kFp8E4M3Fnuz},
    {Type::kE5M2, "fp8_e5m2", flashport::DType::kFp8E5M2},
    {Type::kI8, "int8", flashport::DType::kInt8},
    {Type::kI4, "int4", flashport::DType::kInt8},
    {Type::kQ8_0, "q8_0", flashport::DType::kUInt8},
    {Type::kQ4_0, "q4_0", flashport::DType::kUInt8},
    {Type::kQ4_1, "q4_1", flashport::DType::kUInt8},
    {Type::kQ5_0, "q5_0", flashport::DType::kUInt8},
    {Type::kQ5_1, "q5_1", flashport::DType::kUInt8},
    {Type::kIq4Nl, "iq4_nl", flashport::DType::kUInt8},
    {Type::kI32, "int32", flashport::DType::kInt32},
    {Type::kI64, "int64", flashport::DType::kInt64},
    {Type::kU32, "uint32", flashport::DType::kUInt32},
};

const TypeRow& row_of(Type type) {
  return *std::find_if(std::begin(kTypes), std::end(kTypes), [type](const TypeRow& row) { return row.type == type; });
}

std::int64_t storage_bytes(Type type, const Shape& shape, const Shape& strides, std::int64_t offset) {
  std::int64_t last = offset;
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    if (shape[axis] == 0) return offset * reference::type_bytes(type);
    last += (shape[axis] - 1) * strides[axis];
  }
  return (last + 1) * reference::type_bytes(type);
}

}  // namespace

Shape dense_strides(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (std::size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
  return strides;
}

flashport::KvFormat format_of(Type type) {
  using flashport::KvFormat;
  for (int i = 0; i <= static_cast<int>(KvFormat::kInt4); ++i) {
    const auto format = static_cast<KvFormat>(i);
    if (std::string_view(flashport::kv_format_name(format)) == type_name(type)) return format;
  }
  throw std::invalid_argument(std::string("no cache has the type ") + type_name(type));
}

flashport::DType dtype_of(Type type) { return row_of(type).dtype; }
const char* type_name(Type type) { return row_of(type).name; }
Type type_named(const std::string& name) {
  for (const TypeRow& row : kTypes) {
    if (name == row.name) return row.type;
  }
  throw std::logic_error("no element type " + name);
}

Tensor::Tensor(Type type, Shape shape, Shape strides, std::int64_t offset)
    : type_(type),
      shape_(std::move(shape)),
      strides_(std::move(strides)),
      offset_(offset),
      storage_(storage_bytes(type, shape_, strides_, offset)),
      device_(storage_.size()) {
  storage_ = poisoned();
}

// All ones is NaN in fp32, fp16, bf16 and OCP e4m3, and a NaN scale in every block wherever it begins; FNUZ has
// one NaN, 0x80. An index becomes 0x7f7f7f7f, a page that would lie beyond any memory.
std::vector<unsigned char> Tensor::poisoned() const {
  const bool index = type_ == Type::kI32 || type_ == Type::kI64;
  const unsigned char byte = index ? 0x7f : type_ == Type::kE4M3Fnuz ? 0x80 : 0xff;
  return std::vector<unsigned char>(storage_.size(), byte);
}

std::int64_t Tensor::numel() const {
  std::int64_t count = 1;
  for (std::int64_t extent : shape_) count *= extent;
  return count;
}

unsigned char* Tensor::address(const Shape& index) {
  std::int64_t at = offset_;
  for (std::size_t axis = 0; axis < index.size(); ++axis) at += index[axis] * strides_[axis];
  return storage_.data() + at * reference::type_bytes(type_);
}

std::vector<double> Tensor::values() {
  std::vector<double> all;
  all.reserve(numel());
  for_each([&](const Shape& index) { all.push_back(get(index)); });
  return all;
}

void Tensor::restride(Shape shape, Shape strides, std::int64_t offset) {
  shape_ = std::move(shape);
  strides_ = std::move(strides);
  offset_ = offset;
  if (storage_bytes(type_, shape_, strides_, offset_) > static_cast<std::int64_t>(storage_.size())) {
    throw std::logic_error("a view reaches past its storage");
  }
}

void Tensor::poison() {
  storage_ = poisoned();
  upload();
}

std::string Tensor::damage() {
  if (!device_.guards_intact()) return "memory before or after the tensor was written";
  std::vector<unsigned char> expected = poisoned();
  const int bytes = reference::type_bytes(type_);
  for_each([&](const Shape& index) {
    const unsigned char* at = address(index);
    std::copy(at, at + bytes, expected.begin() + (at - storage_.data()));
  });
  for (std::size_t i = 0; i < storage_.size(); ++i) {
    if (storage_[i] != expected[i]) return "padding was written, byte " + std::to_string(i) + " of the storage";
  }
  return {};
}

std::vector<unsigned char> Tensor::element_bytes() {
  std::vector<unsigned char> all;
  const int bytes = reference::type_bytes(type_);
  for_each([&](const Shape& index) {
    const unsigned char* at = address(index);
    all.insert(all.end(), at, at + bytes);
  });
  return all;
}

flashport::TensorView Tensor::view() const {
  flashport::TensorView view;
  view.data = static_cast<unsigned char*>(device_.data()) + offset_ * reference::type_bytes(type_);
  view.dtype = dtype_of(type_);
  view.device = device();
  view.rank = static_cast<int>(shape_.size());
  std::copy(shape_.begin(), shape_.end(), view.shape);
  std::copy(strides_.begin(), strides_.end(), view.strides);
  return view;
}

reference::Array Tensor::array() const {
  return {storage_.data() + offset_ * reference::type_bytes(type_), type_, shape_, strides_};
}

}  // namespace flashport_test
