// Tests of memory straight from the system.
#include "base/system.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>

namespace thimble {
namespace {

// What the system notes of the mapping that this address lies in: "VmFlags: rd wr mr mw me ac hg".
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

// Whether the system takes the wish for huge pages, and shows that it did: an emulator may not.
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

constexpr uint64_t kHuge = 2 << 20, kPage = 4096;

// "hg": the system makes huge pages here.
TEST(Pages, AskForHugeOnesWhereTheyLieInside) {
  Pages pages = std::move(*Pages::allocate(3 * kHuge + kPage));
  EXPECT_FALSE(has_flag(pages.data(), "hg"));
  pages.prefer_huge();
  const bool huge = has_huge_pages();
  const uint64_t first = (kHuge - reinterpret_cast<uintptr_t>(pages.data()) % kHuge) % kHuge;
  const uint64_t end = first + (3 * kHuge + kPage - first) / kHuge * kHuge;
  for (uint64_t at = 0; at < 3 * kHuge + kPage; at += kPage)
    ASSERT_EQ(has_flag(pages.data() + at, "hg"), huge && first <= at && at < end) << at;
}

TEST(Pages, TooFewForAHugeOneAskForNone) {
  Pages pages = std::move(*Pages::allocate(kHuge / 2));
  pages.prefer_huge();
  EXPECT_FALSE(has_flag(pages.data(), "hg"));
}

// A hole would be filled again within some seconds of the system's, where it may make huge pages.
TEST(Pages, ThatWereGivenBackInPartAskForNoMoreHugeOnes) {
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
