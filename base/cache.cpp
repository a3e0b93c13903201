#include "base/cache.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>

#include "base/checksum.h"
#include "base/file.h"

namespace thimble {
namespace {

namespace fs = std::filesystem;

// Returns an absolute path, or an empty one if the system names no cache folder.
fs::path cache_folder() {
  const auto absolute = [](const char* variable) -> fs::path {
    const char* value = std::getenv(variable);
    const fs::path path = value ? value : "";
    return path.is_absolute() ? path : fs::path();
  };
#ifdef _WIN32
  const fs::path base = absolute("LOCALAPPDATA");
#else
  fs::path base = absolute("XDG_CACHE_HOME");
  if (base.empty())
    if (const fs::path home = absolute("HOME"); !home.empty()) base = home / ".cache";
#endif
  return base.empty() ? base : base / "thimble";
}

}  // namespace

// A cache file holds the bytes, followed by their checksum, which keeps damaged files away from drivers.
std::vector<std::byte> read_cache(const std::string& name) {
  const fs::path folder = cache_folder();
  if (folder.empty()) return {};
  std::error_code failed;
  const uint64_t size = fs::file_size(folder / name, failed);
  if (failed || size < sizeof(uint64_t)) return {};
  std::vector<std::byte> bytes(size);
  const File file = open_file(folder / name, "rb");
  if (!file || std::fread(bytes.data(), 1, size, file.get()) != size) return {};
  uint64_t sum;
  bytes.resize(size - sizeof sum);
  std::memcpy(&sum, bytes.data() + bytes.size(), sizeof sum);
  if (sum != checksum(bytes.data(), bytes.size())) return {};
  return bytes;
}

void write_cache(const std::string& name, std::span<const std::byte> bytes) {
  const fs::path folder = cache_folder();
  if (folder.empty()) return;
  std::error_code failed;
  fs::create_directories(folder, failed);
  // Write to a name of its own and rename when complete, so that two processes never write the same file.
  const fs::path written = folder / (name + "." + std::to_string(std::random_device()()));
  const uint64_t sum = checksum(bytes.data(), bytes.size());
  std::vector<std::byte> content(bytes.begin(), bytes.end());
  content.resize(bytes.size() + sizeof sum);
  std::memcpy(content.data() + bytes.size(), &sum, sizeof sum);
  File file = open_file(written, "wb");
  const bool whole = file && std::fwrite(content.data(), 1, content.size(), file.get()) == content.size();
  const bool closed = file && std::fclose(file.release()) == 0;
  if (whole && closed) fs::rename(written, folder / name, failed);
  if (!whole || !closed || failed) fs::remove(written, failed);
}

}  // namespace thimble
