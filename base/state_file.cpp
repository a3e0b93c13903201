#include "base/state_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

namespace thimble {

namespace fs = std::filesystem;

Result<StateFile> StateFile::open(const std::string& path) {
  StateFile state;
  state.path_ = path;
  std::error_code none;
  const bool there = fs::exists(native_path(path), none);
  state.file_ = open_file(native_path(path), there ? "r+b" : "w+b");
  if (!state.file_) return state.failed("opened");
  if (there) {
    std::error_code failed;
    state.size_ = fs::file_size(native_path(path), failed);
    if (failed) return error(Code::kIo, "%s cannot be opened: %s", path.c_str(), failed.message().c_str());
  }
  return state;
}

Status StateFile::failed(const char* what) const {
  return error(Code::kIo, "%s cannot be %s: %s", path_.c_str(), what, std::strerror(errno));
}

Status StateFile::seek(uint64_t offset) {
#ifdef _WIN32
  const int moved = _fseeki64(file_.get(), static_cast<int64_t>(offset), SEEK_SET);
#else
  const int moved = fseeko(file_.get(), static_cast<off_t>(offset), SEEK_SET);
#endif
  return moved == 0 ? Status() : failed("read or written");
}

Status StateFile::read(uint64_t offset, void* data, size_t bytes) {
  THIMBLE_TRY(seek(offset));
  return std::fread(data, 1, bytes, file_.get()) == bytes ? Status() : failed("read");
}

Status StateFile::write(uint64_t offset, const void* data, size_t bytes) {
  THIMBLE_TRY(seek(offset));
  if (std::fwrite(data, 1, bytes, file_.get()) != bytes) return failed("written");
  size_ = std::max(size_, offset + bytes);
  return {};
}

Status StateFile::flush() { return std::fflush(file_.get()) == 0 ? Status() : failed("written"); }

Status StateFile::remove() {
  file_.reset();
  std::error_code failed;
  fs::remove(native_path(path_), failed);
  if (!failed) return {};
  return error(Code::kIo, "%s cannot be removed: %s", path_.c_str(), failed.message().c_str());
}

}  // namespace thimble
