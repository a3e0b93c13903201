// Read-only bytes of a file in memory: mapped from a path or a descriptor, or lent by the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace thimble {

class MappedFile {
 public:
  // Maps a whole file. `path` is UTF-8 on every system.
  static Result<MappedFile> open(const std::string& path);
  // Maps a whole file from an open descriptor. The descriptor stays the caller's and may be closed
  // afterwards.
  static Result<MappedFile> from_descriptor(int descriptor);
  // Maps `size` bytes from any `offset` on. A size of UINT64_MAX extends to the end of the file.
  static Result<MappedFile> from_descriptor(int descriptor, uint64_t offset, uint64_t size);
  // Wraps memory that the caller keeps alive and unchanged for as long as this object exists.
  static MappedFile lend(const void* data, size_t size);

  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  std::span<const std::byte> bytes() const { return {data_, static_cast<size_t>(size_)}; }
  // Checks that the file still has all mapped bytes: reading one that is gone ends the process (SIGBUS).
  // `name` identifies the file in the error. On Windows a mapped file cannot be shortened.
  Status check_whole(std::string_view name) const;
  // Bytes of the mapping that are in memory now; 0 for lent memory, or if the system does not report it.
  uint64_t resident_bytes() const;
  // Tells the system that these bytes of the file will be read soon, or not for some time; it then reads them
  // in the background, or drops them from memory. They keep their contents. Has no effect on lent memory, or
  // if the system takes no such advice.
  void read_ahead(std::span<const std::byte>) const;
  void drop(std::span<const std::byte>) const;

 private:
  MappedFile(const void* data, uint64_t size, int descriptor, uint64_t file_end);

  const std::byte* data_ = nullptr;
  uint64_t size_ = 0;
  bool mapped_ = false;
  // Only for mappings on POSIX systems: a private descriptor to query the file's size, and the size that it
  // must have.
  int descriptor_ = -1;
  uint64_t file_end_ = 0;
};

}  // namespace thimble
