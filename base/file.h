// Files by their names, which are UTF-8 on every system.
#pragma once

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

namespace thimble {

std::filesystem::path native_path(const std::string& path);

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

// As std::fopen; null, with errno set, where it fails.
File open_file(const std::filesystem::path& path, const char* mode);

}  // namespace thimble
