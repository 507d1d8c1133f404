#include "operators.hpp"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <stdexcept>

void load_operators(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> waiting;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".so") waiting.push_back(entry.path());
  }
  if (error) throw std::runtime_error("cannot read the operators' folder " + folder.string() + ": " + error.message());
  if (waiting.empty()) {
    throw std::runtime_error("no .so is in " + folder.string() + ": give the folder of the Python package fbgemm_gpu");
  }
  std::sort(waiting.begin(), waiting.end());
  // They need each other, and not all say where the others are. One that is loaded is found by its name. So those that
  // cannot be loaded yet are tried again after the rest, as long as that helps.
  std::string reason;
  for (std::size_t before = waiting.size() + 1; !waiting.empty() && waiting.size() < before;) {
    before = waiting.size();
    const auto loaded = [&reason](const std::filesystem::path& path) {
      if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr) return true;
      reason = dlerror();
      return false;
    };
    waiting.erase(std::remove_if(waiting.begin(), waiting.end(), loaded), waiting.end());
  }
  if (!waiting.empty()) {
    throw std::runtime_error("an operator library does not load: " + reason +
                             ". It was built for another torch than this program, or one that it needs is missing");
  }
}

std::vector<std::string> loaded_libraries() {
  std::vector<std::string> found;
  const auto note = [](dl_phdr_info* info, std::size_t, void* into) {
    if (info->dlpi_name != nullptr && *info->dlpi_name != '\0') {
      static_cast<std::vector<std::string>*>(into)->emplace_back(info->dlpi_name);
    }
    return 0;
  };
  dl_iterate_phdr(note, &found);
  return found;
}
