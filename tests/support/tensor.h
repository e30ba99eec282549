// A strided tensor of a test: one storage on the host and its twin on the device. Storage starts as NaN (indices: a
// huge number), so that whatever a test does not set is poison, and outputs that a call does not write can be told.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <flashport/types.h>

#include "tests/reference/oracle.h"
#include "tests/support/device.h"

namespace flashport_test {

using Shape = std::vector<std::int64_t>;

// Row-major strides.
[[nodiscard]] Shape dense_strides(const Shape& shape);
// The library's element type of one of the reference's; those of blocks travel as uint8.
[[nodiscard]] flashport::DType dtype_of(reference::Type type);
// The library's cache format of one of the reference's types that caches have.
[[nodiscard]] flashport::KvFormat format_of(reference::Type type);
[[nodiscard]] const char* type_name(reference::Type type);  // as the case list spells it
[[nodiscard]] reference::Type type_named(const std::string& name);

class Tensor {
 public:
  Tensor(reference::Type type, Shape shape) : Tensor(type, shape, dense_strides(shape)) {}
  // `offset` elements lie before the first one; the storage ends with the last element that the strides reach.
  Tensor(reference::Type type, Shape shape, Shape strides, std::int64_t offset = 0);

  [[nodiscard]] reference::Type type() const { return type_; }
  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] const Shape& strides() const { return strides_; }
  [[nodiscard]] std::int64_t numel() const;

  [[nodiscard]] unsigned char* address(const Shape& index);
  void set(const Shape& index, double value) { reference::write_number(address(index), type_, value); }
  [[nodiscard]] double get(const Shape& index) { return reference::read_number(address(index), type_); }
  // All elements, row-major.
  [[nodiscard]] std::vector<double> values();
  template <typename F>
  void for_each(F&& f) {  // f(index)
    Shape index(shape_.size(), 0);
    for (std::int64_t left = numel(); left > 0; --left) {
      f(index);
      for (std::size_t axis = shape_.size(); axis-- > 0;) {
        if (++index[axis] < shape_[axis]) break;
        index[axis] = 0;
      }
    }
  }

  // The same storage under other strides and shape, e.g. one half of a buffer that holds K and V.
  void restride(Shape shape, Shape strides, std::int64_t offset);

  void upload() { device_.write(storage_.data()); }
  // Fetches the device's storage.
  void download() { device_.read(storage_.data()); }
  // Makes every byte of host and device poison again.
  void poison();
  // Empty, or what was written outside of the view's elements. Call after download.
  [[nodiscard]] std::string damage();
  // The downloaded bytes of the elements, row-major.
  [[nodiscard]] std::vector<unsigned char> element_bytes();

  [[nodiscard]] flashport::TensorView view() const;
  [[nodiscard]] reference::Array array() const;

 private:
  [[nodiscard]] std::vector<unsigned char> poisoned() const;

  reference::Type type_;
  Shape shape_, strides_;
  std::int64_t offset_;
  std::vector<unsigned char> storage_;
  DeviceBuffer device_;
};

}  // namespace flashport_test
