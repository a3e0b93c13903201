// A file that appears in its place complete or not at all.
#pragma once

#include <cstddef>
#include <string>

#include "base/file.h"
#include "base/status.h"

namespace thimble {

// Whether a path (UTF-8 on every system) names a folder.
bool is_folder(const std::string& path);

// The file is written next to its destination and renamed when it is complete. It is removed if it was not
// completed.
class NewFile {
 public:
  // Fails if the path already exists, so nothing is overwritten.
  static Result<NewFile> create(const std::string& path);
  // May replace an existing file, which stays unchanged until complete(). Fails if the path is not a regular
  // file.
  static Result<NewFile> replace(const std::string& path);
  NewFile(NewFile&&) = default;
  ~NewFile();

  Status write(const void* data, size_t size);
  // Waits until the disk has the file and moves it to its destination. Nothing can be written afterwards.
  Status complete();

 private:
  NewFile() = default;
  static Result<NewFile> open(const std::string& path);

  std::string path_, written_;  // the destination, and the temporary path until the file is complete
  File file_;
};

}  // namespace thimble
