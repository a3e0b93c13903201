// A file without a name that is gone when it is closed, whatever ends the process.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/file.h"
#include "base/status.h"

namespace thimble {

class ScratchFile {
 public:
  // Makes an empty file in the system's folder for temporary files ($TMPDIR, otherwise /tmp).
  static Result<ScratchFile> create();

  // Bytes after the last one that was written cannot be read.
  Status write(uint64_t offset, const void* data, size_t bytes);
  Status read(uint64_t offset, void* data, size_t bytes) const;
  // Where a test damages the file.
  std::FILE* handle() const { return file_.get(); }

 private:
  File file_;
};

}  // namespace thimble
