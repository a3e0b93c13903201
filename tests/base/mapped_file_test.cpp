// Mapped files: what can be mapped, which errors are reported, and who owns what.
#include "base/mapped_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

#include "base/system.h"

#ifdef _WIN32
#include <io.h>
#else
#include <sys/stat.h>
#include <unistd.h>
#endif
#ifdef __linux__
#include <linux/magic.h>
#include <sys/vfs.h>
#endif
#include <fcntl.h>

namespace thimble {
namespace {

std::filesystem::path folder() {
  const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / "thimble_mapped_file_test";
  std::filesystem::create_directories(path);
  return path;
}

std::string write_file(const std::filesystem::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
  return reinterpret_cast<const char*>(path.u8string().c_str());
}

std::string text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.data()), static_cast<size_t>(file.size())};
}

void expect_io_error(const Result<MappedFile>& file, const std::string& part) {
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.status().code(), Code::kIo);
  EXPECT_NE(file.status().message().find(part), std::string::npos) << file.status().message();
}

TEST(MappedFile, ShowsTheBytesOfAFile) {
  const std::string path = write_file(folder() / "plain", "some bytes");
  const Result<MappedFile> file = MappedFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(text_of(*file), "some bytes");
}

TEST(MappedFile, TakesPathsInUtf8) {
  const std::string path =
      write_file(folder() / std::filesystem::path(u8"gr\u00fc\u00dfe \u6a21\u578b"), "hello");
  const Result<MappedFile> file = MappedFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(text_of(*file), "hello");
}

#ifdef __linux__
TEST(MappedFile, DropsPagesAndReadsThemAhead) {
  constexpr size_t kPage = 4096, kPages = 4096;  // the system may drop pages in groups of up to 512
  std::string content;
  for (size_t i = 0; i < kPages * kPage; ++i) content += static_cast<char>(i / kPage + i % 7);
  const std::string path = write_file(folder() / "pages", content);
  const int descriptor = ::open(path.c_str(), O_RDONLY);
  struct statfs system;
  ASSERT_EQ(fstatfs(descriptor, &system), 0);
  ASSERT_EQ(fsync(descriptor), 0);  // pages that are not on the disk yet cannot be dropped
  close(descriptor);
  if (system.f_type == TMPFS_MAGIC) GTEST_SKIP() << "SKIPPED: the folder for temporary files is in memory";
  const Result<MappedFile> file = MappedFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(text_of(*file), content);
  ASSERT_EQ(file->resident_bytes(), content.size());
  const auto part = file->bytes().subspan(kPages / 4 * kPage + 1, kPages / 2 * kPage);
  file->drop(part);
  EXPECT_LE(file->resident_bytes(), content.size() - kPages / 4 * kPage);
  EXPECT_GE(file->resident_bytes(), content.size() - part.size());
  file->read_ahead(part);
  const double end = steady_seconds() + 10;
  while (file->resident_bytes() < content.size() && steady_seconds() < end) usleep(1000);
  EXPECT_EQ(file->resident_bytes(), content.size());
  file->drop(part);
  EXPECT_EQ(text_of(*file), content);
  file->drop(file->bytes().subspan(5, 100));  // no whole page
  EXPECT_EQ(file->resident_bytes(), content.size());
}
#endif

TEST(MappedFile, DetectsATruncatedFile) {
  const std::filesystem::path path = folder() / "cut";
  const std::string name = write_file(path, "0123456789");
  const Result<MappedFile> whole = MappedFile::open(name);
  const int descriptor = ::open(name.c_str(), O_RDONLY);
  const Result<MappedFile> part = MappedFile::from_descriptor(descriptor, 2, 5);
  close(descriptor);
  ASSERT_TRUE(whole.ok() && part.ok());
  MappedFile lent = MappedFile::lend("123", 3);
  std::error_code refused;
  std::filesystem::resize_file(path, 7, refused);
  if (refused) GTEST_SKIP() << "the system does not cut a mapped file: " << refused.message();
  const Status status = whole->check_whole("the file");
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_EQ(status.message().rfind("the file became shorter", 0), 0u) << status.message();
  EXPECT_TRUE(part->check_whole("a part").ok());  // its last byte is the file's last
  std::filesystem::resize_file(path, 6);
  EXPECT_FALSE(part->check_whole("a part").ok());
  EXPECT_TRUE(lent.check_whole("memory").ok());
  std::filesystem::resize_file(path, 10);
  EXPECT_TRUE(whole->check_whole("the file").ok());
  std::filesystem::remove(path);  // an unlinked file still exists
  EXPECT_TRUE(whole->check_whole("the file").ok());
}

TEST(MappedFile, OutlivesItsDescriptor) {
  const std::string path = write_file(folder() / "descriptor", "by number");
  const int descriptor = ::open(path.c_str(), O_RDONLY);
  ASSERT_GE(descriptor, 0);
  const Result<MappedFile> file = MappedFile::from_descriptor(descriptor);
  EXPECT_EQ(::close(descriptor), 0);  // the descriptor was still ours to close
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(text_of(*file), "by number");
}

TEST(MappedFile, OpensAnEmptyFile) {
  const Result<MappedFile> file = MappedFile::open(write_file(folder() / "empty", ""));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file->size(), 0u);
  EXPECT_EQ(file->resident_bytes(), 0u);
}

TEST(MappedFile, NamesTheFileInErrors) {
  expect_io_error(MappedFile::open((folder() / "nothing").string()), "nothing");
  expect_io_error(MappedFile::open(folder().string()), "is a directory, not a file");
  expect_io_error(MappedFile::from_descriptor(-1), "file descriptor -1");
#ifndef _WIN32
  const std::string pipe = (folder() / "pipe").string();
  std::filesystem::remove(pipe);
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  // And opening it does not wait for a writer
  expect_io_error(MappedFile::open(pipe), "is not a regular file");
  if (geteuid() == 0) return;  // root may read everything
  const std::string secret = write_file(folder() / "secret", "x");
  std::filesystem::permissions(secret, std::filesystem::perms::none);
  expect_io_error(MappedFile::open(secret), "cannot be opened");
#endif
}

TEST(MappedFile, MapsARangeAtAnyOffset) {
  std::string content;  // several pages of every page size in use, with different contents everywhere
  for (int i = 0; i < 30000; ++i) content += std::to_string(i);
  const std::string path = write_file(folder() / "parts", content);
  const int descriptor = ::open(path.c_str(), O_RDONLY);
  ASSERT_GE(descriptor, 0);
  for (const size_t offset : {0u, 1u, 4095u, 4096u, 4097u, 65536u, 65567u, 130000u})
    for (const size_t size : {1u, 31u, 4096u, 8500u}) {
      SCOPED_TRACE(testing::Message() << size << " bytes from " << offset);
      const Result<MappedFile> file = MappedFile::from_descriptor(descriptor, offset, size);
      ASSERT_TRUE(file.ok()) << file.status().message();
      EXPECT_EQ(text_of(*file), content.substr(offset, size));
#ifdef __linux__
      EXPECT_EQ(file->resident_bytes(), size);
#endif
    }
  const auto none = MappedFile::from_descriptor(descriptor, content.size(), 0);
  ASSERT_TRUE(none.ok()) << none.status().message();
  EXPECT_EQ(none->size(), 0u);
  const auto rest = MappedFile::from_descriptor(descriptor, 5000, UINT64_MAX);
  ASSERT_TRUE(rest.ok()) << rest.status().message();
  EXPECT_EQ(text_of(*rest), content.substr(5000));
  const uint64_t end = content.size();
  for (const auto& [offset, size] : std::vector<std::pair<uint64_t, uint64_t>>{
           {end - 1, 2}, {end + 1, 0}, {0, end + 1}, {1, end}, {UINT64_MAX, 2}, {UINT64_MAX, UINT64_MAX}})
    expect_io_error(MappedFile::from_descriptor(descriptor, offset, size),
                    offset > end ? "is past its end" : "fewer than the");
  EXPECT_EQ(::close(descriptor), 0);
}

TEST(MappedFile, LendTakesNoOwnership) {
  const std::vector<char> memory = {'a', 'b', 'c'};
  {
    const MappedFile file = MappedFile::lend(memory.data(), memory.size());
    EXPECT_EQ(static_cast<const void*>(file.data()), memory.data());
    EXPECT_EQ(text_of(file), "abc");
    EXPECT_EQ(file.resident_bytes(), 0u);
  }
  EXPECT_EQ(memory[2], 'c');
}

TEST(MappedFile, MovesItsMapping) {
  const std::string path = write_file(folder() / "moved", "content");
  Result<MappedFile> opened = MappedFile::open(path);
  ASSERT_TRUE(opened.ok());
  const std::byte* data = opened->data();
  MappedFile first = std::move(*opened);
  EXPECT_EQ(first.data(), data);
  EXPECT_EQ(opened->data(), nullptr);
  MappedFile second = std::move(*MappedFile::open(write_file(folder() / "other", "other")));
  second = std::move(first);
  EXPECT_EQ(text_of(second), "content");
}

#ifdef __linux__
TEST(MappedFile, CountsItsResidentBytes) {
  const std::string path = write_file(folder() / "resident", std::string((20 << 20) + 123, 'x'));
  const Result<MappedFile> file = MappedFile::open(path);
  ASSERT_TRUE(file.ok());
  // The file was just written, so all of it is in the page cache. The last page counts up to the end of the
  // file.
  EXPECT_EQ(file->resident_bytes(), file->size());
}
#endif

}  // namespace
}  // namespace thimble
