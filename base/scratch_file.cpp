#include "base/scratch_file.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>

#ifndef _WIN32
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>
#endif

namespace thimble {
namespace {

Status failed(const char* what) {
  return error(Code::kIo, "the temporary file cannot be %s: %s", what, std::strerror(errno));
}

}  // namespace

Result<ScratchFile> ScratchFile::create() {
  ScratchFile scratch;
#ifdef _WIN32
  scratch.file_ = File(std::tmpfile());
#else
  std::error_code none;
  std::filesystem::path folder = std::filesystem::temp_directory_path(none);
  std::string name = (none ? std::filesystem::path("/tmp") : folder) / "thimble-XXXXXX";
#ifdef __APPLE__
  const int descriptor = mkstemp(name.data());
#else
  const int descriptor = mkostemp(name.data(), O_CLOEXEC);
#endif
  if (descriptor >= 0) {
    ::unlink(name.c_str());
    scratch.file_ = File(::fdopen(descriptor, "w+b"));
    if (!scratch.file_) ::close(descriptor);
  }
#endif
  if (!scratch.file_) return failed("made");
  std::setvbuf(scratch.file_.get(), nullptr, _IONBF, 0);  // the page cache is buffer enough
  return scratch;
}

Status ScratchFile::write(uint64_t offset, const void* data, size_t bytes) {
#ifdef _WIN32
  if (_fseeki64(file_.get(), static_cast<int64_t>(offset), SEEK_SET) != 0 ||
      std::fwrite(data, 1, bytes, file_.get()) != bytes)
    return failed("written");
#else
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::pwrite(fileno(file_.get()), from, bytes, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return failed("written");
    from += written;
    offset += static_cast<uint64_t>(written);
    bytes -= static_cast<size_t>(written);
  }
#endif
  return {};
}

Status ScratchFile::read(uint64_t offset, void* data, size_t bytes) const {
  constexpr const char* kShort = "the temporary file is shorter than what was written to it";
#ifdef _WIN32
  if (_fseeki64(file_.get(), static_cast<int64_t>(offset), SEEK_SET) != 0) return failed("read");
  if (std::fread(data, 1, bytes, file_.get()) != bytes)
    return std::ferror(file_.get()) ? failed("read") : error(Code::kIo, kShort);
#else
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = ::pread(fileno(file_.get()), to, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return failed("read");
    if (got == 0) return error(Code::kIo, kShort);
    to += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
#endif
  return {};
}

}  // namespace thimble
