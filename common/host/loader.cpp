#include "common/host/loader.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <sstream>
#include <vector>

#include "common/host/devices.h"

namespace flashport {
namespace {

// The folder of the shared object or program that holds this function.
std::string own_folder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&own_folder), &info) == 0 || info.dli_fname == nullptr) return ".";
  const std::string file = info.dli_fname;
  const std::size_t slash = file.rfind('/');
  return slash == std::string::npos ? "." : file.substr(0, slash);
}

std::vector<std::string> search_folders() {
  if (const char* path = std::getenv("FLASHPORT_BACKEND_PATH"); path != nullptr && *path != '\0') {
    std::vector<std::string> folders;
    std::istringstream parts(path);
    for (std::string folder; std::getline(parts, folder, ':');) {
      if (!folder.empty()) folders.push_back(folder);
    }
    return folders;
  }
  // A program in bin/ that holds a static flashport has its backends in lib/.
  const std::string own = own_folder();
  return {own, own + "/../lib"};
}

LoadedBackend open_backend(DeviceKind kind) {
  const std::string file = std::string("libflashport_") + backend_name(kind) + ".so";
  const std::vector<std::string> folders = search_folders();
  std::string found;
  for (const std::string& folder : folders) {
    const std::string candidate = folder + "/" + file;
    if (access(candidate.c_str(), F_OK) == 0) {
      found = candidate;
      break;
    }
  }
  if (found.empty()) {
    std::string text = file + " is not part of this installation (looked in";
    for (const std::string& folder : folders) text += " " + folder;
    return {nullptr, text + ")"};
  }
  void* library = dlopen(found.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    return {nullptr, found + " cannot be opened: " + (reason != nullptr ? reason : "unknown reason")};
  }
  const auto entry = reinterpret_cast<const BackendAbi* (*)()>(dlsym(library, "flashport_backend"));
  if (entry == nullptr) return {nullptr, found + " has no function flashport_backend"};
  const BackendAbi* abi = entry();
  if (abi == nullptr || abi->abi_version != kBackendAbiVersion) {
    return {nullptr, found + " has backend interface " + std::to_string(abi == nullptr ? 0 : abi->abi_version) +
                         ", this library needs " + std::to_string(kBackendAbiVersion) +
                         "; install both from one build"};
  }
  return {abi, found};
}

constexpr int kKinds = 3;
LoadedBackend replacements[kKinds];

}  // namespace

const char* backend_name(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::kCpu: return "cpu";
    case DeviceKind::kCuda: return "cuda";
    case DeviceKind::kHip: return "hip";
  }
  return "unknown";
}

const LoadedBackend& load_backend(DeviceKind kind) {
  static std::once_flag once[kKinds];
  static LoadedBackend loaded[kKinds];
  const int index = static_cast<int>(kind);
  if (replacements[index].abi != nullptr) return replacements[index];
  std::call_once(once[index], [&] {
    loaded[index] = kind == DeviceKind::kCpu ? LoadedBackend{cpu_backend(), "built in"} : open_backend(kind);
  });
  return loaded[index];
}

void replace_backend_for_test(DeviceKind kind, const BackendAbi* abi) {
  replacements[static_cast<int>(kind)] = {abi, "set by a test"};
  forget_devices();
}

}  // namespace flashport
