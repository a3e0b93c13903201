// A file's bytes, read-only, in memory: mapped from a path or a descriptor, or lent by the caller.
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
  // Maps a whole file from an open descriptor, which stays the caller's and may be closed afterwards.
  static Result<MappedFile> from_descriptor(int descriptor);
  // The same of `size` bytes from `offset` on, which may be any. UINT64_MAX: to the file's end.
  static Result<MappedFile> from_descriptor(int descriptor, uint64_t offset, uint64_t size);
  // Shows memory that the caller keeps alive and unchanged for as long as this object lives.
  static MappedFile lend(const void* data, size_t size);

  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  std::span<const std::byte> bytes() const { return {data_, static_cast<size_t>(size_)}; }
  // Whether the file still has all bytes that are mapped: reading one that is gone ends the process (SIGBUS).
  // `name` is how the error calls the file. On Windows a mapped file cannot be made shorter.
  Status check_whole(std::string_view name) const;
  // Bytes of the mapping that are in memory now; 0 where the system does not tell, or for lent memory.
  uint64_t resident_bytes() const;

 private:
  MappedFile(const void* data, uint64_t size, int descriptor, uint64_t file_end);

  const std::byte* data_ = nullptr;
  uint64_t size_ = 0;
  bool mapped_ = false;
  // Of a mapping on POSIX systems: a descriptor of its own, to ask for the file's size, and the size it
  // needs.
  int descriptor_ = -1;
  uint64_t file_end_ = 0;
};

}  // namespace thimble
