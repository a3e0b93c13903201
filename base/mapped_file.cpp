// Maps files on POSIX systems and on Windows. Every call that differs between them is in the two halves
// below.
#include "base/mapped_file.h"

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <io.h>
#include <windows.h>

#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#endif

#include <algorithm>
#include <cinttypes>

namespace thimble {
namespace {

struct View {
  const void* data = nullptr;
  uint64_t size = 0;
  int descriptor = -1;  // as in MappedFile
  uint64_t file_end = 0;
};

// A byte range of a file.
struct Range {
  uint64_t offset = 0, size = kToTheEnd;
  static constexpr uint64_t kToTheEnd = UINT64_MAX;
};

Status check_range(Range& range, uint64_t file_size, const std::string& name) {
  if (range.size == Range::kToTheEnd && range.offset <= file_size) range.size = file_size - range.offset;
  if (range.offset > file_size)
    return error(Code::kIo, "%s has %" PRIu64 " bytes, so offset %" PRIu64 " is past its end", name.c_str(),
                 file_size, range.offset);
  if (range.size <= file_size - range.offset) return {};
  return error(Code::kIo,
               "%s has %" PRIu64 " bytes, fewer than the %" PRIu64 " requested from offset %" PRIu64 " on",
               name.c_str(), file_size, range.size, range.offset);
}

// Mappings begin at multiples of this many bytes, in the file and in memory.
uint64_t map_granularity() {
#ifdef _WIN32
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return info.dwAllocationGranularity;
#else
  return static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
#endif
}

// The start of the mapping that contains `data`. It is below `data` if the requested range began inside a
// page.
const std::byte* map_begin(const void* data) {
  return static_cast<const std::byte*>(data) - reinterpret_cast<uintptr_t>(data) % map_granularity();
}

}  // namespace

#ifdef _WIN32

namespace {

Result<View> map_handle(HANDLE file, Range range, const std::string& name) {
  LARGE_INTEGER size;
  if (GetFileType(file) != FILE_TYPE_DISK || !GetFileSizeEx(file, &size))
    return error(Code::kIo, "%s is not a regular file", name.c_str());
  THIMBLE_TRY(check_range(range, static_cast<uint64_t>(size.QuadPart), name));
  View view;
  view.size = range.size;
  if (view.size == 0) return view;  // an empty range cannot be mapped
  const uint64_t below = range.offset % map_granularity(), begin = range.offset - below;
  const HANDLE mapping = CreateFileMappingW(file, nullptr, PAGE_READONLY, 0, 0, nullptr);
  const void* data = nullptr;
  if (mapping) {
    data = MapViewOfFile(mapping, FILE_MAP_READ, static_cast<DWORD>(begin >> 32), static_cast<DWORD>(begin),
                         static_cast<SIZE_T>(below + view.size));
    CloseHandle(mapping);  // the view keeps the mapping open
  }
  if (!data)
    return error(Code::kIo, "%s cannot be mapped into memory: system error %lu", name.c_str(),
                 GetLastError());
  view.data = static_cast<const std::byte*>(data) + below;
  return view;
}

void unmap(const void* data, uint64_t) { UnmapViewOfFile(map_begin(data)); }

Result<View> map_path(const std::string& path) {
  const int length = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path.c_str(), -1, nullptr, 0);
  if (length == 0) return error(Code::kIo, "a file's path is not valid UTF-8");
  std::wstring wide(static_cast<size_t>(length), L'\0');
  MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path.c_str(), -1, wide.data(), length);
  const DWORD attributes = GetFileAttributesW(wide.c_str());
  if (attributes != INVALID_FILE_ATTRIBUTES && (attributes & FILE_ATTRIBUTE_DIRECTORY))
    return error(Code::kIo, "%s is a directory, not a file", path.c_str());
  const HANDLE file = CreateFileW(wide.c_str(), GENERIC_READ, FILE_SHARE_READ, nullptr, OPEN_EXISTING,
                                  FILE_ATTRIBUTE_NORMAL, nullptr);
  if (file == INVALID_HANDLE_VALUE)
    return error(Code::kIo, "%s cannot be opened: system error %lu", path.c_str(), GetLastError());
  Result<View> view = map_handle(file, {}, path);
  CloseHandle(file);
  return view;
}

Result<View> map_descriptor(int descriptor, Range range, const std::string& name) {
  const HANDLE file = reinterpret_cast<HANDLE>(_get_osfhandle(descriptor));
  if (file == INVALID_HANDLE_VALUE) return error(Code::kIo, "%s is not open", name.c_str());
  return map_handle(file, range, name);
}

}  // namespace

uint64_t MappedFile::resident_bytes() const { return 0; }

Status MappedFile::check_whole(std::string_view) const { return {}; }

void MappedFile::read_ahead(std::span<const std::byte>) const {}
void MappedFile::drop(std::span<const std::byte>) const {}

static void close_descriptor(int) {}

#else

namespace {

void unmap(const void* data, uint64_t size) {
  const std::byte* begin = map_begin(data);
  const std::byte* end = static_cast<const std::byte*>(data) + size;
  munmap(const_cast<std::byte*>(begin), static_cast<size_t>(end - begin));
}

Result<View> map_descriptor(int descriptor, Range range, const std::string& name) {
  struct stat info;
  if (fstat(descriptor, &info) != 0)
    return error(Code::kIo, "%s cannot be read: %s", name.c_str(), std::strerror(errno));
  if (S_ISDIR(info.st_mode)) return error(Code::kIo, "%s is a directory, not a file", name.c_str());
  if (!S_ISREG(info.st_mode)) return error(Code::kIo, "%s is not a regular file", name.c_str());
  THIMBLE_TRY(check_range(range, static_cast<uint64_t>(info.st_size), name));
  View view;
  view.size = range.size;
  if (view.size == 0) return view;  // an empty range cannot be mapped
  const uint64_t below = range.offset % map_granularity();
  if (view.size > SIZE_MAX - below)
    return error(Code::kIo, "%s is too large for a 32-bit system", name.c_str());
  void* data = mmap(nullptr, static_cast<size_t>(below + view.size), PROT_READ, MAP_SHARED, descriptor,
                    static_cast<off_t>(range.offset - below));
  if (data == MAP_FAILED)
    return error(Code::kIo, "%s cannot be mapped into memory: %s", name.c_str(), std::strerror(errno));
  view.data = static_cast<const std::byte*>(data) + below;
  view.file_end = range.offset + range.size;
  view.descriptor = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (view.descriptor >= 0) return view;
  const int reason = errno;
  unmap(view.data, view.size);
  return error(Code::kIo, "%s cannot be kept open: %s", name.c_str(), std::strerror(reason));
}

Result<View> map_path(const std::string& path) {
  // Without O_NONBLOCK, opening a pipe without a writer would wait forever. It has no effect on regular
  // files.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return error(Code::kIo, "%s cannot be opened: %s", path.c_str(), std::strerror(errno));
  Result<View> view = map_descriptor(descriptor, {}, path);
  close(descriptor);  // the mapping keeps the file open
  return view;
}

}  // namespace

static void close_descriptor(int descriptor) { close(descriptor); }

Status MappedFile::check_whole(std::string_view name) const {
  struct stat info;
  if (!mapped_ || fstat(descriptor_, &info) != 0 || static_cast<uint64_t>(info.st_size) >= file_end_)
    return {};
  return error(Code::kIo, "%s became shorter while it was in use; restore the whole file and open it again",
               std::string(name).c_str());
}

uint64_t MappedFile::resident_bytes() const {
  if (!mapped_) return 0;
#ifdef __APPLE__
  using Flag = char;
#else
  using Flag = unsigned char;
#endif
  constexpr uint64_t kPages = 4096;  // pages per call, so that the answer fits on the stack
  Flag flags[kPages];
  const uint64_t page = map_granularity();
  const std::byte* begin = map_begin(data_);
  const uint64_t below = static_cast<uint64_t>(data_ - begin), size = below + size_;
  uint64_t resident = 0;
  for (uint64_t offset = 0; offset < size; offset += kPages * page) {
    const uint64_t bytes = std::min(size - offset, kPages * page);
    void* first = const_cast<std::byte*>(begin + offset);
    if (mincore(first, static_cast<size_t>(bytes), flags) != 0) return 0;
    for (uint64_t p = 0; p * page < bytes; ++p)
      if (flags[p] & 1)
        // The first page counts only from `offset`
        resident += std::min(page, bytes - p * page) - (offset + p == 0 ? below : 0);
  }
  return resident;
}

void MappedFile::read_ahead(std::span<const std::byte> bytes) const {
  if (!mapped_ || bytes.empty()) return;
  const std::byte* const begin = map_begin(bytes.data());
  madvise(const_cast<std::byte*>(begin), static_cast<size_t>(bytes.data() + bytes.size() - begin),
          MADV_WILLNEED);
}

// Only pages that contain no other bytes are dropped. On Linux they are first unmapped, because the system
// keeps pages that are mapped.
void MappedFile::drop(std::span<const std::byte> bytes) const {
#ifdef __linux__
  const uint64_t page = map_granularity();
  const std::byte* const first = map_begin(bytes.data() + page - 1);
  const std::byte* const end = map_begin(bytes.data() + bytes.size());
  if (!mapped_ || first >= end) return;
  const size_t size = static_cast<size_t>(end - first);
  madvise(const_cast<std::byte*>(first), size, MADV_DONTNEED);
  const uint64_t offset = file_end_ - size_ + static_cast<uint64_t>(first - data_);
  posix_fadvise(descriptor_, static_cast<off_t>(offset), static_cast<off_t>(size), POSIX_FADV_DONTNEED);
#else
  (void)bytes;
#endif
}

#endif

MappedFile::MappedFile(const void* data, uint64_t size, int descriptor, uint64_t file_end)
    : data_(static_cast<const std::byte*>(data)),
      size_(size),
      mapped_(data != nullptr),
      descriptor_(descriptor),
      file_end_(file_end) {}

Result<MappedFile> MappedFile::open(const std::string& path) {
  THIMBLE_LET(view, map_path(path));
  return MappedFile(view.data, view.size, view.descriptor, view.file_end);
}

Result<MappedFile> MappedFile::from_descriptor(int descriptor) {
  return from_descriptor(descriptor, 0, Range::kToTheEnd);
}

Result<MappedFile> MappedFile::from_descriptor(int descriptor, uint64_t offset, uint64_t size) {
  THIMBLE_LET(view,
              map_descriptor(descriptor, {offset, size}, "file descriptor " + std::to_string(descriptor)));
  return MappedFile(view.data, view.size, view.descriptor, view.file_end);
}

MappedFile MappedFile::lend(const void* data, size_t size) {
  MappedFile file;
  file.data_ = static_cast<const std::byte*>(data);
  file.size_ = size;
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapped_, other.mapped_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(file_end_, other.file_end_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!mapped_) return;
  unmap(data_, size_);
  close_descriptor(descriptor_);
}

}  // namespace thimble
