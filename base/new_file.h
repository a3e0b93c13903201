// A file to be written that is there whole or not at all.
#pragma once

#include <cstddef>
#include <string>

#include "base/file.h"
#include "base/status.h"

namespace thimble {

// Whether a path, UTF-8 on every system, names a folder.
bool is_folder(const std::string& path);

// Written beside its place and renamed when it is complete; gone where it was not completed.
class NewFile {
 public:
  // Refuses a path where something is already: nothing is overwritten.
  static Result<NewFile> create(const std::string& path);
  // Takes the place of a file that may be there, which stays as it is until then; refuses what is no file.
  static Result<NewFile> replace(const std::string& path);
  NewFile(NewFile&&) = default;
  ~NewFile();

  Status write(const void* data, size_t size);
  // Puts the file into its place, once the disk has it; nothing is written afterwards.
  Status complete();

 private:
  NewFile() = default;
  static Result<NewFile> open(const std::string& path);

  std::string path_, written_;  // its place, and where it lies until it is complete
  File file_;
};

}  // namespace thimble
