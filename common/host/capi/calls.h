// What the functions of the C interface share: structs and tensors are read, exceptions become status codes and a kept
// text.
#pragma once

#include <cstddef>
#include <cstring>
#include <exception>
#include <optional>
#include <string>

#include <flashport/capi.h>
#include <flashport/error.h>
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

// Converts the tensors of one call.
struct Tensors {
  const char* function;

  TensorView needed(const fp_tensor* tensor, const char* name) const;
  std::optional<TensorView> optional(const fp_tensor* tensor, const char* name) const {
    if (tensor == nullptr) return std::nullopt;
    return needed(tensor, name);
  }
};

// The answer to fp_supports of a query.
inline void expect_support(const Support& support) {
  if (!support.supported) throw NotSupportedError(support.reason);
}

// Copies a kernel's key to the caller's memory, cut to its size.
void give_key(const char* function, const std::string& found, char* key, std::size_t size);

}  // namespace flashport
