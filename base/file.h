// Files by their names, which are UTF-8 on every system.
#pragma once

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "base/status.h"

namespace thimble {

std::filesystem::path native_path(const std::string& path);

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

// As std::fopen; null, with errno set, where it fails.
File open_file(const std::filesystem::path& path, const char* mode);
// Waits until the disk has what was written, so that it is there after a power cut; false, with errno set,
// where that fails.
bool sync_file(std::FILE* file);
// Writes all of it to an open descriptor.
Status write_to_descriptor(int descriptor, const void* data, size_t bytes);

}  // namespace thimble
