// Opens, writes and syncs files whose names are UTF-8 on every system.
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

// Like std::fopen; returns null, with errno set, on failure.
File open_file(const std::filesystem::path& path, const char* mode);
// Waits until the written data is on disk, so that it survives a power failure; returns false, with errno
// set, on failure.
bool sync_file(std::FILE* file);
// Writes all bytes to an open descriptor.
Status write_to_descriptor(int descriptor, const void* data, size_t bytes);

}  // namespace thimble
