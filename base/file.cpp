#include "base/file.h"

#include <cstring>
#include <string_view>

namespace thimble {

std::filesystem::path native_path(const std::string& path) {
  return std::u8string_view(reinterpret_cast<const char8_t*>(path.data()), path.size());
}

File open_file(const std::filesystem::path& path, const char* mode) {
#ifdef _WIN32
  const std::wstring wide(mode, mode + std::strlen(mode));
  return File(_wfopen(path.c_str(), wide.c_str()));
#else
  return File(std::fopen(path.c_str(), mode));
#endif
}

}  // namespace thimble
