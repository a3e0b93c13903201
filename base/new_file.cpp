#include "base/new_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace thimble {

namespace fs = std::filesystem;

bool is_folder(const std::string& path) {
  std::error_code failed;
  return fs::is_directory(native_path(path), failed);
}

Result<NewFile> NewFile::create(const std::string& path) {
  std::error_code failed;
  if (fs::exists(fs::symlink_status(native_path(path), failed)))
    return error(Code::kIo, "%s exists already; remove it or name another file", path.c_str());
  return open(path);
}

Result<NewFile> NewFile::replace(const std::string& path) {
  std::error_code failed;
  const fs::file_status there = fs::status(native_path(path), failed);
  if (fs::exists(there) && !fs::is_regular_file(there))
    return error(Code::kIo, "%s is not a regular file; name another file", path.c_str());
  return open(path);
}

Result<NewFile> NewFile::open(const std::string& path) {
  NewFile file;
  file.path_ = path;
  file.written_ = path + ".part";
  file.file_ = open_file(native_path(file.written_), "wb");
  if (!file.file_)
    return error(Code::kIo, "%s cannot be written: %s", file.written_.c_str(), std::strerror(errno));
  return file;
}

Status NewFile::write(const void* data, size_t size) {
  if (std::fwrite(data, 1, size, file_.get()) == size) return {};
  return error(Code::kIo, "%s cannot be written: %s", written_.c_str(), std::strerror(errno));
}

Status NewFile::complete() {
  std::error_code failed;
  if (!sync_file(file_.get())) failed.assign(errno, std::generic_category());
  if (std::fclose(file_.release()) != 0 && !failed) failed.assign(errno, std::generic_category());
  if (!failed) fs::rename(native_path(written_), native_path(path_), failed);
  if (!failed) return {};
  std::error_code ignored;
  fs::remove(native_path(written_), ignored);
  return error(Code::kIo, "%s cannot be written: %s", path_.c_str(), failed.message().c_str());
}

NewFile::~NewFile() {
  if (!file_) return;
  file_.reset();
  std::error_code ignored;
  fs::remove(native_path(written_), ignored);
}

}  // namespace thimble
