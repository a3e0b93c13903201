// A file that saves the state of work in progress, so that it can be resumed after the process ended.
#pragma once

#include <cstdint>
#include <string>

#include "base/file.h"
#include "base/status.h"

namespace thimble {

class StateFile {
 public:
  // Opens a file for reading and writing; creates it empty if it does not exist.
  static Result<StateFile> open(const std::string& path);

  uint64_t size() const { return size_; }
  Status read(uint64_t offset, void* data, size_t bytes);
  Status write(uint64_t offset, const void* data, size_t bytes);
  // Hands written data to the system, which keeps it if the process dies.
  Status flush();
  // Closes and deletes the file.
  Status remove();

 private:
  Status seek(uint64_t offset);
  Status failed(const char* what) const;

  std::string path_;
  File file_;
  uint64_t size_ = 0;
};

}  // namespace thimble
