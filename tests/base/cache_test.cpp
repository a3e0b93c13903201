#include "base/cache.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

namespace thimble {
namespace {

namespace fs = std::filesystem;

class Cache : public ::testing::Test {
 protected:
  void SetUp() override { setenv("XDG_CACHE_HOME", folder_.c_str(), 1); }
  void TearDown() override { fs::remove_all(folder_); }

  const fs::path folder_ = fs::temp_directory_path() / ("thimble-" + std::to_string(std::random_device()()));
  const fs::path file_ = folder_ / "thimble" / "name";
  const std::vector<std::byte> bytes_{std::byte(1), std::byte(2), std::byte(0), std::byte(255)};
};

TEST_F(Cache, ReturnsTheBytesWrittenLast) {
  EXPECT_TRUE(read_cache("name").empty());
  write_cache("name", {});
  EXPECT_TRUE(read_cache("name").empty());
  write_cache("name", bytes_);
  EXPECT_EQ(read_cache("name"), bytes_);
  write_cache("name", {bytes_.data(), 2});
  EXPECT_EQ(read_cache("name").size(), 2u);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "thimble"), fs::directory_iterator()), 1)
      << "nothing but the file itself stays";
}

TEST_F(Cache, ReturnsNothingForADamagedFile) {
  write_cache("name", bytes_);
  const uintmax_t size = fs::file_size(file_);
  for (uintmax_t cut = 0; cut < size; ++cut) {
    write_cache("name", bytes_);
    fs::resize_file(file_, cut);
    EXPECT_TRUE(read_cache("name").empty()) << cut;
  }
  write_cache("name", bytes_);
  std::fstream(file_, std::ios::in | std::ios::out | std::ios::binary).put('x');
  EXPECT_TRUE(read_cache("name").empty());
}

TEST_F(Cache, IgnoresWriteFailures) {
  for (const char* folder : {"/proc/nowhere", "relative", ""}) {
    setenv("XDG_CACHE_HOME", folder, 1);
    setenv("HOME", "/proc/nowhere", 1);
    write_cache("name", bytes_);
    EXPECT_TRUE(read_cache("name").empty()) << folder;
  }
}

TEST_F(Cache, FallsBackToTheHomeFolder) {
  unsetenv("XDG_CACHE_HOME");
  setenv("HOME", folder_.c_str(), 1);
  write_cache("name", bytes_);
  EXPECT_TRUE(fs::exists(folder_ / ".cache" / "thimble" / "name"));
  EXPECT_EQ(read_cache("name"), bytes_);
}

}  // namespace
}  // namespace thimble
