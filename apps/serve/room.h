// Bytes that the server holds for its clients: requests on their way, read, or waiting, answers that are made
// or not taken yet. All of them together have one bound.
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>

namespace app::serve {

// Any thread may take and give back.
class Room {
 public:
  explicit Room(size_t bound) : bound_(bound) {}
  size_t bound() const { return bound_; }
  size_t taken() const { return taken_; }

 private:
  friend class Share;
  const size_t bound_;
  std::atomic<size_t> taken_ = 0;
};

// What one owner has taken of a room, which outlives it; given back at its end.
class Share {
 public:
  explicit Share(Room& room) : room_(&room) {}
  Share(Share&& other) noexcept : room_(other.room_), bytes_(std::exchange(other.bytes_, 0)) {}
  Share& operator=(Share&& other) noexcept {
    std::swap(room_, other.room_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Share() { force(0); }

  size_t bytes() const { return bytes_; }
  size_t bound() const { return room_->bound(); }
  // False, and as before, where more than the bound would be taken. Less is always given.
  bool resize(size_t bytes) {
    const size_t before = std::exchange(bytes_, bytes);
    const size_t taken = room_->taken_ += bytes - before;
    if (bytes <= before || taken <= room_->bound_) return true;
    force(before);
    return false;
  }
  // Without a look at the bound.
  void force(size_t bytes) { room_->taken_ += bytes - std::exchange(bytes_, bytes); }

 private:
  Room* room_;
  size_t bytes_ = 0;
};

}  // namespace app::serve
