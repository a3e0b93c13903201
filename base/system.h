// What the machine is and has: a clock, cores, processor name, memory, and pages of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace thimble {

// Cores that this process may keep busy, at least 1: those that it may run on, or fewer where a cgroup gives
// it less time.
uint32_t core_count();
// The cores' worth of time that the cgroups of a process leave it, rounded up; 0: no quota, or not told. The
// arguments are /proc/self/cgroup and /sys/fs/cgroup, of version 1 or 2 or both, or a test's files like them.
uint32_t cgroup_cores(const std::string& membership, const std::string& mount);
// The processor's name for people, "unknown processor" where the system does not tell.
std::string processor_name();

struct MemoryStatus {
  uint64_t total_bytes = 0, free_bytes = 0;  // of the machine; free: what can be had without swapping
};
MemoryStatus memory_status();
// Bytes of memory that belong to this process alone and are in use now (RssAnon); 0 where the system does not
// tell.
uint64_t resident_anonymous_bytes();

// Seconds since some fixed moment; never goes back.
double steady_seconds();

// Seconds since 1970 of the clock on the wall: in the time zone that the system is set to.
int64_t wall_clock_seconds();

// Whether an ARM processor multiplies bytes (FEAT_DotProd); false on others, and where the system does not
// tell.
bool has_arm_dot_product();

// Whether the system shows a graphics device that drivers could use; true where it does not tell.
bool has_graphics_device();

// A library of the system that may be missing: "libnvidia-ml.so.1". Once loaded it stays.
class SystemLibrary {
 public:
  explicit SystemLibrary(const char* name);
  explicit operator bool() const { return handle_ != nullptr; }
  // A function of the library by its name, or null.
  template <typename Function>
  Function* function(const char* name) const {
    return reinterpret_cast<Function*>(symbol(name));
  }

 private:
  void* symbol(const char* name) const;
  void* handle_;
};

// Zeroed pages straight from the system, so that they can be counted and go back to it when released.
class Pages {
 public:
  static Result<Pages> allocate(uint64_t bytes);
  Pages() = default;
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;
  ~Pages();

  std::byte* data() const { return data_; }  // page-aligned
  // Asks for huge pages wherever a whole one lies inside, and never beyond: fewer page faults, of which first
  // writes to a large pool consist. A touched byte then takes up to 2 MiB instead of 4 KiB. Where the system
  // has none nothing changes.
  void prefer_huge();
  // Gives the whole pages in [data() + offset, + bytes) back to the system, which shows zeros there
  // afterwards; the bytes of these. Unsupported where the system cannot. What was a part of a huge page is
  // not this process's any more, but the system may take its time to use it again. No further huge pages
  // are made.
  Result<uint64_t> release(uint64_t offset, uint64_t bytes);

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace thimble
