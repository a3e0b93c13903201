// A mutex that is handed to the thread that waited longest.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace thimble {

// A thread that unlocks a std::mutex and locks it again at once usually gets it before the thread it woke has
// run. A waiting thread can then starve for as long as the other one keeps going.
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

  // lock() in two steps: draw() takes a place in the queue, which must then be waited for.
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
  uint64_t drawn_ = 0, served_ = 0;  // tickets handed out, and tickets whose turn is over
};

}  // namespace thimble
