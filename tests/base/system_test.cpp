// Memory and core counts of the system.
#include "base/system.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

namespace thimble {
namespace {

// The flags of the mapping that contains an address: "VmFlags: rd wr mr mw me ac hg".
std::string flags_at(const std::byte* address) {
  std::ifstream maps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long long first, end;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &first, &end) == 2) {
      const auto at = reinterpret_cast<uintptr_t>(address);
      here = first <= at && at < end;
    }
    if (here && line.starts_with("VmFlags:")) return line + " ";
  }
  return {};
}

bool has_flag(const std::byte* address, const char* flag) {
  return flags_at(address).find(std::string(" ") + flag + " ") != std::string::npos;
}

// Whether the system accepts requests for huge pages and reports them; an emulator may not.
bool has_huge_pages() {
#ifdef MADV_HUGEPAGE
  constexpr size_t kBytes = 4096;
  void* const page = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED || madvise(page, kBytes, MADV_HUGEPAGE) != 0) return false;
  const bool shown = has_flag(static_cast<std::byte*>(page), "hg");
  munmap(page, kBytes);
  return shown;
#else
  return false;
#endif
}

// Files of control groups as the system shows them.
class CgroupFiles {
 public:
  CgroupFiles() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~CgroupFiles() { std::filesystem::remove_all(folder_); }
  CgroupFiles& set(const std::string& name, const std::string& line) {
    std::filesystem::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name) << line << "\n";
    return *this;
  }
  uint32_t cores() const { return cgroup_cores(folder_ / "membership", folder_); }
  uint64_t free_bytes() const { return cgroup_free_bytes(folder_ / "membership", folder_); }

 private:
  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("thimble-cgroup-" + std::to_string(getpid()));
};

TEST(Cgroup, Version2LimitsCoresByTheSmallestQuotaOfAllParents) {
  CgroupFiles files;
  EXPECT_EQ(files.cores(), 0u) << "nothing is told";
  files.set("membership", "0::/a.slice/b");
  EXPECT_EQ(files.cores(), 0u);
  files.set("a.slice/b/cpu.max", "max 100000").set("a.slice/cpu.max", "250000 100000");
  EXPECT_EQ(files.cores(), 3u) << "two and a half cores' worth";
  files.set("a.slice/b/cpu.max", "50000 100000");
  EXPECT_EQ(files.cores(), 1u);
  files.set("membership", "0::/").set("cpu.max", "400000 100000");
  EXPECT_EQ(files.cores(), 4u) << "a container sees its group as the root";
  files.set("cpu.max", "nonsense");
  EXPECT_EQ(files.cores(), 0u);
}

TEST(Cgroup, Version1LimitsCoresByItsQuota) {
  CgroupFiles files;
  files.set("membership", "5:memory:/x\n4:cpu,cpuacct:/docker/1\n0::/");
  files.set("cpu/cpu.cfs_quota_us", "-1").set("cpu/cpu.cfs_period_us", "100000");
  EXPECT_EQ(files.cores(), 0u) << "a quota of -1 is none";
  files.set("cpu/cpu.cfs_quota_us", "150000");
  EXPECT_EQ(files.cores(), 2u) << "the group itself is not mounted here, the root is";
  files.set("cpu/docker/1/cpu.cfs_quota_us", "100000").set("cpu/docker/1/cpu.cfs_period_us", "100000");
  EXPECT_EQ(files.cores(), 1u);
}

TEST(Cgroup, Version2LimitsMemoryByTheLeastOfAllParents) {
  CgroupFiles files;
  EXPECT_EQ(files.free_bytes(), UINT64_MAX) << "nothing is told";
  files.set("membership", "0::/a.slice/b").set("a.slice/b/memory.max", "max");
  files.set("a.slice/b/memory.current", "5000");
  EXPECT_EQ(files.free_bytes(), UINT64_MAX);
  files.set("a.slice/memory.max", "20000").set("a.slice/memory.current", "9000");
  EXPECT_EQ(files.free_bytes(), 11000u);
  files.set("a.slice/memory.stat", "anon 4000\ninactive_file 3000\nfile 5000\nactive_file 2000");
  EXPECT_EQ(files.free_bytes(), 16000u) << "pages of files can be dropped";
  files.set("a.slice/b/memory.max", "6000");
  EXPECT_EQ(files.free_bytes(), 1000u);
  files.set("a.slice/b/memory.current", "7000");
  EXPECT_EQ(files.free_bytes(), 0u);
}

TEST(Cgroup, Version1LimitsMemory) {
  CgroupFiles files;
  files.set("membership", "5:memory:/x\n4:cpu,cpuacct:/y");
  files.set("memory/memory.limit_in_bytes", "9223372036854771712").set("memory/memory.usage_in_bytes", "1");
  EXPECT_EQ(files.free_bytes(), UINT64_MAX);
  files.set("memory/x/memory.limit_in_bytes", "10000").set("memory/x/memory.usage_in_bytes", "9500");
  files.set("memory/x/memory.stat", "inactive_file 1\ntotal_inactive_file 4000\ntotal_active_file 500");
  EXPECT_EQ(files.free_bytes(), 5000u);
}

constexpr uint64_t kHuge = 2 << 20, kPage = 4096;

// "hg" means that huge pages were requested for this mapping.
TEST(Pages, RequestHugePagesIfWholeOnesFit) {
  Pages pages = std::move(*Pages::allocate(3 * kHuge + kPage));
  EXPECT_FALSE(has_flag(pages.data(), "hg"));
  pages.prefer_huge();
  const bool huge = has_huge_pages();
  const uint64_t first = (kHuge - reinterpret_cast<uintptr_t>(pages.data()) % kHuge) % kHuge;
  const uint64_t end = first + (3 * kHuge + kPage - first) / kHuge * kHuge;
  for (uint64_t at = 0; at < 3 * kHuge + kPage; at += kPage)
    ASSERT_EQ(has_flag(pages.data() + at, "hg"), huge && first <= at && at < end) << at;
}

TEST(Pages, RequestNoHugePagesForSmallRanges) {
  Pages pages = std::move(*Pages::allocate(kHuge / 2));
  pages.prefer_huge();
  EXPECT_FALSE(has_flag(pages.data(), "hg"));
}

// A hole would be filled again within seconds if the system could still create huge pages.
TEST(Pages, RequestNoHugePagesAfterAPartialRelease) {
  Pages pages = std::move(*Pages::allocate(4 * kHuge));
  pages.prefer_huge();
  std::fill_n(pages.data(), 4 * kHuge, std::byte{1});
  const uint64_t resident = resident_anonymous_bytes();
  ASSERT_EQ(*pages.release(kPage + 1, 3 * kHuge), 3 * kHuge - kPage);
  if (resident) {
    EXPECT_LT(resident_anonymous_bytes(), resident - 2 * kHuge);
  }
  for (uint64_t at = 0; at < 4 * kHuge; at += kPage) {
    ASSERT_FALSE(has_flag(pages.data() + at, "hg")) << at;
    ASSERT_EQ(pages.data()[at], std::byte(at > kPage && at < kPage + 3 * kHuge ? 0 : 1)) << at;
  }
}

}  // namespace
}  // namespace thimble
