#include "base/system.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include "base/bits.h"

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
// Must come after windows.h, whose types it uses.
#include <psapi.h>
#else
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#endif
#ifdef __linux__
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace thimble {

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int64_t wall_clock_seconds() {
  const std::time_t now = std::time(nullptr);
  std::tm local = {};
#ifdef _WIN32
  if (localtime_s(&local, &now) != 0) return now;
#else
  if (!localtime_r(&now, &local)) return now;
#endif
  using namespace std::chrono;
  const sys_days day = year{local.tm_year + 1900} / (local.tm_mon + 1) / local.tm_mday;
  return int64_t{day.time_since_epoch().count()} * 86400 + local.tm_hour * 3600 + local.tm_min * 60 +
         local.tm_sec;
}

uint32_t core_count() {
#ifdef __linux__
  // A fixed-size set holds 1024 cores. On a larger machine the call fails, and the count below is used
  // instead.
  cpu_set_t set;
  uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    cores = static_cast<uint32_t>(std::max(1, CPU_COUNT(&set)));
  static const uint32_t quota = cgroup_cores("/proc/self/cgroup", "/sys/fs/cgroup");
  return quota ? std::min(cores, quota) : cores;
#else
  return std::max(1u, std::thread::hardware_concurrency());
#endif
}

namespace {

// The first line of a file, or an empty string.
std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The least number that `of` returns for a group's folder or that of a parent group.
template <typename Number, typename Of>
Number least_of_group(const std::string& mount, std::string group, Number least, const Of& of) {
  for (;;) {
    least = std::min<Number>(least, of(mount + group));
    if (group.empty()) return least;
    group.erase(group.rfind('/'));
  }
}

// Like that, for all groups of a process in version 2, and in version 1 those of a controller.
template <typename Number, typename Of2, typename Of1>
Number least_of_groups(const std::string& membership, const std::string& mount, const std::string& controller,
                       Number least, const Of2& version2, const Of1& version1) {
  std::ifstream groups(membership);
  for (std::string line; std::getline(groups, line);) {  // "4:cpu,cpuacct:/user.slice", "0::/user.slice"
    const size_t names = line.find(':'), path = line.find(":/");
    if (names == line.npos || path == line.npos || path < names) continue;
    const std::string controllers = "," + line.substr(names + 1, std::max(path, names + 1) - names - 1) + ",";
    std::string group = line.substr(path + 1);
    if (group == "/") group.clear();
    // A container may see its own group as the root of the mounted hierarchy, so groups whose folders are
    // missing are skipped.
    if (controllers == ",,")
      least = least_of_group(mount, group, least, version2);
    else if (controllers.find("," + controller + ",") != controllers.npos)
      least = least_of_group(mount + "/" + controller, group, least, version1);
  }
  return least;
}

// The sum of these numbers of a file with lines of a name and a number.
uint64_t sum_of(const std::string& path, std::initializer_list<std::string_view> names) {
  std::ifstream file(path);
  std::string name;
  uint64_t sum = 0, value = 0;
  while (file >> name >> value)
    if (std::find(names.begin(), names.end(), name) != names.end()) sum += value;
  return sum;
}

}  // namespace

uint32_t cgroup_cores(const std::string& membership, const std::string& mount) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  const auto version2 = [&](const std::string& folder) {  // "200000 100000" or "max 100000", in microseconds
    std::istringstream line(first_line(folder + "/cpu.max"));
    double quota = 0, period = 0;
    return line >> quota >> period && quota > 0 && period > 0 ? quota / period : kNone;
  };
  const auto version1 = [&](const std::string& folder) {  // a quota of -1 means none
    const double quota = std::atof(first_line(folder + "/cpu.cfs_quota_us").c_str()),
                 period = std::atof(first_line(folder + "/cpu.cfs_period_us").c_str());
    return quota > 0 && period > 0 ? quota / period : kNone;
  };
  const double least = least_of_groups(membership, mount, "cpu", kNone, version2, version1);
  return least == kNone ? 0 : static_cast<uint32_t>(std::ceil(least));
}

uint64_t cgroup_free_bytes(const std::string& membership, const std::string& mount) {
  const auto free_of = [](uint64_t limit, uint64_t used, uint64_t droppable) {
    used -= std::min(used, droppable);
    return limit - std::min(limit, used);
  };
  const auto number = [](const std::string& path) -> std::optional<uint64_t> {
    std::istringstream line(first_line(path));
    uint64_t value = 0;
    return line >> value ? std::optional(value) : std::nullopt;  // "max" means none
  };
  const auto version2 = [&](const std::string& folder) {
    const auto limit = number(folder + "/memory.max"), used = number(folder + "/memory.current");
    if (!limit || !used) return UINT64_MAX;
    return free_of(*limit, *used, sum_of(folder + "/memory.stat", {"inactive_file", "active_file"}));
  };
  // Without a limit, the file holds a number near that of all addresses.
  const auto version1 = [&](const std::string& folder) {
    const auto limit = number(folder + "/memory.limit_in_bytes"),
               used = number(folder + "/memory.usage_in_bytes");
    if (!limit || !used || *limit >= uint64_t{1} << 60) return UINT64_MAX;
    return free_of(*limit, *used,
                   sum_of(folder + "/memory.stat", {"total_inactive_file", "total_active_file"}));
  };
  return least_of_groups(membership, mount, "memory", UINT64_MAX, version2, version1);
}

#ifdef __linux__
// The text after "key...:" in a file of /proc, or an empty string.
static std::string proc_line(const char* path, const char* key) {
  FILE* file = std::fopen(path, "r");
  if (!file) return {};
  char line[512];
  const char* found = "";
  while (std::fgets(line, sizeof line, file)) {
    const char* colon = std::strchr(line, ':');
    if (std::strncmp(line, key, std::strlen(key)) != 0 || !colon) continue;
    found = colon + 1;
    break;
  }
  std::fclose(file);  // before anything may throw
  const std::string value = found;
  const size_t first = value.find_first_not_of(" \t"), last = value.find_last_not_of(" \n");
  return first == std::string::npos ? std::string() : value.substr(first, last - first + 1);
}

static uint64_t proc_kilobytes(const char* path, const char* key) {
  return std::strtoull(proc_line(path, key).c_str(), nullptr, 10) * 1024;
}
#endif

std::string processor_name() {
#if defined(__x86_64__)
  uint32_t words[12] = {}, unused;
  if (__get_cpuid(0x80000000u, &words[0], &unused, &unused, &unused) && words[0] >= 0x80000004u) {
    for (uint32_t i = 0; i < 3; ++i) {
      uint32_t* w = words + 4 * i;
      __get_cpuid(0x80000002u + i, w, w + 1, w + 2, w + 3);
    }
    std::string name(reinterpret_cast<const char*>(words), sizeof words);
    name.resize(std::strlen(name.c_str()));
    const size_t first = name.find_first_not_of(' '), last = name.find_last_not_of(' ');
    if (first != std::string::npos) return name.substr(first, last - first + 1);
  }
#elif defined(__linux__)
  for (const char* key : {"model name", "Hardware", "Model"})
    if (std::string name = proc_line("/proc/cpuinfo", key); !name.empty()) return name;
#endif
  return "unknown processor";
}

MemoryStatus memory_status() {
#ifdef _WIN32
  MEMORYSTATUSEX status{};
  status.dwLength = sizeof status;
  if (!GlobalMemoryStatusEx(&status)) return {};
  return {status.ullTotalPhys, status.ullAvailPhys};
#elif defined(__linux__)
  return {proc_kilobytes("/proc/meminfo", "MemTotal"),
          std::min(proc_kilobytes("/proc/meminfo", "MemAvailable"),
                   cgroup_free_bytes("/proc/self/cgroup", "/sys/fs/cgroup"))};
#else
  const uint64_t total =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return {total, total};
#endif
}

uint64_t resident_anonymous_bytes() {
#ifdef _WIN32
  PROCESS_MEMORY_COUNTERS counters{};
  counters.cb = sizeof counters;
  return K32GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof counters) ? counters.PagefileUsage
                                                                                  : 0;
#elif defined(__linux__)
  return proc_kilobytes("/proc/self/status", "RssAnon");
#else
  return 0;
#endif
}

bool has_arm_dot_product() {
#if defined(__aarch64__) && defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
  return true;  // all of Apple's ARM computers have it
#else
  return false;
#endif
}

bool has_graphics_device() {
#if defined(__linux__) && !defined(__ANDROID__)
  // Device files of graphics drivers other than /dev/dri: NVIDIA's for cards and for Tegra, Adreno, Mali, and
  // that of WSL.
  for (const char* node : {"/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/kgsl-3d0", "/dev/mali0", "/dev/dxg"})
    if (access(node, F_OK) == 0) return true;
  for (int number = 128; number < 192; ++number) {
    char node[32];
    std::snprintf(node, sizeof node, "/dev/dri/renderD%d", number);
    if (access(node, F_OK) == 0) return true;
  }
  return false;
#else
  return true;
#endif
}

#ifdef _WIN32
SystemLibrary::SystemLibrary(const char* name) : handle_(LoadLibraryA(name)) {}
void* SystemLibrary::symbol(const char* name) const {
  if (!handle_) return nullptr;
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(handle_), name));
}
#else
SystemLibrary::SystemLibrary(const char* name) : handle_(dlopen(name, RTLD_NOW | RTLD_LOCAL)) {}
void* SystemLibrary::symbol(const char* name) const { return handle_ ? dlsym(handle_, name) : nullptr; }
#endif

Result<Pages> Pages::allocate(uint64_t bytes) {
  Pages pages;
  pages.bytes_ = round_up(std::max<uint64_t>(bytes, 1), 4096);
  void* data = nullptr;
  if (bytes <= SIZE_MAX / 2) {
#ifdef _WIN32
    data = VirtualAlloc(nullptr, pages.bytes_, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
#else
    data = mmap(nullptr, pages.bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) data = nullptr;
#endif
  }
  if (!data)
    return error(Code::kOutOfMemory, "the system has no %" PRIu64 " bytes of memory left; use a smaller pool",
                 bytes);
  pages.data_ = static_cast<std::byte*>(data);
  return pages;
}

void Pages::prefer_huge() {
#ifdef MADV_HUGEPAGE
  constexpr uint64_t kHuge = 2 << 20;
  const auto at = reinterpret_cast<uintptr_t>(data_);
  const uint64_t first = round_up(at, kHuge) - at, end = (at + bytes_) / kHuge * kHuge;
  if (end > at + first) static_cast<void>(madvise(data_ + first, end - at - first, MADV_HUGEPAGE));
#endif
}

Result<uint64_t> Pages::release(uint64_t offset, uint64_t bytes) {
#ifdef _WIN32
  static_cast<void>(offset);
  static_cast<void>(bytes);
  return error(Code::kUnsupported,
               "memory cannot be given back in parts on Windows; create a smaller session");
#else
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t first = round_up(offset, page), end = (offset + bytes) / page * page;
  if (end <= first) return uint64_t{0};
#ifdef MADV_NOHUGEPAGE
  // Otherwise the system would in time turn the remaining pages into huge pages and so fill the holes again.
  static_cast<void>(madvise(data_, bytes_, MADV_NOHUGEPAGE));
#endif
  // Some pages, such as locked ones, cannot be released; they stay.
  return madvise(data_ + first, end - first, MADV_DONTNEED) == 0 ? end - first : 0;
#endif
}

Pages::Pages(Pages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Pages::~Pages() {
  if (!data_) return;
#ifdef _WIN32
  VirtualFree(data_, 0, MEM_RELEASE);
#else
  munmap(data_, bytes_);
#endif
}

}  // namespace thimble
