// A file that work is saved in while it goes on, to be taken up again after the process ended.
#pragma once

#include <cstdint>
#include <string>

#include "base/file.h"
#include "base/status.h"

namespace thimble {

class StateFile {
 public:
  // Opens a file to read and write, or makes an empty one.
  static Result<StateFile> open(const std::string& path);

  uint64_t size() const { return size_; }
  Status read(uint64_t offset, void* data, size_t bytes);
  Status write(uint64_t offset, const void* data, size_t bytes);
  // Hands what was written to the system, which keeps it if the process dies.
  Status flush();
  // Closes the file, and then there is none.
  Status remove();

 private:
  Status seek(uint64_t offset);
  Status failed(const char* what) const;

  std::string path_;
  File file_;
  uint64_t size_ = 0;
};

}  // namespace thimble
