// An arena places views one after the other in a buffer, or only counts their bytes. The planner and the
// engine make the same calls.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/backend.h"
#include "base/bits.h"

namespace thimble {

class Arena {
 public:
  // Without a buffer, the arena only counts, and its views have no memory.
  explicit Arena(uint32_t alignment, Buffer* buffer = nullptr) : alignment_(alignment), buffer_(buffer) {}

  View place(uint64_t bytes) {
    const View view{buffer_, next_, bytes};
    next_ = round_up(next_ + bytes, alignment_);
    size_ = std::max(size_, next_);
    return view;
  }
  // Views that are placed after release() may overlap views that were placed after mark(), because they are
  // not used at the same time.
  uint64_t mark() const { return next_; }
  void release(uint64_t mark) { next_ = mark; }

  // The size in bytes that the buffer must have.
  uint64_t size() const { return size_; }

 private:
  uint64_t alignment_, next_ = 0, size_ = 0;
  Buffer* buffer_;
};

}  // namespace thimble
