// Queries the machine: clock, cores, processor name and memory; and allocates pages of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace thimble {

// Cores that this process may use, at least 1: those that it may run on, or fewer if a cgroup limits its
// time.
uint32_t core_count();
// The processor time, in cores, that the cgroups of a process allow it, rounded up; 0: no quota, or unknown.
// The arguments are /proc/self/cgroup and /sys/fs/cgroup (version 1, version 2 or both), or files of a test
// that look like them.
uint32_t cgroup_cores(const std::string& membership, const std::string& mount);
// The processor's name for people; "unknown processor" if the system does not report it.
std::string processor_name();

// The bytes that the cgroups of a process still allow it, with pages of files counted as free, because the
// system can drop them; UINT64_MAX: no limit, or unknown. The arguments are as above.
uint64_t cgroup_free_bytes(const std::string& membership, const std::string& mount);

struct MemoryStatus {
  uint64_t total_bytes = 0;  // of the machine
  uint64_t free_bytes = 0;   // available to this process without swapping
};
MemoryStatus memory_status();
// Bytes of private memory of this process that are in use now (RssAnon); 0 if the system does not report it.
uint64_t resident_anonymous_bytes();

// Seconds since a fixed moment; never decreases.
double steady_seconds();

// Wall-clock seconds since 1970 in the time zone of the system.
int64_t wall_clock_seconds();

// Whether an ARM processor has byte dot products (FEAT_DotProd); false on others, and if the system does not
// report it.
bool has_arm_dot_product();

// Whether the system shows a graphics device that drivers could use; true if the system does not report it.
bool has_graphics_device();

// A system library that may be missing, such as "libnvidia-ml.so.1". Once loaded it stays loaded.
class SystemLibrary {
 public:
  explicit SystemLibrary(const char* name);
  explicit operator bool() const { return handle_ != nullptr; }
  // A function of the library by name, or null.
  template <typename Function>
  Function* function(const char* name) const {
    return reinterpret_cast<Function*>(symbol(name));
  }

 private:
  void* symbol(const char* name) const;
  void* handle_;
};

// Zeroed pages allocated directly from the system, so that they can be counted and returned to it.
class Pages {
 public:
  static Result<Pages> allocate(uint64_t bytes);
  Pages() = default;
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;
  ~Pages();

  std::byte* data() const { return data_; }  // page-aligned
  // Asks for huge pages for the part of this memory that whole ones fit into. They reduce page faults, which
  // dominate first writes to a large pool. A touched byte then takes up to 2 MiB instead of 4 KiB. Has no
  // effect if the system has none.
  void prefer_huge();
  // Returns the whole pages in [data() + offset, + bytes) to the system; they read as zeros afterwards. The
  // result is their size in bytes. Unsupported if the system cannot do it. A released part of a huge page no
  // longer belongs to this process, but the system may reuse it only later. No huge pages are created
  // afterwards.
  Result<uint64_t> release(uint64_t offset, uint64_t bytes);

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace thimble
