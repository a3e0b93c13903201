#include "base/file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#ifdef _WIN32
#include <io.h>
#else
#include <unistd.h>
#endif

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

bool sync_file(std::FILE* file) {
  if (std::fflush(file) != 0) return false;
#ifdef _WIN32
  return _commit(_fileno(file)) == 0;
#else
  return fsync(fileno(file)) == 0;
#endif
}

Status write_to_descriptor(int descriptor, const void* data, size_t bytes) {
  constexpr size_t kMost = size_t{1} << 30;  // the most bytes that every system accepts in one call
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
#ifdef _WIN32
    const int written = _write(descriptor, at, static_cast<unsigned>(std::min(bytes, kMost)));
#else
    const ssize_t written = ::write(descriptor, at, std::min(bytes, kMost));
#endif
    if (written < 0 && errno == EINTR) continue;
    if (written < 0)
      return error(Code::kIo, "file descriptor %d cannot be written: %s", descriptor, std::strerror(errno));
    at += written;
    bytes -= static_cast<size_t>(written);
  }
  return {};
}

}  // namespace thimble
