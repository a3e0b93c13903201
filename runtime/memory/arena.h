// Places views one after the other in a buffer, or only counts: the planner and the session make the same
// calls.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/backend.h"
#include "base/bits.h"

namespace thimble {

class Arena {
 public:
  // Without a buffer it counts, and the views it gives lie nowhere.
  explicit Arena(uint32_t alignment, Buffer* buffer = nullptr) : alignment_(alignment), buffer_(buffer) {}

  View place(uint64_t bytes) {
    const View view{buffer_, next_, bytes};
    next_ = round_up(next_ + bytes, alignment_);
    size_ = std::max(size_, next_);
    return view;
  }
  // What is placed from here on may lie over what was placed since the mark: their lifetimes do not meet.
  uint64_t mark() const { return next_; }
  void release(uint64_t mark) { next_ = mark; }

  // Bytes that the buffer must have.
  uint64_t size() const { return size_; }

 private:
  uint64_t alignment_, next_ = 0, size_ = 0;
  Buffer* buffer_;
};

}  // namespace thimble
