// Mapping files, on POSIX systems and on Windows; every call that differs between them is in the two halves
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

#include <algorithm>
#include <cerrno>
#include <cstring>
#endif

namespace thimble {
namespace {

struct View {
  const void* data = nullptr;
  uint64_t size = 0;
};

}  // namespace

#ifdef _WIN32

namespace {

Result<View> map_handle(HANDLE file, const std::string& name) {
  LARGE_INTEGER size;
  if (GetFileType(file) != FILE_TYPE_DISK || !GetFileSizeEx(file, &size))
    return error(Code::kIo, "%s is not a regular file", name.c_str());
  View view;
  view.size = static_cast<uint64_t>(size.QuadPart);
  if (view.size == 0) return view;  // an empty file cannot be mapped
  const HANDLE mapping = CreateFileMappingW(file, nullptr, PAGE_READONLY, 0, 0, nullptr);
  if (mapping) {
    view.data = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0);
    CloseHandle(mapping);  // the view keeps the mapping alive
  }
  if (!view.data)
    return error(Code::kIo, "%s cannot be mapped into memory: system error %lu", name.c_str(),
                 GetLastError());
  return view;
}

void unmap(const void* data, uint64_t) { UnmapViewOfFile(data); }

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
  Result<View> view = map_handle(file, path);
  CloseHandle(file);
  return view;
}

Result<View> map_descriptor(int descriptor, const std::string& name) {
  const HANDLE file = reinterpret_cast<HANDLE>(_get_osfhandle(descriptor));
  if (file == INVALID_HANDLE_VALUE) return error(Code::kIo, "%s is not open", name.c_str());
  return map_handle(file, name);
}

}  // namespace

uint64_t MappedFile::resident_bytes() const { return 0; }

#else

namespace {

void unmap(const void* data, uint64_t size) { munmap(const_cast<void*>(data), static_cast<size_t>(size)); }

Result<View> map_descriptor(int descriptor, const std::string& name) {
  struct stat info;
  if (fstat(descriptor, &info) != 0)
    return error(Code::kIo, "%s cannot be read: %s", name.c_str(), std::strerror(errno));
  if (S_ISDIR(info.st_mode)) return error(Code::kIo, "%s is a directory, not a file", name.c_str());
  if (!S_ISREG(info.st_mode)) return error(Code::kIo, "%s is not a regular file", name.c_str());
  View view;
  view.size = static_cast<uint64_t>(info.st_size);
  if (view.size == 0) return view;  // an empty file cannot be mapped
  if (view.size > SIZE_MAX) return error(Code::kIo, "%s is too large for a 32-bit system", name.c_str());
  void* data = mmap(nullptr, static_cast<size_t>(view.size), PROT_READ, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED)
    return error(Code::kIo, "%s cannot be mapped into memory: %s", name.c_str(), std::strerror(errno));
  view.data = data;
  return view;
}

Result<View> map_path(const std::string& path) {
  // O_NONBLOCK: opening a pipe that nobody writes would wait for ever; on a regular file it means nothing.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return error(Code::kIo, "%s cannot be opened: %s", path.c_str(), std::strerror(errno));
  Result<View> view = map_descriptor(descriptor, path);
  close(descriptor);  // the mapping keeps the file
  return view;
}

}  // namespace

uint64_t MappedFile::resident_bytes() const {
  if (!mapped_) return 0;
#ifdef __APPLE__
  using Flag = char;
#else
  using Flag = unsigned char;
#endif
  constexpr uint64_t kPages = 4096;  // asked at a time, so that the answer fits the stack
  Flag flags[kPages];
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  uint64_t resident = 0;
  for (uint64_t offset = 0; offset < size_; offset += kPages * page) {
    const uint64_t bytes = std::min(size_ - offset, kPages * page);
    void* first = const_cast<std::byte*>(data_ + offset);
    if (mincore(first, static_cast<size_t>(bytes), flags) != 0) return 0;
    for (uint64_t p = 0; p * page < bytes; ++p)
      if (flags[p] & 1) resident += std::min(page, bytes - p * page);
  }
  return resident;
}

#endif

Result<MappedFile> MappedFile::open(const std::string& path) {
  THIMBLE_LET(view, map_path(path));
  MappedFile file = lend(view.data, static_cast<size_t>(view.size));
  file.mapped_ = view.data != nullptr;
  return file;
}

Result<MappedFile> MappedFile::from_descriptor(int descriptor) {
  THIMBLE_LET(view, map_descriptor(descriptor, "file descriptor " + std::to_string(descriptor)));
  MappedFile file = lend(view.data, static_cast<size_t>(view.size));
  file.mapped_ = view.data != nullptr;
  return file;
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
  return *this;
}

MappedFile::~MappedFile() {
  if (mapped_) unmap(data_, size_);
}

}  // namespace thimble
