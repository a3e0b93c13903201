// Finds out which dispatches of a command buffer must wait for earlier ones, from the bytes that they read
// and write.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace thimble::vulkan {

struct Access {
  const void* buffer;   // identifies the buffer
  uint64_t first, end;  // bytes [first, end)
  bool writes;          // may also read
};

class Hazards {
 public:
  // Adds a dispatch. Returns true if it needs a barrier before it: it accesses bytes that a dispatch since
  // the last barrier wrote, or writes bytes that one read. The caller must then add a barrier for all memory.
  bool add(std::span<const Access> dispatch);

 private:
  std::vector<Access> since_barrier_;
};

}  // namespace thimble::vulkan
