// Holds the declarations of hip/runtime/hip_api.h against AMD's own headers. The test is that it compiles.
#include <hip/hip_runtime_api.h>

#include <type_traits>

#include "hip/runtime/hip_api.h"

namespace flashport::hip_runtime {
namespace {

// Types that are passed alike: pointers are one kind, as are an enumeration and an integer of its size.
template <class Ours, class Theirs>
constexpr bool kSameAbi = std::is_same_v<Ours, Theirs> || (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) ||
                          (std::is_integral_v<Ours> && std::is_enum_v<Theirs> && sizeof(Ours) == sizeof(Theirs));

template <class Ours, class Theirs>
constexpr bool kSameSignature = false;
template <class OurResult, class... OurArguments, class TheirResult, class... TheirArguments>
  requires(sizeof...(OurArguments) == sizeof...(TheirArguments))
constexpr bool kSameSignature<OurResult (*)(OurArguments...), TheirResult (*)(TheirArguments...)> =
    kSameAbi<OurResult, TheirResult> && (kSameAbi<OurArguments, TheirArguments> && ...);

// `theirs` picks one of an overloaded function's types, as C declares it.
template <auto kMember, class... TheirArguments>
constexpr bool same(hipError_t (*)(TheirArguments...)) {
  using Ours = std::remove_reference_t<decltype(std::declval<HipApi>().*kMember)>;
  return kSameSignature<Ours, hipError_t (*)(TheirArguments...)>;
}
template <auto kMember>
constexpr bool same(const char* (*)(hipError_t)) {
  using Ours = std::remove_reference_t<decltype(std::declval<HipApi>().*kMember)>;
  return kSameSignature<Ours, const char* (*)(hipError_t)>;
}

static_assert(same<&HipApi::get_error_name>(hipGetErrorName));
static_assert(same<&HipApi::get_error_string>(hipGetErrorString));
static_assert(same<&HipApi::get_last_error>(hipGetLastError));
static_assert(same<&HipApi::runtime_get_version>(hipRuntimeGetVersion));
static_assert(same<&HipApi::get_device_count>(hipGetDeviceCount));
static_assert(same<&HipApi::get_device>(hipGetDevice));
static_assert(same<&HipApi::set_device>(hipSetDevice));
static_assert(same<&HipApi::get_device_properties>(hipGetDeviceProperties));
static_assert(same<&HipApi::allocate>(static_cast<hipError_t (*)(void**, std::size_t)>(hipMalloc)));
static_assert(same<&HipApi::free>(hipFree));
static_assert(same<&HipApi::memcpy_async>(hipMemcpyAsync));
static_assert(same<&HipApi::memset_async>(hipMemsetAsync));
static_assert(same<&HipApi::stream_synchronize>(hipStreamSynchronize));
static_assert(same<&HipApi::stream_get_capture_info>(hipStreamGetCaptureInfo));
static_assert(same<&HipApi::thread_exchange_capture_mode>(hipThreadExchangeStreamCaptureMode));
static_assert(same<&HipApi::module_load_data>(hipModuleLoadData));
static_assert(same<&HipApi::module_get_function>(hipModuleGetFunction));
static_assert(same<&HipApi::module_launch_kernel>(hipModuleLaunchKernel));
static_assert(same<&HipApi::module_occupancy>(static_cast<hipError_t (*)(int*, hipFunction_t, int, std::size_t)>(
    hipModuleOccupancyMaxActiveBlocksPerMultiprocessor)));

static_assert(sizeof(HipDeviceProperties) == sizeof(hipDeviceProp_t));
static_assert(alignof(HipDeviceProperties) == alignof(hipDeviceProp_t));
static_assert(offsetof(HipDeviceProperties, name) == offsetof(hipDeviceProp_t, name));
static_assert(offsetof(HipDeviceProperties, total_global_memory) == offsetof(hipDeviceProp_t, totalGlobalMem));
static_assert(offsetof(HipDeviceProperties, multiprocessor_count) == offsetof(hipDeviceProp_t, multiProcessorCount));
static_assert(offsetof(HipDeviceProperties, gcn_arch_name) == offsetof(hipDeviceProp_t, gcnArchName));

static_assert(static_cast<int>(hipSuccess) == 0);
static_assert(static_cast<int>(hipMemcpyDefault) == kHipMemcpyDefault);
static_assert(static_cast<int>(hipStreamCaptureStatusNone) == kHipCaptureNone);
static_assert(static_cast<int>(hipStreamCaptureModeRelaxed) == kHipCaptureRelaxed);

}  // namespace
}  // namespace flashport::hip_runtime
