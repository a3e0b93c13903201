// A lock that goes to whoever waited longest.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace thimble {

// A thread that gives a std::mutex up and wants it again at once usually gets it, before the one that it woke
// has run: who waits may wait for as long as the other goes on.
class FairMutex {
 public:
  void lock() { wait(draw()); }
  void unlock() {
    {
      const std::lock_guard lock(mutex_);
      ++served_;
    }
    changed_.notify_all();  // no system call unless someone waits
  }

  // lock() in two steps: a place in the queue, which must be waited for, and waiting for it.
  uint64_t draw() {
    const std::lock_guard lock(mutex_);
    return drawn_++;
  }
  void wait(uint64_t ticket) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return served_ == ticket; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t drawn_ = 0, served_ = 0;  // tickets that were drawn, and whose turn is over
};

}  // namespace thimble
