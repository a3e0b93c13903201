// Tells which dispatches of a command buffer have to wait for earlier ones, by the bytes that they read and
// write.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace thimble::vulkan {

struct Access {
  const void* buffer;   // anything that identifies it
  uint64_t first, end;  // bytes [first, end)
  bool writes;          // it may read too
};

class Hazards {
 public:
  // Adds a dispatch. True if a barrier must stand before it: it reads or writes what a dispatch since the
  // last barrier wrote, or writes what one read. The barrier is then taken to be there, for all memory.
  bool add(std::span<const Access> dispatch);

 private:
  std::vector<Access> since_barrier_;
};

}  // namespace thimble::vulkan
