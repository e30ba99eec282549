// What the functions of the C interface share: structs and tensors are read, exceptions become status codes and a kept
// text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <string>

#include <flashport/capi.h>
#include <flashport/decode.h>
#include <flashport/error.h>
#include <flashport/gated_delta.h>
#include <flashport/types.h>

namespace flashport {

// Keeps the text for fp_last_error().
fp_status keep_capi_error(fp_status status, const char* text);

template <class Call>
fp_status guarded(const Call& call) {
  try {
    call();
    return fp_ok;
  } catch (const ValueError& error) {
    return keep_capi_error(fp_value_error, error.what());
  } catch (const TypeError& error) {
    return keep_capi_error(fp_type_error, error.what());
  } catch (const NotSupportedError& error) {
    return keep_capi_error(fp_not_supported, error.what());
  } catch (const BackendError& error) {
    return keep_capi_error(fp_backend_error, error.what());
  } catch (const std::exception& error) {
    return keep_capi_error(fp_internal_error, error.what());
  }
}

// The caller's struct in this version's size: a caller of an older version has fewer members, the rest is 0.
template <class Args>
Args read_args(const Args* args, const char* function) {
  if (args == nullptr) throw ValueError(std::string(function) + ": args must not be null");
  if (args->struct_size < sizeof(std::size_t) || args->struct_size > sizeof(Args)) {
    throw ValueError(std::string(function) + ": struct_size must be set by FP_INIT and at most " +
                     std::to_string(sizeof(Args)) + ", got " + std::to_string(args->struct_size));
  }
  Args copy{};
  std::memcpy(&copy, args, args->struct_size);
  return copy;
}

inline KvLayout to_layout(std::int32_t layout, const char* function) {
  if (layout == fp_nhd) return KvLayout::kNHD;
  if (layout == fp_hnd) return KvLayout::kHND;
  throw ValueError(std::string(function) + ": kv_layout must be fp_nhd or fp_hnd, got " + std::to_string(layout));
}

// Converts the tensors of one call.
struct Tensors {
  const char* function;

  TensorView needed(const fp_tensor* tensor, const char* name) const;
  std::optional<TensorView> optional(const fp_tensor* tensor, const char* name) const {
    if (tensor == nullptr) return std::nullopt;
    return needed(tensor, name);
  }
};

// One of the first `count` values of an enumeration.
template <class Enum>
Enum to_enum(std::int32_t value, int count, const char* function, const char* name, const char* values) {
  if (value >= 0 && value < count) return static_cast<Enum>(value);
  throw ValueError(std::string(function) + ": " + name + " must be " + values + ", got " + std::to_string(value));
}

inline StateLayout to_state_layout(std::int32_t layout, const char* function) {
  return to_enum<StateLayout>(layout, 2, function, "state_layout", "fp_vk or fp_kv");
}

// fp_kv_format counts from the element type's own on, KvFormat without it.
std::optional<KvFormat> to_format(std::int32_t format, const char* function, const char* name);

}  // namespace flashport
